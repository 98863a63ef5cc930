"""An API server for each test, by HTTP and without, and Services to write to it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from fairlead.lab.apiserver import ApiServer, Registry, Store
from fairlead.lab.apiserver.allocation import Allocator

Object = dict[str, Any]
CIDRS = ("10.96.0.0/16", "2001:db8:96::/112")


class Client:
    """Sends requests to one server and gives back the status code and the decoded body."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def call(self, method: str, path: str, body: object = None, media_type: str = "application/json") -> tuple[int, Any]:
        headers = {"Content-Type": media_type, "User-Agent": "test/1"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture
def registry() -> Registry:
    """The verbs without HTTP, in a dual-stack cluster."""
    return Registry(Store(), Allocator(CIDRS))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(service_cidrs=CIDRS, bookmark_interval_s=0.2) as started:
        yield started


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield Client(session, server.url)


@pytest.fixture
def make_service() -> Callable[..., Object]:
    """A Service of type LoadBalancer with one port; keyword arguments replace fields of its spec, None leaves one out."""

    def make(name: str = "web", **spec: Any) -> Object:
        fields = {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"name": "http", "port": 80}]} | spec
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {field: value for field, value in fields.items() if value is not None},
        }

    return make
