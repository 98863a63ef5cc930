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
from tests.openstack.front import Front

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


class Wish(NamedTuple):
    name: str
    value: str
    spec: Mapping[str, object] = {}
    """Fields of the Service that express the request; if set, it is not an annotation."""

    @property
    def annotations(self) -> dict[str, str]:
        # With `fairlead.io/class` the controller marks the class that serves a Service.
        prefix = "loadbalancer.openstack.org/" if self.name == "class" else "fairlead.io/"
        return {} if self.spec else {prefix + self.name: self.value}


WISHES = (
    Wish("proxy-protocol", "v2"),
    Wish("x-forwarded-for", "true"),
    Wish("timeout-client-data", "600000"),
    Wish("timeout-member-connect", "1000"),
    Wish("timeout-member-data", "600000"),
    Wish("timeout-tcp-inspect", "100"),
    Wish("connection-limit", "1000"),
    Wish("lb-method", "LEAST_CONNECTIONS"),
    Wish("lb-method", "SOURCE_IP"),
    Wish("lb-method", "SOURCE_IP_PORT"),
    Wish("enable-health-monitor", "false"),
    Wish("health-monitor-delay", "9"),
    Wish("health-monitor-timeout", "2"),
    Wish("health-monitor-max-retries", "2"),
    Wish("health-monitor-max-retries-down", "5"),
    Wish("members", "all"),
    Wish("node-selector", "rack=1"),
    Wish("member-subnet-id", ANY_ID),
    Wish("subnet-id", ANY_ID),
    Wish("network-id", ANY_ID),
    Wish("port-id", ANY_ID),
    Wish("flavor-id", ANY_ID),
    Wish("availability-zone", "nova"),
    Wish("class", "inner"),
    Wish("octavia-provider", "amphora"),
    Wish("octavia-provider", "ovn"),
    Wish("internal", "true"),
    Wish("floating-network-id", ANY_ID),
    Wish("floating-subnet-id", ANY_ID),
    Wish("floating-subnet", "pool-*"),
    Wish("floating-subnet-tags", "big"),
    Wish("keep-floatingip", "true"),
    Wish("load-balancer-address", "203.0.113.7"),
    Wish("spec.loadBalancerIP", "203.0.113.7", {"load_balancer_ip": "203.0.113.7"}),
    Wish("load-balancer-id", ANY_ID),
    Wish("hostname", "www.example.org"),
    Wish("hostname-suffix", "nip.io"),
    Wish("default-tls-container-ref", "https://keys/1"),
    Wish(
        "spec.loadBalancerSourceRanges",
        "192.0.2.0/24",
        {"load_balancer_source_ranges": ("192.0.2.0/24",)},
    ),
    Wish("spec.sessionAffinity", "ClientIP", {"session_affinity": "ClientIP"}),
    Wish(
        "spec.ipFamilies",
        "IPv4, IPv6",
        {"ip_families": ("IPv4", "IPv6"), "ip_family_policy": "PreferDualStack"},
    ),
)
APART = frozenset({"x-forwarded-for", "enable-health-monitor", "lb-method"})
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
IN_PLACE = "in place"
ON_THE_SERVICE = "immediately; changes only the status of the Service"


