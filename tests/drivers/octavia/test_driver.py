"""Load balancers of a real Octavia (API and worker, provider amphora) come to be, change in place and go; calls are counted."""

from tests.drivers.octavia.site import Site, listener, member, service, settings

from fairlead.drivers.octavia.tree import ACTIVE, FoundTree
from fairlead.model import LoadBalancer, OctaviaChecks

OTHER_CHECKS = OctaviaChecks(delay_s=9, fall=5)


def shown(tree: FoundTree) -> dict[int, list[tuple[str, int]]]:
    pools = {pool.id: pool for pool in tree.pools}
    return {
        each.port: sorted((one.member.address, one.member.weight) for one in pools[each.pool_id].members)
        for each in tree.listeners
    }


async def test_one_call_makes_all_of_it_and_one_takes_it_away(site: Site) -> None:
    wanted = service(listener(80), listener(443, member(1), member(3)))
    assert await site.bring(wanted) == []
    assert site.writes == ["POST loadbalancers"]
    tree = await site.tree()
    assert (tree.status, tree.uid, tree.provider) == (ACTIVE, "uid-web", "amphora")
    assert shown(tree) == {80: [("10.1.0.1", 1), ("10.1.0.2", 2)], 443: [("10.1.0.1", 1), ("10.1.0.3", 1)]}
    assert [(pool.monitor.monitor.type, pool.monitor.monitor.path) for pool in tree.pools if pool.monitor] == [
        ("HTTP", "/healthz")
    ] * 2
    assert {one.member.monitor_port for pool in tree.pools for one in pool.members} == {32000}
    assert site.driver.located(wanted).addresses == (tree.address,)
    site.forget()
    assert await site.bring() == []
    assert site.writes == ["DELETE loadbalancers/_"]
    assert (await site.found()).trees == ()


async def test_nothing_to_do_writes_nothing_and_asks_little(site: Site) -> None:
    wanted = service(listener(80), listener(443), listener(53, protocol="UDP"))
    await site.bring(wanted)
    site.anew()
    site.forget()
    found = await site.driver.read(None)
    assert site.driver.diff(site.driver.render({wanted.service: wanted}), found) == []
    assert site.writes == []
    assert sorted(site.reads) == sorted(
        ["GET loadbalancers", "GET listeners", "GET pools", "GET healthmonitors"] + ["GET pools/_/members"] * 3
    )
    site.forget()
    assert await site.bring(wanted) == []
    assert site.front.calls == []


async def test_a_change_of_nodes_is_one_write_for_each_pool(site: Site) -> None:
    await site.bring(service(listener(80), listener(443)))
    tree = await site.tree()
    site.forget()
    await site.bring(service(listener(80, member(1), member(2, 0), member(3, 4)), listener(443, member(3))))
    assert site.writes == ["PUT pools/_/members"] * 2
    after = await site.tree()
    assert shown(after) == {80: [("10.1.0.1", 1), ("10.1.0.2", 0), ("10.1.0.3", 4)], 443: [("10.1.0.3", 1)]}
    assert (after.id, after.address, [each.id for each in after.listeners]) == (
        tree.id,
        tree.address,
        [each.id for each in tree.listeners],
    )


BEFORE = service()
RENEWED = ["DELETE healthmonitors/_", "PUT pools/_/members", "POST healthmonitors"]
CHANGES: list[tuple[str, LoadBalancer, list[str]]] = [
    ("time-outs", service(octavia=settings(client_ms=600_000, member_ms=600_000)), ["PUT listeners/_"]),
    ("none any more, a limit", service(octavia=settings(connection_limit=100)), ["PUT listeners/_"]),
    ("ranges", service(source_ranges=("10.1.2.3/8", "2001:db8::/32")), ["PUT listeners/_"]),
    ("nobody", service(source_ranges=("2001:db8::/32",)), ["PUT listeners/_"]),
    ("everybody, another method", service(octavia=settings(method="LEAST_CONNECTIONS")), ["PUT pools/_", "PUT listeners/_"]),
    ("affinity", service(affinity_timeout_s=600), ["PUT pools/_"]),
    ("none, other checks", service(octavia=settings(checks=OTHER_CHECKS)), ["PUT pools/_", "PUT healthmonitors/_"]),
    ("checks of the node port", service(octavia=settings(asking=(("TCP", "TCP"),))), RENEWED),
    (
        "no checks",
        service(octavia=settings(checks=None, asking=())),
        ["DELETE healthmonitors/_"],
    ),
    (
        "a header",
        service(octavia=settings(header="v2")),
        ["POST pools", "PUT pools/_/members", "POST healthmonitors", "PUT listeners/_", "DELETE pools/_"],
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
    """One after the other, each by as few writes as can be; the load balancer, its address and its listener stay."""
    await site.bring(BEFORE)
    before = await site.tree()
    for name, wanted, writes in CHANGES:
        site.forget()
        assert await site.bring(wanted) == [], name
        assert (name, site.writes) == (name, writes)
        assert await left(site, wanted) == [], name
    after = await site.tree()
    assert (after.id, after.address, after.listeners[0].id) == (before.id, before.address, before.listeners[0].id)
    assert after.listeners[0].timeouts == before.listeners[0].timeouts


async def left(site: Site, wanted: LoadBalancer) -> list[object]:
    """The steps that a driver sees who knows nothing."""
    found = await site.found()
    return list(site.driver.diff(site.driver.render({wanted.service: wanted}), {wanted.service: found}))


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
    assert await left(site, wanted) == []
