"""Parse a request: method, path, query and headers. Pure.

In: the parts of an HTTP request. Out: a Target (kind, namespace, name, subresource) and its
options, or ApiFailure 400, 404 or 422. Follows
https://kubernetes.io/docs/reference/using-api/api-concepts/ (resource URIs, query parameters, Table
format).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from fairlead.kube.rules.causes import Object, forbidden, required
from fairlead.lab.apiserver.definitions import Kinds
from fairlead.lab.apiserver.failure import (
    bad_request,
    path_not_found,
    rejected,
    subresource_not_found,
)
from fairlead.lab.apiserver.kinds import NAMESPACES, PODS, Kind
from fairlead.lab.apiserver.openapi_protobuf import ACCEPTED as OPENAPI_PROTOBUF
from fairlead.lab.apiserver.writes import Deletion, Write

Query = Mapping[str, str]

BINDING = "binding"
"""The subresource of a Pod that binds it to a node."""

_TRUE = ("true", "1", "True")


class Target(msgspec.Struct, frozen=True, eq=False):
    """What a path names: a collection (no `name`), an object, or a subresource. An empty
    `namespace` means all namespaces."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def read_target(path: str, kinds: Kinds) -> Target:
    """Return the target of a path. Raise ApiFailure 404 if nothing is served under it."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group_version, rest = parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group_version, rest = f"{parts[1]}/{parts[2]}", parts[3:]
    else:
        raise path_not_found()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and (rest[2] != "status" or len(rest) > 3):
        namespace, rest = rest[1], rest[2:]
    kind = kinds.find(group_version, rest[0])
    if kind is None or (namespace and not kind.namespaced) or len(rest) > 3:
        raise path_not_found()
    name, subresource = (*rest[1:], "", "")[:2]
    if (
        subresource
        and not (subresource == "status" and kind.has_status)
        and not (subresource == BINDING and kind is PODS)
    ):
        raise subresource_not_found(kind, subresource)
    if name and kind.namespaced and not namespace:
        raise path_not_found()
    return Target(kind, namespace if kind is not NAMESPACES else "", name, subresource)


def read_write(query: Query, user_agent: str, subresource: str) -> Write:
    """Return the options of a create, update or patch. The default of fieldManager is the first
    word of the User-Agent."""
    manager = query.get("fieldManager") or user_agent.partition("/")[0] or "unknown"
    return Write(manager[:128], subresource, read_dry_run(query), query.get("force") in _TRUE)


def read_dry_run(query: Query) -> bool:
    value = query.get("dryRun")
    if value not in (None, "", "All"):
        raise rejected(
            "PatchOptions",
            "meta.k8s.io",
            "",
            [forbidden("dryRun", f"unsupported value {value!r}, must be All")],
        )
    return value == "All"


def check_apply(query: Query) -> None:
    if not query.get("fieldManager"):
        raise rejected(
            "PatchOptions",
            "meta.k8s.io",
            "",
            [required("fieldManager", "is required for apply patch")],
        )


def read_deletion(query: Query, body: Any) -> Deletion:
    """Return the options of a delete, from the body (DeleteOptions) or the query; the body takes
    precedence."""
    options: Object = body if isinstance(body, dict) else {}
    preconditions = options.get("preconditions") or {}
    grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    return Deletion(
        read_number(str(grace), "gracePeriodSeconds") if grace is not None else None,
        preconditions.get("uid") or "",
        preconditions.get("resourceVersion") or "",
        read_dry_run(query) or options.get("dryRun") == ["All"],
    )


def read_number(text: str, parameter: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise bad_request(
            f'invalid value "{text}" for parameter {parameter}: must be a number'
        ) from error


class ListOptions(msgspec.Struct, frozen=True):
    """The options of a list or watch. `version` None: not set by the client. `timeout_s` None: the
    server chooses."""

    labels: str = ""
    fields: str = ""
    limit: int = 0
    continue_token: str = ""
    version: int | None = None
    version_match: str = ""
    watch: bool = False
    bookmarks: bool = False
    initial_events: bool = False
    timeout_s: float | None = None


def read_list_options(query: Query) -> ListOptions:
    """Return the options of a list or watch. Raise ApiFailure 400 or 422 if they are invalid or
    contradictory."""
    version = query.get("resourceVersion", "")
    if version and not version.isdigit():
        raise rejected(
            "ListOptions",
            "meta.k8s.io",
            "",
            [forbidden("resourceVersion", f"invalid resource version {version!r}: not a number")],
        )
    timeout = query.get("timeoutSeconds")
    options = ListOptions(
        labels=query.get("labelSelector", ""),
        fields=query.get("fieldSelector", ""),
        limit=read_number(query.get("limit") or "0", "limit"),
        continue_token=query.get("continue", ""),
        version=int(version) if version else None,
        version_match=query.get("resourceVersionMatch", ""),
        watch=query.get("watch") in _TRUE,
        bookmarks=query.get("allowWatchBookmarks") in _TRUE,
        initial_events=query.get("sendInitialEvents") in _TRUE,
        timeout_s=float(read_number(timeout, "timeoutSeconds")) if timeout else None,
    )
    _check(options, "sendInitialEvents" in query)
    return options


def _check(options: ListOptions, initial_events_given: bool) -> None:
    causes = []
    match = options.version_match
    if options.watch and initial_events_given and match != "NotOlderThan":
        causes.append(
            forbidden(
                "resourceVersionMatch",
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            )
        )
    if initial_events_given and not options.watch:
        causes.append(forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"))
    if options.watch and match and not initial_events_given:
        causes.append(
            forbidden(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            )
        )
    if not options.watch and match:
        if options.version is None:
            causes.append(
                forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden unless resourceVersion is provided",
                )
            )
        if options.continue_token:
            causes.append(
                forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden when continue is provided",
                )
            )
        if match not in ("Exact", "NotOlderThan"):
            causes.append(forbidden("resourceVersionMatch", f"unknown value {match!r}"))
    if causes:
        raise rejected("ListOptions", "meta.k8s.io", "", causes)


def wants_table(accept: str) -> bool:
    """Return whether the client prefers a Table to the objects, as kubectl does for `get`."""
    first = accept.partition(",")[0].replace(" ", "")
    return "as=Table" in first and "g=meta.k8s.io" in first


def prefers_protobuf(accept: str) -> bool:
    """Return whether the client prefers the OpenAPI document in protobuf to JSON."""
    first = accept.partition(",")[0].partition(";")[0].strip()
    return first in OPENAPI_PROTOBUF
