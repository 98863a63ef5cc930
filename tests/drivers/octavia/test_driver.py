"""Load balancers of a real Octavia (API and worker, provider amphora) are created, changed in place
and deleted, with as few calls as possible."""

import asyncio

import msgspec
import pytest
from tests.drivers.octavia.site import Site, listener, member, service, settings, summary
from tests.openstack import clients
from tests.openstack.fault_proxy import Call

from fairlead.drivers.octavia.balancers import ACTIVE, BalancerState
from fairlead.model import LoadBalancer, OctaviaChecks, ServiceKey

OTHER_CHECKS = OctaviaChecks(delay_s=9, fall=5)


def members_by_port(tree: BalancerState) -> dict[int, list[tuple[str, int]]]:
    pools = {pool.id: pool for pool in tree.pools}
    return {
        each.port: sorted(
            (one.member.address, one.member.weight) for one in pools[each.pool_id].members
        )
        for each in tree.listeners
    }


async def test_a_load_balancer_is_created_and_deleted_with_one_call_each(site: Site) -> None:
    wanted = service(listener(80), listener(443, member(1), member(3)))
    assert await site.reconcile(wanted) == []
    assert site.writes == ["POST loadbalancers"]
    tree = await site.tree()
    assert (tree.status, tree.uid, tree.provider) == (ACTIVE, "uid-web", "amphora")
    assert members_by_port(tree) == {
        80: [("10.1.0.1", 1), ("10.1.0.2", 2)],
        443: [("10.1.0.1", 1), ("10.1.0.3", 1)],
    }
    assert [
        (pool.monitor.monitor.type, pool.monitor.monitor.path)
        for pool in tree.pools
        if pool.monitor
    ] == [("HTTP", "/healthz")] * 2
    assert {one.member.monitor_port for pool in tree.pools for one in pool.members} == {32000}
    assert site.planned(wanted).addresses == (tree.address,)
    site.clear_calls()
    assert await site.reconcile() == []
    assert site.writes == ["DELETE loadbalancers/_"]
    assert (await site.found()).balancers == ()


async def test_a_pass_without_changes_makes_no_writes_and_few_reads(site: Site) -> None:
    wanted = service(listener(80), listener(443), listener(53, protocol="UDP"))
    await site.reconcile(wanted)
    site.restart()
    site.clear_calls()
    assert await site.audit(wanted) == []
    assert site.writes == []
    assert sorted(site.reads) == sorted(
        ["GET loadbalancers", "GET listeners", "GET pools", "GET healthmonitors"]
        + ["GET pools/_/members"] * 3
    )
    site.clear_calls()
    assert await site.reconcile(wanted) == []
    assert site.proxy.calls == []


@pytest.mark.soak
async def test_a_change_of_several_nodes_is_one_write_for_each_pool(site: Site) -> None:
    await site.reconcile(service(listener(80), listener(443)))
    tree = await site.tree()
    site.clear_calls()
    await site.reconcile(
        service(listener(80, member(1), member(2, 0), member(3, 4)), listener(443, member(3)))
    )
    assert site.writes == ["PUT pools/_/members"] * 2
    after = await site.tree()
    assert members_by_port(after) == {
        80: [("10.1.0.1", 1), ("10.1.0.2", 0), ("10.1.0.3", 4)],
        443: [("10.1.0.3", 1)],
    }
    assert (after.id, after.address, [each.id for each in after.listeners]) == (
        tree.id,
        tree.address,
        [each.id for each in tree.listeners],
    )


