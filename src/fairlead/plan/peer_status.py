"""The status of a BGPPeer: the number of its sessions, and the conditions Accepted and Established.

In: the section `announce.bgp` of the controller, the BGPPeers, the announcers that are alive. Out:
a `PeerState` for each BGPPeer. Pure. Accepted: the fields of the BGPPeer can be used. What only a
host can find out, such as a missing Secret or interface, is part of Established. Established: every
host that has the peer has a session with it. Invariants: sessions that cannot be seen are never
counted as established; a condition does not change while its cause lasts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fairlead.announce_sections import BgpConfig
from fairlead.kube.crds import BGPPeer
from fairlead.model import Value
from fairlead.plan.announcers import Announcers
from fairlead.plan.object_status import ObjectCondition
from fairlead.plan.peers import HostPeer, all_peers

ACCEPTED = "Accepted"
ESTABLISHED = "Established"
NO_SESSION = "NoSession"
MAX_NAMED = 3
"""The maximum number of hosts that a message names."""


class PeerState(Value, frozen=True):
    """The status of a BGPPeer, without times. `sessions`: established sessions and all of them,
    such as `2/3`; empty while they are unknown."""

    sessions: str
    conditions: tuple[ObjectCondition, ...]


class _HostSession(NamedTuple):
    host: str
    established: bool
    problem: str


def peer_states(
    section: BgpConfig, peers: Mapping[str, BGPPeer], announcers: Announcers | None
) -> dict[str, PeerState]:
    """Return the states of all BGPPeers, by name. `announcers`: None while they are unknown, or if
    the controller cannot read them."""
    configured = {each.name for each in section.peers}
    found = all_peers(section, peers)[len(section.peers) :]
    return {
        each.name: _state(section, each, announcers, same_name=each.name in configured)
        for each in found
    }


def _state(
    section: BgpConfig, peer: HostPeer, announcers: Announcers | None, *, same_name: bool
) -> PeerState:
    if peer.problem is not None:
        accepted = ObjectCondition(ACCEPTED, "False", peer.problem.code, str(peer.problem))
        if same_name:  # the sessions of this name are those of the peer in the configuration
            message = "no host uses this BGPPeer"
            return PeerState(
                "", (accepted, ObjectCondition(ESTABLISHED, "False", NO_SESSION, message))
            )
    else:
        accepted = ObjectCondition(ACCEPTED, "True", "Valid", "its fields can be used")
    if section.speaker == "routes":
        message = (
            "the sessions are those of the routing daemon on the hosts (speaker: routes), which "
            "does not use BGPPeers"
        )
        return PeerState(
            "", (accepted, ObjectCondition(ESTABLISHED, "Unknown", "OtherSpeaker", message))
        )
    if announcers is None:
        message = "the controller cannot read the Announcers, in which hosts show their sessions"
        return PeerState(
            "", (accepted, ObjectCondition(ESTABLISHED, "Unknown", "AnnouncersUnknown", message))
        )
    sessions = sorted(_sessions(peer.name, announcers))
    established = sum(each.established for each in sessions)
    return PeerState(
        f"{established}/{len(sessions)}" if sessions else "",
        (accepted, _established(sessions, announcers.hidden)),
    )


def _sessions(name: str, announcers: Announcers) -> Iterable[_HostSession]:
    return (
        _HostSession(f"{each.role} {each.host}", session.established, session.problem)
        for each in announcers.hosts.values()
        for session in each.peers
        if session.peer == name
    )


def _established(sessions: Sequence[_HostSession], hidden: Sequence[str]) -> ObjectCondition:
    """Return the condition for these sessions. `hidden`: gateways that do not show theirs."""
    down = [each for each in sessions if not each.established]
    if down:
        message = f"{len(down)} of {len(sessions)} hosts have no session: {_reasons(down)}"
        return ObjectCondition(ESTABLISHED, "False", NO_SESSION, message)
    if hidden:
        message = f"{_listed([f'gateway {each}' for each in hidden])} does not show its sessions"
        return ObjectCondition(ESTABLISHED, "Unknown", "HostsHidden", message)
    if not sessions:
        message = (
            "no host that is alive has this peer: no host announces by BGP, or nodeSelectors match "
            "no Node of such a host"
        )
        return ObjectCondition(ESTABLISHED, "False", "NoHost", message)
    partial = [each for each in sessions if each.problem]
    if partial:
        return ObjectCondition(ESTABLISHED, "True", "Impaired", _reasons(partial))
    return ObjectCondition(ESTABLISHED, "True", "AllHosts", "every host has a session with it")


def _reasons(sessions: Iterable[_HostSession]) -> str:
    return _listed([f"{each.host}: {each.problem}" for each in sessions], "; ")


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return separator.join(texts[:MAX_NAMED]) + more
