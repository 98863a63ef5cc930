"""Class ovn with a gateway router on each node, with packets through a real OVN: three chassis, of
which the first has three pods and the second one. Each chassis stands for the node of its name.
Gateway routers translate the source of load-balanced connections (lb_force_snat_ip), as those of
OVN-Kubernetes do."""

import asyncio
import json
import socket
from collections.abc import Collection

import msgspec
import pytest
from tests.drivers.ovn.rows import API, VIP, VIP6, WEB
from tests.drivers.ovn.traffic import (
    CONNECTIONS,
    DEADLINE_S,
    MARKED,
    applied,
    ask,
    call,
    call_udp,
    calls,
    connect,
    foreign_dump,
    removed,
    run_pass,
    running,
    served,
    settle,
    shared,
)

from fairlead.drivers.ovn.spec import Site
from fairlead.lab import namespace, process
from fairlead.lab.ovn.layout import UPSTREAM, pod_switch
from fairlead.lab.ovn.site import CLIENT_ADDRESS, CLIENT_ADDRESS_V6, OvnSite
from fairlead.net import arp
from fairlead.net.link import Rtnetlink

GATEWAYS = Site("c1", "GR_{node}", topology="gateways")
ON_LINK = "192.0.2.200"
"""An address in the external network of the gateway routers."""
ROUNDS = 3


async def test_each_pod_sees_the_client_and_gets_the_same_share_of_weighted_routes(
    gateway_site: OvnSite,
) -> None:
    await removed(gateway_site)
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, addresses=(VIP, VIP6)))
        for prefix in (f"{VIP}/32", f"{VIP6}/128"):
            await gateway_site.route(prefix, {"ch1": 3, "ch2": 1})
        pods, peers = await calls(gateway_site.namespace("client"), VIP, CONNECTIONS)
        assert peers == {CLIENT_ADDRESS}
        shared(pods, {pod.name: 1 for pod in gateway_site.pods})
        pods, peers = await calls(gateway_site.namespace("client"), VIP6, 40)
        assert peers == {CLIENT_ADDRESS_V6}
        assert {name[:2] for name in pods} == {"n1", "n2"}


async def test_a_node_sends_to_its_own_pods_alone(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, addresses=(VIP, VIP6)))
        for chassis in ("ch1", "ch2"):
            await gateway_site.route(f"{VIP}/32", {chassis: 1})
            await gateway_site.route(f"{VIP6}/128", {chassis: 1})
            own = {pod.name for pod in gateway_site.pods if pod.chassis == chassis}
            for address in (VIP, VIP6):
                pods, _ = await calls(gateway_site.namespace("client"), address, 20)
                assert pods.keys() <= own


async def test_udp_datagrams_reach_the_pods_of_the_node(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, protocol="UDP"))
        await gateway_site.route(f"{VIP}/32", {"ch2": 1})
        answers = [await call_udp(gateway_site.namespace("client"), VIP) for _ in range(10)]
        assert {each.peer for each in answers} == {CLIENT_ADDRESS}
        assert {each.pod for each in answers} == {"n2p1"}


@pytest.mark.parametrize("address", [VIP, VIP6])
async def test_a_node_without_pods_refuses_from_the_address_itself(
    gateway_site: OvnSite, address: str
) -> None:
    await removed(gateway_site)
    client = gateway_site.namespace("client")
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, addresses=(VIP, VIP6)))
        await applied(gateway_site, driver, served(gateway_site, "n2p1", addresses=(VIP, VIP6)))
        length = 128 if ":" in address else 32
        await gateway_site.route(f"{address}/{length}", {"ch1": 1})
        for _ in range(10):
            # A client ignores a reset that comes from the address of the router.
            with pytest.raises(ConnectionRefusedError):
                await call(client, address)


async def test_open_connections_survive_twenty_changes_and_the_end_of_the_service(
    gateway_site: OvnSite,
) -> None:
    await removed(gateway_site)
    client = gateway_site.namespace("client")
    await gateway_site.route(f"{VIP}/32", {"ch1": 3, "ch2": 1})
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site))
        held = [await connect(client, VIP) for _ in range(40)]
        before = [await ask(each) for each in held]
        assert {each.pod for each in before} == {pod.name for pod in gateway_site.pods}
        names = [pod.name for pod in gateway_site.pods]
        for number in range(20):
            chosen = [names[number % 4], *([names[(number + 1) % 4]] if number % 3 else [])]
            await applied(gateway_site, driver, served(gateway_site, *chosen))
            assert [await ask(each) for each in held] == before
        await applied(gateway_site, driver)
        assert [await ask(each) for each in held] == before
        with pytest.raises(ConnectionRefusedError):
            await call(client, VIP)
        for each in held:
            each.close()


