"""Addresses of the nodes' own network, announced by ARP and neighbor discovery.

The first lab is what the chart installs on a plain cluster: a gateway on every node, beside
kube-proxy. Clients are behind the router and on the network itself, and keep neighbor entries as
usual. Gateways find each other and exchange flow entries (`gateway.peers: auto`), so that
connections continue wherever an address moves. The second lab has gateways with interfaces in two
networks."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from tests.e2e.announced import (
    AnnouncedShop,
    arp_owners,
    await_one_owner,
    check_kept,
    crowd,
    during,
    neighbours,
    services,
    traces,
    withdrawing,
)
from tests.e2e.crowd import check_unharmed
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import NAME, addresses_of, until
from tests.e2e.logs import end_of, entries_of
from tests.e2e.proxied import call

from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NODES = ("node1", "node2", "node3")
CLIENTS = ("client1", "host1")
MORE = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(kube_proxy: None) -> AsyncIterator[AnnouncedShop]:
    name = f"arp{os.getpid()}"
    lab = Site.create(
        name,
        nodes=3,
        gateways_on_nodes=True,
        node_proxy="kube-proxy",
        announce="l2",
        lan_clients=1,
    )
    async with lab as site:
        shop = AnnouncedShop(site)
        await shop.start(("node1", "node2", "node3"))
        await shop.create()
        await shop.await_weights(NODES)
        yield shop
    assert traces(name) == []


async def owner_of(shop: AnnouncedShop, among: Sequence[str] = ()) -> str:
    """Wait until the first address of the Service has one owner, and return it."""
    owners = await await_one_owner(shop.site, "host1", [shop.address], among)
    return owners[shop.address]


async def test_each_address_has_one_owner_and_is_reached_with_the_clients_address(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    await owner_of(shop)
    for client in CLIENTS:
        own = site.topology.host(client).addresses
        for address in shop.addresses:
            answers = [await call(site, client, address) for _ in range(20)]
            assert {each["peer"] for each in answers} == {own[":" in address]}
            assert {each["pod"] for each in answers} == set(await shop.pods())
    # Both addresses were resolved by ARP and neighbor discovery, by the router as well.
    for host in (*CLIENTS[1:], "router"):
        known = await neighbours(site, host)
        assert {known[address] for address in shop.addresses} <= set(NODES)


async def test_owners_of_many_addresses_spread_over_all_nodes(shop: AnnouncedShop) -> None:
    more = services(MORE)
    await shop.site.apply(more)
    names = [each["metadata"]["name"] for each in more]
    addresses = [(await addresses_of(shop.site, name))[0] for name in names]
    owners = await await_one_owner(shop.site, "host1", addresses)
    assert Counter(owners.values()).keys() == set(NODES)


async def test_nothing_moves_and_no_request_fails_when_roles_services_and_pools_change(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    before = await owner_of(shop)

    async def events() -> None:
        assert await arp_owners(site, "host1", shop.address) == {before}
        await site.start_role(before, "gateway")
        await shop.edit_pools("192.0.2.251-192.0.2.254")
        await shop.set_policy("Cluster")
        await shop.set_policy("Local")
        await shop.place((NODES[0], *NODES))
        await shop.place(NODES)

    async with crowd(shop) as outside, crowd(shop, "host1") as inside:
        for event in (site.kill_role(before, "gateway"), events()):
            for period in await during(event, outside, inside):
                check_unharmed(period)
        assert await owner_of(shop) == before
        for period in await during(shop.restart(NODES), outside, inside):
            check_unharmed(period)
    await owner_of(shop)


async def test_a_planned_hand_over_fails_no_request_and_nothing_moves_back(
    shop: AnnouncedShop,
) -> None:
    leaving = await owner_of(shop)
    others = [node for node in NODES if node != leaving]

    async def exclude() -> None:
        await shop.exclude(leaving, excluded=True)
        await owner_of(shop, others)

    try:
        async with crowd(shop) as outside, crowd(shop, "host1") as inside:
            for period in await during(exclude(), outside, inside):
                check_kept(period)
    finally:
        await shop.exclude(leaving, excluded=False)
    owner = await owner_of(shop)
    await shop.await_weights(NODES)
    assert await owner_of(shop, others) == owner


async def test_an_address_that_a_service_loses_is_withdrawn_before_its_tables(
    shop: AnnouncedShop,
) -> None:
    """Each gateway logs what it applies, the owner of the IPv6 address as well: first the
    withdrawal, then the tables."""
    site = shop.site
    await owner_of(shop)
    (lost,) = (each for each in shop.addresses if ":" in each)
    assert await shop.answers("host1", lost)
    logs = {node: site.directory.log(f"{node}/gateway") for node in NODES}
    before = {node: end_of(log) for node, log in logs.items()}
    single: dict[str, object] = {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"]}
    async with site.client() as client:
        await client.patch(SERVICES, ObjectKey("default", NAME), {"spec": single})

    def applied(node: str) -> list[str]:
        return [
            entry["driver"]
            for entry in entries_of(logs[node], before[node])
            if entry["event"] == "applied"
            and entry["first"] == f"default/{NAME}"
            and entry["driver"] in ("direct", "l2")
        ]

    async def in_order() -> bool:
        """Return whether every gateway has applied the withdrawal and then the tables. Before, a
        gateway may apply tables that an earlier event has changed; afterwards, there are none."""
        found = [applied(node) for node in NODES]
        return all("l2" in each and each[-1] == "direct" for each in found)

    await until(in_order, "the withdrawal, and then the tables without the address")
    assert not await shop.answers("host1", lost)
    assert await shop.answers("host1", shop.address)
    await shop.create()
    await owner_of(shop)


async def test_a_drained_node_hands_its_addresses_over_before_its_reboot(
    shop: AnnouncedShop,
) -> None:
    """`kubectl drain`, the death of the machine, its boot, `kubectl uncordon`."""
    site = shop.site
    kubectl = Kubectl(site.directory.kubeconfig, site.name)
    leaving = await owner_of(shop)
    others = [node for node in NODES if node != leaving]
    its_pods = {pod for pod, node in (await shop.pods()).items() if node == leaving}

    async def drain() -> None:
        await kubectl("drain", leaving, "--force", "--ignore-daemonsets")
        await owner_of(shop, others)

    async def reboot() -> None:
        await site.kill_node(leaving)
        await site.revive_node(leaving)
        await kubectl("uncordon", leaving)

    async with crowd(shop) as outside, crowd(shop, "host1") as inside:
        for period in await during(drain(), outside, inside):
            check_kept(period)
        owner = await owner_of(shop, others)
        for period in await during(reboot(), outside, inside):
            check_kept(period, gone=its_pods)
        for period in await during(shop.place(NODES), outside, inside):
            check_kept(period, gone=its_pods)
        assert await owner_of(shop) == owner


async def test_after_the_silent_death_of_an_owner_another_node_continues_its_connections(
    shop: AnnouncedShop,
) -> None:
    """The API server is away, too: nodes need it neither to notice the death, nor to take over."""
    site = shop.site
    dying = await owner_of(shop)
    others = [node for node in NODES if node != dying]
    await shop.place([others[0], others[1]])

    async def die() -> None:
        await site.remove_port(dying)
        await owner_of(shop, others)

    await site.remove_port("control")
    try:
        async with crowd(shop) as outside, crowd(shop, "host1") as inside:
            for period in await during(die(), outside, inside):
                check_kept(period)
            owner = await owner_of(shop)
            for period in await during(site.restore_port(dying), outside, inside):
                check_kept(period)
            assert await owner_of(shop) == owner
    finally:
        await site.restore_port(dying)
        await site.restore_port("control")
    await until(shop.api_server_answers, "answers of the API server")
    await shop.place(NODES)


async def test_an_owner_that_is_configured_so_hands_over_without_the_api_server_and_at_its_stop(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    owner = await owner_of(shop)
    others = [node for node in NODES if node != owner]
    async with withdrawing(shop.site, owner):
        await owner_of(shop)
        await site.remove_port("control")
        try:
            second = await owner_of(shop, others)
        finally:
            await site.restore_port("control")
        await until(shop.api_server_answers, "answers of the API server")
        assert await owner_of(shop) == second
    await site.start_role(owner, "gateway")
    async with withdrawing(shop.site, second):
        await owner_of(shop)
    await owner_of(shop, [node for node in NODES if node != second])
    await site.start_role(second, "gateway")
    await shop.await_weights(NODES)


async def test_each_part_of_a_split_network_has_an_owner_and_the_whole_one_again(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    owner = await owner_of(shop)
    alone = next(node for node in NODES if node != owner)
    async with crowd(shop) as outside:
        await site.split([alone, "host1"])
        try:
            assert await owner_of(shop, [alone]) == alone
            assert await arp_owners(site, "node3" if owner != "node3" else "node2", shop.address)
            for period in await during(asyncio.sleep(0), outside):
                check_kept(
                    period, gone={pod for pod, node in (await shop.pods()).items() if node == alone}
                )
        finally:
            await site.heal()
        await owner_of(shop)
        await shop.await_weights(NODES)
        for period in await during(asyncio.sleep(0), outside):
            check_unharmed(period)
    for client in CLIENTS:
        assert await shop.answers(client, shop.address)


async def test_an_address_belongs_to_the_network_that_contains_it_and_moves_only_there() -> None:
    name = f"arptwo{os.getpid()}"
    lab = Site.create(name, nodes=1, gateways=2, announce="l2", lan_clients=1, second_lan=True)
    async with lab as site:
        shop = AnnouncedShop(site)
        await shop.start(["node1"])
        made = [*services(4), *services(4, **{"address-pool": "lan2"})]
        await site.apply(made)
        found = [(await addresses_of(site, each["metadata"]["name"]))[0] for each in made]
        first, second = found[:4], found[4:]
        on_first = await await_one_owner(site, "host1", first)
        on_second = await await_one_owner(site, "host2", second)
        for address in second:
            assert await arp_owners(site, "host1", address) == set()
            assert await shop.answers("host2", address)
            assert await shop.answers("client1", address)
        lost = on_second[second[0]]
        (other,) = {"gw1", "gw2"} - {lost}
        await site.remove_port(lost, "lan2")
        await await_one_owner(site, "host2", second, [other])
        assert await await_one_owner(site, "host1", first) == on_first
        for address in found:
            assert await shop.answers("client1", address)
            assert await shop.answers("host2", address)
    assert traces(name) == []
