"""Send the probes of routes, and receive what comes back.

In: the sessions, and the addresses that each peer gets. Out: the results of `route_checks`. One
socket for each interface with a BGP neighbor; a filter in the kernel drops every frame that is
not about a probe before it is copied. Nothing outside of this process is changed, so nothing stays
when it is killed. A failure is a reason of unknown results, and stops nothing else."""

import asyncio
import ctypes
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from fairlead.drivers.bgp.peers import Peer
from fairlead.drivers.bgp.route_checks import PROBLEMS, RouteChecks, Target
from fairlead.drivers.bgp.route_paths import Path, path_of
from fairlead.drivers.bgp.sessions import Tracked
from fairlead.drivers.bgp.watch import stamp
from fairlead.errors import FairleadError
from fairlead.net import route_probe
from fairlead.role_state import AnnouncedAddress, RouteCheck

LOOK_S = 0.5
"""The interval at which changes of the sessions and of the announced addresses are noticed."""
PATHS_S = 5.0
"""The interval at which the paths to the neighbors are read again."""
PER_LOOK = 64
"""The maximum number of frames that are read, and of answers that are sent, in each interval."""
_ETH_P_ALL, _SO_ATTACH_FILTER, _IGNORE_OUTGOING, _SOL_PACKET = 3, 26, 23, 263
_STEP_BYTES, _LONGEST = 8, 2048


class RouteProber:
    """The probes of one host.

    `sessions`: returns the sessions by peer. `addresses`: returns the announced addresses with the
    peers that get them; the same object as long as they are the same. `changed`: called when the
    results have changed, with the addresses about which Findings have changed."""

    def __init__(
        self,
        sessions: Callable[[], Mapping[str, Tracked]],
        addresses: Callable[[], tuple[AnnouncedAddress, ...]],
        changed: Callable[[frozenset[str]], None],
    ) -> None:
        self._sessions = sessions
        self._addresses = addresses
        self._changed = changed
        self.checks = RouteChecks()
        self.results: tuple[RouteCheck, ...] = ()
        """The routes that are not known to be installed, and the peers that are not checked."""
        self._paths: dict[str, Path] = {}
        self._unchecked: list[RouteCheck] = []
        self._sockets: dict[str, socket.socket] = {}
        self._flying: dict[bytes, tuple[Target, str]] = {}
        """The probes on their way by their mark, with their source address."""
        self._known: tuple[object, object] = ((), ())
        self._announced: frozenset[str] = frozenset()
        self._read_paths_s = 0.0
        self._allowance = PER_LOOK
        """The number of frames that may be read until the next look."""
        self._paused: set[str] = set()
        """The interfaces on which more have arrived."""

    async def run(self) -> None:
        """Check routes until cancelled."""
        try:
            while True:
                wait_s = LOOK_S
                try:
                    await self._look()
                    wait_s = min(LOOK_S, self.checks.wait_s(_now_s()))
                except (FairleadError, OSError) as error:
                    self._close()
                    self._unchecked = [
                        RouteCheck(name, "", "unchecked", "", f"probing failed: {error}")
                        for name in sorted(self._sessions())
                    ]
                    self.checks.want((), _now_s())
                    wait_s = PATHS_S
                self._publish()
                await asyncio.sleep(wait_s)
        finally:
            self._close()
            self._unchecked = []
            self.checks.want((), _now_s())
            self._publish()

    async def _look(self) -> None:
        now_s = _now_s()
        sessions = {
            name: (one.peer, one.neighbor)
            for name, one in sorted(self._sessions().items())
            if one.established
        }
        addresses = self._addresses()
        if self._known != (sessions, addresses) or now_s >= self._read_paths_s:
            self._known = (sessions, addresses)
            self._announced = frozenset(each.address for each in addresses)
            found = await asyncio.to_thread(_paths, sessions, self._announced)
            self._read_paths_s = _now_s() + PATHS_S
            self._paths = {name: each for name, each in found.items() if isinstance(each, Path)}
            self._unchecked = list(_unchecked(found, addresses))
            self._follow_interfaces()
            wanted = (
                Target(peer, each.address)
                for each in addresses
                for peer in each.peers
                if self._source(peer, each.address)
            )
            self.checks.want(wanted, now_s)
        for name in self._paused:
            self._listen(name)
        self._allowance, self._paused = PER_LOOK, set()
        send, over = self.checks.due(_now_s())
        for target in send:
            self._send(target)
        if over:
            gone = set(over)
            self._flying = {
                mark: each for mark, each in self._flying.items() if each[0] not in gone
            }
            self.checks.settle(over, _now_s(), stamp())

    def _source(self, peer: str, address: str) -> str:
        path = self._paths.get(peer)
        return path.source_for(address) if path is not None else ""

    def _send(self, target: Target) -> None:
        path, source = self._paths[target.peer], self._source(*target)
        probe = route_probe.probe(path.mac, path.router, source, target.address)
        self._flying[probe.mark] = target, source
        with suppress(OSError):  # the link is down, or its queue is full
            self._sockets[path.interface].send(probe.frame)

    def _listen(self, interface: str) -> None:
        if interface in self._sockets:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._sockets[interface], self._receive, interface)

    def _receive(self, interface: str) -> None:
        """Read what has arrived on the interface. Too many frames wait for the next look."""
        receiver = self._sockets[interface]
        while self._allowance > 0:
            self._allowance -= 1
            try:
                frame = receiver.recv(_LONGEST)
            except OSError:  # nothing more, or the link went down
                return
            if (heard := route_probe.parse(frame)) is not None:
                self._take(interface, heard)
        asyncio.get_running_loop().remove_reader(receiver)
        self._paused.add(interface)

    def _take(self, interface: str, heard: route_probe.Heard) -> None:
        known = self._flying.get(heard.mark)
        if known is not None and known == (Target(known[0].peer, heard.destination), heard.source):
            path = self._paths.get(known[0].peer)
            if heard.kind == "refused" and not (path and path.is_from_router(heard)):
                heard = heard._replace(kind="other")
            self.checks.hear(known[0], heard)
        elif heard.kind == "probe" and heard.destination in self._announced:
            for name, path in self._paths.items():
                if path.interface == interface and (source := self._source(name, heard.source)):
                    with suppress(OSError):
                        frame = route_probe.answer(path.mac, source, heard)
                        self._sockets[interface].send(frame)
                    return

    def _follow_interfaces(self) -> None:
        wanted = {each.interface for each in self._paths.values()}
        for name in self._sockets.keys() - wanted:
            self._drop(name)
        for name in sorted(wanted - self._sockets.keys()):
            self._sockets[name] = _socket(name)
            self._listen(name)

    def _drop(self, interface: str) -> None:
        dropped = self._sockets.pop(interface)
        asyncio.get_running_loop().remove_reader(dropped)
        dropped.close()

    def _publish(self) -> None:
        results = (*self.checks.results, *self._unchecked)
        if results != self.results:
            before, self.results = self.results, results
            differ = {each for each in {*before} ^ {*results} if each.state in PROBLEMS}
            self._changed(frozenset(each.address for each in differ))

    def _close(self) -> None:
        for name in list(self._sockets):
            self._drop(name)
        self._paths, self._flying, self._known = {}, {}, ((), ())


