"""Leader election by a Lease (coordination.k8s.io/v1).

In: a client, the name of the Lease, the identity of this process. Out: `lead` runs the work while,
and only while, this process holds the Lease. Invariants: all durations are measured by the
monotonic clock of this process; wall clocks of different hosts are never compared. A holder that
cannot renew stops `lease_s - renew_deadline_s` before another process may start. Work and renewal
are in one TaskGroup: when the work ends, so does the renewal. `assert_leading` is the fence in
front of each write: a process that was suspended finds after its resumption that its term is over,
before it writes again. Follows client-go's leaderelection: a Lease is free when a candidate has not
seen its record change for the Lease's duration."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

import structlog

from fairlead.errors import FairleadError, Refused, Unavailable, plain
from fairlead.kube.answers import NotFound, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES, Lease, LeaseSpec
from fairlead.kube.objects import ObjectKey

log = structlog.get_logger()

ABSENT = "absent"


class Elector:
    """One candidate for one Lease.

    `lease_s`: time since the holder's last renewal after which another process may take the Lease.
    `renew_deadline_s`: time since its own last renewal after which a holder stops; less than
    `lease_s`.
    `retry_s`: interval between renewals, and between attempts to acquire."""

    def __init__(
        self,
        client: Client,
        key: ObjectKey,
        identity: str,
        *,
        lease_s: float = 15.0,
        renew_deadline_s: float = 10.0,
        retry_s: float = 2.0,
    ) -> None:
        if not retry_s < renew_deadline_s < lease_s:
            raise ValueError("an Elector needs retry_s < renew_deadline_s < lease_s")
        self._client = client
        self._key = key
        self._identity = identity
        self._lease_s = lease_s
        self._renew_deadline_s = renew_deadline_s
        self._retry_s = retry_s
        self._renewed_at: float | None = None
        self._seen: tuple[str, float] = ("", 0.0)
        """The last record of the Lease that this process did not hold, and when it was first
        seen."""
        self._written = ""
        """The renewTime of the last write or attempted write. It identifies a record as written by
        this process, whatever the clock shows."""
        self._failing: type[Exception] | None = None

    @property
    def leading(self) -> bool:
        """Whether this process holds the Lease, and for long enough to write."""
        return self._renewed_at is not None and _now() - self._renewed_at < self._renew_deadline_s

    def assert_leading(self) -> None:
        """Raise Unavailable unless this process leads. Call it before each write."""
        if not self.leading:
            raise Unavailable(
                f"{self._identity} does not hold Lease {self._key}: another process may be writing"
            )

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the Lease and run `work`, again from its start in each term, until cancelled.

        A leader that is cancelled releases the Lease, so that the next leader need not wait."""
        try:
            while True:
                await self._acquire()
                log.info("leading", lease=str(self._key), identity=self._identity)
                await self._term(work)
                log.warning("no longer leading", lease=str(self._key), identity=self._identity)
        finally:
            if self._renewed_at is not None:
                await asyncio.shield(self._release())

    async def _term(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` until the Lease is lost.

        No task of the group ends the term by an exception: a group that stops its tasks because of
        one drops a cancellation from outside in Python 3.11, and this process would lead again
        instead of ending."""
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_run(work), name="work of the leader")
            await self._renew_until_lost()
            self._renewed_at = None
            working.cancel()

    async def _acquire(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._renew_deadline_s):
                    if await self._try():
                        return
                self._failing = None
            except (FairleadError, TimeoutError) as error:
                self._log_once("Lease not acquired", error)
            await asyncio.sleep(self._retry_s)

    async def _renew_until_lost(self) -> None:
        """Renew the Lease until it is lost or could not be renewed in time."""
        while True:
            await asyncio.sleep(self._retry_s)
            assert self._renewed_at is not None
            try:
                async with asyncio.timeout_at(self._renewed_at + self._renew_deadline_s):
                    while True:
                        try:
                            if not await self._try():
                                return
                            self._failing = None
                            break
                        except FairleadError as error:
                            self._log_once("Lease not renewed", error)
                            await asyncio.sleep(self._retry_s / 4)
            except TimeoutError:
                return

    def _log_once(self, event: str, problem: Exception) -> None:
        """Log a failure once, until another kind of failure follows or an attempt succeeds.

        The connection already logs rejected credentials, once for all callers."""
        if isinstance(problem, Unauthenticated) or type(problem) is self._failing:
            return
        self._failing = type(problem)
        level = log.error if isinstance(problem, Refused) else log.warning
        level(event, lease=str(self._key), why=plain(problem))

    async def _try(self) -> bool:
        """Take or renew the Lease. Return False if another process holds it.

        Raise Conflict if another process wrote at the same time."""
        # The term counts from the moment before the request, because the server may process the
        # request at once.
        requested_at = _now()
        try:
            lease = await self._client.get(LEASES, self._key)
        except NotFound:
            if (
                self._renewed_at is None
                and self._seen[0]
                and self._unchanged_s(ABSENT) <= self._lease_s
            ):
                # The Lease was held when it was last seen, and its holder may still lead: a server
                # that was restored from a backup has no record of it.
                return False
            body = {"metadata": {"name": self._key.name}, "spec": self._record(None)}
            await self._client.create(LEASES, body, namespace=self._key.namespace)
            self._renewed_at = requested_at
            return True
        if not self._is_ours(lease) and not self._is_free(lease):
            return False
        await self._replace(lease, self._record(lease))
        self._renewed_at = requested_at
        return True

    async def _replace(self, lease: Lease, record: Mapping[str, object]) -> None:
        """Replace the version that was read. Raise Conflict if the Lease has changed since."""
        version = lease.metadata.resource_version
        metadata = {
            "name": self._key.name,
            "namespace": self._key.namespace,
            "resourceVersion": version,
        }
        await self._client.replace(LEASES, self._key, {"metadata": metadata, "spec": record})

    def _is_ours(self, lease: Lease) -> bool:
        """Return whether this process holds the Lease in its current term.

        A server that was restored from a backup may show a record of an earlier term of this
        process, while another process leads."""
        return lease.spec.holder_identity == self._identity and (
            self._renewed_at is not None or lease.spec.renew_time == self._written
        )

    def _is_free(self, lease: Lease) -> bool:
        """Return whether the Lease has no holder, or its record has not changed for its duration,
        as observed here."""
        if not lease.spec.holder_identity:
            return True
        return self._unchanged_s(lease.metadata.resource_version) > (
            lease.spec.lease_duration_seconds or self._lease_s
        )

    def _unchanged_s(self, record: str) -> float:
        """Return for how many seconds this process has seen no other record than this one."""
        if self._seen[0] != record:
            self._seen = (record, _now())
        return _now() - self._seen[1]

    def _record(self, before: Lease | None) -> dict[str, object]:
        """Return the spec to write. Its times are for people to read; no process decides by
        them."""
        now = self._written = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = before.spec if before is not None else LeaseSpec()
        ours = spec.holder_identity == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "acquireTime": spec.acquire_time if ours and spec.acquire_time else now,
            "renewTime": now,
            "leaseTransitions": (spec.lease_transitions or 0)
            + (0 if ours or before is None else 1),
        }

    async def _release(self) -> None:
        self._renewed_at = None
        try:
            async with asyncio.timeout(self._retry_s):
                lease = await self._client.get(LEASES, self._key)
                if lease.spec.holder_identity == self._identity:
                    await self._replace(
                        lease,
                        self._record(lease) | {"holderIdentity": "", "leaseDurationSeconds": 1},
                    )
        except (FairleadError, TimeoutError) as error:
            log.info("Lease not released", lease=str(self._key), why=plain(error))


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _now() -> float:
    return asyncio.get_running_loop().time()
