"""The entry points of a Service, and the findings that its objects show without a request.

In: a Service with its EndpointSlices, Nodes, and the controller's ConfigMap. Out: for each TCP port
that may speak HTTP its front entry points (the addresses and hostnames in the status) and, for each
address family of a front, one pod and one node port behind it; and findings. Only `read` and
`families_of` have effects: they read from the API server and resolve hostnames."""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal, get_args

import msgspec

from fairlead.errors import Refused
from fairlead.ingress.entrypoint import EntryPoint
from fairlead.ingress.findings import NOT_TESTED, config_findings
from fairlead.ingress.settings import OPENSTACK, PROXY_PROTOCOL, Controller, Header
from fairlead.kube.answers import RefusedByServer
from fairlead.kube.client import Client
from fairlead.kube.objects import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    NODES,
    SERVICES,
    EndpointSlice,
    LoadBalancerIngress,
    Node,
    ObjectKey,
    Service,
    ServicePort,
)
from fairlead.model import Family, Finding, about
from fairlead.net.address import family_of
from fairlead.plan.addresses import shown_address
from fairlead.plan.annotation_reader import HEADER
from fairlead.plan.annotations import quoted
from fairlead.plan.classes import CLASSES
from fairlead.plan.endpoints import candidates, usable
from fairlead.plan.service import CLASS_ANNOTATION
from fairlead.plan.understood import in_force

Tls = Literal["auto", "always", "never"]
FAMILIES: Sequence[Family] = get_args(Family)
TLS_PORTS = (443, 8443)
WEB_PORTS = (80, 8080, *TLS_PORTS)
_HTTPS = frozenset(("https", "wss", "kubernetes.io/wss"))
_HTTP = frozenset(("http", "http/1.1", "ws", "kubernetes.io/ws")) | _HTTPS
"""Values of appProtocol for ports that answer HTTP/1.1, and those of them with TLS."""
_ANY = frozenset(("", "tcp", "tls", "ssl", "h2c", "kubernetes.io/h2c", "http2", "grpc"))
"""Values of appProtocol for ports that may answer HTTP/1.1."""
VERSIONS: Mapping[str, Header] = {"true": "v1", "v1": "v1", "v2": "v2", "false": "none"}
"""Values of the annotation, as OpenStack's cloud controller reads them: `true` means version 1."""


class ServiceObjects(msgspec.Struct, frozen=True):
    """The objects of a Service in the API server. `config` is None if the ConfigMap does not exist
    or must not be read. `families` are the address families to which a hostname in the status
    resolves; hostnames that contain their address are left out."""

    service: Service
    slices: tuple[EndpointSlice, ...]
    nodes: Mapping[str, Node]
    config: Mapping[str, str] | None
    families: Mapping[str, Sequence[Family]] = {}


class Target(msgspec.Struct, frozen=True):
    """A front entry point, and the entry points behind it as (name, entry point). `ready` is False
    if the EndpointSlices contain no pod that gets new connections. `is_web` is False if it is
    unknown whether the port speaks HTTP, so that only an answer can show it."""

    front: EntryPoint
    behind: tuple[tuple[str, EntryPoint], ...]
    ready: bool = True
    is_web: bool = True


async def read(client: Client, key: ObjectKey, config_map: str = "") -> ServiceObjects:
    """Read the objects of a Service from the API server.

    `config_map` is the ConfigMap's name. By default it is the Service's name, as in the charts of
    ingress-nginx and HAProxy. Raise Refused if the Service does not exist, Unavailable if the API
    server does not answer."""
    service = await client.get(SERVICES, key)
    slices = [each for each in await client.list(ENDPOINT_SLICES) if each.service == service.key]
    nodes = {node.metadata.name: node for node in await client.list(NODES)}
    config = None
    with suppress(RefusedByServer):
        config = (
            await client.get(CONFIG_MAPS, ObjectKey(key.namespace, config_map or key.name))
        ).data
    shown = service.status.load_balancer.ingress
    families = {
        entry.hostname: await families_of(entry.hostname)
        for entry in shown
        if shown_address(entry) is None
    }
    return ServiceObjects(service, tuple(slices), nodes, config, families)


async def families_of(hostname: str) -> Sequence[Family]:
    """Return the address families to which the hostname resolves, or both families if it does not
    resolve on this host."""
    try:
        known = await asyncio.get_running_loop().getaddrinfo(
            hostname, None, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):  # UnicodeError: a label is empty or too long for DNS.
        return FAMILIES
    return sorted({family_of(str(address[0])) for *_, address in known})


def sends(service: Service) -> Header | None:
    """Return the PROXY header that the Service's load balancer sends, or None if the class belongs
    to another system, so that the header is unknown.

    A Service without a class that Fairlead serves (`defaultClass`) has the controller's claim, an
    annotation with the class. A value that is not understood leaves the last one in force."""
    try:
        service, _ = in_force(service, (HEADER,))
    except Refused:
        return None
    annotations = service.metadata.annotations
    text = (
        annotations.get(PROXY_PROTOCOL) or annotations.get(f"{OPENSTACK}proxy-protocol") or "false"
    )
    name = service.spec.load_balancer_class or annotations.get(CLASS_ANNOTATION)
    class_ = CLASSES.get(name or "")
    if class_ is not None and not class_.writes_headers:
        return "none"
    if class_ is not None or (name is None and f"{OPENSTACK}proxy-protocol" in annotations):
        return VERSIONS.get(text.strip().lower())
    return None


