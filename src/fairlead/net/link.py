"""Links, addresses, routes and neighbours of one network namespace, over rtnetlink.

In: names of devices, addresses and prefixes as text. Out: `Link` and `Neighbour` values, or changes
in the kernel. An `Rtnetlink` belongs to the network namespace of the thread that created it.
Invariant: every operation may be repeated: `set_*` replaces an existing object, and `delete_*` of a
missing object succeeds. Follows rtnetlink(7), Linux
include/uapi/linux/{rtnetlink,if_link,neighbour}.h. The interface does not contain types of
pyroute2."""

import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_interface
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from pyroute2 import AsyncIPRoute
from pyroute2.netlink.exceptions import NetlinkError

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.net.interfaces import Link

NUD_PERMANENT = 0x80
IFA_F_NODAD = 0x02
_UNUSABLE_STATES = 0x01 | 0x20 | 0x40
"""NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP: states without a hardware address to send frames to."""


class Neighbour(msgspec.Struct, frozen=True):
    """The hardware address for an IP address on a link."""

    address: str
    mac: str
    index: int


class Nexthop(msgspec.Struct, frozen=True):
    """One next hop of a route: a router (`via`), a device, or both. `weight` is its share in a
    multipath route."""

    via: str = ""
    device: str = ""
    weight: int = 1


