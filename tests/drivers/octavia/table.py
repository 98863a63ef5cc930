"""Generates the table of annotations in docs/octavia.md: plans each request of a Service for each
provider, and carries it out at the real Octavia.

In: both providers of a real Octavia. Out: the rows of the table. Each request is added to a Service
with a load balancer, and removed again; at the end one load balancer is created with all compatible
requests. `python -m tests.drivers.octavia.table` writes the table, which takes some minutes."""

import asyncio
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests import makers
from tests.drivers.octavia.site import WEB, Site
from tests.openstack import clients
from tests.openstack.cloud import NODES, Cloud
from tests.openstack.fault_proxy import FaultProxy

from fairlead.config import Config
from fairlead.drivers.octavia.balancers import BalancerState
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.render import specs_of
from fairlead.errors import Refused
from fairlead.kube.objects import Node, NodeAddress, NodeStatus, ObjectKey, ObjectMeta
from fairlead.model import (
    ExistingLoadBalancer,
    LoadBalancer,
    OctaviaSettings,
    Provider,
    ServiceKey,
)
from fairlead.plan.annotations import WITHOUT_EFFECT
from fairlead.plan.classes import OCTAVIA
from fairlead.plan.cloud import plan_cloud
from fairlead.plan.floating import FLOATING_ANNOTATIONS
from fairlead.plan.refusals import SKIPPED
from fairlead.sections import OctaviaClassConfig, OctaviaConfig
from fairlead.state import State

DOCUMENT = Path(__file__).parents[3] / "docs" / "octavia.md"
BEGIN, END = "<!-- written by python -m tests.drivers.octavia.table -->\n", "<!-- end -->\n"
PROVIDERS: tuple[Provider, ...] = ("amphora", "ovn")
ANY_ID = "0f1a7c1e-0000-4000-8000-00000000000f"


class AnnotationRow(NamedTuple):
    name: str
    value: str
    spec: Mapping[str, object] = {}
    """Fields of the Service that express the request. If there are any, the request is not an
    annotation."""

    @property
    def annotations(self) -> dict[str, str]:
        # `fairlead.io/class` is the claim annotation of the controller.
        prefix = "loadbalancer.openstack.org/" if self.name == "class" else "fairlead.io/"
        return {} if self.spec else {prefix + self.name: self.value}


REQUESTS = (
    AnnotationRow("proxy-protocol", "v2"),
    AnnotationRow("x-forwarded-for", "true"),
    AnnotationRow("timeout-client-data", "600000"),
    AnnotationRow("timeout-member-connect", "1000"),
    AnnotationRow("timeout-member-data", "600000"),
    AnnotationRow("timeout-tcp-inspect", "100"),
    AnnotationRow("connection-limit", "1000"),
    AnnotationRow("lb-method", "LEAST_CONNECTIONS"),
    AnnotationRow("lb-method", "SOURCE_IP"),
    AnnotationRow("lb-method", "SOURCE_IP_PORT"),
    AnnotationRow("enable-health-monitor", "false"),
    AnnotationRow("health-monitor-delay", "9"),
    AnnotationRow("health-monitor-timeout", "2"),
    AnnotationRow("health-monitor-max-retries", "2"),
    AnnotationRow("health-monitor-max-retries-down", "5"),
    AnnotationRow("members", "all"),
    AnnotationRow("node-selector", "rack=1"),
    AnnotationRow("member-subnet-id", ANY_ID),
    AnnotationRow("subnet-id", ANY_ID),
    AnnotationRow("network-id", ANY_ID),
    AnnotationRow("port-id", ANY_ID),
    AnnotationRow("flavor-id", ANY_ID),
    AnnotationRow("availability-zone", "nova"),
    AnnotationRow("class", "inner"),
    AnnotationRow("octavia-provider", "amphora"),
    AnnotationRow("octavia-provider", "ovn"),
    AnnotationRow("internal", "true"),
    AnnotationRow("floating-network-id", ANY_ID),
    AnnotationRow("floating-subnet-id", ANY_ID),
    AnnotationRow("floating-subnet", "pool-*"),
    AnnotationRow("floating-subnet-tags", "big"),
    AnnotationRow("keep-floatingip", "true"),
    AnnotationRow("load-balancer-address", "203.0.113.7"),
    AnnotationRow("spec.loadBalancerIP", "203.0.113.7", {"load_balancer_ip": "203.0.113.7"}),
    AnnotationRow("load-balancer-id", ANY_ID),
    AnnotationRow("hostname", "www.example.org"),
    AnnotationRow("hostname-suffix", "nip.io"),
    AnnotationRow("default-tls-container-ref", "https://keys/1"),
    AnnotationRow(
        "spec.loadBalancerSourceRanges",
        "192.0.2.0/24",
        {"load_balancer_source_ranges": ("192.0.2.0/24",)},
    ),
    AnnotationRow("spec.sessionAffinity", "ClientIP", {"session_affinity": "ClientIP"}),
    AnnotationRow(
        "spec.ipFamilies",
        "IPv4, IPv6",
        {"ip_families": ("IPv4", "IPv6"), "ip_family_policy": "PreferDualStack"},
    ),
)
EXCLUSIVE = frozenset({"x-forwarded-for", "enable-health-monitor", "lb-method"})
"""Requests that are excluded from the load balancer with all requests, because they exclude others.
"""
AT_NEUTRON = frozenset(
    {
        "internal",
        *FLOATING_ANNOTATIONS,
        "keep-floatingip",
        "load-balancer-address",
        "spec.loadBalancerIP",
    }
)
"""Requests about floating IPs, which are documented separately."""
IN_PLACE, AT_CREATION = "in place", "when the load balancer is created"
ON_THE_SERVICE = "at once, in the status of the Service only"


