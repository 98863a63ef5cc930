"""What a Service says of the way its connections are passed on where they end at the balancer
(class `fairlead.io/proxy`).

In: a Service's annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; ours
comes first. Out: ProxySettings, and a Finding for each value that cannot be used: what it is, what
is allowed, what holds instead. One value that is wrong keeps nothing else from being done.
Invariant: pure; whatever annotations say, the settings are within the limits that HAProxy takes.
Names, units and limits of cloud-provider-openstack 1.34 and Octavia; times may also be written as
Go does (`50s`)."""

from collections.abc import Mapping

from fairlead.config import read_suffix
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import (
    Finding,
    MemberChecks,
    ProxyHeader,
    ProxyMethod,
    ProxySettings,
    UnservedPort,
)
from fairlead.plan import direct
from fairlead.plan.annotation_reader import CHECKS, HEADERS, SWITCHES, AnnotationReader
from fairlead.plan.annotations import (
    NOT_UNDERSTOOD,
    PROXY_ANNOTATIONS,
    SHARING_KEY,
    drain_timeout_s,
    found,
    names_of,
    quoted,
)
from fairlead.plan.service import affinity_timeout_s
from fairlead.plan.terms import Asked, Terms, listed, unserved, without_node_port

PROXY = "fairlead.io/proxy"
PROTOCOL_NOT_SUPPORTED = "ProtocolNotSupported"
"""The code of a Finding about ports that class proxy cannot serve; with the domain before it, the
error of such a port in the status."""
MOST_CONNECTIONS = 1_000_000
HOSTNAME_SUFFIX = ("fairlead.io/hostname-suffix",)
NO_SUFFIX = "none"
PROXY_HEADER_SWITCHED = "ProxyHeaderSwitched"
OLD_CONNECTIONS_ENDED = "OldConnectionsEnded"
AFFINITY_BY_GATEWAY = "AffinityByGateway"

ANNOTATIONS = tuple(name for wish in PROXY_ANNOTATIONS for name in names_of(wish)) + HOSTNAME_SUFFIX

SUBSTITUTES = {
    **{wish: what for wish, what in direct.SUBSTITUTES.items() if wish not in PROXY_ANNOTATIONS},
    "default-tls-container-ref": "TLS is passed on as it is; let an ingress controller end it",
    "hostname": "for a hostname in the status set fairlead.io/hostname-suffix",
}
"""By annotation that has no effect, what class proxy does instead."""

_METHODS: Mapping[str, ProxyMethod] = {
    "round-robin": "roundrobin",
    "least-connections": "leastconn",
    "source-ip": "source",
}


def proxy_terms(asked: Asked) -> Terms:
    """Return the terms of class proxy. Raises Refused if it can serve no port of the Service."""
    annotations = asked.service.metadata.annotations
    settings, notes = settings_of(annotations, affinity=affinity_timeout_s(asked.service) > 0)
    suffix, more = hostname_suffix(annotations, settings, asked.config.proxy.hostname_suffix)
    impossible, why = _impossible(asked.service)
    return Terms(
        settings,
        [*notes, *more, *why],
        impossible,
        # Also without a header: connections that a node answers itself would bypass the time-outs
        # and limits, and the balancer as a whole where gateways run on nodes.
        ip_mode="Proxy",
        hostname_suffix=suffix,
    )


def _impossible(service: Service) -> tuple[list[UnservedPort], list[Finding]]:
    """Return the ports that a balancer that ends connections cannot serve, with a Finding for
    each kind of them. Raises Refused if there is no other port."""
    strange = [port for port in service.spec.ports if port.protocol != "TCP"]
    unreached = [
        port for port in service.spec.ports if port.protocol == "TCP" and not port.node_port
    ]
    notes: list[Finding] = []
    if strange:
        why = f"class {PROXY} ends TCP connections and serves nothing else"
        fix = (
            f"put these ports into a Service of class {direct.DIRECT}, which passes TCP, UDP and "
            "SCTP on as they are"
        )
        message = f"not served: {listed(strange)}: {why}"
        notes.append(
            Finding(
                PROTOCOL_NOT_SUPPORTED,
                message,
                severity="error",
                remedy=fix,
                blocks="Programmed",
            )
        )
    missing, more = without_node_port(PROXY, unreached)
    notes += more
    if notes and len(strange) + len(unreached) == len(service.spec.ports):
        raise Refused("; ".join(map(str, notes)))
    return [*unserved(strange, PROTOCOL_NOT_SUPPORTED), *missing], notes


