"""Word of network devices and addresses that come, change or go.

In: nothing. Out: their names. Which of them matter is for who listens. Follows rtnetlink(7).
"""

import struct
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.net.hearing import Hearing
from fairlead.net.netlink import attributes

_LINK_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP = 1, 5, 9
_NEW_LINK, _DELETE_LINK = 16, 17
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=4BI")
_LINK_NAME, _OTHER_END, _OWN_ADDRESS = 3, 1, 2


class LinkChanges(NamedTuple):
    """Names of devices, and addresses. `lost`: there were others, too many to be told."""

    devices: frozenset[str]
    addresses: frozenset[str]
    lost: bool


class LinkEvents:
    """What happens from now on, in the network namespace in which it was made. Close it."""

    def __init__(self) -> None:
        self._hearing = Hearing((_LINK_GROUP, _IPV4_ADDRESS_GROUP, _IPV6_ADDRESS_GROUP))

    def close(self) -> None:
        """Hear no more. May be repeated."""
        self._hearing.close()

    async def next(self) -> LinkChanges:
        """Wait until something has happened; all that has by then."""
        heard = await self._hearing.next()
        devices, addresses = set(), set()
        for kind, body in heard.events:
            if kind in (_NEW_LINK, _DELETE_LINK):
                name = dict(attributes(body, _LINK.size)).get(_LINK_NAME, b"")
                devices.add(name.rstrip(b"\0").decode(errors="replace"))
            else:
                said = dict(attributes(body, _ADDRESS.size))
                # Of a point-to-point link the other attribute is the other end's.
                if packed := said.get(_OWN_ADDRESS) or said.get(_OTHER_END):
                    addresses.add(str(ip_address(packed)))
        return LinkChanges(frozenset(devices), frozenset(addresses), heard.lost)
