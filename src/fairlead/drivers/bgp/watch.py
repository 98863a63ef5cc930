"""The watch over the sessions of BIRD.

In: the accepted peers; what BIRD shows, about once a second. Out: the tracked session of each peer,
and which of them have changed. Invariant: a session that changes neither its state nor its reason
counts as unchanged, so Services are not reconciled while BIRD tries to connect."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from fairlead.drivers.bgp.peers import Peer
from fairlead.drivers.bgp.sessions import NO_SOCKET, Seen, Tracked, seen_of, tracked
from fairlead.net.bird import Bird
from fairlead.net.port_holder import holder_of
from fairlead.role_state import timestamp

log = structlog.get_logger()

CONNECT_S = 10.0
"""How long a new session may take before it is reported as a problem."""


class SessionWatch:
    """The sessions with the accepted peers. `port`: where BIRD accepts sessions."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sessions: dict[str, Tracked] = {}
        self.port_holder = ""
        """The process that has BIRD's port, if BIRD could not open it."""
        self._young: set[str] = set()
        """The peers whose sessions, or BFD sessions, are not established and not yet a problem."""

    def track(self, peers: Iterable[Peer]) -> None:
        """Track the sessions of exactly these peers."""
        known, young_until_s, now = self.sessions, _now_s() + CONNECT_S, stamp()
        found = {}
        for peer in peers:
            one = known.get(peer.name)
            same = one is not None and one.peer == peer
            found[peer.name] = one if one and same else tracked(peer, young_until_s, now)
        self.sessions = found

    def be_patient(self) -> None:
        """Give all sessions the time of new ones, because BIRD has just been started."""
        for one in self.sessions.values():
            one.young_until_s = _now_s() + CONNECT_S

    async def observe(self, client: Bird) -> bool:
        """Read the sessions. Return whether any changed. Raise Unavailable."""
        if not self.sessions:
            return False
        protocols = await client.protocols()
        with_bfd = any(one.peer.spec.bfd for one in self.sessions.values())
        bfd = await client.bfd_sessions() if with_bfd else ()
        changed = False
        for name, one in self.sessions.items():
            was, seen, now_s = one.established, seen_of(one.peer, protocols, bfd), _now_s()
            late = one.young_until_s <= now_s
            changed |= one.observe(seen, _time_of(seen), now_s + CONNECT_S, late=late)
            if was != one.established:
                log.info(
                    "BGP session changed",
                    peer=name,
                    state=one.session.state,
                    reason=one.session.last_error,
                )
        young = {name for name, one in self.sessions.items() if one.young_until_s > _now_s()}
        changed |= bool(self._young - young)
        self._young = young
        return changed

    async def find_port_holder(self) -> bool:
        """Find the process that has BIRD's port. Return whether the port is free again, so that
        BIRD has to be configured to try again."""
        self.port_holder = ""
        if any(NO_SOCKET in one.cause for one in self.sessions.values()):
            self.port_holder = await asyncio.to_thread(holder_of, self._port)
            return not self.port_holder
        return False


def stamp() -> str:
    """Return the present time as RFC 3339 text."""
    return timestamp(datetime.now(UTC))


def _time_of(seen: Seen) -> str:
    """Return since when the session has its state: as BIRD shows it, if it is established."""
    if seen.state == "established":
        with suppress(ValueError):
            return timestamp(datetime.fromisoformat(seen.since))
    return stamp()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
