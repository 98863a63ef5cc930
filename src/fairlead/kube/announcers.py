"""The Announcer, of group `fairlead.io`: the object in which one role on one host shows the
addresses that it announces to the network.

In: the parts `l2` and `bgp` of the state of the role. Out: the status of its Announcer, which the
role writes as a whole. Pure. Invariants: an Announcer has a limited size. If addresses are left
out, `address_count` is larger than the number of addresses, so a reader never takes a missing
address for one that is not announced. The times are for people: whether the writer of an Announcer
is alive is known from the Lease of its process (`kube.presence`)."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from fairlead.kube.objects import Fields, ObjectMeta, Resource
from fairlead.role_state import PEER_REFUSED, PEER_SUBJECT, BgpSession, BgpState, L2State

FIELD_MANAGER = "fairlead-announcer"
MAX_ADDRESSES = 1000
"""The maximum number of addresses with details."""
MAX_MORE = 9000
"""The maximum number of further addresses without details."""
MAX_ENTRIES = 100
"""The maximum number of sessions, of members and of conflicts."""
MAX_PROBLEMS = 20
MAX_NAMES = 20
"""The maximum number of Services, interfaces or peers of one entry."""
MAX_TEXT = 300
ROUTING_DAEMON = "routing-daemon"


class AnnouncedAddress(Fields, frozen=True):
    """As in `role_state.AnnouncedAddress`. `peers`: ROUTING_DAEMON stands for all neighbors of
    another routing daemon of the host."""

    address: str
    method: str
    services: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    since: str | None = None

    @property
    def told(self) -> bool:
        """Whether a neighbor learns the address from this host now."""
        return self.method != "bgp" or bool(self.peers)


class AnnouncerSession(Fields, frozen=True):
    """A BGP session, as in `role_state.BgpSession`; or with state `refused` a peer that has no
    session because the host cannot configure it, with the reason as `last_error`. `refused`: the
    number of announced addresses to which the router has no route, as probes show."""

    peer: str
    address: str
    state: str
    since: str | None = None
    last_error: str = ""
    announced: int = 0
    accepted: int | None = None
    bfd: str = ""
    refused: int = 0

    @property
    def established(self) -> bool:
        return self.state == "established"


class AnnouncerMember(Fields, frozen=True):
    """Another announcer, as in `role_state.AnnouncerMember`."""

    name: str
    interface: str
    state: str
    since: str | None = None


class AnnouncerConflict(Fields, frozen=True):
    """A foreign host with an announced address, as in `role_state.AddressConflict`."""

    address: str
    interface: str
    mac: str
    services: tuple[str, ...] = ()
    since: str | None = None
    seen: str | None = None


class AnnouncerStatus(Fields, frozen=True):
    """What one role on one host announces. `method`: the methods in use, such as `bgp,l2`.
    `ready`: whether the role is in step with the cluster. `established`: the number of established
    sessions and of all sessions, such as `2/3`; empty without sessions. `more_addresses`: further
    addresses that this host announces, without details. `problems`: why something is not
    announced."""

    role: str
    host: str
    ready: bool
    address_count: int
    conflict_count: int
    method: str = ""
    speaker: str = ""
    established: str = ""
    observed_at: str | None = None
    addresses: tuple[AnnouncedAddress, ...] = ()
    more_addresses: tuple[str, ...] = ()
    sessions: tuple[AnnouncerSession, ...] = ()
    members: tuple[AnnouncerMember, ...] = ()
    conflicts: tuple[AnnouncerConflict, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every announced address is listed."""
        return self.address_count <= len(self.addresses) + len(self.more_addresses)


class Announcer(Fields, frozen=True):
    metadata: ObjectMeta
    status: AnnouncerStatus | None = None


ANNOUNCERS = Resource("fairlead.io/v1alpha1", "Announcer", "announcers", False, Announcer)


def announcer_name(role: str, host: str) -> str:
    """Return the name of the Announcer of a role on a host. As in the name of a Lease, characters
    that an object's name cannot have are replaced."""
    return re.sub(r"[^a-z0-9.-]", "-", f"{role}-{host}".lower())


