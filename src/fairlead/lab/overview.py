"""Describe a lab: its hosts, the processes on them, its pods and Services.

In: a `Site`. Out: an `Overview`, read from the machine and the API server.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fairlead.errors import FairleadError, Refused
from fairlead.kube.objects import SERVICES, Service
from fairlead.lab import namespace, process
from fairlead.lab.objects import PODS, Pod
from fairlead.lab.site import ROLES, Site
from fairlead.lab.topology import Host

HostCondition = Literal["up", "off", "gone", "no role"]
"""`gone`: the namespace is missing, so the lab is only partly up. `no role`: a Fairlead process
that should run on the host has ended."""


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
    """A lab at one moment. `problem` is the reason why pods and Services could not be read, or
    empty."""

    name: str
    server: str
    processes: tuple[str, ...]
    hosts: tuple[HostState, ...]
    pods: tuple[PodState, ...] = ()
    services: tuple[ServiceState, ...] = ()
    problem: str = ""

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


async def overview(site: Site) -> Overview:
    """Return the current state of the lab."""
    labels = sorted(running.label for running in process.find(site.name) if running.leads)
    hosts = tuple(_host(site, host, labels) for host in site.topology.hosts)
    plane = tuple(label.partition("/")[2] for label in labels if label.startswith("lab/"))
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
            )
    except FairleadError as error:
        return Overview(site.name, "", plane, hosts, problem=str(error))


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
    return HostState(host.name, host.addresses, state, processes)


def find_log(site: Site, which: str) -> Path:
    """Return the log of a host's role, a role, a process of the lab or a pod. Raise Refused with
    the names of the existing logs when none matches."""
    logs = sorted((site.directory.path / "logs").iterdir())
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