@pytest.mark.soak
async def test_a_change_of_one_member_writes_only_this_member(site: Site) -> None:
    one, two, three = member(1), member(2), member(3)
    await site.reconcile(service(listener(80, one, two), listener(443, one, two)))
    for members, write in (
        ([one, two, three], "POST pools/_/members"),
        ([one, member(2, 7), three], "PUT pools/_/members/_"),
        ([one, member(2, 7)], "DELETE pools/_/members/_"),
        ([three, member(2, 8)], "PUT pools/_/members"),
        ([], "PUT pools/_/members"),
    ):
        site.clear_calls()
        wanted = service(
            *(msgspec.structs.replace(listener(port), members=tuple(members)) for port in (80, 443))
        )
        assert await site.reconcile(wanted) == []
        assert site.writes == [write] * 2
        pools = (await site.tree()).pools
        named = {
            (each.address, 30000 + port, each.weight, 32000)
            for port in (80, 443)
            for each in members
        }
        found = [each.member for pool in pools for each in pool.members]
        assert {
            (each.address, each.port, each.weight, each.monitor_port) for each in found
        } == named


@pytest.mark.soak
async def test_a_change_of_the_monitor_port_is_one_write_for_each_member(site: Site) -> None:
    """A write of one member contains all its settings that can change."""
    for number, checks in enumerate(
        (settings(), settings(monitor_types=(("TCP", "TCP"),)), settings())
    ):
        site.clear_calls()
        wanted = service(listener(80, member(1)), octavia=checks)
        assert await site.reconcile(wanted) == []
        assert await site.remaining_steps(wanted) == []
        if number:
            assert site.writes == [
                "DELETE healthmonitors/_",
                "PUT pools/_/members/_",
                "POST healthmonitors",
            ]


@pytest.mark.soak
async def test_two_nodes_with_one_address_are_one_member(site: Site) -> None:
    """A host that was registered again under another name: Octavia refuses a second member with the
    same address and port. The load balancer is created, and passes change nothing."""
    new = member(1)
    old = msgspec.structs.replace(new, node="old-name", weight=0, state="draining")
    twin = msgspec.structs.replace(new, node="a-name")
    wanted = service(listener(80, *sorted((new, old, twin, member(2)))))
    assert await site.reconcile(wanted) == []
    members = {80: [("10.1.0.1", 1), ("10.1.0.2", 1)]}
    assert members_by_port(await site.tree()) == members
    site.clear_calls()
    assert await site.audit(wanted) == []
    # The old Node is deleted, and comes back.
    for given in ((new, member(2)), (new, old, member(2))):
        assert await site.reconcile(service(listener(80, *sorted(given)))) == []
    assert (site.writes, members_by_port(await site.tree())) == ([], members)


@pytest.mark.soak
async def test_the_deletion_of_a_member_that_another_user_has_deleted_succeeds(site: Site) -> None:
    """The member is deleted between the last read and the write."""
    await site.reconcile(service(listener(80, member(1), member(2))))
    tree = await site.tree()
    (pool,) = tree.pools
    deleted = next(each for each in pool.members if each.member.address == "10.1.0.2")
    site.client.load_balancer.delete_member(deleted.id, pool.id)
    clients.wait_settled(site.client, tree.id)
    site.clear_calls()
    wanted = service(listener(80, member(1)))
    assert await site.reconcile(wanted) == []
    assert (site.writes, [each.status for each in site.proxy.writes]) == (
        ["DELETE pools/_/members/_"],
        [404],
    )
    assert await site.remaining_steps(wanted) == []


@pytest.mark.soak
async def test_a_member_that_another_user_has_created_is_corrected(site: Site) -> None:
    await site.reconcile(service(listener(80, member(1))))
    tree = await site.tree()
    (pool,) = tree.pools
    more = {"address": "10.1.0.2", "protocol_port": 30080, "weight": 9}
    site.client.load_balancer.post(f"/lbaas/pools/{pool.id}/members", json={"member": more})
    clients.wait_settled(site.client, tree.id)
    site.clear_calls()
    wanted = service(listener(80, member(1), member(2)))
    # Octavia rejects the creation, because the member exists.
    assert len(await site.reconcile(wanted)) == 1
    assert site.writes == ["POST pools/_/members", "PUT pools/_/members/_"]
    assert await site.remaining_steps(wanted) == []


