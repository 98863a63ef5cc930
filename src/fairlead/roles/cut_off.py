"""Holds back the routes of a gateway that is cut off from the network, until it has caught up.

In: the verdicts of probes, the BGP sessions, the peers. Out: while the gateway is cut off or
returns, its BIRD exports nothing; its peers send their state again; and the failures of nodes in
this time, which were those of this host, do not make these nodes flap. `plan/cut_off` decides.
Invariant: nothing is held back unless another node has answered before, or this process or its
predecessor was cut off at its start or end, so a gateway whose probes never work announces."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

import structlog

from fairlead.drivers import Component
from fairlead.drivers.bgp import BirdDriver
from fairlead.drivers.direct import Peers
from fairlead.errors import FairleadError
from fairlead.plan.cut_off import CONNECTED, CutOff, Seen, Start, follow, follow_start
from fairlead.state import State

log = structlog.get_logger()

CHECK_S = 0.1
"""The interval of checks while no other node answers, and until the gateway has caught up."""
COALESCE_S = 0.02
EXCUSED_S = 30.0
"""How long after the return a node that fails again does not count as flapping."""


class StartWatch(Component):
    """The component that notices that the process has started while its host is cut off. It works
    until the state is known: the driver `bgp` is not open before. It comes before the components
    that wait for the state."""

    name = "cut off at start"

    def __init__(self, state: State, bgp: BirdDriver) -> None:
        self._state = state
        self._bgp = bgp

    async def run(self) -> None:
        done = self._bgp.speaker.held_back  # by an earlier process
        start, shown = Start(_now_s(), held_back=done), ""
        while not self._state.has_synced.is_set():
            before = start
            established = await self._bgp.reads_session()
            start = follow_start(before, established=established, now_s=_now_s())
            if start.held_back != before.held_back:
                log.warning(
                    "started while cut off: neither the API server nor a BGP neighbor answers"
                    if start.held_back
                    else "back on the network without the API server; the former addresses are "
                    "announced"
                )
            if start.held_back != done:
                try:
                    await self._bgp.hold_back_before_open(held=start.held_back)
                    done, shown = start.held_back, ""
                except FairleadError as error:  # the next check tries again
                    if shown != str(error):
                        shown = str(error)
                        log.warning("the routes were not changed", problem=shown)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._state.has_synced.wait()


class CutOffWatch(Component):
    """The component that notices a cut and the return. `host`: the name of this host, and of its
    Node if it has one."""

    name = "cut off"

    def __init__(self, state: State, host: str, bgp: BirdDriver, peers: Peers | None) -> None:
        self._state = state
        self._host = host
        self._bgp = bgp
        self._peers = peers
        self._now = CONNECTED
        self._answered = False
        """Whether another node has answered before."""
        self._lost: frozenset[str] = frozenset()
        """The nodes that did not answer when this host was cut off."""

    async def run(self) -> None:
        """Follow the verdicts until cancelled."""
        await self._state.has_synced.wait()
        if self._bgp.held_back:
            self._continue()
        with self._state.subscribers.subscription() as dirty:
            while True:
                urgent = await self._check()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S if urgent else None):
                        await dirty.take(COALESCE_S)

    def _continue(self) -> None:
        """Continue with a cut that began before this process was in step with the cluster."""
        self._answered = True
        self._now = CutOff("cut off", _now_s())
        self._lost, _, _ = self._nodes()
        self._state.excused = self._lost
        if self._peers is not None:
            self._peers.await_missing()

    async def _check(self) -> bool:
        """Follow the present state. Return whether it has to be checked again soon."""
        known, answering, down = self._nodes()
        self._answered |= bool(answering)
        alone = bool(known) and self._answered and not answering
        if not alone and self._now.phase == "connected":
            self._end_excuse()
            return bool(self._state.excused)
        await self._bgp.poll()
        seen = Seen(
            others=bool(known) and self._answered,
            alive=bool(answering),
            established=self._bgp.has_session,
            nodes_back=not self._lost & down,
            peers_back=self._peers is None or self._peers.caught_up,
        )
        before, self._now = self._now, follow(self._now, seen, _now_s())
        if before.phase != self._now.phase:
            await self._enter(self._now, known)
        return True

    def _nodes(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Return the addresses of other nodes that are probed, of those with a health port that is
        not `down`, and of those with one that is. While the gateway is connected, the first node
        that answers is enough."""
        own = self._own_addresses()
        answering, down = set[str](), set[str]()
        for address, verdict in self._state.probed_addresses():
            if address not in own:
                (down if verdict == "down" else answering).add(address)
                if answering and self._now.phase == "connected":
                    break
        return frozenset(answering | down), frozenset(answering), frozenset(down)

    def _own_addresses(self) -> Collection[str]:
        node = self._state.nodes.get(self._host)
        return {each.address for each in node.status.addresses} if node is not None else ()

    async def _enter(self, state: CutOff, known: Collection[str]) -> None:
        match state.phase:
            case "cut off":
                log.warning("cut off: neither another node nor a BGP neighbor answers")
                self._lost = frozenset(known)
                self._state.excused = self._lost
                await self._bgp.hold_back(held=True)
                if self._peers is not None:
                    self._peers.begin_again()
            case "returning":
                log.info("back on the network; the addresses are announced when it has caught up")
            case "connected":
                log.info("caught up; the addresses are announced")
                await self._bgp.hold_back(held=False)
                if self._peers is not None:
                    self._peers.stop_waiting()

    def _end_excuse(self) -> None:
        if self._state.excused and _now_s() - self._now.since_s > EXCUSED_S:
            self._state.excused = ()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
