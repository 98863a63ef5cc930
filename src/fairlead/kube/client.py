"""A client for the Kubernetes API: typed reads, server-side apply, watches.

In: an `Access`, `Resource`s, keys, bodies. Out: the frozen Structs of `kube.objects`, or an error
of `fairlead.errors`. Invariant: a written object is exactly the given body, with apiVersion and
kind from the `Resource` and the identity from the key. Fairlead has its own client for two reasons:
decoding only the fields that are read takes a fraction of the CPU and memory of general clients
(`make bench` measures it), and one dependency (aiohttp) serves as client and server. Follows the
Kubernetes API concepts: resource paths, chunked lists, watches, KEP-555 (server-side apply)."""

import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Generic, Self

import msgspec

from fairlead.kube.access import Access
from fairlead.kube.answers import RefusedByServer, ServerUnavailable
from fairlead.kube.connection import Body, Connection
from fairlead.kube.objects import ObjectT, Resource
from fairlead.kube.watch_events import Item, Unreadable, key_of, read_item
from fairlead.mistakes import explain

APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

PAGE_SIZE = 500


class ListMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class RawPage(msgspec.Struct, frozen=True):
    """One page of a list, with its objects not yet decoded."""

    metadata: ListMeta = ListMeta()
    items: tuple[msgspec.Raw, ...] | None = ()


RAW_PAGE = msgspec.json.Decoder(RawPage)


class Page(msgspec.Struct, Generic[ObjectT], frozen=True):
    """One page of a list, with its objects."""

    metadata: ListMeta = ListMeta()
    items: tuple[ObjectT, ...] | None = ()


@functools.cache
def page_decoder(type_: type[ObjectT]) -> msgspec.json.Decoder[Page[ObjectT]]:
    """Return the decoder for pages of objects of one type."""
    return msgspec.json.Decoder(Page[type_])  # type: ignore[valid-type]


@functools.cache
def decoder(type_: type[ObjectT]) -> msgspec.json.Decoder[ObjectT]:
    """Return the decoder for one type, cached: creating a decoder costs far more than using it."""
    return msgspec.json.Decoder(type_)


