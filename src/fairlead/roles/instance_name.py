"""The name under which one process of a role reports, and what happens if another process uses it.

In: the Lease of this name. Out: the Lease as this process wrote it, or a Finding. Two processes
have one name if two hosts have the same name, or if two gateways run on one host. Their reports
would replace each other every few seconds, and the controller would take whichever it reads last
for both. So each write requires the version that this process wrote or read last (resourceVersion).
If another process has written meanwhile, the one that started earlier yields: it serves on, but
reports nothing until the Lease of the other one has expired.

Invariant: of two processes that see each other's writes, exactly one yields, whatever their clocks
show: both compare the same two texts. A process writes unconditionally only at its start and after
a failure, and its next write then notices another process."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from fairlead.errors import Conflict, FairleadError
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import FIELD_MANAGER, presence_of
from fairlead.model import Finding

log = structlog.get_logger()

NAME_IN_USE = "NameInUse"


class Process(NamedTuple):
    """One process that reports. `since`: when it started, by its own clock. `identity`:
    `HOST_UNIQUE`."""

    since: str
    identity: str


def writer_of(lease: Lease) -> Process | None:
    """Return the process that wrote the Lease; None if no process of Fairlead did."""
    record, identity = presence_of(lease), lease.spec.holder_identity
    return Process(record.since, identity) if record is not None and identity else None


def name_in_use(who: str, other: Process) -> Finding:
    """Return the Finding of a process that yields to another one. `who`: its role and name."""
    host = other.identity.rpartition("_")[0]
    return Finding(
        NAME_IN_USE,
        f"another process reports as {who}: it runs on {host or other.identity} since "
        f"{other.since}. This process started earlier, so it reports nothing to the API server",
        remedy="give each host a name of its own (--node-name), or stop one of the two processes",
    )


class InstanceName:
    """The Lease of one name. `who`: the role and name, for messages. `lease_s`: how long a Lease is
    valid. `told`: called with the Lease and the Finding when this process yields."""

    def __init__(
        self,
        client: Client,
        key: ObjectKey,
        own: Process,
        who: str,
        *,
        lease_s: float,
        told: Callable[[Lease, Finding], None] | None = None,
    ) -> None:
        self._client = client
        self._key = key
        self._own = own
        self._who = who
        self._lease_s = lease_s
        self._told = told
        self._version = ""
        """The resourceVersion of the Lease that this process wrote or read last; empty: unknown."""
        self.lease: Lease | None = None
        """The Lease as this process wrote it last."""
        self._changed_s = 0.0
        """While this process yields: when the version last changed."""
        self.finding: Finding | None = None
        """Why this process reports nothing; None: it reports."""

    async def write(self, body: Mapping[str, Any]) -> None:
        """Write the Lease, unless this process yields. Raise FairleadError."""
        if self.finding is not None and not await self._other_has_ended():
            return
        try:
            try:
                await self._apply(body)
            except Conflict:
                if await self._meets_newer():
                    return
                await self._apply(body)
        except FairleadError:
            self._version = ""
            raise
        if self.finding is not None:
            log.info("reports again", who=self._who)
        self.finding = None

    async def _apply(self, body: Mapping[str, Any]) -> None:
        metadata = dict(body["metadata"])
        if self._version:
            metadata["resourceVersion"] = self._version
        lease = await self._client.apply(
            LEASES,
            self._key,
            {**body, "metadata": metadata},
            field_manager=FIELD_MANAGER,
            force=True,
        )
        self.lease, self._version = lease, lease.metadata.resource_version

    async def _meets_newer(self) -> bool:
        """Read what another process has written. Return whether this process yields to it."""
        lease = await self._read()
        other = writer_of(lease) if lease is not None else None
        if lease is None or other is None or other <= self._own:
            return False
        self._changed_s = _now_s()
        finding = name_in_use(self._who, other)
        if finding != self.finding:
            log.error("another process has the same name", problem=finding.message)
            if self._told is not None:
                self._told(lease, finding)
        self.finding = finding
        return True

    async def _other_has_ended(self) -> bool:
        """Return whether the Lease of the other process has expired, or is gone. Clocks are not
        compared: a Lease has expired if it has not changed for its validity."""
        before = self._version
        await self._read()
        if self._version and self._version != before:
            self._changed_s = _now_s()
        return not self._version or _now_s() - self._changed_s > self._lease_s

    async def _read(self) -> Lease | None:
        try:
            lease = await self._client.get(LEASES, self._key)
        except NotFound:
            self._version = ""
            return None
        self._version = lease.metadata.resource_version
        return lease


def _now_s() -> float:
    return asyncio.get_running_loop().time()
