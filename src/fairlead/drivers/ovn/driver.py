"""The driver of class `fairlead.io/ovn`: load balancers in the northbound database of OVN.

In: LoadBalancers with OvnSettings. Out: for each address, port and protocol a row that is attached
to the configured router; Outcomes. The rows are known from a monitor of the database, so `read`
makes no request. `apply` makes one transaction for all Services of the batch, and a new row is done
once every chassis has installed it, so that the address is published after it works.

Invariants: while the database is not connected, nothing of a Service that may have rows is
regarded as removed. A failure of the database is the Outcome of the Services of this class alone,
and `apply` does not wait for a database that is not connected. Rows of others are not written; an
address that one of them has is refused."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec
import structlog

from fairlead.drivers import Component, Requeue, no_requeue
from fairlead.drivers.ovn import northbound
from fairlead.drivers.ovn.attached import ROUTERS, SWITCHES
from fairlead.drivers.ovn.changes import (
    AwaitFlows,
    Blocked,
    Change,
    CreateRow,
    DeleteRow,
    Report,
    UpdateRow,
    Write,
    is_appearance,
)
from fairlead.drivers.ovn.confirming import Confirming
from fairlead.drivers.ovn.deadlines import Deadlines
from fairlead.drivers.ovn.diff import diff
from fairlead.drivers.ovn.foreign_rows import ForeignRows
from fairlead.drivers.ovn.marks import due_of, removed_of
from fairlead.drivers.ovn.metrics import Figures, OvnCollector
from fairlead.drivers.ovn.new_foreign_rows import NewForeignRows
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.refusals import Writes, refusals
from fairlead.drivers.ovn.render import specs_of
from fairlead.drivers.ovn.southbound import Southbound
from fairlead.drivers.ovn.spec import Attachment, ServiceRows, ServiceSpec, Site
from fairlead.drivers.ovn.state import state_of
from fairlead.errors import FairleadError, Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.ovsdb import Changes, Database, Mutate, Tls
from fairlead.role_state import OvnState

log = structlog.get_logger()

BATCH = 32
COALESCE_S = 0.1
"""The minimum interval between two changes of the backends of a row. Each change may delay a few
new connections, and a rollout makes many."""
START_S = 2.0
"""How long the role waits for the rows at its start. They are known much earlier if the database is
reachable."""
INCREMENT = Mutate(northbound.GLOBAL, (), (("nb_cfg", "+=", 1),))


class OvnDriver(Component):
    """Implements fairlead.drivers.Driver."""

    name = "ovn"
    batch = BATCH

    def __init__(
        self,
        site: Site,
        remotes: Sequence[str],
        *,
        southbound: Sequence[str] = (),
        tls: Tls | None = None,
        drain_timeout_s: float = 300.0,
        claimed: Callable[[ServiceKey], bool] = lambda _: False,
        published: Callable[[ServiceKey], Collection[str]] = lambda _: (),
        requeue: Requeue = no_requeue,
        fence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the driver. `remotes`, `southbound`: addresses of the servers of the databases.
        `drain_timeout_s`: for Services that are gone. `claimed`: returns whether class ovn has
        claimed the Service. `published`: returns the addresses in the status of the Service.
        `fence` is called before each write, and raises if this process is not the leader. `clock`
        returns Unix time. Raise Refused for a malformed address."""
        self._site = msgspec.structs.replace(site, switches=())  # which exist is not known yet
        self._drain_timeout_s = drain_timeout_s
        self._claimed = claimed
        self._requeue = requeue
        self._fence = fence
        self._clock = clock
        self._deadlines = Deadlines(clock, self._requeue_rows)
        self._rows = Northbound(site, self._rows_changed)
        self._database = Database(
            northbound.NAME, remotes, northbound.tables(site), tls=tls, on_change=self._follow
        )
        self._rows.database = self._database
        self._south = Southbound(southbound, tls) if southbound else None
        self._confirming = Confirming(self._rows, self._south, published)
        self._foreign_rows = ForeignRows(site, self._rows, self._south)
        self._new_foreign_rows = NewForeignRows(self._rows, requeue)
        self._writing: set[ServiceKey] = set()
        self._written_s: dict[ServiceKey, float] = {}
        self._deferred: set[ServiceKey] = set()
        """The Services that wait for the database, the router or a switch."""
        self._attachments: Collection[Attachment] = frozenset()
        """The configured routers and switches that exist."""
        self._connected = False
        self._results = Counter[str]()
        """The number of transactions by result."""
        self._following: asyncio.Task[None] | None = None

    @property
    def read_incomplete(self) -> bool:
        """True until the database has been read."""
        return not self._database.complete

    async def open(self) -> None:
        """Connect, and wait a moment for the rows: the Services that have them are served."""
        self._following = asyncio.create_task(self._database.run(), name="northbound database")
        with suppress(FairleadError):
            await self._database.wait_synced(START_S)

    async def close(self) -> None:
        """Disconnect."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def run(self) -> None:
        """Keep the copies of the databases up to date."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_database(), name="northbound database")
            group.create_task(self._deadlines.run(), name="deadlines of rows")
            group.create_task(self._new_foreign_rows.run(), name="new rows of others")
            if self._south is not None:
                group.create_task(self._south.run(), name="southbound database")

    def collectors(self) -> Sequence[OvnCollector]:
        """Return the collector of the metrics of class ovn."""
        return (OvnCollector(self._figures),)

    def _figures(self) -> Figures:
        """Return the present figures. Called in a thread."""
        return Figures(
            {each.name: each.synced for each in self._databases},
            self._rows.count,
            self._confirming.count,
            len(self._behind),
            dict(self._results),
        )

    def status(self) -> OvnState:
        """Return the state of this driver for `/state`. Called in a thread."""
        return state_of(
            self._site, self._databases, self._rows, self._confirming.installed, self._behind
        )

    @property
    def _databases(self) -> Sequence[Database]:
        return [self._database, *([self._south.database] if self._south is not None else [])]

    @property
    def _behind(self) -> Sequence[str]:
        """The chassis that have not confirmed the last change."""
        return self._south.behind(self._rows.number("nb_cfg")) if self._south is not None else ()

    def obstacle(self) -> FairleadError | None:
        """Return why rows cannot be removed at present: a Service with rows cannot change to
        another class then."""
        return self._database.obstacle

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until the rows are known. Raise the problem of the database after the time."""
        await self._database.wait_synced(timeout_s)

    def render(
        self, intents: Mapping[ServiceKey, LoadBalancer]
    ) -> Mapping[ServiceKey, ServiceSpec]:
        """Return what Services should have: a function of the argument and the switches that
        exist."""
        return specs_of(self._site, intents)

    def diff(
        self, desired: Mapping[ServiceKey, ServiceSpec], actual: Mapping[ServiceKey, ServiceRows]
    ) -> Sequence[Change]:
        """Return the steps: a function of the arguments, the time and the type of the router."""
        return diff(self._site, desired, actual, self._drain_timeout_s, self._clock())

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, ServiceRows]:
        """Return the rows of these Services, or all rows (None). Nothing is raised: a problem with
        OVN is part of the result, because the Services of other classes have no part in it."""
        if keys is None:
            self._foreign_rows.forget()
            keys = list(self._rows.services)
        blocked = self._blocked()
        found = {}
        for key in keys:
            rows = (
                self._rows.rows_of(key, self._confirming.installed)
                if self._database.complete
                else ()
            )
            unreported = key in self._new_foreign_rows.unreported
            found[key] = ServiceRows(rows, blocked, bool(rows) or self._claimed(key), unreported)
        return found

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Make all writes in one transaction. Raise Conflict or Refused if it fails: the loop then
        halves the batch."""
        outcomes: dict[ServiceKey, Outcome] = {}
        writes: dict[ServiceKey, list[Write]] = {}
        reports: list[ServiceKey] = []
        for change in changes:
            match change:
                case Report():
                    reports.append(change.service)
                case Blocked():
                    outcomes[change.service] = change.outcome
                    self._deferred.add(change.service)
                case AwaitFlows():
                    waiting = self._confirming.outcome(change.service)
                    outcomes = _joined(outcomes, {change.service: waiting})
                case _:
                    writes.setdefault(change.service, []).append(change)
        if writes:
            try:
                outcomes = _joined(outcomes, await self._decide(writes))
            except Unavailable as error:
                # Not raised, because the loop would repeat it for each half of the batch, and
                # Services of other classes wait meanwhile.
                self._deferred |= writes.keys()
                failed = dict.fromkeys(writes, Outcome("unavailable", str(error)))
                outcomes = _joined(outcomes, failed)
        for key in reports:
            outcome = outcomes.get(key) or self._confirming.outcome(key)
            notes = (*outcome.notes, *self._new_foreign_rows.take(key))
            outcomes[key] = msgspec.structs.replace(outcome, notes=notes)
        return outcomes

    async def _decide(self, writes: Writes) -> Mapping[ServiceKey, Outcome]:
        """Refuse or postpone some of the writes, and make the others. Raise as `transact`."""
        if obstacle := self._database.obstacle:
            raise obstacle
        refused = await refusals(writes, self._rows, self._confirming.installed, self._foreign_rows)
        # Existing rows must still follow the pods.
        possible = {
            key: [each for each in some if not is_appearance(each)] if key in refused else some
            for key, some in writes.items()
        }
        early = self._too_early(writes)
        left = {key: some for key, some in possible.items() if some and key not in early}
        return {**early, **(await self._write(left) if left else {}), **refused}

    async def _write(self, writes: Writes) -> Mapping[ServiceKey, Outcome]:
        # A row whose marks were changed may still have the name of a row that is created.
        every = sorted(
            (write for some in writes.values() for write in some),
            key=lambda write: isinstance(write, CreateRow),
        )
        # The address of a Service that is gone may already belong to one of these Services. Two
        # rows for one address would both get traffic.
        stale = [
            DeleteRow(write.service, row)
            for write in every
            if isinstance(write, CreateRow)
            for row in self._rows.rows_of_others(write.service, write.frontend)
        ]
        operations = [each for write in (*stale, *every) for each in self._rows.operations(write)]
        if any(map(is_appearance, every)):
            operations.append(INCREMENT)
        self._fence()
        self._writing |= writes.keys()
        try:
            await self._database.transact(
                operations, comment="fairlead", timeout_s=northbound.TIMEOUT_S
            )
        except FairleadError as error:
            self._results[type(error).__name__] += 1
            raise
        else:
            self._results["Done"] += 1
        finally:
            self._writing -= writes.keys()
        # Another program may have changed a row again before the answer came.
        self._requeue({write.service for write in every if not self._rows.shows(write)})
        self._written_s |= dict.fromkeys(writes, time.monotonic())
        outcomes = {key: self._confirming.outcome(key) for key in writes}
        if warnings := self._foreign_rows.take_warnings():
            first = min(outcomes)
            notes = (*outcomes[first].notes, *warnings)
            outcomes[first] = msgspec.structs.replace(outcomes[first], notes=notes)
        return outcomes

    def _too_early(self, writes: Writes) -> Mapping[ServiceKey, Outcome]:
        """Return the Services of which nothing but backends changes, and whose backends have
        changed a moment ago: they are changed a moment later."""
        now_s = time.monotonic()
        self._written_s = {
            key: at_s for key, at_s in self._written_s.items() if now_s - at_s < COALESCE_S
        }
        return {
            key: self._confirming.outcome(key, self._written_s[key] + COALESCE_S - now_s)
            for key, some in writes.items()
            if key in self._written_s
            and key not in self._deferred  # a refused Service is not compared again a moment later
            and all(map(_only_backends, some))
        }

    def _blocked(self) -> Outcome | None:
        """Return why no row can be written, for all Services of the class."""
        if obstacle := self._database.obstacle:
            return Outcome("unavailable", str(obstacle))
        refusal = self._foreign_rows.refusal()
        return Outcome("refused", str(refusal)) if refusal is not None else None

    async def _follow_database(self) -> None:
        if self._following is None:
            self._following = asyncio.create_task(self._database.run())
        await self._following

    def _follow(self, changes: Changes) -> None:
        """Take over changes of the database."""
        appeared = self._rows.follow(changes)
        for row, columns in changes.get(northbound.BALANCERS, {}).items():
            self._deadlines.note(row, due_of(columns.map("external_ids")) if columns else None)
        if ROUTERS in changes or SWITCHES in changes:
            self._follow_attachments()
        if new_foreign := self._rows.take_new_foreign():
            self._foreign_rows.forget()
            self._new_foreign_rows.note(new_foreign)
        installed = self._confirming.follow(changes, appeared, at_start=not self._connected)
        self._requeue_rows(installed)
        if not changes and self._database.synced:
            self._connected = True
            self._continue()

    def _follow_attachments(self) -> None:
        """Use the routers and switches that exist, and compare Services again when one was created
        or deleted."""
        is_gateway = self._rows.is_gateway_router()
        attachments = self._rows.attachments()
        if attachments == self._attachments and is_gateway == self._site.gateway_router:
            return
        self._site = msgspec.structs.replace(
            self._site,
            switches=self._rows.switches(),
            gateway_router=is_gateway,
            routers=self._rows.routers(),
        )
        if attachments != self._attachments:
            self._attachments = attachments
            self._foreign_rows.forget()
            self._continue()

    def _continue(self) -> None:
        """Have Services compared that could not be written."""
        deferred, self._deferred = self._deferred, set()
        self._requeue(deferred)
        self._new_foreign_rows.note(())

    def _requeue_rows(self, rows: Collection[str]) -> None:
        self._requeue({key for row in rows if (key := self._rows.key_of(row)) is not None})

    def _rows_changed(self, keys: Collection[ServiceKey]) -> None:
        """Have Services compared whose rows another program has changed."""
        if others := set(keys) - self._writing:
            self._requeue(others)


def _joined(
    first: Mapping[ServiceKey, Outcome], second: Mapping[ServiceKey, Outcome]
) -> dict[ServiceKey, Outcome]:
    """Return the combined outcomes of each Service."""
    return {**first} | {
        key: first[key].joined(each) if key in first else each for key, each in second.items()
    }


def _only_backends(write: Write) -> bool:
    return isinstance(write, UpdateRow) and removed_of(write.columns.external_ids) is None
