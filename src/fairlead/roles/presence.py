"""The announcement of this process in the Kubernetes API by its own Lease, which is renewed every
few seconds.

In: the state of the role (`web.View`). Out: a Lease with a record (`kube.presence`). The renewal
also proves to this process that the API server answers (`kube.freshness`). Invariants: a failed
renewal stops nothing, and is logged once until the problem changes. A Service is listed as not
served if it is refused, or if it was unavailable at two renewals in a row, because many failures
pass by themselves. A Service is not listed if everything of it is served, only less exactly than
requested (`Outcome.coarse`). A new process lists what its predecessor listed until it has processed
all Services itself. A renewal that is sent while the network is down stays in the kernel's queue
after its time-out, and may arrive after a later one: therefore each is conditional on the version
of the Lease, so that no old record replaces a newer one.

The Lease of a gateway or node stays when the process stops, so that a restart is not visible, and
expires when it is not renewed. The Lease of a controller is deleted when its process ends, because
its successor has another name."""

import asyncio
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, repeat

import structlog

from fairlead.config import PresenceConfig
from fairlead.errors import Conflict, FairleadError, Refused, plain
from fairlead.kube.access import Access
from fairlead.kube.answers import NoConnection, NotFound, RefusedByServer, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.events import stamp
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    FIELD_MANAGER,
    MAX_ADDRESSES,
    MAX_LISTED,
    MAX_NAMED,
    MAX_NETWORKS,
    MAX_REASON_LENGTH,
    Announced,
    Claimed,
    NotServed,
    OnLink,
    Presence,
    Warned,
    lease_body,
    lease_name,
    presence_of,
)
from fairlead.model import ServiceKey
from fairlead.web import View

log = structlog.get_logger()

ANSWER_S = 5.0
"""The time-out of a renewal."""
RETRY_S = 2.0
"""The delay after a renewal without an answer, unless the interval of renewals is shorter."""
CLEAN_UP_S = 5.0
CHECK_INTERVAL_S = 0.5


