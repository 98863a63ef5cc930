"""Findings about the announcement of a Service's addresses.

In: the announcers that are alive, with the addresses that each announces; the addresses that the
plan wants announced. Out: Findings; the address that no announcer announces prevents the condition
Ready. Pure. Invariants: an address is never reported as announced because of an announcer that is
gone, or whose BGP sessions are all down. Unknown facts are not reported: a gateway that shows no
Announcer, or not all of its addresses, may announce the address. A Finding does not change while
its cause lasts."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.kube.announcers import AnnouncerSession, AnnouncerStatus
from fairlead.model import Announcement, Finding
from fairlead.plan.announce_notes import NOT_ANNOUNCED

MAX_NAMED = 3
"""Maximum number of hosts and of sessions that a message names."""
LOOK = "see `kubectl get announcers -o wide`, and `fairlead status` on the hosts"


class PeerSession(msgspec.Struct, frozen=True):
    """The BGP session of one announcer with a peer. `problem`: why it is not established, or does
    not work in full; empty if it works."""

    peer: str
    established: bool
    problem: str = ""


class HostAnnouncements(msgspec.Struct, frozen=True):
    """What one announcer announces. `announced`: the addresses that neighbors learn from it.
    `silent`: the addresses that it would announce, but no neighbor gets them now. `sessions`: the
    sessions that are not established, with their last errors, and other problems. `complete`:
    whether all of its addresses are known. `peers`: its BGP sessions."""

    role: str
    host: str
    announced: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    sessions: tuple[str, ...] = ()
    complete: bool = True
    peers: tuple[PeerSession, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        return self.announced | self.silent


class Announcers(msgspec.Struct, frozen=True):
    """The announcers that are alive, by the names of their objects. `hidden`: gateways that are
    alive and show no Announcer, sorted. `handed_over`: addresses that no announcer shows any more,
    but that one showed a moment ago, because the next one has not shown them yet."""

    hosts: Mapping[str, HostAnnouncements] = msgspec.field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    handed_over: frozenset[str] = frozenset()


def host_announcements(status: AnnouncerStatus) -> HostAnnouncements:
    """Return what this announcer announces."""
    announced = {each.address for each in status.addresses if each.told}
    silent = {each.address for each in status.addresses} - announced
    # Addresses without details are announced by the same sessions as the others.
    (announced if announced else silent).update(status.more_addresses)
    down = [
        f"{each.peer} ({each.address}): {each.last_error or each.state}"
        for each in status.sessions
        if not each.established and each.state != "refused"  # `problems` has these
    ]
    return HostAnnouncements(
        status.role,
        status.host,
        frozenset(announced),
        frozenset(silent),
        (*down, *status.problems),
        status.complete,
        tuple(map(_peer_session, status.sessions)),
    )


def _peer_session(session: AnnouncerSession) -> PeerSession:
    if not session.established:
        return PeerSession(session.peer, False, session.last_error or session.state)
    problems = ["its BFD session is down"] if session.bfd == "down" else []
    if session.refused:
        problems.append(f"the router has no route to {session.refused} of the announced addresses")
    return PeerSession(session.peer, True, ", ".join(problems))


def changed_addresses(before: Announcers, after: Announcers) -> frozenset[str]:
    """Return the addresses whose Findings may differ, apart from a change of `hidden`."""
    changed = set(before.handed_over ^ after.handed_over)
    for name in before.hosts.keys() | after.hosts.keys():
        old, new = before.hosts.get(name), after.hosts.get(name)
        if old == new:
            continue
        if old is None or new is None:
            changed |= (old or new or HostAnnouncements("", "")).addresses
            continue
        changed |= (old.announced ^ new.announced) | (old.silent ^ new.silent)
        if old.sessions != new.sessions:
            changed |= old.silent | new.silent
    return frozenset(changed)


def announcement_notes(
    announcers: Announcers | None, announcements: Iterable[Announcement], *, by_gateways: bool
) -> tuple[Finding, ...]:
    """Return the Findings for a Service with these announcements. `announcers`: None while they are
    unknown, or if the controller cannot read them. `by_gateways`: whether gateways announce the
    addresses; otherwise nodes do."""
    if announcers is None:
        return ()
    found = []
    for each in announcements:
        lost = [address for address in each.addresses if not _is_announced(announcers, address)]
        if lost:
            found.append(_not_announced(announcers, each.method, lost, by_gateways=by_gateways))
    return tuple(found)


def _is_announced(announcers: Announcers, address: str) -> bool:
    return address in announcers.handed_over or any(
        address in each.announced for each in announcers.hosts.values()
    )


def _not_announced(
    announcers: Announcers, method: str, lost: Sequence[str], *, by_gateways: bool
) -> Finding:
    role = "gateway" if by_gateways else "node"
    where = ", ".join(lost)
    hosts = [each for each in announcers.hosts.values() if each.role == role]
    silent = [each for each in hosts if not each.silent.isdisjoint(lost)]
    uncertain = [*(announcers.hidden if by_gateways else ()), *_incomplete(hosts)]
    if uncertain:
        message = (
            f"it is not known whether {where} is announced: {_listed(uncertain)} does not show all "
            "of its addresses"
        )
        remedy = "check the rights of the gateways on announcers.fairlead.io, and their logs"
        return Finding(NOT_ANNOUNCED, message, remedy=remedy)
    if silent:
        why = (
            "BGP sessions are established, but no router takes its route from"
            if any(session.established for each in silent for session in each.peers)
            else "no BGP session is established on"
        )
        message = f"{where} is not announced: {why} {_reasons(silent)}"
        return Finding(NOT_ANNOUNCED, message, severity="error", remedy=LOOK, blocks="Ready")
    problems = _reasons([each for each in hosts if each.sessions])
    why = f"; problems: {problems}" if problems else ""
    message = f"no {role} announces {where} (method {method}){why}"
    return Finding(NOT_ANNOUNCED, message, severity="error", remedy=LOOK, blocks="Ready")


def _incomplete(hosts: Iterable[HostAnnouncements]) -> Sequence[str]:
    return sorted(each.host for each in hosts if not each.complete)


def _reasons(hosts: Iterable[HostAnnouncements]) -> str:
    texts = sorted(
        f"{each.host}: {_listed(each.sessions)}" if each.sessions else each.host for each in hosts
    )
    return _listed(texts, "; ")


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = " and others" if len(texts) > MAX_NAMED else ""
    return separator.join(texts[:MAX_NAMED]) + more
