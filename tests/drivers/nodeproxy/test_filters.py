"""Packets that are not for Services of Fairlead: packets of flows without answers, and packets that
other tables translate."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    CLUSTER6,
    PODS4,
    PODS6,
    REFUSED,
    SILENT,
    VIP4,
    VIP6,
    Seen,
    Site,
    backends,
    callers,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.nodeproxy.skeleton import HOPS_LEFT
from fairlead.lab import namespace

pytestmark = pytest.mark.root

FAMILIES = ("IPv4", "IPv6")
ETH_P_ALL = 0x0003
THEIRS4, THEIRS6 = "172.30.0.200", "2001:db8:30::200"
"""The ClusterIP of a Service that another proxy serves."""


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, check=True, text=True)


@pytest.fixture
def other_proxy(at_node: None) -> Iterator[None]:
    """Create the table of another proxy. Chains with the same hook and priority run in the reverse
    order of their creation, so these chains run after ours."""
    rules = f"""
        ip daddr {THEIRS4} tcp dport 80 dnat ip to {PODS4["local1"]}:8080
        ip6 daddr {THEIRS6} tcp dport 80 dnat ip6 to [{PODS6["local1"]}]:8080
    """
    nft(f"""table inet theirs {{
        chain prerouting {{ type nat hook prerouting priority -100; {rules} }}
        chain output {{ type nat hook output priority -100; {rules} }}
    }}""")
    yield
    nft("delete table inet theirs")


@pytest.mark.parametrize("family", FAMILIES)
async def test_services_of_another_proxy_are_answered(
    site: Site, other_proxy: None, driver: NodeProxyDriver, family: str
) -> None:
    """Only packets that no table has translated are refused for a ClusterIP without a Service, or
    for a port that the Service does not have."""
    theirs, ours, nobodys = (
        (THEIRS4, CLUSTER4, "172.30.0.201")
        if family == "IPv4"
        else (THEIRS6, CLUSTER6, "2001:db8:30::201")
    )
    await install(driver, service(port(backends("local1", family=family), family=family)))
    for place in ("caller", "client", "node"):
        seen = site.call(place, theirs, 80)
        assert isinstance(seen, Seen), (place, seen)
        assert seen.pod == "local1"
        for protocol in ("TCP", "UDP", "SCTP"):
            assert site.call(place, ours, 81, protocol=protocol) == REFUSED
            assert site.call(place, nobodys, 80, protocol=protocol, timeout_s=0.5) == SILENT


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_process_that_listens_on_the_node_at_a_cluster_ip_is_reached(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    """The process listens at a port that the Service does not have, like a DNS cache at the address
    of the cluster's DNS."""
    address, length = (CLUSTER4, 32) if family == "IPv4" else (CLUSTER6, 128)
    await install(driver, service(port(backends("local1", family=family), family=family)))
    site.ip("node", f"address add {address}/{length} dev lo{' nodad' if family == 'IPv6' else ''}")
    try:
        with site.listening("node", address, 9000):
            assert site.call("caller", address, 9000) == Seen("node", callers(family)("caller"))
        assert site.call("caller", address, 80) == Seen("local1", callers(family)("caller"))
    finally:
        site.ip("node", f"address del {address}/{length} dev lo")


@contextmanager
def silent_server(site: Site, family: str) -> Iterator[socket.socket]:
    """Run a server that receives datagrams and never answers: conntrack treats their flow as new as
    long as it lasts."""
    kind = socket.AF_INET if family == "IPv4" else socket.AF_INET6
    with namespace.make_socket(site.name("local1"), kind, socket.SOCK_DGRAM) as made:
        made.bind((callers(family)("local1"), 9999))
        made.settimeout(10)
        yield made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["client", "node"])
async def test_changed_source_ranges_apply_to_open_one_way_flows(
    site: Site, driver: NodeProxyDriver, place: str, family: str
) -> None:
    address = VIP4 if family == "IPv4" else VIP6
    served = port(
        backends("local1", family=family, port=9999), number=514, protocol="UDP", family=family
    )
    own = callers(family)(place)
    with (
        silent_server(site, family) as server,
        namespace.make_socket(site.name(place), server.family, socket.SOCK_DGRAM) as caller,
    ):
        await install(driver, service(served))
        caller.bind((own if place == "client" else "", 0))
        caller.connect((address, 514))
        caller.send(b"first")
        assert server.recv(100) == b"first"
        await install(driver, service(served, source_ranges=("192.0.2.0/24", "2001:db8:bad::/64")))
        try:
            caller.send(b"kept out")
        except PermissionError:  # a dropped datagram of the node itself
            assert place == "node"
        await install(driver, service(served, source_ranges=(own,)))
        caller.send(b"let in")
        assert server.recv(100) == b"let in"


@pytest.mark.parametrize("family", FAMILIES)
async def test_stray_segments_do_not_return_to_the_gateway(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    """Resets of no known connection, with the hop limit of packets from a gateway. Those of others
    are routed, as without Fairlead: one of them shows that the segments before it have passed."""
    await install(driver, service(port(backends("local1", family=family), family=family)))
    four = family == "IPv4"
    source, destination = callers(family)("client"), VIP4 if four else VIP6

    def reset(number: int, hops: int) -> bytes:
        head = (
            IP(src=source, dst=destination, ttl=hops)
            if four
            else IPv6(src=source, dst=destination, hlim=hops)
        )
        return bytes(head / TCP(sport=number, dport=80, flags="R"))

    kind = socket.AF_INET if four else socket.AF_INET6
    with (
        namespace.make_socket(site.name("router"), socket.AF_PACKET, socket.SOCK_RAW) as wire,
        namespace.make_socket(
            site.name("client"), kind, socket.SOCK_RAW, socket.IPPROTO_RAW
        ) as sender,
    ):
        wire.settimeout(10)
        wire.bind(("node", ETH_P_ALL))
        strays = range(1000, 1050)
        # The router decrements the hop limit too.
        for number, hops in (*((number, HOPS_LEFT + 1) for number in strays), (999, 64)):
            sender.sendto(reset(number, hops), (destination, 0))
        returned: list[int] = []
        while 999 not in returned:
            frame, (_, _, direction, *_) = wire.recvfrom(2000)
            packet = Ether(frame)
            if direction != socket.PACKET_OUTGOING and TCP in packet:
                returned.append(packet[TCP].sport)
        assert returned == [999]
