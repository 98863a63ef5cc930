"""The routes of a lab's router to the gateway routers of the nodes: `python -m
fairlead.lab.ovn.routes LAB`.

In: the run directory of a lab with gateway routers, whose API server and OVN are up. Out: until
SIGTERM, each address of a Service of class ovn has a route to the gateway routers of the nodes with
ready pods, weighted by their number. The operator of a real site arranges such routes, by the rules
of `plan.announcing_nodes`. A gateway router becomes a next hop when its chassis has installed the
load balancers of the address, because OVN sends earlier packets back. It is removed as soon as the
API shows no ready pod on its node. Invariants: routes that this process did not write are not
changed; while the API server or a database is not reachable, routes stay."""

import asyncio
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import structlog

from fairlead.drivers.ovn import northbound, southbound
from fairlead.drivers.ovn.driver import INCREMENT
from fairlead.drivers.ovn.marks import NODE, VIP
from fairlead.errors import FairleadError
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, ObjectKey, Resource, Service
from fairlead.kube.reflector import Reflector
from fairlead.lab import namespace
from fairlead.lab.background import run_until_sigterm
from fairlead.lab.ovn.edge import remote
from fairlead.lab.ovn.routers import OvnRouter, routers_of
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.topology import ROUTER, Topology
from fairlead.net.address import family_of, split_host_port
from fairlead.net.link import Nexthop, Rtnetlink
from fairlead.net.ovsdb import Changes, Database, Rows, Table
from fairlead.plan.addresses import held_by
from fairlead.plan.announce import admitted
from fairlead.plan.announcing_nodes import announcing_nodes
from fairlead.plan.classes import OVN
from fairlead.plan.service import class_of
from fairlead.state import State

log = structlog.get_logger()

ROUTERS = "Logical_Router"
NORTH_TABLES = {
    northbound.BALANCERS: Table(("vips", "external_ids")),
    northbound.GLOBAL: Table(("nb_cfg",)),
    ROUTERS: Table(("name", "load_balancer")),
}
SOUTH_TABLES = {southbound.CHASSIS: Table(("name", "nb_cfg"))}
RETRY_S = 1.0

Place = tuple[str, str]
"""An address of a Service, and the name of a gateway router."""


class Installed:
    """Which gateway routers serve which addresses, according to OVN. A load balancer is installed
    when the chassis of its router has reached a number of `nb_cfg` that is greater than the one at
    which the load balancer had its first backend there."""

    def __init__(self, routers: Iterable[OvnRouter]) -> None:
        self._chassis = {each.name: each.chassis[0].name for each in routers}
        self._numbers: dict[tuple[str, str], int] = {}
        """By row and router, the number that the chassis must reach."""

    def unknown(self, balancers: Rows, routers: Rows) -> Collection[tuple[str, str]]:
        """Return the rows with backends, each with its router, that have no number yet. Forget the
        rows that have lost their last backend."""
        present = {
            (uuid, name)
            for router in routers.values()
            if (name := router.string("name")) in self._chassis
            for uuid in router.strings("load_balancer")
            if uuid in balancers and any(balancers[uuid].map("vips").values())
        }
        self._numbers = {key: each for key, each in self._numbers.items() if key in present}
        return present - self._numbers.keys()

    def await_number(self, keys: Iterable[tuple[str, str]], number: int) -> None:
        """Regard these rows as installed when their chassis have reached this number."""
        self._numbers |= dict.fromkeys(keys, number)

    def places(self, balancers: Rows, chassis: Rows) -> Collection[Place]:
        """Return the addresses with the routers that have installed all of their load balancers."""
        reached = {each.string("name"): each.integer("nb_cfg") for each in chassis.values()}
        found: dict[Place, bool] = {}
        for (uuid, router), number in self._numbers.items():
            vip = balancers[uuid].map("external_ids").get(VIP) if uuid in balancers else None
            if vip is None or NODE not in balancers[uuid].map("external_ids"):
                continue  # a row of another program
            place = (split_host_port(vip)[0], router)
            found[place] = found.get(place, True) and (
                reached.get(self._chassis[router], 0) >= number
            )
        return {place for place, complete in found.items() if complete}


