"""VXLAN: the kernel's devices that packets of gateways come out of, one for each family of the
node's addresses.

In: the tunnel's port and identifier, the node's addresses. Out: the devices are there, up, and let
packets pass: a client's packet comes out of a device by which nobody would answer the client.
Strict reverse path filtering (rp_filter 1) drops such, and loose filtering (2) does so too while
the device has no IPv4 address (fib_validate_source has nothing to go by then). The kernel takes the
greater of the device's value and that of `all`, so 2 on the device is enough, whatever `all` is.
"""

from collections.abc import Sequence

from fairlead.config import TunnelConfig
from fairlead.errors import Refused
from fairlead.net import sysctl, vxlan
from fairlead.net.address import is_ipv6
from fairlead.net.interfaces import holders
from fairlead.net.vxlan import Vxlan

MAC = "02:66:6c:00:00:01"
"""The same on every node: gateways write it without asking anybody."""
DUMMY_ADDRESS = "192.0.0.8"
"""The IPv4 dummy address (RFC 7600): nothing is ever sent to it or from it."""
NAMES = ("fairlead", "fairlead6")


def wanted(tunnel: TunnelConfig, node_addresses: Sequence[str]) -> tuple[Vxlan, ...]:
    """The devices that the node should have. Pure."""
    if tunnel.kind != "vxlan":
        return ()
    first = {is_ipv6(address): address for address in reversed(node_addresses)}
    return tuple(
        Vxlan(NAMES[ipv6], tunnel.vni, tunnel.port, first[ipv6], MAC) for ipv6 in sorted(first)
    )


async def have(devices: Sequence[Vxlan]) -> None:
    """Make or repair these devices, and take those away that are ours and not among them."""
    for device in devices:
        await vxlan.ensure(device)
    # Only where it is missing: setting it again would be told as a change, to us among others.
    there = {link.name for link in holders([DUMMY_ADDRESS])} if devices else frozenset[str]()
    for device in devices:
        if device.name not in there:
            await vxlan.set_address(device.name, f"{DUMMY_ADDRESS}/32")
        _pass_clients(device.name)
    await remove([name for name in NAMES if name not in {device.name for device in devices}])


async def remove(names: Sequence[str] = NAMES) -> list[str]:
    """Take our devices away; the names of those that were there."""
    return [name for name in names if await vxlan.remove(name)]


def _pass_clients(device: str) -> None:
    own, everywhere = f"net/ipv4/conf/{device}/rp_filter", "net/ipv4/conf/all/rp_filter"
    if sysctl.read(own) == "2":
        return
    try:
        sysctl.write(own, "2")
    except Refused:
        # A container without the right to write: what the host has set by default may do.
        if max(sysctl.read(own) or "0", sysctl.read(everywhere) or "0") == "1":
            raise