async def arp_answers(site: OvnSite, address: str) -> Collection[str]:
    """Return the MAC addresses that answer ARP requests of the client's router for an address.
    Requests for the addresses of the gateway routers follow it: when these have answered, every
    router has processed the first request."""
    made = namespace.make_socket(
        site.namespace("router"), socket.AF_PACKET, socket.SOCK_RAW, socket.htons(arp.ETHERTYPE)
    )
    found: set[str] = set()
    loop = asyncio.get_running_loop()
    with made as wire:
        wire.setblocking(False)
        wire.bind(("outside", arp.ETHERTYPE))
        mac = wire.getsockname()[4]
        for _ in range(ROUNDS):
            waiting = {each.address for each in site.gateways}
            for target in (address, *waiting):
                await loop.sock_sendall(wire, arp.request(mac, UPSTREAM, target))
            async with asyncio.timeout(DEADLINE_S):
                while waiting:
                    answer = arp.parse(await loop.sock_recv(wire, 2048))
                    if answer is None or answer.operation != arp.REPLY:
                        continue
                    waiting.discard(answer.sender)
                    if answer.sender == address:
                        found.add(answer.sender_mac.hex(":"))
    return found


async def test_no_router_answers_arp_for_an_address_in_its_network(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, addresses=(ON_LINK,)))
    assert await arp_answers(gateway_site, ON_LINK) == set()
    # Otherwise every router that has the address answers.
    for row in await gateway_site.central.rows("Load_Balancer"):
        option = "options:neighbor_responder=reachable"
        await gateway_site.central.control("nb", "set", "load_balancer", row["_uuid"], option)
    await gateway_site.central.synchronize()
    assert len(await arp_answers(gateway_site, ON_LINK)) == 2


async def test_the_host_answers_arp_if_it_has_the_address(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    host = gateway_site.chassis[0].inside
    async with running(gateway_site, GATEWAYS) as driver:
        await applied(gateway_site, driver, served(gateway_site, addresses=(ON_LINK,)))
    # The uplink belongs to Open vSwitch, so the host must not answer there as well.
    namespace.set_sysctls(host, {"net/ipv4/conf/external/arp_ignore": 8})
    with namespace.inside(host):
        links = Rtnetlink()
    async with links:
        await links.set_address("lo", f"{ON_LINK}/32")
        try:
            _, output, _ = await process.run(
                host, ("ip", "-json", "link", "show", "br-ex"), lab=gateway_site.lab
            )
            assert await arp_answers(gateway_site, ON_LINK) == {json.loads(output)[0]["address"]}
        finally:
            removal = ("ip", "address", "del", f"{ON_LINK}/32", "dev", "lo")
            await process.run(host, removal, lab=gateway_site.lab)


async def test_pods_reach_the_address_through_their_switch(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    switches = tuple(pod_switch(each.name) for each in gateway_site.chassis)
    own = msgspec.structs.replace(GATEWAYS, switches=switches)
    async with running(gateway_site, own) as driver:
        await applied(gateway_site, driver, served(gateway_site))
        caller = gateway_site.pods[-1]
        pods, peers = await calls(gateway_site.namespace(caller.name), VIP, 40)
        assert pods.keys() == {pod.name for pod in gateway_site.pods}
        assert peers == {caller.address, VIP}


async def test_after_a_restart_there_is_nothing_to_do(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    async with running(gateway_site, GATEWAYS) as driver:
        await settle(driver, served(gateway_site))
        await settle(driver, served(gateway_site, "n1p1", "n1p2"))
    async with running(gateway_site, GATEWAYS) as driver:
        desired = driver.render({WEB: served(gateway_site, "n1p1", "n1p2")})
        assert driver.diff(desired, await driver.read(None)) == []


async def test_rows_of_others_stay_as_they_are(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    control = gateway_site.central.control
    for name, vip, router in (
        ("octavia", "203.0.113.50:80", "GR_ch1"),
        ("plain", "203.0.113.51:80", "GR_ch2"),
    ):
        await control("nb", "lb-add", name, vip, "10.244.1.10:8080", "tcp")
        await control("nb", "lr-lb-add", router, name)
    await control("nb", "set", "load_balancer", "octavia", f"external_ids:{MARKED}=c2")
    before = await foreign_dump(gateway_site)
    now_s = 1e9
    async with running(gateway_site, GATEWAYS, clock=lambda: now_s) as driver:
        await settle(driver, served(gateway_site))
        await settle(driver, served(gateway_site, "n1p1"))
        await settle(driver)
        now_s += 1e6
        await settle(driver)
    assert await foreign_dump(gateway_site) == before
    assert len(await gateway_site.central.rows("Load_Balancer")) == 2


async def test_an_address_serves_the_next_service_at_once(gateway_site: OvnSite) -> None:
    await removed(gateway_site)
    await gateway_site.route(f"{VIP}/32", {"ch1": 1})
    async with running(gateway_site, GATEWAYS) as driver:
        await settle(driver, served(gateway_site))
        following = served(gateway_site, "n1p2", key=API)
        assert (await run_pass(driver, following, keys=(API,)))[API].state == "waiting"
        await settle(driver)
        await settle(driver, following, keys=(API,))
        await gateway_site.central.synchronize()
        pods, _ = await calls(gateway_site.namespace("client"), VIP, 20)
        assert pods.keys() == {"n1p2"}
