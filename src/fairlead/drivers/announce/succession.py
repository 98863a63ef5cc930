"""What a gateway does when another one does not answer, and when another one takes over.

In: the announcements of all addresses, what the watch over other gateways reports. Out: the links
that count as lost, for the plan, and the addresses that are left to other gateways. The rules are
in `plan.heirs`."""

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

import structlog

from fairlead.drivers.announce.metrics import WatchCounts
from fairlead.drivers.neighbors.protocol import Watch, WatchReport, WatchRequest
from fairlead.drivers.neighbors.watch import NeighborWatch
from fairlead.model import Announcement, Finding
from fairlead.plan.announce import SilentLinks, macs_of
from fairlead.plan.gateways import Gateways
from fairlead.plan.heirs import Heirs, Step, Watched, watched_by

log = structlog.get_logger()

NOT_ANSWERING = "GatewayNotAnswering"


class Succession:
    """The part of one gateway in the succession.

    - `own`: its name. `gateways`: returns the gateways that are alive; None while they are unknown.
    - `command`: starts the process that watches (`roles/neighbor_process`); empty: none is watched.
    - `observe_silent`: called with the links of other gateways that count as lost.
    - `announce`: announces an address on an interface again.
    - `changed`: called when `left` has changed."""

    def __init__(
        self,
        own: str,
        gateways: Callable[[], Gateways | None],
        *,
        command: Sequence[str],
        observe_silent: Callable[[SilentLinks], None],
        announce: Callable[[str, str], None],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self.planned: Mapping[str, Announcement] = {}
        """The announcements of all Services, by address."""
        self.owned: Mapping[str, str] = {}
        """The addresses that this gateway announces, each with the interface."""
        self.interfaces: Collection[str] = ()
        """The interfaces on which it can announce addresses now."""
        self.inherited: frozenset[str] = frozenset()
        """The addresses that a previous process answered, until the first gateways are watched."""
        self._own, self._gateways = own, gateways
        self._heirs = Heirs(own)
        self._watch = NeighborWatch(command, self._observed) if command else None
        self._observe_silent, self._announce, self._changed = observe_silent, announce, changed
        self._watched: Mapping[tuple[str, str, bool], Watched] = {}
        self._takeovers = 0
        self._was_isolated = False

    async def run(self) -> None:
        """Watch until cancelled. Raise Unavailable if the process ends by itself."""
        if self._watch is not None:
            await self._watch.run()

    @property
    def left(self) -> Mapping[str, Announcement]:
        """The addresses of this gateway that are left to another one."""
        return self._heirs.left

    def counts(self) -> WatchCounts:
        return WatchCounts(
            len({each.gateway for each in self._watched.values()}),
            self._watch.misses if self._watch is not None else 0,
            self._takeovers,
        )

    def findings(self) -> Iterator[Finding]:
        for gateway, interface in sorted(self._heirs.silent):
            yield Finding(
                NOT_ANSWERING,
                f"gateway {gateway} does not answer requests for its addresses on its interface "
                f"{interface}: this gateway announces those whose heir it is",
                remedy=f"check the host of gateway {gateway} and its link",
            )

    def end(self, *, isolated: bool) -> None:
        """Demand addresses whose time is over. `isolated`: other gateways may know that this one is
        gone, so it demands nothing. What it learns when the API server is back is newer."""
        if isolated:
            self._was_isolated = True
        elif self._was_isolated:
            self._was_isolated = False
            self._heirs.restart()
        else:
            self._heirs.end(time.monotonic())

    def leave(self, address: str, mac: str) -> None:
        """Process that the interface with this MAC address has announced the address."""
        if (gateways := self._gateways()) is not None:
            self._claimed(address, macs_of(gateways).get(mac, ""))

    def follow(self, trusted: Collection[Watched] = ()) -> None:
        """Watch the gateways whose addresses this gateway inherits, and the gateways to which it
        has left its own addresses. `trusted`: the gateways that do not count as lost any more."""
        gateways = self._gateways()
        links = gateways.announcers if gateways is not None else {}
        asked = watched_by(self._own, self.planned.values(), links, self._heirs.left)
        if asked and self.inherited:
            # The previous process may have taken them over from an owner that is silent still. So
            # the owner counts as one that has answered, and is lost again if it does not.
            taken = [each for each, found in asked.items() if self.inherited.intersection(found)]
            trusted, self.inherited = [*trusted, *taken], frozenset()
        planned = self.planned.items()
        self._heirs.forget(asked, {name for name, each in planned if each.owner == self._own})
        self._observe_silent(self._heirs.silent)
        watches = {
            Watch(each.interface, each.mac, each.left, addresses): each
            for each, addresses in asked.items()
        }
        self._watched = {watch.key: each for watch, each in watches.items()}
        if self._watch is not None:
            others = (each for name, found in links.items() if name != self._own for each in found)
            self._watch.set(
                WatchRequest(
                    tuple(watches),
                    tuple(sorted({each.mac for each in others if each.mac})),
                    tuple(sorted(self.interfaces)),
                    tuple((each.interface, each.mac) for each in trusted),
                )
            )

    async def _observed(self, report: WatchReport) -> None:
        before = self._heirs.silent, self._heirs.left
        trusted = [*self._process_observations(report), *self._process_claims(report)]
        # Most announcements are repetitions, which change nothing.
        if trusted or before != (self._heirs.silent, self._heirs.left):
            self.follow(trusted)
            await self._changed()

    def _process_observations(self, report: WatchReport) -> Iterator[Watched]:
        """Yield the gateways that do not count as lost any more."""
        now_s = time.monotonic()
        for each in report.observations:
            if (watched := self._watched.get(each.key)) is None:
                continue
            if each.silent:
                self._takeovers += self._heirs.missed(watched, now_s)
                log.warning(
                    "a gateway does not answer for the addresses that were left to it"
                    if watched.left
                    else "a gateway does not answer: its heirs announce its addresses",
                    gateway=watched.gateway,
                    interface=watched.interface,
                    mac=watched.mac,
                )
                continue
            self._heirs.answered(watched, now_s, alone=each.alone)
            log.info("a gateway answers again", gateway=watched.gateway, alone=each.alone)
            # Whoever goes on has to tell the neighbors: they may have heard only the other one.
            for address, interface in self.owned.items():
                planned = self.planned.get(address)
                inherited = planned is not None and planned.lost == watched.gateway
                if interface == watched.interface and not (each.alone and inherited):
                    self._announce(address, interface)
            if each.alone:
                yield watched

    def _process_claims(self, report: WatchReport) -> Iterator[Watched]:
        """Yield the gateways that do not count as lost any more."""
        gateways = self._gateways()
        if gateways is None or not report.heard:
            return
        macs = macs_of(gateways)
        for each in report.heard:
            claimant = macs.get(each.mac, "")
            step = self._claimed(each.address, claimant)
            if step == "insist" and (interface := self.owned.get(each.address)):
                self._announce(each.address, interface)
            elif step == "give back":
                log.info("a gateway demands its addresses", gateway=claimant)
                yield from (found for found in self._watched.values() if found.gateway == claimant)

    def _claimed(self, address: str, claimant: str) -> Step:
        gateways = self._gateways()
        if gateways is not None and claimant in gateways.leaving:
            # It repeats what it announced before it knew that it leaves.
            return "ignore"
        planned = self.planned.get(address)
        return self._heirs.claimed(planned, address, claimant, time.monotonic())