@pytest.mark.soak
async def test_load_balancers_are_created_one_after_another(site: Site) -> None:
    """The first load balancer may still be pending when the next one is requested."""
    services = [
        msgspec.structs.replace(
            service(), service=ServiceKey("default", f"web-{number}"), uid=str(number)
        )
        for number in range(4)
    ]
    concurrent = list[int]()

    def count(call: Call) -> None:
        if creates(call):
            concurrent.append(
                sum(creates(other) and not other.status for other in site.proxy.calls) - 1
            )

    def creates(call: Call) -> bool:
        return summary(call) == "POST loadbalancers"

    site.proxy.fault = count
    await asyncio.gather(*(site.reconcile(each, key=each.service) for each in services))
    site.proxy.forward_all()
    assert concurrent == [0] * len(services)
    await asyncio.gather(*(site.reconcile(key=each.service) for each in services))


BEFORE = service()
RECREATED = ["DELETE healthmonitors/_", "PUT pools/_/members", "POST healthmonitors"]
CHANGES: list[tuple[str, LoadBalancer, list[str]]] = [
    (
        "timeouts",
        service(octavia=settings(client_ms=600_000, member_ms=600_000)),
        ["PUT listeners/_"],
    ),
    (
        "no timeouts, a connection limit",
        service(octavia=settings(connection_limit=100)),
        ["PUT listeners/_"],
    ),
    ("source ranges", service(source_ranges=("10.1.2.3/8", "2001:db8::/32")), ["PUT listeners/_"]),
    (
        "only source ranges of the other family",
        service(source_ranges=("2001:db8::/32",)),
        ["PUT listeners/_"],
    ),
    (
        "no source ranges, another algorithm",
        service(octavia=settings(method="LEAST_CONNECTIONS")),
        ["PUT pools/_", "PUT listeners/_"],
    ),
    ("session affinity", service(affinity_timeout_s=600), ["PUT pools/_"]),
    (
        "no session affinity, other health checks",
        service(octavia=settings(checks=OTHER_CHECKS)),
        ["PUT pools/_", "PUT healthmonitors/_"],
    ),
    (
        "health checks of the node port",
        service(octavia=settings(monitor_types=(("TCP", "TCP"),))),
        RECREATED,
    ),
    (
        "no health checks",
        service(octavia=settings(checks=None, monitor_types=())),
        ["DELETE healthmonitors/_"],
    ),
    (
        "a PROXY header",
        service(octavia=settings(header="v2")),
        [
            "POST pools",
            "PUT pools/_/members",
            "POST healthmonitors",
            "PUT listeners/_",
            "DELETE pools/_",
        ],
    ),
    (
        "another listener, over UDP",
        service(listener(80), listener(80, protocol="UDP"), octavia=settings(header="v2")),
        ["POST pools", "PUT pools/_/members", "POST listeners"],
    ),
    (
        "the settings of the beginning",
        BEFORE,
        [
            "POST pools",
            "PUT pools/_/members",
            "POST healthmonitors",
            "PUT listeners/_",
            "DELETE listeners/_",
            "DELETE pools/_",
            "DELETE pools/_",
        ],
    ),
]


async def test_changes_are_made_in_place_with_the_expected_writes(site: Site) -> None:
    """The load balancer, its address and its listener stay the same."""
    await site.reconcile(BEFORE)
    before = await site.tree()
    for name, wanted, writes in CHANGES:
        site.clear_calls()
        assert await site.reconcile(wanted) == [], name
        assert (name, site.writes) == (name, writes)
        assert await site.remaining_steps(wanted) == [], name
    after = await site.tree()
    assert (after.id, after.address, after.listeners[0].id) == (
        before.id,
        before.address,
        before.listeners[0].id,
    )
    assert after.listeners[0].timeouts == before.listeners[0].timeouts


@pytest.mark.soak
async def test_a_change_to_http_recreates_the_listener(site: Site) -> None:
    await site.reconcile(BEFORE)
    site.clear_calls()
    wanted = service(octavia=settings(forwarded_for=True))
    assert await site.reconcile(wanted) == []
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "DELETE listeners/_",
        "POST listeners",
        "DELETE pools/_",
    ]
    assert await site.remaining_steps(wanted) == []
