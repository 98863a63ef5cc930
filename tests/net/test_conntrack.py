"""Stale entries in the kernel's conntrack table are deleted, and no other entry is."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from fairlead.lab import namespace
from fairlead.net.conntrack import Conntrack

pytestmark = pytest.mark.root

UDP = 17
LOCAL_ROUTES = ["ip", "-6", "route", "show", "table", "local"]
TRACK = (
    "add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule "
    "inet t c ct state new accept"
)


@pytest.fixture
def tracked() -> Iterator[Conntrack]:
    """Move this process into a namespace of its own, with connection tracking."""
    name = f"flt-{os.getpid()}-ct"
    namespace.create(name)
    with namespace.inside(name):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "address", "add", "192.0.2.1/32", "dev", "lo"], check=True)
        subprocess.run(
            ["ip", "address", "add", "2001:db8::1/128", "dev", "lo", "nodad"], check=True
        )
        await_local("2001:db8::1")
        subprocess.run(["nft", TRACK], check=True)
        conntrack = Conntrack()
        yield conntrack
        conntrack.close()
    namespace.delete(name)


def await_local(address: str) -> None:
    """Wait until the kernel treats a new IPv6 address as local, which is shortly after it has been
    added."""
    end_s = time.monotonic() + 10
    while (
        address
        not in subprocess.run(LOCAL_ROUTES, check=True, capture_output=True, text=True).stdout
    ):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def flows() -> set[tuple[str, int]]:
    """Return the original destinations of the tracked flows."""
    found = set()
    for family in ("ipv4", "ipv6"):
        listed = subprocess.run(
            ["conntrack", "-L", "-f", family, "-p", "udp"],
            check=True,
            capture_output=True,
            text=True,
        )
        for line in listed.stdout.splitlines():
            fields = [
                word.partition("=")[2]
                for word in line.split()
                if word.startswith(("dst=", "dport="))
            ]
            found.add((fields[0], int(fields[1])))
    return found


def send(address: str, port: int, *, source_port: int = 0) -> None:
    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:
        sock.bind(("", source_port))
        sock.sendto(b"x", (address, port))


@pytest.mark.parametrize(("address", "other"), [("192.0.2.1", "127.0.0.1"), ("2001:db8::1", "::1")])
@pytest.mark.parametrize("more", [0, 40], ids=["one destination", "many destinations"])
async def test_only_stale_flows_are_deleted(
    tracked: Conntrack, address: str, other: str, more: int
) -> None:
    for host in (address, other):
        for port in (4000, 4001):
            send(host, port)
    everything = {(host, port) for host in (address, other) for port in (4000, 4001)}
    assert flows() == everything
    endpoints = {(address, 4000): frozenset[tuple[str, int]]()}
    if more:
        endpoints |= {(address, 4001): frozenset({(address, 4001)})}
        endpoints |= {(address, 5000 + number): frozenset() for number in range(more)}
    assert await tracked.delete_stale(UDP, endpoints) == 1
    assert flows() == everything - {(address, 4000)}


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
async def test_other_tasks_run_while_thousands_of_flows_are_inspected(
    tracked: Conntrack, address: str
) -> None:
    """A node must answer its liveness probe while it cleans up."""
    for number in range(2000):
        send(address, 4000 + number % 2, source_port=10_000 + number)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    going_on = asyncio.create_task(others())
    endpoints = {
        (address, 4000): frozenset({(address, 4000)}),
        (address, 4001): frozenset({(address, 9)}),
    }
    assert await tracked.delete_stale(UDP, endpoints) == 1000
    going_on.cancel()
    assert turns > 20
    assert flows() == {(address, 4000)}
