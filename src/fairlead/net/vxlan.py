"""VXLAN devices that only receive: the end of a tunnel to this host.

In: what a device should be. Out: the kernel has it, up. Nothing is learnt and nothing is sent by
it: it knows no other end. A device without a local address takes packets over IPv4 alone, one with
an IPv6 address over IPv6 alone: it takes two for both. Invariant: a device of the same name that is
no VXLAN device is somebody else's and is left alone. Follows RFC 7348, Linux
Documentation/networking/vxlan.rst, include/uapi/linux/if_link.h."""

import errno
from ipaddress import ip_interface
from typing import Any, NamedTuple

from fairlead.errors import Refused, Unavailable
from fairlead.net.address import is_ipv6
from fairlead.net.iproute import asking

_TAKEN = (
    "another VXLAN device has this port or identifier: choose another tunnel.port or tunnel.vni"
)
_FIXES = {
    errno.EOPNOTSUPP: "this kernel has no VXLAN (CONFIG_VXLAN): choose tunnel.kind ipip",
    errno.EEXIST: _TAKEN,
    errno.EADDRINUSE: _TAKEN,
}


class Vxlan(NamedTuple):
    """A device: its name, network identifier, UDP port, this host's address at which packets
    arrive, its hardware address."""

    name: str
    vni: int
    port: int
    local: str
    mac: str

    @property
    def ipv6(self) -> bool:
        """Whether packets arrive over IPv6."""
        return is_ipv6(self.local)


async def have(device: Vxlan) -> None:
    """Make the device, or make it anew if it is another one, and switch it on. Raises Refused where
    the kernel has no VXLAN, or the name or port is somebody else's."""
    async with asking(f"making the device {device.name}", _FIXES) as route:
        found = await _find(route, device.name)
        if found is not None and _described(found) != device:
            _check_ours(found, device.name)
            await route.link("del", index=found["index"])
            found = None
        if found is None:
            await route.link(
                "add", ifname=device.name, kind="vxlan", address=device.mac, **_attributes(device)
            )
            found = await _find(route, device.name)
        if found is not None and not found["flags"] & 1:
            await route.link("set", index=found["index"], state="up")


async def set_address(name: str, interface: str) -> None:
    """Give the device an address of IPv4 with its length ("192.0.2.1/32"). Raises Unavailable, also
    if there is no device."""
    parsed = ip_interface(interface)
    async with asking(f"adding address {interface} to {name}") as route:
        if (found := await _find(route, name)) is None:
            raise Unavailable(f"adding address {interface} to {name}: there is no such device")
        await route.addr(
            "replace",
            index=found["index"],
            address=str(parsed.ip),
            prefixlen=parsed.network.prefixlen,
        )


async def remove(name: str) -> bool:
    """Take the device away. False if there is none, or if it is none of VXLAN's."""
    async with asking(f"removing the device {name}") as route:
        found = await _find(route, name)
        if found is None or _kind(found) != "vxlan":
            return False
        await route.link("del", index=found["index"])
        return True


def _attributes(device: Vxlan) -> dict[str, object]:
    attributes: dict[str, object] = {
        "vxlan_id": device.vni,
        "vxlan_port": device.port,
        "vxlan_learning": 0,
    }
    if device.ipv6:
        # Gateways do not compute the outer checksum: the inner packet has its own (RFC 6935).
        return attributes | {"vxlan_local6": device.local, "vxlan_udp_zero_csum6_rx": 1}
    return attributes | {"vxlan_local": device.local}


async def _find(route: Any, name: str) -> Any:
    from pyroute2.netlink.exceptions import NetlinkError  # loaded by then; see `iproute`

    try:
        found = await route.link("get", ifname=name)
    except NetlinkError as error:
        if error.code == errno.ENODEV:
            return None
        raise
    return found[0] if found else None


def _kind(message: Any) -> str:
    information = message.get_attr("IFLA_LINKINFO")
    return str(information.get_attr("IFLA_INFO_KIND")) if information else ""


def _check_ours(message: Any, name: str) -> None:
    if _kind(message) != "vxlan":
        raise Refused(
            f"there is a device {name} that is none of VXLAN's",
            fix=f"rename or remove it: ip link del {name}",
        )


def _described(message: Any) -> Vxlan | None:
    """What the device is, if it is one that `have` could have made."""
    if _kind(message) != "vxlan":
        return None
    data = message.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_DATA")
    local = data.get_attr("IFLA_VXLAN_LOCAL") or data.get_attr("IFLA_VXLAN_LOCAL6") or ""
    if data.get_attr("IFLA_VXLAN_LEARNING") or (
        is_ipv6(local) and not data.get_attr("IFLA_VXLAN_UDP_ZERO_CSUM6_RX")
    ):
        return None
    name, mac = message.get_attr("IFLA_IFNAME"), message.get_attr("IFLA_ADDRESS")
    return Vxlan(name, data.get_attr("IFLA_VXLAN_ID"), data.get_attr("IFLA_VXLAN_PORT"), local, mac)