def status_of(
    role: str, host: str, l2: L2State | None, bgp: BgpState | None, *, ready: bool
) -> AnnouncerStatus:
    """Return the status of an Announcer, without its time."""
    l2, bgp = l2 or L2State(), bgp or BgpState()
    announced = sorted([*_by_l2(l2), *_by_bgp(bgp)], key=lambda each: (each.address, each.method))
    refused = _refused(bgp)
    sessions = bgp.sessions
    established = sum(each.state == "established" for each in sessions)
    # There may be a finding about each address on layer 2, so others come before them.
    findings = [str(each) for each in (*bgp.findings, *l2.findings)]
    missing = Counter(each.peer for each in bgp.routes if each.state in ("refused", "missing"))
    return AnnouncerStatus(
        role,
        host,
        ready,
        len(announced),
        len(l2.conflicts),
        method=",".join(sorted({each.method for each in announced})),
        speaker=bgp.speaker if bgp.sessions or bgp.addresses else "",
        established=(
            f"{established}/{len(sessions) + len(refused)}" if sessions or refused else ""
        ),
        addresses=tuple(announced[:MAX_ADDRESSES]),
        more_addresses=tuple(
            each.address for each in announced[MAX_ADDRESSES : MAX_ADDRESSES + MAX_MORE]
        ),
        sessions=tuple(
            # The sessions that are down come first, because they must not be left out.
            sorted(
                (*refused, *(_session(each, missing[each.peer]) for each in sessions)),
                key=lambda each: each.established,
            )[:MAX_ENTRIES]
        ),
        members=tuple(
            AnnouncerMember(each.name, each.interface, each.state, each.since or None)
            for each in l2.members[:MAX_ENTRIES]
        ),
        conflicts=tuple(
            AnnouncerConflict(
                each.address,
                each.interface,
                each.mac,
                each.services[:MAX_NAMES],
                each.since or None,
                each.seen or None,
            )
            for each in l2.conflicts[:MAX_ENTRIES]
        ),
        problems=tuple(_short(each) for each in (bgp.problem, *findings) if each)[:MAX_PROBLEMS],
    )


def body_of(status: AnnouncerStatus) -> dict[str, object]:
    """Return the body of the object that shows this status."""
    return {"status": msgspec.to_builtins(status)}


def addresses_in(status: AnnouncerStatus) -> frozenset[str]:
    """Return all addresses that the status lists."""
    return frozenset((*(each.address for each in status.addresses), *status.more_addresses))


def _by_l2(state: L2State) -> Iterable[AnnouncedAddress]:
    return (
        AnnouncedAddress(
            each.address,
            "l2",
            each.services[:MAX_NAMES],
            interfaces=each.interfaces[:MAX_NAMES],
            since=each.since or None,
        )
        for each in state.addresses
    )


def _by_bgp(state: BgpState) -> Iterable[AnnouncedAddress]:
    other = (ROUTING_DAEMON,) if state.speaker == "routes" and not state.problem else ()
    return (
        AnnouncedAddress(
            each.address,
            "bgp",
            each.services[:MAX_NAMES],
            peers=each.peers[:MAX_NAMES] or other,
            since=each.since or None,
        )
        for each in state.addresses
    )


def _session(session: BgpSession, refused: int) -> AnnouncerSession:
    return AnnouncerSession(
        session.peer,
        session.address,
        session.state,
        session.since or None,
        _short(session.last_error),
        session.announced,
        session.accepted,
        session.bfd,
        refused,
    )


def _refused(state: BgpState) -> Sequence[AnnouncerSession]:
    """Return an entry for each peer that the host cannot configure."""
    names = {each.peer for each in state.sessions}
    found = [
        AnnouncerSession(
            each.subject.removeprefix(PEER_SUBJECT), "", "refused", last_error=_short(str(each))
        )
        for each in state.findings
        if each.code == PEER_REFUSED
    ]
    return [each for each in found if each.peer not in names]


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
