"""Announcement on layer 2: every node is a gateway, the router has no route to the addresses, and
the nodes answer its ARP requests and neighbor solicitations. kube-proxy serves one node, and
`fairlead node` the others."""

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
from tests.deploy.life import POD
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import OPEN_CONNECTIONS, Load, addresses_of, output, until

from fairlead.drivers.announce.responder import directory_of
from fairlead.kube import objects
from fairlead.lab import kubeproxy, namespace
from fairlead.lab.rundir import Transport
from fairlead.lab.site import ROLE_PORTS, Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net import arp, ndp
from fairlead.net.address import is_ipv6
from fairlead.net.packet_socket import PacketSocket

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NODES = ("node1", "node2", "node3")
IPV4, IPV6, DUAL = (
    {"ipFamilies": ["IPv4"]},
    {"ipFamilies": ["IPv6"]},
    {"ipFamilyPolicy": "RequireDualStack"},
)
SERVICES = (
    {f"web{number}": IPV4 for number in range(8)}
    | {f"six{number}": IPV6 for number in range(4)}
    | {"both": DUAL}
)
REQUESTS = 20
CALLS = 200
"""The number of calls while the owner's gateway is dead."""
AT_ONCE = 10
"""How many of them run at the same time."""
OPEN = 300
"""The number of open connections when a host dies. A third of them end at its own pod."""
BUFFER_BYTES = 4 << 20
IN_FLIGHT = 2
"""How many of the others may break with it."""
DEADLINE_S = 5.0
"""How long the last answer to many requests may take."""
OUTSIDE = ("203.0.113.10", "2001:db8:f::10")
FOREIGN_MAC = bytes.fromhex("020000009999")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(kube_proxy: Path) -> AsyncIterator[Site]:
    assert kube_proxy.name == "kube-proxy"
    lab = Site.create(
        f"l2{os.getpid()}",
        nodes=3,
        gateways_on_nodes=True,
        announce="l2",
        transport=Transport(peers=True),
    )
    async with lab as made:
        await made.stop_role("node1", "node")
        await output(
            made, "node1", "fairlead", "node", "--config", str(made.directory.config), "--cleanup"
        )
        await kubeproxy.start(made, "node1")
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(site: Site) -> Mapping[str, str]:
    """The address of each Service; `both/IPv6` is the second one of `both`. Each node has a pod of
    all Services."""
    await site.apply([pod(node) for node in NODES])
    await site.await_pods()
    await site.apply([service(name, spec) for name, spec in SERVICES.items()])
    shown = {name: await addresses_of(site, name) for name in SERVICES}
    found = {name: each[0] for name, each in shown.items()} | {"both/IPv6": shown["both"][1]}

    async def are_shared() -> bool:
        answers = ask(site, list(found.values()), 1).values()
        return all(len(each) == 1 for each in answers) and len(set().union(*answers)) == len(NODES)

    # Addresses are shown before they are announced, and move while gateways start.
    await until(are_shared, "answers of every node")
    return found


def pod(node: str) -> dict[str, Any]:
    spec: Any = POD["spec"]
    metadata = {"name": f"web-{node}", "labels": {"app": "web"}}
    return {**POD, "metadata": metadata, "spec": {**spec, "nodeName": node}}


def service(
    name: str, spec: Mapping[str, Any] = MappingProxyType({}), **annotations: str
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {f"fairlead.io/{key}": value for key, value in annotations.items()},
        },
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "selector": {"app": "web"},
            "ports": [{"port": 80, "targetPort": "web"}],
            **spec,
        },
    }


def ask(site: Site, addresses: Sequence[str], number: int) -> Mapping[str, Counter[str]]:
    """Send this number of requests for each address from the router. Return how many answers came
    from each MAC address."""
    found: dict[str, Counter[str]] = {each: Counter() for each in addresses}
    for at, control in enumerate(site.topology.host("control").addresses):
        asked = [each for each in addresses if is_ipv6(each) == is_ipv6(control)]
        with namespace.inside(site.namespace(ROUTER)):
            made = PacketSocket("lan", (arp.ETHERTYPE, ndp.ETHERTYPE)[at])
        with made:
            made.reserve(BUFFER_BYTES)  # gateways may announce all addresses at the same time
            for each in asked:
                for _ in range(number):
                    made.send(request(made.mac, each))
            # A host without gateways answers last: then all other answers have arrived.
            made.send(request(made.mac, control))
            for address, mac in answers_until(made, control):
                if address in found:
                    found[address][mac] += 1
    return found


