"""The end of a tunnel in a node's network namespace, with packets that a gateway sends through it.

gateway 192.0.2.11 ── node 192.0.2.22

The gateway also has the client's address 198.51.100.7, so that the answers reach it. On the node, a
server has the load-balancer address. The node uses strict reverse path filtering wherever it can.
The same is set up for IPv6."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw
from tests.drivers.inside import Scenario, run_inside

from fairlead.config import TunnelConfig
from fairlead.drivers.tunnel import TunnelDriver, remove_tunnel
from fairlead.drivers.tunnel.rules import TABLE
from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace
from fairlead.model import NodeService, NodeServicePort, ServiceKey
from fairlead.net.link_events import LinkChanges, LinkEvents

GATEWAY = {4: "192.0.2.11", 6: "2001:db8:1::b"}
STRANGER = {4: "192.0.2.12", 6: "2001:db8:1::c"}
NODE = {4: "192.0.2.22", 6: "2001:db8:1::16"}
CLIENT = {4: "198.51.100.7", 6: "2001:db8:2::7"}
VIP = {4: "203.0.113.10", 6: "2001:db8:f::10"}
PREFIX = f"flt-{os.getpid()}-tunnel-"
PORT = 5353
QUIET_S = 0.3
DEADLINE_S = 60.0
WEB, OTHER = ServiceKey("default", "web"), ServiceKey("default", "other")
PAIRS = [(4, 4), (4, 6), (6, 4), (6, 6)]


def ip(host: str, *words: str) -> str:
    command = ["ip", "-n", PREFIX + host, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def on_the_node(*argv: str) -> str:
    command = ["ip", "netns", "exec", PREFIX + "node", *argv]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def nft(*words: str) -> str:
    return on_the_node("nft", *words)


@pytest.fixture
def hosts() -> Iterator[None]:
    try:
        for host in ("gateway", "node"):
            namespace.create(PREFIX + host)
            namespace.set_sysctls(
                PREFIX + host,
                {f"net/ipv6/conf/{each}/accept_dad": 0 for each in ("all", "default")},
            )
            ip(host, "link", "set", "lo", "up")
        namespace.set_sysctls(
            PREFIX + "node",
            {"net/ipv4/conf/all/rp_filter": 1, "net/ipv4/conf/default/rp_filter": 1},
        )
        add_cable()
        yield
    finally:
        for host in ("gateway", "node"):
            namespace.delete(PREFIX + host)


def add_cable() -> None:
    """Connect gateway and node with a link, with all addresses and routes."""
    ip(
        "node",
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        PREFIX + "gateway",
    )
    here = [*GATEWAY.values(), *STRANGER.values(), *CLIENT.values()]
    for host in ("gateway", "node"):
        ip(host, "link", "set", "eth0", "up")
    for host, addresses in (("gateway", here), ("node", NODE.values())):
        for address in addresses:
            ip(
                host,
                "address",
                "add",
                f"{address}/{64 if ':' in address else 24}",
                "dev",
                "eth0",
                *nodad(address),
            )
    for version, address in VIP.items():
        ip("node", "address", "replace", address, "dev", "lo", *nodad(address))
        ip("node", f"-{version}", "route", "add", "default", "via", GATEWAY[version])


def nodad(address: str) -> tuple[str, ...]:
    return ("nodad",) if ":" in address else ()


def on_node(scenario: Scenario) -> None:
    """Run the scenario in the node's namespace."""
    run_inside(PREFIX + "node", scenario)


def tunnel(kind: str, **fields: Any) -> TunnelConfig:
    gateways = ("192.0.2.8/30", "2001:db8:1::b/128")
    return TunnelConfig(kind=kind, gateways=gateways, **fields)  # type: ignore[arg-type]


def driver(kind: str, **fields: Any) -> TunnelDriver:
    return TunnelDriver(tunnel(kind, **fields), node_addresses=lambda: list(NODE.values()))


