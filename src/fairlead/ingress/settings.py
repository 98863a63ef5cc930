"""Settings of an ingress controller and of its Service with which applications see the client's
address.

In: `Options`: the controller, the class of its Service, and the PROXY header. Out: `Settings`: the
annotations and spec of the Service, the controller's own settings, the affinity of its pods, and
remarks for the reader. `manifests` writes them as objects or Helm values. Pure. The settings have
the names and meanings of the controllers' documentation:

* ingress-nginx 1.15, docs/user-guide/nginx-configuration/configmap.md: with `use-proxy-protocol`
  every connection must begin with a header (rootfs/etc/nginx/template/nginx.tmpl).
  `proxy-real-ip-cidr` are the sources whose headers are trusted; without it every source is.
* HAProxy Technologies' kubernetes-ingress 3.2, documentation/annotations.md: `proxy-protocol` are
  the sources that must send a header. From other sources no header is expected.
* Traefik 3: `entryPoints.<name>.proxyProtocol.trustedIPs` are the sources whose headers are
  trusted. Connections without a header are accepted too.

All three accept versions 1 and 2 of the header without a setting for the version.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_address, ip_network
from typing import Any, Literal, get_args

import msgspec

from fairlead.errors import Refused
from fairlead.net.address import cidr_problem

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
    """A controller's Helm chart. `release` and `namespace` are those that the documentation of the
    chart installs. `ports` are those of its Service for HTTP and HTTPS: (port of the Service, name,
    port of the container)."""

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
    """The user's choices.

    `load_balancer_class` is a class of Fairlead, or "occm" for OpenStack's cloud controller
    (cloud-provider-openstack). Empty `namespace` and `release` select the defaults of the chart's
    documentation. `header` None selects the default of the class. `trusted` are the source
    addresses of the load balancer's connections, and are valid only with a header. `replicas` is
    the number of pods of a Deployment."""

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
    """Matching settings for a controller and its Service. `config` is the data of the controller's
    ConfigMap, or for Traefik its arguments without dashes. It is empty if the defaults are
    right."""

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
    """Return matching settings for both sides. Raise Refused if the options cannot work
    together."""
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
    """Return the controller's settings that make it accept PROXY headers from these ranges only;
    empty if there are no ranges, because then no header is sent."""
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
    """Return the labels by which the chart's Service selects the controller's pods."""
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
    """Whether the ranges together include every address of a family. Texts that are not ranges are
    ignored."""
    ipv4: list[IPv4Network] = []
    ipv6: list[IPv6Network] = []
    for text in ranges:
        with suppress(ValueError):
            network = ip_network(text.strip(), strict=False)
            ipv4.append(network) if isinstance(network, IPv4Network) else ipv6.append(network)
    return IPv4Network("0.0.0.0/0") in collapse_addresses(ipv4) or IPv6Network(
        "::/0"
    ) in collapse_addresses(ipv6)


def _header(options: Options) -> Header:
    match options.load_balancer_class, options.header:
        case "direct", "v1" | "v2":
            fix = "omit --proxy-protocol, or use --class proxy"
            raise Refused(
                "class direct forwards packets unchanged and cannot send a PROXY header",
                fix=fix,
            )
        case "direct", _:
            return "none"
        case "proxy", "none":
            fix = "use v1 or v2; or --class direct, which needs no header"
            raise Refused("class proxy without a PROXY header hides the client's address", fix=fix)
        case _, header:
            return header or "v2"


def _trusted(ranges: Sequence[str], header: Header) -> tuple[str, ...]:
    if header == "none":
        if ranges:
            raise Refused(
                "--trusted is valid only with a PROXY header, and none is sent",
                fix="omit --trusted",
            )
        return ()
    if not ranges:
        fix = (
            "set --trusted to the source addresses of the load balancer's connections: the "
            "gateways' addresses, or Octavia's subnet"
        )
        raise Refused(
            "--trusted is required with a PROXY header: without it, any client could forge its "
            "address",
            fix=fix,
        )
    for text in ranges:
        # An address alone is the network of this address.
        if problem := cidr_problem(text.strip(), alone=True):
            raise Refused(f"--trusted {text}: {problem[0]}", fix=problem[1])
    return tuple(str(ip_network(text.strip())) for text in ranges)


def _addresses(texts: Sequence[str]) -> tuple[str, ...]:
    try:
        addresses = [ip_address(text) for text in texts]
    except ValueError as problem:
        raise Refused(f"--ip: {problem}", fix="write one address per family") from None
    if len({address.version for address in addresses}) < len(addresses):
        raise Refused(
            "--ip names two addresses of one family",
            fix="give at most one IPv4 and one IPv6 address",
        )
    return tuple(map(str, addresses))


def _service_name(controller: Controller, release: str) -> str:
    """Return the Service's name as Helm charts form it: the release, followed by the chart's name
    unless the release contains it."""
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
        # Without a health monitor Octavia also sends to nodes without a pod, which drop the packets
        # because of externalTrafficPolicy: Local.
        made[f"{OPENSTACK}enable-health-monitor"] = "true"
        return made
    if header != "none":
        made[PROXY_PROTOCOL] = header
    if load_balancer_class == "octavia":
        # Without the annotation, the configuration could select the other provider.
        made[OCTAVIA_PROVIDER] = _octavia_provider(header)
    if addresses:
        made[ADDRESSES] = ",".join(addresses)
    return made


def _octavia_provider(header: Header) -> str:
    """Return the provider for the header: only amphora sends headers, and ovn forwards packets
    unchanged."""
    return "ovn" if header == "none" else "amphora"


def _service_spec(load_balancer_class: Class, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the Service's spec without ports and selector. Raise Refused for two addresses at
    OpenStack."""
    spec: dict[str, Any] = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    if load_balancer_class in ("octavia", "occm") and len(addresses) > 1:
        raise Refused("a Service can request only one address at OpenStack", fix="use --ip once")
    if load_balancer_class == "occm":
        # OpenStack's cloud controller serves only Services without a class, and reads the requested
        # address from this field.
        return spec | ({"loadBalancerIP": addresses[0]} if addresses else {})
    spec["loadBalancerClass"] = f"fairlead.io/{load_balancer_class}"
    families = [f"IPv{ip_address(address).version}" for address in addresses]
    if len(families) == 2:
        spec |= {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": families}
    elif families == ["IPv6"]:
        spec |= {"ipFamilyPolicy": "SingleStack", "ipFamilies": families}
    return spec


def _equal_shares_per_node(options: Options, header: Header) -> bool:
    """Whether all nodes with a pod get equal shares: OpenStack's cloud controller does not set
    weights, and provider ovn does not support weights."""
    return options.load_balancer_class == "occm" or (
        options.load_balancer_class == "octavia" and header == "none"
    )


def _affinity(options: Options, header: Header, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the affinity of a Deployment's pods.

    If shares are equal per node, each node must have the same number of pods: one. If nodes are
    weighted by their pods, different nodes are preferred, so that the failure of one node does not
    end all pods."""
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
            "The client's address is the source address of the packets. The controller needs "
            "no setting; remove previous settings: "
            f"{_SETTINGS_TO_REMOVE[options.controller]}."
        )
    else:
        made.append(
            f"The load balancer sends PROXY {header}; trusted sources: {', '.join(trusted)}."
        )
        made.append(_HEADER_REMARKS[options.controller])
    if include_every_address(trusted):
        made.append(
            "SECURITY: every source is trusted, so every host that reaches a pod or a node port "
            "can claim any address."
        )
    if _equal_shares_per_node(options, header):
        shares = "Shares are equal per node, not per pod: run the same number of pods on every node"
        how = (
            "a DaemonSet does this"
            if options.workload == "daemonset"
            else "the anti-affinity allows one pod per node; or use a DaemonSet"
        )
        made.append(f"{shares} ({how}).")
    else:
        made.append(
            "Nodes are weighted by their ready pods: spread pods over nodes for availability, "
            "not for equal shares."
        )
    if options.load_balancer_class == "occm":
        made.append("OpenStack's cloud controller serves this Service.")
        if header != "none":
            made.append(
                "Provider ovn cannot send PROXY headers and needs none: use --proxy-protocol none "
                "with it."
            )
    elif options.load_balancer_class == "octavia":
        provider = _octavia_provider(header)
        reason = ", the only one that sends headers" if provider == "amphora" else ""
        made.append(f"Octavia's provider is {provider}{reason}.")
    return made


_SETTINGS_TO_REMOVE: Mapping[Controller, str] = {
    "nginx": "use-proxy-protocol, use-forwarded-headers",
    "haproxy": "proxy-protocol, src-ip-header",
    "traefik": "proxyProtocol, forwardedHeaders",
}
_HEADER_REMARKS: Mapping[Controller, str] = {
    "nginx": (
        "ingress-nginx then requires a header on every connection: change both sides at the same "
        "time, otherwise it rejects every connection."
    ),
    "haproxy": (
        "HAProxy requires a header from these ranges and expects none from other sources, so "
        "connections from other sources still work."
    ),
    "traefik": (
        "Traefik accepts connections from these ranges with and without a header: change the "
        "controller before the Service."
    ),
}