def markdown(columns: Mapping[Provider, Sequence[str]]) -> str:
    lines = ["| annotation | `amphora` | `ovn` |", "|---|---|---|"]
    for wish, *cells in zip(WISHES, *(columns[provider] for provider in PROVIDERS), strict=True):
        lines.append(f"| {says(wish)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def says(wish: Wish) -> str:
    return f"`{wish.name}: {wish.value}`".replace(ANY_ID, "ID")


def written(document: str) -> str:
    return document.partition(BEGIN)[2].partition(END)[0]


async def column(site: Site, provider: Provider, subnet: str) -> list[str]:
    """Return the result of each request."""
    planner = Planner(provider, subnet)
    base = planner.planned(())
    assert isinstance(base, LoadBalancer)
    await site.bring(base)
    cells, carried = [], []
    for wish in WISHES:
        if told := planner.told(wish):
            cells.append(told)
            continue
        asked = planner.planned([wish])
        assert isinstance(asked, LoadBalancer)
        cells.append(await _changed(site, base, asked))
        carried += [wish] if wish.name not in APART else []
    await _make_with(site, planner, carried)
    return cells


async def _changed(site: Site, base: LoadBalancer, asked: LoadBalancer) -> str:
    """Apply the request and remove it again, and return what changed."""
    whole = await site.tree()
    site.forget()
    await site.bring(asked)
    writes = site.writes
    assert not await site.left(asked)
    changed = await site.tree()
    assert (changed.id, changed.address) == (whole.id, whole.address)
    await site.bring(base)
    assert writes
    return f"{IN_PLACE}{_how(whole, changed, writes)}"


def _how(before: BalancerState, after: BalancerState, writes: Iterable[str]) -> str:
    if {each.id for each in before.listeners} != {each.id for each in after.listeners}:
        return ", with a new listener on the same port"
    if "POST pools" in writes:
        return ", with a second pool that replaces the first"
    return ", with a new monitor" if "POST healthmonitors" in writes else ""


async def _make_with(site: Site, planner: "Planner", wishes: Sequence[Wish]) -> None:
    """Create a load balancer with all of these requests in one call."""
    await site.bring()
    asked = planner.planned(wishes)
    assert isinstance(asked, LoadBalancer)
    site.forget()
    await site.bring(asked)
    assert site.writes == ["POST loadbalancers"]
    assert not await site.left(asked)
    await site.bring()


class Planner:
    """Plans Service `web`, with a pod on each of two nodes, for one provider."""

    def __init__(self, provider: Provider, subnet: str) -> None:
        classes = {"inner": OctaviaClassConfig(subnet_id=ANY_ID)}
        self._config = Config(
            default_class=OCTAVIA.name,
            octavia=OctaviaConfig(provider=provider, subnet_id=subnet, classes=classes),
        )
        self._provider = provider

    def planned(self, wishes: Iterable[Wish]) -> LoadBalancer | Refused:
        wishes = tuple(wishes)
        annotations = {name: text for wish in wishes for name, text in wish.annotations.items()}
        spec: dict[str, Any] = {name: value for wish in wishes for name, value in wish.spec.items()}
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

    def told(self, wish: Wish) -> str:
        """Return the plan's message about the request; "" if the request is to be carried out."""
        if wish.name in AT_NEUTRON:
            return "see [octavia-network.md](octavia-network.md#annotations)"
        base, asked = self.planned(()), self.planned([wish])
        assert isinstance(base, LoadBalancer)
        if isinstance(asked, Refused):
            return f"refused: {_plain(asked.message, wish)}"
        assert isinstance(asked.settings, OctaviaSettings)
        assert isinstance(base.settings, OctaviaSettings)
        if notes := [str(note) for note in asked.notes if note.code == WITHOUT_EFFECT]:
            return f"no effect: {_plain(notes[0].partition('no effect: ')[2], wish)}"
        if notes := [str(note) for note in asked.notes if note.code == SKIPPED]:
            return f"when it is made; to a live one it is told: {notes[0]}"
        if asked.settings.shared_or_adopted != base.settings.shared_or_adopted:
            return "the Service moves to that load balancer"
        owner = Owner("cluster", "test")
        (before,), (after,) = (specs_of({WEB: each}, owner).values() for each in (base, asked))
        if after == before:
            same = msgspec.structs.replace(asked, notes=base.notes, settings=base.settings) == base
            return "no change: the same as without the annotation" if same else ON_THE_SERVICE
        if after == msgspec.structs.replace(before, place=after.place):
            return "at creation; an existing load balancer stays unchanged"
        if wish.name == "member-subnet-id":
            # The subnet of a member cannot be changed.
            return "for new members"
        return ""


def _plain(text: str, wish: Wish) -> str:
    return (
        text.removeprefix(f"fairlead.io/{wish.name}: ")
        .removeprefix(f"{wish.name}: ")
        .replace("|", "or")
    )


class _Deaf:
    """An event recorder."""

    def event(self, service: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        """Discard the Event."""


async def columns_of(front: Front, subnet: str, folder: Path) -> dict[Provider, list[str]]:
    found: dict[Provider, list[str]] = {}
    for provider in PROVIDERS:
        site = Site(front, folder, _Deaf())
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
            with Front(cloud.octavia.url, project=project).listen() as front:
                table = markdown(asyncio.run(columns_of(front, cloud.subnet, folder)))
            clients.clear(cloud.client(), project)
        finally:
            cloud.end()
    document = DOCUMENT.read_text()
    DOCUMENT.write_text(
        document.replace(f"{BEGIN}{written(document)}{END}", f"{BEGIN}{table}{END}")
    )


if __name__ == "__main__":
    main()
