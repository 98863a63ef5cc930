"""The settings and terms of class `fairlead.io/proxy`, whose load balancer terminates connections.

In: a Service's annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; the
first name takes precedence. Out: ProxySettings, and a Finding for each invalid value with the
allowed values. An invalid value does not affect the other settings. Invariant: pure; whatever the
annotations contain, the settings are within the limits of HAProxy. Names, units and limits follow
cloud-provider-openstack 1.34 and Octavia. Times may also be written as Go durations (`50s`)."""

from collections.abc import Mapping, Sequence

from fairlead.config import read_suffix
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import (
    Finding,
    MemberChecks,
    ProxyHeader,
    ProxyMethod,
    ProxySettings,
    ServiceKey,
    UnservedPort,
)
from fairlead.plan import direct
from fairlead.plan.annotation_reader import (
    CHECKED,
    CHECKS,
    CONNECTIONS,
    DRAINED_AFTER,
    FORWARDED_FOR,
    HEADER,
    LIMIT,
    TIMES,
    AnnotationReader,
    Values,
    choice,
)
from fairlead.plan.annotations import (
    NOT_UNDERSTOOD,
    PROXY_ANNOTATIONS,
    SHARING_KEY,
    drain_timeout_s,
    found,
    names_of,
)
from fairlead.plan.service import affinity_timeout_s
from fairlead.plan.terms import ServiceContext, Terms, listed, unserved, without_node_port

PROXY = "fairlead.io/proxy"
PROTOCOL_NOT_SUPPORTED = "ProtocolNotSupported"
"""Code of a Finding: class proxy cannot serve some ports. With the domain as prefix, it is also the
error of such a port in the status."""
HOSTNAME_SUFFIX = ("fairlead.io/hostname-suffix",)
NO_SUFFIX = "none"
PROXY_HEADER_SWITCHED = "ProxyHeaderSwitched"
OLD_CONNECTIONS_ENDED = "OldConnectionsEnded"
RELOAD_DELAYED = "ReloadDelayed"
CONNECTION_LIMIT_REACHED = "ConnectionLimitReached"
CONNECTION_LIMIT_CAPPED = "ConnectionLimitCapped"
AFFINITY_BY_GATEWAY = "AffinityByGateway"

ANNOTATIONS = tuple(name for each in PROXY_ANNOTATIONS for name in names_of(each)) + HOSTNAME_SUFFIX

SUBSTITUTES = {
    **{name: what for name, what in direct.SUBSTITUTES.items() if name not in PROXY_ANNOTATIONS},
    "default-tls-container-ref": "TLS is passed through unchanged; let an ingress controller "
    "terminate it",
    "hostname": "for a hostname in the status set fairlead.io/hostname-suffix",
}
"""By short name of each annotation without effect, what class proxy does instead."""

_METHODS: Mapping[str, ProxyMethod] = {
    "round-robin": "roundrobin",
    "least-connections": "leastconn",
    "source-ip": "source",
}
METHOD = choice("lb-method", _METHODS)
HOSTNAME = Values(names_of("hostname"), read_suffix, "a DNS name")
SUFFIX = Values(
    HOSTNAME_SUFFIX,
    lambda text: "" if text.lower() == NO_SUFFIX else read_suffix(text),
    f"a DNS name such as nip.io, or {NO_SUFFIX}",
)
VALUES: Sequence[Values[object]] = (*CONNECTIONS, METHOD, SUFFIX, DRAINED_AFTER)
"""The values of the annotations that this class reads, besides those about addresses."""


def proxy_terms(context: ServiceContext) -> Terms:
    """Return the terms of class proxy. Raise Refused if it can serve no port of the Service."""
    annotations = context.service.metadata.annotations
    settings, notes = settings_of(annotations, affinity=affinity_timeout_s(context.service) > 0)
    suffix, more = hostname_suffix(annotations, settings, context.config.proxy.hostname_suffix)
    impossible, why = _impossible(context.service)
    return Terms(
        settings,
        [*notes, *more, *why],
        impossible,
        # This also holds without a header: a connection that a node answers itself bypasses the
        # timeouts and limits. Where gateways run on nodes, it would bypass the load balancer
        # altogether.
        ip_mode="Proxy",
        hostname_suffix=suffix,
    )


