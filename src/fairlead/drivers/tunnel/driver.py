"""Keep the node's end of the tunnel open for exactly the addresses that Services publish, and for
gateways' probes.

In: NodeServices. Out: packets of gateways for these addresses, and probes of the health ports of
the same Services, come out of the tunnel; TCP clients learn the segment size that fits the tunnel.
Invariants: the first `apply` after a start puts a whole set in the place of what a predecessor
left, which works until then; stopped or killed, everything stays in force. What others break is put
back at the next whole `read`, and what goes with a device, an interface or an address at once, by
`follow`. An address may be published by several Services; it is removed with the last of them. The
service proxy's own health port is always open, because gateways probe it for every Service with
policy Cluster."""

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
from fairlead.drivers.tunnel import devices, envelopes, rules
from fairlead.drivers.tunnel.envelopes import Envelopes
from fairlead.drivers.tunnel.metrics import TunnelCollector
from fairlead.drivers.tunnel.rules import Opening
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.net import interfaces
from fairlead.net.interfaces import Link
from fairlead.net.link_events import LinkChanges, LinkEvents
from fairlead.net.nftables import Nftables, Record
from fairlead.net.selection import DEFAULT_ROUTE, Selection, is_name, select
from fairlead.plan.service import PROXY_HEALTH_PORT
from fairlead.role_state import TunnelState

log = structlog.get_logger()

FOLLOW_PAUSE_S = 0.05
"""After a change of the networks the next ones are waited for so long, and then looked at
together."""

Spec = frozenset[Opening]
"""The addresses that a Service publishes, and its health port."""
ALWAYS = frozenset((PROXY_HEALTH_PORT,))


class Change(NamedTuple):
    """An address, or a health port, is to be published for a Service, or no longer."""

    service: ServiceKey
    verb: Literal["publish", "withdraw"]
    opening: Opening

    def __str__(self) -> str:
        what = f"health port {self.opening}" if isinstance(self.opening, int) else self.opening
        return f"tunnel: {self.verb} {what} for {self.service}"