class Announcer:
    """The announcement of one instance of a role. `name`: its host. `interfaces`: the interfaces
    where packets arrive. `peer`: where other gateways connect. `addresses`: the addresses that the
    host needs itself. `macs`: its MAC addresses. `announces`: the networks whose addresses it can
    announce. `announced`: the addresses that it announces, each with the interface. `claimed`:
    addresses that other stations use too. `leaving`: since when it gives its addresses away;
    `waited_for`: whether somebody waits until addresses have moved. `warned`: the Warnings that the
    instance has written and that still hold. `inherit`: called with the record of the previous
    process of the instance."""

    def __init__(
        self,
        client: Client,
        section: PresenceConfig,
        view: View,
        name: str,
        *,
        interfaces: Callable[[], Sequence[str]] = tuple,
        peer: Callable[[], str] = str,
        addresses: Callable[[], Sequence[str]] = tuple,
        macs: Callable[[], Sequence[str]] = tuple,
        announces: Callable[[], Sequence[OnLink]] = tuple,
        announced: Callable[[], Mapping[str, str]] = dict,
        claimed: Callable[[], Sequence[Claimed]] = tuple,
        leaving: Callable[[], str] = str,
        waited_for: Callable[[], bool] = bool,
        warned: Callable[[], Sequence[Warned]] = tuple,
        inherit: Callable[[Presence], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._section = section
        self._view = view
        self._name = name
        self._interfaces = interfaces
        self._peer = peer
        self._addresses = addresses
        self._macs = macs
        self._announces = announces
        self._announced = announced
        self._claimed = claimed
        self._leaving = leaving
        self._waited_for = waited_for
        self._warned = warned
        self._inherit = inherit
        self._key = ObjectKey(section.namespace, lease_name(view.role, name))
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self._since = stamp(datetime.now(UTC))
        self._unavailable: set[ServiceKey] = set()
        self._inherited: tuple[NotServed, ...] = ()
        """The Services that the predecessor did not serve; cleared when this process is ready for
        the first time."""
        self._announced_since: dict[tuple[str, str], str] = {}
        """Since when each address is announced on each interface, also by a predecessor."""
        self._version = ""
        """The version of the Lease that the last renewal wrote; empty if it is not known."""
        self._failing: type[Exception] | None = None

    async def run(
        self,
        *,
        resume: Callable[[Iterable[Warned]], None] | None = None,
        remove_at_end: bool = False,
    ) -> None:
        """Announce the instance until cancelled. `resume`: called with the Warnings that an earlier
        process of the instance left."""
        interval_s = self._section.lease_duration_s / 3
        known = resume is None
        try:
            while True:
                announced = self._condition()
                # The first renewal replaces the record, so the record of the previous process must
                # be read first.
                known = known or (resume is not None and await self._read_predecessor(resume))
                answered = known and await self._renew()
                wait_s = interval_s * random.uniform(0.9, 1.0)
                until_s = time.monotonic() + (wait_s if answered else min(RETRY_S, wait_s))
                # A change of readiness, of networks or of what the gateway announces while it
                # leaves must not wait for the next renewal, because the conditions of Services and
                # the owners of addresses depend on it, and a command waits for it. The text of a
                # problem may change often, and can wait.
                while time.monotonic() < until_s and self._condition() == announced:
                    await asyncio.sleep(min(CHECK_INTERVAL_S, max(0.0, until_s - time.monotonic())))
        finally:
            if remove_at_end:
                await asyncio.shield(remove(self._client, self._key))

    def _condition(self) -> tuple[object, ...]:
        view = self._view
        return (
            *(view.synced, view.working, bool(view.problem), view.problem_class),
            *(tuple(self._announces()), self._peer(), self._leaving()),
            len(self._announced()) if self._waited_for() else 0,
        )

    async def _read_predecessor(self, resume: Callable[[Iterable[Warned]], None]) -> bool:
        """Read the record that an earlier process of this instance left. Take over its Warnings and
        the Services that it did not serve. Return whether the API server answered."""
        try:
            async with asyncio.timeout(ANSWER_S):
                before = presence_of(await self._client.get(LEASES, self._key))
        except NotFound:
            return True
        except (FairleadError, TimeoutError) as problem:
            self._log_failure(problem)
            return isinstance(problem, RefusedByServer)
        if before is not None:
            resume(before.warned)
            self.inherit(before)
        return True

    def inherit(self, before: Presence) -> None:
        """Take over the Services that an earlier process of this instance did not serve, and the
        times since when it announced addresses: the kernel announces them in between."""
        self._announced_since = {
            (each.address, each.interface): each.since for each in before.announced
        }
        self._inherit(before)
        self._inherited = before.not_served
        self._unavailable = {each.key for each in before.not_served}

    async def _renew(self) -> bool:
        """Write the Lease. Return whether the API server answered."""
        record = self.record()
        try:
            async with asyncio.timeout(ANSWER_S):
                try:
                    await self._write(record)
                except Conflict:
                    # An earlier renewal was executed although its answer was lost, or a user has
                    # changed the Lease.
                    self._version = ""
                    await self._write(record)
        except (FairleadError, TimeoutError) as problem:
            if not isinstance(problem, NoConnection | TimeoutError):
                self._version = ""
            self._log_failure(problem)
            return isinstance(problem, RefusedByServer)
        if self._failing is not None:
            log.info("presence announced again", lease=str(self._key))
            self._failing = None
        return True

    async def _write(self, record: Presence) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = lease_body(
            record,
            identity=self.identity,
            now=now,
            lease_s=self._section.lease_duration_s,
            version=self._version,
        )
        written = await self._client.apply(
            LEASES, self._key, body, field_manager=FIELD_MANAGER, force=True
        )
        self._version = written.metadata.resource_version

    def record(self) -> Presence:
        """Return the present record."""
        outcomes = self._view.outcomes
        if self._view.synced:
            self._inherited = ()
        not_served = self._inherited or self._not_served()
        announced = self._announced_addresses()
        stale = self._view.freshness.stale() if self._view.freshness is not None else {}
        return Presence(
            self._view.role,
            self._name,
            version("fairlead"),
            self._since,
            ready=self._view.ready,
            problem=self._view.problem[:MAX_REASON_LENGTH],
            problem_class=self._view.problem_class,
            leads=self._view.role == "controller" and self._view.working,
            interfaces=tuple(self._interfaces()),
            peer=self._peer(),
            addresses=tuple(self._addresses())[:MAX_ADDRESSES],
            macs=tuple(self._macs())[:MAX_ADDRESSES],
            announces=tuple(self._announces())[:MAX_NETWORKS],
            announced_count=len(announced),
            announced=announced[:MAX_LISTED],
            claimed=tuple(self._claimed())[:MAX_LISTED],
            leaving=self._leaving(),
            served=sum(outcome.state == "done" or outcome.coarse for outcome in outcomes.values()),
            not_served_count=len(not_served),
            not_served=tuple(not_served[:MAX_NAMED]),
            stale={name: round(age_s) for name, age_s in stale.items()},
            warned=tuple(self._warned())[:MAX_LISTED],
        )

    def _announced_addresses(self) -> tuple[Announced, ...]:
        present, now = self._announced().items(), stamp(datetime.now(UTC))
        known = self._announced_since
        self._announced_since = {each: known.get(each, now) for each in sorted(present)}
        return tuple(
            Announced(address, interface, since)
            for (address, interface), since in self._announced_since.items()
        )

    def _not_served(self) -> Sequence[NotServed]:
        """Return the Services that are not served, according to the present outcomes and the
        outcomes at the previous renewal."""
        outcomes = self._view.outcomes
        unavailable = {
            key
            for key, outcome in outcomes.items()
            if outcome.state == "unavailable" and not outcome.coarse
        }
        refused = {key for key, outcome in outcomes.items() if outcome.state == "refused"}
        failed = sorted(refused | (unavailable & self._unavailable))
        self._unavailable = unavailable
        reasons = (outcomes[key].message[:MAX_REASON_LENGTH] for key in failed[:MAX_LISTED])
        return [
            NotServed(str(key), reason)
            for key, reason in zip(failed, chain(reasons, repeat("")), strict=False)
        ]

    def _log_failure(self, problem: Exception) -> None:
        """Log a failure once, until it changes or ends. The connection logs a rejection."""
        if isinstance(problem, Unauthenticated) or type(problem) is self._failing:
            return
        self._failing = type(problem)
        level = log.error if isinstance(problem, Refused) else log.warning
        level(
            "presence not announced",
            lease=str(self._key),
            problem=plain(problem),
        )


async def remove(client: Client, key: ObjectKey) -> bool:
    """Delete the Lease of an instance that has ended. Return whether it existed. A failure is
    logged: the Lease then expires, and the controller deletes it."""
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            await client.delete(LEASES, key)
    except NotFound:
        return False
    except (FairleadError, TimeoutError) as problem:
        log.info(
            "the Lease of this instance was not deleted",
            lease=str(key),
            problem=plain(problem),
        )
        return False
    return True


async def withdraw(
    section: PresenceConfig, find: Callable[[], Access], role: str, name: str
) -> None:
    """Delete the Lease of an instance that is removed from its host. `find`: how to reach the API
    server."""
    try:
        access = find()
    except Refused as problem:
        log.info(
            "the Lease of this host stays until the controller deletes it", problem=str(problem)
        )
        return
    key = ObjectKey(section.namespace, lease_name(role, name))
    async with Client(access) as client:
        if await remove(client, key):
            log.info("removed", what=f"Lease {key}")


def controller_name() -> str:
    """Return a unique name for this controller process, because two controllers on one host must be
    distinguishable."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