class Rtnetlink:
    """One rtnetlink connection. Close it, or use it as an asynchronous context manager.

    Methods raise Conflict if a device or route does not exist (any more), Refused if the kernel
    rejects the operation, and Unavailable otherwise."""

    def __init__(self) -> None:
        self._route = AsyncIPRoute()
        # pyroute2 creates the socket on first use. Create it now, in the caller's present
        # namespace.
        self._route.socket  # noqa: B018
        self._indexes: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. The connection cannot be used afterwards."""
        self._route.close()

    async def links(self) -> Mapping[str, Link]:
        """Return every device of the namespace, by name."""
        found = {link.name: link async for link in self._links()}
        self._indexes = {name: link.index for name, link in found.items()}
        return found

    async def index(self, device: str) -> int:
        """Return the device's index. Raise Conflict if there is no such device."""
        if device not in self._indexes:
            await self.links()
        if device not in self._indexes:
            raise Conflict(f"network device {device} does not exist")
        return self._indexes[device]

    async def add_bridge(self, name: str, mac: str = "") -> None:
        """Create a bridge that forwards immediately: no spanning tree, no multicast snooping.
        Without `mac`, the kernel gives it the lowest MAC address of its ports at any time."""
        arguments = {"address": mac} if mac else {}
        await self._request(
            f"add bridge {name}", self._route.link, "add", ifname=name, kind="bridge", **arguments
        )
        await self._request(
            f"set up bridge {name}",
            self._route.link,
            "set",
            index=await self.index(name),
            kind="bridge",
            br_stp_state=0,
            br_forward_delay=0,
            br_mcast_snooping=0,
        )

    async def add_veth(
        self, name: str, mac: str, peer: str, peer_mac: str, peer_namespace: Path, mtu: int = 1500
    ) -> None:
        """Create a veth pair: `name` in this namespace, `peer` in the namespace whose file is
        `peer_namespace`."""
        with peer_namespace.open() as namespace:
            other = {
                "ifname": peer,
                "address": peer_mac,
                "mtu": mtu,
                "net_ns_fd": namespace.fileno(),
            }
            arguments = {"ifname": name, "kind": "veth", "address": mac, "mtu": mtu, "peer": other}
            await self._request(
                f"add veth {name} with peer {peer} in {peer_namespace}",
                self._route.link,
                "add",
                **arguments,
            )

    async def set_state(self, device: str, *, up: bool) -> None:
        """Set the administrative state of the device."""
        state = "up" if up else "down"
        await self._request(
            f"set {device} {state}",
            self._route.link,
            "set",
            index=await self.index(device),
            state=state,
        )

    async def set_bridge(self, device: str, bridge: str) -> None:
        """Attach the device to the bridge, and detach it from any other."""
        arguments = {"index": await self.index(device), "master": await self.index(bridge)}
        await self._request(f"plug {device} into {bridge}", self._route.link, "set", **arguments)

    async def ports(self, bridge: str) -> Sequence[str]:
        """Return the devices that are attached to the bridge. None if it does not exist."""
        try:
            master = await self.index(bridge)
        except Conflict:
            return []
        return sorted(
            [
                message.get_attr("IFLA_IFNAME")
                async for message in await self._request("list links", self._route.link, "dump")
                if message.get_attr("IFLA_MASTER") == master
            ]
        )

    async def delete_link(self, device: str) -> None:
        """Remove the device; for a veth, both ends are removed."""
        self._indexes.pop(device, None)
        with suppress(Conflict):
            await self._request(
                f"delete link {device}", self._route.link, "del", index=await self.index(device)
            )
        self._indexes.pop(device, None)

    async def set_address(self, device: str, interface: str) -> None:
        """Add an address with prefix length ("192.0.2.1/24") to the device, usable at once (without
        duplicate address detection)."""
        parsed = ip_interface(interface)
        flags = {"flags": IFA_F_NODAD} if parsed.version == 6 else {}
        await self._request(
            f"add address {interface} to {device}",
            self._route.addr,
            "replace",
            index=await self.index(device),
            address=str(parsed.ip),
            prefixlen=parsed.network.prefixlen,
            **flags,
        )

    async def set_route(
        self, destination: str, *nexthops: Nexthop, source: str = "", onlink: bool = False
    ) -> None:
        """Route the prefix (the default route is "0.0.0.0/0" or "::/0") by one next hop or by
        several.

        `source` is the preferred source address of packets of this host. `onlink`: treat `via` as
        reachable on the device even if no address of the device covers it."""
        arguments = await self._route_arguments(nexthops, source, onlink)
        await self._request(
            f"set route {destination} {_describe(nexthops)}",
            self._route.route,
            "replace",
            dst=destination,
            **arguments,
        )

    async def set_blackhole(self, destination: str, *, metric: int) -> None:
        """Discard packets to `destination` that match no other route. Other routes to the same
        destination take precedence if their metrics are lower."""
        await self._request(
            f"set blackhole route to {destination}",
            self._route.route,
            "replace",
            dst=destination,
            type="blackhole",
            priority=metric,
        )

    async def delete_route(self, destination: str) -> None:
        """Delete the route to the prefix."""
        with suppress(Conflict):
            await self._request(
                f"delete route {destination}", self._route.route, "del", dst=destination
            )

    async def set_neighbour(self, device: str, address: str, mac: str) -> None:
        """Add a permanent neighbour entry, for which no ARP or neighbour discovery is used."""
        await self._request(
            f"set neighbour {address} {mac} on {device}",
            self._route.neigh,
            "replace",
            ifindex=await self.index(device),
            dst=address,
            lladdr=mac,
            state=NUD_PERMANENT,
        )

    async def neighbours(self) -> Sequence[Neighbour]:
        """Return the neighbours whose hardware address is known, of both families."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            async for message in await self._request(
                "list neighbours", self._route.neigh, "dump", family=family
            ):
                mac, address = message.get_attr("NDA_LLADDR"), message.get_attr("NDA_DST")
                if mac and address and not message["state"] & _UNUSABLE_STATES:
                    found.append(Neighbour(address, mac, message["ifindex"]))
        return found

    async def _links(self) -> Any:
        async for message in await self._request("list links", self._route.link, "dump"):
            name, mac, mtu = (
                message.get_attr(key) for key in ("IFLA_IFNAME", "IFLA_ADDRESS", "IFLA_MTU")
            )
            yield Link(name, message["index"], mac or "", mtu or 0, bool(message["flags"] & 1))

    async def _route_arguments(
        self, nexthops: Sequence[Nexthop], source: str, onlink: bool
    ) -> dict[str, object]:
        arguments: dict[str, object] = {"prefsrc": source} if source else {}
        flags = {"flags": "onlink"} if onlink else {}
        hops = []
        for hop in nexthops:
            fields: dict[str, object] = dict(flags)
            if hop.via:
                fields["gateway"] = hop.via
            if hop.device:
                fields["oif"] = await self.index(hop.device)
            hops.append(fields)
        if len(hops) == 1:
            if not nexthops[0].via and ip_address(source or "::").version == 4:
                arguments["scope"] = "link"
            return arguments | hops[0]
        return arguments | {
            "multipath": [
                fields | {"hops": hop.weight - 1}
                for fields, hop in zip(hops, nexthops, strict=True)
            ]
        }

    async def _request(
        self,
        what: str,
        call: Callable[..., Awaitable[Any]],
        *arguments: object,
        **attributes: object,
    ) -> Any:
        try:
            return await call(*arguments, **attributes)
        except NetlinkError as error:
            number = abs(error.code)
            message = (
                f"tried to {what}: the kernel answered "
                f"{errno.errorcode.get(number, number)} ({error})"
            )
            if number in (errno.ENODEV, errno.ENOENT, errno.ESRCH):
                self._indexes.clear()
                raise Conflict(message) from error
            if number in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP):
                raise Refused(
                    message, fix="run as root, on a kernel with this kind of device"
                ) from error
            raise Unavailable(message) from error


def _describe(nexthops: Sequence[Nexthop]) -> str:
    return ", ".join(f"via {hop.via or 'link'} dev {hop.device or '?'}" for hop in nexthops)
