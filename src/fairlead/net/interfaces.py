"""The network interfaces of this host, their addresses, and the interfaces of default routes.

In: nothing, or addresses. Out: `Link` values, names of interfaces; in the network namespace of the
calling thread. Read without pyroute2, which takes a tenth of a second to load: every node reads
them at its start. Follows rtnetlink(7), Linux include/uapi/linux/{rtnetlink,if_link,if_addr}.h."""

import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import NamedTuple

import msgspec

from fairlead.net.netlink import DUMP, attributes
from fairlead.net.rtnetlink import RtnetlinkSocket, open_rtnetlink
from fairlead.net.selection import Present

_GET_LINK, _GET_ADDRESS, _GET_ROUTE = 18, 22, 26
_LINK, _ADDRESS, _ROUTE, _HOP = (
    struct.Struct("=BxHiII"),
    struct.Struct("=4BI"),
    struct.Struct("=8BI"),
    struct.Struct("=HBBi"),
)
"""struct ifinfomsg, ifaddrmsg, rtmsg and rtnexthop."""
_LINK_MAC, _LINK_NAME, _LINK_MTU, _LINK_ABOUT = 1, 3, 4, 18
_ABOUT_KIND = 1
_OF_PODS = frozenset({"veth", "netkit", "tun"})
"""The kinds of devices that are one end of the network of a pod or a virtual machine."""
_ADDRESS_OTHER_END, _ADDRESS_OWN = 1, 2
_ROUTE_DEVICE, _ROUTE_HOPS = 4, 9
_NUMBER = struct.Struct("=I")
_MAIN_TABLE, _UP, _LOWER_UP = 254, 1, 1 << 16


class Network(NamedTuple):
    """A network that is on the link of an interface."""

    interface: str
    network: IPv4Network | IPv6Network


class Link(msgspec.Struct, frozen=True):
    """A network device. `mac` is empty for devices that have none; `up` is the administrative
    state; `carrier`: whether the link to the next device works."""

    name: str
    index: int
    mac: str
    mtu: int
    up: bool
    carrier: bool = True


def links() -> Mapping[str, Link]:
    """Return every device, by name. Raise Unavailable."""
    with open_rtnetlink("listing interfaces") as kernel:
        return {link.name: link for link in _links(kernel)}


def holders(addresses: Collection[str]) -> Sequence[Link]:
    """Return the devices that have any of these addresses, by name.

    Loopback is left out, because packets do not leave the host through it. Raise Unavailable."""
    wanted = {ip_address(each) for each in addresses}
    with open_rtnetlink("listing interfaces and their addresses") as kernel:
        found = {index for index, own in interface_addresses(kernel) if own in wanted}
        return sorted(
            (each for each in _links(kernel) if each.index in found and each.name != "lo"),
            key=lambda each: each.name,
        )


def default_devices() -> frozenset[str]:
    """Return the devices of IPv4 default routes. Raise Unavailable."""
    with open_rtnetlink("listing routes") as kernel:
        found = set(_default_routes(kernel, socket.AF_INET))
        return frozenset(each.name for each in _links(kernel) if each.index in found)


def present(*, routes: bool) -> tuple[Present, ...]:
    """Return every device with its addresses, by index.

    `routes`: also find out whether a default route uses the device, for which the kernel lists the
    whole routing table. Raise Unavailable."""
    with open_rtnetlink("listing interfaces, their addresses and default routes") as kernel:
        families = (socket.AF_INET, socket.AF_INET6) if routes else ()
        leaving = {index for family in families for index in _default_routes(kernel, family)}
        addresses: dict[int, list[str]] = {}
        for index, own in interface_addresses(kernel):
            addresses.setdefault(index, []).append(str(own))
        links = sorted(_links(kernel), key=lambda each: each.index)
        return tuple(
            Present(each.name, tuple(addresses.get(each.index, ())), each.index in leaving)
            for each in links
        )