def settings_of(
    annotations: Mapping[str, str], *, affinity: bool
) -> tuple[ProxySettings, list[Finding]]:
    """What the annotations ask for. `affinity`: the Service's spec asks for sessionAffinity, which
    names the method."""
    default = ProxySettings()
    reader = AnnotationReader(annotations)
    header = reader.choice("proxy-protocol", HEADERS, default.header)
    forwarded_for = reader.choice("x-forwarded-for", SWITCHES, default.forwarded_for)
    method = reader.choice("lb-method", _METHODS, default.method)
    limit = reader.number("connection-limit", -1, MOST_CONNECTIONS, default.connection_limit)
    if header and forwarded_for:
        one, other = reader.given("proxy-protocol"), reader.given("x-forwarded-for")
        message = (
            f"{other} has no effect beside {one}: pods are told the client's address in one way"
        )
        reader.notes.append(Finding(NOT_UNDERSTOOD, message, remedy="remove one of the two"))
    if affinity and method != "source" and (name := reader.given("lb-method")):
        reader.notes.append(
            Finding(
                NOT_UNDERSTOOD,
                f"{name} has no effect: spec.sessionAffinity keeps each client with its node",
            )
        )
    if affinity:
        reader.notes.append(_affinity())
    settings = ProxySettings(
        header=header,
        forwarded_for=forwarded_for and not header,
        method="source" if affinity else method,
        client_ms=reader.time_ms("timeout-client-data", default.client_ms),
        connect_ms=reader.time_ms("timeout-member-connect", default.connect_ms),
        member_ms=reader.time_ms("timeout-member-data", default.member_ms),
        inspect_ms=reader.time_ms("timeout-tcp-inspect", default.inspect_ms),
        connection_limit=max(limit, 0),
        checks=_checks(reader),
        shared=bool(found(annotations, SHARING_KEY)[1]),
        drain_timeout_s=drain_timeout_s(annotations),
    )
    return settings, reader.notes


def hostname_suffix(
    annotations: Mapping[str, str], settings: ProxySettings, configured: str
) -> tuple[str, list[Finding]]:
    """What is published after the address; `configured`: for Services that do not say it, if their
    pods expect a header."""
    return hostname_suffix_after(
        annotations, configured if settings.header or settings.forwarded_for else ""
    )


def hostname_suffix_after(
    annotations: Mapping[str, str], default: str
) -> tuple[str, list[Finding]]:
    """The same; `default`: for Services that do not say it."""
    name, text = found(annotations, HOSTNAME_SUFFIX)
    if not name:
        return default, []
    if text.lower() == NO_SUFFIX:
        return "", []
    if (suffix := read_suffix(text)) is None:
        message = (
            f"{name} is {quoted(text)}; allowed: a name of DNS such as nip.io, or "
            f"{NO_SUFFIX}; it counts as not given"
        )
        return default, [Finding(NOT_UNDERSTOOD, message)]
    return suffix, []


def hostname_in(annotations: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """The name that is to be published in the place of addresses; empty: none."""
    name, text = found(annotations, names_of("hostname"))
    if not name:
        return "", []
    if (hostname := read_suffix(text)) is not None:
        return hostname, []
    message = (
        f"{name} is {quoted(text)}; allowed: a name of DNS; it counts as not given, and "
        "the address is published"
    )
    return "", [Finding(NOT_UNDERSTOOD, message)]


def switched(before: ProxyHeader, after: ProxyHeader) -> Finding:
    """What to tell when new connections begin otherwise than before: who takes both loses nothing,
    who does not has to be changed first."""
    news = f"new connections begin with {_said(after)}, open ones go on with {_said(before)}"
    both = "pods have to take connections with and without a header before"
    if not before:
        order = f"{both}, and may insist on it when every gateway has switched"
    elif not after:
        order = f"{both}, and may cease to expect it when every gateway has switched"
    else:
        order = "pods have to understand both versions before"
    instead = (
        "where they cannot, leave this Service as it was, and move clients to a second one "
        "for a port that expects the other"
    )
    return Finding(PROXY_HEADER_SWITCHED, f"{news}: {order}", severity="info", remedy=instead)


def ended(connections: int, most: int) -> Finding:
    """What to tell when connections were cut because HAProxy has been reloaded too often for
    them."""
    ours = "1 connection was" if connections == 1 else f"{connections} connections were"
    why = f"HAProxy has been reloaded too often since: no more than {most} of its old workers go on"
    return Finding(
        OLD_CONNECTIONS_ENDED,
        f"{ours} ended, the oldest of this gateway's: {why} (gateway.proxyOldWorkers)",
    )


def _affinity() -> Finding:
    """Where a service proxy applies the affinity once more, to connections of gateways."""
    why = (
        "nodes see a gateway in place of its clients, so for all of them it stays with one pod "
        "at each node"
    )
    instead = (
        "for a node by client set fairlead.io/lb-method to source-ip, and sessionAffinity to None"
    )
    others = (
        "for a pod by client have one pod on each node, with policy Local, or use class "
        f"{direct.DIRECT}"
    )
    return Finding(
        AFFINITY_BY_GATEWAY, f"{why}: others may get nothing", remedy=f"{instead}; {others}"
    )


def _said(header: ProxyHeader) -> str:
    return f"a PROXY header {header}" if header else "no PROXY header"


def _checks(reader: AnnotationReader) -> MemberChecks | None:
    """Asked for as a whole, or by one of its settings."""
    default = MemberChecks()
    checks = MemberChecks(
        1000 * reader.number(CHECKS[0], 1, 3600, default.interval_ms // 1000),
        1000 * reader.number(CHECKS[1], 1, 3600, default.timeout_ms // 1000),
        reader.number(CHECKS[2], 1, 10, default.rise),
        reader.number(CHECKS[3], 1, 10, default.fall),
    )
    wanted = reader.choice("enable-health-monitor", SWITCHES, any(map(reader.given, CHECKS)))
    return checks if wanted else None
