"""Strict reverse path filtering where clients are answered by another interface: found, shown to do harm, put right."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fairlead.drivers.host import Host
from fairlead.drivers.tunnel.needs import needs, needs_of
from fairlead.lab import namespace
from fairlead.net import sysctl

PREFIX = f"flt-{os.getpid()}-needs-"
VIP, CLIENT, NODE = "203.0.113.10", "198.51.100.7", "192.0.2.22"


def ip(host: str, *words: str) -> None:
    subprocess.run(["ip", "-n", PREFIX + host, *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[None]:
    """outside has two cables to node: by `front` a client's packets arrive, by `back` the node answers everybody."""
    try:
        for host in ("outside", "node"):
            namespace.create(PREFIX + host)
            namespace.set_sysctls(PREFIX + host, {f"net/ipv4/conf/{each}/rp_filter": 0 for each in ("all", "default")})
            ip(host, "link", "set", "lo", "up")
        for device, network in (("front", "192.0.2"), ("back", "198.18.0")):
            ip("node", "link", "add", device, "type", "veth", "peer", "name", device, "netns", PREFIX + "outside")
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
    """Whether a client's datagram that comes in by `front` gets to the server."""
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
def test_what_strictness_drops_arrives_once_it_is_put_right(hosts: None, tmp_path: Path, strict: str) -> None:
    name = f"net/ipv4/conf/{strict}/rp_filter"
    with namespace.inside(PREFIX + "node"):
        assert arrives()
        sysctl.write(name, "1")
        assert not arrives()
        found = Host("node", adjust=False, directory=tmp_path).look(asyncio.run(needs([NODE], [])))
        assert [(each.setting, each.should) for each in found] == [("net/ipv4/conf/front/rp_filter", "2")]
        Host("node", adjust=True, directory=tmp_path).look(asyncio.run(needs([NODE], [])))
        assert arrives()
        Host("node", adjust=False, directory=tmp_path).restore()
        assert not arrives()


def test_an_interface_that_answers_too_needs_nothing(hosts: None) -> None:
    with namespace.inside(PREFIX + "node"):
        sysctl.write("net/ipv4/conf/all/rp_filter", "1")
        assert asyncio.run(needs(["198.18.0.22"], [])) == ()
        assert asyncio.run(needs([NODE], ["back"])) == ()
        assert [each.setting for each in asyncio.run(needs(["198.18.0.22"], ["front"]))] == ["net/ipv4/conf/front/rp_filter"]


@pytest.mark.parametrize(
    ("own", "everywhere", "harmful"),
    [("0", "0", False), ("1", "0", True), ("2", "0", False), ("0", "1", True), ("2", "1", False), ("1", "2", False)],
)
def test_the_greater_of_both_values_counts(own: str, everywhere: str, harmful: bool) -> None:
    (need,) = needs_of(["front"], ["back"], everywhere=everywhere)
    assert need.harmful(own) is harmful


def test_without_a_default_route_nothing_is_known() -> None:
    assert needs_of(["front"], [], everywhere="1") == ()
