"""The driver that announces addresses by BGP through a BIRD of Fairlead's own.

In: intents with announcements, the peers of this host. Out: routes that the neighbors learn, the
state of the sessions.

Announcing does not depend on this process. When it ends, BIRD continues, and the next process reads
from BIRD's files what is announced. When BIRD ends, it is restarted, and neighbors that support
graceful restart keep the routes meanwhile. A changed address changes one file, and no session.

Invariants: what is announced is what the files say, and the next full `read` repairs differences. A
route that leaves gets the community graceful-shutdown for GRACE_S before it is withdrawn
(RFC 8326). A peer that cannot be configured does not affect the others."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import structlog

from fairlead.announce_sections import BgpConfig
from fairlead.backoff import Backoff
from fairlead.drivers import PATIENCE_S, Component, Requeue, method_change, no_requeue
from fairlead.drivers.bgp import process, route_checks, sessions, spec
from fairlead.drivers.bgp.by_address import ByAddress
from fairlead.drivers.bgp.desired import CUT_OFF, Desired
from fairlead.drivers.bgp.metrics import BgpCollector
from fairlead.drivers.bgp.peers import Peer
from fairlead.drivers.bgp.removal import GRACE_S, remove_bird, remove_routes
from fairlead.drivers.bgp.route_prober import RouteProber
from fairlead.drivers.bgp.sessions import SESSION_DOWN, Wants, wants_of
from fairlead.drivers.bgp.speaker import Speaker
from fairlead.drivers.bgp.spec import (
    Actual,
    Announced,
    BgpSpec,
    Change,
    Report,
    Withdraw,
)
from fairlead.drivers.bgp.watch import CONNECT_S, SessionWatch, stamp
from fairlead.drivers.method_change import AnnouncedElsewhere
from fairlead.errors import FairleadError, Refused
from fairlead.model import DONE, Finding, Outcome, ServiceKey
from fairlead.role_state import AnnouncedAddress, BgpSession, BgpState, RouteCheck

log = structlog.get_logger()

POLL_INTERVAL_S = 1.0
"""Interval at which the sessions are read."""
_RETRY_S = (0.1, 0.5)
"""The first and the longest pause after a failed attempt to reach or start BIRD. The longest one is
shorter than POLL_INTERVAL_S, so that each poll finds a BIRD that works again."""


class BirdDriver(Component):
    """Driver of a BIRD of Fairlead's own. Call `open` first, in the network namespace of the host.

    - `peers`: returns the peers of this host; called before each `apply` and about once a second.
    - `requeue`: called with the Services for which the state of the sessions has changed.
    - `role`: the role that announces. A directory belongs to one role.
    - `host`: the name of the host, from which the router id is derived if the host has no IPv4
      address."""

    name = "bgp"
    patience_s = PATIENCE_S

    def __init__(
        self,
        section: BgpConfig,
        *,
        peers: Callable[[], Sequence[Peer]],
        requeue: Requeue = no_requeue,
        role: str = "gateway",
        host: str = "",
    ) -> None:
        self._section = section
        self._peers = peers
        self._requeue = requeue
        self._role = role
        self._status_changed: Callable[[], None] = lambda: None
        self.speaker = Speaker(section, role, host)
        self.watch = SessionWatch(section.local_port)
        self._desired = Desired()
        self.prober = RouteProber(
            lambda: self.watch.sessions, self._addresses, self._routes_checked
        )
        self._version = 0
        """Rises with each change of the announced addresses and of the sessions."""
        self._shown: tuple[int, tuple[AnnouncedAddress, ...]] = (-1, ())
        """The announced addresses with their version, computed when they are asked for."""
        self._checks_by_address = ByAddress[RouteCheck]()
        self._announced_by_address = ByAddress[AnnouncedAddress]()
        self.cuts = 0
        """How often this host was found to be cut off."""
        self.announced_elsewhere: AnnouncedElsewhere | None = None
        """None: an address that another method announces from now on is withdrawn at once."""
        self._opened = False
        self._reported: dict[ServiceKey, tuple[Finding, ...]] = {}
        """The notes that were reported for each Service."""
        self._stale = True
        """Whether the file of routes may differ from the desired routes."""
        self._problem = ""
        self._unrepaired = False
        """Whether the last full `read` has not compared BIRD with what is announced."""
        self._backoff = Backoff(*_RETRY_S)
        self._retry_s = 0.0
        """While there is a problem, BIRD is neither reached nor started before this time."""
        self._patient_until_s = 0.0
        """Until then, a BIRD that does not answer yet is not a problem."""
        self._adopted = False
        self._soon = asyncio.Event()
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Adopt what is announced, and configure the peers. Without a BIRD that another program
        must start, or in a directory of another role, continue: this is reported as a problem."""
        async with self._changing:
            self._opened = True
            self._patient_until_s = _now_s() + CONNECT_S
            await remove_routes(self._role)  # of an earlier configuration
            await self._update()

    def peers_changed(self) -> None:
        """Have the peers read again at once."""
        self._soon.set()

    def render(self, intents: Mapping[ServiceKey, Announced]) -> Mapping[ServiceKey, BgpSpec]:
        """See `spec.specs_of`."""
        return spec.specs_of(intents)

    def diff(
        self, desired: Mapping[ServiceKey, BgpSpec], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    @property
    def read_incomplete(self) -> bool:
        return self._unrepaired

    withdraws_first = True

    def withdrawals(
        self, intents: Mapping[ServiceKey, Announced], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.withdrawals`."""
        return spec.withdrawals(intents, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Actual]:
        """Return what is announced. With None, also compare the files and the routes of BIRD with
        it, and repair what another program has changed. The loop, which also finds the differences
        of other drivers, does not wait for a BIRD that is known not to answer."""
        if keys is None:
            self._unrepaired = bool(self._adopted and self._problem)
            if not self._unrepaired:
                async with self._changing:
                    if self._adopt():
                        await self._repair()
        now_s = _now_s()
        services = self._desired.services.keys()
        known = services if keys is None else services & set(keys)
        outcomes: dict[Wants, Outcome] = {}
        return {key: self._actual(key, now_s, outcomes) for key in known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Carry out the changes. If BIRD does not answer, its files are written anyway, and the
        outcomes contain the problem."""
        async with self._changing:
            if not self._adopt():
                refused = Outcome(
                    "unavailable", self._problem, SESSION_DOWN, in_part=True, coarse=True
                )
                return {change.service: refused for change in changes}
            self._stale |= self._desired.apply(changes, _now_s(), stamp())
            for key in self._reported.keys() - self._desired.services.keys():
                del self._reported[key]
            await self._update()
            self._soon.set()
            return self._outcomes(changes)

    async def hold_back(self, *, held: bool) -> None:
        """Export nothing while this host is cut off and catches up. At the end, have the Services
        reconciled: what serves them is complete before their routes are exported again."""
        if held:
            self.cuts += 1
            async with self._changing:
                self._desired.hold_back()
                self._stale = True
                await self._update()
        else:
            self._desired.release(_now_s())
            self._stale = True
        self._requeue(list(self._desired.services))

    @property
    def held_back(self) -> bool:
        """Whether nothing is exported because this host is cut off from the network, or catches up.
        A process that starts meanwhile continues with that."""
        return self._desired.held_back

    async def hold_back_before_open(self, *, held: bool) -> None:
        """Have a BIRD that an earlier process left export nothing, or everything again. Before
        `open`, the peers are not known, so the routes stay as the earlier process wrote them. Raise
        FairleadError; another call then tries again."""
        async with self._changing:
            if self._opened or not self._adopt():
                return
            self.cuts += held and not self.held_back
            if held:
                self._desired.hold_back()
            else:
                self._desired.release_at_once()
            self.speaker.hold_back(held=held)
            if self.speaker.pending:
                await self.speaker.bird.client.configure()
                self.speaker.pending = False

    async def reads_session(self) -> bool:
        """Return whether BIRD has an established session now, also before `open`. A BIRD that does
        not answer has none."""
        with suppress(FairleadError):
            protocols = await self.speaker.bird.client.protocols()
            return any(each.established for each in protocols)
        return False

    def announces(self, address: str) -> bool:
        """Return whether a neighbor gets a route to this address from this host."""
        found = self._announced_by_address.among(self._addresses(), (address,))
        return any(each.peers for each in found)

    def established_peers(self) -> Collection[str]:
        """Return the names of the peers with an established session when the sessions were last
        read."""
        return [name for name, one in self.watch.sessions.items() if one.established]

    @property
    def has_session(self) -> bool:
        """Whether a session was established when the sessions were last read. A host without peers
        counts as if it had one."""
        sessions = self.watch.sessions.values()
        return not sessions or any(each.established for each in sessions)

    async def run(self) -> None:
        """Until cancelled: watch the sessions, follow changes of the peers, start BIRD again if it
        ends, and check whether routers have the routes."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            if self._section.check_routes:
                tasks.create_task(self.prober.run())

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._woken()
            self._soon.clear()
            async with self._changing:
                await self._update()
            await asyncio.sleep(process.POLL_S)

    async def poll(self) -> None:
        """Do the periodic work of `run` now."""
        async with self._changing:
            await self._update()

    async def remove(self) -> Sequence[str]:
        """Withdraw all routes, after a pause in which neighbors move to other routes. Stop BIRD and
        delete its files. A BIRD that another program started keeps an empty configuration."""
        async with self._changing:
            return await remove_bird(self._section, self._role)

    async def withdraw(self) -> None:
        """Withdraw all routes, after a pause in which neighbors move to other routes."""
        await self._set_withdrawn("leaving")
        await asyncio.sleep(GRACE_S)
        await self._set_withdrawn("yes")

    async def stay(self) -> None:
        """Undo `withdraw`."""
        await self._set_withdrawn("no")

    async def _set_withdrawn(self, state: Literal["no", "leaving", "yes"]) -> None:
        async with self._changing:
            self._desired.withdrawn, self._stale = state, True
            self._version += 1
            await self._update()

    def status(self) -> BgpState:
        """For `/state`. May be called from any thread."""
        found, checks = dict(self.watch.sessions), self.prober.results
        return BgpState(
            "bird",
            route_checks.without_refused(self._addresses(), checks),
            tuple(found[name].session for name in sorted(found)),
            self._problem,
            (
                *([CUT_OFF] if self.held_back else []),
                *self.speaker.checked.refused,
                *route_checks.findings_of(checks, self._peer_names()),
            ),
            checks,
        )

    def _addresses(self) -> tuple[AnnouncedAddress, ...]:
        """Return the announced addresses. May be called from any thread."""
        version, addresses = self._shown
        if version != self._version:
            version = self._version
            addresses = self._desired.addresses(dict(self.watch.sessions))
            self._shown = version, addresses
        return addresses

    def _peer_names(self) -> Mapping[str, str]:
        return {name: f"{name} ({one.peer.target})" for name, one in self.watch.sessions.items()}

    def _routes_checked(self, addresses: Collection[str]) -> None:
        """Have the Services with these addresses reconciled."""
        self._status_changed()
        services = self._desired.services.items()
        due = [key for key, each in services if any(one.address in addresses for one in each)]
        if due:
            self._requeue(due)

    def watch_status(self, changed: Callable[[], None]) -> None:
        self._status_changed = changed

    def collectors(self) -> tuple[BgpCollector]:
        return (
            BgpCollector(
                lambda: dict(self.watch.sessions),
                lambda: self.speaker.checked.refused_names,
                lambda: (self.held_back, self.cuts),
                self.prober.checks.counts,
            ),
        )

    async def _woken(self) -> None:
        """Wait until there is something to do, or BIRD has ended."""
        waits: list[asyncio.Task[object]] = [asyncio.create_task(self._soon.wait())]
        if self._adopted and self._section.start_daemon and self.speaker.bird.pid() is not None:
            waits.append(asyncio.create_task(self.speaker.bird.exited()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def _adopt(self) -> bool:
        """Take over what an earlier process announced, once. Return False if the directory belongs
        to another role; nothing is announced then."""
        if self._adopted:
            return True
        try:
            routes = self.speaker.adopt()
        except Refused as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.error("nothing is announced by BGP", problem=self._problem)
                self._version += 1
                self._status_changed()
            return False
        self._desired.adopt(routes, _now_s())
        self._adopted = True
        return True

    async def _update(self) -> None:
        """Make BIRD announce the desired routes, and read its sessions. A failure is kept as
        the problem, which the outcomes of Services contain."""
        if not self._adopt():
            return
        self._stale |= self._desired.restore(_now_s())
        before, stale, shown = self._problem, self._stale, self._sessions()
        changed = False
        try:
            if self._problem and _now_s() < self._retry_s:
                # A failure is reported by the next attempt: its problem may be another one.
                with suppress(FairleadError):
                    self._write_routes()
            else:
                changed = await self._follow_peers()
                self._write_routes()
                await self._bring_up()
                changed |= await self.watch.observe(self.speaker.bird.client)
                self.speaker.pending |= await self.watch.find_port_holder()
                self._problem = ""
                self._backoff.reset()
        except FairleadError as error:
            self._problem = str(error)
            self._retry_s = _now_s() + self._backoff.next_s()
            if self._problem != before:
                log.warning("BIRD does not work", problem=self._problem)
        # An unchanged problem is no news: the pass over the Services would end in another attempt.
        if changed or self._problem != before:
            self._requeue(list(self._desired.services))
        if changed or stale or self._problem != before or self._sessions() != shown:
            self._version += 1
            self._status_changed()

    def _sessions(self) -> list[BgpSession]:
        return [one.session for one in self.watch.sessions.values()]

    async def _follow_peers(self) -> bool:
        """Configure the present peers. Return whether they have changed."""
        changed = await self.speaker.configure_peers(self._peers())
        if changed:
            self.watch.track(self.speaker.checked.accepted)
            self._stale = True  # routes contain the AS number and the marks of the peers
        return changed

    def _write_routes(self) -> None:
        """Write the file of routes if it may differ from the desired ones."""
        if self._stale and self.speaker.needed:
            text = self._desired.text(self.speaker.asn, self.speaker.checked.accepted)
            self.speaker.write_routes(text)
        self._stale = False

    async def _bring_up(self) -> None:
        """Make BIRD run with the present files."""
        if await self.speaker.ensure_running():
            self.watch.be_patient()
        await self.speaker.configure()

    async def _repair(self) -> None:
        """Compare BIRD with the desired routes, and have it read its files again if they
        differ."""
        self._stale = True
        self.speaker.restore()
        with suppress(FairleadError):
            self.speaker.pending |= await self.speaker.prefixes() != self._desired.routes().keys()
        await self._update()

    def _actual(self, key: ServiceKey, now_s: float, outcomes: dict[Wants, Outcome]) -> Actual:
        outcome = self._outcome(key, now_s, outcomes)
        desired = self._desired
        contributions = () if key in desired.withheld else desired.services[key]
        return Actual(
            contributions,
            desired.leaving_until_s.get(key, now_s + 1) <= now_s,
            outcome.state != "done" or outcome.notes != self._reported.get(key, ()),
            spec.moved(contributions, self.announced_elsewhere),
        )

    def _outcome(self, key: ServiceKey, now_s: float, outcomes: dict[Wants, Outcome]) -> Outcome:
        """Return the outcome of a Service whose routes are in place. `outcomes`: the
        outcomes that were computed already, because most Services have the same outcome."""
        if self.held_back:
            return Outcome("unavailable", str(CUT_OFF), CUT_OFF.code)
        wants = wants_of(self._desired.services[key])
        if wants not in outcomes:
            outcomes[wants] = self._without_bird(now_s) if self._problem else self._of(wants, now_s)
        own = sorted({each.address for each in self._desired.services[key]})
        checks = self._checks_by_address.among(self.prober.results, own)
        if not any(each.state in route_checks.PROBLEMS for each in checks):
            return outcomes[wants]
        found = self._announced_by_address.among(self._addresses(), own)
        receivers = {each.address: each.peers for each in found}
        return route_checks.with_checks(outcomes[wants], checks, receivers, self._peer_names())

    def _of(self, wants: Wants, now_s: float) -> Outcome:
        refused, holder = self.speaker.checked.refused, self.watch.port_holder
        return sessions.outcome_of(
            wants, self.watch.sessions, refused, now_s=now_s, port_holder=holder
        )

    def _without_bird(self, now_s: float) -> Outcome:
        if now_s < self._patient_until_s:
            left_s = self._patient_until_s - now_s
            return Outcome("waiting", self._problem, again_s=left_s)
        return Outcome("unavailable", self._problem, SESSION_DOWN)

    def _outcomes(self, changes: Sequence[Change]) -> dict[ServiceKey, Outcome]:
        now_s = _now_s()
        computed: dict[Wants, Outcome] = {}
        outcomes: dict[ServiceKey, Outcome] = {}
        for change in changes:
            key = change.service
            if isinstance(change, Report) and change.problem:
                outcomes[key] = Outcome(
                    "refused", change.problem, in_part=key in self._desired.services
                )
            elif key in self._desired.leaving_until_s:
                left_s = self._desired.leaving_until_s[key] - now_s
                outcomes[key] = Outcome("done", again_s=max(left_s, process.POLL_S))
            elif key in self._desired.services:
                outcomes[key] = self._reportable(key, self._outcome(key, now_s, computed))
            if not isinstance(change, Withdraw) and change.kept:
                waiting = method_change.waiting(change.kept, "BGP", "layer 2")
                outcomes[key] = outcomes.get(key, DONE).joined(waiting)
        # The host serves the Service, and other hosts may announce it.
        return {
            key: msgspec.structs.replace(outcome, coarse=outcome.state != "done")
            for key, outcome in outcomes.items()
        }

    def _reportable(self, key: ServiceKey, outcome: Outcome) -> Outcome:
        """Return the outcome without notes that were reported already."""
        if outcome.state != "done":
            self._reported.pop(key, None)
            return outcome
        known = self._reported.get(key, ())
        self._reported[key] = outcome.notes
        return DONE if known == outcome.notes else outcome


def _now_s() -> float:
    return asyncio.get_running_loop().time()
