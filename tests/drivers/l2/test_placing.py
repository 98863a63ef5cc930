"""On which interfaces an address is announced, and the limits of their number."""

from collections.abc import Sequence
from ipaddress import ip_interface

import pytest

from fairlead.drivers.l2 import placing
from fairlead.drivers.l2.host_links import default_names
from fairlead.drivers.l2.maps import OBJECT
from fairlead.drivers.l2.placing import MAX_INTERFACES, HostLinks, Placement, Room, place
from fairlead.net.elf import read_object
from fairlead.net.selection import Present

ADDRESS = "192.0.2.50"


def host(pods: int, *, more: Sequence[str] = ()) -> HostLinks:
    """Return the interfaces of a host: eth0 with the network of the address, those of pods, and
    `more` with networks of their own."""
    names = ["eth0", *(f"cali{number}" for number in range(pods)), *more]
    networks = {"eth0": [ip_interface("192.0.2.1/24"), ip_interface("fe80::1/64")]}
    networks |= {f"cali{number}": [ip_interface("fe80::2/64")] for number in range(pods)}
    networks |= {name: [ip_interface(f"198.18.{number}.1/24")] for number, name in enumerate(more)}
    return HostLinks(
        [Present(name, tuple(str(each.ip) for each in networks[name]), False) for name in names],
        networks,
        {name: number for number, name in enumerate(names, start=2)},
    )


def test_a_pattern_for_a_few_interfaces_is_followed() -> None:
    links = host(3)
    found = place(ADDRESS, ["*"], ["eth0"], links)
    assert (set(found.interfaces), found.problem) == ({"eth0", "cali0", "cali1", "cali2"}, None)


def test_a_pattern_for_the_interfaces_of_all_pods_is_not_followed() -> None:
    found = place(ADDRESS, ["*"], ["eth0"], host(110))
    assert found.interfaces == ("eth0",)
    assert found.problem is not None
    assert "the pool selects 111 interfaces by *" in found.problem.message


def test_default_interfaces_without_a_network_are_left_out_if_there_are_too_many() -> None:
    def chosen(links: HostLinks) -> Sequence[str]:
        return sorted(default_names(["*"], list, links))

    assert len(chosen(host(3))) == 4
    assert chosen(host(110)) == ["eth0"]
    vlans = [f"vlan{number:02}" for number in range(40)]
    assert chosen(host(1, more=vlans)) == ["eth0", *vlans][:MAX_INTERFACES]


@pytest.mark.parametrize(
    ("places", "hosts", "placed"), [(4, 256, [2, 2, 0]), (100, 3, [2, 2, 0]), (100, 256, [2, 2, 2])]
)
def test_an_address_without_room_affects_no_other_address(
    monkeypatch: pytest.MonkeyPatch, places: int, hosts: int, placed: list[int]
) -> None:
    monkeypatch.setattr(placing, "MAX_PLACES", places)
    monkeypatch.setattr(placing, "MAX_HOSTS", hosts)
    room = Room([], ["a"])
    wanted = [Placement(("a", "b")), Placement(("b", "c")), Placement(("c", "d"))]
    found = [room.take(ADDRESS, each) for each in wanted]
    assert [len(each.interfaces) for each in found] == placed
    assert [each.problem is None for each in found] == [each > 0 for each in placed]


def test_the_limits_are_those_of_the_kernels_tables() -> None:
    maps = read_object(OBJECT).maps
    assert maps["entries"].max_entries == placing.MAX_PLACES
    assert maps["hosts"].max_entries == placing.MAX_HOSTS