def markdown(columns: Mapping[Provider, Sequence[str]]) -> str:
    lines = ["| annotation | `amphora` | `ovn` |", "|---|---|---|"]
    for request, *cells in zip(
        REQUESTS, *(columns[provider] for provider in PROVIDERS), strict=True
    ):
        lines.append(f"| {label(request)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def label(request: AnnotationRow) -> str:
    return f"`{request.name}: {request.value}`".replace(ANY_ID, "ID")


def written(document: str) -> str:
    return document.partition(BEGIN)[2].partition(END)[0]


async def column(site: Site, provider: Provider, subnet: str) -> list[str]:
    """Return the result of each request."""
    planner = Planner(provider, subnet)
    base = planner.planned(())
    assert isinstance(base, LoadBalancer)
    await site.reconcile(base)
    cells, carried = [], []
    for request in REQUESTS:
        if message := planner.message(request):
            cells.append(message)
            continue
        asked = planner.planned([request])
        assert isinstance(asked, LoadBalancer)
        cells.append(await _changed(site, base, asked))
        carried += [request] if request.name not in EXCLUSIVE else []
    await _make_with(site, planner, carried)
    return cells


async def _changed(site: Site, base: LoadBalancer, asked: LoadBalancer) -> str:
    """Apply the request and remove it again, and return what changed."""
    whole = await site.tree()
    site.clear_calls()
    await site.reconcile(asked)
    writes = site.writes
    assert not await site.remaining_steps(asked)
    changed = await site.tree()
    assert (changed.id, changed.address) == (whole.id, whole.address)
    await site.reconcile(base)
    assert writes
    return f"{IN_PLACE}{_how(whole, changed, writes)}"


def _how(before: BalancerState, after: BalancerState, writes: Iterable[str]) -> str:
    if {each.id for each in before.listeners} != {each.id for each in after.listeners}:
        return ", by a new listener on the same port"
    if "POST pools" in writes:
        return ", by a second pool that replaces the first one"
    return ", by a new health monitor" if "POST healthmonitors" in writes else ""


async def _make_with(site: Site, planner: "Planner", requests: Sequence[AnnotationRow]) -> None:
    """Create a load balancer with all of these requests in one call."""
    await site.reconcile()
    asked = planner.planned(requests)
    assert isinstance(asked, LoadBalancer)
    site.clear_calls()
    await site.reconcile(asked)
    assert site.writes == ["POST loadbalancers"]
    assert not await site.remaining_steps(asked)
    await site.reconcile()


class Planner:
    """Plans Service `web`, with a pod on each of two nodes, for one provider."""

    def __init__(self, provider: Provider, subnet: str) -> None:
        classes = {"inner": OctaviaClassConfig(subnet_id=ANY_ID)}
        self._config = Config(
            default_class=OCTAVIA.name,
            octavia=OctaviaConfig(provider=provider, subnet_id=subnet, classes=classes),
        )
        self._provider = provider

    def planned(self, requests: Iterable[AnnotationRow]) -> LoadBalancer | Refused:
        requests = tuple(requests)
        annotations = {
            name: text for request in requests for name, text in request.annotations.items()
        }
        spec: dict[str, Any] = {
            name: value for request in requests for name, value in request.spec.items()
        }
        service = makers.make_service(annotations=annotations, **spec)
        state = State(())
        state.update_services({ObjectKey(*service.key): service})
        rows = [
            (f"10.244.{number}.1", node, "ready") for number, node in enumerate(sorted(NODES)[:2])
        ]
        state.update_slices({ObjectKey("default", "web-1"): makers.make_slice(rows)})
        nodes = {
            ObjectKey("", name): Node(
                ObjectMeta(name=name, labels={"rack": name[-1]}),
                status=NodeStatus((NodeAddress("InternalIP", address),)),
            )
            for name, address in NODES.items()
        }
        state.update_nodes(nodes)
        state.observe_load_balancer(
            service.key,
            ExistingLoadBalancer(service.metadata.uid, self._provider, ("198.51.100.1",)),
        )
        return plan_cloud(state, self._config, [service.key])[service.key]

    def message(self, request: AnnotationRow) -> str:
        """Return the plan's message about the request; "" if the request is to be carried out."""
        if request.name in AT_NEUTRON:
            return "see [octavia-network.md](octavia-network.md#annotations)"
        base, asked = self.planned(()), self.planned([request])
        assert isinstance(base, LoadBalancer)
        if isinstance(asked, Refused):
            return f"refused: {_plain(asked.message, request)}"
        assert isinstance(asked.settings, OctaviaSettings)
        assert isinstance(base.settings, OctaviaSettings)
        if notes := [str(note) for note in asked.notes if note.code == WITHOUT_EFFECT]:
            return f"no effect: {_plain(notes[0].partition('no effect: ')[2], request)}"
        if notes := [str(note) for note in asked.notes if note.code == SKIPPED]:
            return f"{AT_CREATION}; later it is reported: {notes[0]}"
        if asked.settings.shared_or_adopted != base.settings.shared_or_adopted:
            return "the Service moves to that load balancer"
        owner = Owner("cluster", "test")
        (before,), (after,) = (specs_of({WEB: each}, owner).values() for each in (base, asked))
        if after == before:
            same = msgspec.structs.replace(asked, notes=base.notes, settings=base.settings) == base
            return "no change: this is the present value" if same else ON_THE_SERVICE
        if after == msgspec.structs.replace(before, place=after.place):
            return f"{AT_CREATION}; an existing load balancer does not change"
        if request.name == "member-subnet-id":
            # The subnet of a member cannot be changed.
            return "for members that are added later"
        return ""


def _plain(text: str, request: AnnotationRow) -> str:
    return (
        text.removeprefix(f"fairlead.io/{request.name}: ")
        .removeprefix(f"{request.name}: ")
        .replace("|", "or")
    )


class DiscardingRecorder:
    """An event recorder that discards the Events."""

    def event(self, service: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        """Record nothing."""


async def columns_of(proxy: FaultProxy, subnet: str, folder: Path) -> dict[Provider, list[str]]:
    found: dict[Provider, list[str]] = {}
    for provider in PROVIDERS:
        site = Site(proxy, folder, DiscardingRecorder())
        try:
            found[provider] = await column(site, provider, subnet)
        finally:
            site.cloud.close()
    return found


def main() -> None:
    """Start OpenStack, and write the table."""
    with tempfile.TemporaryDirectory(prefix=f"octavia-table-{os.getpid()}-") as name:
        folder = Path(name)
        cloud, project = Cloud(folder), uuid.uuid4().hex
        try:
            cloud.start()
            with FaultProxy(cloud.octavia.url, project=project).listen() as proxy:
                table = markdown(asyncio.run(columns_of(proxy, cloud.subnet, folder)))
            clients.delete_load_balancers(cloud.client(), project)
        finally:
            cloud.end()
    document = DOCUMENT.read_text()
    DOCUMENT.write_text(
        document.replace(f"{BEGIN}{written(document)}{END}", f"{BEGIN}{table}{END}")
    )


if __name__ == "__main__":
    main()
