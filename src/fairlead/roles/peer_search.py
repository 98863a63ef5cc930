"""The search for the other gateways of the cluster (`gateway.peers: auto`).

In: the Leases of gateways, and the Nodes of the State. Out: the addresses of the other gateways,
for the exchange of flow entries (`drivers.direct.peers`). Invariants: while the API server does not
answer, the last known peers stay; before its first answer there are none, and no gateway is
answered. Leases are listed instead of watched: every gateway would receive every renewal of every
other gateway."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

import structlog

from fairlead.config import PresenceConfig
from fairlead.drivers import Component
from fairlead.errors import FairleadError
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.presence import COMPONENT_LABEL, presence_of
from fairlead.plan.gateway_peers import GatewayPeers, gateway_peers
from fairlead.state import State

log = structlog.get_logger()

SELECTOR = f"{COMPONENT_LABEL}=gateway"
CHECK_S = 0.2
"""The interval at which changes of Nodes are noticed, and the shortest interval of two lists."""
ANSWER_S = 5.0
"""The time-out of a list."""

SetPeers = Callable[[Sequence[str], Iterable[str]], None]


class PeerSearch(Component):
    """The component that passes the other gateways to `set_peers` whenever they have changed.
    `own`: the name of this gateway and of its Node. `port`: the port at which all gateways
    listen."""

    name = "peer search"

    def __init__(
        self,
        client: Client,
        section: PresenceConfig,
        state: State,
        own: str,
        port: int,
        set_peers: SetPeers,
    ) -> None:
        self._client = client
        self._section = section
        self._state = state
        self._own = own
        self._port = port
        self._set_peers = set_peers
        self._names: frozenset[str] | None = None
        self._found: GatewayPeers | None = None
        self._source: tuple[frozenset[str] | None, int] = (None, -1)
        self._soon = False
        self._failing = ""

    def search_soon(self) -> None:
        """Search again now: a gateway that is not known yet has connected."""
        self._soon = True

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._state.has_synced.wait()
        next_s = clock()
        while True:
            if self._soon or clock() >= next_s:
                self._soon = False
                await self._list()
                next_s = clock() + self._section.lease_duration_s / 3 * random.uniform(0.9, 1.1)
            self._publish()
            await asyncio.sleep(CHECK_S)

    async def _list(self) -> None:
        """Read the Leases of all gateways. A failure is logged until it changes or ends."""
        try:
            async with asyncio.timeout(ANSWER_S):
                leases = await self._client.list(
                    LEASES, namespace=self._section.namespace, label_selector=SELECTOR
                )
        except (FairleadError, TimeoutError) as problem:
            reason = str(problem) or f"not answered in {ANSWER_S:g} s"
            if reason != self._failing:
                log.warning("reading the Leases of the other gateways failed", problem=reason)
            self._failing = reason
            return
        self._failing = ""
        found = (presence_of(each) for each in leases)
        self._names = frozenset(
            each.name for each in found if each is not None and each.role == "gateway"
        )

    def _publish(self) -> None:
        source = (self._names, self._state.node_changes)
        if self._names is None or source == self._source:
            return
        self._source = source
        found = gateway_peers(self._names, self._state.nodes, self._own, self._port)
        if found != self._found:
            log.info("other gateways", peers=found.targets)
            self._found = found
            self._set_peers(found.targets, found.addresses)
