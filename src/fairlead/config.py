"""The configuration file: Structs, loading, checking; every mistake is named with its path.

In: YAML (`fairlead.yaml`). Out: a frozen `Config`, or Refused with the path of the mistake inside
the file. Invariant: a Config that exists is valid; nobody downstream checks again. Durations are in
seconds."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fairlead.errors import Refused
from fairlead.net import selection
from fairlead.net.address import numeric_host, split_host_port
from fairlead.sections import OctaviaConfig, Section

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LONGEST_SUFFIX = 253 - 40
"""Of the 253 characters of a name an IPv6 address takes 39, and a dot."""

RENAMED = {"gateway.way": "gateway.forwarding"}
"""Options that had another name: the old name, and the new one."""

AttachKind = Literal["auto", "xdp", "xdp-generic", "tc"]
ForwardingMethod = Literal["auto", "l2", "ipip", "vxlan"]
TunnelKind = Literal["none", "ipip", "vxlan"]


class LabelRequirement(Section, frozen=True):
    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(Section, frozen=True):
    """As everywhere in Kubernetes: all that is named must hold; an empty one selects everything."""

    match_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


class ServiceAllocation(Section, frozen=True):
    """Whom a pool is for. Names and meaning are MetalLB's: a Service must be of one of the
    namespaces (named or selected, if any is) and match one of the Service selectors (if there is
    any)."""

    priority: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of several pools for a Service the one with the lowest number is tried first; 0: after all
    others."""
    namespaces: tuple[str, ...] = ()
    namespace_selectors: tuple[LabelSelector, ...] = ()
    service_selectors: tuple[LabelSelector, ...] = ()


class PoolConfig(Section, frozen=True):
    """Addresses to hand out. Each entry of `addresses` is one address, a CIDR or `first-last`."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    auto_assign: bool = True
    """False: only for Services that name the pool or one of its addresses."""
    avoid_buggy_ips: bool = msgspec.field(default=False, name="avoidBuggyIPs")
    """Leave out IPv4 addresses that end in .0 or .255, which some old devices take for a network's
    own."""
    service_allocation: ServiceAllocation | None = None
    """Absent: for every Service, after the pools that are for it in particular."""


class ClusterConfig(Section, frozen=True):
    pod_cidrs: tuple[str, ...] = msgspec.field(default=(), name="podCIDRs")
    """All pod addresses of the cluster: how a node tells a pod's packet from one of outside."""
    service_cidrs: tuple[str, ...] = msgspec.field(default=(), name="serviceCIDRs")
    """All ClusterIPs: packets to one that no Service has are dropped rather than routed out of the
    cluster."""


class ApiServerConfig(Section, frozen=True):
    """A balancer for the Kubernetes API itself. All that it needs is here: it is up before there is
    an API to ask."""

    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Where clients call: addresses that routers send to the gateways, or that the gateway's host
    has, of either family."""
    servers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """`address:port` of the API servers, the address as a number, of IPv6 in brackets."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 6443
    source_ranges: tuple[str, ...] = ()
    """CIDRs of those that may call; none: everybody may."""


Selectors = tuple[Annotated[str, msgspec.Meta(min_length=1)], ...]
"""Network interfaces by name, by pattern, by subnet or by default route; see `net.selection`."""


class PeerTLSConfig(Section, frozen=True):
    """PEM files, which are read again when they change."""

    certificate: Annotated[str, msgspec.Meta(min_length=1)]
    """The certificate of this gateway, for client and server authentication, with the DNS name
    `fairlead-gateway`; certificates of intermediate CAs follow it."""
    key: Annotated[str, msgspec.Meta(min_length=1)]
    """The private key of the certificate, without a password."""
    ca: Annotated[str, msgspec.Meta(min_length=1)]
    """The CA by which the certificates of other gateways are verified."""


