"""Route HTTP requests to the verbs of the registry, and write the responses.

In: requests. Out: responses; every error is a Status object. Each request is logged, and faults
apply to it. Follows https://kubernetes.io/docs/reference/using-api/api-concepts/ (verbs, media
types, dry run, field validation).
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec
import yaml
from aiohttp import web

from fairlead.errors import Refused, plain
from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver import discovery, failure, openapi_protobuf, protobuf
from fairlead.lab.apiserver.failure import ApiFailure
from fairlead.lab.apiserver.faults import Fault, Faults, Request, RequestLog, read_fault
from fairlead.lab.apiserver.kinds import ENDPOINTS, NAMESPACES, PODS, SERVICES, Kind
from fairlead.lab.apiserver.listing import in_scope, list_page, select
from fairlead.lab.apiserver.registry import (
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    Registry,
    utc_now,
)
from fairlead.lab.apiserver.request import (
    BINDING,
    ListOptions,
    Target,
    check_apply,
    prefers_protobuf,
    read_deletion,
    read_list_options,
    read_target,
    read_write,
    wants_table,
)
from fairlead.lab.apiserver.store import Stored
from fairlead.lab.apiserver.streaming import Stream
from fairlead.lab.apiserver.table import table
from fairlead.lab.apiserver.watching import Printer, watch
from fairlead.lab.apiserver.wire import unknown_fields

APPLY_PATCH: Final = "application/apply-patch+yaml"
_PATCHES: Final = (JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH, APPLY_PATCH)
_BODIES: Final = (
    *_PATCHES,
    "application/json",
    "application/yaml",
    "application/octet-stream",
    protobuf.MEDIA_TYPE,
)
_ADVERTISED_BODIES: Final = ("application/json", "application/yaml", protobuf.MEDIA_TYPE)
_ENDPOINTS_WARNING: Final = (
    '299 - "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"'
)
_RETURNED_WHEN_DELETED: Final = (SERVICES, PODS, NAMESPACES)

Headers = dict[str, str]


class Routes:
    """The request handler. `stopping` ends requests that wait; `refuse_for(seconds)` makes the
    server refuse connections."""

    def __init__(
        self,
        registry: Registry,
        faults: Faults,
        requests: RequestLog,
        stopping: asyncio.Event,
        refuse_for: Callable[[float], None],
        *,
        bookmark_interval_s: float,
    ) -> None:
        self._registry = registry
        self._store = registry.store
        self._faults = faults
        self._requests = requests
        self._stopping = stopping
        self._refuse_for = refuse_for
        self._bookmark_interval_s = bookmark_interval_s

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            if http.path.startswith("/_"):
                return await self._control(http)
            request = Request(
                http.method,
                http.path,
                http.rel_url.raw_query_string,
                http.headers.get("User-Agent", ""),
            )
            self._requests.add(request)
            fault = self._faults.at_start(request)
            return await (
                self._serve(http, request) if fault is None else self._fail(http, request, fault)
            )
        except ApiFailure as refusal:
            return _failed(refusal)
        except Refused as refusal:
            return _failed(failure.bad_request(str(refusal)))

    async def _fail(
        self, http: web.BaseRequest, request: Request, fault: Fault
    ) -> web.StreamResponse:
        """Execute a fault that applies at the start of a request."""
        if fault.action == "status":
            raise fault.failure()
        if fault.action == "stall":
            await self._stall(fault.stall_s)
        answer = (
            web.Response(status=500)
            if fault.action == "reset"
            else await self._serve(http, request)
        )
        if fault.action != "stall" and http.transport is not None:
            http.transport.abort()
        return answer

    async def _stall(self, duration_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._stopping.wait()

    async def _serve(self, http: web.BaseRequest, request: Request) -> web.StreamResponse:
        if http.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        found = discovery.document(http.path, self._registry.kinds.served)
        if found is not None:
            return _document(http, found)
        target = read_target(http.path, self._registry.kinds)
        answer = await (
            self._object(http, target) if target.name else self._collection(http, request, target)
        )
        if target.kind is ENDPOINTS and not answer.prepared:
            answer.headers.add("Warning", _ENDPOINTS_WARNING)
        return answer

    async def _collection(
        self, http: web.BaseRequest, request: Request, target: Target
    ) -> web.StreamResponse:
        match http.method:
            case "GET":
                options = read_list_options(http.query)
                if options.watch:
                    printer = _printer(http, target.kind)
                    lines = watch(
                        self._store,
                        target,
                        options,
                        printer,
                        bookmark_interval_s=self._bookmark_interval_s,
                    )
                    stream = Stream(http, request, self._faults, self._stall)
                    return await stream.send(lines)
                return self._list(http, target, options)
            case "POST":
                body, headers = await _read_object(http, target.kind)
                write = read_write(http.query, http.headers.get("User-Agent", ""), "")
                created = self._registry.create(target.kind, target.namespace, body, write)
                return _one(http, target.kind, created, 201, headers)
            case "DELETE":
                return await self._delete_collection(http, target)
            case _:
                raise failure.method_not_allowed()

    def _list(self, http: web.BaseRequest, target: Target, options: ListOptions) -> web.Response:
        page = list_page(self._store, target, options)
        kind = target.kind
        if wants_table(http.headers.get("Accept", "")):
            include = http.query.get("includeObject", "Metadata")
            return _json(
                msgspec.json.encode(
                    table(
                        kind,
                        (item.object for item in page.items),
                        page.metadata,
                        utc_now(),
                        include,
                    )
                )
            )
        head = {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.group_version,
            "metadata": page.metadata,
        }
        return _json(_whole_list(head, page.items))

    async def _delete_collection(self, http: web.BaseRequest, target: Target) -> web.Response:
        deletion = read_deletion(http.query, await _read_body(http))
        options = read_list_options(http.query)
        selection = select(target, options)
        present = [
            item for item in self._store.all_of(target.kind) if in_scope(target, selection, item)
        ]
        metadata = {"resourceVersion": str(self._store.version)}
        for stored in present:
            self._registry.delete(target.kind, *stored.key, deletion)
        head = {
            "kind": f"{target.kind.kind}List",
            "apiVersion": target.kind.group_version,
            "metadata": metadata,
        }
        return _json(_whole_list(head, present))

    async def _object(self, http: web.BaseRequest, target: Target) -> web.Response:
        kind = target.kind
        if target.subresource == BINDING:
            return await self._bind(http, target)
        match http.method:
            case "GET":
                return _one(
                    http, kind, self._registry.get(kind, target.namespace, target.name), 200, {}
                )
            case "PUT":
                body, headers = await _read_object(http, kind)
                write = read_write(
                    http.query, http.headers.get("User-Agent", ""), target.subresource
                )
                existed = self._store.get(kind, target.namespace, target.name) is not None
                updated = self._registry.update(kind, target.namespace, target.name, body, write)
                return _one(http, kind, updated, 200 if existed else 201, headers)
            case "PATCH":
                return await self._patch(http, target)
            case "DELETE" if not target.subresource:
                deletion = read_deletion(http.query, await _read_body(http))
                deleted, gone = self._registry.delete(kind, target.namespace, target.name, deletion)
                if not gone or kind in _RETURNED_WHEN_DELETED:
                    return _one(http, kind, deleted, 200, {})
                details = {
                    "name": target.name,
                    "kind": kind.plural,
                    "uid": deleted.object["metadata"]["uid"],
                }
                details |= {"group": kind.group} if kind.group else {}
                return _json(msgspec.json.encode(_success(details)))
            case _:
                raise failure.method_not_allowed()

    async def _bind(self, http: web.BaseRequest, target: Target) -> web.Response:
        if http.method != "POST":
            raise failure.method_not_allowed()
        body = await _read_body(http)
        if not isinstance(body, dict):
            raise failure.bad_request("the binding is not an object")
        self._registry.bind(target.namespace, target.name, body)
        return _json(msgspec.json.encode(_success({}) | {"code": 201}), 201)

    async def _patch(self, http: web.BaseRequest, target: Target) -> web.Response:
        kind = target.kind
        media_type = http.content_type
        if media_type not in _PATCHES:
            raise failure.unsupported_patch(_PATCHES)
        body = await _read_body(http)
        write = read_write(http.query, http.headers.get("User-Agent", ""), target.subresource)
        headers: Headers = {}
        existed = True
        if media_type == APPLY_PATCH:
            check_apply(http.query)
            if not isinstance(body, dict):
                raise failure.bad_request("the applied document is not an object")
            headers = _check_fields(http, kind, body)
            existed = self._store.get(kind, target.namespace, target.name) is not None
            patched = self._registry.apply(kind, target.namespace, target.name, body, write)
        else:
            if isinstance(body, dict) and media_type == MERGE_PATCH:
                self._registry.get(kind, target.namespace, target.name)
                headers = _check_fields(http, kind, body)
            patched = self._registry.patch(
                kind, target.namespace, target.name, media_type, body, write
            )
        return _one(http, kind, patched, 200 if existed else 201, headers)

    async def _control(self, http: web.BaseRequest) -> web.Response:
        """Serve the paths outside of the Kubernetes API: faults and the request log."""
        match http.method, http.path:
            case "POST", "/_faults":
                body = await _read_body(http)
                for document in body if isinstance(body, list) else [body]:
                    self._add_fault(document)
            case "DELETE", "/_faults":
                self._faults.clear()
            case "GET", "/_faults":
                return _json(msgspec.json.encode(list(self._faults)))
            case "GET", "/_requests":
                return _json(msgspec.json.encode([request._asdict() for request in self._requests]))
            case "DELETE", "/_requests":
                self._requests.clear()
            case _:
                raise failure.path_not_found()
        return _json(b"{}")

    def _add_fault(self, document: Any) -> None:
        """Add a fault that waits for a request, or execute one of the two immediate ones: `compact`
        and `refuse`."""
        action = document.get("action") if isinstance(document, dict) else None
        if action == "compact":
            self._store.compact()
        elif action == "refuse":
            self._refuse_for(float(document.get("refuse_s", 1.0)))
        else:
            self._faults.add(read_fault(document))


def _json(body: bytes, status: int = 200, headers: Headers | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _document(http: web.BaseRequest, document: Object) -> web.Response:
    """Return a discovery document. OpenAPI 2.0 is sent in protobuf to clients that request it,
    because they accept nothing else."""
    accepted = http.headers.get("Accept", "")
    if "swagger" in document and prefers_protobuf(accepted):
        return web.Response(
            body=openapi_protobuf.encode(document),
            headers={"Content-Type": openapi_protobuf.MEDIA_TYPE},
        )
    return _json(msgspec.json.encode(document))


def _whole_list(head: Object, items: Iterable[Stored]) -> bytes:
    return (
        msgspec.json.encode(head)[:-1]
        + b',"items":['
        + b",".join(item.list_item for item in items)
        + b"]}"
    )


def _failed(refusal: ApiFailure) -> web.Response:
    retry = (refusal.details or {}).get("retryAfterSeconds")
    headers = {"Retry-After": str(retry)} if retry is not None else {}
    return _json(msgspec.json.encode(refusal.status()), refusal.code, headers)


def _success(details: Object) -> Object:
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return status | ({"details": details} if details else {})


def _one(
    http: web.BaseRequest, kind: Kind, stored: Stored, status: int, headers: Headers
) -> web.Response:
    if wants_table(http.headers.get("Accept", "")):
        include = http.query.get("includeObject", "Metadata")
        metadata = {"resourceVersion": stored.object["metadata"].get("resourceVersion", "")}
        return _json(
            msgspec.json.encode(table(kind, [stored.object], metadata, utc_now(), include)),
            status,
            headers,
        )
    return _json(stored.encoded, status, headers)


def _printer(http: web.BaseRequest, kind: Kind) -> Printer:
    as_table = wants_table(http.headers.get("Accept", ""))
    return Printer(kind, utc_now, as_table, http.query.get("includeObject", "Metadata"))


async def _read_body(http: web.BaseRequest) -> Any:
    """Return the decoded body, or None if it is empty. Raise ApiFailure 400 or 415."""
    data = await http.read()
    if not data:
        return None
    if http.content_type == protobuf.MEDIA_TYPE:
        return protobuf.decode(data)
    if http.content_type not in _BODIES:
        raise failure.unsupported_media_type(_ADVERTISED_BODIES)
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        if "yaml" not in http.content_type:
            raise failure.bad_request(f"error decoding the body: {plain(error)}") from error
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise failure.bad_request(f"error decoding YAML: {plain(error)}") from error


async def _read_object(http: web.BaseRequest, kind: Kind) -> tuple[Object, Headers]:
    """Return the object in the body, and the warnings about it. Raise ApiFailure if it is of
    another kind."""
    body = await _read_body(http)
    if not isinstance(body, dict):
        raise failure.bad_request("the body is not an object")
    given = (body.get("apiVersion") or kind.group_version, body.get("kind") or kind.kind)
    if given != (kind.group_version, kind.kind):
        raise failure.bad_request(
            f'{given[1]} in version "{given[0]}" cannot be handled as a {kind.kind}: '
            "converting is not supported"
        )
    return body, _check_fields(http, kind, body)


def _check_fields(http: web.BaseRequest, kind: Kind, body: Object) -> Headers:
    """Reject (Strict) or report (Warn) fields that the kind does not have and that are dropped."""
    mode = http.query.get("fieldValidation", "Warn")
    unknown = unknown_fields(kind, body) if mode != "Ignore" else []
    if not unknown:
        return {}
    problems = ", ".join(f'unknown field "{path}"' for path in unknown)
    if mode == "Strict":
        message = (
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
            f"strict decoding error: {problems}"
        )
        raise failure.bad_request(message)
    return {"Warning": '299 - "' + problems.replace('"', '\\"') + '"'}
