"""One interface of the announcing process: its sockets, its members, its MAC address.

In: frames to send. Out: answers and withdrawals of members. A socket belongs to the interface's
index, so a station ends with its interface; errors of a link that is down are ignored, because the
members are told from its state."""

import socket
from collections.abc import Iterator
from contextlib import suppress

from fairlead.drivers.l2.liveness import Liveness
from fairlead.drivers.l2.records import (
    ETHERTYPE,
    Hello,
    Withdrawal,
    hello_request,
    parse_hello,
    parse_withdrawal,
    withdrawal,
)
from fairlead.errors import Refused
from fairlead.net import arp, ndp

_MAX_FRAMES = 4096
"""The number of answers that are read at once at most."""
_RECEIVE_BYTES = 1 << 20
_SO_RCVBUFFORCE = 33
_CONTROL = 7
"""TC_PRIO_CONTROL: the frames are sent before those of a queue that is full."""
_LONGEST = 2048


class Station:
    """An interface. `mac`: empty for a device that has none, on which nothing can be announced."""

    def __init__(
        self, index: int, name: str, mac: bytes, group: bytes, liveness: Liveness, *, usable: bool
    ) -> None:
        self.index = index
        self.name = name
        self.mac = mac
        self.usable = usable
        self.liveness = liveness
        self.announcements = 0
        self._group = group
        self._hello = _socket(name, ETHERTYPE)
        self._out = _socket(name, 0)

    def close(self) -> None:
        """Close the sockets."""
        self._hello.close()
        self._out.close()

    def fileno(self) -> int:
        """Return the descriptor of the socket for answers."""
        return self._hello.fileno()

    def ask(self, number: int, mac: bytes = arp.BROADCAST) -> None:
        """Send a hello request to one member, or to all."""
        self._send(self._hello, hello_request(self.mac, self._group, number, to=mac))

    def answers(self) -> Iterator[Hello | Withdrawal]:
        """Yield the answers and the withdrawals that have arrived."""
        for _ in range(_MAX_FRAMES):
            try:
                frame = self._hello.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:  # the link went down
                continue
            if (hello := parse_hello(frame, self._group)) is not None:
                yield hello
            elif (withdrawn := parse_withdrawal(frame, self._group)) is not None:
                yield withdrawn

    def announce(self, address: str) -> None:
        """Announce the address with the MAC address of this interface."""
        if ":" in address:
            frames = [ndp.announcement(self.mac, address)]
        else:
            frames = [
                arp.announcement_request(self.mac, address),
                arp.announcement_reply(self.mac, address),
            ]
        for each in frames:
            self._send(self._out, each)
        self.announcements += len(frames)

    def withdraw(self, address: str) -> None:
        """Tell all members that this host does not answer for the address any more."""
        self._send(self._hello, withdrawal(self.mac, self._group, address))

    def probe(self, address: str) -> None:
        """Ask whether any station has the address, and which member owns it."""
        make = ndp.probe if ":" in address else arp.probe
        self._send(self._out, make(self.mac, address))
        asked = hello_request(self.mac, self._group, self.liveness.round, owner_of=address)
        self._send(self._hello, asked)

    def _send(self, sender: socket.socket, frame: bytes) -> None:
        if len(self.mac) == len(arp.BROADCAST):
            with suppress(OSError):  # the link is down, or its queue is full
                sender.send(frame)


class Unusable(Refused):
    """Layer 2 announcement does not work on this host, for a reason that concerns nothing else."""


def check_rights() -> None:
    """Raise Unusable if this process may not send and receive frames."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0).close()
    except PermissionError as error:
        raise Unusable(
            f"opening a packet socket failed: {error.strerror}",
            fix="run as root with CAP_NET_RAW, which layer 2 announcement needs",
        ) from error


def _socket(name: str, protocol: int) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _CONTROL)
        with suppress(PermissionError):
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        made.bind((name, protocol))
    except BaseException:
        made.close()
        raise
    return made
