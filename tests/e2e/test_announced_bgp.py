"""Addresses that gateways announce by BGP to a real router, with BFD.

The first lab has three gateways and BIRD on the router, the second a gateway on every node, beside
kube-proxy, and FRR on the router. Gateways exchange flow entries (`gateway.peers`, `auto` in the
second lab): the router may move a connection to another gateway at any time."""

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import pytest
import pytest_asyncio
from tests.e2e.announced import (
    AnnouncedShop,
    Moves,
    await_hops,
    await_one_owner,
    check_kept,
    crowd,
    during,
    services,
    traces,
    unchanged_routes,
    withdrawing,
)
from tests.e2e.crowd import check_unharmed
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import NAME, addresses_of, until
from tests.e2e.logs import end_of, entries_of
from tests.e2e.proxied import call

from fairlead.kube.crds import ADDRESS_POOLS, BGP_PEERS
from fairlead.kube.objects import CONFIGURATION, SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.routers import ROUTER_ADDRESSES, ROUTER_ASN, Routing
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

GATEWAYS = ("gw1", "gw2", "gw3")
NODES = ("node1", "node2", "node3")
PLACES = ("node1", "node1", "node1", "node2")
CALLS = 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop() -> AsyncIterator[AnnouncedShop]:
    name = f"bgp{os.getpid()}"
    routing = Routing(daemon="bird", bfd_interval_ms=100)
    lab = Site.create(
        name,
        nodes=2,
        gateways=3,
        announce="bgp",
        routing=routing,
        transport=Transport(peers=True),
    )
    async with lab as site:
        shop = AnnouncedShop(site)
        await shop.start(PLACES)
        await shop.create()
        await shop.await_weights(PLACES)
        yield shop
    assert traces(name) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes_shop(kube_proxy: None) -> AsyncIterator[AnnouncedShop]:
    name = f"bgpnodes{os.getpid()}"
    routing = Routing(daemon="frr", bfd_interval_ms=100)
    lab = Site.create(
        name,
        nodes=3,
        gateways_on_nodes=True,
        node_proxy="kube-proxy",
        announce="bgp",
        routing=routing,
    )
    async with lab as site:
        shop = AnnouncedShop(site)
        await shop.start(NODES)
        await shop.create()
        await shop.await_weights(NODES)
        yield shop
    assert traces(name) == []


async def test_addresses_are_reached_over_all_gateways_with_fair_shares(
    shop: AnnouncedShop,
) -> None:
    await await_hops(shop.site, shop.addresses, len(GATEWAYS))
    own = shop.site.topology.host("client1").addresses
    pods = await shop.pods()
    for address in shop.addresses:
        answers = [await call(shop.site, "client1", address) for _ in range(CALLS)]
        assert {each["peer"] for each in answers} == {own[":" in address]}
        served = Counter(each["pod"] for each in answers)
        # Four standard deviations of a binomial distribution around an equal share.
        share = CALLS / len(pods)
        most = 4 * (share * (1 - 1 / len(pods))) ** 0.5
        assert served.keys() == set(pods)
        assert max(abs(count - share) for count in served.values()) < most, served


