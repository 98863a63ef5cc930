"""How a gateway probes the nodes, and what its start waits for.

In: the plan. Out: probes equal to the plan, whose verdicts are part of the state; the delay of the
start until nodes had time to answer."""

import asyncio
from typing import NamedTuple

import structlog

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.prober import Prober
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.net.httpprobe import PROBE_MARK
from fairlead.reconcile import Loop, Pace
from fairlead.role_state import ProbedNode, ProbesState
from fairlead.roles.data_plane import DataPlane
from fairlead.roles.plan_cache import PlanCache
from fairlead.roles.prefetch import StartupPrefetch
from fairlead.roles.prober_process import command as prober_command
from fairlead.state import State

log = structlog.get_logger()

COALESCE_S = 0.002
"""How long after the previous pass a change waits for further changes. The value is small because
collecting changes does not reduce their cost, and changes that arrive during a pass are collected
for the next pass anyway."""
PROBE_AFTER_S = 0.005
"""The delay of the loop that probes. Most changes do not change what is probed, so the loop that
forwards runs first."""
PLAN_SLICE = 50
"""The number of Services that are planned before other tasks run; it takes some milliseconds."""
FIRST_VERDICTS_S = 0.6
"""How long a start waits for results after it sent the first probe to the last node; long enough to
detect every dead node."""


class Probing(NamedTuple):
    """The parts that probe the nodes."""

    prober: Prober
    prefetch: StartupPrefetch
    loop: Loop[ServiceKey, LoadBalancer]


def probing_of(config: Config, state: State, plane: DataPlane, planned: PlanCache) -> Probing:
    """Return the prober and the loop that keeps the probes equal to the plan. This loop reports no
    outcomes; the loop that forwards reports them."""
    section, paths = config.gateway, plane.probe_paths
    command = prober_command(
        section.probe_interval_s, section.probe_timeout_s, PROBE_MARK * paths.needed
    )
    prober = Prober(state.observe, command, paths.add)
    prefetch = StartupPrefetch(planned.unconfirmed, prober, plane.direct.precompute_tables)
    loop = Loop(
        "probing",
        state.objects_only,
        prefetch.plan,
        [prober],
        lambda _intents, _outcomes: None,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE, idle_delay_s=PROBE_AFTER_S),
    )
    return Probing(prober, prefetch, loop)


class Probes(Component):
    """The component that shows the paths by which nodes are probed, and their last verdicts."""

    name = "probes"

    def __init__(self, state: State) -> None:
        self._state = state

    def status(self) -> ProbesState:
        names = {
            entry.address: name
            for name, node in self._state.nodes.items()
            for entry in node.status.addresses
        }
        return ProbesState(
            tuple(
                ProbedNode(names.get(address, ""), address, path, verdict)
                for address, paths in self._state.probed().items()
                for path, verdict in paths.items()
            )
        )


class FirstVerdicts(Component):
    """The component that delays the start until nodes have had time to answer their first probes.
    After a bounded time it lets the gateway trust the API about the remaining nodes, until all of
    them have been probed."""

    name = "first verdicts"

    def __init__(self, prefetch: StartupPrefetch, prober: Prober, state: State) -> None:
        self._prefetch = prefetch
        self._prober = prober
        self._state = state

    async def open(self) -> None:
        await self._prefetch.done.wait()
        try:
            async with asyncio.timeout_at(self._prefetch.last_first_probe_s + FIRST_VERDICTS_S):
                await self._prober.settled()
        except TimeoutError:
            log.info(
                "trusting the API until all health ports have been probed", ports=self._prober.ports
            )
            self._state.trust_api = True

    async def run(self) -> None:
        await self._prober.settled()
        self._state.trust_api = False
