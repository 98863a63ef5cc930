"""A copy of a part of a database that stays up to date, and transactions on the database.

In: addresses of servers, tables to monitor. Out: rows, their changes, results of transactions. Run
`run` in one task. It connects to one server, and after a failure to the next one, with a back-off
after each round. The copy is resumed by the id of its last transaction (monitor_cond_since), so a
server of a cluster sends only the differences; the rows remain readable meanwhile, and
`stale_since_s` tells since when they may be outdated. Follows RFC 7047 and ovsdb-server(7).

Invariants: when `transact` returns or raises Conflict, the copy contains the transaction, or what
it conflicts with. A transaction whose answer was lost is repeated after the copy is up to date
again. It is executed once if it inserts a row or waits for a value that it changes: the server
refuses the second execution."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import structlog

from fairlead.backoff import Backoff
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.ovsdb import membership, transaction
from fairlead.net.ovsdb.membership import Membership
from fairlead.net.ovsdb.monitor import METHOD, Monitor
from fairlead.net.ovsdb.operations import Operation, OutcomeUnknown, Result, is_repeatable
from fairlead.net.ovsdb.remotes import Remote, Tls, connect, read_remote
from fairlead.net.ovsdb.replica import Changes, Rows, Table
from fairlead.net.ovsdb.schema import Schema, read_schema
from fairlead.net.ovsdb.session import (
    ECHO_AFTER_S,
    ECHO_TIMEOUT_S,
    LIMIT_BYTES,
    ConnectionLost,
    Raw,
    Session,
)

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 5.0
SYNC_TIMEOUT_S = 120.0
"""The time within which a server that responds must send all rows."""
TRANSACT_TIMEOUT_S = 10.0
STEADY_S = 5.0
"""A connection that was up to date for this long is a success for the back-off."""
_PATIENCE_ROUNDS = 3
"""After this many rounds of servers with old data, their data is accepted."""


class Database:
    """A database of OVSDB, such as OVN_Northbound."""

    def __init__(
        self,
        name: str,
        remotes: Sequence[str],
        tables: Mapping[str, Table],
        *,
        tls: Tls | None = None,
        leader_only: bool = False,
        on_change: Callable[[Changes], None] = lambda changes: None,
        limit_bytes: int = LIMIT_BYTES,
        echo_after_s: float = ECHO_AFTER_S,
        echo_timeout_s: float = ECHO_TIMEOUT_S,
    ) -> None:
        """`remotes`: as in OVN's tools, such as `ssl:192.0.2.1:6641`. `on_change` is called with
        each change of rows, and with no change when `synced` changes, or when the server answers
        again. Raise Refused if there is no
        address, or a malformed one."""
        if not remotes:
            raise Refused(f"no server of database {name} is given", fix="name at least one")
        self.name = name
        self.schema: Schema | None = None
        """The schema of the server; None before the first connection."""
        self.server = ""
        """The address of the server that is or was connected last."""
        self.problem: FairleadError | None = None
        """Why the copy is not up to date; None if it is, or before the first failure."""
        self.stale_since_s: float | None = time.monotonic()
        """When the copy ceased to be up to date (time.monotonic), initially the time of
        construction; None while it is up to date."""
        self.complete = False
        """Whether all monitored rows have been read at least once."""
        self._remotes = [read_remote(each) for each in remotes]
        self._tls = tls
        self._on_change = on_change
        self._limit_bytes = limit_bytes
        self._echo_after_s = echo_after_s
        self._echo_timeout_s = echo_timeout_s
        self._membership = Membership(
            leader_only=leader_only, patience=_PATIENCE_ROUNDS * len(self._remotes)
        )
        self._monitor = Monitor(name, tables, self._changed)
        self._session: Session | None = None
        self._asking: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._answers = True
        """Whether the server answers transactions: False after one was not answered in its time,
        until the server answers another one, or the connection ends."""

    @property
    def synced(self) -> bool:
        """Whether the copy is up to date, and transactions are sent at once."""
        return self._synced.is_set()

    @property
    def obstacle(self) -> Unavailable | None:
        """Why a transaction would have to wait; None if nothing is known against it."""
        if not self.synced:
            found = self.problem or f"database {self.name} has not been read yet"
            return Unavailable(str(found))
        if not self._answers:
            return Unavailable(f"{self.server}: database {self.name} does not answer")
        return None

    def rows(self, table: str) -> Rows:
        """Return the rows of a monitored table, as of the last contact with a server. The mapping
        changes with the next update."""
        return self._monitor.rows(table)

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until the copy is up to date. Raise the latest problem after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            raise self.problem or Unavailable(
                f"database {self.name} was not read within {timeout_s:g} s"
            ) from None

    async def run(self) -> NoReturn:
        """Keep the copy up to date until the task is canceled."""
        retry = Backoff(0.1, 10.0)
        order = list(self._remotes)
        random.shuffle(order)  # not all clients use the same member of a cluster
        failures = 0
        while True:
            for remote in order:
                begun_s = time.monotonic()
                problem = await self._serve(remote)
                # A server that fails only after a long time, such as one whose answer is too large,
                # is not asked again at once.
                if self.stale_since_s is None and time.monotonic() - begun_s > STEADY_S:
                    retry.reset()
                    failures = 0
                self._failed(problem)
                failures += 1
                if failures % len(order) == 0:
                    await asyncio.sleep(retry.next_s())

    async def transact(
        self,
        operations: Sequence[Operation],
        *,
        comment: str = "",
        timeout_s: float = TRANSACT_TIMEOUT_S,
    ) -> tuple[Result, ...]:
        """Execute all operations, or none, and return the result of each.

        Raise Conflict if a Wait was not satisfied or another client was faster, Refused if the
        operations are not allowed, and Unavailable if nothing was done. OutcomeUnknown, which is
        an Unavailable, means that the operations may have been executed, or may still be.

        If the answer is lost, the operations are repeated. A Wait for the value that an operation
        changes prevents that a repetition overwrites what another client wrote meanwhile. After a
        Conflict, the copy shows whether an earlier attempt was executed, also one of the server: a
        member of a cluster repeats a transaction when the leader changes."""
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    session, schema = await self._connected()
                    repeated, sent = sent, True
                    try:
                        return await transaction.execute(
                            session, schema, operations, comment=comment, repeated=repeated
                        )
                    except ConnectionLost as error:
                        if not is_repeatable(operations):
                            raise self._unknown(error.message) from error
                    except Unavailable as error:
                        if repeated:  # this attempt was not executed, but an earlier one may be
                            raise self._unknown(error.message) from error
                        raise
        except TimeoutError:
            if sent:
                self._ask_again()
                raise self._unknown(f"no answer within {timeout_s:g} s") from None
            raise Unavailable(
                f"transaction on database {self.name}: not connected within {timeout_s:g} s"
                + (f": {self.problem.message}" if self.problem else "")
            ) from None

    async def _connected(self) -> tuple[Session, Schema]:
        """Return the connection as soon as the copy is up to date."""
        while True:
            await self._synced.wait()
            assert self._session is not None
            assert self.schema is not None
            if not self._session.ended:
                return self._session, self.schema
            await asyncio.sleep(0)  # `run` has not noticed the end yet

    def _ask_again(self) -> None:
        """Find out when the server answers again."""
        if self._answers and self.synced and self._session is not None:
            self._answers = False
            self._asking = asyncio.create_task(self._await_answer(self._session))

    async def _await_answer(self, session: Session) -> None:
        with suppress(FairleadError):
            await session.request("transact", [self.name])  # a transaction without operations
        if not session.ended:
            self._answers = True
            self._on_change({})

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"transaction on database {self.name} at {self.server}: {why}; it may have been "
            f"executed",
            fix="read the rows again",
        )

    async def _serve(self, remote: Remote) -> FairleadError:
        """Use a server until it fails. Return the reason."""
        try:
            stream = await connect(remote, self._tls, CONNECT_TIMEOUT_S)
        except FairleadError as error:
            return error
        self.server = str(remote)
        server = Monitor(
            membership.DATABASE, membership.monitored(self.name), lambda _: self._check(server)
        )

        def receive(method: str, params: Raw) -> None:
            if method == METHOD and not server.receive(params):
                self._monitor.receive(params)

        session = Session(
            str(remote),
            stream,
            receive,
            limit_bytes=self._limit_bytes,
            echo_after_s=self._echo_after_s,
            echo_timeout_s=self._echo_timeout_s,
        )
        # No TaskGroup: until Python 3.13, it may lose a cancellation from outside that comes at the
        # same time as the end of the connection (https://github.com/python/cpython/issues/116720).
        receiving = asyncio.create_task(session.run())
        try:
            await self._begin(session, server)
            return await _reason(receiving)
        except ConnectionLost:
            return await _reason(receiving)
        except FairleadError as error:
            return error
        finally:
            self._synced.clear()
            ended = [receiving, *([self._asking] if self._asking is not None else [])]
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            self._asking, self._answers = None, True

    async def _begin(self, session: Session, server: Monitor) -> None:
        """Check the server, and read the rows or what has changed since the last connection."""
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await server.start(session, membership.SCHEMA)
                answer = await session.request("get_schema", [self.name])
                self.schema = read_schema(answer)
                await self._monitor.start(session, self.schema)
        except TimeoutError:
            raise Unavailable(
                f"{session.name}: database {self.name} was not read within {SYNC_TIMEOUT_S:g} s"
            ) from None
        if self.problem is not None:
            log.info("database connected", database=self.name, server=session.name)
        self._session, self.problem = session, None
        self.stale_since_s, self.complete = None, True
        self._synced.set()
        self._on_change({})

    def _check(self, server: Monitor) -> None:
        rows = server.rows(membership.TABLE)
        self._membership.check(self.name, next(iter(rows.values()), None))

    def _changed(self, changes: Changes) -> None:
        if changes:
            self._on_change(changes)

    def _failed(self, problem: FairleadError) -> None:
        if type(problem) is not type(self.problem):
            level = log.error if isinstance(problem, Refused) else log.warning
            level("database not connected", database=self.name, problem=str(problem))
        self.problem = problem
        if self.stale_since_s is None:
            self.stale_since_s = time.monotonic()
            self._on_change({})


async def _reason(receiving: asyncio.Task[NoReturn]) -> FairleadError:
    """Wait for the end of a connection, and return its reason."""
    try:
        await receiving
    except FairleadError as error:
        return error