async def test_no_route_changes_and_no_request_fails_when_roles_services_and_pools_change(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    await await_hops(site, shop.addresses, len(GATEWAYS))

    async def kill() -> None:
        for gateway in GATEWAYS:
            await site.kill_role(gateway)

    async def events() -> None:
        for gateway in GATEWAYS:
            await site.start_role(gateway)
        await shop.restart(GATEWAYS)
        await shop.edit_pools("203.0.113.251-203.0.113.254")
        await shop.set_policy("Cluster")
        await shop.set_policy("Local")
        await shop.place((*PLACES, "node2"))
        await shop.place(PLACES)

    async with crowd(shop) as flows, unchanged_routes(site):
        check_unharmed((await during(kill(), flows))[0])
        check_unharmed((await during(events(), flows))[0])


async def test_routes_stay_while_the_api_server_is_away(shop: AnnouncedShop) -> None:
    site = shop.site
    await await_hops(site, shop.addresses, len(GATEWAYS))
    async with crowd(shop) as flows, unchanged_routes(site):
        await site.remove_port("control")
        try:
            check_unharmed((await during(shop.api_server_away(), flows))[0])
        finally:
            await site.restore_port("control")
    await until(shop.api_server_answers, "answers of the API server")


async def test_a_mistaken_peer_is_named_and_harms_no_address(shop: AnnouncedShop) -> None:
    """A BGPPeer shows whether its sessions are established, and why not: no host has its address,
    the neighbor has a session already, or the interface does not exist."""
    site = shop.site
    await await_hops(site, shop.addresses, len(GATEWAYS))
    peers: dict[str, tuple[dict[str, object], str, str]] = {
        "nowhere": ({"address": "198.51.100.250", "multihop": 2}, "True", "gateway gw1: "),
        "twice": ({"address": ROUTER_ADDRESSES[0]}, "True", "has the same neighbor"),
        "unnumbered": ({"interface": "eth77"}, "True", "eth77"),
        "malformed": ({"address": "224.0.0.5"}, "False", ""),
    }

    async def mistaken() -> None:
        kind = {"apiVersion": "fairlead.io/v1alpha1", "kind": "BGPPeer"}
        for name, (spec, _, _) in peers.items():
            await site.apply([{**kind, "metadata": {"name": name}, "spec": {"asn": 64512, **spec}}])
        for name, (_, accepted, why) in peers.items():
            await until(partial(_shows, site, name, accepted, why), f"the status of {name}")
        async with site.client() as client:
            for name in peers:
                await client.delete(BGP_PEERS, ("", name))

    async with crowd(shop) as flows, unchanged_routes(site):
        check_unharmed((await during(mistaken(), flows))[0])


async def _shows(site: Site, peer: str, accepted: str, why: str) -> bool:
    """Return whether the conditions of the BGPPeer say that no host has a session, and why."""
    async with site.client() as client:
        found = (await client.get(BGP_PEERS, ("", peer))).status.conditions
    shown = {each.type: each for each in found}
    return (
        shown.keys() == {"Accepted", "Established"}
        and (shown["Accepted"].status, shown["Established"].status) == (accepted, "False")
        and why in shown["Established"].message
    )


async def test_an_address_that_the_router_refuses_is_named_until_the_router_takes_it(
    shop: AnnouncedShop,
) -> None:
    """Only the import filter of the router changes, so no session does. The blackhole route of the
    lab's router would hide that it has no other route."""
    site = shop.site
    await await_hops(site, shop.addresses, len(GATEWAYS))
    refused, other = shop.addresses
    await until(partial(_refused_at, shop, frozenset()), "routes to all addresses")
    config = site.directory.router / "bird.conf"
    text = config.read_text()
    prefix = f"{refused}/{128 if ':' in refused else 32}"
    check = f"  if net = {prefix} then reject;\n  accept;"
    blackhole = ["blackhole", "203.0.113.0/24", "proto", "static", "metric", "4000000000"]
    assert (await site.exec("router", ["ip", "route", "del", *blackhole]))[0] == 0
    try:
        config.write_text(text.replace("  accept;", check, 1))
        assert (await site.exec("router", ["birdc", "configure"]))[0] == 0
        await until(partial(_refused_at, shop, frozenset({refused})), "a finding of each gateway")
        await until(partial(_ready, site, "False", f"has no route to {refused}"), "not ready")
        assert (await call(site, "client1", other))["pod"] in await shop.pods()
    finally:
        config.write_text(text)
        await site.exec("router", ["birdc", "configure"])
        await site.exec("router", ["ip", "route", "add", *blackhole])
    await until(partial(_refused_at, shop, frozenset()), "routes to all addresses")
    await until(partial(_ready, site, "True"), "ready")


async def _refused_at(shop: AnnouncedShop, addresses: frozenset[str]) -> bool:
    """Return whether each gateway shows that the router refuses exactly these addresses, and all
    others as announced."""
    for gateway in GATEWAYS:
        bgp = (await shop.view(gateway)).get("bgp") or {}
        found = {(each["address"], each["state"]) for each in bgp.get("routes", ())}
        told = {each["address"] for each in bgp.get("addresses", ()) if each["peers"]}
        if found != {(each, "refused") for each in addresses}:
            return False
        if told != {*shop.addresses} - addresses:
            return False
    return True


async def _ready(site: Site, status: str, *texts: str) -> bool:
    async with site.client() as client:
        service = await client.get(SERVICES, ObjectKey("default", NAME))
    ready = {each.type: each for each in service.status.conditions}["fairlead.io/Ready"]
    return ready.status == status and all(text in ready.message for text in texts)


async def test_an_address_that_a_service_loses_is_withdrawn_before_its_tables(
    shop: AnnouncedShop,
) -> None:
    """A gateway logs what it applies: first the withdrawal of the IPv6 address, then the tables."""
    site, host = shop.site, GATEWAYS[0]
    await await_hops(site, shop.addresses, len(GATEWAYS))
    log = site.directory.log(f"{host}/gateway")
    before = end_of(log)
    (lost,) = (each for each in shop.addresses if ":" in each)
    single: dict[str, object] = {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"]}
    async with site.client() as client:
        await client.patch(SERVICES, ObjectKey("default", NAME), {"spec": single})
    await await_hops(site, [lost], 0)
    applied = [
        entry["driver"]
        for entry in entries_of(log, before)
        if entry["event"] == "applied" and entry["first"] == f"default/{NAME}"
    ]
    assert applied.index("bgp") < applied.index("direct")
    await shop.create()
    await await_hops(site, shop.addresses, len(GATEWAYS))


async def test_a_bird_that_hangs_delays_no_table_and_withdraws_when_it_answers(
    shop: AnnouncedShop,
) -> None:
    """The order in the log shows that nothing waits for BIRD: the call that has begun first ends
    after all tables have changed."""
    site, host = shop.site, GATEWAYS[0]
    await await_hops(site, shop.addresses, len(GATEWAYS))
    inside = process.in_namespaces([site.topology.namespace(host)])
    (bird,) = (each.pid for each in inside if is_bird(each.pid))
    log = site.directory.log(f"{host}/gateway")
    before = end_of(log)
    (lost,) = (each for each in shop.addresses if ":" in each)
    single: dict[str, object] = {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"]}

    def applied() -> list[str]:
        return [
            entry["driver"]
            for entry in entries_of(log, before)
            if entry["event"] == "applied"
            and entry["first"] == f"default/{NAME}"
            and entry["driver"] in ("bgp", "direct")
        ]

    def has_applied(driver: str, times: int) -> Callable[[], Awaitable[bool]]:
        async def applied_so_often() -> bool:
            return applied().count(driver) >= times

        return applied_so_often

    os.kill(bird, signal.SIGSTOP)
    try:
        async with site.client() as client:
            await client.patch(SERVICES, ObjectKey("default", NAME), {"spec": single})
        await shop.set_policy("Cluster")
        await until(has_applied("direct", 2), "two changes of the tables")
    finally:
        os.kill(bird, signal.SIGCONT)
    await await_hops(site, [lost], 0)
    await until(has_applied("bgp", 1), "the end of the withdrawal")
    assert applied()[:2] == ["direct", "direct"]
    await shop.set_policy("Local")
    await shop.create()
    await await_hops(site, shop.addresses, len(GATEWAYS))


async def test_an_address_that_changes_its_method_is_announced_the_new_way_first(
    shop: AnnouncedShop,
) -> None:
    site, pool = shop.site, "moving"
    await await_hops(site, shop.addresses, len(GATEWAYS))

    async def set_method(method: str) -> None:
        announced = {"addresses": ["192.0.2.240-192.0.2.245"], "announce": {"method": method}}
        kind = {"apiVersion": "fairlead.io/v1alpha1", "kind": "AddressPool"}
        spec = {**announced, "autoAssign": False}
        await site.apply([{**kind, "metadata": {"name": pool}, "spec": spec}])

    async def has_hops(expected: int) -> bool:
        shown = await site.exec("router", ["ip", "-json", "route", "show", f"{address}/32"])
        routes = json.loads(shown[1] or "[]")
        return sum(len(each.get("nexthops", [each])) for each in routes) == expected

    async def withdrawn() -> bool:
        return bool(moves.withdrawals())

    await set_method("bgp")
    (service,) = made = services(1, **{"address-pool": pool})
    await site.apply(made)
    (address,) = await addresses_of(site, service["metadata"]["name"])
    await until(partial(has_hops, len(GATEWAYS)), "the routes")
    async with Moves(site, address) as moves:
        await set_method("l2")
        await until(partial(has_hops, 0), "no route")
        await await_one_owner(site, "node1", [address], GATEWAYS)
    assert min(moves.claims()) < max(moves.routes(deleted=True))
    assert await shop.answers("client1", address)
    async with Moves(site, address) as moves:
        await set_method("bgp")
        await until(partial(has_hops, len(GATEWAYS)), "the routes")
        await until(withdrawn, "the withdrawal on the link")
    assert min(moves.routes(deleted=False)) < min(moves.withdrawals())
    assert await shop.answers("client1", address)
    async with site.client() as client:
        await client.delete(SERVICES, ObjectKey("default", service["metadata"]["name"]))
        await client.delete(ADDRESS_POOLS, ("", pool))


async def test_a_wrong_password_is_named_and_a_corrected_secret_is_used(
    shop: AnnouncedShop,
) -> None:
    """The router has a second address and port, where it requires a password. Its other sessions
    and the addresses stay as they are."""
    site, config = shop.site, shop.site.directory.router / "bird.conf"
    await await_hops(site, shop.addresses, len(GATEWAYS))
    text, second = config.read_text(), "192.0.2.3"
    # BIRD has one session for each address and port of a neighbor.
    locked = "".join(
        f"protocol bgp {{\n  local {second} port 1790 as {ROUTER_ASN}; passive;\n"
        f"  neighbor {site.topology.host(each).addresses[0]} port 1790 external;\n"
        '  password "right"; ipv4 { import none; export none; };\n}\n'
        for each in GATEWAYS
    )
    named = {"name": "bgp-locked", "namespace": CONFIGURATION.namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": named}
    peer = {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "BGPPeer",
        "metadata": {"name": "locked"},
        "spec": {
            "asn": ROUTER_ASN,
            "address": second,
            "port": 1790,
            "families": ["IPv4"],
            "passwordSecret": {"name": "bgp-locked"},
        },
    }
    kubectl = Kubectl(site.directory.kubeconfig, site.name)
    await _run(site, ["ip", "addr", "add", f"{second}/24", "dev", "lan"])
    try:
        config.write_text(text + locked)
        await _run(site, ["birdc", "configure"])
        async with unchanged_routes(site):
            await site.apply([{**secret, "stringData": {"password": "wrong"}}, peer])
            why = "gateway gw1: no answer from 192.0.2.3 on TCP port 1790"
            await until(partial(_shows, site, "locked", "True", why), "the condition")
            await until(partial(_shows, site, "locked", "True", "the same password"), "the hint")

            async def told() -> bool:
                shown = await kubectl("get", "events", "-A", "-o", "json")
                return {f"gateway-{each}" for each in GATEWAYS} == {
                    each["involvedObject"]["name"]
                    for each in json.loads(shown)["items"]
                    if each["reason"] == "BgpSessionDown"
                    and each["involvedObject"]["kind"] == "Announcer"
                    and "locked (192.0.2.3) is down: no answer" in each["message"]
                    and "the same password" in each["message"]
                }

            await until(told, "an Event of each gateway")
            await site.apply([{**secret, "stringData": {"password": "right"}}])
            await until(partial(_has_sessions, site, "locked"), "the sessions")
            async with site.client() as client:
                await client.delete(BGP_PEERS, ("", "locked"))
    finally:
        config.write_text(text)
        await _run(site, ["birdc", "configure"])
        await _run(site, ["ip", "addr", "del", f"{second}/24", "dev", "lan"])


async def _run(site: Site, argv: Sequence[str]) -> None:
    assert (await site.exec("router", argv))[0] == 0


async def _has_sessions(site: Site, peer: str) -> bool:
    """Return whether the BGPPeer shows that each gateway has a session with it."""
    async with site.client() as client:
        found = (await client.get(BGP_PEERS, ("", peer))).status
    shown = {each.type: each.status for each in found.conditions}
    return shown["Established"] == "True" and found.sessions == f"{len(GATEWAYS)}/{len(GATEWAYS)}"


async def test_a_gateway_that_is_configured_so_withdraws_without_the_api_server_and_at_its_stop(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    async with withdrawing(shop.site, "gw3"):
        await await_hops(site, shop.addresses, len(GATEWAYS))
        await site.remove_port("control")
        try:
            await await_hops(site, shop.addresses, len(GATEWAYS) - 1)
        finally:
            await site.restore_port("control")
        await await_hops(site, shop.addresses, len(GATEWAYS))
    await await_hops(site, shop.addresses, len(GATEWAYS) - 1)
    await site.start_role("gw3")
    await await_hops(site, shop.addresses, len(GATEWAYS))


async def test_open_connections_live_through_the_silent_death_of_a_gateway(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    await await_hops(site, shop.addresses, len(GATEWAYS))

    async def die() -> None:
        await site.remove_port("gw2")
        await await_hops(site, shop.addresses, len(GATEWAYS) - 1)

    async def return_() -> None:
        await site.restore_port("gw2")
        await await_hops(site, shop.addresses, len(GATEWAYS))

    async with crowd(shop) as flows:
        check_kept((await during(die(), flows))[0])
        check_kept((await during(return_(), flows))[0])


async def test_the_reboot_of_a_drained_node_and_a_restart_of_bird_lose_nothing(
    nodes_shop: AnnouncedShop,
) -> None:
    shop, site = nodes_shop, nodes_shop.site
    rebooted, others = "node2", ("node1", "node3")
    kubectl = Kubectl(site.directory.kubeconfig, site.name)
    await await_hops(site, shop.addresses, len(NODES))

    async def reboot() -> None:
        await kubectl("drain", rebooted, "--force", "--ignore-daemonsets")
        await await_hops(site, shop.addresses, len(others))
        shop.gateways = list(others)
        await shop.place(others)
        await site.kill_node(rebooted)
        await site.revive_node(rebooted)

    async def include() -> None:
        await kubectl("uncordon", rebooted)
        shop.gateways = list(NODES)
        await await_hops(site, shop.addresses, len(NODES))
        await shop.place(NODES)

    async def kill_bird() -> None:
        inside = process.in_namespaces([site.topology.namespace("node3")])
        # Every BIRD of the node has its own folder in its command line.
        birds = [each for each in inside if is_bird(each.pid)]
        assert birds
        await process.kill_all(birds)
        await until(lambda: bird_answers(site, "node3"), "a new BIRD")

    async with crowd(shop) as flows:
        for event in (reboot(), include(), kill_bird()):
            check_unharmed((await during(event, flows))[0])
    await await_hops(site, shop.addresses, len(NODES))


async def test_the_return_of_a_node_that_was_cut_off_breaks_no_connection_to_pods_elsewhere(
    nodes_shop: AnnouncedShop,
) -> None:
    """The other gateways gave its slots to other nodes meanwhile. It neither knows that, nor counts
    these nodes as alive, until it has caught up."""
    shop, site = nodes_shop, nodes_shop.site
    lost = "node1"
    await await_hops(site, shop.addresses, len(NODES))
    gone = {pod for pod, node in (await shop.pods()).items() if node == lost}

    async def die() -> None:
        await site.remove_port(lost)
        await await_hops(site, shop.addresses, len(NODES) - 1)

    async def return_() -> None:
        await site.restore_port(lost)
        await await_hops(site, shop.addresses, len(NODES))

    broken = set[str]()

    async def begun_elsewhere() -> bool:
        period = await flows.take()
        broken.update(pod for count in period.values() for pod in count.broken)
        assert broken <= gone
        return broken == gone and await flows.all_open()

    async with crowd(shop) as flows:
        check_kept((await during(die(), flows))[0], gone)
        await until(begun_elsewhere, "new connections instead of those to the lost pods")
        check_kept((await during(return_(), flows))[0], gone)
    # Sessions may need longer than the gateway to come back, so its routes alone do not show that
    # it waited.
    log = site.directory.log(f"{lost}/gateway").read_text()
    assert '"event": "cut off: ' in log
    assert '"event": "caught up; ' in log


def is_bird(pid: int) -> bool:
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip() == "bird"


async def bird_answers(site: Site, host: str) -> bool:
    return (await site.exec(host, ["birdc", "show", "status"]))[0] == 0
