"""Fixtures: a cluster of objects with a controller, on the embedded API server and on a real one,
and a namespace for a node."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.roles.cluster import Cluster

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.lab import crds, namespace
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.kubeapiserver import KubeApiServer

CIDRS = ("10.96.0.0/16", "2001:db8:96::/112")


@pytest.fixture
def here() -> Iterator[None]:
    """Move this process into a network namespace of its own."""
    name = f"flt-{os.getpid()}-role"
    namespace.create(name)
    try:
        with namespace.inside(name):
            yield
    finally:
        namespace.delete(name)


@pytest.fixture(params=["embedded", "real"])
def real(request: pytest.FixtureRequest) -> KubeApiServer | None:
    """Run each test twice: on a new embedded API server (None), and on a real one."""
    return request.getfixturevalue("real_apiserver") if request.param == "real" else None


@pytest.fixture
async def access(real: KubeApiServer | None) -> AsyncIterator[Access]:
    if real is not None:
        async with Client(real.access) as client:
            await crds.install(client)
        yield real.access
        return
    async with ApiServer(service_cidrs=CIDRS) as embedded, Client(Access(embedded.url)) as client:
        await crds.install(client)
        yield Access(embedded.url)


@pytest.fixture
async def cluster(access: Access, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two nodes, a controller and no Services."""
    async with Client(access) as client:
        made = Cluster(access, client, tmp_path)
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": made.namespace}}
        )
        try:
            await made.add_node("life-1", 1)
            await made.add_node("life-2", 2)
            await made.start_controller()
            yield made
            await made.stop()
        finally:
            await made.clear()
