"""The status driver against the API server: claim first, publish, release last, touch nothing that is not ours."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fairlead.drivers.status import StatusDriver
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey, Service
from fairlead.lab.apiserver import ApiServer
from fairlead.model import Ingress, Publication, ServiceKey
from fairlead.state import State

KEY = ServiceKey("default", "web")
NAME = ObjectKey("default", "web")
ADDRESS = (Ingress("203.0.113.1", "VIP"),)


class Bench:
    """The driver over a real client; `see` takes in what the server has, as the reflector would."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.state = State(())
        self.said: list[tuple[str, str]] = []
        self.driver = StatusDriver(client, self.state, self)

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.said.append((kind, reason))

    async def create(self, **spec: object) -> Service:
        body = {"metadata": {"name": "web"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]} | spec}
        await self.client.create(SERVICES, body, namespace="default")
        return await self.see()

    async def see(self) -> Service:
        service = await self.client.get(SERVICES, NAME)
        self.state.update_services({NAME: service})
        return service

    async def bring(self, *wanted: Publication) -> list[str]:
        """One pass of the loop; returns the changes."""
        desired = self.driver.render({publication.service: publication for publication in wanted})
        changes = self.driver.diff(desired, await self.driver.read([KEY]))
        await self.driver.apply(changes)
        return [str(change) for change in changes]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        yield Bench(client)


async def test_claim_then_address_then_nothing_more(bench: Bench) -> None:
    service = await bench.create()
    wanted = Publication(KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS)
    assert await bench.bring(wanted) == [
        "claim Service default/web for class fairlead.io/direct",
        "publish 203.0.113.1 (VIP) on Service default/web",
    ]
    service = await bench.see()
    assert CLEANUP_FINALIZER in service.metadata.finalizers
    assert service.metadata.annotations["fairlead.io/class"] == "fairlead.io/direct"
    assert [(e.ip, e.ip_mode) for e in service.status.load_balancer.ingress] == [("203.0.113.1", "VIP")]
    assert await bench.bring(wanted) == []
    assert bench.said == [("Normal", "EnsuredLoadBalancer")]


async def test_release_takes_everything_of_ours_and_only_that(bench: Bench) -> None:
    service = await bench.create()
    foreign = {"metadata": {"finalizers": ["example.com/keep"], "annotations": {"example.com/note": "x"}}}
    await bench.client.apply(SERVICES, NAME, foreign, field_manager="somebody")
    await bench.bring(Publication(KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS))
    await bench.see()
    assert await bench.bring() == ["release Service default/web"]
    service = await bench.see()
    assert service.metadata.finalizers == ("example.com/keep",)
    assert dict(service.metadata.annotations) == {"example.com/note": "x"}
    assert service.status.load_balancer.ingress == ()
    assert await bench.bring() == []


async def test_a_deleted_service_goes_when_it_is_released(bench: Bench) -> None:
    service = await bench.create()
    await bench.bring(Publication(KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS))
    await bench.client.delete(SERVICES, NAME)
    assert (await bench.see()).metadata.deletion_timestamp is not None
    assert await bench.bring() == ["release Service default/web"]
    async with asyncio.timeout(5):
        assert await bench.client.list(SERVICES, namespace="default") == []


async def test_the_type_changed_away(bench: Bench) -> None:
    service = await bench.create()
    await bench.bring(Publication(KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS))
    await bench.client.patch(SERVICES, NAME, {"spec": {"type": "ClusterIP"}})
    await bench.see()
    assert await bench.bring() == ["release Service default/web"]
    assert CLEANUP_FINALIZER not in (await bench.see()).metadata.finalizers


async def test_a_foreign_claim_is_not_touched(bench: Bench) -> None:
    await bench.create(loadBalancerClass="example.com/other")
    await bench.client.apply(SERVICES, NAME, {"metadata": {"finalizers": [CLEANUP_FINALIZER]}}, field_manager="other")
    await bench.see()
    assert await bench.bring() == []
    assert CLEANUP_FINALIZER in (await bench.see()).metadata.finalizers


async def test_a_service_made_anew_is_not_written_by_an_old_plan(bench: Bench) -> None:
    service = await bench.create()
    old = Publication(KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS)
    await bench.client.delete(SERVICES, NAME)
    service = await bench.create()
    assert service.metadata.uid != old.uid
    assert await bench.bring(old) == []
