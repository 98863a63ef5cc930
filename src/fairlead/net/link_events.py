"""Subscribe to changes of network devices, their tc filters, and addresses.

In: nothing. Out: the names of changed devices, the devices on which a qdisc or filter changed, and
changed addresses. The subscriber decides which
are relevant. Follows rtnetlink(7)."""

import struct
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.net.netlink import attributes
from fairlead.net.netlink_events import Subscription
from fairlead.net.tc import changed_hook

_LINK_GROUP, _TC_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP = 1, 4, 5, 9
_NEW_LINK, _DELETE_LINK = 16, 17
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=4BI")
_LINK_NAME, _OTHER_END, _OWN_ADDRESS = 3, 1, 2


class LinkChanges(NamedTuple):
    """Names of devices, and addresses, that were added, changed or removed. `lost`: the kernel
    dropped further events. `hooks`: the indexes of devices on which a qdisc or a filter changed."""

    devices: frozenset[str]
    addresses: frozenset[str]
    lost: bool
    hooks: frozenset[int] = frozenset()


class LinkEvents:
    """A subscription to changes in the network namespace in which it was created. Close it after
    use."""

    def __init__(self) -> None:
        self._subscription = Subscription(
            (_LINK_GROUP, _TC_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP)
        )

    def close(self) -> None:
        """End the subscription. May be called repeatedly."""
        self._subscription.close()

    async def next(self) -> LinkChanges:
        """Wait for changes. Return all that have arrived."""
        received = await self._subscription.next()
        devices, addresses, hooks = set(), set(), set()
        for kind, body in received.events:
            if kind in (_NEW_LINK, _DELETE_LINK):
                name = dict(attributes(body, _LINK.size)).get(_LINK_NAME, b"")
                devices.add(name.rstrip(b"\0").decode(errors="replace"))
            elif (index := changed_hook(kind, body)) is not None:
                hooks.add(index)
            else:
                fields = dict(attributes(body, _ADDRESS.size))
                # On a point-to-point link the other attribute is the address of the other end.
                if packed := fields.get(_OWN_ADDRESS) or fields.get(_OTHER_END):
                    addresses.add(str(ip_address(packed)))
        return LinkChanges(
            frozenset(devices), frozenset(addresses), received.lost, frozenset(hooks)
        )
