"""Describe a lab: its hosts, the processes on them, its pods and Services.

In: a `Site`. Out: an `Overview`, read from the machine and the API server.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fairlead.errors import FairleadError, Refused
from fairlead.kube.objects import SERVICES, Service
from fairlead.lab import namespace, process, routing
from fairlead.lab.objects import PODS, Pod
from fairlead.lab.ovn import edge
from fairlead.lab.ovn.view import OvnView
from fairlead.lab.ovn.view import view as ovn_view
from fairlead.lab.routing import RouterView
from fairlead.lab.site import ROLES, Site
from fairlead.lab.topology import Host

HostCondition = Literal["up", "off", "gone", "no role", "no OVN"]
"""`gone`: the namespace is missing, so the lab is only partly up. `no role`: a Fairlead process
that should run on the host has ended. `no OVN`: a program of OVN that should run on the chassis has
ended."""


class HostState(msgspec.Struct, frozen=True):
    """A machine and the labels of the lab's processes on it."""

    name: str
    addresses: tuple[str, ...]
    state: HostCondition
    processes: tuple[str, ...]


class PodState(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    node: str
    addresses: tuple[str, ...]
    state: str


class ServiceState(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    type: str
    policy: str
    addresses: tuple[str, ...]
    ports: tuple[str, ...]

    def row(self) -> tuple[str, ...]:
        addresses = ", ".join(self.addresses) or "-"
        return self.namespace, self.name, self.type, self.policy, addresses, ", ".join(self.ports)


class Overview(msgspec.Struct, frozen=True):
    """A lab at one moment. `router` is None if the lab has no router (any more), `ovn` if it has no
    OVN or its databases do not answer. `problem` is the reason why pods and Services could not be
    read, or empty."""

    name: str
    server: str
    processes: tuple[str, ...]
    hosts: tuple[HostState, ...]
    pods: tuple[PodState, ...] = ()
    services: tuple[ServiceState, ...] = ()
    problem: str = ""
    router: RouterView | None = None
    ovn: OvnView | None = None

    def tables(self) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        """Yield header and rows of each table that is not empty."""
        hosts = [
            (host.name, ", ".join(host.addresses), host.state, ", ".join(host.processes) or "-")
            for host in self.hosts
        ]
        yield ("HOST", "ADDRESSES", "STATE", "PROCESSES"), hosts
        if self.pods:
            pods = [
                (
                    pod.namespace,
                    pod.name,
                    pod.node or "-",
                    ", ".join(pod.addresses) or "-",
                    pod.state,
                )
                for pod in self.pods
            ]
            yield ("NAMESPACE", "POD", "NODE", "ADDRESSES", "STATE"), pods
        if self.services:
            header = ("NAMESPACE", "SERVICE", "TYPE", "POLICY", "EXTERNAL ADDRESSES", "PORTS")
            yield header, [service.row() for service in self.services]
        if self.router and self.router.reach:
            reach = [(each.destination, ", ".join(each.via)) for each in self.router.reach]
            yield ("ROUTER REACHES", "THROUGH"), reach
        if self.router and self.router.sessions:
            sessions = [
                (each.peer, each.state, each.bfd or "-", str(each.routes))
                for each in self.router.sessions
            ]
            yield ("BGP SESSION OF THE ROUTER", "STATE", "BFD", "ROUTES"), sessions
        if self.ovn is not None:
            yield from _ovn_tables(self.ovn)


def _ovn_tables(ovn: OvnView) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    chassis = [
        (
            each.name,
            ", ".join((each.router, *each.addresses)) if each.router else "-",
            "current" if each.confirmed else "behind",
        )
        for each in ovn.chassis
    ]
    yield ("CHASSIS", "OVN ROUTER", "FLOWS"), chassis
    if ovn.balancers:
        balancers = [
            (
                each.owner,
                f"{each.address}/{each.protocol.upper()}",
                ", ".join(each.routers) or "-",
                ", ".join(f"{to} ({count})" for to, count in each.backends.items()) or "-",
                each.state,
            )
            for each in ovn.balancers
        ]
        header = ("LOAD BALANCER IN OVN", "LISTENER", "ROUTER", "BACKENDS (POSITIONS)", "STATE")
        yield header, balancers


async def overview(site: Site) -> Overview:
    """Return the current state of the lab."""
    labels = sorted(running.label for running in process.find(site.name) if running.leads)
    hosts = tuple(_host(site, host, labels) for host in site.topology.hosts)
    plane = tuple(
        label.partition("/")[2] for label in labels if label.startswith(("lab/", "router/", "ovn/"))
    )
    router, ovn = await _router(site), await _ovn(site)
    try:
        async with site.client() as client:
            pods = await client.list(PODS)
            services = await client.list(SERVICES)
            return Overview(
                site.name,
                site.url,
                plane,
                hosts,
                tuple(map(_pod, pods)),
                tuple(map(_service, services)),
                router=router,
                ovn=ovn,
            )
    except FairleadError as error:
        return Overview(site.name, "", plane, hosts, problem=str(error), router=router, ovn=ovn)


async def _router(site: Site) -> RouterView | None:
    try:
        return await routing.view(site)
    except FairleadError:
        return None


async def _ovn(site: Site) -> OvnView | None:
    if not site.topology.behind_ovn:
        return None
    try:
        return await ovn_view(site.topology)
    except FairleadError:
        return None


def _host(site: Site, host: Host, labels: Sequence[str]) -> HostState:
    processes = tuple(
        label.partition("/")[2] for label in labels if label.startswith(f"{host.name}/")
    )
    state: HostCondition = "up"
    if not namespace.path(site.topology.namespace(host.name)).exists():
        state = "gone"
    elif site.directory.is_off(host.name):
        state = "off"
    elif (
        site.size.roles and host.kind in ROLES and not set(site.roles(host.name)) <= set(processes)
    ):
        state = "no role"
    elif host.kind == "chassis" and edge.dead_programs(site.topology, host):
        state = "no OVN"
    return HostState(host.name, host.addresses, state, processes)


def find_log(site: Site, which: str) -> Path:
    """Return the log of a host's role, a role, a process of the lab or a pod. Raise Refused with
    the names of the existing logs when none matches."""
    logs = sorted(site.directory.logs.iterdir())
    wanted = which.replace("/", "-")
    pod = f"pod-{which.replace('/', '.', 1)}"
    for log in logs:
        if (
            log.stem in (wanted, pod)
            or log.stem.startswith(f"{wanted}-")
            or log.stem.endswith(f"-{wanted}")
        ):
            return log
    raise Refused(
        f"lab {site.name} has no log of {which}",
        fix=f"choose one of {', '.join(log.stem for log in logs)}",
    )


def _pod(pod: Pod) -> PodState:
    metadata = pod.metadata
    state = (
        "terminating"
        if metadata.deletion_timestamp
        else "ready"
        if pod.ready
        else pod.status.phase.lower() or "pending"
    )
    if state == "running":
        state = "not ready"
    addresses = tuple(address.ip for address in pod.status.pod_ips)
    return PodState(metadata.namespace, metadata.name, pod.spec.node_name, addresses, state)


def _service(service: Service) -> ServiceState:
    spec = service.spec
    addresses = tuple(
        ingress.ip or ingress.hostname for ingress in service.status.load_balancer.ingress
    )
    ports = tuple(
        f"{port.port}/{port.protocol}" + (f":{port.node_port}" if port.node_port else "")
        for port in spec.ports
    )
    return ServiceState(*service.key, spec.type, spec.external_traffic_policy, addresses, ports)
