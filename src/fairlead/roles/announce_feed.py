"""What a role that announces addresses reads in addition: pools, BGP peers, the id of the cluster.

In: AddressPools and BGPPeers, the namespace kube-system. Out: the pools and peers of the State, and
the uid of that namespace, which is the id of the cluster. A role without the section `announce`
reads none of this and needs no right to it. Invariant: a CRD that is not installed, or a right that
is missing, is logged once, and the role continues with the configuration file."""

import asyncio
from functools import partial

import structlog

from fairlead.backoff import Backoff
from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.errors import Refused, Unavailable
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_POOLS, BGP_PEERS
from fairlead.kube.freshness import Freshness
from fairlead.kube.objects import NAMESPACES, ObjectKey
from fairlead.roles.process import follow, record_absent, record_forbidden
from fairlead.state import State

log = structlog.get_logger()

POOL_SOURCE = ADDRESS_POOLS.plural
PEER_SOURCE = BGP_PEERS.plural
CLUSTER_NAMESPACE = ObjectKey("", "kube-system")
"""A namespace that every cluster has from its creation to its end."""
CLUSTER_RETRY_S = (0.2, 5.0)
"""The first and the longest delay before the id of the cluster is requested again."""
DENIED_RETRY_S = 30.0
"""The same while the right to read it is missing."""


def announce_sources(config: Config) -> tuple[str, ...]:
    """Return the additional sources of the State of a host that announces addresses; none if the
    configuration has no section `announce`."""
    return (POOL_SOURCE, PEER_SOURCE) if config.announce is not None else ()


class PeerFeed(Component):
    """The reflector that keeps the BGPPeers of `state` equal to the cluster, for the controller,
    which watches AddressPools anyway."""

    name = "peer feed"

    def __init__(self, client: Client, state: State, freshness: Freshness) -> None:
        self._client = client
        self._state = state
        self._freshness = freshness

    async def run(self) -> None:
        state = self._state
        await follow(
            self._client,
            BGP_PEERS,
            state.update_bgp_peers,
            state,
            self._freshness,
            on_absent=partial(record_absent, state, BGP_PEERS.kind, BGP_PEERS.plural),
            on_forbidden=partial(record_forbidden, state, BGP_PEERS.kind, BGP_PEERS.plural),
        )


class AnnounceFeed(Component):
    """The reflectors that keep the AddressPools and BGPPeers of `state` equal to the cluster, for
    a host that announces addresses."""

    name = "announce feed"

    def __init__(self, client: Client, state: State, freshness: Freshness) -> None:
        self._client = client
        self._state = state
        self._freshness = freshness

    async def run(self) -> None:
        client, state, fresh = self._client, self._state, self._freshness
        async with asyncio.TaskGroup() as group:
            group.create_task(
                follow(
                    client,
                    ADDRESS_POOLS,
                    state.update_pools,
                    state,
                    fresh,
                    on_absent=partial(
                        record_absent, state, ADDRESS_POOLS.kind, ADDRESS_POOLS.plural
                    ),
                    on_forbidden=partial(
                        record_forbidden, state, ADDRESS_POOLS.kind, ADDRESS_POOLS.plural
                    ),
                )
            )
            group.create_task(PeerFeed(client, state, fresh).run())


class ClusterId(Component):
    """The component that reads the id of the cluster, by which hosts of several clusters on one
    link tell each other apart. Call it for the id, once it is open."""

    name = "cluster id"

    def __init__(self, client: Client) -> None:
        self._client = client
        self._id = ""
        self._refused = False
        self._retry = Backoff(*CLUSTER_RETRY_S)

    def __call__(self) -> str:
        """Return the id; empty while this process may not read it."""
        return self._id

    async def open(self) -> None:
        """Wait until the API server has answered."""
        while not self._id and not self._refused:
            await self._read()

    async def run(self) -> None:
        """Read the id again, until the right to read it is granted."""
        while not self._id:
            await self._read()

    async def _read(self) -> None:
        try:
            found = await self._client.get(NAMESPACES, CLUSTER_NAMESPACE)
        except Unavailable as problem:
            log.debug("waiting for the id of the cluster", problem=str(problem))
            await asyncio.sleep(self._retry.next_s())
        except Refused as problem:
            if not self._refused:
                log.error(
                    "cannot read namespace kube-system, whose uid is the id of the cluster",
                    problem=str(problem),
                    fix="install the ClusterRole of this version",
                )
                self._refused = True
                return
            await asyncio.sleep(DENIED_RETRY_S)
        else:
            self._id = found.metadata.uid