class Routes:
    """The process. `run` runs it until it is cancelled."""

    def __init__(self, client: Client, topology: Topology, directory: RunDirectory) -> None:
        self._client = client
        self._routers = routers_of(topology)
        self._default_class = f"fairlead.io/{directory.size().default_class}"
        self._state = State(())
        self._installed = Installed(self._routers)
        self._changed = asyncio.Event()
        self._written: dict[str, tuple[Nexthop, ...]] = {}
        self._north = Database(
            northbound.NAME, [remote(directory, "nb")], NORTH_TABLES, on_change=self._wake
        )
        self._south = Database(
            southbound.NAME, [remote(directory, "sb")], SOUTH_TABLES, on_change=self._wake
        )
        with namespace.inside(topology.namespace(ROUTER)):
            self._links = Rtnetlink()

    async def run(self) -> None:
        """Keep the routes up to date until cancelled."""
        state = self._state
        async with self._links, asyncio.TaskGroup() as group:
            group.create_task(self._north.run(), name="northbound database")
            group.create_task(self._south.run(), name="southbound database")
            for resource, update in (
                (NODES, state.update_nodes),
                (SERVICES, state.update_services),
                (ENDPOINT_SLICES, state.update_slices),
            ):
                group.create_task(self._follow(resource, update), name=resource.plural)
            group.create_task(self._keep(), name="routes")

    async def _follow(
        self, resource: Resource[Any], update: Callable[[Mapping[ObjectKey, Any]], None]
    ) -> None:
        async for changed in Reflector(self._client, resource).changes():
            update(changed)
            self._changed.set()

    def _wake(self, _: Changes) -> None:
        self._changed.set()

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not (self._north.synced and self._south.synced):
                continue
            try:
                await self._confirm()
                await self._write(self._wanted())
            except FairleadError as problem:
                log.warning("routes", problem=str(problem))
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _confirm(self) -> None:
        """Have the chassis confirm load balancers that are new, or have backends again."""
        north = self._north
        if new := self._installed.unknown(north.rows(northbound.BALANCERS), north.rows(ROUTERS)):
            (state,) = north.rows(northbound.GLOBAL).values()
            number = state.integer("nb_cfg") + 1
            await north.transact([INCREMENT])
            self._installed.await_number(new, number)

    def _wanted(self) -> Mapping[str, tuple[Nexthop, ...]]:
        """Return the routes: for each prefix its next hops."""
        state = self._state
        rows = self._north.rows(northbound.BALANCERS), self._south.rows(southbound.CHASSIS)
        places = self._installed.places(*rows)
        services: dict[str, list[Service]] = {}
        for service in state.services.values():
            if class_of(service, self._default_class) == OVN.name:
                for address in held_by(service):
                    services.setdefault(address, []).append(_local(service))
        found = {}
        for address, some in services.items():
            weights = announcing_nodes(state, address, some, admitted(state.nodes)).weights
            is_ipv6 = family_of(address) == "IPv6"
            hops = [
                Nexthop(router.addresses[is_ipv6], weight=weights[node.name])
                for router in self._routers
                for node in router.nodes
                if node.name in weights and (address, router.name) in places
            ]
            if hops:
                found[f"{address}/{128 if is_ipv6 else 32}"] = tuple(hops)
        return found

    async def _write(self, wanted: Mapping[str, tuple[Nexthop, ...]]) -> None:
        for prefix in self._written.keys() - wanted.keys():
            await self._links.delete_route(prefix)
            del self._written[prefix]
            log.info("no route any more", prefix=prefix)
        for prefix, hops in wanted.items():
            if self._written.get(prefix) != hops:
                await self._links.set_route(prefix, *hops)
                self._written[prefix] = hops
                log.info(
                    "route", prefix=prefix, hops=[f"{each.via} {each.weight}" for each in hops]
                )


def _local(service: Service) -> Service:
    """Return the Service with policy Local: a gateway router sends to the pods of its node alone,
    whatever the policy is."""
    spec = msgspec.structs.replace(service.spec, external_traffic_policy="Local")
    return msgspec.structs.replace(service, spec=spec)


if __name__ == "__main__":
    asyncio.run(run_until_sigterm(sys.argv[1], "routes", Routes))