class TunnelDriver(Component):
    """Implements fairlead.drivers.Driver. Call `open` first and `close` last, in the node's network
    namespace.

    node_addresses: returns the node's primary address of each family; called at each use.
    selectors: of the interfaces where packets from gateways arrive (see `net.selection`); none:
    those that have the node's addresses. `tunnel.kind` must not be "none"."""

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
        self._envelopes: Envelopes | None = None
        self._known: dict[ServiceKey, Spec] = {}
        self._published: Counter[Opening] = Counter(ALWAYS)
        self._looked = False
        self._unopened = 0
        self._arrived: frozenset[str] = frozenset()
        """The interfaces where packets arrived when it was last looked."""
        self._table = ""
        """The commands that made the rules, without the published addresses; empty: they are a
        predecessor's, or nobody's."""
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """See that the kernel can do it. Raises Refused where it cannot."""
        self._nft = Nftables()
        if self._tunnel.kind == "ipip":
            self._envelopes = await asyncio.to_thread(Envelopes.load, self._tunnel.gateways)

    async def close(self, *, remove: bool = False) -> None:
        """Let go; with `remove`, leave no trace."""
        if self._envelopes is not None:
            self._envelopes.close()
        if self._nft is not None:
            self._nft.close()
        self._envelopes, self._nft = None, None
        if remove:
            await remove_tunnel()

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, Spec]:
        """The load-balancer addresses, and the healthCheckNodePort, of each Service that has
        load-balancer addresses."""
        specs = {key: _openings(intent) for key, intent in intents.items()}
        return {key: spec for key, spec in specs.items() if spec}

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """What comes, then what goes. Pure."""
        none: Spec = frozenset()
        came = [
            Change(key, "publish", ip)
            for key, spec in desired.items()
            for ip in _in_order(spec - actual.get(key, none))
        ]
        gone = [
            Change(key, "withdraw", ip)
            for key, spec in actual.items()
            for ip in _in_order(spec - desired.get(key, none))
        ]
        return [*came, *gone]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """With keys: what is known. None: also put back what others took away. The first whole read
        changes nothing: until something is applied, or nothing was by the second, what a
        predecessor left is in charge."""
        if keys is not None:
            return {key: self._known[key] for key in keys if key in self._known}
        async with self._turn:
            if self._looked or self._table:
                await self._install(self._published)
            self._looked = True
            return dict(self._known)

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Publish and withdraw. Raises what the kernel answers if it takes none of it."""
        async with self._turn:
            known = _carried_out(self._known, changes)
            published = self._published.copy()
            published.update(change.opening for change in changes if change.verb == "publish")
            published -= Counter(change.opening for change in changes if change.verb == "withdraw")
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
        """Put back what goes with a device, an interface or an address, by the kernel's events,
        until cancelled."""
        with closing(LinkEvents()) as events:
            while True:
                changes = await events.next()
                began_s = time.monotonic()
                async with self._turn:
                    try:
                        if not (self._concerned(changes) or self._others_chosen()):
                            continue
                        if self._table:
                            await self._install(self._published)
                    except FairleadError as problem:
                        log.warning(
                            "the networks changed, and the tunnel's end is not as it should be",
                            problem=str(problem),
                        )
                # Where somebody else insists on another state, most of the time is left for other
                # work.
                await asyncio.sleep(max(FOLLOW_PAUSE_S, 5 * (time.monotonic() - began_s)))

    def _concerned(self, changes: LinkChanges) -> bool:
        ours = {*devices.NAMES, *self._selectors, *self._arrived}
        addresses = {str(ip_address(each)) for each in self._node_addresses()} | {
            devices.DUMMY_ADDRESS
        }
        return changes.lost or not (
            ours.isdisjoint(changes.devices) and addresses.isdisjoint(changes.addresses)
        )

    def _others_chosen(self) -> bool:
        """Whether selectors other than names choose other interfaces than before."""
        by_name_alone = all(map(is_name, self._selectors))
        return (
            not by_name_alone
            and {link.name for link in self._arrivals(self._node_addresses())} != self._arrived
        )

    def counters(self) -> dict[str, int]:
        """Packets by what became of them. IPIP: since this process started. VXLAN: those dropped,
        since the rules were made."""
        if self._envelopes is not None:
            return self._envelopes.counters()
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
        """For `/state`. May be called from any thread."""
        return TunnelState(self._tunnel.kind, self.counters())

    async def _publish(self, published: Collection[Opening]) -> None:
        added, removed = (
            set(published) - set(self._published),
            set(self._published) - set(published),
        )
        try:
            await self._run(
                "\n".join([*rules.elements("add", added), *rules.elements("delete", removed)])
            )
        except Conflict:  # somebody has changed our table
            await self._install(published)
            return
        if self._envelopes is not None:
            self._envelopes.publish(added, removed)

    async def _install(self, published: Collection[Opening]) -> None:
        """Have everything be as it should, from whatever state."""
        addresses = self._node_addresses()
        links = self._arrivals(addresses)
        self._arrived = frozenset(link.name for link in links)
        made = devices.wanted(self._tunnel, addresses)
        mtu = min(link.mtu for link in links)
        sizes = rules.segment_sizes(_kind(self._tunnel), mtu, addresses)
        names = [device.name for device in made]
        table = rules.table(self._tunnel, names, sizes, (), addresses)
        if table != self._table or not await self._rules_stand(published):
            await self._run(rules.table(self._tunnel, names, sizes, published, addresses))
        # After the rules: nobody may send into a device that nothing guards yet.
        await devices.have(made)
        if self._envelopes is None:
            await envelopes.detach()
        else:
            self._envelopes.set_own(addresses)
            self._envelopes.set_published(published)
            await self._envelopes.attach([link.index for link in links])
            self._tell_of_unopened(self._envelopes.counters()["not_taken_out"])
        self._table = table

    def _tell_of_unopened(self, count: int) -> None:
        """Linux before 6.3 cannot take a packet out of an envelope of another family."""
        if count > self._unopened:
            fix = (
                "give gateways and nodes addresses of both families, use Linux 6.3 or newer, "
                "or choose tunnel.kind vxlan"
            )
            log.warning(
                "this kernel cannot open envelopes of another IP family: dropped",
                packets=count - self._unopened,
                fix=fix,
            )
        self._unopened = count

    def _arrivals(self, addresses: Sequence[str]) -> Sequence[Link]:
        """The interfaces where gateways' packets arrive; interfaces that are selected by name only
        if they are present."""
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
        there = interfaces.links()
        return [there[name] for name in self._selection.names if name in there]

    async def _rules_stand(self, published: Collection[Opening]) -> bool:
        """Whether the table in the kernel has the number of rules that we made, and the published
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
    """Where no tunnel is configured: what an earlier one left is taken away."""

    name = "no tunnel"

    async def open(self) -> None:
        for what in await remove_tunnel():
            log.info("removed what a tunnel left", what=what)

    async def remove(self) -> list[str]:
        return await remove_tunnel()


async def remove_tunnel() -> list[str]:
    """Take every tunnel's end of ours out of this network namespace, whoever left it; says what
    there was."""
    with Nftables() as nft:
        try:
            # It comes first and goes last: where it is not, there is nothing.
            await asyncio.to_thread(nft.run, f"list table {rules.TABLE}")
        except Conflict:
            return []
        removed = [f"device {name}" for name in await devices.remove()]
        removed += [f"program at interface {index}" for index in await envelopes.detach()]
        await asyncio.to_thread(nft.run, f"delete table {rules.TABLE}")
        return [*removed, f"table {rules.TABLE}"]


def _carried_out(
    known: Mapping[ServiceKey, Spec], changes: Sequence[Change]
) -> dict[ServiceKey, Spec]:
    after = dict(known)
    for change in changes:
        spec = after.get(change.service, frozenset())
        after[change.service] = (
            spec | {change.opening} if change.verb == "publish" else spec - {change.opening}
        )
    return {key: spec for key, spec in after.items() if spec}


def _openings(intent: NodeService) -> Spec:
    addresses: Spec = frozenset(ip for port in intent.ports for ip in port.load_balancer_ips)
    return (
        addresses | {intent.health_check.port} if addresses and intent.health_check else addresses
    )


def _in_order(spec: Spec) -> Sequence[Opening]:
    addresses, ports = rules.apart(spec)
    return [*addresses, *ports]


def _kind(tunnel: TunnelConfig) -> Literal["ipip", "vxlan"]:
    if tunnel.kind == "none":
        raise ValueError("there is no tunnel")
    return tunnel.kind


def _elements(record: Record) -> list[Opening]:
    """What is in a set that was listed. A set without elements says nothing of them."""
    return msgspec.convert(record["set"], _Listed).elem


class _Listed(msgspec.Struct):
    elem: list[Opening] = []