def targets(found: ServiceObjects, host: str, path: str, tls: Tls = "auto") -> list[Target]:
    """Return a target for each TCP port that may speak HTTP and each address of the status. Raise
    Refused if the Service has no address or no such port."""
    service = found.service
    shown = service.status.load_balancer.ingress
    if not shown:
        raise Refused(
            f"Service {service.key} has no address",
            fix=f"see `kubectl describe service {service.metadata.name}`",
        )
    ports = [port for port in service.spec.ports if not why_not_checked(port)]
    if not ports:
        raise Refused(
            f"Service {service.key} has no port that can be checked: "
            + "; ".join(_not_checked(service)),
            fix="the check needs a TCP port that speaks HTTP; if one does, correct its appProtocol",
        )
    made = []
    for port in ports:
        is_tls = port_speaks_tls(port) if tls == "auto" else tls == "always"
        for entry in shown:
            behind = [
                (name, EntryPoint(there, number, is_tls, host, path))
                for family in _families(found, entry)
                for name, there, number in _behind(found, port, family)
            ]
            front = EntryPoint(entry.hostname or entry.ip, port.port, is_tls, host, path)
            made.append(Target(front, tuple(behind), bool(behind), is_web(port)))
    return made


def why_not_checked(port: ServicePort) -> str:
    """Return why no request is sent to the port: it cannot have a PROXY header, or does not speak
    HTTP according to its appProtocol. Empty if it is checked."""
    if port.protocol != "TCP":
        return f"{port.port}/{port.protocol}: the check sends PROXY headers over TCP only"
    if port.app_protocol.lower() not in _HTTP | _ANY:
        return f"{port.port}/TCP: its appProtocol is {quoted(port.app_protocol)}, not HTTP"
    return ""


def is_web(port: ServicePort) -> bool:
    """Return whether the port speaks HTTP, by its appProtocol, by its name in the charts, or by its
    number."""
    return (
        port.app_protocol.lower() in _HTTP
        or port.name.startswith(("http", "web"))
        or port.port in WEB_PORTS
    )


def port_speaks_tls(port: ServicePort) -> bool:
    """Return whether the port of a Service uses TLS, by its appProtocol if that tells it."""
    protocol = port.app_protocol.lower()
    return protocol in _HTTPS if protocol in _HTTP else speaks_tls(port.port, port.name)


def speaks_tls(port: int, name: str = "") -> bool:
    """Return whether a port uses TLS, by its number or by its name in the charts."""
    return port in TLS_PORTS or name.startswith(("https", "websecure"))


def controller_of(service: Service, config: Mapping[str, str] | None) -> Controller | None:
    """Return the controller, by the selector of the chart's Service or by the settings in the
    ConfigMap; None if it is unknown."""
    name = (service.spec.selector or {}).get("app.kubernetes.io/name", "")
    config = config or {}
    if name == "ingress-nginx" or "use-proxy-protocol" in config:
        return "nginx"
    if name == "kubernetes-ingress" or "proxy-protocol" in config:
        return "haproxy"
    return "traefik" if name == "traefik" else None


def not_tested(service: Service) -> tuple[Finding, ...]:
    """Return the Finding about the ports of the Service to which no request is sent."""
    if not (reasons := _not_checked(service)):
        return ()
    return about(
        f"Service {service.key}", [Finding(NOT_TESTED, "; ".join(reasons), severity="info")]
    )


def findings(found: ServiceObjects) -> tuple[Finding, ...]:
    """Return the findings that need no request."""
    return about(f"Service {found.service.key}", _findings(found))


def _not_checked(service: Service) -> list[str]:
    return [why for port in service.spec.ports if (why := why_not_checked(port))]


def _findings(found: ServiceObjects) -> Iterator[Finding]:
    service, header = found.service, sends(found.service)
    if service.spec.external_traffic_policy != "Local":
        what = "pods see a node's address" + (
            ", and no node is a load balancer" if header != "none" else ""
        )
        yield Finding(
            "PolicyCluster",
            f"externalTrafficPolicy is not Local: {what}",
            severity="error",
            remedy="set externalTrafficPolicy: Local",
        )
    if header in ("v1", "v2") and any(
        entry.ip and entry.ip_mode != "Proxy" for entry in service.status.load_balancer.ingress
    ):
        yield Finding(
            "HairpinWithoutHeader",
            (
                "the status does not contain ipMode: Proxy, so callers in the cluster bypass the "
                "load balancer and send no header"
            ),
            severity="error",
            remedy="class proxy sets it with Kubernetes 1.30 and later; with older releases, "
            "publish only a hostname",
        )
    controller = controller_of(service, found.config)
    if controller and found.config is not None and header is not None:
        yield from config_findings(controller, found.config, header)


def _families(found: ServiceObjects, entry: LoadBalancerIngress) -> Sequence[Family]:
    """Return the address families of an address or hostname in the status."""
    address = shown_address(entry)
    return [family_of(address)] if address else found.families.get(entry.hostname, FAMILIES)


def _behind(
    found: ServiceObjects, port: ServicePort, family: Family
) -> Iterator[tuple[str, str, int]]:
    """Yield (name, address, port) of one pod that gets new connections, and of the node port on the
    pod's node."""
    for pod in usable(candidates(found.slices, port_name=port.name, protocol="TCP", family=family)):
        yield "pod", pod.address, pod.port
        if port.node_port and (address := _internal(found.nodes.get(pod.node), family)):
            yield "node port", address, port.node_port
        return


def _internal(node: Node | None, family: Family) -> str:
    entries: Sequence[str] = (
        [e.address for e in node.status.addresses if e.type == "InternalIP"] if node else ()
    )
    return next((address for address in entries if family_of(address) == family), "")