def _impossible(service: Service) -> tuple[list[UnservedPort], list[Finding]]:
    """Return the ports that class proxy cannot serve, with one Finding about other protocols and
    one about missing node ports. Raise Refused if there is no other port."""
    not_tcp = [port for port in service.spec.ports if port.protocol != "TCP"]
    without_port = [
        port for port in service.spec.ports if port.protocol == "TCP" and not port.node_port
    ]
    notes: list[Finding] = []
    if not_tcp:
        why = f"class {PROXY} terminates TCP connections and serves no other protocol"
        fix = (
            f"move these ports to a Service of class {direct.DIRECT}, which forwards TCP, UDP and "
            "SCTP unchanged"
        )
        message = f"not served: {listed(not_tcp)}: {why}"
        notes.append(
            Finding(
                PROTOCOL_NOT_SUPPORTED,
                message,
                severity="error",
                remedy=fix,
                blocks="Programmed",
            )
        )
    missing, more = without_node_port(PROXY, without_port)
    notes += more
    if notes and len(not_tcp) + len(without_port) == len(service.spec.ports):
        raise Refused("; ".join(map(str, notes)))
    return [*unserved(not_tcp, PROTOCOL_NOT_SUPPORTED), *missing], notes


def settings_of(
    annotations: Mapping[str, str], *, affinity: bool
) -> tuple[ProxySettings, list[Finding]]:
    """Return the settings that the annotations request. `affinity`: the spec requests
    sessionAffinity, which determines the method."""
    default = ProxySettings()
    reader = AnnotationReader(annotations)
    header = reader.get(HEADER, default.header)
    forwarded_for = reader.get(FORWARDED_FOR, default.forwarded_for)
    method = reader.get(METHOD, default.method)
    limit = reader.get(LIMIT, default.connection_limit)
    if header and forwarded_for:
        reader.note_second_header()
    if affinity and method != "source" and (name := reader.given("lb-method")):
        reader.notes.append(
            Finding(
                NOT_UNDERSTOOD,
                f"{name} has no effect: spec.sessionAffinity keeps each client on its node",
            )
        )
    if affinity:
        reader.notes.append(_affinity())
    settings = ProxySettings(
        header=header,
        forwarded_for=forwarded_for and not header,
        method="source" if affinity else method,
        client_ms=reader.get(TIMES["timeout-client-data"], default.client_ms),
        connect_ms=reader.get(TIMES["timeout-member-connect"], default.connect_ms),
        member_ms=reader.get(TIMES["timeout-member-data"], default.member_ms),
        inspect_ms=reader.get(TIMES["timeout-tcp-inspect"], default.inspect_ms),
        connection_limit=max(limit, 0),
        checks=_checks(reader),
        shared=bool(found(annotations, SHARING_KEY)[1]),
        drain_timeout_s=drain_timeout_s(annotations),
    )
    return settings, reader.notes


def hostname_suffix(
    annotations: Mapping[str, str], settings: ProxySettings, configured: str
) -> tuple[str, list[Finding]]:
    """Return the suffix that makes a published hostname of an address; empty if the address itself
    is published. `configured` is the default for Services whose pods expect a header."""
    return hostname_suffix_after(
        annotations, configured if settings.header or settings.forwarded_for else ""
    )


def hostname_suffix_after(
    annotations: Mapping[str, str], default: str
) -> tuple[str, list[Finding]]:
    """Return the suffix of the annotation, or `default` if the annotation is absent or invalid."""
    reader = AnnotationReader(annotations)
    return reader.get(SUFFIX, default), reader.notes


