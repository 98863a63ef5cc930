"""Carry out what a node does for its Services: nftables transactions, then the clean-up that a transaction cannot do.

In: NodeService values. Out: the table `inet fairlead` of the network namespace in which the driver was opened.
Invariant: a Service is never half in force, because all its Changes go in one transaction. Between runs the kernel holds the
truth: a successor reads it back (`read(None)`) and touches only what differs.

After the transaction, outside of it: UDP flows to endpoints that are gone are forgotten (a client that keeps its port would
otherwise talk to nobody until it pauses), and so are clients remembered for such endpoints (session affinity).
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from itertools import groupby

import msgspec

from fairlead.drivers.nodeproxy.aftermath import Endpoint, forgettable, udp_answers
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec, difference, rendered
from fairlead.drivers.nodeproxy.skeleton import PROTOCOL_NUMBERS, skeleton
from fairlead.drivers.nodeproxy.table import Table
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.net.conntrack import delete_stale

ELEMENTS_PER_TRANSACTION = 5_000
"""libnftables needs some 3 kB for each element of a transaction; more at once is no faster."""

UNHEALTHY_AFTER_S = 60.0

_NOTHING: Spec = frozenset()


class NodeProxyDriver:
    """Services on this node, as kube-proxy would serve them. `open` it first, in the network namespace that it is to serve."""

    name = "nodeproxy"

    def __init__(
        self,
        *,
        node_addresses: Sequence[str],
        pod_cidrs: Sequence[str],
        service_cidrs: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        """`node_addresses`: the node's primary address of each family; NodePorts answer on them alone.
        `pod_cidrs`: where the cluster's pods live; callers from there keep their address. Empty: pods cannot be told from
        others, so nothing that calls a ClusterIP is masqueraded and pods are treated as callers from outside.
        `service_cidrs`: ClusterIPs that no Service has are dropped rather than routed out. `timeout_s`: for one transaction.
        """
        self._node_addresses = tuple(node_addresses)
        self._pods = tuple(ip_network(cidr) for cidr in pod_cidrs)
        self._skeleton = skeleton(pod_cidrs, service_cidrs)
        self._timeout_s = timeout_s
        self._table: Table | None = None
        self._turn = asyncio.Lock()
        self._known: dict[ServiceKey, Spec] | None = None
        """What the kernel holds, by what was read and written; None: to be read again."""
        self._owners: dict[str, ServiceKey] = {}
        """Who has each frontend, to name the other Service when two want the same."""
        self._stale_flows: dict[Endpoint, frozenset[Endpoint]] = {}
        """UDP frontends whose flows are still to be looked through; kept if that fails."""
        self._failing_since: float | None = None

    async def open(self) -> None:
        """Make sure that the base chains are there, and adopt what the table holds. Raises Refused without libnftables or
        without the right to use it."""
        if self._table is None:
            self._table = Table(self._skeleton, timeout_s=self._timeout_s)
        async with self._turn:
            known = await self._adopt(self._table)
            await self._forget_clients(self._table, known.values())

    async def close(self, *, remove: bool) -> None:
        """Let go of the table; with `remove`, delete it and so all that this driver made. Traffic goes on without it."""
        async with self._turn:
            if self._table is not None:
                await self._table.close(remove=remove)
            self._table, self._known = None, None

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, Spec]:
        """The elements of each Service. Pure. Services without an address to answer on are left out."""
        specs = ((key, rendered(intent, self._node_addresses)) for key, intent in intents.items())
        return {key: spec for key, spec in specs if spec}

    def diff(self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]) -> Sequence[Change]:
        """What goes and what comes, Service by Service. Pure."""
        return difference(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """None: what the kernel holds, elements that belong to no Service included (key `("", "inet fairlead")`). It is
        listed anew only if anybody else has changed any nftables rule since: 100,000 elements take seconds."""
        table = self._opened()
        async with self._turn:
            known = self._known
            if known is None or (keys is None and not await table.untouched()):
                known = await self._adopt(table)
            return dict(known) if keys is None else {key: known[key] for key in keys if key in known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """All Changes of a Service in one transaction, many Services in each. Raises Refused if another Service has the
        frontend, Unavailable if the kernel does not take it; the table is then read again at the next turn."""
        table = self._opened()
        async with self._turn:
            known = await self._adopt(table) if self._known is None else self._known
            touched = {change.service for change in changes}
            before = {key: known.get(key, _NOTHING) for key in touched}
            for batch in _batches(_effective(known, changes)):
                self._refuse_taken(batch)
                await self._commit(table, batch)
                self._record(known, batch)
            self._stale_flows |= udp_answers((before[key], known.get(key, _NOTHING)) for key in touched)
            await delete_stale(PROTOCOL_NUMBERS["UDP"], self._stale_flows)
            self._stale_flows.clear()
            if any(element.map.startswith("remember") for spec in before.values() for element in spec):
                await self._forget_clients(table, known.values())
        return {}

    def healthy(self) -> bool:
        """Whether the kernel takes what it is given: False once transactions have failed for a minute, as in kube-proxy."""
        return self._failing_since is None or time.monotonic() - self._failing_since < UNHEALTHY_AFTER_S

    async def _commit(self, table: Table, batch: Sequence[Change]) -> None:
        try:
            await table.commit(batch)
        except FairleadError as error:
            self._known = None
            self._failing_since = self._failing_since or time.monotonic()
            raise _for_the_loop(error) from error
        self._failing_since = None

    def _opened(self) -> Table:
        if self._table is None:
            raise RuntimeError("the node proxy is not open")
        return self._table

    async def _adopt(self, table: Table) -> dict[ServiceKey, Spec]:
        self._known = known = await table.adopt()
        self._owners = {key: service for service, spec in known.items() for key in _frontends(spec)}
        return known

    async def _forget_clients(self, table: Table, specs: Iterable[Spec]) -> None:
        clients = await table.clients()
        await table.forget(forgettable(clients, specs, self._pods, self._node_addresses) if clients else ())

    def _refuse_taken(self, batch: Sequence[Change]) -> None:
        """Raises Refused if a Service wants a frontend that another one has and does not give up in the same batch."""
        given = {element.key for change in batch if change.verb == "delete" for element in _frontend_elements(change)}
        taken: dict[str, ServiceKey] = {}
        for change in batch:
            for element in _frontend_elements(change) if change.verb == "add" else ():
                owner = taken.get(element.key, None if element.key in given else self._owners.get(element.key))
                if owner not in (None, change.service):
                    address, protocol, port = element.key.split(" . ")
                    raise Refused(
                        f"serving {change.service} on {address} port {port} (IP protocol {protocol}): Service {owner} has it",
                        fix="give one of the two another address or port",
                    )
                taken[element.key] = change.service

    def _record(self, known: dict[ServiceKey, Spec], batch: Sequence[Change]) -> None:
        """Note what the kernel holds now."""
        for change in batch:
            spec = known.get(change.service, _NOTHING)
            spec = spec - set(change.elements) if change.verb == "delete" else spec | set(change.elements)
            known[change.service] = spec
            for element in _frontend_elements(change):
                if change.verb == "add":
                    self._owners[element.key] = change.service
                elif self._owners.get(element.key) == change.service:
                    del self._owners[element.key]
            if not spec:
                del known[change.service]


def _effective(known: Mapping[ServiceKey, Spec], changes: Sequence[Change]) -> list[Change]:
    """Without what is so already: the same Changes may come again after some of them were carried out."""
    effective = []
    for change in changes:
        present = known.get(change.service, _NOTHING)
        elements = tuple(element for element in change.elements if (element in present) == (change.verb == "delete"))
        if elements:
            effective.append(msgspec.structs.replace(change, elements=elements))
    return effective


def _frontend_elements(change: Change) -> tuple[Element, ...]:
    return change.elements if change.map.startswith("services") else ()


def _frontends(spec: Spec) -> Iterator[str]:
    return (element.key for element in spec if element.map.startswith("services"))


def _batches(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Whole Services, those that give something up first, as many as one transaction may carry."""
    by_service = [list(group) for _, group in groupby(sorted(changes, key=lambda c: c.service), key=lambda c: c.service)]
    by_service.sort(key=lambda group: all(change.verb == "add" for change in group))
    batch: list[Change] = []
    size = 0
    for group in by_service:
        weight = sum(len(change.elements) for change in group)
        if batch and size + weight > ELEMENTS_PER_TRANSACTION:
            yield batch
            batch, size = [], 0
        batch += group
        size += weight
    if batch:
        yield batch


def _for_the_loop(error: FairleadError) -> FairleadError:
    """A conflict means that somebody else changed our table: it is read again, and the same may then succeed."""
    return Unavailable(f"{error.message}; the table was changed by somebody else") if isinstance(error, Conflict) else error
