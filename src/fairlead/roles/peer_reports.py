"""The state of each BGPPeer in its status and in Events.

In: the BGPPeers and the announcers of the State. Out: the source, the plan and the loop with which
`drivers.peer_status` writes. Invariants: each change is written once, and a BGPPeer is written at
most every `INTERVAL_S`; a BGPPeer whose write fails is retried with growing delays. Peers of the
configuration file are not objects, so nothing is written for them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from fairlead.announce_sections import BgpConfig
from fairlead.drivers import Component
from fairlead.drivers.peer_status import DesiredPeer, PeerDriver
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.plan.peer_status import peer_states
from fairlead.reconcile import Loop, Pace
from fairlead.state import State, Subscribers

INTERVAL_S = 0.5
"""The interval at which changes are noticed, and the minimum time between two writes."""


class PeerStates(Component):
    """The source and the plan of the loop. A BGPPeer becomes dirty when its published state
    changes."""

    name = "peer states"

    def __init__(
        self, state: State, section: BgpConfig, known: Callable[[], Awaitable[None]]
    ) -> None:
        self.has_synced = asyncio.Event()
        self.services: dict[str, DesiredPeer] = {}
        """The desired status of each BGPPeer by its name. The field is called `services` in every
        source."""
        self.subscribers = Subscribers[str]()
        self._state = state
        self._section = section
        self._known = known

    def plan(self, keys: Collection[str]) -> Mapping[str, DesiredPeer]:
        return {name: self.services[name] for name in keys if name in self.services}

    async def run(self) -> None:
        await self._known()
        last: tuple[object, object] | None = None
        while True:
            peers, announcers = self._state.bgp_peers, self._state.announcers
            if peers is not None and (
                last is None or last[0] is not peers or last[1] is not announcers
            ):
                last = (peers, announcers)
                before, self.services = (
                    self.services,
                    {
                        name: DesiredPeer(
                            peers[name].metadata.uid, peers[name].metadata.generation, each
                        )
                        for name, each in peer_states(self._section, peers, announcers).items()
                    },
                )
                names = before.keys() | self.services.keys()
                self.has_synced.set()
                self.subscribers.mark(
                    [name for name in names if before.get(name) != self.services.get(name)]
                )
            await asyncio.sleep(INTERVAL_S)


class PeerReports:
    """The publication of the state of BGPPeers. The role runs `components`. `known`: returns once
    it is known what the hosts announce, so that a new leader does not overwrite the conditions of
    the previous one before."""

    def __init__(
        self,
        client: Client,
        state: State,
        section: BgpConfig,
        recorder: EventRecorder,
        known: Callable[[], Awaitable[None]],
        *,
        fence: Callable[[], None],
    ) -> None:
        states = PeerStates(state, section, known)
        loop = Loop(
            "bgp peers",
            states,
            states.plan,
            [PeerDriver(client, state, recorder, fence)],
            lambda _intents, _outcomes: None,
            pace=Pace(coalesce_s=INTERVAL_S),
        )
        self.components: Sequence[Component] = (states, loop)
