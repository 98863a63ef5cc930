"""What to call: targets from the command line, and those of Services.

In: texts, Services. Out: Targets. Pure. A text without a scheme, like a port of a Service without
`appProtocol`, is HTTP on ports 80 and 8080, HTTPS on 443 and 8443, and TCP otherwise: a call of a
TCP target only opens a connection, because nothing is known that the server would answer."""

from collections.abc import Iterable
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from fairlead.errors import Refused
from fairlead.kube.objects import Service, ServicePort
from fairlead.net.address import HIGHEST_PORT, join_host_port

Scheme = Literal["tcp", "http", "https"]
FORM = "give ADDRESS:PORT, tcp://ADDRESS:PORT, or http[s]://HOST[:PORT][/PATH]"
_HTTP_PORTS = {80: "http", 8080: "http", 443: "https", 8443: "https"}
DEFAULT_PORTS = {"http": 80, "https": 443}
_APPLICATION_PROTOCOLS: dict[str, Scheme] = {
    "http": "http",
    "https": "https",
    "kubernetes.io/ws": "http",
    "kubernetes.io/wss": "https",
}
"""The values of `appProtocol` whose servers answer a request of HTTP/1.1. Those of HTTP/2 without
TLS do not (KEP-3726)."""


class Target(msgspec.Struct, frozen=True, order=True):
    """One address and port that is called."""

    name: str
    """What people read: NAMESPACE/SERVICE ADDRESS:PORT, or the text of the command line."""
    scheme: Scheme
    host: str
    """An address, or a DNS name, which is resolved for each call."""
    port: int
    path: str = "/"


def parse(text: str) -> Target:
    """Return the target that a text of the command line names. Raise Refused."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if scheme and scheme not in get_args(Scheme):
        raise Refused(f"target {text!r}: cannot call {scheme}", fix=FORM)
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as problem:
        raise Refused(f"target {text!r}: {problem}", fix=FORM) from None
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if path.startswith("?"):
        path = f"/{path}"
    if any(not "!" <= character <= "~" for character in text) or parts.username is not None:
        raise Refused(f"target {text!r} has characters that cannot be in a target", fix=FORM)
    if not host:
        raise Refused(f"target {text!r} has no address", fix=FORM)
    if ":" in host and not rest.startswith("["):
        raise Refused(f"target {text!r}: an IPv6 address is written in brackets", fix=FORM)
    if port is None:
        port = DEFAULT_PORTS.get(scheme)
    if not port:
        raise Refused(f"target {text!r} has no port from 1 to {HIGHEST_PORT}", fix=FORM)
    if path and scheme == "tcp":
        raise Refused(f"target {text!r}: a TCP target has no path", fix=FORM)
    known = _HTTP_PORTS.get(port, "http" if path else "tcp")
    return Target(text, scheme or known, host, port, path or "/")  # type: ignore[arg-type]


def of_services(services: Iterable[Service]) -> list[Target]:
    """Return a target for each TCP port of each address of the Services of type LoadBalancer."""
    return [
        Target(
            f"{service.key} {join_host_port(host, port.port)}",
            _scheme_of(port),
            host,
            port.port,
        )
        for service in services
        if service.spec.type == "LoadBalancer"
        for ingress in service.status.load_balancer.ingress
        if (host := ingress.ip or ingress.hostname)
        for port in service.spec.ports
        if port.protocol == "TCP"
    ]


def unprobed(services: Iterable[Service]) -> list[str]:
    """Return a sentence for each Service of type LoadBalancer of which something is not called."""
    found = []
    for service in services:
        if service.spec.type != "LoadBalancer":
            continue
        if not any(each.ip or each.hostname for each in service.status.load_balancer.ingress):
            found.append(f"{service.key} has no address")
        if others := [
            f"{each.port}/{each.protocol}" for each in service.spec.ports if each.protocol != "TCP"
        ]:
            found.append(f"{service.key}: {', '.join(others)} is not called, only TCP is")
    return found


def _scheme_of(port: ServicePort) -> Scheme:
    if port.app_protocol:
        return _APPLICATION_PROTOCOLS.get(port.app_protocol.lower(), "tcp")
    return _HTTP_PORTS.get(port.port, "tcp")  # type: ignore[return-value]
