"""The driver of the load-balancer status of Services, which users, nodes and gateways read: the
addresses, their `ipMode`, and the ports.

In: LoadBalancers with their addresses. Out: `status.loadBalancer.ingress` with `ipMode` (KEP-1860)
and `ports`, where ports that are not served carry an error (KEP-1435); and an Event that names the
addresses. Invariants: the status is published last and removed first; a Service that no class of
Fairlead has claimed is not changed; the field manager is used for nothing else."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.claim import claimed_for
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.service_status import ServiceWriter
from fairlead.kube.events import Recorder
from fairlead.kube.objects import LoadBalancerIngress, PortStatus, Service
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import held_by, hostname_of
from fairlead.plan.classes import LoopName

FIELD_MANAGER = "fairlead-publish"

Ingress = tuple[LoadBalancerIngress, ...]

PublishPrecondition = Callable[[ServiceKey, str, Ingress], str]
"""Returns the resource version of the Service with this uid on which the write of the ingress is
conditional (see `drivers.grants`). Raises Conflict if the ingress may not be published."""
Granted = Callable[[ServiceKey], Collection[str]]
"""Returns the addresses that are granted to a Service."""


class Published(msgspec.Struct, frozen=True):
    """The ingress in the status of the Service with this uid."""

    uid: str
    ingress: Ingress


class Publish(msgspec.Struct, frozen=True):
    """Publish exactly `ingress`. An empty `ingress` removes everything that is published. `before`:
    the ingress that is published now."""

    service: ServiceKey
    uid: str
    ingress: Ingress
    before: Ingress = ()

    def __str__(self) -> str:
        if not self.ingress:
            return f"publish no address on Service {self.service}"
        return f"publish {', '.join(map(_shown, self.ingress))} on Service {self.service}"


class PublishDriver(Component):
    """Driver of `status.loadBalancer`."""

    name = "publish"
    batch = 1

    def __init__(
        self,
        writer: ServiceWriter,
        services: ServiceCache,
        recorder: Recorder,
        publish_precondition: PublishPrecondition,
        granted: Granted,
        *,
        loop: LoopName = "services",
    ) -> None:
        """`loop` is the loop that runs this driver."""
        self._loop = loop
        self._writer = writer
        self._precondition = publish_precondition
        self._granted = granted
        self._services = services
        self._recorder = recorder

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Published]:
        return {key: Published(intent.uid, _ingress_of(intent)) for key, intent in intents.items()}

    def diff(
        self, desired: Mapping[ServiceKey, Published], actual: Mapping[ServiceKey, Published]
    ) -> Sequence[Publish]:
        nothing = Published("", ())
        shown = [
            Publish(key, each.uid, each.ingress, actual.get(key, nothing).ingress)
            for key, each in desired.items()
            if actual.get(key) != each
        ]
        return [
            *shown,
            *(
                Publish(key, each.uid, (), each.ingress)
                for key, each in actual.items()
                if key not in desired
            ),
        ]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Published]:
        """Return the ingress of each Service, as the watch or the last write of this process shows
        it. Services that are being deleted are included: nodes serve the published addresses until
        the Service is gone, and another controller's finalizer may delay that until its address
        already belongs to another Service."""
        if keys is None:
            self._services.forget_answers()
        services = self._services.of(keys)
        return {
            key: published
            for key, service in services.items()
            if (published := _published(service, self._loop)) is not None
        }

    async def apply(self, changes: Sequence[Publish]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            if not change.ingress:
                await self._take_back(change)
                continue
            version = self._precondition(change.service, change.uid, change.ingress)
            status = {"loadBalancer": {"ingress": list(map(_body, change.ingress))}}
            answer = await self._writer.apply(
                change.service,
                change.uid,
                field_manager=FIELD_MANAGER,
                status=status,
                version=version,
            )
            if answer is not None and _deserves_event(change):
                reason = "UpdatedLoadBalancer" if change.before else "EnsuredLoadBalancer"
                self._recorder.event(
                    change.service,
                    change.uid,
                    "Normal",
                    reason,
                    f"served on {_where(change.ingress)}",
                )
        return {}

    async def _take_back(self, change: Publish) -> None:
        answer = await self._writer.apply(change.service, change.uid, field_manager=FIELD_MANAGER)
        left = set(held_by(answer)) if answer is not None else set()
        if left & set(self._granted(change.service)):
            # The controller that served the Service before Fairlead owns these fields too, so they
            # stay although Fairlead no longer applies them. Become their only owner with an empty
            # list. Addresses that Fairlead never granted belong to the controller that serves the
            # Service next, and stay.
            nothing = {"loadBalancer": {"ingress": list[object]()}}
            await self._writer.apply(
                change.service, change.uid, field_manager=FIELD_MANAGER, status=nothing
            )


def _ingress_of(intent: LoadBalancer) -> Ingress:
    """Return the ingress with every port of the Service, where ports that are not served carry
    their error."""
    if intent.hostname and intent.addresses:
        everything = [PortStatus(each.port, each.protocol) for each in intent.listeners]
        everything += [
            PortStatus(each.port, each.protocol, each.error) for each in intent.unserved_ports
        ]
        ordered = tuple(sorted(set(everything), key=lambda each: (each.port, each.protocol)))
        return (LoadBalancerIngress("", intent.hostname, ports=ordered),)
    unserved = [PortStatus(each.port, each.protocol, each.error) for each in intent.unserved_ports]
    entries = []
    for address in intent.addresses:
        family = family_of(address)
        served = [
            PortStatus(each.port, each.protocol)
            for each in intent.listeners
            if each.family == family
        ]
        ports = sorted([*served, *unserved], key=lambda each: (each.port, each.protocol))
        if intent.hostname_suffix:
            entries.append(
                LoadBalancerIngress(
                    "", hostname_of(address, intent.hostname_suffix), ports=tuple(ports)
                )
            )
        else:
            entries.append(LoadBalancerIngress(address, ip_mode=intent.ip_mode, ports=tuple(ports)))
    return tuple(entries)


def _body(entry: LoadBalancerIngress) -> Mapping[str, object]:
    """Return the entry as it is written, with each protocol, because the API server sets no default
    here."""
    ports = [
        {"port": each.port, "protocol": each.protocol}
        | ({"error": each.error} if each.error else {})
        for each in entry.ports
    ]
    where = (
        {"hostname": entry.hostname}
        if entry.hostname
        else {"ip": entry.ip, "ipMode": entry.ip_mode}
    )
    return {**where, "ports": ports}


def _shown(entry: LoadBalancerIngress) -> str:
    return entry.hostname or (f"{entry.ip} ({entry.ip_mode})" if entry.ip_mode else entry.ip)


def _published(service: Service, loop: LoopName) -> Published | None:
    """Return the published ingress of the Service; None if there is none, or if this loop has not
    claimed the Service."""
    if not claimed_for(service, loop):
        return None
    ingress = service.status.load_balancer.ingress
    return Published(service.metadata.uid, ingress) if ingress else None


def _deserves_event(change: Publish) -> bool:
    """Return whether to write an Event for the change: not if all addresses are removed, because
    the release of the Service has its own Event, and not if ports are added to addresses that were
    published without ports."""
    unchanged = _where(change.ingress) == _where(change.before) and not any(
        each.ports for each in change.before
    )
    return bool(change.ingress) and not unchanged


def _where(ingress: Ingress) -> str:
    """Return the addresses, each with the ports that are not served, as text."""
    texts = []
    for each in ingress:
        failed = [f"{port.port}/{port.protocol}" for port in each.ports if port.error]
        texts.append(
            (each.hostname or each.ip) + (f" (but not {', '.join(failed)})" if failed else "")
        )
    return ", ".join(texts)
