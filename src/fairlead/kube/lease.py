"""Be the only one: leader election by a Lease (coordination.k8s.io/v1).

In: a client, the Lease's name, who we are. Out: `lead` runs the work while, and only while, the
Lease is ours. Invariants: time is the monotonic clock of this process; nobody's wall clock is
compared with anybody's. A holder stops by itself `lease_s - renew_deadline_s` before another may
begin. Work and renewal are in one TaskGroup: a process whose work has ended does not go on
renewing. `assert_leading` is the fence in front of each write: a process that was stopped and goes
on later finds its time over before it writes again. Follows client-go's leaderelection: a Lease is
free when its record has not changed for its duration, as seen by the one who waits."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

import structlog

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.kube.answers import NotFound, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES, Lease, LeaseSpec
from fairlead.kube.objects import ObjectKey

log = structlog.get_logger()

NOT_THERE = "not there"


class Elector:
    """One candidate for one Lease.

    lease_s: so long after the holder's last sign of life another may take over. renew_deadline_s:
    so long after our last renewal we stop by ourselves; shorter. retry_s: how often we renew, or
    look whether it is free."""

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
        """The last record of the Lease that was not ours, and when it was new to us."""
        self._written = ""
        """The renewTime that we wrote last, or tried to: a mark of what is ours, whatever the clock
        shows."""
        self._failing: type[Exception] | None = None

    @property
    def leading(self) -> bool:
        """Whether the Lease is ours, and for long enough yet to write."""
        return self._renewed_at is not None and _now() - self._renewed_at < self._renew_deadline_s

    def assert_leading(self) -> None:
        """Raise Unavailable unless we lead: to be called before each write."""
        if not self.leading:
            raise Unavailable(
                f"{self._identity} does not hold Lease {self._key}: somebody else may be writing"
            )

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` whenever the Lease is ours, anew in each term, until cancelled. Whoever leads
        when it is cancelled gives the Lease back, so that the next one need not wait."""
        try:
            while True:
                await self._acquire()
                log.info("leading", lease=str(self._key), identity=self._identity)
                await self._term(work)
                log.warning("not leading any more", lease=str(self._key), identity=self._identity)
        finally:
            if self._renewed_at is not None:
                await asyncio.shield(self._release())

    async def _term(self, work: Callable[[], Awaitable[None]]) -> None:
        async def renew() -> None:
            await self._renew_for_ever()
            raise _TermOver

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(renew(), name="renew the Lease")
                group.create_task(_run(work), name="work of the leader")
        except* _TermOver:
            self._renewed_at = None

    async def _acquire(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._renew_deadline_s):
                    if await self._try():
                        return
                self._failing = None
            except (FairleadError, TimeoutError) as error:
                self._tell("Lease not acquired", error)
            await asyncio.sleep(self._retry_s)

    async def _renew_for_ever(self) -> None:
        """Returns when the Lease is lost, or could not be renewed in time."""
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
                            self._tell("Lease not renewed", error)
                            await asyncio.sleep(self._retry_s / 4)
            except TimeoutError:
                return

    def _tell(self, event: str, problem: Exception) -> None:
        """Log a failure once, until it becomes another or goes away. Of credentials the connection
        has told, for all."""
        if isinstance(problem, Unauthenticated) or type(problem) is self._failing:
            return
        self._failing = type(problem)
        level = log.error if isinstance(problem, Refused) else log.warning
        level(event, lease=str(self._key), why=str(problem) or "time-out")

    async def _try(self) -> bool:
        """Take or renew the Lease; False: another one holds it. Raises Conflict when somebody was
        quicker."""
        asked_at = (
            _now()
        )  # the renewal counts from before it was sent: the server may have taken it then
        try:
            lease = await self._client.get(LEASES, self._key)
        except NotFound:
            if (
                self._renewed_at is None
                and self._seen[0]
                and self._unchanged_s(NOT_THERE) <= self._lease_s
            ):
                # it was held when we last saw it: a restored server does not know that, its holder
                # does
                return False
            body = {"metadata": {"name": self._key.name}, "spec": self._record(None)}
            await self._client.create(LEASES, body, namespace=self._key.namespace)
            self._renewed_at = asked_at
            return True
        if not self._is_ours(lease) and not self._is_free(lease):
            return False
        await self._replace(lease, self._record(lease))
        self._renewed_at = asked_at
        return True

    async def _replace(self, lease: Lease, record: Mapping[str, object]) -> None:
        """Write over the version that was read; a Conflict if it is no longer that."""
        version = lease.metadata.resource_version
        metadata = {
            "name": self._key.name,
            "namespace": self._key.namespace,
            "resourceVersion": version,
        }
        await self._client.replace(LEASES, self._key, {"metadata": metadata, "spec": record})

    def _is_ours(self, lease: Lease) -> bool:
        """Whether it has our name, and not from an earlier term: a server restored from a backup
        may show one that is long over, while somebody else still leads."""
        return lease.spec.holder_identity == self._identity and (
            self._renewed_at is not None or lease.spec.renew_time == self._written
        )

    def _is_free(self, lease: Lease) -> bool:
        """Whether nobody holds it, or its holder has shown no life for its whole duration while we
        looked."""
        if not lease.spec.holder_identity:
            return True
        return self._unchanged_s(lease.metadata.resource_version) > (
            lease.spec.lease_duration_seconds or self._lease_s
        )

    def _unchanged_s(self, record: str) -> float:
        """For how long we have seen nothing but this."""
        if self._seen[0] != record:
            self._seen = (record, _now())
        return _now() - self._seen[1]

    def _record(self, before: Lease | None) -> dict[str, object]:
        """The spec to write. Its times are for people to read: nobody decides by them."""
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
            log.info("Lease not given back", lease=str(self._key), why=str(error) or "time-out")


class _TermOver(Exception):
    pass


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _now() -> float:
    return asyncio.get_running_loop().time()
