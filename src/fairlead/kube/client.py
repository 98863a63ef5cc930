"""Speak to the Kubernetes API: typed reads, server-side apply, watches.

In: an `Access`, `Resource`s, keys, bodies. Out: the frozen Structs of `kube.objects`, or a failure
of `fairlead.errors`. Invariant: what is written is what was asked for; apiVersion and kind come
from the `Resource`, the identity from the key. Why an own client: decoding only the fields that are
read takes a fraction of the general clients' CPU and memory (`make bench` says which); and one
dependency (aiohttp) is client and server at once. Follows the Kubernetes API concepts: resource
paths, chunked lists, watches, KEP-555 (server-side apply)."""

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
from fairlead.kube.watching import Item, Unreadable, key_of, read_item

APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

PAGE_SIZE = 500


class ListMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class RawPage(msgspec.Struct, frozen=True):
    """A part of a list with its objects still as they came."""

    metadata: ListMeta = ListMeta()
    items: tuple[msgspec.Raw, ...] | None = ()


RAW_PAGE = msgspec.json.Decoder(RawPage)


class Page(msgspec.Struct, Generic[ObjectT], frozen=True):
    """A part of a list with its objects."""

    metadata: ListMeta = ListMeta()
    items: tuple[ObjectT, ...] | None = ()


@functools.cache
def page_decoder(type_: type[ObjectT]) -> msgspec.json.Decoder[Page[ObjectT]]:
    """The decoder for pages of objects of one type."""
    return msgspec.json.Decoder(Page[type_])  # type: ignore[valid-type]


@functools.cache
def decoder(type_: type[ObjectT]) -> msgspec.json.Decoder[ObjectT]:
    """The decoder for one type; building one costs far more than using it."""
    return msgspec.json.Decoder(type_)


class Client:
    """All that Fairlead asks of one API server. Use as an async context manager.

    `timeout_s` is the deadline of each call (a stream has its own). Every method raises Refused
    (`NotFound`, `RefusedByServer`), Conflict or Unavailable (`ServerUnavailable`), and says in it
    what was tried."""

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
        """When the API server last answered a request, by the monotonic clock; see
        `Connection.answered_s`."""
        return self._connection.answered_s

    async def get(self, resource: Resource[ObjectT], key: tuple[str, str]) -> ObjectT:
        """The object `(namespace, name)` as it is now."""
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
        """One part of a list, its objects not yet decoded. `limit` 0: all in one. `continues`: the
        token of the part before."""
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
        """The same with what is in it. All objects are read in one go, which takes half of the time
        that one by one takes: that is done where one of them cannot be read."""
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
                f"GET {self.access.server}{resource.path(namespace)} was answered with no "
                f"list: {problem}"
            )
            raise ServerUnavailable(what) from None

    async def create(
        self, resource: Resource[ObjectT], object_: Body, *, namespace: str = ""
    ) -> ObjectT:
        """Make a new object. Its namespace is the one in its metadata unless one is given.
        Conflict: the name is taken."""
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
        """Put an object in the place of the one that is there. Conflict: it is no longer of the
        version in its metadata."""
        body = msgspec.to_builtins(object_) | {
            "apiVersion": resource.group_version,
            "kind": resource.kind,
        }
        return self._read(
            resource,
            await self._connection.request("PUT", place(resource, key, subresource), body=body),
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
        """Server-side apply: `body` holds exactly the fields that `field_manager` wants; those it
        had before and that are missing now are removed. The identity is filled in from `key`.
        Conflict: another manager has a field, unless `force`."""
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
        path = place(resource, key, subresource)
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
        """Change an object by a patch of one of the types above."""
        parameters = {"fieldManager": field_manager} if field_manager else {}
        path = place(resource, key, subresource)
        answer = await self._connection.request(
            "PATCH", path, parameters=parameters, body=body, content_type=content_type
        )
        return self._read(resource, answer)

    async def delete(
        self, resource: Resource[Any], key: tuple[str, str], *, uid: str = "", version: str = ""
    ) -> None:
        """Ask for an object to go (finalizers may keep it). With `uid` or `version` (its
        resourceVersion), only if it is still that one, else Conflict."""
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
        """The lines of a watch, a batch at a time; see `Connection.stream`."""
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
        """One call by its path, for what has no method of its own. Answers the body of a
        success."""
        return await self._connection.request(method, path, parameters=parameters, body=body)

    async def pages(
        self,
        resource: Resource[Any],
        *,
        namespace: str = "",
        label_selector: str = "",
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[RawPage, None]:
        """All objects, of one namespace or all, as they were at one moment, not yet decoded; asked
        for part by part."""
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
        """All objects, of one namespace or all, as they were at one moment. Raises Refused if one
        of them cannot be read."""
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
            what = f"a {resource.kind} from {self.access.server} cannot be read: {problem}"
            raise RefusedByServer(
                what, status=200, fix="correct the object, or use a version that knows it"
            ) from None
        except msgspec.DecodeError as problem:
            # No JSON: something on the way has cut it off or put its own word in its place. The
            # object need not be wrong.
            what = (
                f"a {resource.kind} from {self.access.server} came as something that is no "
                f"JSON: {problem}"
            )
            raise ServerUnavailable(what, status=200) from None


def place(resource: Resource[Any], key: tuple[str, str], subresource: str | None) -> str:
    """The path of an object or of a part of it."""
    return resource.path(*key) + (f"/{subresource}" if subresource else "")