class GatewayConfig(Section, frozen=True):
    interfaces: Selectors = ()
    """Where packets for load-balancer addresses arrive."""
    interfaces_by_node: Mapping[str, Annotated[Selectors, msgspec.Meta(min_length=1)]] = (
        msgspec.field(default_factory=dict)
    )
    """Replaces `interfaces` for gateways whose name is the key, or matches the key as a pattern."""
    pin_path: str = "/sys/fs/bpf/fairlead"
    """Folder on a bpffs that keeps the data plane alive without the process."""
    probe_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    """Each node is asked so often, whatever the number of Services."""
    probe_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 0.15
    """Two probes in a row without an answer in this time, and the node is taken for dead: after 0.4
    s at most."""
    attach: AttachKind = "auto"
    """Where in the kernel packets are taken. `auto`: XDP in the driver on a network card that has
    it, else tc."""
    forwarding: ForwardingMethod = "auto"
    """How packets get to a node. `auto`: `l2` where the node is on a link with the gateway, otherwise
    the tunnel of `tunnel.kind`, if there is one."""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """So long a node may keep connections of a Service after it has ceased to get new ones; 0: as
    long as they last. A Service may say otherwise (fairlead.io/drain-timeout)."""
    connection_entries: Annotated[int, msgspec.Meta(ge=1024, le=1 << 24)] = 131072
    """Room for so many open connections that began in slots in transition, of TCP and SCTP, some
    100 bytes each. Tables that are there keep their size: it counts when they are made, after
    `fairlead gateway --cleanup`."""
    datagram_entries: Annotated[int, msgspec.Meta(ge=1024, le=1 << 24)] = 65536
    """Room for so many UDP flows, likewise."""
    table_memory_mib: Annotated[int, msgspec.Meta(ge=1, le=4096)] = msgspec.field(
        default=128, name="tableMemoryMiB"
    )
    """Memory for the tables of all listeners of class fairlead.io/direct. A start with another
    value copies the tables."""
    namespace_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """The fraction of table memory, listeners, retained nodes and source ranges that one namespace
    may use, of what the other namespaces leave. 1: there is no limit for a namespace."""
    proxy_path: str = "/run/fairlead/haproxy"
    """Folder for the configuration and the sockets of the HAProxy that serves class
    fairlead.io/proxy."""
    proxy_old_workers: Annotated[int, msgspec.Meta(ge=0)] = 20
    """So many workers of that HAProxy may go on with connections of before a reload; of more the
    oldest is ended, with its connections. 0: any number."""
    peers: tuple[str, ...] = ()
    """`address:port` of the other gateways of the same addresses (their `peer_listen`), the address
    as a number, of IPv6 in brackets: new entries of slots in transition are read there, so that
    such a connection may pass from one gateway to another. Its own may be among them."""
    peer_listen: str = ""
    """`address:port` where other gateways may read ours; empty: nowhere. Only those in `peers` are
    answered."""
    peer_tls: PeerTLSConfig | None = msgspec.field(name="peerTLS", default=None)
    """Mutual TLS on all connections between gateways. Absent: a peer is recognized by its address
    alone, and nothing is encrypted."""
    api_server: ApiServerConfig | None = None
    """Absent: the API's own balancer is somebody else's."""


class ProxyConfig(Section, frozen=True):
    """What class fairlead.io/proxy does for Services that do not say it themselves."""

    hostname_suffix: str = ""
    """Services whose members are told the client's address in a header show `<address>.<suffix>` in
    place of their addresses. For clusters older than Kubernetes 1.30, whose nodes would answer for
    an address themselves; the name has to lead to the address, as those of nip.io do. Empty:
    addresses are shown."""


class TunnelConfig(Section, frozen=True):
    """What gateways and nodes must agree on where nodes are behind a router."""

    kind: TunnelKind = "none"
    vni: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)] = 7471
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4789
    """UDP port of VXLAN."""
    gateways: tuple[str, ...] = ()
    """CIDRs of the gateways. Nodes take tunnelled packets from nobody else, so where there is a
    tunnel there are some."""


