"""Carry out what a node does for its Services: nftables transactions, then the clean-up that a
transaction cannot do.

In: NodeService values. Out: the table `inet fairlead` of the network namespace in which the driver
was opened. Invariant: a frontend is never partly in force, because all its Changes that packets
meet are in one transaction; nor is a Service, unless it is too large for one. Where two Services
want the same frontend, one of them lacks this frontend and nothing else (see `settled`). Between
runs the kernel holds the truth: a successor reads it back (`read(None)`) and changes only what
differs.

After the transaction, outside of it: flows of UDP and SCTP to endpoints that serve no more are
forgotten (a client that keeps its port would otherwise talk to nobody until it pauses), and so are
clients remembered for gone endpoints (session affinity). Neither is lost by a failure: to whom
flows may lead is written down only once the others are forgotten, so what is left to do is a
difference to the plan; remembered clients are looked through again whenever the table is read."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import structlog

from fairlead.drivers import Component, LookAgain, never_again
from fairlead.drivers.need import Need
from fairlead.drivers.nodeproxy.affinity import AffinityMaps
from fairlead.drivers.nodeproxy.aftermath import FLOWS, Endpoint, flow_answers, forgettable, losing
from fairlead.drivers.nodeproxy.elements import (
    OWNERLESS,
    Change,
    Element,
    Spec,
    affinity_map_of,
    difference,
    frontend_of,
    rendered,
)
from fairlead.drivers.nodeproxy.needs import needs
from fairlead.drivers.nodeproxy.skeleton import skeleton
from fairlead.drivers.nodeproxy.table import Table, remove_table
from fairlead.drivers.nodeproxy.transactions import (
    ELEMENTS_PER_TRANSACTION,
    NOTHING,
    PrecedenceOf,
    batches,
    carried_out,
    effective,
    frontends,
    is_exclusive,
    settled,
)
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.net.conntrack import Conntrack
from fairlead.plan.conflicts import Basis, Precedence

log = structlog.get_logger()

LOOK_S = 2.0
"""Time between two looks whether others have taken our rules away."""
UNHEALTHY_AFTER_S = 60.0
FORGIVEN_AFTER_S = 150.0
"""What was asked for so long ago and not since has been dropped: what still matters is asked for
every minute at least."""

AT_ONCE_S = 0.001
"""In so long is looked again at a Service that has lost a frontend: in its next pass, and not in
this one."""


class _Asked(NamedTuple):
    """When something was asked for, first and last."""

    first: float
    last: float


class NodeProxyDriver(Component):
    """Services on this node, as kube-proxy would serve them. `open` it first, in the network
    namespace that it is to serve."""

    name = "nodeproxy"

    def __init__(
        self,
        *,
        node_addresses: Callable[[], Sequence[str]],
        pod_cidrs: Sequence[str],
        pod_interfaces: Sequence[str] = (),
        node_port_addresses: Callable[[], Sequence[str]] | None = None,
        service_cidrs: Sequence[str] = (),
        precedence_of: PrecedenceOf = lambda service, *_: Precedence(Basis.SHOWN, "", service),
        look_again: LookAgain = never_again,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`node_addresses`: the node's primary address of each family, asked for at each use.
        NodePorts answer there and nowhere else, unless `node_port_addresses` says where, asked for
        likewise. `pod_cidrs`: where the cluster's pods live; callers from there keep their address.
        `pod_interfaces`: where packets of this node's pods come in, instead. Neither: pods cannot
        be told from others, so nothing that calls a ClusterIP is masqueraded and pods are treated
        as callers from outside. `service_cidrs`: ClusterIPs that no Service has are dropped rather
        than routed out. `precedence_of`: of two Services that want the same frontend, the one with the
        first precedence has it. `look_again`: for all Services whose rules other programs took
        away. `timeout_s`: for one transaction. `clock`: seconds that never go back, by which
        health is told."""
        self._node_addresses = node_addresses
        self._clock = clock
        self._node_port_addresses = node_port_addresses or node_addresses
        self._pods = () if pod_interfaces else tuple(ip_network(cidr) for cidr in pod_cidrs)
        self._skeleton = skeleton(pod_cidrs, service_cidrs, pod_interfaces)
        self._precedence_of = precedence_of
        self._look_again = look_again
        self._timeout_s = timeout_s
        self._table: Table | None = None
        self._tracked = Conntrack()
        self._turn = asyncio.Lock()
        """Whoever reads or writes the table, or what is known of it, has it from the first step to
        the last."""
        self._known: dict[ServiceKey, Spec] | None = None
        """What the kernel holds, by what was read and written; None: to be read again."""
        self._affinity = AffinityMaps()
        self._owners: dict[str, ServiceKey] = {}
        """Who has each frontend: two Services may want the same."""
        self._pending: dict[ServiceKey | None, _Asked] = {}
        """What is not carried out yet: the Changes of a Service; None: the making or reading of the
        table."""
        self._compared: dict[ServiceKey | None, _Asked] = {}
        """Changes that were pending at the last reading, and have not been requested since."""

    async def open(self) -> None:
        """Make sure that the base chains are there, and adopt what the table holds. Raises Refused
        without libnftables or without the right to use it. Where the table cannot be read or
        changed in time, what is there stays in force, and `read` tries again."""
        if self._table is None:
            self._table = Table(self._skeleton, timeout_s=self._timeout_s)
        try:
            async with self._turn:
                await self._adopt(self._table)
        except Unavailable:
            # The loop's first read meets it again, says so and tries on; a process that ended here
            # would do the same, slower.
            self._known = None

    async def close(self, *, remove: bool = False) -> None:
        """Let go of the table; with `remove`, delete it and so all that this driver made. Traffic
        goes on without it."""
        async with self._turn:
            if self._table is not None:
                await self._table.close(remove=remove)
            self._tracked.close()
            self._table, self._known = None, None

    async def remove(self) -> Sequence[str]:
        """See `remove_table`."""
        removed = await remove_table()
        return ("the table inet fairlead: this node serves no Services now",) if removed else ()

    async def requirements(self) -> Sequence[Need]:
        """Room for tracked flows, which kube-proxy sees to where it runs."""
        return needs()

    async def run(self) -> None:
        """Have rules that others took away (`nft flush ruleset`, a firewall that is loaded anew)
        come back, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if (lost := await self._disturbed()) is not None:
                    log.warning(
                        "another process has taken rules of the table inet fairlead away: it is "
                        "made anew"
                    )
                    self._look_again(lost.keys() - {OWNERLESS})
                    await self.read(None)  # makes the table, also where no Service has rules
            except Unavailable as problem:
                log.warning("whether our rules are there is not known", problem=str(problem))

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, Spec]:
        """The elements of each Service. Services without an address to answer on are left out."""
        node_addresses, node_port_addresses = self._node_addresses(), self._node_port_addresses()
        specs = {
            key: rendered(
                intent,
                node_addresses,
                node_port_addresses,
                self._affinity.of(key) if intent.affinity_timeout_s else 0,
            )
            for key, intent in intents.items()
        }
        return {key: spec for key, spec in specs.items() if spec}

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """What goes and what comes, Service by Service. Pure."""
        return difference(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """None: what the kernel holds, elements that belong to no Service included (key `("", "inet
        fairlead")`). It is listed anew only if anybody else has changed any nftables rule since:
        100,000 elements take seconds. An `apply` that is under way comes before or after as a
        whole."""
        table = self._opened()
        async with self._turn:
            known = self._known
            if known is None or (keys is None and not await table.untouched()):
                known = await self._adopt(table)
            if keys is None:
                return dict(known)
            # What differs from the plan is asked for again at once; of the others nothing is left
            # to carry out.
            self._compared = {
                key: asked for key, asked in self._compared.items() if key not in keys
            }
            self._compared |= {
                key: asked for key in keys if (asked := self._pending.pop(key, None)) is not None
            }
            return {key: known[key] for key in keys if key in known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Apply all Changes of a Service in one transaction, with many Services in each. If there
        are too many Changes for one transaction, several are used, and other calls may run between
        two of them; of a Service that is too large for one transaction, every frontend changes as a
        whole.

        If two Services want the same frontend, the first in order gets it. If it is the later one,
        a Service gets everything else and is unavailable in part, because the other Service may be
        deleted. If it is the earlier one, it takes the frontend over, and the other Service is
        planned again. A Service whose stale flows could not be deleted is unavailable, though its
        rules are in force. Raises the kernel's error if the kernel refuses a transaction; the table
        is then read again."""
        table = self._opened()
        asked = {change.service for change in changes}
        self._ask(asked)
        large = sum(len(change.elements) for change in changes) > ELEMENTS_PER_TRANSACTION
        async with self._turn:
            known = await self._current(table)
            # With many Changes, those that are in force already are determined part by part.
            settling = settled(
                known,
                self._owners,
                changes if large else effective(known, changes),
                self._precedence_of,
            )
            before = {key: known.get(key, NOTHING) for key in asked | settling.lacking.keys()}
            outcomes = {
                key: Outcome("unavailable", why, in_part=True)
                if key in asked
                else Outcome("done", again_s=AT_ONCE_S)
                for key, why in settling.lacking.items()
            }
            if not large:
                return outcomes | await self._at_once(table, asked, before, settling.changes)
        return outcomes | await self._in_parts(table, asked, before, settling.changes)

    async def _at_once(
        self,
        table: Table,
        asked: Collection[ServiceKey],
        before: Mapping[ServiceKey, Spec],
        changes: Sequence[Change],
    ) -> dict[ServiceKey, Outcome]:
        """Apply all Changes without letting other calls run in between."""
        met, noted = _parted(changes)
        for batch in batches(met):
            await self._commit(table, batch)
            self._record(await self._current(table), batch)
        self._done(asked)  # includes Services for which there was nothing to do
        await self._forget_clients(table, before)
        failed = await self._forget_flows(noted)
        for batch in batches([change for change in noted if change.service not in failed]):
            await self._commit(table, batch)
            self._record(await self._current(table), batch)
        if failed:
            # a frontend may have passed to another Service: the table has to be read again
            self._known = None
        return failed

    async def _in_parts(
        self,
        table: Table,
        asked: Collection[ServiceKey],
        before: Mapping[ServiceKey, Spec],
        changes: Sequence[Change],
    ) -> dict[ServiceKey, Outcome]:
        """The same, but other calls may run between transactions."""
        met, noted = await asyncio.to_thread(_parted, changes)
        await self._commit_in_parts(table, asked, met)
        async with self._turn:
            await self._current(table)
            self._done(asked)
            await self._forget_clients(table, before)
            failed = await self._forget_flows(noted)
        await self._commit_in_parts(
            table, (), [change for change in noted if change.service not in failed]
        )
        if failed:
            self._known = None
        return failed

    async def _commit_in_parts(
        self, table: Table, asked: Iterable[ServiceKey], changes: Sequence[Change]
    ) -> None:
        """Apply all parts, and update the knowledge of these Services once, at the end: copying a
        million elements for each part would take longer than the kernel's work. After a failure the
        table is read again. The node stays healthy for as long as the kernel takes parts: each part
        starts the time of the Services in `asked` again."""
        done = False
        try:
            for batch in await asyncio.to_thread(lambda: list(batches(changes))):
                async with self._turn:
                    await self._commit(table, effective(await self._current(table), batch))
                    self._own(batch)
                    self._done(asked)
                    self._ask(asked)
            async with self._turn:
                await asyncio.to_thread(self._record, await self._current(table), changes)
            done = True
        finally:
            if not done:
                self._known = None

    async def disturbed(self) -> bool:
        """Whether somebody else has taken rules of ours away, or all; then what was known counts no
        more, and the next `read` or `apply` makes the table anew. Elements that others took show
        when everything is read. Raises Unavailable."""
        return await self._disturbed() is not None

    async def _disturbed(self) -> Mapping[ServiceKey, Spec] | None:
        """What was known of the table until others took rules away; None: it is as it was."""
        table = self._opened()
        async with self._turn:
            if self._known is None or await table.untouched() or await table.intact():
                return None
            known, self._known = self._known, None
            return known

    def healthy(self) -> bool:
        """Whether the kernel takes what it is given: False while something that was asked for a
        minute ago is not carried out, as in kube-proxy."""
        now = self._clock()
        return not any(
            now - asked.first >= UNHEALTHY_AFTER_S and now - asked.last <= FORGIVEN_AFTER_S
            for asked in self._pending.values()
        )

    def _opened(self) -> Table:
        if self._table is None:
            raise RuntimeError("the node proxy is not open")
        return self._table

    async def _adopt(self, table: Table) -> dict[ServiceKey, Spec]:
        self._known = None
        self._ask((None,))
        known = await table.adopt()
        self._owners = {
            element.key: key for key, spec in known.items() for element in frontends(spec)
        }
        self._affinity.adopt(known)
        # Whoever was remembered while nobody looked, or could not be forgotten when it was time.
        await self._forget(table, await table.clients(), known.values())
        self._known = known
        self._done((None,))
        return known

    async def _current(self, table: Table) -> dict[ServiceKey, Spec]:
        """What the kernel holds, which is read again if it is not known."""
        return await self._adopt(table) if self._known is None else self._known

    async def _commit(self, table: Table, batch: Sequence[Change]) -> None:
        if not batch:
            return
        known, self._known = self._known, None  # until it is certain that the kernel has the batch
        try:
            await table.commit(batch)
        except FairleadError as error:
            raise _for_the_loop(error) from error
        self._known = known

    async def _forget_flows(self, noted: Sequence[Change]) -> dict[ServiceKey, Outcome]:
        """Delete the flows that `noted` makes stale. Returns the Services for which that failed:
        their notes are unchanged, so the next pass has the same to do."""
        answers: dict[ServiceKey, Mapping[int, Mapping[Endpoint, frozenset[Endpoint]]]] = {}
        for service, changes in groupby(
            sorted(noted, key=attrgetter("service")), key=attrgetter("service")
        ):
            before = (self._known or {}).get(service, NOTHING)
            if found := flow_answers(before, carried_out(before, changes)):
                answers[service] = found
        try:
            for protocol in sorted({each for found in answers.values() for each in found}):
                stale = {
                    frontend: serving
                    for found in answers.values()
                    for frontend, serving in found.get(protocol, {}).items()
                }
                await self._tracked.delete_stale(protocol, stale)
        except Unavailable as error:
            # The rules are in force: connections that begin now are served.
            return dict.fromkeys(answers, Outcome("unavailable", str(error), in_part=True))
        return {}

    async def _forget_clients(self, table: Table, before: Mapping[ServiceKey, Spec]) -> None:
        """Forget the clients of endpoints that these Services no longer have. Only the maps of
        these Services are searched, and only if an endpoint was removed. Call it before flows are
        deleted: a remembered client would begin the same stale flow again."""
        known = await self._current(table)
        affine = {key: spec for key, spec in before.items() if key in self._affinity}
        self._affinity.release(
            key for key in affine if affinity_map_of(known.get(key, NOTHING)) is None
        )
        maps: set[int] = set()
        frontends: set[str] = set()
        for key, spec in affine.items():
            if (number := affinity_map_of(spec)) is not None and (
                lost := losing(spec, known.get(key, NOTHING))
            ):
                maps.add(number)
                frontends |= lost
        if maps:
            self._known = None  # a reading repeats it if it fails
            clients = [
                each for each in await table.clients(maps) if frontend_of(each.key) in frontends
            ]
            await self._forget(table, clients, [known.get(key, NOTHING) for key in affine])
            self._known = known

    async def _forget(
        self, table: Table, clients: Sequence[Element], specs: Iterable[Spec]
    ) -> None:
        if clients:
            await table.forget(forgettable(clients, specs, self._pods, self._node_port_addresses()))

    def _record(self, known: dict[ServiceKey, Spec], batch: Sequence[Change]) -> None:
        """Note what the kernel holds now."""
        for service, changes in groupby(
            sorted(batch, key=attrgetter("service")), key=attrgetter("service")
        ):
            spec = carried_out(known.get(service, NOTHING), changes)
            if spec:
                known[service] = spec
            else:
                known.pop(service, None)
        if (
            OWNERLESS in known
        ):  # what a Service has taken up is nobody's no more: else it would be taken away from it again
            taken = {
                (change.map, element.key)
                for change in batch
                if change.verb == "add"
                for element in change.elements
            }
            left = frozenset(
                each for each in known.pop(OWNERLESS) if (each.map, each.key) not in taken
            )
            known |= {OWNERLESS: left} if left else {}
        self._own(batch)

    def _own(self, batch: Sequence[Change]) -> None:
        """Record which Service has which frontend now."""
        for change in filter(lambda change: is_exclusive(change.map), batch):
            for element in change.elements:
                if change.verb == "add":
                    self._owners[element.key] = change.service
                elif self._owners.get(element.key) == change.service:
                    del self._owners[element.key]

    def _ask(self, keys: Iterable[ServiceKey | None]) -> None:
        now = self._clock()
        self._pending = {
            key: asked
            for key, asked in self._pending.items()
            if now - asked.last <= FORGIVEN_AFTER_S
        }
        for key in keys:
            before = self._compared.pop(key, None) or self._pending.get(key)
            self._pending[key] = _Asked(before.first if before is not None else now, now)

    def _done(self, keys: Iterable[ServiceKey | None]) -> None:
        for key in keys:
            self._pending.pop(key, None)


def _parted(changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Elements that packets meet, and elements that record to which endpoints flows may lead."""
    met = [change for change in changes if not change.map.startswith(FLOWS)]
    return met, [change for change in changes if change.map.startswith(FLOWS)]


def _for_the_loop(error: FairleadError) -> FairleadError:
    """A conflict means that somebody else changed our table: it is read again, and the same may
    then succeed."""
    return (
        Unavailable(f"{error.message}; the table was changed by somebody else")
        if isinstance(error, Conflict)
        else error
    )
