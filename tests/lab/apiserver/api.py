"""An API server over HTTP, embedded or real, with a separate namespace for each test.

Both servers must behave alike, so a test does not know which one it uses. After a test, objects
that could affect other tests are removed: Services hold node ports, and Nodes belong to no
namespace."""

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from fairlead.kube.access import Access, Credentials, tls_context
from fairlead.lab.apiserver.kinds import NAMESPACES, SERVICES, Kind
from fairlead.lab.apiserver.registry import MERGE_PATCH

Object = dict[str, Any]
APPLY_PATCH = "application/apply-patch+yaml"
DEADLINE_S = 60


class Failed(Exception):
    """A request that was answered with a Status of failure; prints as its message."""

    def __init__(self, status: Object) -> None:
        super().__init__(status["message"])
        self.status = status
        self.code: int = status["code"]
        self.reason: str = status.get("reason", "")
        self.message: str = status["message"]
        self.details: Object = status.get("details", {})

    @property
    def causes(self) -> list[str]:
        """The errors of an invalid object: `field: message`."""
        assert (self.code, self.reason) == (422, "Invalid"), self.status
        return [f"{cause['field']}: {cause['message']}" for cause in self.details["causes"]]


class Watch:
    """A watch from the client's side. Returns one event after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> Object:
        async with asyncio.timeout(DEADLINE_S):
            line = await self.answer.content.readline()
        assert line.endswith(b"\n"), f"the watch ended with {line!r}"
        event: Object = json.loads(line)
        return event

    async def rest(self) -> list[Object]:
        async with asyncio.timeout(DEADLINE_S):
            return [json.loads(line) for line in (await self.answer.content.read()).splitlines()]


class Api:
    """A client of one API server, used as an async context manager. `name` is `embedded` or
    `real`."""

    def __init__(self, access: Access, name: str) -> None:
        self.access = access
        self.name = name
        self.url = access.server
        self.namespace = f"test-{secrets.token_hex(5)}"
        self._verified: ssl.SSLContext | bool = (
            tls_context(access, Credentials()) if access.authority_pem else True
        )
        self._alone: list[tuple[Kind, str]] = []
        self._namespaces = [self.namespace]

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.access.token}"} if self.access.token else {}
        self.session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=DEADLINE_S)
        )
        await self.create(NAMESPACES, {"metadata": {"name": self.namespace}})
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for namespace in self._namespaces:
                await self._clear(namespace)
            for kind, name in self._alone:
                await self.call("DELETE", f"{kind.path}/{kind.plural}/{name}")
        finally:
            await self.session.close()

    async def _clear(self, namespace: str) -> None:
        """Release node ports and ClusterIPs. The namespace itself is not deleted: without a
        namespace controller it would stay."""
        path = f"/api/v1/namespaces/{namespace}/services"
        _, listed = await self.call("GET", path)
        for service in listed["items"]:
            mine = f"{path}/{service['metadata']['name']}"
            if service["metadata"].get("finalizers"):
                await self.call("PATCH", mine, {"metadata": {"finalizers": None}}, MERGE_PATCH)
            await self.call("DELETE", mine)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        media_type: str = "application/json",
        **headers: str,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request unchanged. `path` may have a query. Names of headers have `_` instead of
        `-`."""
        named = {"User-Agent": "test/1"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        data = json.dumps(body).encode() if body is not None else None
        if data is not None:
            named["Content-Type"] = media_type
        async with self.session.request(
            method,
            self.url + path,
            data=data,
            headers=named,
            ssl=self._verified,
            server_hostname=self.access.server_name or None,
        ) as answer:
            yield answer

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        media_type: str = "application/json",
        **headers: str,
    ) -> tuple[int, Any]:
        """Return the status code and the decoded body of a response."""
        async with self.request(
            method, path, body=body, media_type=media_type, **headers
        ) as answer:
            data = await answer.read()
        try:
            return answer.status, json.loads(data)
        except ValueError:
            return answer.status, data.decode()

    def path(
        self, kind: Kind, name: str = "", subresource: str = "", namespace: str | None = None
    ) -> str:
        space = (
            f"/namespaces/{self.namespace if namespace is None else namespace}"
            if kind.namespaced
            else ""
        )
        return (
            f"{kind.path}{space}/{kind.plural}"
            + (f"/{name}" if name else "")
            + (f"/{subresource}" if subresource else "")
        )

    async def do(
        self,
        method: str,
        path: str,
        body: object = None,
        media_type: str = "application/json",
        query: Mapping[str, str] = {},
    ) -> Object:
        """Return the body of a successful response. Raise Failed."""
        requested = "&".join(f"{name}={value}" for name, value in query.items())
        status, answer = await self.call(
            method, path + (f"?{requested}" if requested else ""), body, media_type
        )
        if status >= 400:
            raise Failed(
                answer if isinstance(answer, dict) else {"code": status, "message": answer}
            )
        assert isinstance(answer, dict)
        return answer

    async def create(
        self, kind: Kind, obj: Object, *, namespace: str | None = None, **query: str
    ) -> Object:
        whole = {"apiVersion": kind.group_version, "kind": kind.kind, **obj}
        made = await self.do("POST", self.path(kind, namespace=namespace), whole, query=query)
        if not kind.namespaced and not query.get("dryRun"):
            self.remove_later(kind, made["metadata"]["name"])
        return made

    def remove_later(self, kind: Kind, name: str) -> None:
        """After the test, delete an object that belongs to no namespace, or the Services of a
        namespace."""
        if kind is not NAMESPACES:
            self._alone.append((kind, name))
        elif name not in self._namespaces:
            self._namespaces.append(name)

    async def get(self, kind: Kind, name: str) -> Object:
        return await self.do("GET", self.path(kind, name))

    async def find(self, kind: Kind, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self.get(kind, name)
        except Failed as failed:
            if failed.code != 404:
                raise
            return None

    async def items(self, kind: Kind, **query: str) -> list[Object]:
        listed: list[Object] = (await self.do("GET", self.path(kind), query=query))["items"]
        return listed

    async def update(
        self, kind: Kind, name: str, obj: Object, *, subresource: str = "", **query: str
    ) -> Object:
        whole = {"apiVersion": kind.group_version, "kind": kind.kind, **obj}
        return await self.do("PUT", self.path(kind, name, subresource), whole, query=query)

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: object,
        media_type: str = MERGE_PATCH,
        *,
        subresource: str = "",
        **query: str,
    ) -> Object:
        return await self.do("PATCH", self.path(kind, name, subresource), patch, media_type, query)

    async def apply(
        self,
        kind: Kind,
        name: str,
        wanted: Object,
        manager: str,
        *,
        force: bool = False,
        subresource: str = "",
    ) -> Object:
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self.do(
            "PATCH", self.path(kind, name, subresource), wanted, APPLY_PATCH, query
        )

    async def delete(self, kind: Kind, name: str, **options: object) -> Object:
        """Delete an object. `options` are those of DeleteOptions."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options} if options else None
        return await self.do("DELETE", self.path(kind, name), body)

    async def publish(
        self, name: str, *ingress: Object, conditions: list[Object] | None = None
    ) -> Object:
        """Write the addresses, and optionally conditions, into the status of a Service."""
        status: Object = {"loadBalancer": {"ingress": list(ingress)}}
        if conditions is not None:
            status["conditions"] = conditions
        return await self.patch(SERVICES, name, {"status": status}, subresource="status")

    @asynccontextmanager
    async def watch(self, kind: Kind = SERVICES, query: str = "") -> AsyncIterator[Watch]:
        async with self.request("GET", f"{self.path(kind)}?watch=true&{query}") as answer:
            assert answer.status == 200, await answer.text()
            yield Watch(answer)

    async def version(self, kind: Kind = SERVICES) -> str:
        """Return the version of the store, from a list."""
        listed = await self.do("GET", self.path(kind))
        return str(listed["metadata"]["resourceVersion"])


def version_of(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])