class NodeConfig(Section, frozen=True):
    service_proxy: bool = True
    """False where kube-proxy runs: then only tunnels, segment sizes and the host's settings are
    seen to."""
    interfaces: Selectors = ()
    """Where packets from gateways arrive. Absent: the interfaces that hold the node's addresses."""
    interfaces_by_node: Mapping[str, Annotated[Selectors, msgspec.Meta(min_length=1)]] = (
        msgspec.field(default_factory=dict)
    )
    """Replaces `interfaces` for nodes whose name is the key, or matches the key as a pattern."""
    pod_interfaces: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^\s*\"/]{1,15}\*?$")], ...] = ()
    """Where packets of this node's pods come in: a bridge, or the beginning of names with a `*`
    (kube-proxy's BridgeInterface and InterfaceNamePrefix). Absent: pods are known by
    `cluster.pod_cidrs`."""
    node_port_addresses: tuple[str, ...] = ()
    """CIDRs: NodePorts and health ports answer at those of the host's addresses that are in one.
    Absent: NodePorts at the node's first InternalIP of each family, health ports at all
    addresses."""
    adjust_system: bool = False
    """Consent: set the kernel's settings that do harm as they are. Else they are only named."""


class ControllerConfig(Section, frozen=True):
    lease_namespace: str = "kube-system"
    lease_name: str = "fairlead-controller"
    """The Lease by which one of several controllers leads."""
    lease_duration_s: Annotated[float, msgspec.Meta(ge=1)] = 15.0
    """So long after the leader's last sign of life another takes over. It renews each seventh of
    that, and stops by itself after two thirds."""
    kept_addresses_per_namespace: Annotated[int, msgspec.Meta(ge=0)] = 10
    """How many addresses a namespace may keep for deleted Services (annotation keep-address)."""
    kept_address_days: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """A kept address becomes free this many days after its Service was deleted. 0: it is kept
    without a time limit."""


class PresenceConfig(Section, frozen=True):
    """How each process announces itself in the API: by its own Lease."""

    namespace: str = "fairlead-presence"
    """The namespace of these Leases. It is not that of the controller's leader election Lease,
    because a gateway or node could then write that Lease: RBAC cannot select Leases by a prefix of
    their names."""
    lease_duration_s: Annotated[float, msgspec.Meta(ge=1)] = 30.0
    """A process that has not renewed its Lease for this time counts as gone. It renews its Lease
    every third of this time."""


class WebConfig(Section, frozen=True):
    listen: str | None = None
    """Health, metrics and state; `address:port`, `*:port` for all addresses. Absent: 127.0.0.1,
    port 9440 for the controller, 9441 for a gateway, 9442 for a node. An empty text: nowhere. State
    is shown to callers on the host only."""
    metrics_from: tuple[str, ...] = ()
    """CIDRs from which metrics may be read, in addition to the host itself. Absent: none."""


