"""VXLAN devices that only receive: the end of a tunnel on this host.

In: the properties of a device. Out: the device exists in the kernel and is up. It has no remote
end, learns nothing and sends nothing. A device without a local address receives packets over IPv4
only, a device with an IPv6 address over IPv6 only, so both families take two devices. Invariant: a
device of the same name that is not a VXLAN device belongs to another program and is left alone.
Follows RFC 7348, Linux Documentation/networking/vxlan.rst, include/uapi/linux/if_link.h."""

import errno
from ipaddress import ip_interface
from typing import Any, NamedTuple

from fairlead.errors import Refused, Unavailable
from fairlead.net.address import is_ipv6
from fairlead.net.iproute import open_iproute

_TAKEN = (
    "another VXLAN device uses this port or identifier: choose another tunnel.port or tunnel.vni"
)
_FIXES = {
    errno.EOPNOTSUPP: "this kernel has no VXLAN (CONFIG_VXLAN): choose tunnel.kind ipip",
    errno.EEXIST: _TAKEN,
    errno.EADDRINUSE: _TAKEN,
}


class Vxlan(NamedTuple):
    """A device: its name, network identifier, UDP port, the address of this host at which packets
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


async def ensure(device: Vxlan) -> None:
    """Create the device, replace it if its properties differ, and set it up.

    Raise Refused if the kernel has no VXLAN, or another program uses the name or port."""
    async with open_iproute(f"creating the device {device.name}", _FIXES) as route:
        found = await _find(route, device.name)
        if found is not None and _properties(found) != device:
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
    """Add an IPv4 address with prefix length ("192.0.2.1/32") to the device. Raise Unavailable,
    also if the device does not exist."""
    parsed = ip_interface(interface)
    async with open_iproute(f"adding address {interface} to {name}") as route:
        if (found := await _find(route, name)) is None:
            raise Unavailable(f"adding address {interface} to {name}: the device does not exist")
        await route.addr(
            "replace",
            index=found["index"],
            address=str(parsed.ip),
            prefixlen=parsed.network.prefixlen,
        )


async def remove(name: str) -> bool:
    """Remove the device. Return False if it does not exist or is not a VXLAN device."""
    async with open_iproute(f"removing the device {name}") as route:
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
        # Gateways do not compute the outer checksum; the inner packet has its own (RFC 6935).
        return attributes | {"vxlan_local6": device.local, "vxlan_udp_zero_csum6_rx": 1}
    return attributes | {"vxlan_local": device.local}


async def _find(route: Any, name: str) -> Any:
    from pyroute2.netlink.exceptions import NetlinkError  # already loaded; see `iproute`

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
            f"there is a device {name} that is not a VXLAN device",
            fix=f"rename or remove it: ip link del {name}",
        )


def _properties(message: Any) -> Vxlan | None:
    """Return the properties of the device, if `ensure` could have created it."""
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
