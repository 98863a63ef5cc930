"""Which announced addresses the routers have routes for, as probes show it. Pure.

In: the addresses that each peer gets, what was heard about each probe, and the time, in seconds of
a monotonic clock. Out: the probes to send, and `RouteCheck` values. Invariants: a lost packet
changes nothing: a route counts as refused after two answers that say so, and as unknown
after three probes in a row without an answer. Without an answer it counts as missing only if the
router brings back the packets of other addresses. A router that said that it has no route and is
silent afterwards still counts as one without the route, because routers limit the rate of these
answers. Values change only when the judgement does."""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

import msgspec

from fairlead.model import Finding, Outcome
from fairlead.net.route_probe import Heard
from fairlead.role_state import AnnouncedAddress, RouteCheck

NOT_INSTALLED = "RouteNotInstalled"
"""The code of Findings about routes that a router does not have."""
REMEDY = (
    "check the import policy, the prefix list and the prefix limit for this host at the router, "
    "and whether it installs BGP routes"
)
FIRST_S = 2.0
"""How long after its announcement an address is probed first: routers take a moment."""
INTERVAL_S = 10.0
AGAIN_S = 1.0
"""The interval after an answer that is not confirmed yet."""
ANSWER_S = 1.0
"""How long answers to a probe are awaited."""
PER_S = 20
"""The maximum rate of probes of one host."""
REFUSALS = 2
MISSES = 3
MISSING_S = 60.0
"""How long packets of an address must stay away, while those of another address of the family come
back from the router, until its route counts as missing. An announcer that is restarted is away for
a shorter time."""
PROBLEMS = ("refused", "missing")
"""The states about which there are Findings."""
MAX_NAMED = 3
"""The maximum number of addresses that a Finding about a router names."""


class Target(NamedTuple):
    """An address, and a peer that gets its route."""

    peer: str
    address: str


State = Literal["new", "installed", "refused", "missing", "unknown"]
ROUTE_STATES = get_args(State)


class _Check(msgspec.Struct):
    """`number`: of its valid element in the queue. `heard`: about the probe that is on its way.
    `disagreed`: the number of probes in a row that contradict `state`; `like`: with this result.
    `away_s`: since when no packet came back; None: the last one did. `refusals`: the number of
    answers that there is no route, since a packet came back."""

    number: int
    state: State = "new"
    since: str = ""
    reason: str = ""
    heard: list[Heard] | None = None
    like: State = "new"
    disagreed: int = 0
    away_s: float | None = None
    refusals: int = 0


class _Due(NamedTuple):
    at_s: float
    number: int
    target: Target


