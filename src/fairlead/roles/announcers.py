"""What a role needs to announce addresses: its drivers, and the components beside them.

In: the configuration, the State, facts about the role and its host. Out: the drivers for the end of
the chain of the role's loop, and components for its list, in their order. The drivers come last in
the chain: an address is announced after everything else that serves it is in place, and withdrawn
before anything of it is removed. In the list of components they come after the drivers that serve
Services, so a cleanup, which removes in reverse order, hands addresses over first. A role without
the section `announce` gets components that remove what an earlier configuration left."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import structlog

from fairlead.announce_sections import BgpConfig
from fairlead.config import Config
from fairlead.drivers import Component, Driver
from fairlead.drivers.bgp import BirdDriver, NoBgp, RoutesDriver, bgp_driver
from fairlead.drivers.l2 import L2Driver, NoL2
from fairlead.errors import FairleadError
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.model import ServiceKey
from fairlead.plan.addresses import held_by
from fairlead.reconcile import Loop
from fairlead.roles.announce_feed import ClusterId
from fairlead.roles.host_peers import HostPeers
from fairlead.roles.l2_process import command as l2_command
from fairlead.roles.without_api import WithoutApi
from fairlead.state import State

log = structlog.get_logger()

Role = Literal["gateway", "node"]


class AnnouncingHost(NamedTuple):
    """The facts about a role on its host. `name`: of the host, and of its Node if it has one.
    `pin_path`: the directory on a bpffs of this role. `selectors`: its interfaces, where addresses
    are announced on layer 2 unless the configuration selects others; without any, the interfaces
    that have `node_addresses`."""

    role: Role
    name: str
    pin_path: Path
    selectors: Sequence[str] = ()
    node_addresses: Callable[[], Sequence[str]] = tuple

    @property
    def l2_pin_path(self) -> Path:
        return self.pin_path / "l2"


class Settled(Component):
    """The component that has the drivers withdraw what a previous process left, once the loop has
    processed all Services. Call it for the addresses about which nothing is decided: see
    `drivers.Undecided`."""

    name = "leftover announcements"

    def __init__(self, state: State) -> None:
        self._state = state
        self._loop: Loop[ServiceKey, Any] | None = None
        self.drivers: Sequence[L2Driver | RoutesDriver] = ()

    def follow(self, loop: Loop[ServiceKey, Any]) -> None:
        """Take the loop of the role, before it runs."""
        self._loop = loop

    def __call__(self) -> Collection[str] | None:
        loop = self._loop
        if loop is None or not loop.settled.is_set():
            return None
        services = (self._state.services.get(key) for key in loop.undone)
        return {address for each in services if each is not None for address in held_by(each)}

    async def run(self) -> None:
        assert self._loop is not None
        await self._loop.settled.wait()
        for driver in self.drivers:
            try:
                await driver.withdraw_leftovers()
            except FairleadError as problem:  # the next audit tries again
                log.warning("withdrawing leftover addresses failed", problem=str(problem))


class Announcers(NamedTuple):
    """`chain`: the drivers for the end of the chain of a loop. `components`: the drivers and the
    components beside them, in the order of the start. They need a State that is being filled, and
    belong before the loop."""

    chain: Sequence[Driver[ServiceKey, Any, Any, Any, Any]]
    components: Sequence[Component]
    settled: Settled | None = None

    def follow(self, loop: Loop[ServiceKey, Any]) -> None:
        """Take the loop whose chain the drivers are part of."""
        if self.settled is not None:
            self.settled.follow(loop)


def announcers_of(
    config: Config, client: Client, state: State, host: AnnouncingHost, freshness: Freshness
) -> Announcers:
    """Return what this role needs to announce addresses as the configuration says."""
    section = config.announce
    if section is None:
        return Announcers((), leftovers(config, host))
    cluster, settled = ClusterId(client), Settled(state)
    peers = HostPeers(client, state, section.bgp, host.name, config.controller.lease_namespace)
    l2 = L2Driver(
        host.role,
        host.name,
        section.l2,
        l2_command(),
        cluster=cluster,
        pin_path=host.l2_pin_path,
        selectors=host.selectors,
        node_addresses=host.node_addresses,
        requeue=state.subscribers.mark,
        undecided=settled,
    )
    bgp = bgp_driver(
        section.bgp,
        peers=peers,
        requeue=state.subscribers.mark,
        role=host.role,
        host=host.name,
        undecided=settled,
    )
    # An address that moves from one method to the other is announced by both for a moment.
    l2.announced_elsewhere, bgp.announced_elsewhere = bgp.announces, l2.announces
    settled.drivers = [l2]
    if isinstance(bgp, BirdDriver):
        peers.changed = bgp.peers_changed
        peers.established = bgp.established_peers
    else:
        settled.drivers = [l2, bgp]
    components: list[Component] = [cluster, l2, peers, bgp, settled]
    if section.withdraw_without_api_s is not None:
        components.append(WithoutApi(freshness, section.withdraw_without_api_s, [l2, bgp]))
    return Announcers([l2, bgp], components, settled)


def leftovers(config: Config, host: AnnouncingHost) -> Sequence[Component]:
    """Return the components that remove what this role has announced, with this or an earlier
    configuration, and hand it over before that."""
    section = config.announce.bgp if config.announce is not None else BgpConfig()
    return [NoL2(host.role, host.l2_pin_path), NoBgp(section, role=host.role)]
