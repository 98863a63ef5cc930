"""The driver of the node's end of the tunnel, which accepts packets for exactly the addresses that
Services publish, and gateways' probes.

In: NodeServices. Out: packets of gateways to these addresses, and probes of the health ports of the
same Services, leave the tunnel; TCP clients learn the segment size that fits the tunnel.

Invariants: what a previous process installed works until the first `apply`, which replaces it as a
whole. Everything stays in force when this process is stopped or killed. Changes by other programs
are repaired at the next full `read`; rules that they remove, and what disappears with a device, an
interface or an address, are restored at once by `run`. An address that several Services publish is
removed with the last of them. The service proxy's own health port is always reachable, because
gateways probe it for every Service with policy Cluster."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from ipaddress import ip_address
from typing import Literal, NamedTuple

import msgspec
import structlog

from fairlead.config import TunnelConfig
from fairlead.drivers import Component
from fairlead.drivers.tunnel import decapsulator, devices, rules
from fairlead.drivers.tunnel.decapsulator import Decapsulator
from fairlead.drivers.tunnel.metrics import TunnelCollector
from fairlead.drivers.tunnel.rules import Destination
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.net import interfaces
from fairlead.net.interfaces import Link
from fairlead.net.link_events import LinkChanges, LinkEvents
from fairlead.net.nfnetlink import RulesetChanges
from fairlead.net.nftables import Nftables, Record
from fairlead.net.selection import DEFAULT_ROUTE, Selection, is_name, select
from fairlead.plan.service import PROXY_HEALTH_PORT
from fairlead.role_state import TunnelState

log = structlog.get_logger()

CHECK_INTERVAL_S = 2.0
"""Interval at which the driver checks whether another program has changed nftables rules."""
FOLLOW_PAUSE_S = 0.05
"""Pause after a change of the networks. Changes in this time are handled together."""

Spec = frozenset[Destination]
"""The addresses that a Service publishes, and its health port."""
ALWAYS = frozenset((PROXY_HEALTH_PORT,))
"""The destinations that are reachable without a Service."""


class Change(NamedTuple):
    """Publish or withdraw an address or a health port for a Service."""

    service: ServiceKey
    verb: Literal["publish", "withdraw"]
    destination: Destination

    def __str__(self) -> str:
        what = (
            f"health port {self.destination}"
            if isinstance(self.destination, int)
            else self.destination
        )
        return f"tunnel: {self.verb} {what} for {self.service}"


class TunnelDriver(Component):
    """Driver of the node's end of the tunnel. Call `open` first and `close` last, in the node's
    network namespace. `tunnel.kind` must not be "none".

    - `node_addresses`: returns the node's primary address of each family; called at each use.
    - `selectors`: select the interfaces at which packets from gateways arrive (see
      `net.selection`); without any, the interfaces with the node's addresses are used."""

    name = "tunnel"

    def __init__(
        self,
        tunnel: TunnelConfig,
        *,
        node_addresses: Callable[[], Sequence[str]],
        selectors: Sequence[str] = (),
    ) -> None:
        self._tunnel = tunnel
        self._node_addresses = node_addresses
        self._selectors = tuple(selectors)
        self._selection: Selection | None = None
        self._nft: Nftables | None = None
        self._decapsulator: Decapsulator | None = None
        self._known: dict[ServiceKey, Spec] = {}
        self._published: Counter[Destination] = Counter(ALWAYS)
        self._was_read = False
        self._unsupported = 0
        self._arrived: frozenset[str] = frozenset()
        """The interfaces at which packets arrive, as of the last check."""
        self._table = ""
        """The commands with which this process created the rules, without the published addresses.
        Empty until then: a previous process created the rules, or there are none."""
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Load what the tunnel needs into the kernel, without any effect on packets. Raise Refused
        if the kernel does not support it."""
        self._nft = Nftables()
        if self._tunnel.kind == "ipip":
            self._decapsulator = await asyncio.to_thread(Decapsulator.load, self._tunnel.gateways)

    async def close(self, *, remove: bool = False) -> None:
        """Release the resources of this process; with `remove`, remove the tunnel's end too."""
        if self._decapsulator is not None:
            self._decapsulator.close()
        if self._nft is not None:
            self._nft.close()
        self._decapsulator, self._nft = None, None
        if remove:
            await remove_tunnel()

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, Spec]:
        """Return the load-balancer addresses and the healthCheckNodePort of each Service with
        load-balancer addresses. Pure."""
        specs = {key: _destinations(intent) for key, intent in intents.items()}
        return {key: spec for key, spec in specs.items() if spec}

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """Return the destinations to publish, then those to withdraw. Pure."""
        none: Spec = frozenset()
        published = [
            Change(key, "publish", ip)
            for key, spec in desired.items()
            for ip in _in_order(spec - actual.get(key, none))
        ]
        gone = [
            Change(key, "withdraw", ip)
            for key, spec in actual.items()
            for ip in _in_order(spec - desired.get(key, none))
        ]
        return [*published, *gone]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """Return what is published, as this process knows it. With None, also repair what other
        programs have changed. The first full read repairs nothing: the rules of a previous process
        stay in force until the first `apply`, or the second full read."""
        if keys is not None:
            return {key: self._known[key] for key in keys if key in self._known}
        async with self._turn:
            if self._was_read or self._table:
                await self._install(self._published)
            self._was_read = True
            return dict(self._known)

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Publish and withdraw destinations. If the kernel rejects the transaction, raise its
        error; nothing has changed then."""
        async with self._turn:
            known = _carried_out(self._known, changes)
            published = self._published.copy()
            published.update(change.destination for change in changes if change.verb == "publish")
            published -= Counter(
                change.destination for change in changes if change.verb == "withdraw"
            )
            if not self._table:
                await self._install(published)
            elif published.keys() != self._published.keys():
                await self._publish(published)
            self._known, self._published = known, published
        return {}

    async def remove(self) -> list[str]:
        return await remove_tunnel()

    def collectors(self) -> tuple[TunnelCollector]:
        return (TunnelCollector(self.counters),)

    async def run(self) -> None:
        """Until cancelled: follow the kernel's events, and restore what disappeared with a device,
        an interface or an address, and rules that another program has removed."""
        with closing(LinkEvents()) as events, closing(RulesetChanges()) as rules_changed:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_rules(rules_changed))
                group.create_task(self._follow_links(events))

    async def _keep_rules(self, changes: RulesetChanges) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            async with self._turn:
                try:
                    if changes.seen() and self._table:
                        await self._install(self._published)
                except FairleadError as problem:
                    log.warning("restoring the rules of the tunnel failed", problem=str(problem))

    async def _follow_links(self, events: LinkEvents) -> None:
        while True:
            changes = await events.next()
            began_s = time.monotonic()
            async with self._turn:
                try:
                    if not (
                        self._is_affected(changes)
                        or self._selection_changed()
                        or (changes.hooks and await self._has_lost_program())
                    ):
                        continue
                    if self._table:
                        await self._install(self._published)
                except FairleadError as problem:
                    log.warning(
                        "restoring the tunnel after a change of the networks failed",
                        problem=str(problem),
                    )
            # If another program keeps undoing this, leave most of the time for other work.
            await asyncio.sleep(max(FOLLOW_PAUSE_S, 5 * (time.monotonic() - began_s)))

    def _is_affected(self, changes: LinkChanges) -> bool:
        """Whether the changes affect a device or an address of the tunnel."""
        ours = {*devices.NAMES, *self._selectors, *self._arrived}
        addresses = {str(ip_address(each)) for each in self._node_addresses()} | {
            devices.DUMMY_ADDRESS
        }
        return changes.lost or not (
            ours.isdisjoint(changes.devices) and addresses.isdisjoint(changes.addresses)
        )

    async def _has_lost_program(self) -> bool:
        """Return whether another process has removed the program from an interface."""
        if self._decapsulator is None or not self._table:
            return False
        links = self._arrivals(self._node_addresses())
        return not await decapsulator.attached() >= {link.index for link in links}

    def _selection_changed(self) -> bool:
        """Whether the selectors now choose other interfaces. Only selectors that are not plain
        names are evaluated here: `_is_affected` covers names."""
        by_name_alone = all(map(is_name, self._selectors))
        return (
            not by_name_alone
            and {link.name for link in self._arrivals(self._node_addresses())} != self._arrived
        )

    def counters(self) -> dict[str, int]:
        """Return the numbers of packets by outcome: with IPIP all packets since this process
        started, with VXLAN dropped packets since the rules were created."""
        if self._decapsulator is not None:
            return self._decapsulator.counters()
        if self._nft is None or not self._table or self._tunnel.kind != "vxlan":
            return {}
        records = (
            record["counter"]
            for record in self._nft.listing(f"list counters table {rules.TABLE}")
            if "counter" in record
        )
        return {
            str(each["name"]): int(each["packets"]) for each in records if isinstance(each, dict)
        }

    def status(self) -> TunnelState:
        """Return the kind of the tunnel, and packets by outcome. May be called from any thread."""
        return TunnelState(self._tunnel.kind, self.counters())

    async def _publish(self, published: Collection[Destination]) -> None:
        added, removed = (
            set(published) - set(self._published),
            set(self._published) - set(published),
        )
        try:
            await self._run(
                "\n".join([*rules.elements("add", added), *rules.elements("delete", removed)])
            )
        except Conflict:  # another program has changed our table
            await self._install(published)
            return
        if self._decapsulator is not None:
            self._decapsulator.publish(added, removed)

    async def _install(self, published: Collection[Destination]) -> None:
        """Install everything, from any previous state."""
        addresses = self._node_addresses()
        links = self._arrivals(addresses)
        self._arrived = frozenset(link.name for link in links)
        made = devices.wanted(self._tunnel, addresses)
        mtu = min(link.mtu for link in links)
        sizes = rules.segment_sizes(_kind(self._tunnel), mtu, addresses)
        names = [device.name for device in made]
        table = rules.table(self._tunnel, names, sizes, (), addresses)
        changed = table != self._table
        if changed or not await self._rules_present(published):
            if not changed:
                log.warning(
                    "another program has changed the rules of the tunnel: they are created again"
                )
            await self._run(rules.table(self._tunnel, names, sizes, published, addresses))
        # The devices come after the rules: without the rules every host could send into them.
        await devices.ensure(made)
        if self._decapsulator is None:
            await decapsulator.detach()
        else:
            self._decapsulator.set_own(addresses)
            self._decapsulator.set_published(published)
            await self._decapsulator.attach([link.index for link in links])
            self._log_unsupported(self._decapsulator.counters()["not_decapsulated"])
        self._table = table

    def _log_unsupported(self, count: int) -> None:
        """Log a warning about new packets that the kernel could not decapsulate: before Linux 6.3
        the outer and the inner header must be of the same address family."""
        if count > self._unsupported:
            fix = (
                "give gateways and nodes addresses of both families, use Linux 6.3 or newer, "
                "or choose tunnel.kind vxlan"
            )
            log.warning(
                "dropped packets: this kernel cannot decapsulate packets of another IP family",
                packets=count - self._unsupported,
                fix=fix,
            )
        self._unsupported = count

    def _arrivals(self, addresses: Sequence[str]) -> Sequence[Link]:
        """Return the interfaces at which gateways' packets arrive. An interface that is selected by
        name appears only if it exists. Raise Unavailable if there is none."""
        what = "the interface where gateways' packets arrive is missing"
        if not self._selectors:
            if not (found := interfaces.holders(addresses)):
                raise Unavailable(f"{what}: no interface has the address {' or '.join(addresses)}")
            return found
        self._selection = select(
            self._selectors,
            interfaces.present(routes=DEFAULT_ROUTE in self._selectors),
            self._selection,
        )
        if not self._selection.names:
            fix = "check node.interfaces and node.interfacesByNode against `ip address`"
            raise Unavailable(f"{what}: {self._selection.problem}", fix=fix)
        present = interfaces.links()
        return [present[name] for name in self._selection.names if name in present]

    async def _rules_present(self, published: Collection[Destination]) -> bool:
        """Whether the table in the kernel still has our number of rules, and the published
        addresses and ports."""
        assert self._nft is not None
        try:
            records = await asyncio.to_thread(self._nft.listing, f"list table {rules.TABLE}")
        except Conflict:
            return False
        listed = {each for record in records if "set" in record for each in _elements(record)}
        made = sum(line.startswith("add rule") for line in self._table.splitlines())
        return listed == set(published) and sum("rule" in record for record in records) == made

    async def _run(self, commands: str) -> None:
        assert self._nft is not None
        await asyncio.to_thread(self._nft.run, commands)


class NoTunnel(Component):
    """The component for a node without a tunnel: it removes what an earlier configuration left."""

    name = "no tunnel"

    async def open(self) -> None:
        for what in await remove_tunnel():
            log.info("removed a part of the former tunnel", part=what)

    async def remove(self) -> list[str]:
        return await remove_tunnel()


async def remove_tunnel() -> list[str]:
    """Remove our ends of tunnels from this network namespace, whichever process left them. Return
    descriptions of what was removed."""
    with Nftables() as nft:
        try:
            # The table is created first and deleted last: without it nothing else exists.
            await asyncio.to_thread(nft.run, f"list table {rules.TABLE}")
        except Conflict:
            return []
        removed = [f"device {name}" for name in await devices.remove()]
        removed += [f"program at interface {index}" for index in await decapsulator.detach()]
        await asyncio.to_thread(nft.run, f"delete table {rules.TABLE}")
        return [*removed, f"table {rules.TABLE}"]


def _carried_out(
    known: Mapping[ServiceKey, Spec], changes: Sequence[Change]
) -> dict[ServiceKey, Spec]:
    after = dict(known)
    for change in changes:
        spec = after.get(change.service, frozenset())
        after[change.service] = (
            spec | {change.destination} if change.verb == "publish" else spec - {change.destination}
        )
    return {key: spec for key, spec in after.items() if spec}


def _destinations(intent: NodeService) -> Spec:
    addresses: Spec = frozenset(ip for port in intent.ports for ip in port.load_balancer_ips)
    return (
        addresses | {intent.health_check.port} if addresses and intent.health_check else addresses
    )


def _in_order(spec: Spec) -> Sequence[Destination]:
    addresses, ports = rules.separate(spec)
    return [*addresses, *ports]


def _kind(tunnel: TunnelConfig) -> Literal["ipip", "vxlan"]:
    if tunnel.kind == "none":
        raise ValueError("there is no tunnel")
    return tunnel.kind


def _elements(record: Record) -> list[Destination]:
    """Return the elements of a listed set. The listing of an empty set has no field `elem`."""
    return msgspec.convert(record["set"], _Listed).elem


class _Listed(msgspec.Struct):
    elem: list[Destination] = []
