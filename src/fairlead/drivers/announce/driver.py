"""The driver that announces the addresses of Services on layer 2.

In: LoadBalancers, each with the gateways that announce its addresses. Out: this gateway answers ARP
requests and neighbor solicitations for the addresses that it owns, and announces them without being
asked; requests for those of other gateways are dropped, so that no second host answers. It is the
last driver of its chain: an address is announced after the drivers before it serve the Service, and
withdrawn before they stop.

Invariants: the program in the kernel goes on without the process until its deadline, which is later
than the time at which the other gateways notice that this one is gone; a restart changes nothing.
While the API server is away, the owners stay as they are, also over a restart of the process.
Nothing is sent when an address is withdrawn: its next owner announces it. Until this gateway has
heard that, it goes on answering, so that an address that moves is answered at any time."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from fairlead.drivers import Component
from fairlead.drivers.announce import spec
from fairlead.drivers.announce.conflicts import Conflicts
from fairlead.drivers.announce.gratuitous import Gratuitous
from fairlead.drivers.announce.metrics import AnnounceCollector
from fairlead.drivers.announce.responder import Responder, directory_of, remove_responder
from fairlead.drivers.announce.spec import Change, Held, Spec
from fairlead.drivers.announce.steadiness import Steadiness
from fairlead.drivers.announce.succession import Succession
from fairlead.errors import FairleadError, Unavailable
from fairlead.kube.objects import ANNOUNCE_LABEL
from fairlead.kube.presence import Claimed, OnLink, Presence
from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net import interfaces
from fairlead.net.interfaces import Link
from fairlead.net.selection import DEFAULT_ROUTE, Selection, select
from fairlead.plan.announce import SilentLinks, claim_note, macs_of
from fairlead.plan.gateways import Gateways
from fairlead.role_state import AnnouncedAddress, AnnounceState
from fairlead.sections import L2Config

log = structlog.get_logger()

ANNOUNCED = "AddressAnnounced"
NO_REQUESTS = "NoNeighborRequests"
LEAVES = "GatewayLeaves"
GATEWAYS_UNKNOWN = "GatewaysUnknown"
REQUEST_S = 60.0
"""How long no request of a neighbor may arrive before a finding reports it."""
KEEP_S = 10.0
"""The interval at which the deadlines are moved; a third of the Lease if that is shorter."""
LINGER_S = 1.0
"""How long an address that has moved to another gateway is answered at least. The new owner
announces it again later than that, for neighbors that have asked meanwhile."""
UNHEARD_S = 5.0
"""How long it is answered if the new owner is not heard. A gateway that gives its addresses away on
purpose answers until it has heard the new owner: that may be of a version that does not know
it."""
BEFORE_S = 5.0
"""The new owner may announce the address this long before this gateway knows that it has moved."""
LINGER_LOOK_S = 0.2


class Lingering(NamedTuple):
    """An address that has moved to another gateway, and that is answered on this interface still.
    `since_s`: when it has moved, in time of `time.monotonic`."""

    interface: str
    since_s: float


class AnnounceDriver(Component):
    """Driver of the announcements of one gateway. Call `open` first and `close` last, in the
    network namespace of the gateway.

    - `gateway`: the name of this gateway.
    - `selectors`: select the interfaces on which it announces (see `net.selection`).
    - `lease_s`: the duration of the Lease by which others notice that the gateway is gone.
    - `gateways`: returns the gateways that are alive; None while they are not known.
    - `forbidden`: returns whether they cannot become known, because the API server does not permit
      it.
    - `watch_command`: starts the process that watches other gateways (`roles/neighbor_process`);
      empty: none is watched.
    - `observe_silent`: called with the links of other gateways that do not answer."""

    name = "announce"

    def __init__(
        self,
        gateway: str,
        section: L2Config,
        selectors: Sequence[str],
        *,
        pin_path: Path,
        lease_s: float,
        gateways: Callable[[], Gateways | None],
        forbidden: Callable[[], bool] = lambda: False,
        watch_command: Sequence[str] = (),
        observe_silent: Callable[[SilentLinks], None] = lambda _: None,
    ) -> None:
        self.withheld: Callable[[], Mapping[ServiceKey, Spec]] = dict
        """Returns the announcements of Services that do not pass the chain of drivers, because
        their plan is refused, and that are served in their previous form."""
        self.reserved: tuple[str, ...] = ()
        """The addresses of these networks that no Service can use (see `_reserved`)."""
        self._on_link: tuple[OnLink, ...] = ()
        self._steadiness = Steadiness(lease_s)
        self._usable: dict[str, Link] = {}
        """The interfaces on which this gateway can announce addresses now."""
        self._gateway = gateway
        self._section = section
        self._selectors = tuple(selectors)
        self._lease_s = lease_s
        self._gateways, self._forbidden = gateways, forbidden
        self._selection: Selection | None = None
        self._responder = Responder(self._names, pin_path, 2 * lease_s)
        self.silent_s: Callable[[], float] = lambda: 0.0
        """Returns how long this process has not observed the other gateways. After the duration of
        its Lease, and if only its own connection to the API server is interrupted, another gateway
        has taken its addresses over, whose plan is newer. Then it does not announce the addresses
        again, and stops answering for each that it hears another gateway announce. If the API
        server is away for all, it hears none, and goes on."""
        self._gratuitous = Gratuitous(self._is_current)
        self._succession = Succession(
            gateway,
            gateways,
            command=watch_command,
            observe_silent=observe_silent,
            announce=self._gratuitous.announce,
            changed=self._renew,
        )
        self._known: dict[ServiceKey, Spec] = {}
        self._held = Held({}, {})
        self._lingering: dict[str, Lingering] = {}
        self._since_s: dict[str, float] = {}
        """When this process began to announce each owned address, in time of `time.monotonic`."""
        self._inherited: Mapping[str, str] = {}
        """The addresses that a previous process answered, each with the interface."""
        self.claimed: tuple[Claimed, ...] = ()
        """The addresses of this gateway that other stations use."""
        self._conflicts = Conflicts()
        self._findings: tuple[Finding, ...] = ()
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Take over what a previous process announced. Raise Unavailable if an interface that is
        selected by name is missing, or no interface is selected."""
        self._names()
        assert self._selection is not None
        if problem := self._selection.problem:
            raise Unavailable(problem, fix="check announce.l2.interfaces against `ip address`")
        await self._responder.open()
        self._inherited = self._responder.answered()
        self._succession.inherited = frozenset(self._inherited)

    def follow(self, before: Presence) -> None:
        """Take into account what the previous process of the gateway announced. If nothing of it is
        answered any more, the host was down, and others have taken the addresses over: they keep
        them until this gateway has run for a while."""
        if (before.announced_count or before.leaving) and not self._inherited:
            now_s = time.monotonic()
            for each in self._on_link:
                self._steadiness.begin((each.interface, each.network), now_s)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._responder.run())
            group.create_task(self._gratuitous.run())
            group.create_task(self._keep())
            group.create_task(self._succession.run())
            group.create_task(self._linger())

    async def close(self) -> None:
        self._gratuitous.close()
        await self._responder.close()

    async def remove(self) -> list[str]:
        return await self._responder.remove()

    def _is_current(self) -> bool:
        return self.silent_s() < self._lease_s

    @property
    def on_link(self) -> tuple[OnLink, ...]:
        """The networks in which this gateway can announce addresses. Empty if it cannot know the
        other gateways: then it gains no address, and must not be chosen as an owner."""
        if self._forbidden():
            return ()
        now_s = time.monotonic()
        return tuple(
            msgspec.structs.replace(each, settles=True)
            if self._steadiness.settles((each.interface, each.network), now_s)
            else each
            for each in self._on_link
        )

    @property
    def owned(self) -> Mapping[str, str]:
        """The addresses that this process announces, each with the interface."""
        return self._held.owned

    @property
    def answered(self) -> Mapping[str, str]:
        """The addresses that the kernel answers, each with the interface; at the start, those of a
        previous process."""
        return self._responder.answered()

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Spec]:
        """See `spec.render`."""
        return spec.render(intents)

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
    ) -> Sequence[Change]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        """Return what this process has announced. What others change in the kernel is repaired by
        `run`. What a previous process left is replaced by the first `apply`, or ends by itself."""
        if keys is None:
            return dict(self._known)
        return {key: self._known[key] for key in keys if key in self._known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        async with self._turn:
            gained = await self._hold(spec.carried_out(self._known, changes))
        return {
            change.service: Outcome(DONE.state, notes=notes)
            for change in changes
            if (notes := tuple(self._notes(change, gained)))
        }

    async def _hold(self, known: Mapping[ServiceKey, Spec]) -> Collection[str]:
        """Announce these Services, and those that are withheld. Return the addresses that this
        gateway has gained."""
        before, after = self._held, self._all(known)
        answered = self._responder.answered()
        now_s = time.monotonic()
        # At the start, what a previous process answered may have moved meanwhile.
        had = before.owned if any(before) else self._inherited
        self._lingering = {
            address: self._lingering.get(address) or Lingering(had[address], now_s)
            for address in after.others.keys() - self._succession.left.keys()
            if address in had or address in self._lingering
        }
        # An address is answered before it is announced.
        await self._answer(after)
        self._known, self._held = dict(known), after
        for address in before.owned.keys() - after.owned.keys():
            self._gratuitous.withdraw(address)
            del self._since_s[address]
        for address, interface in after.owned.items():
            if before.owned.get(address) != interface:
                self._gratuitous.announce(address, interface)
                self._since_s[address] = time.monotonic()
        self._succession.owned, self._succession.interfaces = after.owned, [*self._usable]
        self._succession.follow()
        return after.owned.keys() - answered

    async def _answer(self, held: Held) -> None:
        """Answer for what this gateway owns, and for what has just moved to others."""
        lingering = {address: each.interface for address, each in self._lingering.items()}
        await self._responder.set(
            {**held.owned, **lingering}, held.others.keys() - lingering.keys()
        )

    async def _linger(self) -> None:
        """End the answers for addresses that have moved, when their new owners have been heard."""
        while True:
            await asyncio.sleep(LINGER_LOOK_S)
            if not self._lingering:
                continue
            try:
                async with self._turn:
                    if over := self._taken_over():
                        for address in over:
                            del self._lingering[address]
                        await self._answer(self._held)
            except FairleadError as error:
                log.warning("addresses that have moved are still answered", error=str(error))

    def _taken_over(self) -> Collection[str]:
        """Return the addresses for which the answers of this gateway may end."""
        gateways, now_s = self._gateways(), time.monotonic()
        macs = macs_of(gateways) if gateways is not None else {}
        leaving = gateways is not None and self._gateway in gateways.leaving
        heard_s = {
            claim.address: claim.age_s
            for claim in self._responder.claims()
            if (other := self._held.others.get(claim.address)) is not None
            and macs.get(claim.mac) == other.owner
        }
        return [
            address
            for address, each in self._lingering.items()
            if (passed_s := now_s - each.since_s)
            >= (math.inf if leaving or self._is_lost(address) else UNHEARD_S)
            or (passed_s >= LINGER_S and heard_s.get(address, math.inf) <= passed_s + BEFORE_S)
        ]

    def _is_lost(self, address: str) -> bool:
        """Return whether this gateway has observed that the first owner of the address does not
        answer. A new heir has not observed it, and may count on that owner."""
        other = self._held.others.get(address)
        return other is not None and bool(other.lost)

    def _all(self, known: Mapping[ServiceKey, Spec]) -> Held:
        """Return what this gateway does. It goes on answering for what a previous process left
        until it is proved that the owner is alive: the others may know that it is gone, and count
        on this gateway."""
        planned = spec.by_address({**known, **self.withheld()})
        self._succession.planned = planned
        owned, others = spec.held(planned, self._gateway)
        left = {name: each for name, each in self._succession.left.items() if name in owned}
        owned = {name: each for name, each in owned.items() if name not in left}
        others = {**others, **left}
        gateways = self._gateways()
        kept = {
            address: self._inherited[address]
            for address, each in others.items()
            if address in self._inherited and gateways and each.owner in gateways.unproved
        }
        return Held(
            {**owned, **kept}, {name: each for name, each in others.items() if name not in kept}
        )

    async def _renew(self) -> None:
        """Announce what this gateway has to announce now. After a failure, `_keep` tries again."""
        try:
            async with self._turn:
                if self._all(self._known) != self._held:
                    await self._hold(self._known)
        except FairleadError as error:
            log.warning("addresses are not taken over", error=str(error))

    def _notes(self, change: Change, gained: Collection[str]) -> Iterator[Finding]:
        for each in change.wanted:
            if each.address in gained:
                message = (
                    f"{each.address} is announced by gateway {each.owner}, on its interface "
                    f"{each.interface}"
                )
                yield Finding(ANNOUNCED, message, "info")

    async def _keep(self) -> None:
        """Move the deadlines, and look for changes of the networks, for problems, and for other
        owners of Services that are withheld."""
        before: Mapping[ServiceKey, Spec] = {}
        while True:
            try:
                if self._gateways() is None and not self._forbidden():
                    # The API server may be away since before the start. The other gateways do not
                    # take over then either.
                    self._responder.prolong()
                self._responder.refresh()
                self._names()
                self._end_settling()
                self._look_for_conflicts()
                self._cede()
                self._succession.follow()
                self._findings = tuple(self._problems())
                async with self._turn:
                    # At the start, what a previous process left stays as it is until the first
                    # changes come. They never come if all Services are withheld.
                    withheld = self.withheld()
                    started = any(self._held) or self._known or (withheld and withheld == before)
                    if started and self._all(self._known) != self._held:
                        await self._hold(self._known)
                    before = withheld
            except FairleadError as error:
                log.warning("the announcement of addresses is not kept", error=str(error))
            await asyncio.sleep(min(KEEP_S, self._lease_s / 3))

    def _names(self) -> Sequence[str]:
        """Select the interfaces, and find out what is on their links."""
        present = interfaces.present(routes=DEFAULT_ROUTE in self._selectors)
        self._selection = select(self._selectors, present, self._selection)
        links = interfaces.links()
        usable = {
            name: links[name]
            for name in self._selection.names
            if name in links and links[name].mac and links[name].up and links[name].carrier
        }
        networks = [
            (each.interface, each.network)
            for each in interfaces.networks()
            if each.interface in usable and not each.network.is_link_local
        ]
        found = [OnLink(name, str(network), usable[name].mac) for name, network in networks]
        found += [
            OnLink(name, network, link.mac)
            for name, link in usable.items()
            for network in self._section.networks
        ]
        self._on_link = tuple(dict.fromkeys(found))
        self._look_for_returned()
        reserved = {address for _, network in networks for address in _reserved(network)}
        self.reserved = tuple(
            map(str, sorted(reserved, key=lambda each: (each.version, each.packed)))
        )
        self._announce_again(usable)
        return self._selection.names

    def _look_for_returned(self) -> None:
        """Find out which links were lost and have returned."""
        gateways = self._gateways()
        known = self._on_link if gateways is None else gateways.announcers.get(self._gateway, ())
        self._steadiness.look(
            [(each.interface, each.network) for each in self._on_link],
            [(each.interface, each.network) for each in known],
            time.monotonic(),
        )

    def _end_settling(self) -> None:
        """Let the links be steady on which this gateway has addresses although the others know that
        they settle: no other gateway can have them, and one that returns later must not get them at
        once."""
        gateways, interfaces_used = self._gateways(), {*self._held.owned.values()}
        for each in gateways.announcers.get(self._gateway, ()) if gateways is not None else ():
            if each.settles and each.interface in interfaces_used:
                self._steadiness.end((each.interface, each.network))

    def _cede(self) -> None:
        """Find out which addresses another gateway has taken over while this one cannot observe the
        others. A claim is newer than what this process knows if it came after the last contact."""
        silent_s = self.silent_s()
        isolated = silent_s >= self._lease_s and self._gateways() is not None
        self._succession.end(isolated=isolated)
        for claim in self._responder.claims() if isolated else ():
            if claim.age_s < silent_s:
                self._succession.leave(claim.address, claim.mac)

    def _announce_again(self, usable: dict[str, Link]) -> None:
        """Announce the addresses on an interface that has another MAC address, was created again
        or has its link again: neighbors and switches do not know that."""
        before, self._usable = self._usable, usable
        for address, name in self._held.owned.items():
            if name in usable and before.get(name) != usable[name]:
                self._gratuitous.announce(address, name)

    def status(self) -> AnnounceState:
        now_s, (owned, others) = time.monotonic(), self._held
        since_s = self._since_s.copy()
        addresses = [
            AnnouncedAddress(address, self._gateway, interface, now_s - since_s.get(address, now_s))
            for address, interface in owned.items()
        ]
        addresses += [
            AnnouncedAddress(each.address, each.owner, each.interface) for each in others.values()
        ]
        return AnnounceState(tuple(sorted(addresses)), self._responder.counts())

    def findings(self) -> Sequence[Finding]:
        return self._findings

    def collectors(self) -> tuple[AnnounceCollector]:
        return (
            AnnounceCollector(lambda: self.owned, self._responder.counts, self._succession.counts),
        )

    def _problems(self) -> Iterator[Finding]:
        if self._forbidden():
            yield Finding(
                GATEWAYS_UNKNOWN,
                "this gateway may not know the other gateways, so it announces no address",
                "error",
                remedy="allow it to list and watch the Leases of presence.namespace",
            )
        yield from self._silent_interfaces(time.monotonic())
        yield from self._succession.findings()
        gateways = self._gateways()
        if gateways is not None and (since := gateways.leaving.get(self._gateway)):
            kept = len(self._held.owned) + len(self._lingering)
            yield Finding(
                LEAVES,
                f"this gateway has given its addresses to other gateways since {since}"
                + (f", except {kept} that no other gateway can announce" if kept else ""),
                "info",
                remedy="to end this, call `fairlead gateway --leave --undo` and remove the label "
                f"{ANNOUNCE_LABEL} of its Node",
            )
        yield from (claim_note(each, self._gateway, gateways) for each in self.claimed)

    def _look_for_conflicts(self) -> None:
        # The ages of the claims end at the time of this call.
        claims, now_s, gateways = self._responder.claims(), time.monotonic(), self._gateways()
        macs = macs_of(gateways) if gateways is not None else {}
        found = self._conflicts.look(claims, self._since_s, macs, now_s)
        owned = self._held.owned
        self.claimed = tuple(Claimed(each.address, owned[each.address], each.mac) for each in found)
        for address in self._conflicts.defend(found, now_s):
            self._gratuitous.repeat(address)

    def _silent_interfaces(self, now_s: float) -> Iterator[Finding]:
        first_s: dict[str, float] = {}
        for address, interface in self._held.owned.items():
            began_s = self._since_s[address]
            first_s[interface] = min(began_s, first_s.get(interface, began_s))
        for interface, began_s in sorted(first_s.items()):
            if now_s - began_s > REQUEST_S and self._responder.last_request(interface) is None:
                yield Finding(
                    NO_REQUESTS,
                    "no ARP request or neighbor solicitation for an announced address has arrived "
                    f"at {interface}",
                    remedy="this is normal if no client has used the addresses yet. Otherwise "
                    "clients and routers are not on this link, or the network drops such frames "
                    "for addresses that it did not assign (port security, allowed address pairs)",
                )


def _reserved(
    network: IPv4Network | IPv6Network,
) -> tuple[IPv4Address, ...] | tuple[IPv6Address, ...]:
    """Return the addresses of a network that have a meaning of their own: the broadcast address and
    its former value, for which no client asks, and the address of all routers (RFC 4291, 2.6.1).
    Networks of two hosts have none (RFC 3021, RFC 6164)."""
    if network.prefixlen >= network.max_prefixlen - 1:
        return ()
    if isinstance(network, IPv4Network):
        return network.network_address, network.broadcast_address
    return (network.network_address,)


class NoAnnouncement(Component):
    """The component of a gateway that announces no address: it removes what an earlier
    configuration left."""

    name = "no announcement"

    def __init__(self, pin_path: Path) -> None:
        self._pin_path = pin_path

    async def open(self) -> None:
        if await asyncio.to_thread(directory_of(self._pin_path).exists):
            try:
                removed = await self.remove()
            except FairleadError as error:
                log.warning("what announced addresses before is not removed", problem=str(error))
                return
            for what in removed:
                log.info("removed a part of the former announcement", part=what)

    async def remove(self) -> list[str]:
        return await remove_responder(self._pin_path)
