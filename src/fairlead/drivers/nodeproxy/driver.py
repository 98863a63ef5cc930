"""The driver of the service proxy: nftables transactions, and the clean-up that a transaction
cannot do.

In: NodeService values. Out: the table `inet fairlead` of the network namespace in which the driver
was opened. Invariants: a frontend is never partly in force, because all its Changes that packets
encounter are in one transaction. The same holds for a Service, unless it is too large for one
transaction. If two Services want the same frontend, one of them lacks this frontend and nothing
else (see `resolve`). Between runs the kernel holds the state: the next process reads it
(`read(None)`) and changes only what differs.

After a transaction, the driver deletes flows of UDP and SCTP to endpoints that no longer serve;
otherwise a client that keeps its source port would reach no endpoint until it pauses. It also
deletes clients that are remembered with gone endpoints (session affinity). A failure loses neither.
The endpoints to which flows may lead are recorded only after the other flows were deleted, so an
unfinished clean-up is a difference to the plan. Remembered clients are searched again whenever the
table is read."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import structlog

from fairlead.drivers import Component, Requeue, no_requeue
from fairlead.drivers.nodeproxy.affinity import AffinityMaps
from fairlead.drivers.nodeproxy.cleanup import (
    FLOWS,
    Endpoint,
    flow_endpoints,
    losing_endpoints,
    stale_clients,
)
from fairlead.drivers.nodeproxy.elements import (
    NO_SERVICE,
    Change,
    Element,
    Spec,
    affinity_map_of,
    difference,
    elements_of,
    frontend_of,
)
from fairlead.drivers.nodeproxy.requirements import requirements
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
    resolve,
)
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.net.conntrack import Conntrack
from fairlead.plan.conflicts import Basis, Precedence

log = structlog.get_logger()

CHECK_INTERVAL_S = 2.0
"""Interval at which the driver checks whether another program has removed our rules."""
UNHEALTHY_AFTER_S = 60.0
"""The node proxy is unhealthy when a change has been pending for this time, as in kube-proxy."""
ABANDONED_AFTER_S = 150.0
"""A pending change that was not requested again within this time counts as abandoned. The loop
requests a change that still matters at least every minute."""

READINGS, READING_INTERVAL_S = 6, 0.02
"""How often the table is read at most until two readings are equal, and the time between them."""
REQUEUE_S = 0.001
"""A Service that lost a frontend is reconciled again after this delay, so in a new pass."""


class _Requested(NamedTuple):
    """When a change was first and last requested."""

    first: float
    last: float


class NodeProxyDriver(Component):
    """Driver of the service proxy, which serves Services as kube-proxy does. Call `open` first, in
    the network namespace to be served."""

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
        requeue: Requeue = no_requeue,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up the driver without touching the kernel.

        - `node_addresses`: returns the node's primary address of each family; called at each use.
        - `pod_cidrs`: the addresses of the cluster's pods. Their connections keep their source
          address.
        - `pod_interfaces`: the interfaces at which packets of this node's pods arrive; used instead
          of `pod_cidrs`. Without both, pods cannot be distinguished from other clients: connections
          to a ClusterIP are never masqueraded, and pods are treated as external clients.
        - `node_port_addresses`: returns the addresses at which NodePorts answer; called at each
          use. By default these are the `node_addresses`.
        - `service_cidrs`: packets to ClusterIPs in these ranges that no Service has are dropped
          instead of being routed out.
        - `precedence_of`: if two Services want the same frontend, the one with the first precedence
          gets it.
        - `requeue`: called with all Services whose rules another program removed.
        - `timeout_s`: time-out of one transaction.
        - `clock`: monotonic seconds, for `healthy`."""
        self._node_addresses = node_addresses
        self._clock = clock
        self._node_port_addresses = node_port_addresses or node_addresses
        self._pods = () if pod_interfaces else tuple(ip_network(cidr) for cidr in pod_cidrs)
        self._skeleton = skeleton(pod_cidrs, service_cidrs, pod_interfaces)
        self._precedence_of = precedence_of
        self._requeue = requeue
        self._timeout_s = timeout_s
        self._table: Table | None = None
        self._tracked = Conntrack()
        self._turn = asyncio.Lock()
        """Held by each operation that reads or writes the table, or the knowledge about it, from
        the first to the last step."""
        self._known: dict[ServiceKey, Spec] | None = None
        """What the kernel holds, according to what was read and written. None: it must be read
        again."""
        self._affinity = AffinityMaps()
        self._owners: dict[str, ServiceKey] = {}
        """The Service that has each frontend. Several Services may want the same frontend."""
        self._pending: dict[ServiceKey | None, _Requested] = {}
        """Pending work: the Changes of a Service, or under None the creation or reading of the
        table."""
        self._compared: dict[ServiceKey | None, _Requested] = {}
        """Pending work that the last `read` took over for comparison with the plan, and that has
        not been requested since."""

    async def open(self) -> None:
        """Create the table if it is missing, and adopt what it holds. Raise Refused without
        libnftables or without the right to use it. If the table cannot be read or changed in time,
        its present rules stay in force, and `read` tries again."""
        if self._table is None:
            self._table = Table(self._skeleton, timeout_s=self._timeout_s)
        try:
            async with self._turn:
                await self._adopt(self._table)
        except Unavailable:
            # The loop's first read gets the same error, reports it and tries again. To end the
            # process here would do the same, but slower.
            self._known = None

    async def close(self, *, remove: bool = False) -> None:
        """Release the resources of this process; traffic continues. With `remove`, delete the
        table, which contains everything that this driver made."""
        async with self._turn:
            if self._table is not None:
                await self._table.close(remove=remove)
            self._tracked.close()
            self._table, self._known = None, None

    async def remove(self) -> Sequence[str]:
        """See `remove_table`."""
        removed = await remove_table()
        return ("the table inet fairlead: this node no longer serves Services",) if removed else ()

    async def requirements(self) -> Sequence[SysctlRequirement]:
        """Return the requirement of space for tracked flows. kube-proxy sets this limit on its
        nodes."""
        return requirements()

    async def run(self) -> None:
        """Until cancelled: restore rules that another program removed (`nft flush ruleset`, a
        reload of a firewall)."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                if (lost := await self._disturbed()) is not None:
                    log.warning(
                        "another process has removed rules of the table inet fairlead: recreating "
                        "the table"
                    )
                    self._requeue(lost.keys() - {NO_SERVICE})
                    await self.read(None)  # recreates the table, even if no Service has rules
            except Unavailable as problem:
                log.warning("checking the rules failed", problem=str(problem))

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, Spec]:
        """Return the elements of each Service. Services without an address to serve are left out.
        Pure, except that a Service with session affinity may get the number of its map here."""
        node_addresses, node_port_addresses = self._node_addresses(), self._node_port_addresses()
        specs = {
            key: elements_of(
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
        """Return the elements to delete and to add for each Service. Pure."""
        return difference(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """Return the elements that the kernel holds. With None, elements without a Service are
        included (key `("", "inet fairlead")`). The maps in the kernel are listed only if another
        program has changed any nftables rule since the last listing, because listing 100,000
        elements takes seconds. A concurrent `apply` is seen as a whole or not at all."""
        table = self._opened()
        async with self._turn:
            known = self._known
            if known is None or (keys is None and not await table.untouched()):
                known = await self._adopt(table)
            if keys is None:
                return dict(known)
            # The loop requests at once what still differs from the plan. If it requests nothing for
            # a Service, the Service's pending work is done.
            self._compared = {
                key: requested for key, requested in self._compared.items() if key not in keys
            }
            self._compared |= {
                key: requested
                for key in keys
                if (requested := self._pending.pop(key, None)) is not None
            }
            return {key: known[key] for key in keys if key in known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Apply all Changes of a Service in one transaction, and many Services per transaction. If
        there are too many Changes for one transaction, several are used, and other calls may run
        between two of them. If a Service is too large for one transaction, each of its frontends
        still changes as a whole.

        If two Services want the same frontend, the first in order of precedence gets it, also if
        the other one has it. The other Service gets everything else and is unavailable in part,
        because the first may be deleted; if it lost the frontend, it is reconciled again. A Service
        whose stale flows could not be deleted is unavailable, though its rules are in force. If the
        kernel rejects a transaction, raise its error; the table is then read again."""
        table = self._opened()
        requested = {change.service for change in changes}
        self._request(requested)
        large = sum(len(change.elements) for change in changes) > ELEMENTS_PER_TRANSACTION
        async with self._turn:
            known = await self._current(table)
            # If there are many Changes, `_commit_in_parts` filters out those that are in force
            # already.
            resolution = resolve(
                known,
                self._owners,
                changes if large else effective(known, changes),
                self._precedence_of,
            )
            before = {
                key: known.get(key, NOTHING) for key in requested | resolution.conflicts.keys()
            }
            outcomes = {
                key: Outcome("unavailable", why, in_part=True)
                if key in requested
                else Outcome("done", again_s=REQUEUE_S)
                for key, why in resolution.conflicts.items()
            }
            if not large:
                return outcomes | await self._at_once(table, requested, before, resolution.changes)
        return outcomes | await self._in_parts(table, requested, before, resolution.changes)

    async def _at_once(
        self,
        table: Table,
        requested: Collection[ServiceKey],
        before: Mapping[ServiceKey, Spec],
        changes: Sequence[Change],
    ) -> dict[ServiceKey, Outcome]:
        """Apply all Changes without letting other calls run in between."""
        rules, flow_records = _separate(changes)
        for batch in batches(rules):
            await self._commit(table, batch)
            self._record(await self._current(table), batch)
        self._done(requested)  # includes Services for which there was nothing to do
        await self._delete_clients(table, before)
        failed = await self._delete_flows(flow_records)
        for batch in batches([change for change in flow_records if change.service not in failed]):
            await self._commit(table, batch)
            self._record(await self._current(table), batch)
        if failed:
            # A frontend may have passed to another Service, so the table must be read again.
            self._known = None
        return failed

    async def _in_parts(
        self,
        table: Table,
        requested: Collection[ServiceKey],
        before: Mapping[ServiceKey, Spec],
        changes: Sequence[Change],
    ) -> dict[ServiceKey, Outcome]:
        """Apply all Changes. Other calls may run between two transactions."""
        rules, flow_records = await asyncio.to_thread(_separate, changes)
        await self._commit_in_parts(table, requested, rules)
        async with self._turn:
            await self._current(table)
            self._done(requested)
            await self._delete_clients(table, before)
            failed = await self._delete_flows(flow_records)
        await self._commit_in_parts(
            table, (), [change for change in flow_records if change.service not in failed]
        )
        if failed:
            self._known = None
        return failed

    async def _commit_in_parts(
        self, table: Table, requested: Iterable[ServiceKey], changes: Sequence[Change]
    ) -> None:
        """Apply all parts, and update what is known of these Services once, at the end: copying a
        million elements for each part would take longer than the kernel's work. After a failure the
        table is read again. Each part restarts the time of the Services in `requested`, so the node
        stays healthy while the kernel accepts parts."""
        done = False
        try:
            for batch in await asyncio.to_thread(lambda: list(batches(changes))):
                async with self._turn:
                    await self._commit(table, effective(await self._current(table), batch))
                    self._own(batch)
                    self._done(requested)
                    self._request(requested)
            async with self._turn:
                await asyncio.to_thread(self._record, await self._current(table), changes)
            done = True
        finally:
            if not done:
                self._known = None

    async def disturbed(self) -> bool:
        """Whether another program has removed some or all of our rules. If so, the next `read` or
        `apply` recreates the table. Removed elements are not detected here, but by the next full
        `read`. Raise Unavailable if the kernel does not answer in time."""
        return await self._disturbed() is not None

    async def _disturbed(self) -> Mapping[ServiceKey, Spec] | None:
        """Return what was known of the table if another program has removed rules since, and
        discard that knowledge. Return None if all rules are present."""
        table = self._opened()
        async with self._turn:
            if self._known is None or await table.untouched() or await table.intact():
                return None
            known, self._known = self._known, None
            return known

    def healthy(self) -> bool:
        """Whether the node proxy is in step with the plan: False while a change has been pending
        for UNHEALTHY_AFTER_S, as in kube-proxy."""
        now = self._clock()
        return not any(
            now - requested.first >= UNHEALTHY_AFTER_S and now - requested.last <= ABANDONED_AFTER_S
            for requested in self._pending.values()
        )

    def _opened(self) -> Table:
        if self._table is None:
            raise RuntimeError("the node proxy is not open")
        return self._table

    async def _adopt(self, table: Table) -> dict[ServiceKey, Spec]:
        """Read the table, creating it if needed, and store and return what it holds."""
        before, self._known = self._known, None
        self._request((None,))
        known = await self._read(table, before or {})
        self._owners = {
            element.key: key for key, spec in known.items() for element in frontends(spec)
        }
        self._affinity.adopt(known)
        # Clients may have been remembered while no process ran, or an earlier deletion may have
        # failed.
        await self._delete_stale(table, await table.clients(), known.values())
        self._known = known
        self._done((None,))
        return known

    @staticmethod
    async def _read(table: Table, expected: Mapping[ServiceKey, Spec]) -> dict[ServiceKey, Spec]:
        """Read the table. If it does not hold what is expected, read it until two readings are
        equal: while the kernel grows or shrinks the hash table of a set, which takes some
        milliseconds, elements may be missing in a listing."""
        found = await table.adopt()
        for _ in range(READINGS - 1):
            if await asyncio.to_thread(expected.__eq__, found):
                break
            await asyncio.sleep(READING_INTERVAL_S)
            expected, found = found, await table.adopt()
        return found

    async def _current(self, table: Table) -> dict[ServiceKey, Spec]:
        """Return what the kernel holds, after reading it if that is not known."""
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

    async def _delete_flows(self, flow_records: Sequence[Change]) -> dict[ServiceKey, Outcome]:
        """Delete the flows that the Changes of flow records make stale. Return the Services for
        which that failed. Their records stay unchanged, so that the next pass tries the same."""
        answers: dict[ServiceKey, Mapping[int, Mapping[Endpoint, frozenset[Endpoint]]]] = {}
        for service, changes in groupby(
            sorted(flow_records, key=attrgetter("service")), key=attrgetter("service")
        ):
            before = (self._known or {}).get(service, NOTHING)
            if found := flow_endpoints(before, carried_out(before, changes)):
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
            # The rules are in force, so new connections are served.
            return dict.fromkeys(answers, Outcome("unavailable", str(error), in_part=True))
        return {}

    async def _delete_clients(self, table: Table, before: Mapping[ServiceKey, Spec]) -> None:
        """Delete remembered clients of endpoints that these Services no longer have. Only the maps
        of these Services are searched, and only if an endpoint was removed. Call it before flows
        are deleted: a client that is still remembered would start the same stale flow again."""
        known = await self._current(table)
        affine = {key: spec for key, spec in before.items() if key in self._affinity}
        self._affinity.release(
            key for key in affine if affinity_map_of(known.get(key, NOTHING)) is None
        )
        maps: set[int] = set()
        frontends: set[str] = set()
        for key, spec in affine.items():
            if (number := affinity_map_of(spec)) is not None and (
                lost := losing_endpoints(spec, known.get(key, NOTHING))
            ):
                maps.add(number)
                frontends |= lost
        if maps:
            self._known = None  # if this fails, the next reading of the table repeats it
            clients = [
                each for each in await table.clients(maps) if frontend_of(each.key) in frontends
            ]
            await self._delete_stale(table, clients, [known.get(key, NOTHING) for key in affine])
            self._known = known

    async def _delete_stale(
        self, table: Table, clients: Sequence[Element], specs: Iterable[Spec]
    ) -> None:
        if clients:
            await table.forget(
                stale_clients(clients, specs, self._pods, self._node_port_addresses())
            )

    def _record(self, known: dict[ServiceKey, Spec], batch: Sequence[Change]) -> None:
        """Update what is known of the kernel by a committed batch."""
        for service, changes in groupby(
            sorted(batch, key=attrgetter("service")), key=attrgetter("service")
        ):
            spec = carried_out(known.get(service, NOTHING), changes)
            if spec:
                known[service] = spec
            else:
                known.pop(service, None)
        # An ownerless element that a Service now has is no longer ownerless. Otherwise the next
        # pass would delete it although the Service needs it.
        if NO_SERVICE in known:
            taken = {
                (change.map, element.key)
                for change in batch
                if change.verb == "add"
                for element in change.elements
            }
            left = frozenset(
                each for each in known.pop(NO_SERVICE) if (each.map, each.key) not in taken
            )
            known |= {NO_SERVICE: left} if left else {}
        self._own(batch)

    def _own(self, batch: Sequence[Change]) -> None:
        """Record which Service has which frontend now."""
        for change in filter(lambda change: is_exclusive(change.map), batch):
            for element in change.elements:
                if change.verb == "add":
                    self._owners[element.key] = change.service
                elif self._owners.get(element.key) == change.service:
                    del self._owners[element.key]

    def _request(self, keys: Iterable[ServiceKey | None]) -> None:
        """Record that work for these keys is requested now, and drop abandoned work."""
        now = self._clock()
        self._pending = {
            key: requested
            for key, requested in self._pending.items()
            if now - requested.last <= ABANDONED_AFTER_S
        }
        for key in keys:
            before = self._compared.pop(key, None) or self._pending.get(key)
            self._pending[key] = _Requested(before.first if before is not None else now, now)

    def _done(self, keys: Iterable[ServiceKey | None]) -> None:
        """Record that the work for these keys is done."""
        for key in keys:
            self._pending.pop(key, None)


def _separate(changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Separate Changes of elements that packets encounter from Changes of flow records, which state
    to which endpoints flows may lead."""
    rules = [change for change in changes if not change.map.startswith(FLOWS)]
    return rules, [change for change in changes if change.map.startswith(FLOWS)]


def _for_the_loop(error: FairleadError) -> FairleadError:
    """Turn a conflict into Unavailable. A conflict means that another program has changed our
    table; after the table is read again, the same change may succeed."""
    return (
        Unavailable(f"{error.message}; another program has changed the table")
        if isinstance(error, Conflict)
        else error
    )
