"""The state of BGP sessions, and what it means for a Service. Pure.

In: what BIRD shows about its protocols and BFD sessions; the peers; the time, as text. Out:
`BgpSession` values, the outcome of each Service, remedies for errors. Invariants: values change
only when something has happened: BIRD alternates between states while it tries to connect, and
that is one state here. The reason of a failure is the last message of the neighbor, until the
session is established again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fairlead.drivers.bgp.peers import Peer, is_session_of, symbol
from fairlead.drivers.bgp.spec import Contributions, Route, peers_wanted
from fairlead.model import Finding, Outcome
from fairlead.net.bird_replies import BfdSession, Protocol
from fairlead.role_state import BgpSession, BgpSessionState

SESSION_DOWN = "BgpSessionDown"
"""The reason of Events about sessions that are not established."""
_NO_NEXT_HOP = ("::", "0.0.0.0")
NO_SOCKET = "No listening socket"
"""BIRD's error if another process has the port. BIRD does not try again by itself."""
_REMEDIES = (
    (
        "Connection collision",
        "another BGP daemon of this host has a session with this neighbor from the same address: "
        "set announce.bgp.speaker to routes, so that this daemon announces the addresses, or set "
        "another sourceAddress",
    ),
    (
        "Maximum number of prefixes",
        "raise the limit of prefixes at the neighbor, or announce shorter prefixes "
        "(aggregationLength)",
    ),
    ("Bad peer AS", "compare asn and announce.bgp.asn with the configuration of the neighbor"),
    ("Bad remote AS", "compare asn and announce.bgp.asn with the configuration of the neighbor"),
    ("BFD session down", "check the link to the neighbor, and that BFD is enabled there"),
    ("Hold timer expired", "check the link to the neighbor"),
    (
        "Cannot assign requested address",
        "no interface of this host has the sourceAddress of the peer: add it, or correct the peer",
    ),
    ("Kernel MD5", "the kernel of this host needs CONFIG_TCP_MD5SIG"),
    (
        "Connection refused",
        "check that the neighbor runs BGP, and has this host as a neighbor",
    ),
    (
        NO_SOCKET,
        "stop the process that has the port, or set announce.bgp.localPort to a free port such as "
        "1179",
    ),
)
_NO_ANSWER = (
    "check that the neighbor is reachable, that no firewall drops the connections, and that the "
    "neighbor has this host as a neighbor with the same AS numbers and the same password"
)
"""The remedy without any error: the kernel of the neighbor drops segments with another password
(RFC 2385), as a firewall drops packets."""


class Seen(NamedTuple):
    """What BIRD shows about the session of one peer. `error`: empty if there is none. `carries`:
    the channels that exchange routes and have a next hop. `without_next_hop`: the channels in which
    this host has no address to use as the next hop. `neighbor`: its address, with the interface if
    it is link-local."""

    state: BgpSessionState
    error: str = ""
    exported: int = 0
    bfd: str = ""
    carries: frozenset[str] = frozenset()
    without_next_hop: frozenset[str] = frozenset()
    since: str = ""
    neighbor: str = ""


def seen_of(peer: Peer, protocols: Sequence[Protocol], bfd: Sequence[BfdSession]) -> Seen:
    """Return the state of the peer's session."""
    sessions = [each for each in protocols if is_session_of(peer, each.name)]
    if not sessions:  # an unnumbered peer before its neighbor connects has no session yet
        parent = next((each for each in protocols if each.name == symbol(peer)), None)
        return Seen("connecting", parent.last_error if parent else "")
    session = next((each for each in sessions if each.established), sessions[0])
    state: BgpSessionState = "connecting"
    if session.established:
        state = "established"
    elif session.last_error:
        state = "down"
    elif session.state == "down":
        state = "disabled"
    up = [each for each in session.channels if each.state == "UP"] if session.established else []
    lost = {each.name for each in up if each.next_hop in _NO_NEXT_HOP}
    watched = [each for each in bfd if each.address == session.neighbor]
    return Seen(
        state,
        session.last_error,
        sum(each.exported for each in up if each.name not in lost),
        _bfd_of(peer, watched),
        frozenset(each.name for each in up) - lost,
        frozenset(lost),
        session.since,
        session.neighbor,
    )


