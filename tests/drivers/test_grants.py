"""AddressGrants as locks: which Service holds which address, when a grant is revoked, and the race
conditions that the rules of the lock prevent.

In each race one controller has stopped before a call, and another one continues with its own view
of the objects. The later call of the first one must not cause two Services to have the same port of
an address in their status."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.drivers.stepped_controller import CONFIG, SteppedController

from fairlead.config import Config, ControllerConfig, PoolConfig
from fairlead.errors import Unavailable
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS, AddressGrant, grant_name
from fairlead.kube.events import stamp
from fairlead.kube.objects import NAMESPACES, SERVICES, ObjectKey, Service
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.addresses import shown_by

A, B = ServiceKey("default", "a"), ServiceKey("default", "b")
ONE, TWO = "203.0.113.1", "203.0.113.2"
PUBLISH, CLAIM = "apply fairlead-publish", "apply fairlead-claim"
SHARED = {"fairlead.io/sharing-key": "k"}


class Bench:
    """A user and any number of controllers."""

    def __init__(self, server: ApiServer, user: Client) -> None:
        self.server = server
        self.user = user
        self.controllers: list[SteppedController] = []

    async def controller(self, config: Config = CONFIG) -> SteppedController:
        controller = SteppedController(self.server, config)
        await controller.client.__aenter__()
        self.controllers.append(controller)
        return controller

    async def create(self, key: ServiceKey, *ports: int, requested: str = "", **spec: Any) -> None:
        annotations = dict(spec.pop("annotations", {}))
        if requested:
            annotations["fairlead.io/addresses"] = requested
        metadata = {"name": key.name, "namespace": key.namespace, "annotations": annotations}
        listed = [{"name": f"p{port}", "port": port} for port in ports or (80,)]
        await self.user.create(
            SERVICES,
            {"metadata": metadata, "spec": {"type": "LoadBalancer", "ports": listed} | spec},
        )

    async def request_address(self, key: ServiceKey, address: str) -> None:
        await self.user.patch(
            SERVICES, key, {"metadata": {"annotations": {"fairlead.io/addresses": address}}}
        )

    async def service(self, key: ServiceKey) -> Service:
        return await self.user.get(SERVICES, key)

    async def shown(self) -> dict[str, str]:
        """Return the Service of each published address and port. Fail if two Services have the same
        one in their status."""
        found: dict[str, str] = {}
        for service in await self.user.list(SERVICES):
            for address, ports in shown_by(service).items():
                for port in ports:
                    assert f"{address} {port}" not in found, f"{address} {port} is shown twice"
                    found[f"{address} {port}"] = service.metadata.name
        return found

    async def grants(self) -> dict[str, AddressGrant]:
        return {grant.spec.address: grant for grant in await self.user.list(ADDRESS_GRANTS)}

    async def holders(self) -> dict[str, list[str]]:
        return {
            address: [holder.name for holder in grant.spec.holders]
            for address, grant in (await self.grants()).items()
        }


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiServer() as server, Client(Access(server.url)) as user:
        await crds.install(user)
        await user.create(
            ADDRESS_POOLS, {"metadata": {"name": "main"}, "spec": {"addresses": [f"{ONE}-{TWO}"]}}
        )
        made = Bench(server, user)
        yield made
        for controller in made.controllers:
            await controller.stop()
            await controller.client.__aexit__(None, None, None)


async def test_an_address_is_granted_before_it_is_published_and_revoked_after_it_is_withdrawn(
    bench: Bench,
) -> None:
    await bench.create(A, 80, 443)
    controller = await bench.controller()
    await controller.run_until(PUBLISH, A)
    service, grant = await bench.service(A), (await bench.grants())[ONE]
    assert service.status.load_balancer.ingress == ()
    assert grant.metadata.name == grant_name(ONE)
    assert (grant.spec.pool, grant.spec.keep, grant.spec.sharing_key) == ("main", False, "")
    [holder] = grant.spec.holders
    assert (holder.key, holder.uid, holder.ports) == (
        A,
        service.metadata.uid,
        ("TCP/443", "TCP/80"),
    )
    assert holder.service_version == service.metadata.resource_version
    await controller.run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "a", f"{ONE} TCP/443": "a"}
    await bench.user.delete(SERVICES, A)
    await controller.receive(100)
    await controller.run_until("delete AddressGrant", A)
    assert (await bench.service(A)).status.load_balancer.ingress == ()
    await controller.run_until(CLAIM, A)
    assert await bench.grants() == {}
    await controller.run_until_idle()
    assert await bench.user.list(SERVICES) == []


async def test_a_granted_address_is_published_after_a_restart_before_the_status_is_written(
    bench: Bench,
) -> None:
    await bench.create(B)
    first = await bench.controller()
    await first.run_until(PUBLISH, B)
    await first.stop()
    await bench.create(A)
    await (await bench.controller()).run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "b", f"{TWO} TCP/80": "a"}


KEEP = {"fairlead.io/keep-address": "true"}
MANY = (PoolConfig("many", ("198.51.100.0/26",)),)


async def keep(bench: Bench, controller: SteppedController, *keys: ServiceKey) -> None:
    """Create, serve and delete each of these Services."""
    for key in keys:
        await bench.create(key, annotations=KEEP)
        await controller.run_until_idle()
        await bench.user.delete(SERVICES, key)
        await controller.run_until_idle()


async def test_a_namespace_keeps_no_more_addresses_than_permitted(bench: Bench) -> None:
    controller = await bench.controller(
        Config(
            default_class="fairlead.io/direct",
            pools=MANY,
            controller=ControllerConfig(kept_addresses_per_namespace=3),
        )
    )
    await keep(bench, controller, *(ServiceKey("default", f"s{number}") for number in range(20)))
    assert await bench.holders() == {f"198.51.100.{number}": [f"s{number}"] for number in range(3)}
    events = {
        key.name: message
        for key, reason, message in controller.events
        if reason == "AddressNotKept"
    }
    assert set(events) == {f"s{number}" for number in range(3, 20)}
    assert events["s3"].startswith(
        "198.51.100.3 is not kept: kept addresses of namespace default: 3 of 3; release one"
    )
    await bench.create(A, annotations=KEEP)
    await controller.run_until_idle()
    planned = controller.planner([A])[A]
    assert isinstance(planned, LoadBalancer)
    [note] = [note for note in planned.notes if note.code == "AddressNotKept"]
    assert str(note).startswith(
        "the addresses will not be kept when the Service is deleted: "
        "kept addresses of namespace default"
    )
    # Other namespaces have their own limit, and a new Service of the same name gets the kept
    # address back.
    await bench.user.create(NAMESPACES, {"metadata": {"name": "other"}})
    await keep(bench, controller, ServiceKey("other", "a"), ServiceKey("default", "s1"))
    assert {"198.51.100.1": ["s1"], "198.51.100.4": ["a"]}.items() <= (
        await bench.holders()
    ).items()


@pytest.mark.parametrize(
    "dated", [True, False], ids=["kept by this version", "kept by a version that recorded no time"]
)
async def test_a_kept_address_is_released_after_the_configured_time(
    bench: Bench, dated: bool
) -> None:
    controller = await bench.controller(
        Config(
            default_class="fairlead.io/direct", controller=ControllerConfig(kept_address_days=30)
        )
    )
    await keep(bench, controller, A)
    if not dated:
        grant = (await bench.grants())[ONE]
        old = msgspec.structs.replace(
            grant.spec, holders=(msgspec.structs.replace(grant.spec.holders[0], kept_since=""),)
        )
        await bench.user.replace(
            ADDRESS_GRANTS, ("", grant_name(ONE)), msgspec.structs.replace(grant, spec=old)
        )
        controller.now += timedelta(days=100)
        await controller.run_until_idle()
    assert (await bench.grants())[ONE].spec.holders[0].kept_since == stamp(controller.now)
    controller.now += timedelta(days=29)
    controller.audit()
    await controller.run_until_idle()
    assert await bench.holders() == {ONE: ["a"]}
    controller.now += timedelta(days=1)
    controller.audit()
    await controller.run_until_idle()
    assert await bench.holders() == {}


@pytest.mark.parametrize("stays", [False, True], ids=["gone", "terminating"])
async def test_a_deleted_namespace_keeps_no_address(bench: Bench, stays: bool) -> None:
    there, here = ServiceKey("going", "a"), B
    await bench.user.create(NAMESPACES, {"metadata": {"name": "going"}})
    controller = await bench.controller()
    await keep(bench, controller, there, here)
    await bench.create(
        left := ServiceKey("going", "left"),
        annotations={"fairlead.io/class": "x"},
        type="ClusterIP",
    )
    await bench.user.patch(
        SERVICES, left, {"metadata": {"finalizers": ["example.com/stay"] if stays else None}}
    )
    assert await bench.holders() == {ONE: ["a"], TWO: ["b"]}
    await bench.user.delete(NAMESPACES, ObjectKey("", "going"))
    await controller.run_until_idle()
    assert await bench.holders() == {TWO: ["b"]}


async def test_a_service_that_is_deleted_with_its_namespace_keeps_no_address(bench: Bench) -> None:
    await bench.user.create(NAMESPACES, {"metadata": {"name": "going"}})
    controller = await bench.controller()
    await bench.create(ServiceKey("going", "a"), annotations=KEEP)
    await controller.run_until_idle()
    await bench.user.delete(NAMESPACES, ObjectKey("", "going"))
    await controller.run_until_idle()
    assert await bench.holders() == {}


async def test_a_namespace_that_the_watch_has_not_shown_is_read_from_the_api_server(
    bench: Bench,
) -> None:
    """The watch of namespaces is behind the others. A kept address stays kept."""
    controller = await bench.controller()
    await bench.user.create(NAMESPACES, {"metadata": {"name": "new"}})
    seen = ("services", "addressgrants", "addresspools")
    await bench.create(key := ServiceKey("new", "a"), annotations=KEEP)
    for _ in range(30):
        await controller.receive(1000, seen)
        await controller.step("well")
    await bench.user.delete(SERVICES, key)
    for _ in range(60):
        await controller.receive(1000, seen)
        await controller.step("well")
    assert await bench.user.list(SERVICES) == []
    assert await bench.holders() == {ONE: ["a"]}


async def test_a_kept_address_is_reserved_for_a_service_of_the_same_name_until_it_is_released(
    bench: Bench,
) -> None:
    await bench.create(A, annotations={"fairlead.io/keep-address": "true"})
    controller = await bench.controller()
    await controller.run_until_idle()
    await bench.user.delete(SERVICES, A)
    await controller.run_until_idle()
    kept = (await bench.grants())[ONE]
    assert kept.spec.keep
    assert [(holder.key, holder.uid) for holder in kept.spec.holders] == [(A, "")]
    await bench.create(B, requested=ONE)
    await controller.run_until_idle()
    assert await bench.shown() == {}, "the address is kept for another Service"
    await bench.create(A)
    await controller.run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "a"}
    await bench.user.patch(
        SERVICES, A, {"metadata": {"annotations": {"fairlead.io/keep-address": "true"}}}
    )
    await controller.run_until_idle()
    await bench.user.delete(SERVICES, A)
    await controller.run_until_idle()
    await bench.user.delete(ADDRESS_GRANTS, ("", grant_name(ONE)))
    await controller.run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "b"}, (
        "a released address is assigned to the waiting Service"
    )


async def test_a_kept_address_is_used_by_another_service_with_the_same_sharing_key(
    bench: Bench,
) -> None:
    keep = {"fairlead.io/keep-address": "true"} | SHARED
    await bench.create(A, annotations=keep)
    controller = await bench.controller()
    await controller.run_until_idle()
    await bench.user.delete(SERVICES, A)
    await controller.run_until_idle()
    await bench.create(B, annotations=SHARED)
    await controller.run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "b"}
    assert await bench.holders() == {ONE: ["b"]}


async def test_services_share_one_address_but_no_port(bench: Bench) -> None:
    await bench.create(A, 80, annotations=SHARED)
    controller = await bench.controller()
    await controller.run_until_idle()
    await bench.create(B, 80, 443, annotations=SHARED)
    await controller.run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "a", f"{ONE} TCP/443": "b"}
    [entry] = (await bench.service(B)).status.load_balancer.ingress
    assert {(port.port, port.error) for port in entry.ports} == {
        (80, "fairlead.io/PortConflict"),
        (443, None),
    }
    await bench.user.patch(
        SERVICES, A, {"spec": {"ports": [{"name": "p", "port": 8080}, {"name": "q", "port": 443}]}}
    )
    await controller.run_until_idle()
    shown = {f"{ONE} TCP/8080": "a", f"{ONE} TCP/443": "b", f"{ONE} TCP/80": "b"}
    assert await bench.shown() == shown, (
        "an edit takes no port from another Service, and releases the previous port"
    )


async def test_addresses_in_the_status_of_services_are_granted_first(bench: Bench) -> None:
    """The status may have been written by another system, or by Fairlead before there were grants.
    This includes two Services that share one address."""
    for key, address, port in (
        (A, "192.0.2.7", 80),
        (B, "192.0.2.7", 443),
        (ServiceKey("default", "c"), ONE, 80),
    ):
        await bench.create(key, port)
        status = {"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}
        await bench.user.patch(SERVICES, key, status, subresource="status")
    await bench.create(ServiceKey("default", "aa"))
    await (await bench.controller()).run_until_idle()
    shown = {
        "192.0.2.7 TCP/80": "a",
        "192.0.2.7 TCP/443": "b",
        f"{ONE} TCP/80": "c",
        f"{TWO} TCP/80": "aa",
    }
    assert await bench.shown() == shown
    assert await bench.holders() == {"192.0.2.7": ["a", "b"], ONE: ["c"], TWO: ["aa"]}


async def test_without_the_crd_nothing_is_published_and_nothing_withdrawn(
    bench: Bench,
) -> None:
    await bench.create(A)
    controller = await bench.controller()
    await controller.run_until_idle()
    for name in ("addressgrants.fairlead.io", "addresspools.fairlead.io"):
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        await bench.user.request("DELETE", path)
    await bench.create(B)
    config = msgspec.structs.replace(CONFIG, pools=(PoolConfig("main", (f"{ONE}-{TWO}",)),))
    without = await bench.controller(config)
    planned = without.planner({A, B})
    for key in (A, B):
        intent = planned[key]
        assert isinstance(intent, LoadBalancer)
        changes = without.grants.diff(
            without.grants.render({key: intent}), await without.grants.read([key])
        )
        with pytest.raises(Unavailable, match="kubectl apply"):
            await without.grants.apply(changes)
    assert await bench.shown() == {f"{ONE} TCP/80": "a"}
    await crds.install(bench.user)
    await (await bench.controller(config)).run_until_idle()
    assert await bench.shown() == {f"{ONE} TCP/80": "a", f"{TWO} TCP/80": "b"}


async def test_a_grant_that_a_user_deleted_is_recreated(bench: Bench) -> None:
    await bench.create(A)
    controller = await bench.controller()
    await controller.run_until_idle()
    await bench.user.delete(ADDRESS_GRANTS, ("", grant_name(ONE)))
    await controller.run_until_idle()
    assert await bench.holders() == {ONE: ["a"]}


async def test_grants_of_a_service_that_was_removed_by_force_are_revoked(
    bench: Bench,
) -> None:
    await bench.create(A)
    controller = await bench.controller()
    await controller.run_until_idle()
    await controller.stop()
    await bench.user.delete(SERVICES, A)
    await bench.user.patch(SERVICES, A, {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        await bench.service(A)
    await (await bench.controller()).run_until_idle()
    assert await bench.grants() == {}


# The races.


async def test_an_address_is_not_published_on_a_service_of_another_version(bench: Bench) -> None:
    await bench.create(A)
    slow, fast = await bench.controller(), await bench.controller()
    await slow.run_until(PUBLISH, A)
    await bench.request_address(A, TWO)
    await fast.run_until_idle()
    await bench.create(B, requested=ONE)
    await fast.run_until_idle()
    assert await bench.shown() == {f"{TWO} TCP/80": "a", f"{ONE} TCP/80": "b"}
    await slow.step("well")
    assert await bench.shown() == {f"{TWO} TCP/80": "a", f"{ONE} TCP/80": "b"}


async def test_a_grant_is_revoked_only_when_its_address_can_no_longer_be_published(
    bench: Bench,
) -> None:
    """One controller serves Services without a class, the other does not. Nothing on the Service
    changes."""
    await bench.create(A)
    theirs = await bench.controller()
    await theirs.run_until(PUBLISH, A)
    other = await bench.controller(Config())
    await other.run_until(CLAIM, A)
    assert await bench.grants() == {}
    assert "fairlead.io/releasing" not in (await bench.service(A)).metadata.annotations, (
        "the annotation is removed after the release"
    )
    await bench.create(B, requested=ONE, loadBalancerClass="fairlead.io/direct")
    third = await bench.controller(Config())
    await third.run_until("", B)
    assert await bench.shown() == {f"{ONE} TCP/80": "b"}
    await theirs.step("well")
    assert await bench.shown() == {f"{ONE} TCP/80": "b"}


async def test_a_grant_is_not_revoked_while_its_address_is_published(bench: Bench) -> None:
    await bench.create(A)
    await bench.create(B, requested=TWO)
    first, second = await bench.controller(), await bench.controller()
    await first.run_until_idle()
    await bench.request_address(A, "")
    await bench.user.patch(SERVICES, B, {"spec": {"type": "ClusterIP"}})
    await first.run_until_idle()
    await bench.request_address(A, TWO)
    await bench.user.patch(SERVICES, B, {"spec": {"type": "LoadBalancer"}})
    await bench.request_address(B, ONE)
    await first.receive(100)
    await first.run_until(PUBLISH, A)
    # The second controller has received the specs and all grants, but not that Service a has the
    # address in its status.
    await second.receive(100, ["addressgrants"])
    second.dirty = {B}
    for _ in range(20):
        await second.step("well")
    await bench.shown()
    await first.run_until_idle()
    await second.run_until_idle()
    assert await bench.shown() == {f"{TWO} TCP/80": "a", f"{ONE} TCP/80": "b"}


async def test_a_service_that_the_watch_has_not_shown_does_not_count_as_deleted(
    bench: Bench,
) -> None:
    behind = await bench.controller()
    await bench.create(A)
    await (await bench.controller()).run_until_idle()
    await behind.receive(100, ["addressgrants"])
    assert A in behind.dirty
    await behind.run_until("get Service", A)
    await behind.step("well")
    assert await bench.holders() == {ONE: ["a"]}


async def test_a_grant_that_another_service_has_joined_is_not_deleted(bench: Bench) -> None:
    await bench.create(A, 80, annotations=SHARED)
    first = await bench.controller()
    await first.run_until_idle()
    await bench.user.delete(SERVICES, A)
    await first.receive(100)
    await first.run_until("delete AddressGrant", A)
    await bench.create(B, 443, annotations=SHARED)
    await (await bench.controller()).run_until("", B)
    assert await bench.holders() == {ONE: ["a", "b"]}
    await first.step("well")
    assert await bench.shown() == {f"{ONE} TCP/443": "b"}
    assert "b" in (await bench.holders())[ONE]


async def test_two_controllers_that_create_one_grant_share_no_port(bench: Bench) -> None:
    await bench.create(A)
    await bench.create(B)
    for key, controller in ((A, await bench.controller()), (B, await bench.controller())):
        # Each controller knows only one of the two Services.
        controller.state.services.pop(B if key == A else A)
        controller.planner.ledger.source = None
        await controller.run_until("create AddressGrant", key)
    for controller in bench.controllers:
        await controller.step("well")
    assert len(await bench.grants()) == 1
    for controller in bench.controllers:
        await controller.run_until_idle()
        assert len(set(await bench.shown())) == len(await bench.shown())
