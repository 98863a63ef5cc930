"""Links, addresses, routes and neighbours of one network namespace, over rtnetlink.

In: names of devices, addresses and prefixes as text. Out: `Link` and `Neighbour` values, or the
kernel changed. A `Rtnetlink` belongs to the network namespace that its thread was in when it was
made, and stays there. Invariant: what is set twice is as if set once: `set_*` replaces, `delete_*`
of what is not there succeeds. Follows rtnetlink(7), Linux
include/uapi/linux/{rtnetlink,if_link,neighbour}.h. pyroute2 stays behind this module."""

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
_USELESS_NEIGHBOUR = (
    0x01 | 0x20 | 0x40
)  # NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP: no address that frames can be sent to


class Neighbour(msgspec.Struct, frozen=True):
    """Who answers for an address on a link."""

    address: str
    mac: str
    index: int


class Nexthop(msgspec.Struct, frozen=True):
    """One way to go: by a router (`via`), straight out of a device, or both. `weight` counts among
    several."""

    via: str = ""
    device: str = ""
    weight: int = 1


class Rtnetlink:
    """One rtnetlink connection. Close it, or use it as an asynchronous context manager.

    Methods raise Conflict for a device or route that is not there (any more), Refused for what the
    kernel will never do, Unavailable for the rest."""

    def __init__(self) -> None:
        self._route = AsyncIPRoute()
        # The socket is made on first use; made here, it is in the namespace in which the caller is
        # now.
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
        """Give the socket back. The connection cannot be used afterwards."""
        self._route.close()

    async def links(self) -> Mapping[str, Link]:
        """Every device of the namespace, by name."""
        found = {link.name: link async for link in self._links()}
        self._indexes = {name: link.index for name, link in found.items()}
        return found

    async def index(self, device: str) -> int:
        """The device's index. Raises Conflict when there is no such device."""
        if device not in self._indexes:
            await self.links()
        if device not in self._indexes:
            raise Conflict(f"looked for network device {device}: there is none of this name")
        return self._indexes[device]

    async def add_bridge(self, name: str) -> None:
        """Make a bridge that forwards at once: no spanning tree, no multicast snooping."""
        await self._ask(f"add bridge {name}", self._route.link, "add", ifname=name, kind="bridge")
        await self._ask(
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
        """Make a pair of devices: `name` here, `peer` in the namespace whose file is
        `peer_namespace`."""
        with peer_namespace.open() as namespace:
            other = {
                "ifname": peer,
                "address": peer_mac,
                "mtu": mtu,
                "net_ns_fd": namespace.fileno(),
            }
            arguments = {"ifname": name, "kind": "veth", "address": mac, "mtu": mtu, "peer": other}
            await self._ask(
                f"add veth {name} with peer {peer} in {peer_namespace}",
                self._route.link,
                "add",
                **arguments,
            )

    async def set_state(self, device: str, *, up: bool) -> None:
        """Switch the device on or off."""
        state = "up" if up else "down"
        await self._ask(
            f"set {device} {state}",
            self._route.link,
            "set",
            index=await self.index(device),
            state=state,
        )

    async def set_bridge(self, device: str, bridge: str) -> None:
        """Plug the device into the bridge."""
        arguments = {"index": await self.index(device), "master": await self.index(bridge)}
        await self._ask(f"plug {device} into {bridge}", self._route.link, "set", **arguments)

    async def delete_link(self, device: str) -> None:
        """Remove the device; of a veth, both ends go."""
        self._indexes.pop(device, None)
        with suppress(Conflict):
            await self._ask(
                f"delete link {device}", self._route.link, "del", index=await self.index(device)
            )
        self._indexes.pop(device, None)

    async def set_address(self, device: str, interface: str) -> None:
        """Give the device an address with prefix length ("192.0.2.1/24"), usable at once (no
        duplicate detection)."""
        parsed = ip_interface(interface)
        flags = {"flags": IFA_F_NODAD} if parsed.version == 6 else {}
        await self._ask(
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
        """Route the prefix ("default" of IPv4 is "0.0.0.0/0", of IPv6 "::/0"): by one way, or
        shared between several.

        `source` is the address that this machine prefers for what it sends itself. `onlink`:
        believe that `via` is reachable on the device although no address says so."""
        arguments = await self._route_arguments(nexthops, source, onlink)
        await self._ask(
            f"set route {destination} {_ways(nexthops)}",
            self._route.route,
            "replace",
            dst=destination,
            **arguments,
        )

    async def delete_route(self, destination: str) -> None:
        """Forget the way to the prefix."""
        with suppress(Conflict):
            await self._ask(
                f"delete route {destination}", self._route.route, "del", dst=destination
            )

    async def set_neighbour(self, device: str, address: str, mac: str) -> None:
        """Say once and for all who answers for the address: no ARP or neighbour discovery."""
        await self._ask(
            f"set neighbour {address} {mac} on {device}",
            self._route.neigh,
            "replace",
            ifindex=await self.index(device),
            dst=address,
            lladdr=mac,
            state=NUD_PERMANENT,
        )

    async def neighbours(self) -> Sequence[Neighbour]:
        """The neighbours whose hardware address is known, of both families."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            async for message in await self._ask(
                "list neighbours", self._route.neigh, "dump", family=family
            ):
                mac, address = message.get_attr("NDA_LLADDR"), message.get_attr("NDA_DST")
                if mac and address and not message["state"] & _USELESS_NEIGHBOUR:
                    found.append(Neighbour(address, mac, message["ifindex"]))
        return found

    async def _links(self) -> Any:
        async for message in await self._ask("list links", self._route.link, "dump"):
            name, mac, mtu = (
                message.get_attr(key) for key in ("IFLA_IFNAME", "IFLA_ADDRESS", "IFLA_MTU")
            )
            yield Link(name, message["index"], mac or "", mtu or 0, bool(message["flags"] & 1))

    async def _route_arguments(
        self, nexthops: Sequence[Nexthop], source: str, onlink: bool
    ) -> dict[str, object]:
        arguments: dict[str, object] = {"prefsrc": source} if source else {}
        flags = {"flags": "onlink"} if onlink else {}
        ways = []
        for hop in nexthops:
            way: dict[str, object] = dict(flags)
            if hop.via:
                way["gateway"] = hop.via
            if hop.device:
                way["oif"] = await self.index(hop.device)
            ways.append(way)
        if len(ways) == 1:
            if not nexthops[0].via and ip_address(source or "::").version == 4:
                arguments["scope"] = "link"
            return arguments | ways[0]
        return arguments | {
            "multipath": [
                way | {"hops": hop.weight - 1} for way, hop in zip(ways, nexthops, strict=True)
            ]
        }

    async def _ask(
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
                    message, fix="it needs root and a kernel with this kind of device"
                ) from error
            raise Unavailable(message) from error


def _ways(nexthops: Sequence[Nexthop]) -> str:
    return ", ".join(f"via {hop.via or 'link'} dev {hop.device or '?'}" for hop in nexthops)