def intent(key: ServiceKey, *addresses: str) -> NodeService:
    def port(family: Any, own: tuple[str, ...]) -> NodeServicePort:
        return NodeServicePort(family, "UDP", PORT, "", (), own, (), 0, (), ())

    ports = [
        port(f, tuple(a for a in addresses if (":" in a) == (f == "IPv6")))
        for f in ("IPv4", "IPv6")
    ]
    return NodeService(key, "uid", "Cluster", "Local", tuple(ports))


async def reconcile(made: TunnelDriver, *intents: NodeService) -> list[str]:
    """Apply what differs, and return the changes."""
    wanted = made.render({each.service: each for each in intents})
    changes = made.diff(wanted, await made.read(None))
    assert await made.apply(changes) == {}
    return [str(change) for change in changes]


def encapsulated(
    kind: str, content: Packet, version: int, inside: int, vni: int
) -> tuple[socket.socket, bytes]:
    """Return the socket and the bytes to send for a packet in a tunnel."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    if kind == "ipip":
        protocol = socket.IPPROTO_IPV6 if inside == 6 else socket.IPPROTO_IPIP
        return namespace.make_socket(PREFIX + "gateway", family, socket.SOCK_RAW, protocol), bytes(
            content
        )
    frame = Ether(dst="02:66:6c:00:00:01", src="02:66:6c:00:00:02") / content
    sender = namespace.make_socket(PREFIX + "gateway", family, socket.SOCK_DGRAM)
    if version == 6:
        sender.setsockopt(socket.SOL_UDP, 101, 1)  # UDP_NO_CHECK6_TX, as in the gateways' program
    return sender, bytes(VXLAN(vni=vni, flags="Instance") / frame)


def answered(
    kind: str,
    version: int,
    inside: int,
    *,
    by: dict[int, str] = GATEWAY,
    to: str = "",
    vni: int = 7471,
) -> bool:
    """Return whether the server at the load-balancer address answers a client whose datagram comes
    through the tunnel."""
    family = socket.AF_INET6 if inside == 6 else socket.AF_INET
    to = to or VIP[inside]
    with (
        namespace.make_socket(PREFIX + "node", family, socket.SOCK_DGRAM) as server,
        namespace.make_socket(PREFIX + "gateway", family, socket.SOCK_DGRAM) as client,
    ):
        server.bind((to, PORT))
        client.bind((CLIENT[inside], 0))
        head = IPv6(src=CLIENT[6], dst=to) if inside == 6 else IP(src=CLIENT[4], dst=to)
        content = head / UDP(sport=client.getsockname()[1], dport=PORT) / Raw(b"hello")
        sender, data = encapsulated(kind, content, version, inside, vni)
        with sender:
            sender.bind((by[version], 0))
            sender.sendto(data, (NODE[version], 4789 if kind == "vxlan" else 0))
        server.settimeout(QUIET_S)
        with suppress(TimeoutError):
            text, peer = server.recvfrom(100)
            server.sendto(text, peer)
            client.settimeout(5)
            return client.recvfrom(100)[0] == b"hello"
    return False


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
@pytest.mark.parametrize(("version", "inside"), PAIRS)
def test_a_client_is_answered_through_the_tunnel(
    hosts: None, kind: str, version: int, inside: int
) -> None:
    async def scenario() -> None:
        made = driver(kind)
        await made.open()
        assert not answered(kind, version, inside)
        await reconcile(made, intent(WEB, *VIP.values()))
        assert answered(kind, version, inside)
        assert not answered(kind, version, inside, by=STRANGER)
        assert not answered(kind, version, inside, to=NODE[inside])
        if kind == "vxlan":
            assert not answered(kind, version, inside, vni=7472)
            assert made.counters() == {"unknown_sender": 1, "not_published": 1}
        else:
            assert {name: n for name, n in made.counters().items() if n} == {
                "decapsulated": 1,
                "unknown_sender": 1,
                "not_published": 1,
            }
        await made.close(remove=True)
        assert not answered(kind, version, inside)

    on_node(scenario)


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
def test_an_address_is_removed_with_the_last_service_that_publishes_it(
    hosts: None, kind: str
) -> None:
    async def scenario() -> None:
        made = driver(kind)
        await made.open()
        both = [intent(WEB, VIP[4]), intent(OTHER, VIP[4], VIP[6])]
        assert (
            await reconcile(made, *both)
            == [
                "tunnel: publish 203.0.113.10 for default/web",
                "tunnel: publish 2001:db8:f::10 for default/other",
                "tunnel: publish 203.0.113.10 for default/other",
            ]
            or len(await reconcile(made, *both)) == 0
        )
        assert await reconcile(made, *both) == []
        await reconcile(made, intent(WEB, VIP[4]))
        assert (answered(kind, 4, 4), answered(kind, 4, 6)) == (True, False)
        await reconcile(made)
        assert not answered(kind, 4, 4)
        await made.close()

    on_node(scenario)


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
def test_the_tunnel_outlives_its_process_and_the_next_process_adopts_it(
    hosts: None, kind: str
) -> None:
    async def scenario() -> None:
        first = driver(kind)
        await first.open()
        await reconcile(first, intent(WEB, *VIP.values()))
        await first.close()
        assert answered(kind, 4, 4)
        second = driver(kind)
        await second.open()
        assert await second.read(None) == {}
        assert answered(kind, 4, 4)
        await reconcile(second, intent(OTHER, VIP[4]))
        assert (answered(kind, 4, 4), answered(kind, 4, 6)) == (True, False)
        await second.close()
        third = driver(kind)
        await third.open()
        # Nothing is published any more, so the second read removes what the previous process left.
        assert await third.read(None) == await third.read(None) == {}
        assert not answered(kind, 4, 4)
        await third.close()

    on_node(scenario)


BREAKS = {
    "ipip": ("tc qdisc del dev eth0 clsact",),
    "vxlan": (
        "ip link set fairlead down",
        "ip link del fairlead",
        "ip address flush dev fairlead",
        "nft delete element inet fairlead_tunnel addresses4 {203.0.113.10}",
        "nft add element inet fairlead_tunnel addresses4 {203.0.113.11}",
    ),
}


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
def test_changes_by_other_programs_are_repaired(hosts: None, kind: str) -> None:
    async def scenario() -> None:
        made = driver(kind)
        await made.open()
        await reconcile(made, intent(WEB, *VIP.values()))
        for command in BREAKS[kind]:
            on_the_node(*command.split())
            assert "203.0.113.11" in nft("list", "ruleset") or not answered(kind, 4, 4)
            await made.read(None)
            assert answered(kind, 4, 4)
        for words in (
            ("flush", "chain", "inet", "fairlead_tunnel", "segments"),
            ("delete", "table", "inet", "fairlead_tunnel"),
        ):
            nft(*words)
            await made.read(None)
            listed = nft("list", "table", "inet", "fairlead_tunnel")
            assert listed.count("maxseg size set") == 2
            assert "203.0.113.10" in listed
            assert "203.0.113.11" not in listed
        await made.close()

    on_node(scenario)


@pytest.mark.parametrize("words", [("flush", "ruleset"), ("delete", "table", *TABLE.split())])
def test_rules_that_another_program_removes_are_restored_without_an_audit(
    hosts: None, words: tuple[str, ...]
) -> None:
    """As a firewall does when it is reloaded. Without the rules every host could send into the
    tunnel."""

    async def scenario() -> None:
        made = driver("vxlan")
        await made.open()
        await reconcile(made, intent(WEB, *VIP.values()))
        before = nft("list", "ruleset")
        running = asyncio.create_task(made.run())
        await asyncio.sleep(0.1)
        nft(*words)
        async with asyncio.timeout(30):
            while nft("list", "ruleset") != before:
                await asyncio.sleep(0.1)
        running.cancel()
        await made.close()

    on_node(scenario)


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
def test_a_recreated_device_or_interface_is_repaired_by_event(hosts: None, kind: str) -> None:
    """Events of the kernel trigger the repair, without an audit. The repair itself must not trigger
    another repair, or it would never end."""

    async def scenario() -> None:
        made = driver(kind)
        await made.open()
        await reconcile(made, intent(WEB, *VIP.values()))
        following = asyncio.create_task(made.run())
        await asyncio.sleep(0)
        for command in [each for each in BREAKS[kind] if each.startswith(("ip ", "tc "))]:
            on_the_node(*command.split())
            await until_answered(kind)
        ip("node", "link", "del", "eth0")
        add_cable()
        await until_answered(kind)
        following.cancel()
        with closing(LinkEvents()) as events:
            await made.read(None)
            ip("node", "link", "add", "last", "type", "bridge")
            found = await events.next()
            # The program was attached again in place, which `run` recognizes as complete.
            assert found._replace(hooks=frozenset()) == LinkChanges(
                frozenset({"last"}), frozenset(), lost=False
            )
        await made.close()

    on_node(scenario)


def test_interfaces_by_subnet_are_followed(hosts: None) -> None:
    """Packets leave the tunnel at an interface that appears later, and that is selected by its
    subnet."""

    async def scenario() -> None:
        networks = ["192.0.2.0/24", "2001:db8:1::/64"]
        made = TunnelDriver(
            tunnel("ipip"), node_addresses=lambda: list(NODE.values()), selectors=networks
        )
        await made.open()
        await reconcile(made, intent(WEB, *VIP.values()))
        assert answered("ipip", 4, 4)
        following = asyncio.create_task(made.run())
        ip("node", "link", "set", "eth0", "down")
        ip("node", "link", "set", "eth0", "name", "uplink")
        ip("node", "link", "set", "uplink", "up")
        for version, address in NODE.items():
            ip(
                "node",
                "address",
                "replace",
                f"{address}/{64 if version == 6 else 24}",
                "dev",
                "uplink",
                *nodad(address),
            )
            ip("node", f"-{version}", "route", "replace", "default", "via", GATEWAY[version])
        await until_answered("ipip")
        following.cancel()
        await made.close(remove=True)
        elsewhere = TunnelDriver(
            tunnel("ipip"), node_addresses=lambda: list(NODE.values()), selectors=["ens*"]
        )
        await elsewhere.open()
        with pytest.raises(
            Unavailable, match=r"no interface matches ens\*; this host has .*uplink \(192.0.2.22"
        ):
            await reconcile(elsewhere, intent(WEB, *VIP.values()))
        await elsewhere.close()

    on_node(scenario)


async def until_answered(kind: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (answered(kind, 4, 4) and answered(kind, 6, 6)):
            await asyncio.sleep(0.05)


def test_the_other_type_of_tunnel_is_replaced_and_cleanup_leaves_nothing(hosts: None) -> None:
    async def scenario() -> None:
        assert await remove_tunnel() == []
        for kind in ("ipip", "vxlan", "ipip", "vxlan"):
            made = driver(kind)
            await made.open()
            await reconcile(made, intent(WEB, *VIP.values()))
            for other in ("ipip", "vxlan"):
                assert answered(other, 4, 4) == answered(other, 6, 6) == (kind == other)
            await made.close()
        assert await remove_tunnel() == [
            "device fairlead",
            "device fairlead6",
            "table inet fairlead_tunnel",
        ]
        assert await remove_tunnel() == []
        assert "fairlead" not in ip("node", "link") + nft("list", "ruleset")

    on_node(scenario)


def test_a_foreign_device_and_a_port_in_use_are_unchanged_and_reported(hosts: None) -> None:
    async def scenario() -> None:
        ip("node", "link", "add", "fairlead", "type", "bridge")
        made = driver("vxlan")
        await made.open()
        with pytest.raises(Refused, match="is not a VXLAN device"):
            await reconcile(made, intent(WEB, *VIP.values()))
        assert "bridge" in ip("node", "-d", "link", "show", "fairlead")
        ip("node", "link", "del", "fairlead")
        ip(
            "node",
            "link",
            "add",
            "others",
            "type",
            "vxlan",
            "id",
            "7471",
            "dstport",
            "4789",
            "local",
            NODE[4],
        )
        with pytest.raises(Refused, match=r"another tunnel\.port or tunnel\.vni"):
            await reconcile(made, intent(WEB, *VIP.values()))
        ip("node", "link", "del", "others")
        # A destination counts as published only when the kernel has it, so the next attempt
        # publishes all.
        assert len(await reconcile(made, intent(WEB, *VIP.values()))) == 2
        assert answered("vxlan", 4, 4)
        await made.close()

    on_node(scenario)