def answers_until(made: PacketSocket, control: str) -> Iterator[tuple[str, str]]:
    """Yield the address and the MAC address of each answer, up to the one for `control`."""
    while (frame := made.receive(DEADLINE_S)) is not None:
        address, mac = answered(frame)
        if address == control:
            return
        yield address, mac
    raise AssertionError("the control host does not answer")


def request(mac: bytes, address: str) -> bytes:
    """Return the request with which the router asks for an address."""
    router = str(LAN[is_ipv6(address)][1])
    asking = ndp.solicitation if is_ipv6(address) else arp.request
    return asking(mac, router, address)


def answered(frame: bytes) -> tuple[str, str]:
    """Return the address in an answer, and its MAC address; empty for any other frame."""
    reply, advertisement = arp.parse(frame), ndp.parse(frame)
    if reply and reply.operation == arp.REPLY and not reply.announces:
        return reply.sender, reply.sender_mac.hex(":")
    if advertisement and advertisement.type == ndp.ADVERTISEMENT and advertisement.solicited:
        return advertisement.target, advertisement.mac.hex(":")
    return "", ""


def owners(site: Site, addresses: Mapping[str, str]) -> Mapping[str, str]:
    """Return the node that answers for each Service's address. Fail if two do."""
    nodes = {host.mac: host.name for host in site.topology.of("node")}
    answers = ask(site, list(addresses.values()), 1)
    found = {}
    for name, address in addresses.items():
        (mac,) = answers[address]
        found[name] = nodes[mac]
    return found


