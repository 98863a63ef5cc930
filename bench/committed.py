"""The time at which the kernel has applied an event: nftables notifies listeners of each
transaction once it is in force.

In: a network namespace, and IPv4 addresses that are new to its service proxy. Out: how long each
took. The listener searches notifications for the four bytes of an address, so it does not matter
whether the address is in an element of a map or in a rule of its own. An address that a later
address of the same Service has replaced counts as applied when the later one is, because nothing
depends on it then. Follows linux/netfilter/nfnetlink.h (NFNLGRP_NFTABLES).
"""

import asyncio
import re
import socket
import time
from collections import deque
from types import TracebackType
from typing import Self

from fairlead.errors import Unavailable
from fairlead.lab import namespace
from fairlead.net.netlink import SOL_NETLINK

FIRST_ADDRESS = "10.200.0.0"
_ADDRESS = re.compile(rb"(?=(\x0a[\xc8-\xf9]..))", re.DOTALL)
"""10.200.0.0 to 10.249.255.255, which no object has before the measurement."""
_NETLINK_NETFILTER, _GROUP = 12, 7
_ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 1, 33
_BUFFER, _DATAGRAM = 128 << 20, 1 << 16
_TICK_S = 0.01


class Committed:
    """A listener in a namespace, used as a context manager within a running event loop."""

    def __init__(self, inside: str) -> None:
        self._socket = namespace.make_socket(
            inside, socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER
        )
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        self._socket.bind((0, 0))  # the kernel delivers nothing to a socket without a port
        self._socket.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)
        self._socket.setblocking(False)
        self._services: dict[bytes, str] = {}
        """The Service of each expected address."""
        self._expected: dict[str, deque[tuple[bytes, float]]] = {}
        """The expected addresses of each Service in order, each with the time of its event."""
        self._lost = False
        self.took_ms: list[float] = []

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def expect(self, service: str, address: str) -> None:
        """Record that an event with this address is sent now."""
        packed = socket.inet_aton(address)
        self._services[packed] = service
        self._expected.setdefault(service, deque()).append((packed, time.monotonic()))

    async def all_applied(self, within_s: float) -> None:
        """Return once every expected address is in a rule. Raise Unavailable after `within_s`
        seconds, or if a notification was lost."""
        until_s = time.monotonic() + within_s
        while self._services:
            if self._lost or time.monotonic() > until_s:
                why = (
                    "a notification of the kernel was lost"
                    if self._lost
                    else f"not within {within_s:g} s"
                )
                raise Unavailable(f"{len(self._services)} events were not seen in nftables: {why}")
            await asyncio.sleep(_TICK_S)

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_DATAGRAM)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: the kernel has dropped notifications
                self._lost = True
                return
            now_s = time.monotonic()
            for found in _ADDRESS.finditer(data):
                if (service := self._services.get(found[1])) is not None:
                    self._applied(service, found[1], now_s)

    def _applied(self, service: str, address: bytes, now_s: float) -> None:
        applied = b""
        while applied != address:
            applied, since_s = self._expected[service].popleft()
            del self._services[applied]
            self.took_ms.append((now_s - since_s) * 1000)
