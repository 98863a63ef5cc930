"""The settings of a Service of class `fairlead.io/octavia`, and the provider that serves it.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; the configuration;
the provider of the existing load balancer, if there is one. Out: OctaviaSettings, and a Finding for
each annotation that is ignored, or for which the provider does something else. A feature without
which the Service would not work is refused, and the error names the remedy. `capabilities.py` lists
what each provider does not support. Invariant: pure; whatever the annotations contain, the settings
are within the limits of Octavia and of the provider. Names, units and limits follow
cloud-provider-openstack 1.34 and version 2.30 of Octavia's API."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from fairlead.errors import Refused
from fairlead.model import (
    Family,
    Finding,
    OctaviaChecks,
    OctaviaMethod,
    OctaviaMonitorType,
    OctaviaPlace,
    OctaviaSettings,
    Protocol,
    Provider,
    ProxyHeader,
    SharedOrAdopted,
)
from fairlead.plan.annotation_reader import (
    CHECKED,
    CHECKS,
    CONNECTIONS,
    FORWARDED_FOR,
    HEADER,
    LIMIT,
    TIMES,
    AnnotationReader,
    Values,
    any_text,
    choice,
)
from fairlead.plan.annotations import WITHOUT_EFFECT, names_of, quoted
from fairlead.plan.capabilities import METHODS, OTHER_PROVIDER, SOURCE_RANGES, UNSUPPORTED
from fairlead.plan.floating import FLOATING_ANNOTATIONS, IS_INTERNAL, floating_of
from fairlead.plan.proxying import HOSTNAME, SUFFIX
from fairlead.plan.selection import ALLOWED, read_selector
from fairlead.plan.shared_or_adopted import SHARED_OR_ADOPTED_ID
from fairlead.sections import OctaviaConfig

CLIENT_HIDDEN = "ClientAddressHidden"
PROVIDER = "octavia-provider"
PLACES = ("subnet-id", "network-id", "port-id")
MIN_UDP_DELAY_S = 3
"""The shortest interval of a UDP-CONNECT monitor (Octavia's `min_health_monitor_delay`)."""

_METHODS: Mapping[str, OctaviaMethod] = {
    "round-robin": "ROUND_ROBIN",
    "least-connections": "LEAST_CONNECTIONS",
    "source-ip": "SOURCE_IP",
    "source-ip-port": "SOURCE_IP_PORT",
}
_PROVIDERS: Mapping[str, Literal["auto"] | Provider] = {
    "auto": "auto",
    "amphora": "amphora",
    "octavia": "amphora",  # the old name of the provider
    "ovn": "ovn",
}
MEMBERS = {"ready": False, "all": True}
METHOD: Values[OctaviaMethod | None] = choice("lb-method", _METHODS)
WANTED = choice(PROVIDER, _PROVIDERS)
ALL_MEMBERS = choice("members", MEMBERS)
SELECTOR = Values(names_of("node-selector"), read_selector, ALLOWED)
VALUES: Sequence[Values[object]] = (
    *CONNECTIONS,
    METHOD,
    WANTED,
    ALL_MEMBERS,
    SELECTOR,
    IS_INTERNAL,
    SHARED_OR_ADOPTED_ID,
    HOSTNAME,
    SUFFIX,
    *(
        any_text(names_of(name))
        for name in (
            *PLACES,
            "member-subnet-id",
            "flavor-id",
            "availability-zone",
            "class",
            *FLOATING_ANNOTATIONS,
        )
    ),
)
"""The values of the annotations that this class reads, besides those about addresses."""
DETECTING_MONITORS: frozenset[OctaviaMonitorType] = frozenset({"HTTP", "TCP"})
"""The types of health monitor that detect nodes without ready pods."""
_SETTINGS = (
    "proxy-protocol",
    "x-forwarded-for",
    "timeout-client-data",
    "timeout-member-connect",
    "timeout-member-data",
    "timeout-tcp-inspect",
    "connection-limit",
    "flavor-id",
    "availability-zone",
)
"""Annotations that a provider may not support, whatever their value is."""


class OctaviaRequest(NamedTuple):
    """The requests in the spec of a Service that the settings depend on."""

    local: bool
    """The externalTrafficPolicy is Local: the pods are to see client addresses."""
    health_port: int
    """The health check node port; 0 if there is none."""
    protocols: Sequence[Protocol]
    restricted: bool
    """The Service has source ranges."""
    address: str = ""
    shared_or_adopted: SharedOrAdopted | None = None
    family: Family = "IPv4"
    """The family of the first address; IPv4 if the load balancer has both families."""
    address_v6: str = ""
    both: bool = False
    """The load balancer is to have a second address, of IPv6."""


class _Choice(NamedTuple):
    """The provider that was chosen.

    `why`: the reason, for people. `existing`: the provider of the existing load balancer."""

    provider: Provider
    why: str
    existing: Provider | None


def settings_of(
    annotations: Mapping[str, str],
    request: OctaviaRequest,
    config: OctaviaConfig,
    existing: Provider | None,
) -> tuple[OctaviaSettings, list[Finding]]:
    """Return the settings of a Service, with a Finding for each annotation that has no effect.

    `existing` is the provider of the load balancer that the Service has; it cannot change. Raise
    Refused if the provider does not support a feature that is essential to the Service, and if
    neither the Service nor the configuration names a subnet, network or port for the address."""
    reader = AnnotationReader(annotations)
    if tls := reader.given("default-tls-container-ref"):
        raise Refused(
            f"{tls}: load balancers of this class do not terminate TLS",
            fix="remove it, and let an ingress controller terminate TLS",
        )
    config = _of_class(reader, config)
    header: ProxyHeader = reader.get(HEADER, "")
    forwarded_for = reader.get(FORWARDED_FOR, False)
    limit = reader.get(LIMIT, -1)
    method = reader.get(METHOD, None)
    off = {
        "proxy-protocol": not header,
        "x-forwarded-for": not forwarded_for,
        "connection-limit": limit == -1,
    }
    requested = [
        annotation
        for annotation in _SETTINGS
        if reader.given(annotation) and not off.get(annotation)
    ]
    if request.restricted and not config.manage_security_groups:
        requested.append(SOURCE_RANGES)
    choice = _choose(reader, requested, method, request, config, existing)
    provider = choice.provider
    if method is not None and method not in METHODS[provider]:
        requested.append("lb-method")
        method = None
    unsupported_annotations = [
        annotation for annotation in requested if annotation in UNSUPPORTED[provider]
    ]
    reader.notes += _unsupported(reader, unsupported_annotations, choice)
    if header and forwarded_for:
        reader.note_second_header()
    if provider == "amphora" and request.local:
        reader.notes += _client_hidden(request.protocols, header, forwarded_for and not header)
    checks, monitor_types = _checks(reader, provider, request, config)
    floating = floating_of(reader, annotations, config, request.family, request.address)
    settings = OctaviaSettings(
        provider=provider,
        why=choice.why,
        place=_place(
            reader,
            config,
            request,
            "" if floating else request.address,
            machine=provider == "amphora",
        ),
        header=header,
        forwarded_for=forwarded_for and not header,
        method=method or _default_method(provider, config),
        client_ms=_time_ms(reader, "timeout-client-data", unsupported_annotations),
        connect_ms=_time_ms(reader, "timeout-member-connect", unsupported_annotations),
        member_ms=_time_ms(reader, "timeout-member-data", unsupported_annotations),
        inspect_ms=_time_ms(reader, "timeout-tcp-inspect", unsupported_annotations),
        connection_limit=-1 if "connection-limit" in unsupported_annotations else limit or -1,
        checks=checks,
        monitor_types=monitor_types,
        member_subnet_id=_text(reader, "member-subnet-id", config.member_subnet_id),
        shared_or_adopted=request.shared_or_adopted,
        node_selector=reader.get(SELECTOR, config.node_selector),
        all_nodes=_all_nodes(reader, config, request.protocols, monitor_types),
        floating=floating,
        secured=config.manage_security_groups,
    )
    return settings, reader.notes


def _of_class(reader: AnnotationReader, config: OctaviaConfig) -> OctaviaConfig:
    """Return the configuration with the values of the class that the annotation `class` names (an
    entry of `octavia.classes`). Raise Refused if there is no such class."""
    if not (name := _text(reader, "class", "")):
        return config
    if (found := config.classes.get(name)) is None:
        known = ", ".join(sorted(config.classes)) or "none"
        message = (
            f"{reader.given('class')} is {quoted(name)}, and the configuration has no such "
            f"class ({known})"
        )
        raise Refused(message, fix="name a class of octavia.classes, or add this one there")
    # A subnet belongs to one network. If the class names a network or selects the subnet in another
    # way, the subnets of the general configuration do not apply.
    placed = found if found.subnet_id or found.network_id else config
    own_floating = (
        found.floating_network_id,
        found.floating_subnet_id,
        found.floating_subnet,
        found.floating_subnet_tags,
    )
    floating = found if any(own_floating) else config
    return msgspec.structs.replace(
        config,
        subnet_id=placed.subnet_id,
        network_id=placed.network_id,
        subnet_id_v6=found.subnet_id_v6 or placed.subnet_id_v6,
        member_subnet_id=found.member_subnet_id or config.member_subnet_id,
        floating_network_id=found.floating_network_id or config.floating_network_id,
        floating_subnet_id=floating.floating_subnet_id,
        floating_subnet=floating.floating_subnet,
        floating_subnet_tags=floating.floating_subnet_tags,
    )


def why_single_family(annotations: Mapping[str, str], config: OctaviaConfig) -> str:
    """Return why a new load balancer cannot have addresses of both families; empty if it can."""
    reader = AnnotationReader(annotations)
    if own := [name for annotation in PLACES if (name := reader.given(annotation))]:
        return f"{', '.join(own)} selects the place of a single address"
    return (
        ""
        if _of_class(reader, config).subnet_id_v6
        else "the configuration has no octavia.subnetIdV6"
    )


def _default_method(provider: Provider, config: OctaviaConfig) -> OctaviaMethod:
    if config.lb_method and config.lb_method in METHODS[provider]:
        return config.lb_method
    return "ROUND_ROBIN" if provider == "amphora" else "SOURCE_IP_PORT"


def _all_nodes(
    reader: AnnotationReader,
    config: OctaviaConfig,
    protocols: Sequence[Protocol],
    monitor_types: Iterable[tuple[Protocol, OctaviaMonitorType]],
) -> tuple[Protocol, ...]:
    """Return the protocols of the listeners of which every node is a member.

    Then only a health monitor can detect which nodes have ready pods. A UDP-CONNECT monitor cannot:
    a node drops packets for pods that it does not have, and sends no ICMP error."""
    if not reader.get(ALL_MEMBERS, config.members == "all"):
        return ()
    detected = {protocol for protocol, type_ in monitor_types if type_ in DETECTING_MONITORS}
    if unknown := [protocol for protocol in protocols if protocol not in detected]:
        name = reader.given("members") or "octavia.members: all"
        message = (
            f"{name} has no effect over {', '.join(unknown)}: no health monitor would detect "
            "nodes without ready pods"
        )
        reader.notes.append(
            Finding(WITHOUT_EFFECT, f"{message}; only nodes with ready pods are members")
        )
    return tuple(protocol for protocol in protocols if protocol in detected)


def _choose(
    reader: AnnotationReader,
    requested: Sequence[str],
    method: OctaviaMethod | None,
    request: OctaviaRequest,
    config: OctaviaConfig,
    existing: Provider | None,
) -> _Choice:
    """Choose the provider: the existing one, else the requested one, else one that supports every
    annotation in `requested` and the `method`."""
    wanted = reader.get(WANTED, config.provider)
    if existing is not None:
        if wanted not in ("auto", existing) and (name := reader.given(PROVIDER)):
            message = (
                f"{name} has no effect: the load balancer is of provider {existing}, and "
                "that cannot change"
            )
            reader.notes.append(
                Finding(WITHOUT_EFFECT, message, remedy="recreate the Service to change it")
            )
        return _Choice(existing, "the load balancer exists", existing)
    if wanted != "auto":
        return _Choice(wanted, f"{reader.given(PROVIDER) or 'the configuration'} selects it", None)
    unsupported_annotations = [
        _full_name(reader, annotation)
        for annotation in requested
        if annotation in UNSUPPORTED["ovn"]
    ]
    if method is not None and method not in METHODS["ovn"]:
        unsupported_annotations.append(reader.given("lb-method"))
    if unsupported_annotations:
        return _Choice(
            "amphora", f"provider ovn does not support {', '.join(unsupported_annotations)}", None
        )
    if method is not None and method not in METHODS["amphora"]:
        return _Choice(
            "ovn",
            f"provider amphora does not support this value of {reader.given('lb-method')}",
            None,
        )
    if request.local:
        return _Choice(
            "ovn",
            "with externalTrafficPolicy Local, pods must see the client's address, and this "
            "Service requests no header that carries it",
            None,
        )
    return _Choice(
        "amphora",
        "with externalTrafficPolicy Cluster, pods need not see the client's address, and this "
        "provider gives each node a share by its number of ready pods",
        None,
    )


def _unsupported(
    reader: AnnotationReader, unsupported_annotations: Iterable[str], choice: _Choice
) -> list[Finding]:
    """Return one Finding for each substitute of the provider, with the annotations in
    `unsupported_annotations` that it replaces. Raise Refused for an annotation that has no
    acceptable substitute."""
    instead: dict[str, list[str]] = {}
    for annotation in unsupported_annotations:
        unsupported, name = UNSUPPORTED[choice.provider][annotation], _full_name(reader, annotation)
        if unsupported.action == "refuse":
            other = OTHER_PROVIDER[choice.provider]
            verb = "recreate the Service with" if choice.existing is not None else "set"
            raise Refused(
                f"{name}: {unsupported.explanation}",
                fix=f"remove it, or {verb} fairlead.io/{PROVIDER}: {other}",
            )
        instead.setdefault(unsupported.explanation, []).append(name)
    return [
        Finding(
            WITHOUT_EFFECT,
            f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {what}",
        )
        for what, names in instead.items()
    ]


def _full_name(reader: AnnotationReader, annotation: str) -> str:
    return (
        "spec.loadBalancerSourceRanges" if annotation == SOURCE_RANGES else reader.given(annotation)
    )


def _client_hidden(
    protocols: Sequence[Protocol], header: ProxyHeader, forwarded_for: bool
) -> list[Finding]:
    """Return a Finding if pods will not see client addresses although the policy is Local.

    A load balancer of provider amphora terminates TCP connections and rewrites datagrams, so the
    pods see its address. Only a header over TCP carries the address of the client."""
    hidden = [
        protocol for protocol in protocols if protocol != "TCP" or not (header or forwarded_for)
    ]
    if not hidden:
        return []
    remedies = [f"recreate the Service with fairlead.io/{PROVIDER}: ovn"]
    if hidden == ["TCP"]:
        remedies.insert(0, "let pods accept a PROXY header, and set fairlead.io/proxy-protocol")
    message = (
        f"over {', '.join(hidden)} pods see an address of the load balancer instead of "
        f"the client's: {', or '.join(remedies)}"
    )
    return [Finding(CLIENT_HIDDEN, message)]


def _checks(
    reader: AnnotationReader, provider: Provider, request: OctaviaRequest, config: OctaviaConfig
) -> tuple[OctaviaChecks | None, tuple[tuple[Protocol, OctaviaMonitorType], ...]]:
    """Return the parameters of the health monitors, and the type of monitor by protocol.

    A node reports on its health port that it has no ready pods; only provider amphora can probe
    that port, by HTTP. Other monitors probe the node port. A node without ready pods drops packets
    for the node port: a TCP monitor detects this, a UDP-CONNECT monitor does not. UDP
    listeners get a monitor only if the Service itself requests one."""
    default = config.monitor
    checks = OctaviaChecks(
        *map(
            reader.get,
            CHECKS.values(),
            (default.delay_s, default.timeout_s, default.max_retries, default.max_retries_down),
        )
    )
    by_name = any(map(reader.given, CHECKS))
    if not reader.get(CHECKED, default.enabled or by_name):
        return None, ()
    if provider == "amphora" and request.local and request.health_port:
        return checks, tuple((protocol, "HTTP") for protocol in request.protocols)
    monitor_types: list[tuple[Protocol, OctaviaMonitorType]] = [("TCP", "TCP")] * (
        "TCP" in request.protocols
    )
    if "UDP" in request.protocols and (by_name or reader.given("enable-health-monitor")):
        monitor_types.append(("UDP", "UDP-CONNECT"))
    return (checks, tuple(monitor_types)) if monitor_types else (None, ())


def _place(
    reader: AnnotationReader,
    config: OctaviaConfig,
    request: OctaviaRequest,
    address: str,
    *,
    machine: bool,
) -> OctaviaPlace:
    """Return where the load balancer gets its addresses. `address` is the requested one, or empty.
    `machine`: the provider runs virtual machines, which have a flavor and an availability zone."""
    own = {annotation: _text(reader, annotation, "") for annotation in PLACES}
    second = ""
    if not any(own.values()):
        own |= {"subnet-id": config.subnet_id, "network-id": config.network_id}
        if request.both:
            second = config.subnet_id_v6
        elif request.family == "IPv6" and config.subnet_id_v6:
            own["subnet-id"] = config.subnet_id_v6
    if not any(own.values()) and not (
        request.shared_or_adopted is not None and request.shared_or_adopted.id
    ):
        raise Refused(
            "neither the configuration nor the Service names the subnet or network for the load "
            "balancer's address",
            fix="set octavia.subnetId in the configuration, or fairlead.io/subnet-id on the "
            "Service",
        )
    return OctaviaPlace(
        own["subnet-id"],
        own["network-id"],
        own["port-id"],
        address,
        _text(reader, "flavor-id", config.flavor_id) if machine else "",
        _text(reader, "availability-zone", config.availability_zone) if machine else "",
        second,
        request.address_v6 if second else "",
    )


def _text(reader: AnnotationReader, annotation: str, default: str) -> str:
    return reader.text(annotation, default)


def _time_ms(
    reader: AnnotationReader, annotation: str, unsupported_annotations: Sequence[str]
) -> int | None:
    value = reader.get(TIMES[annotation], -1)
    return None if value < 0 or annotation in unsupported_annotations else value
