"""What an ingress controller and its Service must be told, so that applications see the client's
address.

In: a Options: which controller, behind which class, with a PROXY header or without. Out: `Settings`:
the Service, the controller's own settings, what its pods' placement should be, and remarks for the
reader. `manifests` writes them as objects or Helm values. Pure. Names and meanings of the settings
are the controllers' own:

* ingress-nginx 1.15: docs/user-guide/nginx-configuration/configmap.md, `use-proxy-protocol` (then
  *every* connection must
  begin with a header, rootfs/etc/nginx/template/nginx.tmpl) and `proxy-real-ip-cidr` (whose headers
  are believed; without it everybody's).
* HAProxy Technologies' kubernetes-ingress 3.2: documentation/annotations.md, `proxy-protocol`: the
  sources that must send a
  header; from others none is expected.
* Traefik 3: entryPoints.<name>.proxyProtocol.trustedIPs, whose headers are believed; connections
  without one are taken too.

All three read versions 1 and 2 of the header, whichever comes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_address, ip_network
from typing import Any, Literal, get_args

import msgspec

from fairlead.errors import Refused

Controller = Literal["nginx", "haproxy", "traefik"]
Class = Literal["direct", "proxy", "octavia", "occm"]
Header = Literal["none", "v1", "v2"]
Workload = Literal["deployment", "daemonset"]

CONTROLLERS: tuple[Controller, ...] = get_args(Controller)
PROXY_PROTOCOL = "fairlead.io/proxy-protocol"
ADDRESSES = "fairlead.io/addresses"
OCTAVIA_PROVIDER = "fairlead.io/octavia-provider"
OPENSTACK = "loadbalancer.openstack.org/"


class Chart(msgspec.Struct, frozen=True):
    """A controller's Helm chart: its name and release as its own documents install it, and what its
    Service looks like. `ports`: (port of the Service, its name, the container's port), of HTTP and
    HTTPS."""

    name: str
    version: str
    release: str
    namespace: str
    ports: tuple[tuple[int, str, str], ...]


CHARTS: Mapping[Controller, Chart] = {
    "nginx": Chart(
        "ingress-nginx",
        "4.15.1",
        "ingress-nginx",
        "ingress-nginx",
        ((80, "http", "http"), (443, "https", "https")),
    ),
    "haproxy": Chart(
        "kubernetes-ingress",
        "1.52.1",
        "haproxy-kubernetes-ingress",
        "haproxy-controller",
        ((80, "http", "http"), (443, "https", "https")),
    ),
    "traefik": Chart(
        "traefik",
        "41.3.0",
        "traefik",
        "traefik",
        ((80, "web", "web"), (443, "websecure", "websecure")),
    ),
}


class Options(msgspec.Struct, frozen=True):
    """What the user asks for. `load_balancer_class`: ours, or "occm", OpenStack's cloud controller
    (cloud-provider-openstack). Empty `namespace` and `release`: as the chart's documents have it.
    `header` None: as the class has it. `trusted`: where the balancer's connections come from; only
    with a header. `replicas` of a Deployment."""

    controller: Controller
    load_balancer_class: Class
    namespace: str = ""
    release: str = ""
    addresses: tuple[str, ...] = ()
    header: Header | None = None
    trusted: tuple[str, ...] = ()
    workload: Workload = "deployment"
    replicas: int = 2


class Settings(msgspec.Struct, frozen=True):
    """The answer. `config`: the controller's ConfigMap, or for Traefik its arguments without
    dashes; empty: its defaults do."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    service_spec: Mapping[str, Any]
    config: Mapping[str, str]
    trusted: tuple[str, ...]
    affinity: Mapping[str, Any]
    remarks: tuple[str, ...]


def settings(options: Options) -> Settings:
    """What belongs together. Raises Refused for what cannot work."""
    chart = CHARTS[options.controller]
    header = _header(options)
    trusted = _trusted(options.trusted, header)
    addresses = _addresses(options.addresses)
    release, namespace = options.release or chart.release, options.namespace or chart.namespace
    labels = pod_labels(options.controller, release, namespace)
    return Settings(
        _service_name(options.controller, release),
        namespace,
        labels,
        _annotations(options.load_balancer_class, header, addresses),
        _service_spec(options.load_balancer_class, addresses),
        config(options.controller, trusted),
        trusted,
        _affinity(options, header, labels),
        tuple(_remarks(options, header, trusted)),
    )


def config(controller: Controller, trusted: Sequence[str]) -> dict[str, str]:
    """The controller's settings by which it takes PROXY headers from these ranges and trusts no
    others; none: no header."""
    if not trusted:
        return {}
    match controller:
        case "nginx":
            return {"use-proxy-protocol": "true", "proxy-real-ip-cidr": ",".join(trusted)}
        case "haproxy":
            return {"proxy-protocol": ", ".join(trusted)}
        case "traefik":
            return {
                f"entryPoints.{name}.proxyProtocol.trustedIPs": ",".join(trusted)
                for name in ("web", "websecure")
            }


def pod_labels(controller: Controller, release: str, namespace: str) -> dict[str, str]:
    """By which the chart's Service selects its pods."""
    name = CHARTS[controller].name
    match controller:
        case "nginx":
            more = {"app.kubernetes.io/component": "controller"}
        case "haproxy":
            more = {}
        case "traefik":
            release, more = f"{release}-{namespace}", {}
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": release, **more}


def include_every_address(ranges: Iterable[str]) -> bool:
    """Whether trusted ranges hold, together, every address of a family."""
    four: list[IPv4Network] = []
    six: list[IPv6Network] = []
    for text in ranges:
        with suppress(ValueError):
            network = ip_network(text.strip(), strict=False)
            four.append(network) if isinstance(network, IPv4Network) else six.append(network)
    return IPv4Network("0.0.0.0/0") in collapse_addresses(four) or IPv6Network(
        "::/0"
    ) in collapse_addresses(six)


def _header(options: Options) -> Header:
    match options.load_balancer_class, options.header:
        case "direct", "v1" | "v2":
            fix = "leave --proxy-protocol out, or take --class proxy"
            raise Refused(
                "class direct hands packets on as they are: there is nobody to write a PROXY "
                "header",
                fix=fix,
            )
        case "direct", _:
            return "none"
        case "proxy", "none":
            fix = "take v1 or v2; or --class direct, with which no header is needed"
            raise Refused("class proxy without a PROXY header hides the client's address", fix=fix)
        case _, header:
            return header or "v2"


def _trusted(ranges: Sequence[str], header: Header) -> tuple[str, ...]:
    if header == "none":
        if ranges:
            raise Refused(
                "--trusted says whose PROXY headers are believed, and there are none",
                fix="leave it out",
            )
        return ()
    if not ranges:
        fix = (
            "give --trusted with the addresses that the balancer's connections come from: the "
            "gateways', or Octavia's subnet"
        )
        raise Refused(
            "it must be said whose PROXY headers are to be believed: else anybody could forge an "
            "address",
            fix=fix,
        )
    networks: list[IPv4Network | IPv6Network] = []
    for text in ranges:
        try:
            networks.append(ip_network(text.strip()))
        except ValueError as problem:
            raise Refused(
                f"--trusted {text}: {problem}", fix="write a range as 192.0.2.0/24, or one address"
            ) from None
    return tuple(map(str, networks))


def _addresses(texts: Sequence[str]) -> tuple[str, ...]:
    try:
        addresses = [ip_address(text) for text in texts]
    except ValueError as problem:
        raise Refused(f"--ip: {problem}", fix="write one address of a family") from None
    if len({address.version for address in addresses}) < len(addresses):
        raise Refused(
            "--ip names two addresses of one family",
            fix="give at most one IPv4 and one IPv6 address",
        )
    return tuple(map(str, addresses))


def _service_name(controller: Controller, release: str) -> str:
    """As Helm's charts form it: the release alone where the chart's name is in it."""
    chart = CHARTS[controller].name
    whole = release if chart in release else f"{release}-{chart}"
    return f"{whole}-controller" if controller == "nginx" else whole


def _annotations(
    load_balancer_class: Class, header: Header, addresses: Sequence[str]
) -> dict[str, str]:
    made: dict[str, str] = {}
    if load_balancer_class == "occm":
        if header != "none":
            made[f"{OPENSTACK}proxy-protocol"] = header
        # Without a monitor Octavia sends to nodes that have no pod: under Local they drop what
        # comes.
        made[f"{OPENSTACK}enable-health-monitor"] = "true"
        return made
    if header != "none":
        made[PROXY_PROTOCOL] = header
    if load_balancer_class == "octavia":
        # Without it the configuration might choose the other one.
        made[OCTAVIA_PROVIDER] = _octavia_provider(header)
    if addresses:
        made[ADDRESSES] = ",".join(addresses)
    return made


def _octavia_provider(header: Header) -> str:
    """ovn hands packets on as they are; amphora alone writes headers."""
    return "ovn" if header == "none" else "amphora"


def _service_spec(load_balancer_class: Class, addresses: Sequence[str]) -> dict[str, Any]:
    """All of the Service's spec but ports and selector."""
    spec: dict[str, Any] = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    if load_balancer_class in ("octavia", "occm") and len(addresses) > 1:
        raise Refused("at OpenStack a Service may ask for one address", fix="give one --ip")
    if load_balancer_class == "occm":
        # It serves only Services without a class, and reads the options here.
        return spec | ({"loadBalancerIP": addresses[0]} if addresses else {})
    spec["loadBalancerClass"] = f"fairlead.io/{load_balancer_class}"
    families = [f"IPv{ip_address(address).version}" for address in addresses]
    if len(families) == 2:
        spec |= {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": families}
    elif families == ["IPv6"]:
        spec |= {"ipFamilyPolicy": "SingleStack", "ipFamilies": families}
    return spec


def _equal_shares_per_node(options: Options, header: Header) -> bool:
    """Whether each node gets as much as any other that has a pod: no one tells OCCM's load
    balancers where pods are, and provider ovn knows no weights."""
    return options.load_balancer_class == "occm" or (
        options.load_balancer_class == "octavia" and header == "none"
    )


def _affinity(options: Options, header: Header, labels: Mapping[str, str]) -> dict[str, Any]:
    """Where shares go by nodes, each must have as many pods as the others: one. Where nodes are
    weighed by their pods, these are only kept apart so that the loss of a node is not the loss of
    all."""
    if options.workload == "daemonset":
        return {}
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
    if _equal_shares_per_node(options, header):
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _remarks(options: Options, header: Header, trusted: Sequence[str]) -> list[str]:
    made = []
    if header == "none":
        made.append(
            "Clients' addresses arrive in the packets themselves. The controller needs no "
            "setting; take out what it may have "
            f"from before: {_SETTINGS_TO_REMOVE[options.controller]}."
        )
    else:
        made.append(
            f"PROXY protocol {header} from the balancer, believed from {', '.join(trusted)} only."
        )
        made.append(_HEADER_REMARKS[options.controller])
    if include_every_address(trusted):
        made.append(
            "SECURITY: everybody is trusted, so whoever reaches a pod or a node port can claim "
            "any address."
        )
    if _equal_shares_per_node(options, header):
        shares = "Shares go by nodes, not by pods: give every node as many pods as the others"
        how = (
            "a DaemonSet does"
            if options.workload == "daemonset"
            else "the anti-affinity puts one on a node; or take a DaemonSet"
        )
        made.append(f"{shares} ({how}).")
    else:
        made.append(
            "Nodes are weighted by their ready pods, wherever these are: spreading them is for "
            "availability only."
        )
    if options.load_balancer_class == "occm":
        made.append("Served by OpenStack's cloud controller.")
        if header != "none":
            made.append(
                "Provider ovn cannot write PROXY headers, and needs none: for it, "
                "--proxy-protocol none."
            )
    elif options.load_balancer_class == "octavia":
        provider = _octavia_provider(header)
        made.append(
            "By Octavia's provider "
            f"{provider}{', which alone writes headers' if provider == 'amphora' else ''}."
        )
    return made


_SETTINGS_TO_REMOVE: Mapping[Controller, str] = {
    "nginx": "use-proxy-protocol, use-forwarded-headers",
    "haproxy": "proxy-protocol, src-ip-header",
    "traefik": "proxyProtocol, forwardedHeaders",
}
_HEADER_REMARKS: Mapping[Controller, str] = {
    "nginx": (
        "ingress-nginx then wants a header on every connection: switch both sides together, "
        "else it answers nobody."
    ),
    "haproxy": (
        "HAProxy wants a header from these ranges and takes none from others: callers "
        "that come without still work."
    ),
    "traefik": (
        "Traefik takes connections from these ranges with and without header: set it "
        "before the Service is switched."
    ),
}