def networks() -> Sequence[Network]:
    """Return the networks of the addresses of all devices, by index. An address with a prefix as
    long as itself has none. Raise Unavailable."""
    with open_rtnetlink("listing interfaces and their networks") as kernel:
        found = []
        for body in kernel.exchange(_GET_ADDRESS, DUMP, _ADDRESS.pack(0, 0, 0, 0, 0)):
            family, length, _, _, index = _ADDRESS.unpack_from(body)
            fields = dict(attributes(body, _ADDRESS.size))
            # On a point-to-point link the prefix is that of the other end.
            address = fields.get(_ADDRESS_OTHER_END) or fields.get(_ADDRESS_OWN, b"")
            if family in (socket.AF_INET, socket.AF_INET6) and length < 8 * len(address):
                found.append((index, ip_network((address, length), strict=False)))
        names = {each.index: each.name for each in _links(kernel)}
        found.sort(key=lambda each: each[0])
        return [Network(names[index], network) for index, network in found if index in names]


def macs() -> Sequence[str]:
    """Return the MAC addresses with which this host may answer for its addresses: those of devices
    that are on a network, sorted, and after them those of all others, because the kernel answers
    ARP requests on each device. Left out is the host's end of the network of a pod or a virtual
    machine, unless it has a network that is more than link-local: there may be thousands. Raise
    Unavailable."""
    present = links()
    on_network = {each.interface for each in networks() if not each.network.is_link_local}
    with open_rtnetlink("listing interfaces and their kinds") as kernel:
        others = {name for name, kind in _kinds(kernel) if kind not in _OF_PODS}
    found = (
        present[name].mac
        for name in (*sorted(on_network & present.keys()), *sorted(others & present.keys()))
    )
    return [each for each in dict.fromkeys(found) if each not in ("", "00:00:00:00:00:00")]


def _kinds(kernel: RtnetlinkSocket) -> Iterator[tuple[str, str]]:
    """Yield the name of each device with its kind; empty: it is a network card."""
    for body in kernel.exchange(_GET_LINK, DUMP, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        fields = dict(attributes(body, _LINK.size))
        about = dict(attributes(fields.get(_LINK_ABOUT, b""), 0))
        name, kind = fields[_LINK_NAME], about.get(_ABOUT_KIND, b"")
        yield name.rstrip(b"\0").decode(), kind.rstrip(b"\0").decode()


def _default_routes(kernel: RtnetlinkSocket, family: int) -> Iterator[int]:
    """Yield the index of the device of each default route in the main table."""
    for body in kernel.exchange(
        _GET_ROUTE, DUMP, _ROUTE.pack(family, 0, 0, 0, _MAIN_TABLE, 0, 0, 0, 0)
    ):
        _, bits, _, _, table, *_ = _ROUTE.unpack_from(body)
        if bits == 0 and table == _MAIN_TABLE:
            fields = dict(attributes(body, _ROUTE.size))
            yield from (
                _NUMBER.unpack(each)[0] for kind, each in fields.items() if kind == _ROUTE_DEVICE
            )
            yield from _hops(fields.get(_ROUTE_HOPS, b""))


def interface_addresses(kernel: RtnetlinkSocket) -> Iterator[tuple[int, IPv4Address | IPv6Address]]:
    """Yield the addresses of all interfaces, each with the index of its interface, but no multicast
    groups (see `memberships`). Raise OSError."""
    for body in kernel.exchange(_GET_ADDRESS, DUMP, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        fields = dict(attributes(body, _ADDRESS.size))
        # On a point-to-point link the first attribute is the address of the other end.
        own = fields.get(_ADDRESS_OWN) or fields.get(_ADDRESS_OTHER_END)
        if own and not (address := ip_address(own)).is_multicast:
            yield _ADDRESS.unpack_from(body)[-1], address


def _links(kernel: RtnetlinkSocket) -> Iterator[Link]:
    for body in kernel.exchange(_GET_LINK, DUMP, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        _, _, index, flags, _ = _LINK.unpack_from(body)
        fields = dict(attributes(body, _LINK.size))
        name = fields[_LINK_NAME].rstrip(b"\0").decode()
        (mtu,) = _NUMBER.unpack(fields[_LINK_MTU])
        mac = fields.get(_LINK_MAC, b"").hex(":")
        yield Link(name, index, mac, mtu, bool(flags & _UP), bool(flags & _LOWER_UP))


def _hops(data: bytes) -> Iterator[int]:
    """Yield the devices of a multipath route."""
    at = 0
    while at + _HOP.size <= len(data):
        length, _, _, index = _HOP.unpack_from(data, at)
        if length < _HOP.size:
            return
        yield index
        at += (length + 3) & ~3
