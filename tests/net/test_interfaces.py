"""Interfaces, addresses and default routes of a namespace, as read over netlink."""

import os
import subprocess
from collections.abc import Iterator
from ipaddress import ip_network

import pytest

from fairlead.lab import namespace
from fairlead.net.interfaces import Link, Network, default_devices, holders, links, networks

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-interfaces"
MACS = {"front": "02:00:00:00:00:01", "back": "02:00:00:00:00:02"}


def ip(*words: str) -> None:
    subprocess.run(["ip", "-n", NAME, *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def host() -> Iterator[None]:
    """A host with two interfaces, each with addresses of both families; the first IPv4 address is a
    point-to-point address."""
    try:
        namespace.create(NAME)
        ip("link", "set", "lo", "up")
        for device, mac in MACS.items():
            ip(
                "link",
                "add",
                device,
                "address",
                mac,
                "mtu",
                "1400",
                "type",
                "veth",
                "peer",
                "name",
                f"{device}-end",
            )
            ip("link", "set", device, "up")
            ip("link", "set", f"{device}-end", "up")
        ip("address", "add", "192.0.2.1", "peer", "192.0.2.2", "dev", "front")
        ip("address", "add", "198.18.0.1/24", "dev", "back")
        ip("address", "add", "2001:db8::1/64", "dev", "back", "nodad")
        ip("address", "add", "203.0.113.1/32", "dev", "lo")
        yield
    finally:
        namespace.delete(NAME)


def test_interfaces_are_found_by_their_addresses(host: None) -> None:
    with namespace.inside(NAME):
        found = links()
        assert found["front"] == Link("front", found["front"].index, MACS["front"], 1400, True)
        assert [link.name for link in holders(["192.0.2.1", "2001:db8::1", "203.0.113.1"])] == [
            "back",
            "front",
        ]
        assert holders(["192.0.2.2"]) == [], "this is the address of the other end"


def test_every_next_hop_of_the_default_route_is_a_default_device(host: None) -> None:
    ip("route", "add", "203.0.113.0/24", "dev", "front")
    with namespace.inside(NAME):
        assert default_devices() == frozenset()
    ip("route", "add", "default", "via", "198.18.0.9")
    ip("route", "add", "default", "dev", "front", "table", "100")
    with namespace.inside(NAME):
        assert default_devices() == {"back"}
    ip(
        "route",
        "replace",
        "default",
        "nexthop",
        "via",
        "198.18.0.9",
        "nexthop",
        "dev",
        "front",
        "weight",
        "2",
    )
    with namespace.inside(NAME):
        assert default_devices() == {"back", "front"}


def test_the_networks_on_the_links_of_interfaces(host: None) -> None:
    """An address with a prefix as long as itself, such as one on lo, has no network."""
    with namespace.inside(NAME):
        found = {each for each in networks() if not each.network.is_link_local}
    assert found == {
        Network("lo", ip_network("127.0.0.0/8")),
        Network("back", ip_network("198.18.0.0/24")),
        Network("back", ip_network("2001:db8::/64")),
    }


def test_a_link_without_carrier_is_recognized(host: None) -> None:
    ip("link", "set", "front-end", "down")
    with namespace.inside(NAME):
        assert {name: each.carrier for name, each in links().items() if name in MACS} == {
            "front": False,
            "back": True,
        }