class Client:
    """All requests that Fairlead sends to one API server. Use it as an async context manager.

    `timeout_s` is the deadline of each call; a stream has its own. Every method raises Refused
    (`NotFound`, `RefusedByServer`), Conflict or Unavailable (`ServerUnavailable`), whose message
    describes the request."""

    def __init__(self, access: Access, *, timeout_s: float = 15.0) -> None:
        self.access = access
        self._connection = Connection(access, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        await self._connection.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._connection.__aexit__(kind, problem, trace)

    @property
    def answered_s(self) -> float:
        """The time of the API server's last response, on the monotonic clock; see
        `Connection.answered_s`."""
        return self._connection.answered_s

    async def get(self, resource: Resource[ObjectT], key: tuple[str, str]) -> ObjectT:
        """Return the object `(namespace, name)` as it is now."""
        return self._read(resource, await self._connection.request("GET", resource.path(*key)))

    async def page(
        self,
        resource: Resource[Any],
        *,
        namespace: str = "",
        label_selector: str = "",
        limit: int = PAGE_SIZE,
        continues: str = "",
    ) -> RawPage:
        """Return one page of a list, its objects not yet decoded.

        `limit`: objects per page; 0: the whole list. `continues`: the continue token of the
        previous page."""
        body = await self._page(resource, namespace, label_selector, limit, continues)
        return self._raw_page(resource, namespace, body)

    async def read_page(
        self,
        resource: Resource[ObjectT],
        *,
        namespace: str = "",
        label_selector: str = "",
        limit: int = PAGE_SIZE,
        continues: str = "",
    ) -> tuple[ListMeta, list[Item[ObjectT] | Unreadable]]:
        """Return one page of a list, with its objects decoded.

        All objects are decoded in one call, which takes half the time of decoding each one
        separately. Only a page with an object that cannot be decoded is decoded object by
        object."""
        body = await self._page(resource, namespace, label_selector, limit, continues)
        try:
            page = page_decoder(resource.type).decode(body)
        except msgspec.DecodeError:
            raw = self._raw_page(resource, namespace, body)
            return raw.metadata, [
                read_item(decoder(resource.type), data) for data in raw.items or ()
            ]
        read = ((each.metadata, each) for each in page.items or ())
        return page.metadata, [
            Item(key_of(metadata), metadata.resource_version, each) for metadata, each in read
        ]

    async def _page(
        self,
        resource: Resource[Any],
        namespace: str,
        label_selector: str,
        limit: int,
        continues: str,
    ) -> bytes:
        parameters = {"limit": str(limit)} if limit else {}
        if label_selector:
            parameters["labelSelector"] = label_selector
        if continues:
            parameters["continue"] = continues
        return await self._connection.request(
            "GET", resource.path(namespace), parameters=parameters
        )

    def _raw_page(self, resource: Resource[Any], namespace: str, body: bytes) -> RawPage:
        try:
            return RAW_PAGE.decode(body)
        except msgspec.DecodeError as problem:
            what = (
                f"GET {self.access.server}{resource.path(namespace)} was answered with "
                f"something that is not a list: {explain(problem, RawPage)}"
            )
            raise ServerUnavailable(what) from None

    async def create(
        self, resource: Resource[ObjectT], object_: Body, *, namespace: str = ""
    ) -> ObjectT:
        """Create an object. Raise Conflict if the name is taken.

        The object is created in the namespace of its metadata, unless `namespace` is given."""
        body = msgspec.to_builtins(object_)
        body |= {"apiVersion": resource.group_version, "kind": resource.kind}
        namespace = namespace or body.get("metadata", {}).get("namespace", "")
        return self._read(
            resource, await self._connection.request("POST", resource.path(namespace), body=body)
        )

    async def replace(
        self,
        resource: Resource[ObjectT],
        key: tuple[str, str],
        object_: Body,
        *,
        subresource: str | None = None,
    ) -> ObjectT:
        """Replace an existing object. Raise Conflict if it is no longer at the resourceVersion in
        the metadata."""
        body = msgspec.to_builtins(object_) | {
            "apiVersion": resource.group_version,
            "kind": resource.kind,
        }
        return self._read(
            resource,
            await self._connection.request(
                "PUT", object_path(resource, key, subresource), body=body
            ),
        )

    async def apply(
        self,
        resource: Resource[ObjectT],
        key: tuple[str, str],
        body: Mapping[str, object],
        *,
        field_manager: str,
        subresource: str | None = None,
        force: bool = False,
    ) -> ObjectT:
        """Apply an object (server-side apply).

        `body` holds exactly the fields that `field_manager` sets; fields that it set before and
        that are missing now are removed. The identity is filled in from `key`. Raise Conflict if
        another manager owns a field, unless `force`."""
        namespace, name = key
        given = body.get("metadata")
        metadata = {**(given if isinstance(given, Mapping) else {}), "name": name}
        if resource.namespaced:
            metadata["namespace"] = namespace
        whole = {
            **body,
            "apiVersion": resource.group_version,
            "kind": resource.kind,
            "metadata": metadata,
        }
        parameters = {"fieldManager": field_manager, "force": "true" if force else "false"}
        path = object_path(resource, key, subresource)
        return self._read(
            resource,
            await self._connection.request(
                "PATCH", path, parameters=parameters, body=whole, content_type=APPLY
            ),
        )

    async def patch(
        self,
        resource: Resource[ObjectT],
        key: tuple[str, str],
        body: Body,
        *,
        content_type: str = MERGE_PATCH,
        subresource: str | None = None,
        field_manager: str = "",
    ) -> ObjectT:
        """Patch an object. `content_type` is one of the patch types above."""
        parameters = {"fieldManager": field_manager} if field_manager else {}
        path = object_path(resource, key, subresource)
        answer = await self._connection.request(
            "PATCH", path, parameters=parameters, body=body, content_type=content_type
        )
        return self._read(resource, answer)

    async def delete(
        self, resource: Resource[Any], key: tuple[str, str], *, uid: str = "", version: str = ""
    ) -> None:
        """Request the deletion of an object; finalizers may delay it.

        With `uid` or `version` (a resourceVersion), raise Conflict unless the object still has
        it."""
        conditions = {
            name: value for name, value in (("uid", uid), ("resourceVersion", version)) if value
        }
        body = (
            {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
            if conditions
            else None
        )
        await self._connection.request("DELETE", resource.path(*key), body=body)

    def stream(
        self,
        resource: Resource[Any],
        *,
        parameters: Mapping[str, str],
        namespace: str = "",
        idle_s: float = 150.0,
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the lines of a watch in batches; see `Connection.stream`."""
        return self._connection.stream(
            resource.path(namespace), parameters={"watch": "true", **parameters}, idle_s=idle_s
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> bytes:
        """Send a request that has no method of its own, by its path. Return the body of the
        response."""
        return await self._connection.request(method, path, parameters=parameters, body=body)

    async def pages(
        self,
        resource: Resource[Any],
        *,
        namespace: str = "",
        label_selector: str = "",
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[RawPage, None]:
        """Yield the pages of a list, not yet decoded, of one namespace or of all.

        All pages show the collection at the resourceVersion of the first page."""
        continues = ""
        while True:
            page = await self.page(
                resource,
                namespace=namespace,
                label_selector=label_selector,
                limit=page_size,
                continues=continues,
            )
            yield page
            continues = page.metadata.continue_
            if not continues:
                return

    async def list(
        self,
        resource: Resource[ObjectT],
        *,
        namespace: str = "",
        label_selector: str = "",
        page_size: int = PAGE_SIZE,
    ) -> list[ObjectT]:
        """Return all objects of one namespace or of all, as of one resourceVersion.

        Raise Refused if an object cannot be decoded."""
        items: list[ObjectT] = []
        pages = self.pages(
            resource, namespace=namespace, label_selector=label_selector, page_size=page_size
        )
        async with aclosing(pages):
            async for page in pages:
                items += (self._read(resource, item) for item in page.items or ())
        return items

    def _read(self, resource: Resource[ObjectT], data: bytes | msgspec.Raw) -> ObjectT:
        try:
            object_: ObjectT = decoder(resource.type).decode(data)
            return object_
        except msgspec.ValidationError as problem:
            said = explain(problem, resource.type)
            what = f"a {resource.kind} from {self.access.server} cannot be read: {said}"
            raise RefusedByServer(
                what, status=200, fix="correct the object, or use a version that knows it"
            ) from None
        except msgspec.DecodeError as problem:
            # This is not JSON: something on the way truncated or replaced the response. The object
            # itself may be correct.
            said = explain(problem, resource.type)
            what = f"a {resource.kind} from {self.access.server} is not valid JSON: {said}"
            raise ServerUnavailable(what, status=200) from None


def object_path(resource: Resource[Any], key: tuple[str, str], subresource: str | None) -> str:
    """Return the URL path of an object or of a subresource."""
    return resource.path(*key) + (f"/{subresource}" if subresource else "")