def _paths(
    sessions: Mapping[str, tuple[Peer, str]], announced: frozenset[str]
) -> dict[str, Path | str]:
    return {name: path_of(peer, neighbor, announced) for name, (peer, neighbor) in sessions.items()}


def _unchecked(
    found: Mapping[str, Path | str], addresses: Sequence[AnnouncedAddress]
) -> Iterator[RouteCheck]:
    """Yield an entry for each peer, or family of a peer, whose routes cannot be checked."""
    for name, path in found.items():
        if isinstance(path, str):
            yield RouteCheck(name, "", "unchecked", "", path)
            continue
        families = {
            "IPv6" if ":" in each.address else "IPv4"
            for each in addresses
            if name in each.peers and not path.source_for(each.address)
        }
        for family in sorted(families):
            reason = f"{path.interface} has no {family} address to send probes from"
            yield RouteCheck(name, "", "unchecked", "", reason)


def _socket(interface: str) -> socket.socket:
    """Return a socket for the frames about probes that arrive on the interface."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        made.setblocking(False)
        program = ctypes.create_string_buffer(text := route_probe.filter_program(), len(text))
        steps = struct.pack("HP", len(text) // _STEP_BYTES, ctypes.addressof(program))
        made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, steps)
        made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        # All protocols: frames are seen before the data plane, at the tc hook, handles them.
        made.bind((interface, _ETH_P_ALL))
    except BaseException:
        made.close()
        raise
    return made


def _now_s() -> float:
    return asyncio.get_running_loop().time()
