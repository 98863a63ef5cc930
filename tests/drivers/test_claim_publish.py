"""Claim and publish against the API server: the claim comes first and is released last, and fields
of others are not written."""

import asyncio
from collections.abc import AsyncIterator
from typing import get_args

import msgspec
import pytest

from fairlead.drivers.claim import ClaimDriver
from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.grants import GrantDriver
from fairlead.drivers.kept_addresses import KeptAddresses
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.publish import PublishDriver
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey, Service
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.model import Grant, Listener, LoadBalancer, ServiceKey
from fairlead.plan.classes import CLASSES, LoopName
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.service import CLAIM_MANAGER
from fairlead.state import State

KEY = ServiceKey("default", "web")
NAME = ObjectKey("default", "web")
ADDRESS = ("203.0.113.1",)
WITHDRAWN = (
    "publish no address on Service default/web",
    "revoke the grant of 203.0.113.1 to Service default/web",
)


class Bench:
    """The drivers with a real client. `update_state` stores the present Service of the server in
    the state, like the reflector."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.state = State(())
        self.events: list[tuple[str, str]] = []
        self.newest = ServiceCache(self.state)
        self.writer = writer = ServiceWriter(client, self.newest)
        self.claim = ClaimDriver(writer, self.newest, self)
        grants = GrantCache(self.state)
        keeping = KeptAddresses(client, self.state, grants, self, KeptAddressLimits(10, 30))
        self.grants = GrantDriver(client, writer, self.newest, grants, keeping)
        self.publish = PublishDriver(
            writer, self.newest, self, self.grants.publish_precondition, self.grants.granted
        )

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((kind, reason))

    async def create(self, **spec: object) -> Service:
        body = {
            "metadata": {"name": "web"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]} | spec,
        }
        await self.client.create(SERVICES, body, namespace="default")
        return await self.update_state()

    async def update_state(self) -> Service:
        service = await self.client.get(SERVICES, NAME)
        self.state.update_services({NAME: service})
        return service

    async def reconcile(self, *wanted: LoadBalancer) -> list[str]:
        """Pass these load balancers through the drivers, like the loop; without one, pass the
        Service backwards to release it. Return the changes."""
        desired = {balancer.service: balancer for balancer in wanted}
        changes: list[str] = []
        if desired:
            claims = self.claim.diff(self.claim.render(desired), await self.claim.read([KEY]))
            await self.claim.apply(claims)
            changes += map(str, claims)
            given = self.grants.diff(self.grants.render(desired), await self.grants.read([KEY]))
            await self.grants.apply(given)
            changes += map(str, given)
        shown = self.publish.diff(self.publish.render(desired), await self.publish.read([KEY]))
        await self.publish.apply(shown)
        changes += map(str, shown)
        if not desired:
            taken = self.grants.diff({}, await self.grants.read([KEY]))
            await self.grants.apply(taken)
            changes += map(str, taken)
            releases = self.claim.diff({}, await self.claim.read([KEY]))
            await self.claim.apply(releases)
            changes += map(str, releases)
        return changes


def balancer(service: Service) -> LoadBalancer:
    listener = Listener("IPv4", 80, "TCP", "Cluster", 30080, ())
    grants = (Grant(ADDRESS[0], ("TCP/80",)),)
    return LoadBalancer(
        KEY, service.metadata.uid, "fairlead.io/direct", ADDRESS, (listener,), grants=grants
    )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        yield Bench(server, client)


async def test_a_service_is_claimed_then_gets_its_address_and_is_not_written_again(
    bench: Bench,
) -> None:
    service = await bench.create()
    wanted = balancer(service)
    assert await bench.reconcile(wanted) == [
        "claim Service default/web for class fairlead.io/direct",
        "grant 203.0.113.1 TCP/80 to Service default/web",
        "publish 203.0.113.1 (VIP) on Service default/web",
    ]
    service = await bench.update_state()
    assert CLEANUP_FINALIZER in service.metadata.finalizers
    assert service.metadata.annotations["fairlead.io/class"] == "fairlead.io/direct"
    assert [(e.ip, e.ip_mode) for e in service.status.load_balancer.ingress] == [
        ("203.0.113.1", "VIP")
    ]
    assert await bench.reconcile(wanted) == []
    assert bench.events == [("Normal", "EnsuringLoadBalancer"), ("Normal", "EnsuredLoadBalancer")]


async def test_a_hostname_with_the_address_is_published_and_withdrawn(bench: Bench) -> None:
    service = await bench.create()
    plain = balancer(service)
    named = msgspec.structs.replace(plain, ip_mode="Proxy", hostname_suffix="nip.io")
    assert (await bench.reconcile(named))[-1] == "publish 203.0.113.1.nip.io on Service default/web"
    [entry] = (await bench.update_state()).status.load_balancer.ingress
    assert (entry.ip, entry.hostname, entry.ip_mode) == ("", "203.0.113.1.nip.io", None)
    assert await bench.reconcile(named) == []
    assert await bench.reconcile(plain) == ["publish 203.0.113.1 (VIP) on Service default/web"]
    await bench.update_state()
    await bench.reconcile(named)
    await bench.update_state()
    await bench.reconcile()
    assert (await bench.update_state()).status.load_balancer.ingress == ()
    assert bench.events[-1] == ("Normal", "DeletedLoadBalancer")


async def test_a_release_removes_only_fields_of_fairlead(bench: Bench) -> None:
    service = await bench.create()
    foreign = {
        "metadata": {"finalizers": ["example.com/keep"], "annotations": {"example.com/note": "x"}}
    }
    await bench.client.apply(SERVICES, NAME, foreign, field_manager="somebody")
    await bench.reconcile(balancer(service))
    await bench.update_state()
    assert await bench.reconcile() == [*WITHDRAWN, "release Service default/web"]
    service = await bench.update_state()
    assert service.metadata.finalizers == ("example.com/keep",)
    assert dict(service.metadata.annotations) == {"example.com/note": "x"}
    assert service.status.load_balancer.ingress == ()
    assert await bench.reconcile() == []
    whole = (
        "EnsuringLoadBalancer",
        "EnsuredLoadBalancer",
        "DeletingLoadBalancer",
        "DeletedLoadBalancer",
    )
    assert bench.events == [("Normal", reason) for reason in whole]


async def test_a_deleted_service_disappears_after_its_release(bench: Bench) -> None:
    service = await bench.create()
    await bench.reconcile(balancer(service))
    await bench.client.delete(SERVICES, NAME)
    assert (await bench.update_state()).metadata.deletion_timestamp is not None
    assert await bench.reconcile() == [*WITHDRAWN, "release Service default/web"]
    async with asyncio.timeout(60):
        assert await bench.client.list(SERVICES, namespace="default") == []


async def test_a_service_of_another_type_is_released(bench: Bench) -> None:
    service = await bench.create()
    await bench.reconcile(balancer(service))
    await bench.client.patch(SERVICES, NAME, {"spec": {"type": "ClusterIP"}})
    await bench.update_state()
    assert await bench.reconcile() == [WITHDRAWN[1], "release Service default/web"]
    assert CLEANUP_FINALIZER not in (await bench.update_state()).metadata.finalizers
    assert bench.events[-1] == ("Normal", "DeletedLoadBalancer")


async def test_a_service_claimed_by_another_controller_is_not_written(bench: Bench) -> None:
    await bench.create(loadBalancerClass="example.com/other")
    await bench.client.apply(
        SERVICES, NAME, {"metadata": {"finalizers": [CLEANUP_FINALIZER]}}, field_manager="other"
    )
    await bench.update_state()
    assert await bench.reconcile() == []
    assert CLEANUP_FINALIZER in (await bench.update_state()).metadata.finalizers


async def test_a_recreated_service_is_not_written_by_an_old_plan(bench: Bench) -> None:
    service = await bench.create()
    old = balancer(service)
    await bench.client.delete(SERVICES, NAME)
    service = await bench.create()
    assert service.metadata.uid != old.uid
    with pytest.raises(Conflict):
        await bench.reconcile(old)
    assert (await bench.update_state()).metadata.finalizers == ()


async def test_a_write_is_not_repeated_before_the_watch_shows_it(
    bench: Bench,
) -> None:
    service = await bench.create()
    wanted = balancer(service)
    assert len(await bench.reconcile(wanted)) == 3
    assert await bench.reconcile(wanted) == [], "a write is not repeated before the watch shows it"
    assert (
        len(bench.publish.diff(bench.publish.render({KEY: wanted}), await bench.publish.read(None)))
        == 1
    ), "an audit uses only what the watch has shown"


@pytest.mark.parametrize("recreated", [True, False])
async def test_a_failed_claim_is_forgotten_with_its_service(bench: Bench, recreated: bool) -> None:
    old = balancer(await bench.create())
    await bench.client.delete(SERVICES, NAME)
    await bench.create()
    with pytest.raises(Conflict):
        await bench.reconcile(old)
    assert bench.claim.unfinished.keys() == {KEY}
    if not recreated:
        bench.state.update_services({NAME: None})
    await bench.claim.read(None)
    assert not bench.claim.unfinished


async def test_a_repeated_claim_writes_one_event(bench: Bench) -> None:
    wanted = balancer(await bench.create())
    claims = bench.claim.diff(bench.claim.render({KEY: wanted}), {})
    bench.server.faults.add(Fault("status", "PATCH", count=3, code=503))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await bench.claim.apply(claims)
        await bench.claim.read(None)
    await bench.claim.apply(claims)
    assert CLEANUP_FINALIZER in (await bench.update_state()).metadata.finalizers
    assert bench.events == [("Normal", "EnsuringLoadBalancer")]
    assert not bench.claim.unfinished


async def test_a_class_annotation_written_by_a_user_is_not_a_claim(bench: Bench) -> None:
    """No audit releases or writes anything, although the Service has the finalizer of another
    controller."""
    annotated = {
        "annotations": {"fairlead.io/class": "fairlead.io/direct"},
        "finalizers": [CLEANUP_FINALIZER],
    }
    for name, class_name in (("web", None), ("other", "example.com/theirs")):
        body = {
            "metadata": {"name": name, **annotated},
            "spec": {"type": "ClusterIP", "ports": [{"port": 80}]},
        }
        if class_name is not None:
            body["spec"] |= {"type": "LoadBalancer", "loadBalancerClass": class_name}  # type: ignore[operator]
        await bench.client.create(SERVICES, body, namespace="default")
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}}
    await bench.client.patch(SERVICES, ObjectKey("default", "other"), status, subresource="status")
    there = await bench.client.list(SERVICES, namespace="default")
    mine = {ObjectKey(*each.key): each for each in there if each.metadata.name in ("web", "other")}
    bench.state.update_services(mine)
    for _ in range(3):
        assert await bench.claim.read(None) == {}
        assert await bench.publish.read(None) == {}
    assert bench.events == [("Warning", "AnnotationWithoutEffect")] * 2, (
        "each annotation gets one Event"
    )


async def test_a_copied_class_annotation_is_claimed_like_any_service(bench: Bench) -> None:
    """A manifest that was copied from a served Service contains the annotation, and a user may
    overwrite it."""
    await bench.create()
    copied = {"metadata": {"annotations": {"fairlead.io/class": "fairlead.io/proxy"}}}
    await bench.client.patch(SERVICES, NAME, copied)
    wanted = balancer(await bench.update_state())
    assert (await bench.reconcile(wanted))[
        0
    ] == "claim Service default/web for class fairlead.io/direct"
    await bench.update_state()
    await bench.client.patch(
        SERVICES, NAME, {"metadata": {"annotations": {"fairlead.io/class": "nonsense"}}}
    )
    wanted = balancer(await bench.update_state())
    assert await bench.reconcile(wanted) == [
        "claim Service default/web for class fairlead.io/direct"
    ]
    await bench.update_state()
    assert await bench.reconcile() == [*WITHDRAWN, "release Service default/web"]
    service = await bench.update_state()
    assert (service.metadata.finalizers, dict(service.metadata.annotations)) == ((), {})


async def test_each_claim_belongs_to_exactly_one_loop(bench: Bench) -> None:
    """This includes a claim for a class of another version, which has no row: one loop must release
    it."""
    names = {"unknown": "fairlead.io/unknown"} | {name.rpartition("/")[2]: name for name in CLASSES}
    for short, name in names.items():
        await bench.client.create(
            SERVICES,
            {
                "metadata": {"name": short},
                "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
            },
            namespace="default",
        )
        metadata = {
            "finalizers": [CLEANUP_FINALIZER],
            "annotations": {"fairlead.io/class": name},
        }
        service = await bench.client.get(SERVICES, ObjectKey("default", short))
        bench.state.update_services({ObjectKey("default", short): service})
        await bench.writer.apply(
            service.key, service.metadata.uid, field_manager=CLAIM_MANAGER, metadata=metadata
        )
    keys = list(bench.state.services)
    claimed = []
    for loop in get_args(LoopName):
        driver = ClaimDriver(bench.writer, bench.newest, bench, loop=loop)
        claimed += [(loop, each.class_name) for each in (await driver.read(keys)).values()]
    expected = [("services", "fairlead.io/unknown")]
    expected += [(each.loop, each.name) for each in CLASSES.values()]
    assert sorted(claimed) == sorted(expected)


async def test_a_class_that_cannot_remove_its_part_keeps_its_claim(bench: Bench) -> None:
    service = await bench.create()
    wanted = msgspec.structs.replace(balancer(service), class_name="fairlead.io/ovn")
    await bench.reconcile(wanted)
    await bench.update_state()
    absent = {"fairlead.io/ovn": Refused("no OVN is configured")}
    bench.claim = ClaimDriver(bench.writer, bench.newest, bench, obstacle=absent.get)
    with pytest.raises(Refused, match="no OVN"):
        await bench.reconcile(balancer(service))
    kept = await bench.update_state()
    assert kept.metadata.annotations["fairlead.io/class"] == "fairlead.io/ovn"
    absent.clear()
    await bench.reconcile(balancer(service))
    moved = await bench.update_state()
    assert moved.metadata.annotations["fairlead.io/class"] == "fairlead.io/direct"
