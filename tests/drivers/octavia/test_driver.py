"""Load balancers of a real Octavia (API and worker, provider amphora) are created, changed in place
and deleted; calls are counted."""

import asyncio

import msgspec
from tests.drivers.octavia.site import Site, listener, member, service, settings, told
from tests.openstack import clients
from tests.openstack.front import Call

from fairlead.drivers.octavia.balancers import ACTIVE, BalancerState
from fairlead.model import LoadBalancer, OctaviaChecks, ServiceKey

OTHER_CHECKS = OctaviaChecks(delay_s=9, fall=5)


def shown(tree: BalancerState) -> dict[int, list[tuple[str, int]]]:
    pools = {pool.id: pool for pool in tree.pools}
    return {
        each.port: sorted(
            (one.member.address, one.member.weight) for one in pools[each.pool_id].members
        )
        for each in tree.listeners
    }


async def test_one_call_makes_all_of_it_and_one_takes_it_away(site: Site) -> None:
    wanted = service(listener(80), listener(443, member(1), member(3)))
    assert await site.bring(wanted) == []
    assert site.writes == ["POST loadbalancers"]
    tree = await site.tree()
    assert (tree.status, tree.uid, tree.provider) == (ACTIVE, "uid-web", "amphora")
    assert shown(tree) == {
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
    site.forget()
    assert await site.bring() == []
    assert site.writes == ["DELETE loadbalancers/_"]
    assert (await site.found()).balancers == ()


async def test_nothing_to_do_writes_nothing_and_asks_little(site: Site) -> None:
    wanted = service(listener(80), listener(443), listener(53, protocol="UDP"))
    await site.bring(wanted)
    site.anew()
    site.forget()
    assert await site.audit(wanted) == []
    assert site.writes == []
    assert sorted(site.reads) == sorted(
        ["GET loadbalancers", "GET listeners", "GET pools", "GET healthmonitors"]
        + ["GET pools/_/members"] * 3
    )
    site.forget()
    assert await site.bring(wanted) == []
    assert site.front.calls == []


async def test_a_change_of_nodes_is_one_write_for_each_pool(site: Site) -> None:
    await site.bring(service(listener(80), listener(443)))
    tree = await site.tree()
    site.forget()
    await site.bring(
        service(listener(80, member(1), member(2, 0), member(3, 4)), listener(443, member(3)))
    )
    assert site.writes == ["PUT pools/_/members"] * 2
    after = await site.tree()
    assert shown(after) == {
        80: [("10.1.0.1", 1), ("10.1.0.2", 0), ("10.1.0.3", 4)],
        443: [("10.1.0.3", 1)],
    }
    assert (after.id, after.address, [each.id for each in after.listeners]) == (
        tree.id,
        tree.address,
        [each.id for each in tree.listeners],
    )


async def test_a_change_of_one_member_is_a_write_about_that_one_and_others_stay(site: Site) -> None:
    one, two, three = member(1), member(2), member(3)
    await site.bring(service(listener(80, one, two), listener(443, one, two)))
    for members, write in (
        ([one, two, three], "POST pools/_/members"),
        ([one, member(2, 7), three], "PUT pools/_/members/_"),
        ([one, member(2, 7)], "DELETE pools/_/members/_"),
        ([three, member(2, 8)], "PUT pools/_/members"),
        ([], "PUT pools/_/members"),
    ):
        site.forget()
        wanted = service(
            *(msgspec.structs.replace(listener(port), members=tuple(members)) for port in (80, 443))
        )
        assert await site.bring(wanted) == []
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


async def test_a_member_is_asked_elsewhere_and_again_where_it_serves(site: Site) -> None:
    """A write of one member contains all its settings that can change."""
    for number, checks in enumerate(
        (settings(), settings(monitor_types=(("TCP", "TCP"),)), settings())
    ):
        site.forget()
        wanted = service(listener(80, member(1)), octavia=checks)
        assert await site.bring(wanted) == []
        assert await site.left(wanted) == []
        if number:
            assert site.writes == [
                "DELETE healthmonitors/_",
                "PUT pools/_/members/_",
                "POST healthmonitors",
            ]


async def test_a_member_that_somebody_else_has_deleted_is_gone(site: Site) -> None:
    """The member is deleted between the last read and the write."""
    await site.bring(service(listener(80, member(1), member(2))))
    tree = await site.tree()
    (pool,) = tree.pools
    away = next(each for each in pool.members if each.member.address == "10.1.0.2")
    site.client.load_balancer.delete_member(away.id, pool.id)
    clients.settled(site.client, tree.id)
    site.forget()
    wanted = service(listener(80, member(1)))
    assert await site.bring(wanted) == []
    assert (site.writes, [each.status for each in site.front.writes]) == (
        ["DELETE pools/_/members/_"],
        [404],
    )
    assert await site.left(wanted) == []


async def test_a_member_that_somebody_else_has_made_is_taken_as_it_is(site: Site) -> None:
    await site.bring(service(listener(80, member(1))))
    tree = await site.tree()
    (pool,) = tree.pools
    more = {"address": "10.1.0.2", "protocol_port": 30080, "weight": 9}
    site.client.load_balancer.post(f"/lbaas/pools/{pool.id}/members", json={"member": more})
    clients.settled(site.client, tree.id)
    site.forget()
    wanted = service(listener(80, member(1), member(2)))
    # Octavia reports it as existing.
    assert len(await site.bring(wanted)) == 1
    assert site.writes == ["POST pools/_/members", "PUT pools/_/members/_"]
    assert await site.left(wanted) == []


async def test_load_balancers_are_asked_for_one_at_a_time(site: Site) -> None:
    """The first load balancer may still be pending when the next one is requested."""
    services = [
        msgspec.structs.replace(
            service(), service=ServiceKey("default", f"web-{number}"), uid=str(number)
        )
        for number in range(4)
    ]
    beside = list[int]()

    def count(call: Call) -> None:
        if creates(call):
            beside.append(
                sum(creates(other) and not other.status for other in site.front.calls) - 1
            )

    def creates(call: Call) -> bool:
        return told(call) == "POST loadbalancers"

    site.front.fate = count
    await asyncio.gather(*(site.bring(each, key=each.service) for each in services))
    site.front.pass_on()
    assert beside == [0] * len(services)
    await asyncio.gather(*(site.bring(key=each.service) for each in services))


BEFORE = service()
RENEWED = ["DELETE healthmonitors/_", "PUT pools/_/members", "POST healthmonitors"]
CHANGES: list[tuple[str, LoadBalancer, list[str]]] = [
    (
        "time-outs",
        service(octavia=settings(client_ms=600_000, member_ms=600_000)),
        ["PUT listeners/_"],
    ),
    (
        "none any more, a limit",
        service(octavia=settings(connection_limit=100)),
        ["PUT listeners/_"],
    ),
    ("ranges", service(source_ranges=("10.1.2.3/8", "2001:db8::/32")), ["PUT listeners/_"]),
    ("nobody", service(source_ranges=("2001:db8::/32",)), ["PUT listeners/_"]),
    (
        "everybody, another method",
        service(octavia=settings(method="LEAST_CONNECTIONS")),
        ["PUT pools/_", "PUT listeners/_"],
    ),
    ("affinity", service(affinity_timeout_s=600), ["PUT pools/_"]),
    (
        "none, other checks",
        service(octavia=settings(checks=OTHER_CHECKS)),
        ["PUT pools/_", "PUT healthmonitors/_"],
    ),
    (
        "checks of the node port",
        service(octavia=settings(monitor_types=(("TCP", "TCP"),))),
        RENEWED,
    ),
    (
        "no checks",
        service(octavia=settings(checks=None, monitor_types=())),
        ["DELETE healthmonitors/_"],
    ),
    (
        "a header",
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
        "another port, over UDP",
        service(listener(80), listener(80, protocol="UDP"), octavia=settings(header="v2")),
        ["POST pools", "PUT pools/_/members", "POST listeners"],
    ),
    (
        "as at first",
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


async def test_changes_are_made_in_place(site: Site) -> None:
    """Each change is made with as few writes as possible; the load balancer, its address and its
    listener stay."""
    await site.bring(BEFORE)
    before = await site.tree()
    for name, wanted, writes in CHANGES:
        site.forget()
        assert await site.bring(wanted) == [], name
        assert (name, site.writes) == (name, writes)
        assert await site.left(wanted) == [], name
    after = await site.tree()
    assert (after.id, after.address, after.listeners[0].id) == (
        before.id,
        before.address,
        before.listeners[0].id,
    )
    assert after.listeners[0].timeouts == before.listeners[0].timeouts


async def test_speaking_http_needs_another_listener(site: Site) -> None:
    await site.bring(BEFORE)
    site.forget()
    wanted = service(octavia=settings(forwarded_for=True))
    assert await site.bring(wanted) == []
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "DELETE listeners/_",
        "POST listeners",
        "DELETE pools/_",
    ]
    assert await site.left(wanted) == []
