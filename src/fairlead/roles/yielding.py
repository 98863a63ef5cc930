"""The hand-over of addresses before a node is excluded or rebooted (`plan.yielding`).

In: changes of Nodes, the connections to the other gateways. Out: the Nodes of the State, where a
node that has just been excluded keeps its weight for HOLD_S; `State.yields` and `State.takers`.
Invariants: every
gateway holds back the exclusion of every node, so the tables of all gateways change when the
addresses have moved. A Node that was excluded before this process started, or that is being
deleted, is not held back."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog

from fairlead.drivers import Component
from fairlead.kube.objects import Node, ObjectKey
from fairlead.net.address import split_host_port
from fairlead.plan.members import excluded
from fairlead.plan.yielding import takers_of, without_exclusion, yields_to_others
from fairlead.role_state import PeersState
from fairlead.state import State

log = structlog.get_logger()

HOLD_S = 4.0
"""How long a node that has just been excluded keeps its weight. Another announcer takes over within
0.3 seconds, and the former one forwards for one more second; a route is withdrawn after a
second."""
CHECK_S = 0.2
"""The interval at which cordons and lost gateways are noticed."""


class Others(Protocol):
    """The exchange with the other gateways."""

    def status(self) -> PeersState: ...


class Yielding(Component):
    """The component that decides when the gateway `own` hands its addresses over although its node
    serves. `peers`: the other gateways; None: no other gateway is known, so a cordon has no effect.
    The State gets its Nodes by `update_nodes`."""

    name = "hand-over"

    def __init__(self, state: State, own: str, peers: Others | None) -> None:
        self._state = state
        self._own = own
        self._peers = peers
        self._held: dict[str, tuple[Node, asyncio.TimerHandle]] = {}
        """By name, the excluded Nodes that keep their weight, as they are in the cluster."""

    def update_nodes(self, changed: Mapping[ObjectKey, Node | None]) -> None:
        """Store changed Nodes."""
        shown: dict[ObjectKey, Node | None] = {}
        for key, node in changed.items():
            shown[key] = node
            name, before = key.name, self._state.nodes.get(key.name)
            held = self._held.get(name)
            if node is None or not excluded(node):
                self._forget(name)
            elif held is not None or (before is not None and not excluded(before)):
                shown[key] = self._hold(key, node)
        self._state.update_nodes(shown)
        self._decide()

    def _hold(self, key: ObjectKey, node: Node) -> Node:
        """Return the Node that plans see until its exclusion takes effect."""
        weighted = without_exclusion(node)
        if excluded(weighted):
            self._forget(key.name)
            return node
        held = self._held.get(key.name)
        timer = (
            held[1]
            if held is not None
            else asyncio.get_running_loop().call_later(HOLD_S, self._release, key)
        )
        self._held[key.name] = node, timer
        return weighted

    def _forget(self, name: str) -> None:
        if held := self._held.pop(name, None):
            held[1].cancel()

    def _release(self, key: ObjectKey) -> None:
        """Let the exclusion of a Node take effect."""
        node, _ = self._held.pop(key.name)
        log.info("an excluded node gets no new connections from now on", node=key.name)
        self._state.update_nodes({key: node})
        self._decide()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._decide()

    async def close(self) -> None:
        for name in list(self._held):
            self._forget(name)

    def _decide(self) -> None:
        yields, takers = self._own in self._held, self._takers()
        before = self._state.yields or bool(self._state.takers)
        if before != (now := yields or bool(takers)):
            log.info("handing addresses over" if now else "announcing addresses again")
        self._state.update_yields(yields, takers)

    def _takers(self) -> frozenset[str] | None:
        """Return the names of the Nodes whose gateways can take addresses over from this one. None:
        they are not known, or are not needed because this host keeps its addresses."""
        node = self._state.nodes.get(self._own)
        if self._peers is None or node is None or not yields_to_others(node):
            return None
        gateways = self._peers.status().gateways
        alive = {split_host_port(each.address)[0] for each in gateways if each.connected}
        return takers_of(self._own, self._state.nodes, alive)
