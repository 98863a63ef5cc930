"""What a Service of class `fairlead.io/octavia` asks of OpenStack's load balancers, and by which
provider it is served.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`, the configuration,
the provider of the load balancer that is there. Out: OctaviaSettings, and a Finding for each annotation
that cannot be used or is met otherwise. A annotation without which the Service would not work is refused,
with the way out; what a provider lacks says `capabilities.py`. Invariant: pure; whatever
annotations say, the settings are within the limits that Octavia takes, and such as the provider
has. Names, units and limits of cloud-provider-openstack 1.34 and of Octavia's API 2.30."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from fairlead.errors import Refused
from fairlead.model import (
    Family,
    Finding,
    OctaviaAsking,
    OctaviaChecks,
    OctaviaMethod,
    OctaviaPlace,
    OctaviaSettings,
    Protocol,
    Provider,
    ProxyHeader,
    SharedOrAdopted,
)
from fairlead.plan.annotation_reader import CHECKS, HEADERS, SWITCHES, AnnotationReader
from fairlead.plan.annotations import NOT_UNDERSTOOD, WITHOUT_EFFECT, quoted
from fairlead.plan.capabilities import METHODS, OTHER_PROVIDER, SOURCE_RANGES, UNSUPPORTED
from fairlead.plan.floating import floating_of
from fairlead.plan.selection import ALLOWED, read_selector
from fairlead.sections import OctaviaConfig

CLIENT_HIDDEN = "ClientAddressHidden"
PROVIDER = "octavia-provider"
PLACES = ("subnet-id", "network-id", "port-id")
MOST_CONNECTIONS = 1_000_000
SHORTEST_UDP_DELAY_S = 3
"""Octavia asks over UDP no more often (its `min_health_monitor_delay` for UDP-CONNECT)."""

_METHODS: Mapping[str, OctaviaMethod] = {
    "round-robin": "ROUND_ROBIN",
    "least-connections": "LEAST_CONNECTIONS",
    "source-ip": "SOURCE_IP",
    "source-ip-port": "SOURCE_IP_PORT",
}
_PROVIDERS: Mapping[str, Literal["auto"] | Provider] = {
    "auto": "auto",
    "amphora": "amphora",
    "octavia": "amphora",  # the same under an old name
    "ovn": "ovn",
}
MEMBERS = {"ready": False, "all": True}
DETECTING_MONITORS: frozenset[OctaviaAsking] = frozenset({"HTTP", "TCP"})
"""Monitors that find out which nodes have no ready pods."""
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
"""Wishes that one provider may lack, whatever they are."""


class OctaviaRequest(NamedTuple):
    """What a Service says beside its annotations."""

    local: bool
    """Its policy is Local: it wants to know its clients."""
    health_port: int
    """0: none."""
    protocols: Sequence[Protocol]
    restricted: bool
    """It has source ranges."""
    address: str = ""
    elsewhere: SharedOrAdopted | None = None
    family: Family = "IPv4"
    """Of its first address; of both families it is IPv4."""
    address_v6: str = ""
    both: bool = False
    """It is to have a second address, of IPv6."""


class _Choice(NamedTuple):
    provider: Provider
    why: str
    existing: Provider | None


def settings_of(
    annotations: Mapping[str, str],
    request: OctaviaRequest,
    config: OctaviaConfig,
    existing: Provider | None,
) -> tuple[OctaviaSettings, list[Finding]]:
    """`existing`: the provider of the load balancer that the Service has; it stays. Raises Refused
    for what is essential to the Service and the provider lacks, and without a place to be."""
    reader = AnnotationReader(annotations)
    if tls := reader.given("default-tls-container-ref"):
        raise Refused(
            f"{tls}: load balancers of this class end no TLS",
            fix="remove it, and let an ingress controller end TLS",
        )
    config = _of_class(reader, config)
    header = reader.choice("proxy-protocol", HEADERS, "")
    forwarded_for = reader.choice("x-forwarded-for", SWITCHES, False)
    limit = reader.number("connection-limit", -1, MOST_CONNECTIONS, -1)
    method: OctaviaMethod | None = reader.choice("lb-method", {**_METHODS}, None)
    off = {
        "proxy-protocol": not header,
        "x-forwarded-for": not forwarded_for,
        "connection-limit": limit == -1,
    }
    asked = [
        annotation
        for annotation in _SETTINGS
        if reader.given(annotation) and not off.get(annotation)
    ]
    if request.restricted and not config.manage_security_groups:
        asked.append(SOURCE_RANGES)
    choice = _choose(reader, asked, method, request, config, existing)
    provider = choice.provider
    if method is not None and method not in METHODS[provider]:
        asked.append("lb-method")
        method = None
    lacking = [annotation for annotation in asked if annotation in UNSUPPORTED[provider]]
    reader.notes += _unsupported(reader, lacking, choice)
    if header and forwarded_for:
        one, other = reader.given("proxy-protocol"), reader.given("x-forwarded-for")
        message = (
            f"{other} has no effect beside {one}: pods are told the client's address in one way"
        )
        reader.notes.append(Finding(NOT_UNDERSTOOD, message, remedy="remove one of the two"))
    if provider == "amphora" and request.local:
        reader.notes += _client_hidden(request.protocols, header, forwarded_for and not header)
    checks, asking = _checks(reader, provider, request, config)
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
        method=method or _usual_method(provider, config),
        client_ms=_time_ms(reader, "timeout-client-data", lacking),
        connect_ms=_time_ms(reader, "timeout-member-connect", lacking),
        member_ms=_time_ms(reader, "timeout-member-data", lacking),
        inspect_ms=_time_ms(reader, "timeout-tcp-inspect", lacking),
        connection_limit=-1 if "connection-limit" in lacking else limit or -1,
        checks=checks,
        asking=asking,
        member_subnet_id=_text(reader, "member-subnet-id", config.member_subnet_id),
        elsewhere=request.elsewhere,
        node_selector=reader.read("node-selector", read_selector, ALLOWED, config.node_selector),
        all_nodes=_all_nodes(reader, config, request.protocols, asking),
        floating=floating,
        secured=config.manage_security_groups,
    )
    return settings, reader.notes


def _of_class(reader: AnnotationReader, config: OctaviaConfig) -> OctaviaConfig:
    """With what the class says that the Service names. Raises Refused for one that is not there."""
    if not (name := _text(reader, "class", "")):
        return config
    if (found := config.classes.get(name)) is None:
        known = ", ".join(sorted(config.classes)) or "none"
        message = (
            f"{reader.given('class')} is {quoted(name)}, and the configuration has no such "
            f"class ({known})"
        )
        raise Refused(message, fix="name one of octavia.classes, or add it there")
    placed = found if found.subnet_id or found.network_id else config
    # A subnet is of a network: with another network, or a subnet named otherwise, what is said in
    # general is of no use.
    floats = (
        found.floating_network_id,
        found.floating_subnet_id,
        found.floating_subnet,
        found.floating_subnet_tags,
    )
    floating = found if any(floats) else config
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


def has_both(annotations: Mapping[str, str], config: OctaviaConfig) -> str:
    """Why a load balancer that is to be made cannot have addresses of both families; nothing if it
    can."""
    reader = AnnotationReader(annotations)
    if own := [name for annotation in PLACES if (name := reader.given(annotation))]:
        return f"{', '.join(own)} says where its one address is to be"
    return (
        ""
        if _of_class(reader, config).subnet_id_v6
        else "the configuration has no octavia.subnetIdV6"
    )


def _usual_method(provider: Provider, config: OctaviaConfig) -> OctaviaMethod:
    if config.lb_method and config.lb_method in METHODS[provider]:
        return config.lb_method
    return "ROUND_ROBIN" if provider == "amphora" else "SOURCE_IP_PORT"


def _all_nodes(
    reader: AnnotationReader,
    config: OctaviaConfig,
    protocols: Sequence[Protocol],
    asking: Iterable[tuple[Protocol, OctaviaAsking]],
) -> tuple[Protocol, ...]:
    """Where every node is a member: nobody but a monitor can tell then which has pods, and over
    UDP-CONNECT it cannot, as nodes drop what is for pods that they do not have."""
    if not reader.choice("members", MEMBERS, config.members == "all"):
        return ()
    detected = {protocol for protocol, type_ in asking if type_ in DETECTING_MONITORS}
    if unknown := [protocol for protocol in protocols if protocol not in detected]:
        name = reader.given("members") or "octavia.members: all"
        message = (
            f"{name} has no effect over {', '.join(unknown)}: no monitor would find out "
            "there which nodes have no ready pods"
        )
        reader.notes.append(
            Finding(WITHOUT_EFFECT, f"{message}; members are nodes with ready pods")
        )
    return tuple(protocol for protocol in protocols if protocol in detected)


def _choose(
    reader: AnnotationReader,
    asked: Sequence[str],
    method: OctaviaMethod | None,
    request: OctaviaRequest,
    config: OctaviaConfig,
    existing: Provider | None,
) -> _Choice:
    wanted = reader.choice(PROVIDER, _PROVIDERS, config.provider)
    if existing is not None:
        if wanted not in ("auto", existing) and (name := reader.given(PROVIDER)):
            message = (
                f"{name} has no effect: the load balancer is of provider {existing}, and "
                "that cannot change"
            )
            reader.notes.append(
                Finding(WITHOUT_EFFECT, message, remedy="make the Service anew for another")
            )
        return _Choice(existing, "it is there", existing)
    if wanted != "auto":
        return _Choice(wanted, f"{reader.given(PROVIDER) or 'the configuration'} says so", None)
    lacking = [
        _called(reader, annotation) for annotation in asked if annotation in UNSUPPORTED["ovn"]
    ]
    if method is not None and method not in METHODS["ovn"]:
        lacking.append(reader.given("lb-method"))
    if lacking:
        return _Choice("amphora", f"provider ovn has no {', '.join(lacking)}", None)
    if method is not None and method not in METHODS["amphora"]:
        return _Choice(
            "ovn", f"provider amphora has no {reader.given('lb-method')} of this kind", None
        )
    if request.local:
        return _Choice(
            "ovn",
            "with externalTrafficPolicy Local pods are to see the client's address, and get no "
            "header",
            None,
        )
    return _Choice(
        "amphora",
        "with externalTrafficPolicy Cluster nothing speaks against shares by the number of ready "
        "pods",
        None,
    )


def _unsupported(
    reader: AnnotationReader, lacking: Iterable[str], choice: _Choice
) -> list[Finding]:
    """One Finding for each thing that the provider does instead. Raises Refused for what it must
    not."""
    instead: dict[str, list[str]] = {}
    for annotation in lacking:
        unsupported, name = UNSUPPORTED[choice.provider][annotation], _called(reader, annotation)
        if unsupported.action == "refuse":
            other = OTHER_PROVIDER[choice.provider]
            anew = "make the Service anew with" if choice.existing is not None else "set"
            raise Refused(
                f"{name}: {unsupported.explanation}",
                fix=f"remove it, or {anew} fairlead.io/{PROVIDER}: {other}",
            )
        instead.setdefault(unsupported.explanation, []).append(name)
    return [
        Finding(
            WITHOUT_EFFECT,
            f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {what}",
        )
        for what, names in instead.items()
    ]


def _called(reader: AnnotationReader, annotation: str) -> str:
    return (
        "spec.loadBalancerSourceRanges" if annotation == SOURCE_RANGES else reader.given(annotation)
    )


def _client_hidden(
    protocols: Sequence[Protocol], header: ProxyHeader, forwarded_for: bool
) -> list[Finding]:
    """Who asks for policy Local wants to see clients, and behind a machine that ends or rewrites
    connections pods do not."""
    hidden = [
        protocol for protocol in protocols if protocol != "TCP" or not (header or forwarded_for)
    ]
    if not hidden:
        return []
    ways = [f"set fairlead.io/{PROVIDER}: ovn and make the Service anew"]
    if hidden == ["TCP"]:
        ways.insert(0, "have pods take a PROXY header (fairlead.io/proxy-protocol)")
    message = (
        f"over {', '.join(hidden)} pods see an address of the load balancer in place of "
        f"the client's: {', or '.join(ways)}"
    )
    return [Finding(CLIENT_HIDDEN, message)]


def _checks(
    reader: AnnotationReader, provider: Provider, request: OctaviaRequest, config: OctaviaConfig
) -> tuple[OctaviaChecks | None, tuple[tuple[Protocol, OctaviaAsking], ...]]:
    """A node without ready pods says so on its health port, to who can ask there over HTTP:
    provider amphora. Its node port drops what is sent there, which TCP notices and UDP does not."""
    default = config.monitor
    checks = OctaviaChecks(
        reader.number(CHECKS[0], 1, 3600, default.delay_s),
        reader.number(CHECKS[1], 1, 3600, default.timeout_s),
        reader.number(CHECKS[2], 1, 10, default.max_retries),
        reader.number(CHECKS[3], 1, 10, default.max_retries_down),
    )
    by_name = any(map(reader.given, CHECKS))
    if not reader.choice("enable-health-monitor", SWITCHES, default.enabled or by_name):
        return None, ()
    if provider == "amphora" and request.local and request.health_port:
        return checks, tuple((protocol, "HTTP") for protocol in request.protocols)
    asking: list[tuple[Protocol, OctaviaAsking]] = [("TCP", "TCP")] * ("TCP" in request.protocols)
    if "UDP" in request.protocols and (by_name or reader.given("enable-health-monitor")):
        asking.append(("UDP", "UDP-CONNECT"))
    return (checks, tuple(asking)) if asking else (None, ())


def _place(
    reader: AnnotationReader,
    config: OctaviaConfig,
    request: OctaviaRequest,
    address: str,
    *,
    machine: bool,
) -> OctaviaPlace:
    own = {annotation: _text(reader, annotation, "") for annotation in PLACES}
    second = ""
    if not any(own.values()):
        own |= {"subnet-id": config.subnet_id, "network-id": config.network_id}
        if request.both:
            second = config.subnet_id_v6
        elif request.family == "IPv6" and config.subnet_id_v6:
            own["subnet-id"] = config.subnet_id_v6
    if not any(own.values()) and not (request.elsewhere is not None and request.elsewhere.id):
        raise Refused(
            "it is not said where the load balancer is to have its address",
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
    return reader.read(annotation, lambda text: text, "", default)


def _time_ms(reader: AnnotationReader, annotation: str, lacking: Sequence[str]) -> int | None:
    value = reader.time_ms(annotation, -1)
    return None if value < 0 or annotation in lacking else value
