"""The VXLAN devices at which packets of gateways leave the tunnel, one for each address family of
the node.

In: the tunnel's port and identifier, the node's addresses. Out: the devices exist, are up, and let
clients' packets pass. A client's packet arrives at a device that is not on the route back to the
client. Strict reverse path filtering (rp_filter 1) drops such packets. Loose filtering (2) also
drops them while the device has no IPv4 address, because fib_validate_source then has nothing to
check against. The kernel uses the greater of the device's value and the value of `all`, so 2 on the
device is enough."""

from collections.abc import Sequence

from fairlead.config import TunnelConfig
from fairlead.errors import Refused
from fairlead.net import sysctl, vxlan
from fairlead.net.address import is_ipv6
from fairlead.net.interfaces import holders
from fairlead.net.vxlan import Vxlan

MAC = "02:66:6c:00:00:01"
"""The MAC address of the device on every node. It is constant, so that gateways need not discover
it."""
DUMMY_ADDRESS = "192.0.0.8"
"""The IPv4 dummy address (RFC 7600): no packet is ever sent to it or from it."""
NAMES = ("fairlead", "fairlead6")


def wanted(tunnel: TunnelConfig, node_addresses: Sequence[str]) -> tuple[Vxlan, ...]:
    """Return the devices that the node should ensure. Pure."""
    if tunnel.kind != "vxlan":
        return ()
    first = {is_ipv6(address): address for address in reversed(node_addresses)}
    return tuple(
        Vxlan(NAMES[ipv6], tunnel.vni, tunnel.port, first[ipv6], MAC) for ipv6 in sorted(first)
    )


async def ensure(devices: Sequence[Vxlan]) -> None:
    """Create or repair these devices, and delete other devices of ours."""
    for device in devices:
        await vxlan.ensure(device)
    # Set the address only where it is missing: the kernel reports every setting as a change, and
    # this driver reacts to such reports.
    present = {link.name for link in holders([DUMMY_ADDRESS])} if devices else frozenset[str]()
    for device in devices:
        if device.name not in present:
            await vxlan.set_address(device.name, f"{DUMMY_ADDRESS}/32")
        _pass_clients(device.name)
    await remove([name for name in NAMES if name not in {device.name for device in devices}])


async def remove(names: Sequence[str] = NAMES) -> list[str]:
    """Delete our devices. Return the names of the devices that existed."""
    return [name for name in names if await vxlan.remove(name)]


def _pass_clients(device: str) -> None:
    """Set loose reverse path filtering on the device."""
    own, everywhere = f"net/ipv4/conf/{device}/rp_filter", "net/ipv4/conf/all/rp_filter"
    if sysctl.read(own) == "2":
        return
    try:
        sysctl.write(own, "2")
    except Refused:
        # A container may lack the right to write. Continue if the host's values do not drop
        # packets.
        if max(sysctl.read(own) or "0", sysctl.read(everywhere) or "0") == "1":
            raise