def _bfd_of(peer: Peer, sessions: Iterable[BfdSession]) -> str:
    if peer.spec.bfd is None:
        return ""
    return "up" if any(each.state == "Up" for each in sessions) else "down"


class Tracked(msgspec.Struct):
    """One session over time. `changes`: how often it was established or lost. `young_until_s`:
    until then, a session that has not been established yet is not a problem, nor the BFD session
    that starts with it."""

    peer: Peer
    session: BgpSession
    young_until_s: float = 0.0
    changes: int = 0
    cause: str = ""
    neighbor: str = ""
    carries: frozenset[str] = frozenset()
    without_next_hop: frozenset[str] = frozenset()
    agreed: frozenset[str] | None = None
    """The channels that the neighbor accepted when the session was last established. None: it was
    not established yet."""

    @property
    def established(self) -> bool:
        return self.session.state == "established"

    def would_carry(self, channels: Collection[str]) -> bool:
        """Whether the session carries routes of one of these channels when it works: as configured
        until it is established for the first time, and then as the neighbor accepted it."""
        families = self.peer.families if self.agreed is None else self.agreed
        return not frozenset(channels).isdisjoint(families)

    def observe(
        self, seen: Seen, now: str, bfd_until_s: float = 0.0, *, late: bool = False
    ) -> bool:
        """Take over what BIRD shows. `now`: the time of a change. `bfd_until_s`: until when the BFD
        session of a session that is established now may come up. `late`: the session should have
        been established by now. Return whether anything changed that matters to Services."""
        before = (self.session.state, self.cause, self.carries, self.session.bfd)
        established = seen.state == "established"
        if established != self.established:
            self.changes += 1
        if established and (seen.bfd != "down" or not self.established):
            self.young_until_s = bfd_until_s if seen.bfd == "down" else 0.0
        self.cause = "" if established else _cause(self.cause, seen.error)
        state, error = seen.state, self.cause
        if state == "connecting" and late and not error:
            error = f"{no_answer(self.peer)}; {_NO_ANSWER}"
        if state == "connecting" and error:
            state = "down"
        self.carries, self.without_next_hop = seen.carries, seen.without_next_hop
        self.neighbor = seen.neighbor
        if established:
            self.agreed = (seen.carries | seen.without_next_hop) or None
        self.session = msgspec.structs.replace(
            self.session,
            state=state,
            since=self.session.since if state == self.session.state else now,
            last_error=error or self.session.last_error,
            announced=seen.exported,
            bfd="up" if seen.bfd == "up" else "down" if seen.bfd else "",
        )
        return before != (state, self.cause, self.carries, self.session.bfd)


def _cause(known: str, error: str) -> str:
    """Return the reason of a failure. A message of the neighbor explains more than the failed
    attempts to connect that follow it."""
    return known if known and (not error or error.startswith("Socket:")) else error


def tracked(peer: Peer, young_until_s: float, now: str) -> Tracked:
    """Return a session that was just configured."""
    return Tracked(peer, BgpSession(peer.name, peer.target, "connecting", now), young_until_s)


def problem_of(one: Tracked, port_holder: str = "") -> Finding:
    """Return the Finding about a session that is not established. `port_holder`: the process that
    has the port of this host."""
    spec = one.peer.spec
    what = f"BGP session with {one.peer.name} ({one.peer.target}, AS {spec.asn})"
    if one.session.state == "disabled":
        return _finding(one, f"{what} is disabled in BIRD", "enable it with birdc")
    error = one.cause or no_answer(one.peer)
    if NO_SOCKET in error and port_holder:
        error = f"{error}: {port_holder} has the port"
    remedy = next((fix for text, fix in _REMEDIES if text in error), "")
    return _finding(
        one, f"{what} is down: {error}", remedy or (_NO_ANSWER if not one.cause else "")
    )


def no_answer(peer: Peer) -> str:
    """Return the reason of a failure without any error."""
    return f"no answer from {peer.target} on TCP port {peer.spec.port}"


def _finding(one: Tracked, message: str, remedy: str) -> Finding:
    return Finding(SESSION_DOWN, message, "warning", f"BGPPeer {one.peer.name}", remedy=remedy)


