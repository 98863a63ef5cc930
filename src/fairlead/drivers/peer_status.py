"""The driver of the status of BGPPeers.

In: the desired status of each BGPPeer. Out: the status by server-side apply, and an Event when a
BGPPeer becomes unusable or usable; nothing is written if the object shows it already. The sessions
of a BGPPeer that go down are reported by the Events of Services and Announcers, so an Event here
would repeat them. Invariants: a BGPPeer that fails does not delay the others; nothing is written
when the fence raises."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from fairlead.drivers import object_conditions
from fairlead.drivers.object_status import ObjectStatusDriver
from fairlead.kube.crds import BGP_PEERS, BGPPeer
from fairlead.kube.events import stamp
from fairlead.kube.objects import Condition
from fairlead.plan.object_status import ObjectCondition
from fairlead.plan.peer_status import ACCEPTED, PeerState

ConditionT = TypeVar("ConditionT", Condition, ObjectCondition)

FIELD_MANAGER = "fairlead-bgp-peers"


class DesiredPeer(NamedTuple):
    """The desired status of the BGPPeer with this uid, for the spec of this generation."""

    uid: str
    generation: int
    state: PeerState


class PeerDriver(ObjectStatusDriver[BGPPeer, DesiredPeer]):
    """Driver of the status of BGPPeers."""

    name = "bgp peers"
    kind = BGP_PEERS.kind

    def watched(self) -> Mapping[str, BGPPeer]:
        return self._state.bgp_peers or {}

    def differs(self, found: BGPPeer, wanted: DesiredPeer) -> bool:
        return status_of(found, wanted, "") is not None

    def writes(self) -> Sequence[Callable[[BGPPeer, DesiredPeer], Awaitable[None]]]:
        return (self._show,)

    async def _show(self, peer: BGPPeer, wanted: DesiredPeer) -> None:
        body = status_of(peer, wanted, stamp(datetime.now(UTC)))
        if body is None:
            return
        self._fence()
        answer = await self._client.apply(
            BGP_PEERS,
            ("", peer.metadata.name),
            {"status": body},
            field_manager=FIELD_MANAGER,
            subresource="status",
            force=True,
        )
        self.answers.note(peer.metadata.name, answer)
        object_conditions.report(
            lambda *event: self._recorder.event_about(BGP_PEERS, peer, *event),
            _accepted(peer.status.conditions),
            _accepted(wanted.state.conditions),
        )


def status_of(peer: BGPPeer, wanted: DesiredPeer, now: str) -> Mapping[str, object] | None:
    """Return the status that the BGPPeer should have; None if it has it. The observed generation is
    the one for which the conditions were computed, which may be older than the object."""
    shown, state = peer.status, wanted.state
    same = object_conditions.same(shown.conditions, state.conditions)
    # The message of a condition may stay as it is although the object has changed.
    observed = {each.observed_generation for each in shown.conditions}
    if shown.sessions == state.sessions and same and observed == {wanted.generation}:
        return None
    return {
        "sessions": state.sessions,
        "conditions": object_conditions.body_of(
            shown.conditions, state.conditions, wanted.generation, now
        ),
    }


def _accepted(conditions: Collection[ConditionT]) -> Sequence[ConditionT]:
    return [each for each in conditions if each.type == ACCEPTED]
