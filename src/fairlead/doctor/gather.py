"""Read the facts, all sources side by side, each with a deadline.

In: a client with the caller's rights. Out: a `Facts`. Raises Refused or Unavailable only if the
Services cannot be read. A source that cannot be read, or not in time, is listed in
`Facts.not_examined` with the reason. Invariant: nothing is written, and no packet is sent except
by `connect`."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from typing import TypeVar

import msgspec

from fairlead.config import Config, parse
from fairlead.doctor.connect import connect
from fairlead.doctor.facts import (
    GRACE_S,
    Facts,
    NamedWorkload,
    Process,
    Published,
    addresses_of,
)
from fairlead.doctor.finding import NotExamined
from fairlead.doctor.objects import (
    EVENTS,
    NETWORK_POLICIES,
    OWNED_SERVICES,
    WORKLOADS,
    OwnedService,
    Workload,
)
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.kube.announcers import ANNOUNCERS, Announcer, AnnouncerStatus
from fairlead.kube.answers import NotFound, RefusedByServer
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.instances import observe
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import (
    CONFIG_MAPS,
    CONFIGURATION,
    CONFIGURATION_FILE,
    ENDPOINT_SLICES,
    NODES,
    PODS,
    ObjectT,
    Resource,
)
from fairlead.kube.presence import SELECTOR, presence_of
from fairlead.kube.watch_events import Envelope
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES

DEADLINE_S = 10.0
LEASES_DEADLINE_S = 40.0
"""A process is found to be gone after the duration of its Lease, which is 30 s by default."""
WATCH_S = 2.0
FORBIDDEN = 403

ENVELOPE = msgspec.json.Decoder(Envelope)
SERVICE = msgspec.json.Decoder(OwnedService)
ResultT = TypeVar("ResultT")


class Request(msgspec.Struct, frozen=True):
    """What to examine. `services`: empty for all of type LoadBalancer. `namespace`: where objects
    are read; empty for all namespaces. `config`: the configuration; None: that of the cluster.
    `connect`: also connect to each target port from this host."""

    services: tuple[ServiceKey, ...] = ()
    namespace: str = ""
    config: Config | None = None
    grace_s: float = GRACE_S
    deadline_s: float = DEADLINE_S
    connect: bool = False


class Reader:
    """Reads the sources of facts, and records each source that cannot be read."""

    def __init__(self, client: Client, request: Request) -> None:
        self._client = client
        self._request = request
        self.not_examined: list[NotExamined] = []

    async def timed(
        self, source: str, reading: Awaitable[ResultT], deadline_s: float = 0.0
    ) -> ResultT | None:
        """Return the result, or None with a note if it fails or takes too long."""
        limit_s = deadline_s or self._request.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await reading
        except TimeoutError:
            reason = f"no answer within {limit_s:g} s"
        except FairleadError as problem:
            reason = reason_of(problem, source)
        self.not_examined.append(NotExamined(source, reason))
        return None

    async def objects(self, resource: Resource[ObjectT]) -> tuple[ObjectT, ...] | None:
        """Return the objects of a kind; none if the API server does not serve the kind, because
        then no object of it can exist."""
        namespace = self._request.namespace if resource.namespaced else ""

        async def read() -> tuple[ObjectT, ...]:
            try:
                return tuple(await self._client.list(resource, namespace=namespace))
            except NotFound:
                return ()

        return await self.timed(resource.plural, read())

    async def config(self) -> Config | None:
        """Return the configuration of Fairlead; None if Fairlead is not installed."""
        if self._request.config is not None:
            return self._request.config

        async def read() -> Config | None:
            try:
                found = await self._client.get(CONFIG_MAPS, CONFIGURATION)
            except NotFound:
                return None
            text = found.data.get(CONFIGURATION_FILE)
            return parse(text, f"ConfigMap {CONFIGURATION}", CLASSES) if text else None

        return await self.timed(f"ConfigMap {CONFIGURATION}", read())

    async def processes(self, config: Config | None) -> tuple[Process, ...] | None:
        """Return the processes of Fairlead. Their clocks decide only whether it is necessary to
        wait until each has renewed its Lease."""
        namespace = (config or Config()).presence.namespace

        async def read() -> tuple[Process, ...]:
            client = self._client
            leases = await client.list(LEASES, namespace=namespace, label_selector=SELECTOR)
            alive: dict[tuple[str, str], bool] = {}
            if any(map(_seems_old, leases)):
                alive = {
                    (each.role, each.name): each.alive for each in await observe(client, namespace)
                }
            return tuple(
                Process(
                    record, alive.get((record.role, record.name), True), each.spec.renew_time or ""
                )
                for each in leases
                if (record := presence_of(each)) is not None
            )

        source = f"Leases of namespace {namespace}"
        return await self.timed(source, read(), LEASES_DEADLINE_S)

    async def writes(
        self, seen: Iterable[OwnedService], version: str
    ) -> dict[ServiceKey, list[Published]] | None:
        """Watch Services for WATCH_S. Return who wrote their addresses, one entry for each
        change."""
        found = {each.key: _published(each) for each in seen}

        async def read() -> dict[ServiceKey, list[Published]]:
            stream = self._client.stream(
                OWNED_SERVICES,
                parameters={"resourceVersion": version},
                namespace=self._request.namespace,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S), aclosing(stream):
                    async for lines in stream:
                        for line in lines:
                            _note(found, line)
            return found

        return await self.timed("changes of Services", read(), WATCH_S + self._request.deadline_s)


async def gather(client: Client, request: Request) -> Facts:
    """Return the facts. Raise Refused or Unavailable if the Services cannot be read, or a named
    Service does not exist."""
    reader = Reader(client, request)
    services, version = await _services(client, request)
    missing = sorted(set(request.services) - {each.key for each in services})
    if missing:
        raise Refused(f"Service {missing[0]} does not exist", fix="see `kubectl get services -A`")
    config = await reader.config()
    async with asyncio.TaskGroup() as group:
        slices = group.create_task(reader.objects(ENDPOINT_SLICES))
        nodes = group.create_task(reader.objects(NODES))
        pods = group.create_task(reader.objects(PODS))
        events = group.create_task(reader.objects(EVENTS))
        policies = group.create_task(reader.objects(NETWORK_POLICIES))
        pools = group.create_task(reader.objects(ADDRESS_POOLS))
        grants = group.create_task(reader.objects(ADDRESS_GRANTS))
        announcers = group.create_task(reader.objects(ANNOUNCERS))
        processes = group.create_task(reader.processes(config))
        writes = group.create_task(reader.writes(services, version))
        workloads = [group.create_task(reader.objects(each)) for each in WORKLOADS]
    facts = Facts(
        now_s=time.time(),
        grace_s=request.grace_s,
        services=tuple(services),
        wanted=request.services,
        namespace=request.namespace,
        slices=slices.result(),
        nodes=nodes.result(),
        pods=pods.result(),
        events=events.result(),
        workloads=_named([each.result() for each in workloads]),
        policies=policies.result(),
        config=config,
        pools=pools.result(),
        grants=grants.result(),
        announcers=_statuses(announcers.result()),
        processes=processes.result(),
        writes=writes.result(),
    )
    if request.connect:
        facts = msgspec.structs.replace(facts, answers=await connect(facts))
    else:
        reader.not_examined.append(
            NotExamined("ports of pods", "no connection is made without --connect")
        )
    return msgspec.structs.replace(facts, not_examined=tuple(reader.not_examined))


def reason_of(problem: FairleadError, source: str) -> str:
    """Return why a source could not be read, in few words."""
    if isinstance(problem, RefusedByServer) and problem.status == FORBIDDEN:
        return f"no right to read {source}"
    return problem.message


async def _services(client: Client, request: Request) -> tuple[list[OwnedService], str]:
    """Return all Services, and the resourceVersion from which to watch them."""
    services: list[OwnedService] = []
    version = continues = ""
    while True:
        try:
            async with asyncio.timeout(request.deadline_s):
                meta, items = await client.read_page(
                    OWNED_SERVICES, namespace=request.namespace, continues=continues
                )
        except TimeoutError:
            raise Unavailable(
                f"the Services were not read within {request.deadline_s:g} s",
                fix="is the API server overloaded? --timeout gives it more time",
            ) from None
        services += (each for item in items if (each := getattr(item, "object", None)) is not None)
        version, continues = version or meta.resource_version, meta.continue_
        if not continues:
            return services, version


def _seems_old(lease: Lease) -> bool:
    """Return whether a Lease is older than its duration, or newer than now, by this host's
    clock."""
    duration_s = lease.spec.lease_duration_seconds or 1
    if not lease.spec.renew_time:
        return True
    return abs(time.time() - datetime.fromisoformat(lease.spec.renew_time).timestamp()) > duration_s


def _published(service: OwnedService) -> list[Published]:
    return [Published(each.manager, addresses_of(service)) for each in service.publishers[:1]]


def _note(found: dict[ServiceKey, list[Published]], line: bytes) -> None:
    event = ENVELOPE.decode(line)
    if event.type != "MODIFIED":
        return
    service = SERVICE.decode(event.object)
    known = found.setdefault(service.key, [])
    known += (each for each in _published(service) if known[-1:] != [each])


def _named(workloads: Sequence[tuple[Workload, ...] | None]) -> tuple[NamedWorkload, ...] | None:
    """Return the workloads of all kinds; None if a kind could not be read."""
    found: list[NamedWorkload] = []
    for resource, each in zip(WORKLOADS, workloads, strict=True):
        if each is None:
            return None
        found += (NamedWorkload(resource.kind, one) for one in each)
    return tuple(found)


def _statuses(announcers: tuple[Announcer, ...] | None) -> tuple[AnnouncerStatus, ...] | None:
    if announcers is None:
        return None
    return tuple(each.status for each in announcers if each.status is not None)
