"""Which addresses a host needs to reach others, according to its interfaces and routes."""

import os
import resource
import subprocess
from collections.abc import Iterator

import pytest

from fairlead.errors import Unavailable
from fairlead.lab import namespace
from fairlead.net.own_addresses import needed_addresses

pytestmark = pytest.mark.root


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """Run each test in a network namespace that has two interfaces."""
    name = f"flt-{os.getpid()}-own"
    namespace.create(name)
    try:
        with namespace.inside(name):
            ip("link", "set", "lo", "up")
            ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
            for each in ("eth0", "eth1"):
                ip("link", "set", each, "up")
            yield
    finally:
        namespace.delete(name)


def test_own_addresses_and_next_hops_are_needed() -> None:
    ip("address", "add", "192.0.2.11/24", "dev", "eth0")
    ip("address", "add", "2001:db8:1::11/64", "dev", "eth0", "nodad")
    assert set(needed_addresses(())) == {"192.0.2.11", "2001:db8:1::11"}
    ip("route", "add", "default", "via", "192.0.2.1")
    ip("route", "add", "default", "via", "2001:db8:1::1")
    ip("route", "add", "198.51.100.0/24", "via", "192.0.2.2")
    own = {"192.0.2.11", "2001:db8:1::11", "192.0.2.1", "2001:db8:1::1"}
    assert set(needed_addresses(())) == own
    assert set(needed_addresses(["198.51.100.7"])) == own | {"192.0.2.2"}


def test_next_hops_and_the_addresses_from_which_the_host_sends_come_first() -> None:
    """A Lease has room for a limited number of addresses."""
    ip("address", "add", "192.0.2.11/24", "dev", "eth0")
    ip("address", "add", "10.0.0.9/24", "dev", "eth1")
    ip("route", "add", "default", "via", "192.0.2.1")
    assert needed_addresses(()) == ["192.0.2.1", "192.0.2.11", "10.0.0.9"]


def test_a_host_without_a_free_file_descriptor_cannot_read_its_addresses_now() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(Unavailable, match="reading the addresses that this host needs"):
            needed_addresses(())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_each_next_hop_of_a_multipath_route_is_needed() -> None:
    ip("address", "add", "192.0.2.11/24", "dev", "eth0")
    hops = [word for last in (1, 2) for word in ("nexthop", "via", f"192.0.2.{last}")]
    ip("route", "add", "default", *hops)
    ip("route", "add", "198.51.100.0/24", "via", "inet6", "2001:db8:1::7", "dev", "eth0", "onlink")
    found = set(needed_addresses(["198.51.100.7"]))
    assert found == {"192.0.2.11", "192.0.2.1", "192.0.2.2", "2001:db8:1::7"}


def test_an_address_without_a_network_is_needed_only_if_the_host_sends_from_it() -> None:
    ip("address", "add", "203.0.113.7/32", "dev", "lo")
    ip("address", "add", "192.0.2.11/24", "dev", "eth0")
    assert set(needed_addresses(["192.0.2.31"])) == {"192.0.2.11"}
    ip("address", "add", "198.51.100.9/32", "dev", "eth1")
    ip("route", "add", "default", "dev", "eth1", "src", "198.51.100.9")
    assert set(needed_addresses(())) == {"192.0.2.11", "198.51.100.9"}
