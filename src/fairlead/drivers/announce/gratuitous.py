"""Announce owned addresses by gratuitous ARP and unsolicited neighbor advertisements, so that
routers and switches learn at once where an address is.

In: addresses, each with the interface on which this host owns it. Out: frames, at the times of
`schedule`. The responder must answer for an address before it is announced. Follows RFC 5227, 2.3
and 3, and RFC 4861, 7.2.6."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from fairlead.drivers.announce.schedule import Schedule
from fairlead.errors import FairleadError
from fairlead.net import arp, ndp
from fairlead.net.address import is_ipv6
from fairlead.net.packet_socket import PacketSocket

log = structlog.get_logger()


class Gratuitous:
    """The announcements of one host. `run` sends them; `announce` and `withdraw` may be called at
    any time in the same event loop. Call `close` last. `repeat`: returns whether addresses are
    announced again each minute now."""

    def __init__(self, repeat: Callable[[], bool] = lambda: True) -> None:
        self._schedule = Schedule()
        self._repeat = repeat
        self._interfaces: dict[str, str] = {}
        self._sockets: dict[str, PacketSocket] = {}
        self._failed: dict[str, str] = {}
        """The error of the last attempt to send, by interface."""
        self._changed = asyncio.Event()

    def announce(self, address: str, interface: str) -> None:
        """Announce the address on this interface now, and repeatedly until it is withdrawn. A
        repeated call announces it again, from the beginning of the sequence."""
        self._interfaces[address] = interface
        self._schedule.start(address, time.monotonic())
        self._changed.set()

    def repeat(self, address: str) -> None:
        """Announce the address once more now, without a change of the sequence."""
        if (interface := self._interfaces.get(address)) is not None:
            self._send(address, interface)

    def withdraw(self, address: str) -> None:
        """Do not announce the address any more. Nothing is sent: its next owner announces it."""
        self._interfaces.pop(address, None)
        self._schedule.stop(address)

    async def run(self) -> None:
        """Send announcements when they are due, until cancelled."""
        while True:
            self._changed.clear()
            for address in self._schedule.due(time.monotonic(), repeat=self._repeat()):
                self._send(address, self._interfaces[address])
            next_s = self._schedule.next_s()
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    None if next_s is None else max(0.0, next_s - time.monotonic())
                ):
                    await self._changed.wait()

    def close(self) -> None:
        """Close the sockets."""
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    def _send(self, address: str, interface: str) -> None:
        """Send the announcement. An error is logged once for each interface: the next repetition
        tries again, also if the interface was recreated meanwhile."""
        try:
            if interface not in self._sockets:
                self._sockets[interface] = PacketSocket(interface)
            opened = self._sockets[interface]
            for frame in (
                (ndp.announcement(opened.mac, address),)
                if is_ipv6(address)
                else arp.announcement(opened.mac, address)
            ):
                opened.send(frame)
            self._failed.pop(interface, None)
        except FairleadError as error:
            if self._failed.get(interface) != str(error):
                log.warning(
                    "an address is not announced",
                    address=address,
                    interface=interface,
                    error=str(error),
                )
            self._failed[interface] = str(error)
            if (broken := self._sockets.pop(interface, None)) is not None:
                broken.close()
