"""The options of a write, and the parts of a client's object that take effect. Pure; no argument is
modified.

In: an object as a client sent it, and the object that it replaces. Out: the requested state, with
the fields that only the server sets restored. Follows the generic strategies of the API server
(registry/rest) and the fields that each subresource may write.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.kube.rules.types import without_nulls
from fairlead.lab.apiserver.failure import bad_request
from fairlead.lab.apiserver.kinds import NODES, Kind

_KEPT_METADATA: Final = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
)
_NEVER_GIVEN: Final = (
    "resourceVersion",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
    "namespace",
)


class Write(msgspec.Struct, frozen=True):
    """The options of a write: field manager, subresource, `dry_run` (nothing is stored), `force`
    (apply)."""

    manager: str = "unknown"
    subresource: str = ""
    dry_run: bool = False
    force: bool = False


class Deletion(msgspec.Struct, frozen=True):
    """The options of a delete. `grace_period_s` applies to pods only; empty preconditions always
    hold."""

    grace_period_s: int | None = None
    uid: str = ""
    resource_version: str = ""
    dry_run: bool = False


def given_metadata(metadata: Mapping[str, Any]) -> Object:
    """Return the metadata of a new object that a client may choose."""
    return {
        name: value
        for name, value in metadata.items()
        if name not in _NEVER_GIVEN and value not in (None, {}, [])
    }


def next_state(kind: Kind, old: Object, wanted: Object, subresource: str) -> Object:
    """Return `wanted` with the fields that a client cannot set taken from `old`. A write of the
    status keeps everything but status and metadata."""
    metadata = {
        name: value
        for name, value in (wanted.get("metadata") or {}).items()
        if name not in _KEPT_METADATA
    }
    metadata |= {name: old["metadata"][name] for name in _KEPT_METADATA if name in old["metadata"]}
    metadata |= {
        "name": old["metadata"]["name"],
        "resourceVersion": old["metadata"]["resourceVersion"],
    }
    metadata = {name: value for name, value in metadata.items() if value not in (None, {}, [])}
    if kind.namespaced:
        metadata["namespace"] = old["metadata"]["namespace"]
    if subresource and kind.custom is not None:
        # The status subresource of a custom resource writes no metadata.
        metadata = old["metadata"] | {
            name: metadata[name] for name in ("managedFields",) if name in metadata
        }
    if subresource:
        return old | {"metadata": metadata, "status": wanted.get("status") or {}}
    obj = wanted | {"apiVersion": kind.group_version, "kind": kind.kind, "metadata": metadata}
    if kind.has_status:
        obj.pop("status", None)
        if "status" in old:
            obj["status"] = old["status"]
    return obj


def desired(obj: Object) -> Object:
    """Return the part of the object whose changes `metadata.generation` counts."""
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def applicable(kind: Kind, name: str, wanted: Object, subresource: str) -> Object:
    """Return the part of an applied object that takes effect: no nulls; through the status
    subresource only the status, otherwise everything but the status.

    Raise ApiFailure 400 if the object is not the one that the URL names.
    """
    metadata: Mapping[str, Any] = wanted.get("metadata") or {}
    if metadata.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    check_name(metadata, name)
    if wanted.get("kind") != kind.kind or wanted.get("apiVersion") != kind.group_version:
        version = str(wanted.get("apiVersion", ""))
        group_version = version if "/" in version else f"/{version}"
        raise bad_request(f"invalid object type: {group_version}, Kind={wanted.get('kind', '')}")
    cleaned: Object = without_nulls(wanted)
    cleaned["metadata"] = cleaned.get("metadata", {}) | {"name": name}
    if subresource:
        return {
            field: value
            for field, value in cleaned.items()
            if field in ("apiVersion", "kind", "metadata", "status")
        }
    if kind.has_status and kind is not NODES:
        cleaned.pop("status", None)
    return cleaned


def check_name(metadata: Mapping[str, Any], name: str) -> None:
    given = metadata.get("name") or name
    if given != name:
        raise bad_request(
            f"the name of the object ({given}) does not match the name on the URL ({name})"
        )


def check_namespace(metadata: Mapping[str, Any], namespace: str) -> None:
    if (metadata.get("namespace") or namespace) != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )


def grace_period_s(pod: Object, requested_s: int | None) -> int:
    """Return how long a pod may take to stop. A pod that never ran, or has ended, needs no time."""
    if not pod["spec"].get("nodeName") or (pod.get("status") or {}).get("phase") in (
        "Succeeded",
        "Failed",
    ):
        return 0
    if requested_s is not None:
        return max(requested_s, 0)
    return int(pod["spec"].get("terminationGracePeriodSeconds", 30))