class RouteChecks:
    """The checks of one host."""

    def __init__(self) -> None:
        self._checks: dict[Target, _Check] = {}
        self._queue: list[_Due] = []
        self._count = 0
        self._paced_until_s = 0.0
        self.results: tuple[RouteCheck, ...] = ()
        """The routes that are not known to be installed, sorted; without new ones."""

    def want(self, targets: Iterable[Target], now_s: float) -> None:
        """Check exactly these routes."""
        wanted = set(targets)
        for target in self._checks.keys() - wanted:
            del self._checks[target]
        for target in sorted(wanted - self._checks.keys()):
            self._checks[target] = _Check(0)
            self._push(target, now_s + FIRST_S)
        self._conclude()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return the number of routes by peer and state."""
        return Counter((target.peer, each.state) for target, each in self._checks.copy().items())

    def next_s(self) -> float | None:
        """Return when `due` has to be called next; None: not before `want`."""
        while self._queue and not self._is_valid(self._queue[0]):
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        first = self._queue[0]
        waiting = self._checks[first.target].heard is not None
        return first.at_s if waiting else max(first.at_s, self._paced_until_s)

    def wait_s(self, now_s: float) -> float:
        """Return the time until `due` has to be called next; without limit if there is none."""
        next_s = self.next_s()
        return inf if next_s is None else max(next_s - now_s, 0.0)

    def due(self, now_s: float) -> tuple[list[Target], list[Target]]:
        """Return the routes to probe now, and those whose time to answer is over. The caller sends
        a probe for each of the first ones, and calls `settle` for the others."""
        send: list[Target] = []
        over: list[Target] = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            target = heapq.heappop(self._queue).target
            check = self._checks[target]
            if check.heard is None:
                check.heard = []
                self._paced_until_s = max(self._paced_until_s, now_s - 1 / PER_S) + 1 / PER_S
                self._push(target, now_s + ANSWER_S)
                send.append(target)
            else:
                over.append(target)
                self._push(target, now_s + INTERVAL_S)
        return send, over

    def hear(self, target: Target, heard: Heard) -> None:
        """Keep what was heard about the probe that is on its way."""
        check = self._checks.get(target)
        if check is not None and check.heard is not None:
            check.heard.append(heard)

    def settle(self, targets: Collection[Target], now_s: float, now: str) -> bool:
        """Judge these routes. `now`: RFC 3339. Return whether a result has changed."""
        changed = False
        for target in targets:
            check = self._checks[target]
            state, reason = judge(check.heard or ())
            check.heard = None
            check.refusals = 0 if state == "installed" else check.refusals + (state == "refused")
            if state != "unknown":
                check.away_s = None
            elif check.away_s is None:
                check.away_s = now_s
            elif check.state in ("unknown", "missing"):
                state, reason = self._away(target, check, reason, now_s)
                changed |= state != check.state
                check.state, check.reason = state, reason
            if state == check.state or (check.state == "refused" and reason == NO_ANSWER):
                check.disagreed = 0
                continue
            check.disagreed = check.disagreed + 1 if state == check.like else 1
            check.like = state
            needed = {"installed": 1, "refused": REFUSALS}.get(state, MISSES)
            if max(check.disagreed, check.refusals if state == "refused" else 0) < needed:
                self._push(target, now_s + AGAIN_S)
                continue
            check.state, check.since, check.reason = state, now, reason
            check.disagreed = 0
            changed = True
        if changed:
            self._conclude()
        return changed

    def _away(self, target: Target, check: _Check, reason: str, now_s: float) -> tuple[State, str]:
        """Return what it means that packets stay away for longer."""
        others = (
            each
            for each, one in self._checks.items()
            if one.state == "installed"
            and each.peer == target.peer
            and (":" in each.address) == (":" in target.address)
        )
        if check.away_s is None or now_s < check.away_s + MISSING_S or not any(others):
            return "unknown", check.reason if check.state == "unknown" else reason
        if check.state == "missing":
            return check.state, check.reason
        return (
            "missing",
            f"packets to other addresses come back from it, but not to this one: {reason}",
        )

    def _conclude(self) -> None:
        self.results = tuple(
            RouteCheck(target.peer, target.address, each.state, each.since, each.reason)
            for target, each in sorted(self._checks.items())
            if each.state in ("refused", "missing", "unknown")
        )

    def _is_valid(self, due: _Due) -> bool:
        check = self._checks.get(due.target)
        return check is not None and check.number == due.number

    def _push(self, target: Target, at_s: float) -> None:
        self._count += 1
        self._checks[target].number = self._count
        heapq.heappush(self._queue, _Due(at_s, self._count, target))


NO_ANSWER = (
    "no answer: the router may discard the probe (a blackhole route, an access list, reverse path "
    "filtering) or forward it to another place, or it answers no ICMP"
)


def judge(heard: Iterable[Heard]) -> tuple[State, str]:
    """Return what the messages about one probe show, and why. A host that announces the address and
    got the probe outweighs everything else."""
    by_kind = {each.kind: each for each in heard}
    if "probe" in by_kind or "announced" in by_kind:
        return "installed", ""
    if (refused := by_kind.get("refused")) is not None:
        return "refused", f"{refused.by} answers: {refused.text}"
    if (other := by_kind.get("other")) is not None:
        return (
            "unknown",
            f"the packets come to {other.by} ({other.text}), and no announcer answers: if that is "
            "the next hop of another route, such as the default route, the router has no route to "
            "the announcers",
        )
    return "unknown", NO_ANSWER


def finding_of(check: RouteCheck, peer: str) -> Finding:
    """Return the Finding about an address whose route the router does not have. `peer`: the name
    and the address of the peer."""
    return Finding(
        NOT_INSTALLED,
        f"router {peer} {_has(check)} no route to {check.address}, although the route is announced "
        "to it: "
        f"{check.reason}, since {check.since}",
        "warning",
        f"BGPPeer {check.peer}",
        remedy=REMEDY,
    )


def findings_of(checks: Iterable[RouteCheck], names: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return one Finding for each router that does not have routes. `names`: the name and the
    address of each peer, by its name."""
    found: dict[str, list[RouteCheck]] = {}
    for each in checks:
        if each.state in PROBLEMS:
            found.setdefault(each.peer, []).append(each)
    return tuple(_of_router(each, names.get(peer, peer)) for peer, each in sorted(found.items()))


def _of_router(checks: list[RouteCheck], peer: str) -> Finding:
    first = min(checks, key=lambda each: (each.state != "refused", each.since))
    named = ", ".join(each.address for each in checks[:MAX_NAMED])
    more = f" and {len(checks) - MAX_NAMED} others" if len(checks) > MAX_NAMED else ""
    return Finding(
        NOT_INSTALLED,
        f"router {peer} {_has(first)} no route to {named}{more}, although the routes are announced "
        "to it: "
        f"{first.reason}, since {first.since}",
        "warning",
        f"BGPPeer {first.peer}",
        remedy=REMEDY,
    )


def _has(check: RouteCheck) -> str:
    return "has" if check.state == "refused" else "probably has"


def without_refused(
    addresses: Iterable[AnnouncedAddress], checks: Iterable[RouteCheck]
) -> tuple[AnnouncedAddress, ...]:
    """Return the addresses without the peers that do not have their routes."""
    refused = {(each.address, each.peer) for each in checks if each.state == "refused"}
    return tuple(
        msgspec.structs.replace(
            each, peers=tuple(peer for peer in each.peers if (each.address, peer) not in refused)
        )
        if refused
        else each
        for each in addresses
    )


def with_checks(
    outcome: Outcome,
    checks: Iterable[RouteCheck],
    receivers: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
) -> Outcome:
    """Return the outcome of a Service with what these checks of its addresses show. `receivers`:
    the peers that get each address of the Service."""
    found = [each for each in checks if each.state in PROBLEMS]
    if outcome.state != "done" or not found:
        return outcome
    findings = [finding_of(each, names.get(each.peer, each.peer)) for each in found]
    refused = [each for each in found if each.state == "refused"]
    missing = {
        address
        for address, peers in receivers.items()
        if peers and {each.peer for each in refused if each.address == address} >= set(peers)
    }
    if not missing:
        return msgspec.structs.replace(outcome, notes=(*outcome.notes, *findings))
    return Outcome(
        "unavailable",
        "; ".join(map(str, findings)),
        NOT_INSTALLED,
        in_part=missing != receivers.keys(),
        notes=outcome.notes,
    )
