"""Subscribe to changes of network devices, addresses and default routes.

In: nothing. Out: the names of changed devices, and changed addresses. The subscriber decides which
are relevant. Follows rtnetlink(7)."""

import struct
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.net.netlink import attributes
from fairlead.net.netlink_events import Events, IgnoredEvents, Subscription

_LINK_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP = 1, 5, 9
_IPV4_ROUTE_GROUP, _IPV6_ROUTE_GROUP = 7, 11
_NEW_LINK, _DELETE_LINK = 16, 17
_NEW_ROUTE, _DELETE_ROUTE = 24, 25
_OTHER_ROUTES = IgnoredEvents((_NEW_ROUTE, _DELETE_ROUTE), at=1, value=0, differs=True)
"""Routes with a destination, rtmsg.rtm_dst_len: a router may have a million of them."""
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=4BI")
_LINK_NAME, _OTHER_END, _OWN_ADDRESS = 3, 1, 2
_LINK_EVENT = 44
_MOVED = (struct.pack("=I", 3), struct.pack("=I", 4))
"""IFLA_EVENT_BONDING_FAILOVER, IFLA_EVENT_NOTIFY_PEERS."""


class LinkChanges(NamedTuple):
    """Names of devices, and addresses, that were added, changed or removed. `lost`: the kernel
    dropped further events. `moved`: devices whose neighbors have to learn their MAC address again,
    for example after the fail-over of a bond."""

    devices: frozenset[str]
    addresses: frozenset[str]
    lost: bool
    moved: frozenset[str] = frozenset()


class LinkEvents:
    """A subscription to changes in the network namespace in which it was created. Close it after
    use. `default_routes`: changes of default routes arrive too, as changes of no device."""

    def __init__(self, *, default_routes: bool = False) -> None:
        groups = (_LINK_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP)
        self._subscription = (
            Subscription((*groups, _IPV4_ROUTE_GROUP, _IPV6_ROUTE_GROUP), _OTHER_ROUTES)
            if default_routes
            else Subscription(groups)
        )

    def close(self) -> None:
        """End the subscription. May be called repeatedly."""
        self._subscription.close()

    async def next(self) -> LinkChanges:
        """Wait for changes. Return all that have arrived."""
        return changes_in(await self._subscription.next())

    def fileno(self) -> int:
        """Return the descriptor, which is readable while there are changes."""
        return self._subscription.fileno()

    def received(self) -> LinkChanges:
        """Return all changes that have arrived, without waiting."""
        return changes_in(self._subscription.received())


def changes_in(received: Events) -> LinkChanges:
    """Return the changes that these events report."""
    devices, addresses, moved = set(), set(), set()
    for kind, body in received.events:
        if kind in (_NEW_LINK, _DELETE_LINK):
            fields = dict(attributes(body, _LINK.size))
            name = fields.get(_LINK_NAME, b"").rstrip(b"\0").decode(errors="replace")
            devices.add(name)
            if fields.get(_LINK_EVENT) in _MOVED:
                moved.add(name)
        elif kind not in (_NEW_ROUTE, _DELETE_ROUTE):
            fields = dict(attributes(body, _ADDRESS.size))
            # On a point-to-point link the other attribute is the address of the other end.
            if packed := fields.get(_OWN_ADDRESS) or fields.get(_OTHER_END):
                addresses.add(str(ip_address(packed)))
    return LinkChanges(frozenset(devices), frozenset(addresses), received.lost, frozenset(moved))
