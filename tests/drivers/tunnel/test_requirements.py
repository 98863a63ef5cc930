"""Kernel settings that cause lost packets of clients (strict reverse path filtering with answers
through another interface; ARP for load-balancer addresses). The tests show the harm, and correct
the settings."""

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fairlead.drivers.host import Host
from fairlead.drivers.tunnel.requirements import requirements, requirements_of
from fairlead.lab import namespace
from fairlead.net import sysctl

PREFIX = f"flt-{os.getpid()}-requirements-"
VIP, CLIENT, NODE = "203.0.113.10", "198.51.100.7", "192.0.2.22"


def ip(host: str, *words: str) -> None:
    subprocess.run(["ip", "-n", PREFIX + host, *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Connect `outside` and `node` by two cables: clients' packets arrive at `front`, and the node
    answers all clients through `back`."""
    try:
        for host in ("outside", "node"):
            namespace.create(PREFIX + host)
            namespace.set_sysctls(
                PREFIX + host, {f"net/ipv4/conf/{each}/rp_filter": 0 for each in ("all", "default")}
            )
            ip(host, "link", "set", "lo", "up")
        for device, network in (("front", "192.0.2"), ("back", "198.18.0")):
            ip(
                "node",
                "link",
                "add",
                device,
                "type",
                "veth",
                "peer",
                "name",
                device,
                "netns",
                PREFIX + "outside",
            )
            for host, number in (("outside", 1), ("node", 22)):
                ip(host, "link", "set", device, "up")
                ip(host, "address", "add", f"{network}.{number}/24", "dev", device)
        ip("outside", "address", "add", CLIENT, "dev", "lo")
        ip("outside", "route", "add", VIP, "via", NODE)
        ip("node", "address", "add", VIP, "dev", "lo")
        ip("node", "route", "add", "default", "via", "198.18.0.1")
        yield
    finally:
        for host in ("outside", "node"):
            namespace.delete(PREFIX + host)


def arrives() -> bool:
    """Return whether a client's datagram that arrives at `front` reaches the server."""
    with (
        namespace.make_socket(PREFIX + "node", kind=socket.SOCK_DGRAM) as server,
        namespace.make_socket(PREFIX + "outside", kind=socket.SOCK_DGRAM) as client,
    ):
        server.bind((VIP, 5353))
        server.settimeout(0.5)
        client.bind((CLIENT, 0))
        client.sendto(b"hello", (VIP, 5353))
        with suppress(TimeoutError):
            return server.recv(100) == b"hello"
    return False


@pytest.mark.parametrize("strict", ["all", "front"])
def test_packets_dropped_by_strict_reverse_path_filtering_arrive_with_the_corrected_value(
    hosts: None, tmp_path: Path, strict: str
) -> None:
    name = f"net/ipv4/conf/{strict}/rp_filter"
    with namespace.inside(PREFIX + "node"):
        assert arrives()
        sysctl.write(name, "1")
        assert not arrives()
        found = Host("node", adjust=False, directory=tmp_path).check(
            asyncio.run(requirements([NODE], []))
        )
        assert [each.remedy for each in found] == ["sysctl -w net/ipv4/conf/front/rp_filter=2"]
        Host("node", adjust=True, directory=tmp_path).check(asyncio.run(requirements([NODE], [])))
        assert arrives()
        Host("node", adjust=False, directory=tmp_path).restore()
        assert not arrives()


def test_an_interface_that_also_sends_the_answers_has_no_requirement(hosts: None) -> None:
    with namespace.inside(PREFIX + "node"):
        sysctl.write("net/ipv4/conf/all/rp_filter", "1")
        assert asyncio.run(requirements(["198.18.0.22"], [])) == ()
        assert asyncio.run(requirements([NODE], ["back"])) == ()
        assert [each.setting for each in asyncio.run(requirements(["198.18.0.22"], ["front"]))] == [
            "net/ipv4/conf/front/rp_filter"
        ]


@pytest.mark.parametrize(
    ("own", "everywhere", "harmful"),
    [
        ("0", "0", False),
        ("1", "0", True),
        ("2", "0", False),
        ("0", "1", True),
        ("2", "1", False),
        ("1", "2", False),
    ],
)
def test_the_greater_of_the_two_reverse_path_values_applies(
    own: str, everywhere: str, harmful: bool
) -> None:
    (requirement,) = requirements_of(["front"], ["back"], everywhere=everywhere)
    assert requirement.harmful(own) is harmful


def test_without_a_default_route_there_is_no_requirement() -> None:
    assert requirements_of(["front"], [], everywhere="1") == ()


def neighbours() -> set[str]:
    """Return the neighbours that the host outside has at `front`, after it has sent an ARP request
    for the load-balancer address, and the node has sent one for that host."""
    subprocess.run(
        ["ip", "-n", PREFIX + "outside", "neighbour", "flush", "dev", "front"],
        check=True,
        timeout=10,
    )
    with (
        namespace.make_socket(PREFIX + "outside", kind=socket.SOCK_DGRAM) as client,
        namespace.make_socket(PREFIX + "node", kind=socket.SOCK_DGRAM) as server,
    ):
        client.connect((VIP, 5353))
        client.send(b"hello")
        time.sleep(0.1)
        subprocess.run(
            ["ip", "-n", PREFIX + "node", "neighbour", "flush", "dev", "front"],
            check=True,
            timeout=10,
        )
        server.bind((VIP, 0))
        server.sendto(b"hello", ("192.0.2.1", 5353))
        time.sleep(0.1)
    told = subprocess.run(
        ["ip", "-n", PREFIX + "outside", "-j", "neighbour", "show", "dev", "front"],
        check=True,
        capture_output=True,
        timeout=10,
    )
    return {each["dst"] for each in json.loads(told.stdout) if "lladdr" in each}


def test_a_node_with_the_addresses_announces_them_to_no_neighbour(
    hosts: None, tmp_path: Path
) -> None:
    """The addresses are at a device as with kube-proxy in IPVS mode. The test kernel may lack dummy
    devices, so a bridge without ports has the addresses."""
    ip("node", "address", "del", VIP, "dev", "lo")
    ip("node", "link", "add", "kube-ipvs0", "type", "bridge")
    ip("node", "address", "add", f"{VIP}/32", "dev", "kube-ipvs0")
    ip("outside", "route", "replace", VIP, "dev", "front")
    with namespace.inside(PREFIX + "node"):
        sysctl.write("net/ipv4/conf/all/arp_ignore", "0")
        sysctl.write("net/ipv4/conf/all/arp_announce", "0")
        assert VIP in neighbours()
        found = Host("node", adjust=False, directory=tmp_path).check(
            asyncio.run(requirements([NODE], []))
        )
        assert {each.remedy for each in found if "/front/" in each.subject} == {
            "sysctl -w net/ipv4/conf/front/arp_ignore=1",
            "sysctl -w net/ipv4/conf/front/arp_announce=2",
        }
        sysctl.write("net/ipv4/conf/front/arp_ignore", "1")
        assert VIP in neighbours()  # the node's ARP requests have the address as their source
        Host("node", adjust=True, directory=tmp_path).check(asyncio.run(requirements([NODE], [])))
        assert VIP not in neighbours()
        assert (
            Host("node", adjust=False, directory=tmp_path).check(
                asyncio.run(requirements([NODE], []))
            )
            == ()
        )