class Config(Section, frozen=True):
    default_class: str | None = None
    """Serves Services that name no loadBalancerClass. Absent: those are left to others."""
    pools: tuple[PoolConfig, ...] = ()
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    controller: ControllerConfig = msgspec.field(default_factory=ControllerConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    proxy: ProxyConfig = msgspec.field(default_factory=ProxyConfig)
    octavia: OctaviaConfig | None = None
    tunnel: TunnelConfig = msgspec.field(default_factory=TunnelConfig)
    node: NodeConfig = msgspec.field(default_factory=NodeConfig)
    presence: PresenceConfig = msgspec.field(default_factory=PresenceConfig)
    web: WebConfig = msgspec.field(default_factory=WebConfig)


def load(path: Path, classes: Collection[str]) -> Config:
    """Read and check the file. `classes`: the values of loadBalancerClass that this version serves,
    from `plan.classes`; `defaultClass` must be one of them. Raises Refused that names the file, the
    path inside it and what is wrong."""
    try:
        return parse(path.read_bytes(), str(path), classes)
    except OSError as error:
        raise Refused(f"configuration {path} cannot be read: {error.strerror}") from error


def parse(text: str | bytes, source: str, classes: Collection[str]) -> Config:
    """Read and check the text of a configuration. `source` says where it is from, for messages.
    Raises Refused as `load`."""
    import yaml

    try:
        document = yaml.safe_load(text)
        _check_renamed(document, source)
        config = msgspec.convert(document if document is not None else {}, Config)
    except yaml.YAMLError as error:
        raise Refused(f"configuration {source} is not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise Refused(f"configuration {source}: {error}") from error
    check(config, source, classes)
    return config


def _check_renamed(document: object, source: str) -> None:
    """Raise Refused for an option that has another name now: the error says the new name."""
    for old, new in RENAMED.items():
        section, _, field = old.partition(".")
        fields = document.get(section) if isinstance(document, dict) else None
        if isinstance(fields, dict) and field in fields:
            raise Refused(f"{source}: {old} is now called {new} - at $.{old}")


def check(config: Config, source: str, classes: Collection[str]) -> None:
    """Refuse what the types cannot: addresses that are none, ranges upside down, pools that
    overlap, unknown classes."""
    if config.default_class is not None and config.default_class not in classes:
        known = ", ".join(sorted(classes))
        raise Refused(
            f"{source}: there is no class {config.default_class!r}; known: {known} - at "
            "$.defaultClass"
        )
    _check_ports(config, source)
    _check_tunnel(config, source)
    _check_interfaces(config, source)
    if config.proxy.hostname_suffix and read_suffix(config.proxy.hostname_suffix) is None:
        raise Refused(
            f"{source}: {config.proxy.hostname_suffix!r} is no name of a DNS zone - at "
            "$.proxy.hostnameSuffix"
        )
    seen: list[tuple[int, int, int, str]] = []
    names: set[str] = set()
    for index, pool in enumerate(config.pools):
        if pool.name in names:
            raise Refused(f"{source}: two pools are named {pool.name!r} - at $.pools[{index}].name")
        names.add(pool.name)
        for at, text in enumerate(pool.addresses):
            where = f"$.pools[{index}].addresses[{at}]"
            version, first, last = _range(text, f"{source}: {where}")
            for other_version, other_first, other_last, other in seen:
                if version == other_version and first <= other_last and other_first <= last:
                    raise Refused(f"{source}: {text} overlaps {other} - at {where}")
            seen.append((version, first, last, text))
    api = config.gateway.api_server
    if api is not None:
        _check_api_server(api, seen, source)
    for name, cidrs in (
        ("cluster.podCIDRs", config.cluster.pod_cidrs),
        ("cluster.serviceCIDRs", config.cluster.service_cidrs),
        ("gateway.apiServer.sourceRanges", api.source_ranges if api is not None else ()),
        ("tunnel.gateways", config.tunnel.gateways),
        ("node.nodePortAddresses", config.node.node_port_addresses),
        ("web.metricsFrom", config.web.metrics_from),
    ):
        for at, cidr in enumerate(cidrs):
            try:
                ipaddress.ip_network(cidr)
            except ValueError as error:
                raise Refused(f"{source}: {error} - at $.{name}[{at}]") from error


def _check_ports(config: Config, source: str) -> None:
    listens = {"web.listen": config.web.listen, "gateway.peerListen": config.gateway.peer_listen}
    listens |= {f"gateway.peers[{at}]": peer for at, peer in enumerate(config.gateway.peers)}
    for where, listen in listens.items():
        try:
            if listen:
                split_host_port(listen)
        except ValueError as error:
            raise Refused(f"{source}: {error} - at $.{where}") from error
    for at, peer in enumerate(config.gateway.peers):
        if (
            numeric_host(peer) is None
        ):  # whoever follows is known by the address alone, so a name will not do
            raise Refused(
                f"{source}: {peer!r} has no numeric address - at $.gateway.peers[{at}]",
                fix='write 192.0.2.1:9445 or "[2001:db8::1]:9445"',
            )


def _check_api_server(
    api: ApiServerConfig, pools: Iterable[tuple[int, int, int, str]], source: str
) -> None:
    where = "$.gateway.apiServer"
    own = set()
    for at, text in enumerate(api.addresses):
        try:
            address = ipaddress.ip_address(text)
            version, first, _ = parse_range(text)
        except ValueError as error:
            raise Refused(f"{source}: {error} - at {where}.addresses[{at}]") from error
        for pool_version, low, high, pool in pools:
            if version == pool_version and low <= first <= high:
                raise Refused(
                    f"{source}: {text} is in the pool's {pool}, and a Service may get it - at "
                    f"{where}.addresses[{at}]",
                    fix="leave it out of the pool",
                )
        if address in own:
            raise Refused(f"{source}: {text} is there twice - at {where}.addresses[{at}]")
        own.add(address)
    for at, server in enumerate(api.servers):
        try:
            host, port = split_host_port(server)
        except ValueError:
            host, port = "", 0
        if not host or numeric_host(server) is None:
            raise Refused(
                f"{source}: {server!r} is not address:port with a numeric address - at "
                f"{where}.servers[{at}]",
                fix='write 192.0.2.1:6443 or "[2001:db8::1]:6443"',
            )
        if ipaddress.ip_address(host) in own and port == api.port:
            raise Refused(f"{source}: {server} is the balancer itself - at {where}.servers[{at}]")
        if server in api.servers[:at]:
            raise Refused(f"{source}: {server} is there twice - at {where}.servers[{at}]")


def _check_tunnel(config: Config, source: str) -> None:
    forwarding, tunnel = config.gateway.forwarding, config.tunnel
    if forwarding in ("ipip", "vxlan") and tunnel.kind != forwarding:
        raise Refused(
            f"{source}: packets go through {forwarding}, but tunnel.kind is {tunnel.kind} - at "
            "$.gateway.forwarding",
            fix=f"set tunnel.kind to {forwarding} for gateways and nodes, or gateway.forwarding to auto",
        )
    if tunnel.kind != "none" and not tunnel.gateways:
        raise Refused(
            f"{source}: nobody may send through the tunnel - at $.tunnel.gateways",
            fix="name the gateways' addresses in tunnel.gateways, as CIDRs",
        )


def _check_interfaces(config: Config, source: str) -> None:
    for name, section in (("gateway", config.gateway), ("node", config.node)):
        lists = {f"{name}.interfaces": section.interfaces}
        lists |= {
            f"{name}.interfacesByNode.{host}": selectors
            for host, selectors in section.interfaces_by_node.items()
        }
        for where, selectors in lists.items():
            for at, selector in enumerate(selectors):
                try:
                    selection.check(selector)
                except ValueError as error:
                    raise Refused(
                        f"{source}: {error} - at $.{where}[{at}]",
                        fix="give the name of an interface, a pattern (eth*), a CIDR, or "
                        "default-route",
                    ) from error


def read_suffix(text: str) -> str | None:
    """A name of DNS (RFC 1123) to which an address can be prefixed; None if it is none."""
    name = text.strip().strip(".").lower()
    return (
        name
        if len(name) <= LONGEST_SUFFIX and all(map(_LABEL.fullmatch, name.split(".")))
        else None
    )


def _range(text: str, where: str) -> tuple[int, int, int]:
    try:
        return parse_range(text)
    except ValueError as error:
        raise Refused(f"{where}: {error}", fix="give one address, a CIDR or FIRST-LAST") from error


def parse_range(text: str) -> tuple[int, int, int]:
    """(IP version, first, last) of `192.0.2.1`, `192.0.2.0/28` or `192.0.2.1-192.0.2.9`. Raises
    ValueError, also for addresses to which nothing can be routed."""
    first_text, dash, last_text = text.partition("-")
    if "/" in text:
        network = ipaddress.ip_network(text)
        first, last = network.network_address, network.broadcast_address
    else:
        first = ipaddress.ip_address(first_text.strip())
        last = ipaddress.ip_address(last_text.strip()) if dash else first
    if first.version != last.version or int(last) < int(first):
        raise ValueError(f"{text!r} does not go from a lower to a higher address of one family")
    if any(
        each.is_loopback or each.is_multicast or each.is_unspecified or each.is_link_local
        for each in (first, last)
    ):
        raise ValueError(f"{text!r} has addresses that nobody outside can call")
    return first.version, int(first), int(last)