async def until_owned_by(
    site: Site, addresses: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    """Wait until exactly these nodes answer for the Services' addresses."""
    macs = {host.name: host.mac for host in site.topology.of("node")}
    expected = {addresses[name]: {macs[node]} for name, node in wanted.items()}

    async def are_owned() -> bool:
        answers = ask(site, list(expected), 1)
        return {address: set(each) for address, each in answers.items()} == expected

    await until(are_owned, f"the owners {dict(wanted)}")


async def call(site: Site, address: str) -> str:
    """Return the client's address that the pod sees."""
    reader, writer = await site.connect("client1", address, 80)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            return str(answer["peer"])
    finally:
        writer.close()


def client_of(site: Site, address: str) -> str:
    """Return the address of the client of this address's family."""
    return site.topology.host("client1").addresses[is_ipv6(address)]


class Open:
    """An open connection, and the node of its pod."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.node = ""

    async def ask(self) -> None:
        """Send a request, and read the answer."""
        async with asyncio.timeout(2 * DEADLINE_S):
            self._writer.write(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split()[0])
            self.node = json.loads(await self._reader.readexactly(length))["node"]

    def close(self) -> None:
        self._writer.close()


async def open_connections(site: Site, address: str, number: int) -> Sequence[Open]:
    found = []
    for _ in range(number):
        found.append(Open(*await site.connect("client1", address, 80)))
        await found[-1].ask()
    return found


async def takeovers(site: Site) -> int:
    """Return how often a gateway took over from one that did not answer."""
    total = 0.0
    for node in NODES:
        if site.directory.is_off(node):
            continue
        url = f"http://127.0.0.1:{ROLE_PORTS['gateway']}/metrics"
        for line in (await output(site, node, "curl", "-s", url)).splitlines():
            if line.startswith("fairlead_takeovers_total "):
                total += float(line.split()[1])
    return int(total)


async def events(site: Site, name: str) -> str:
    """Return the Events of a Service as kubectl prints them."""
    name = name.partition("/")[0]
    kubectl = Kubectl(site.directory.kubeconfig, f"fairlead-{site.name}")
    return await kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")


async def count_failures(calls: int, once: Callable[[], Awaitable[object]]) -> int:
    """Call this often, and return how many calls fail."""
    failed = 0
    for _ in range(calls // AT_ONCE):
        done = await asyncio.gather(*(once() for _ in range(AT_ONCE)), return_exceptions=True)
        failed += sum(isinstance(each, BaseException) for each in done)
    return failed


async def test_pods_see_the_client_and_the_router_needs_no_route(
    site: Site, addresses: Mapping[str, str]
) -> None:
    for address in addresses.values():
        assert await call(site, address) == client_of(site, address)
    for family, outside in (("-4", "203.0.113"), ("-6", "2001:db8:f:")):
        routes = await output(site, ROUTER, "ip", family, "route", "show", "table", "all")
        assert not any(address in routes for address in addresses.values())
        assert outside not in routes


async def test_each_address_is_answered_by_exactly_one_node(
    site: Site, addresses: Mapping[str, str]
) -> None:
    answers = ask(site, list(addresses.values()), REQUESTS)
    assert [list(each.values()) for each in answers.values()] == [[REQUESTS]] * len(addresses)
    found = owners(site, addresses)
    assert len({found[f"web{number}"] for number in range(8)}) > 1
    assert len({found[f"six{number}"] for number in range(4)}) > 1


async def test_killing_the_gateway_of_the_owner_fails_no_call_and_moves_no_address(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    owner = before["six0"]
    owned = itertools.cycle([addresses[name] for name in before if before[name] == owner])

    async def is_served() -> bool:
        return await count_failures(CALLS, lambda: call(site, next(owned))) == 0

    # The nodes may serve a new Service some moments after the gateways announce its address.
    await until(is_served, f"answers to {CALLS} calls")
    await site.kill_role(owner, "gateway")
    assert await count_failures(CALLS, lambda: call(site, next(owned))) == 0
    assert owners(site, addresses) == before
    groups = await output(site, owner, "ip", "maddress", "show", "dev", "eth0")
    assert ndp.solicited_node(addresses["six0"]) in groups
    await site.start_role(owner, "gateway")
    assert owners(site, addresses) == before


async def state(site: Site, node: str) -> dict[str, Any]:
    """Return `/state` of the gateway on the node."""
    found: dict[str, Any] = json.loads(
        await output(site, node, "curl", "-s", "http://127.0.0.1:9441/state")
    )
    return found


async def command(site: Site, node: str, *options: str) -> str:
    """Run `fairlead gateway` for the gateway on the node."""
    files = {"config": site.directory.config}
    files |= {"kubeconfig": site.directory.kubeconfig_of("gateway")}
    given = [f"--{name}={path}" for name, path in files.items()]
    return await output(site, node, "fairlead", "gateway", *given, "--node-name", node, *options)


async def neighbor(site: Site, address: str) -> str:
    """Return the node to which the router sends packets for the address."""
    nodes = {host.mac: host.name for host in site.topology.of("node")}
    shown = await output(site, ROUTER, "ip", "-json", "neigh", "show", address)
    (entry,) = json.loads(shown)
    return nodes[entry["lladdr"]]


async def test_gateways_find_each_other(site: Site) -> None:
    async def found() -> bool:
        peers = [(await state(site, node))["peers"] for node in NODES]
        connected = [[gateway["connected"] for gateway in each["gateways"]] for each in peers]
        return connected == [[True, True]] * 3 and [each["followers"] for each in peers] == [2] * 3

    await until(found, "two peers of every gateway")


async def test_a_gateway_that_leaves_loses_nothing(
    site: Site, addresses: Mapping[str, str]
) -> None:
    """The connections begin while slots are in transition, so only a peer of the owner knows their
    nodes."""
    more = pod("node3")
    await site.apply([{**more, "metadata": {**more["metadata"], "name": "web-more"}}])
    await site.await_pods()

    async def is_weighted(node: str) -> bool:
        service = (await state(site, node))["services"]["default/web0"]
        members = service["plan"]["listeners"][0]["members"]
        return sum(int(each["weight"]) for each in members) == len(NODES) + 1

    for node in NODES:
        await until(partial(is_weighted, node), f"the weight of the new pod at {node}")
    before, address = owners(site, addresses), addresses["web0"]
    leaving = before["web0"]
    async with Load(site, address) as load:
        assert await neighbor(site, address) == leaving
        said = await command(site, leaving, "--leave")
        after = owners(site, addresses)
        assert leaving not in after.values()
        assert await neighbor(site, address) == after["web0"]
        assert {name for name in after if after[name] != before[name]} == {
            name for name, node in before.items() if node == leaving
        }
        for name, node in before.items():
            moved = f"{addresses[name]} is announced by gateway {after[name]}\n" in said
            assert moved == (node == leaving)
        assert await count_failures(CALLS, lambda: call(site, address)) == 0
        await command(site, leaving, "--leave", "--undo")
        await until_owned_by(site, addresses, before)
        period = await load.take()
    assert (period.failed, period.broken, period.open_connections) == (0, [], OPEN_CONNECTIONS)


@pytest.mark.soak
async def test_with_the_label_of_its_node_a_gateway_leaves_until_the_label_is_removed(
    site: Site, addresses: Mapping[str, str]
) -> None:
    kubectl = Kubectl(site.directory.kubeconfig, f"fairlead-{site.name}")
    before = owners(site, addresses)
    leaving = before["web0"]
    await kubectl("label", "node", leaving, "fairlead.io/announce=leave")

    async def has_left() -> bool:
        mac = site.topology.host(leaving).mac
        return not any(mac in each for each in ask(site, list(addresses.values()), 1).values())

    await until(has_left, f"no answer of {leaving}")
    moved = owners(site, addresses)
    await site.kill_role(leaving, "gateway")
    await site.start_role(leaving, "gateway")
    assert owners(site, addresses) == moved, "the label is still there"
    await kubectl("label", "node", leaving, "fairlead.io/announce-")
    await until_owned_by(site, addresses, before)


async def test_an_address_outside_of_the_segment_is_refused_in_words(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    await site.apply(
        [
            {
                "apiVersion": "fairlead.io/v1alpha1",
                "kind": "AddressPool",
                "metadata": {"name": "outside"},
                "spec": {"addresses": list(OUTSIDE)},
            },
            service("outside", DUAL, addresses=",".join(OUTSIDE)),
        ]
    )

    async def named() -> bool:
        said = await events(site, "outside")
        return "AddressNotOnSegment" in said and all(each in said for each in OUTSIDE)

    await until(named, f"Events that name {OUTSIDE}")
    assert owners(site, addresses) == before


async def test_another_station_with_the_address_is_named(
    site: Site, addresses: Mapping[str, str]
) -> None:
    """The gateway sees it on the link, and the controller shows it on the Service."""
    with namespace.inside(site.namespace(ROUTER)):
        made = PacketSocket("lan", arp.ETHERTYPE)

    async def is_named(name: str) -> bool:
        async with site.client() as client:
            found = await client.get(objects.SERVICES, objects.ObjectKey("default", name))
        return any(
            (each.type, each.status, each.reason)
            == ("fairlead.io/Ready", "True", "AddressConflict")
            and FOREIGN_MAC.hex(":") in each.message
            for each in found.status.conditions
        )

    async def named() -> bool:
        for frame in (
            *arp.announcement(FOREIGN_MAC, addresses["web0"]),
            ndp.announcement(FOREIGN_MAC, addresses["six0"]),
        ):
            made.send(frame)
        return await is_named("web0") and await is_named("six0")

    with made:
        await until(named, "the condition Ready with the reason AddressConflict")
    assert not await is_named("web1")
    assert not await is_named("six1")


async def test_only_the_addresses_of_a_dead_host_move(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    owner = before["web0"]
    lost = {name for name, node in before.items() if node == owner}
    opened = await open_connections(site, addresses["web0"], OPEN)
    elsewhere = [each for each in opened if each.node != owner]
    assert len(elsewhere) > OPEN / 2
    missed = await takeovers(site)
    await site.kill_node(owner)

    async def taken_over() -> bool:
        return all(ask(site, list(addresses.values()), 1).values())

    await until(taken_over, "answers for all addresses")
    assert await takeovers(site) > missed, "the heirs did not wait for the Lease"
    answers_of = await asyncio.gather(*(each.ask() for each in elsewhere), return_exceptions=True)
    broken = [each for each in answers_of if each is not None]
    assert len(broken) <= IN_FLIGHT, broken
    for each in opened:
        each.close()
    for name in lost:
        said = await events(site, name)
        assert "AddressAnnounced" in said
    after = owners(site, addresses)
    assert {name for name in after if after[name] != before[name]} == lost
    answers = ask(site, list(addresses.values()), REQUESTS)
    assert [list(each.values()) for each in answers.values()] == [[REQUESTS]] * len(addresses)
    for address in addresses.values():
        assert await call(site, address) == client_of(site, address)


async def test_cleanup_leaves_nothing_and_others_take_over(
    site: Site, addresses: Mapping[str, str]
) -> None:
    leaving = owners(site, addresses)["six0"]
    await site.stop_role(leaving, "gateway")
    files = {"config": site.directory.config, "kubeconfig": site.directory.kubeconfig_inside}
    files |= {"pin-path": site.directory.pins(leaving), "proxy-path": site.directory.proxy(leaving)}
    options = [f"--{name}={path}" for name, path in files.items()] + ["--node-name", leaving]
    await output(site, leaving, "fairlead", "gateway", *options, "--cleanup")
    assert "fairlead" not in await output(
        site, leaving, "tc", "filter", "show", "dev", "eth0", "ingress"
    )
    assert not directory_of(site.directory.pins(leaving)).exists()
    groups = await output(site, leaving, "ip", "maddress", "show", "dev", "eth0")
    for address in filter(is_ipv6, addresses.values()):
        assert ndp.solicited_node(address) not in groups

    async def taken_over() -> bool:
        answers = ask(site, list(addresses.values()), 1)
        return all(answers.values()) and leaving not in owners(site, addresses).values()

    await until(taken_over, "answers of another node for all addresses")