def partial_problems(one: Tracked, channels: Collection[str], now_s: float) -> list[Finding]:
    """Return what does not work in a session that is established, for routes of these channels."""
    found = [
        _finding(
            one,
            f"BGP session with {one.peer.name} carries no {family_of(channel)} routes: this host "
            f"has no {family_of(channel)} address on the interface to the neighbor",
            "add an address, or set families of the peer to the other family",
        )
        for channel in sorted(one.without_next_hop.intersection(channels))
    ]
    if one.session.bfd == "down" and one.young_until_s <= now_s:
        found.append(
            _finding(
                one,
                f"BGP session with {one.peer.name} is up, but its BFD session is down",
                "enable BFD at the neighbor, and give BIRD the capability NET_RAW",
            )
        )
    return found


def family_of(channel: str) -> str:
    """Return the family of a channel of BIRD."""
    return "IPv6" if channel == "ipv6" else "IPv4"


def receivers(route: Route, sessions: Mapping[str, Tracked]) -> tuple[str, ...]:
    """Return the names of the peers that get the route now, sorted."""
    channel = "ipv6" if ":" in route.prefix else "ipv4"
    return tuple(
        name
        for name, one in sorted(sessions.items())
        if one.established
        and channel in one.carries
        and (route.peers is None or name in route.peers)
    )


class Wants(NamedTuple):
    """What the outcome of a Service depends on: the peers that get its routes (None: every peer),
    and the channels of its families."""

    peers: frozenset[str] | None
    channels: frozenset[str]


def wants_of(contributions: Contributions) -> Wants:
    """Return what the Service with these contributions needs."""
    channels = frozenset("ipv6" if ":" in each.prefix else "ipv4" for each in contributions)
    return Wants(peers_wanted(contributions), channels)


def outcome_of(
    wants: Wants,
    sessions: Mapping[str, Tracked],
    refused: Sequence[Finding],
    *,
    now_s: float,
    port_holder: str = "",
) -> Outcome:
    """Return the outcome of a Service whose routes are in place. It is done if each of its families
    is announced to one peer at least. Sessions that would not carry its families do not matter."""
    wanted = [
        one for name, one in sorted(sessions.items()) if wants.peers is None or name in wants.peers
    ]
    if not wanted:
        return _without_peer(wants, refused)
    missing = {
        channel
        for channel in wants.channels
        if not any(channel in one.carries for one in wanted if one.established)
    }
    useful = [one for one in wanted if one.would_carry(wants.channels)]
    down = [one for one in useful if not one.established]
    notes = [problem_of(one, port_holder) for one in down if one.young_until_s <= now_s]
    for one in useful:
        if one.established:
            notes += partial_problems(one, wants.channels, now_s)
    if not missing:
        return Outcome("done", notes=tuple(notes))
    young = [one for one in down if one.young_until_s > now_s and one.would_carry(missing)]
    in_part = missing != wants.channels
    if young:
        names = ", ".join(one.peer.name for one in young)
        return Outcome(
            "waiting",
            f"the BGP session with {names} is being established",
            again_s=max(one.young_until_s - now_s for one in young),
            in_part=in_part,
        )
    reasons = [str(each) for each in notes] or [
        f"no session carries {' and '.join(sorted(map(family_of, missing)))} routes; enable the "
        "family at the neighbor and in families of the peer"
    ]
    families = f"the {' and '.join(sorted(map(family_of, missing)))} address" if in_part else "it"
    return Outcome(
        "unavailable",
        f"no BGP peer gets a route to {families}: {'; '.join(reasons)}",
        SESSION_DOWN,
        in_part=in_part,
    )


def _without_peer(wants: Wants, refused: Sequence[Finding]) -> Outcome:
    """Return the outcome of a Service whose routes no configured peer gets."""
    if refused:
        texts = "; ".join(map(str, refused))
        return Outcome("refused", f"no BGP peer gets a route to it: {texts}", refused[0].code)
    if wants.peers is None:
        return Outcome(
            "refused",
            "no BGP peer is configured for this host; create a BGPPeer, or set announce.bgp.peers",
            SESSION_DOWN,
        )
    names = ", ".join(sorted(wants.peers)) or "no peer"
    return Outcome(
        "refused",
        f"this host has none of the BGP peers that it is announced to ({names}); correct the "
        "annotation fairlead.io/bgp-peers, or peers of the pool",
        SESSION_DOWN,
    )