def hostname_in(annotations: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """Return the hostname to publish instead of addresses; empty if there is none."""
    reader = AnnotationReader(annotations)
    return reader.get(HOSTNAME, ""), reader.notes


def switched(before: ProxyHeader, after: ProxyHeader) -> Finding:
    """Return the Finding about a change of the PROXY header. Pods that accept connections with both
    headers lose none; other pods must be changed before the Service is."""
    change = (
        f"new connections begin with {_name_of(after)}, open connections keep {_name_of(before)}"
    )
    both = "pods must already accept connections with and without a header"
    if not before:
        order = f"{both}, and may require it once every gateway has switched"
    elif not after:
        order = f"{both}, and may stop expecting it once every gateway has switched"
    else:
        order = "pods must already accept both versions"
    remedy = (
        "if they cannot, restore the previous setting of this Service, and move clients to a "
        "second Service whose target port expects the new setting"
    )
    return Finding(PROXY_HEADER_SWITCHED, f"{change}: {order}", severity="info", remedy=remedy)


def ended(connections: int, max_workers: int) -> Finding:
    """Return the Finding about connections that ended because HAProxy stopped their old worker: at
    most `max_workers` old workers are kept after reloads."""
    ended = "1 connection was" if connections == 1 else f"{connections} connections were"
    why = f"HAProxy keeps at most {max_workers} of its old workers after reloads"
    return Finding(
        OLD_CONNECTIONS_ENDED,
        f"{ended} ended, with a worker from before a reload: {why} (gateway.proxyOldWorkers)",
    )


def reload_delayed(namespace: str, max_workers: int) -> Finding:
    """Return the Finding that a change waits, because it needs a reload that its namespace may not
    cause now. `max_workers`: the maximum number of old workers, if it or the share of the namespace
    is reached; 0 if the namespace has caused many reloads recently."""
    if max_workers:
        why = (
            f"this gateway keeps at most {max_workers} old workers of HAProxy, of which namespace "
            f"{namespace} may cause a part, and connections of others have not ended in them"
        )
        remedy = (
            "it is applied when such connections have ended, after five minutes in any case; "
            "change Services less often, several at the same time, or raise gateway.proxyOldWorkers"
        )
    else:
        why = f"Services of namespace {namespace} change often, and each change reloads HAProxy"
        remedy = "change Services less often, or several at the same time"
    return Finding(RELOAD_DELAYED, f"this change is not in effect yet: {why}", remedy=remedy)


def connections_limited(service: ServiceKey, *, by_share: bool) -> Finding:
    """Return the Finding that new connections of the Service are closed, because the Service or its
    namespace has reached its share of the gateway's connections; or that they wait, because one of
    its listeners has reached the limit that the Service requests."""
    if by_share:
        return Finding(
            CONNECTION_LIMIT_REACHED,
            f"new connections are closed: the Service, or namespace {service.namespace}, has its "
            "share of the open connections of this gateway",
            remedy="end idle connections sooner (fairlead.io/timeout-client-data), use more "
            "gateways, or raise the limit of open files or gateway.namespaceShare",
        )
    return Finding(
        CONNECTION_LIMIT_REACHED,
        "new connections wait: a port has as many open connections as the connection-limit of the "
        "Service, or HAProxy as a whole, allows",
        remedy="raise the limit, or end idle connections sooner (fairlead.io/timeout-client-data)",
    )


def limit_capped(limit: int, largest: int) -> Finding:
    """Return the Finding that the limit which the Service requests exceeds its share."""
    return Finding(
        CONNECTION_LIMIT_CAPPED,
        f"connection-limit is {limit}, but on this gateway a Service has at most {largest} open "
        "connections, fewer if others have many; further ones are closed",
        remedy="lower the limit, so that further connections wait, or raise the limit of open "
        "files or gateway.namespaceShare",
    )


def _affinity() -> Finding:
    """Return the Finding that the service proxies of the nodes apply the session affinity too, and
    treat each gateway as a single client."""
    message = (
        "a node sees the gateway's address instead of client addresses, so it sends all "
        "connections of a gateway to one pod, and other pods on the node may get none"
    )
    per_node = (
        "to keep each client on one node, set fairlead.io/lb-method to source-ip and "
        "sessionAffinity to None"
    )
    per_pod = (
        "to keep each client on one pod, run one pod on each node with policy Local, or use class "
        f"{direct.DIRECT}"
    )
    return Finding(AFFINITY_BY_GATEWAY, message, remedy=f"{per_node}; {per_pod}")


def _name_of(header: ProxyHeader) -> str:
    return f"a PROXY header {header}" if header else "no PROXY header"


def _checks(reader: AnnotationReader) -> MemberChecks | None:
    """Return the health checks of the node ports; None unless the Service enables them, or sets one
    of their parameters without disabling them."""
    default = MemberChecks()
    interval_s, timeout_s, rise, fall = map(
        reader.get,
        CHECKS.values(),
        (default.interval_ms // 1000, default.timeout_ms // 1000, default.rise, default.fall),
    )
    checks = MemberChecks(1000 * interval_s, 1000 * timeout_s, rise, fall)
    wanted = reader.get(CHECKED, any(map(reader.given, CHECKS)))
    return checks if wanted else None
