"""Read the facts, all sources side by side, each with a deadline.

In: a client with the caller's rights. Out: a `Facts`. Raises Refused or Unavailable only if the
Services cannot be read. A source that cannot be read, or not in time, is listed in
`Facts.not_looked_at` with the reason. Invariant: nothing is changed. The reviews of access, which
ask whether roles of Fairlead have their rights, are answered and not stored."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from difflib import get_close_matches
from typing import TypeVar

import msgspec

from fairlead.config import Config, parse
from fairlead.doctor.facts import (
    GRACE_S,
    Facts,
    NamedWorkload,
    Process,
    Published,
    Refusal,
    addresses_of,
)
from fairlead.doctor.finding import NotLookedAt
from fairlead.doctor.objects import (
    ACCESS_REVIEWS,
    EVENTS,
    NETWORK_POLICIES,
    OWNED_SERVICES,
    SERVICE_ACCOUNTS,
    WORKLOADS,
    OwnedService,
    Workload,
)
from fairlead.doctor.rights import Right, needed
from fairlead.errors import FairleadError, Refused, Unavailable
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
    NAMESPACES,
    NODES,
    PODS,
    ObjectT,
    Resource,
)
from fairlead.kube.presence import COMPONENT_LABEL, SELECTOR, presence_of
from fairlead.kube.watch_events import Envelope, Item, Unreadable
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES

DEADLINE_S = 10.0
LEASES_DEADLINE_S = 40.0
"""A process is found to be gone after the duration of its Lease, which is 30 s by default."""
OBSERVE_S = 2.0
FORBIDDEN = 403

ENVELOPE = msgspec.json.Decoder(Envelope)
SERVICE = msgspec.json.Decoder(OwnedService)
ResultT = TypeVar("ResultT")
Progress = Callable[[str], None]


class Request(msgspec.Struct, frozen=True):
    """What to look at. `services`: empty for all of type LoadBalancer in `namespace`, which is
    empty for all namespaces. `config`: the configuration; None: that of the cluster.
    `observe_s`: how long the writers of addresses are observed."""

    services: tuple[ServiceKey, ...] = ()
    namespace: str = ""
    config: Config | None = None
    grace_s: float = GRACE_S
    deadline_s: float = DEADLINE_S
    observe_s: float = OBSERVE_S

    @property
    def scope(self) -> str:
        """The only namespace whose pods and other objects are needed; empty if there are
        several."""
        namespaces = {each.namespace for each in self.services} or {self.namespace}
        return namespaces.pop() if len(namespaces) == 1 else ""


class Reader:
    """Reads the sources of facts, and records each source that cannot be read."""

    def __init__(self, client: Client, request: Request, progress: Progress) -> None:
        self._client = client
        self._request = request
        self._progress = progress
        self._waiting: list[str] = []
        self.not_looked_at: list[NotLookedAt] = []

    async def timed(
        self, source: str, reading: Awaitable[ResultT], deadline_s: float = 0.0
    ) -> ResultT | None:
        """Return the result, or None with a note if it fails or takes too long."""
        limit_s = deadline_s or self._request.deadline_s
        self._waiting.append(source)
        try:
            async with asyncio.timeout(limit_s):
                return await reading
        except TimeoutError:
            reason = f"no answer within {limit_s:g} s"
        except FairleadError as problem:
            reason = reason_of(problem)
        finally:
            self._waiting.remove(source)
            if self._waiting:
                self._progress(f"reading {', '.join(self._waiting)}")
        self.not_looked_at.append(NotLookedAt(source, reason))
        return None

    async def services(self) -> tuple[list[OwnedService], str]:
        """Return the Services, and the resourceVersion from which to watch them. Those of other
        namespaces are read too if that is allowed, because they hold addresses. Raise Refused or
        Unavailable if the Services to look at cannot be read."""
        scope = self._request.scope
        try:
            return await self._listed("")
        except RefusedByServer as problem:
            if problem.status != FORBIDDEN:
                raise
            if not scope:
                raise Refused(
                    problem.message, fix="look at one namespace, with -n NAMESPACE"
                ) from problem
        try:
            found = await self._listed(scope)
        except RefusedByServer as problem:
            raise Refused(
                problem.message,
                fix=f"use an account that may list services in {scope}, or name another namespace "
                "with -n",
            ) from problem
        self.not_looked_at.append(NotLookedAt("services of other namespaces", "forbidden"))
        return found

    async def _listed(self, namespace: str) -> tuple[list[OwnedService], str]:
        services: list[OwnedService] = []
        version = continues = ""
        limit_s = self._request.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    meta, items = await self._client.read_page(
                        OWNED_SERVICES, namespace=namespace, continues=continues
                    )
                    for each in items:
                        if isinstance(each, Item) and each.object is not None:
                            services.append(each.object)
                        else:
                            self._unreadable(each)
                    version, continues = version or meta.resource_version, meta.continue_
                    if not continues:
                        return services, version
        except TimeoutError:
            raise Unavailable(
                f"the Services were not read within {limit_s:g} s",
                fix="is the API server overloaded? --timeout gives it more time",
            ) from None

    async def check_namespace(self) -> None:
        """Raise Refused if the namespace, which has no Service, does not exist. Who may not read it
        is not told."""
        name = self._request.namespace
        with suppress(RefusedByServer, Unavailable):
            try:
                await self._client.get(NAMESPACES, ("", name))
            except NotFound:
                raise Refused(
                    f"namespace {name} does not exist", fix="see `kubectl get namespaces`"
                ) from None

    def _unreadable(self, item: Item[OwnedService] | Unreadable) -> None:
        name = f"Service {item.key}" if isinstance(item, Item) else "a Service"
        self.not_looked_at.append(NotLookedAt(name, f"it cannot be read: {item.problem}"))

    async def objects(self, resource: Resource[ObjectT]) -> tuple[ObjectT, ...] | None:
        """Return the objects of a kind; none if the API server does not serve the kind, because
        then no object of it can exist."""
        namespace = self._request.scope if resource.namespaced else ""

        return await self.timed(resource.plural, self._list(resource, namespace))

    async def _list(
        self, resource: Resource[ObjectT], namespace: str = "", label_selector: str = ""
    ) -> tuple[ObjectT, ...]:
        try:
            found = await self._client.list(
                resource, namespace=namespace, label_selector=label_selector
            )
        except NotFound:
            return ()
        return tuple(found)

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

        return await self.timed(f"leases of namespace {namespace}", read(), LEASES_DEADLINE_S)

    async def refusals(self, config: Config | None) -> tuple[Refusal, ...] | None:
        """Return the rights that roles of Fairlead lack, by asking the API server about each. If
        the configuration is not known, the rights that depend on it are not asked about."""
        service_proxy = config is not None and config.node.service_proxy

        async def read() -> tuple[Refusal, ...]:
            accounts = await self._list(SERVICE_ACCOUNTS, label_selector=SELECTOR)
            asked = [
                Refusal(role, f"{each.metadata.namespace}/{each.metadata.name}", right)
                for each in accounts
                if (role := each.metadata.labels.get(COMPONENT_LABEL, ""))
                for right in needed(role, service_proxy=service_proxy)
            ]
            granted = await asyncio.gather(*map(self._is_granted, asked))
            return tuple(
                each for each, is_granted in zip(asked, granted, strict=True) if not is_granted
            )

        return await self.timed("rights of Fairlead's roles", read())

    async def _is_granted(self, asked: Refusal) -> bool:
        review = await self._client.create(ACCESS_REVIEWS, _review(asked.account, asked.right))
        return review.status.allowed

    async def writes(
        self, seen: Iterable[OwnedService], version: str
    ) -> dict[ServiceKey, list[Published]] | None:
        """Watch Services for `observe_s`. Return who wrote their addresses, one entry for each
        change."""
        found = {each.key: _published(each) for each in seen}

        async def read() -> dict[ServiceKey, list[Published]]:
            stream = self._client.stream(
                OWNED_SERVICES,
                parameters={"resourceVersion": version},
                namespace=self._request.scope,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(self._request.observe_s), aclosing(stream):
                    async for lines in stream:
                        for line in lines:
                            _note(found, line)
            return found

        limit_s = self._request.observe_s + self._request.deadline_s
        return await self.timed("changes of services", read(), limit_s)


async def gather(client: Client, request: Request, progress: Progress = lambda _: None) -> Facts:
    """Return the facts. Raise Refused or Unavailable if the Services cannot be read, or a named
    Service does not exist."""
    reader = Reader(client, request, progress)
    progress("reading services")
    services, version = await reader.services()
    known = [each.key for each in services]
    if missing := sorted(set(request.services) - set(known)):
        raise Refused(f"Service {missing[0]} does not exist", fix=_did_you_mean(missing[0], known))
    if request.namespace and request.namespace not in {each.namespace for each in known}:
        await reader.check_namespace()
    config = await reader.config()
    async with asyncio.TaskGroup() as group:
        slices = group.create_task(reader.objects(ENDPOINT_SLICES))
        nodes = group.create_task(reader.objects(NODES))
        pods = group.create_task(reader.objects(PODS))
        events = group.create_task(reader.objects(EVENTS))
        policies = group.create_task(reader.objects(NETWORK_POLICIES))
        pools = group.create_task(reader.objects(ADDRESS_POOLS))
        grants = group.create_task(reader.objects(ADDRESS_GRANTS))
        processes = group.create_task(reader.processes(config))
        refusals = group.create_task(reader.refusals(config))
        writes = group.create_task(reader.writes(services, version))
        workloads = [group.create_task(reader.objects(each)) for each in WORKLOADS]
    return Facts(
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
        processes=processes.result(),
        refusals=refusals.result(),
        writes=writes.result(),
        not_looked_at=tuple(reader.not_looked_at),
    )


def _did_you_mean(missing: ServiceKey, known: Sequence[ServiceKey]) -> str:
    """Return what to do about a Service that does not exist: the Services with the same name, or
    those of the namespace with one that is alike."""
    own = {each.name: each for each in known if each.namespace == missing.namespace}
    alike = [own[name] for name in get_close_matches(missing.name, own, 3)]
    if meant := [each for each in known if each.name == missing.name] or alike:
        return f"did you mean {' or '.join(map(str, meant[:3]))}?"
    return f"see `kubectl get services -n {missing.namespace}`"


def reason_of(problem: FairleadError) -> str:
    """Return why a source could not be read, in few words."""
    if isinstance(problem, RefusedByServer) and problem.status == FORBIDDEN:
        return "forbidden"
    cause = problem.__cause__
    if isinstance(cause, RefusedByServer):
        return reason_of(cause)
    return problem.message


def _review(account: str, right: Right) -> dict[str, object]:
    """Return the question whether a ServiceAccount has a right in all namespaces."""
    namespace, name = account.split("/")
    resource, _, subresource = right.resource.partition("/")
    return {
        "spec": {
            "user": f"system:serviceaccount:{namespace}:{name}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "resourceAttributes": {
                "group": right.group,
                "resource": resource,
                "subresource": subresource,
                "verb": right.verb,
            },
        }
    }


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
