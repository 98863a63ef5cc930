"""What users, nodes and gateways read on a Service: its addresses, the hairpin contract of each,
and the ports served there.

In: LoadBalancers with their addresses. Out: `status.loadBalancer.ingress` with `ipMode` (KEP-1860)
and `ports`, of which those that are not served carry an error (KEP-1435), and an Event that names
the addresses. Invariant: published last, taken back first; a Service that no class of ours has
claimed is not touched; a field manager of its own, which owns nothing else."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.claim import claimed_for
from fairlead.drivers.newest import NewestServices
from fairlead.drivers.service_status import ServiceWriter
from fairlead.kube.events import Recorder
from fairlead.kube.objects import LoadBalancerIngress, PortStatus, Service
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import held_by, hostname_of
from fairlead.plan.classes import LoopName

FIELD_MANAGER = "fairlead-publish"

Ingress = tuple[LoadBalancerIngress, ...]

Licence = Callable[[ServiceKey, str, Ingress], str]
"""The version of the Service of this uid over which that may be published (`drivers.grants`).
Raises Conflict if it may not."""
Granted = Callable[[ServiceKey], Collection[str]]
"""The addresses that AddressGrants name for this Service."""


class Published(msgspec.Struct, frozen=True):
    """What the Service of this uid shows."""

    uid: str
    ingress: Ingress


class Publish(msgspec.Struct, frozen=True):
    """Show exactly this; nothing: take back what is shown. `before`: what is shown now."""

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
        newest: NewestServices,
        recorder: Recorder,
        licence: Licence,
        granted: Granted,
        *,
        loop: LoopName = "services",
    ) -> None:
        """`loop`: the loop that runs this driver."""
        self._loop = loop
        self._writer = writer
        self._licence = licence
        self._granted = granted
        self._newest = newest
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
        """What is known. That of a Service that is being deleted too: nodes serve what it shows
        until it is gone, and somebody else's finalizer may keep it for long, when its address is
        another's already."""
        if keys is None:
            self._newest.forget_answers()
        services = self._newest.of(keys)
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
            version = self._licence(change.service, change.uid, change.ingress)
            status = {"loadBalancer": {"ingress": list(map(_body, change.ingress))}}
            answer = await self._writer.apply(
                change.service,
                change.uid,
                field_manager=FIELD_MANAGER,
                status=status,
                version=version,
            )
            if answer is not None and _is_news(change):
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
            # Whoever served the Service before has written it as well: it does not go until it is
            # ours alone. What was never granted here is of whoever serves the Service next, and
            # stays.
            nothing = {"loadBalancer": {"ingress": list[object]()}}
            await self._writer.apply(
                change.service, change.uid, field_manager=FIELD_MANAGER, status=nothing
            )


def _ingress_of(intent: LoadBalancer) -> Ingress:
    """Every port of the Service is there, those that are not served with their error."""
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
    """As it is written: the API server fills in no protocol here."""
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
    """None: it shows nothing, or nothing of ours."""
    if not claimed_for(service, loop):
        return None
    ingress = service.status.load_balancer.ingress
    return Published(service.metadata.uid, ingress) if ingress else None


def _is_news(change: Publish) -> bool:
    """Not when all is taken back, which the release of the Service tells, nor when ports are shown
    that were not before."""
    unchanged = _where(change.ingress) == _where(change.before) and not any(
        each.ports for each in change.before
    )
    return bool(change.ingress) and not unchanged


def _where(ingress: Ingress) -> str:
    """The addresses, with their ports where not all are served."""
    texts = []
    for each in ingress:
        failed = [f"{port.port}/{port.protocol}" for port in each.ports if port.error]
        texts.append(
            (each.hostname or each.ip) + (f" (but not {', '.join(failed)})" if failed else "")
        )
    return ", ".join(texts)
