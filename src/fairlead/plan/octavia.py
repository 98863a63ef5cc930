"""What a Service of class `fairlead.io/octavia` asks of OpenStack's load balancers, and by which
provider it is served.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`, the configuration,
the provider of the load balancer that is there. Out: OctaviaSettings, and a Finding for each wish
that cannot be used or is met otherwise. A wish without which the Service would not work is refused,
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
from fairlead.plan.annotations import NOT_UNDERSTOOD, WITHOUT_EFFECT, quoted
from fairlead.plan.capabilities import METHODS, OTHER_PROVIDER, SOURCE_RANGES, UNSUPPORTED
from fairlead.plan.floating import floating_of
from fairlead.plan.selection import ALLOWED, read_selector
from fairlead.plan.wishes import CHECKS, HEADERS, SWITCHES, Wishes
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
TELLING: frozenset[OctaviaAsking] = frozenset({"HTTP", "TCP"})
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


class Asks(NamedTuple):
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
    standing: Provider | None


def settings_of(
    annotations: Mapping[str, str], asks: Asks, config: OctaviaConfig, standing: Provider | None
) -> tuple[OctaviaSettings, list[Finding]]:
    """`standing`: the provider of the load balancer that the Service has; it stays. Raises Refused
    for what is essential to the Service and the provider lacks, and without a place to be."""
    wishes = Wishes(annotations)
    if tls := wishes.given("default-tls-container-ref"):
        raise Refused(
            f"{tls}: load balancers of this class end no TLS",
            fix="remove it, and let an ingress controller end TLS",
        )
    config = _of_class(wishes, config)
    header = wishes.choice("proxy-protocol", HEADERS, "")
    forwarded_for = wishes.choice("x-forwarded-for", SWITCHES, False)
    limit = wishes.number("connection-limit", -1, MOST_CONNECTIONS, -1)
    method: OctaviaMethod | None = wishes.choice("lb-method", {**_METHODS}, None)
    off = {
        "proxy-protocol": not header,
        "x-forwarded-for": not forwarded_for,
        "connection-limit": limit == -1,
    }
    asked = [wish for wish in _SETTINGS if wishes.given(wish) and not off.get(wish)]
    if asks.restricted and not config.manage_security_groups:
        asked.append(SOURCE_RANGES)
    choice = _choose(wishes, asked, method, asks, config, standing)
    provider = choice.provider
    if method is not None and method not in METHODS[provider]:
        asked.append("lb-method")
        method = None
    lacking = [wish for wish in asked if wish in UNSUPPORTED[provider]]
    wishes.notes += _otherwise(wishes, lacking, choice)
    if header and forwarded_for:
        one, other = wishes.given("proxy-protocol"), wishes.given("x-forwarded-for")
        message = (
            f"{other} has no effect beside {one}: pods are told the client's address in one way"
        )
        wishes.notes.append(Finding(NOT_UNDERSTOOD, message, remedy="remove one of the two"))
    if provider == "amphora" and asks.local:
        wishes.notes += _hidden(asks.protocols, header, forwarded_for and not header)
    checks, asking = _checks(wishes, provider, asks, config)
    floating = floating_of(wishes, annotations, config, asks.family, asks.address)
    settings = OctaviaSettings(
        provider=provider,
        why=choice.why,
        place=_place(
            wishes, config, asks, "" if floating else asks.address, machine=provider == "amphora"
        ),
        header=header,
        forwarded_for=forwarded_for and not header,
        method=method or _usual_method(provider, config),
        client_ms=_time_ms(wishes, "timeout-client-data", lacking),
        connect_ms=_time_ms(wishes, "timeout-member-connect", lacking),
        member_ms=_time_ms(wishes, "timeout-member-data", lacking),
        inspect_ms=_time_ms(wishes, "timeout-tcp-inspect", lacking),
        connection_limit=-1 if "connection-limit" in lacking else limit or -1,
        checks=checks,
        asking=asking,
        member_subnet_id=_text(wishes, "member-subnet-id", config.member_subnet_id),
        elsewhere=asks.elsewhere,
        node_selector=wishes.read("node-selector", read_selector, ALLOWED, config.node_selector),
        all_nodes=_all_nodes(wishes, config, asks.protocols, asking),
        floating=floating,
        secured=config.manage_security_groups,
    )
    return settings, wishes.notes


def _of_class(wishes: Wishes, config: OctaviaConfig) -> OctaviaConfig:
    """With what the class says that the Service names. Raises Refused for one that is not there."""
    if not (name := _text(wishes, "class", "")):
        return config
    if (found := config.classes.get(name)) is None:
        known = ", ".join(sorted(config.classes)) or "none"
        message = (
            f"{wishes.given('class')} is {quoted(name)}, and the configuration has no such "
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
    wishes = Wishes(annotations)
    if own := [name for wish in PLACES if (name := wishes.given(wish))]:
        return f"{', '.join(own)} says where its one address is to be"
    return (
        ""
        if _of_class(wishes, config).subnet_id_v6
        else "the configuration has no octavia.subnetIdV6"
    )


def _usual_method(provider: Provider, config: OctaviaConfig) -> OctaviaMethod:
    if config.lb_method and config.lb_method in METHODS[provider]:
        return config.lb_method
    return "ROUND_ROBIN" if provider == "amphora" else "SOURCE_IP_PORT"


def _all_nodes(
    wishes: Wishes,
    config: OctaviaConfig,
    protocols: Sequence[Protocol],
    asking: Iterable[tuple[Protocol, OctaviaAsking]],
) -> tuple[Protocol, ...]:
    """Where every node is a member: nobody but a monitor can tell then which has pods, and over
    UDP-CONNECT it cannot, as nodes drop what is for pods that they do not have."""
    if not wishes.choice("members", MEMBERS, config.members == "all"):
        return ()
    told = {protocol for protocol, type_ in asking if type_ in TELLING}
    if unknown := [protocol for protocol in protocols if protocol not in told]:
        name = wishes.given("members") or "octavia.members: all"
        message = (
            f"{name} has no effect over {', '.join(unknown)}: no monitor would find out "
            "there which nodes have no ready pods"
        )
        wishes.notes.append(
            Finding(WITHOUT_EFFECT, f"{message}; members are nodes with ready pods")
        )
    return tuple(protocol for protocol in protocols if protocol in told)


def _choose(
    wishes: Wishes,
    asked: Sequence[str],
    method: OctaviaMethod | None,
    asks: Asks,
    config: OctaviaConfig,
    standing: Provider | None,
) -> _Choice:
    wanted = wishes.choice(PROVIDER, _PROVIDERS, config.provider)
    if standing is not None:
        if wanted not in ("auto", standing) and (name := wishes.given(PROVIDER)):
            message = (
                f"{name} has no effect: the load balancer is of provider {standing}, and "
                "that cannot change"
            )
            wishes.notes.append(
                Finding(WITHOUT_EFFECT, message, remedy="make the Service anew for another")
            )
        return _Choice(standing, "it is there", standing)
    if wanted != "auto":
        return _Choice(wanted, f"{wishes.given(PROVIDER) or 'the configuration'} says so", None)
    lacking = [_called(wishes, wish) for wish in asked if wish in UNSUPPORTED["ovn"]]
    if method is not None and method not in METHODS["ovn"]:
        lacking.append(wishes.given("lb-method"))
    if lacking:
        return _Choice("amphora", f"provider ovn has no {', '.join(lacking)}", None)
    if method is not None and method not in METHODS["amphora"]:
        return _Choice(
            "ovn", f"provider amphora has no {wishes.given('lb-method')} of this kind", None
        )
    if asks.local:
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


def _otherwise(wishes: Wishes, lacking: Iterable[str], choice: _Choice) -> list[Finding]:
    """One Finding for each thing that the provider does instead. Raises Refused for what it must
    not."""
    instead: dict[str, list[str]] = {}
    for wish in lacking:
        unsupported, name = UNSUPPORTED[choice.provider][wish], _called(wishes, wish)
        if unsupported.action == "refuse":
            other = OTHER_PROVIDER[choice.provider]
            anew = "make the Service anew with" if choice.standing is not None else "set"
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


def _called(wishes: Wishes, wish: str) -> str:
    return "spec.loadBalancerSourceRanges" if wish == SOURCE_RANGES else wishes.given(wish)


def _hidden(
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
    wishes: Wishes, provider: Provider, asks: Asks, config: OctaviaConfig
) -> tuple[OctaviaChecks | None, tuple[tuple[Protocol, OctaviaAsking], ...]]:
    """A node without ready pods says so on its health port, to who can ask there over HTTP:
    provider amphora. Its node port drops what is sent there, which TCP notices and UDP does not."""
    default = config.monitor
    checks = OctaviaChecks(
        wishes.number(CHECKS[0], 1, 3600, default.delay_s),
        wishes.number(CHECKS[1], 1, 3600, default.timeout_s),
        wishes.number(CHECKS[2], 1, 10, default.max_retries),
        wishes.number(CHECKS[3], 1, 10, default.max_retries_down),
    )
    by_name = any(map(wishes.given, CHECKS))
    if not wishes.choice("enable-health-monitor", SWITCHES, default.enabled or by_name):
        return None, ()
    if provider == "amphora" and asks.local and asks.health_port:
        return checks, tuple((protocol, "HTTP") for protocol in asks.protocols)
    asking: list[tuple[Protocol, OctaviaAsking]] = [("TCP", "TCP")] * ("TCP" in asks.protocols)
    if "UDP" in asks.protocols and (by_name or wishes.given("enable-health-monitor")):
        asking.append(("UDP", "UDP-CONNECT"))
    return (checks, tuple(asking)) if asking else (None, ())


def _place(
    wishes: Wishes, config: OctaviaConfig, asks: Asks, address: str, *, machine: bool
) -> OctaviaPlace:
    own = {wish: _text(wishes, wish, "") for wish in PLACES}
    second = ""
    if not any(own.values()):
        own |= {"subnet-id": config.subnet_id, "network-id": config.network_id}
        if asks.both:
            second = config.subnet_id_v6
        elif asks.family == "IPv6" and config.subnet_id_v6:
            own["subnet-id"] = config.subnet_id_v6
    if not any(own.values()) and not (asks.elsewhere is not None and asks.elsewhere.id):
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
        _text(wishes, "flavor-id", config.flavor_id) if machine else "",
        _text(wishes, "availability-zone", config.availability_zone) if machine else "",
        second,
        asks.address_v6 if second else "",
    )


def _text(wishes: Wishes, wish: str, default: str) -> str:
    return wishes.read(wish, lambda text: text, "", default)


def _time_ms(wishes: Wishes, wish: str, lacking: Sequence[str]) -> int | None:
    value = wishes.time_ms(wish, -1)
    return None if value < 0 or wish in lacking else value
