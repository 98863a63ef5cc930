"""The configuration file: its structs, loading and validation. Every error names the path of the
option.

In: YAML (`fairlead.yaml`). Out: a frozen `Config`, or Refused with the path of the invalid option
inside the file. Invariant: every `Config` is valid, so its users do not validate it again.
Durations are in seconds."""

import ipaddress
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fairlead.errors import Refused, plain
from fairlead.mistakes import mistake
from fairlead.net import selection
from fairlead.net.address import ambiguity, cidr_problem, numeric_host, split_host_port
from fairlead.sections import (
    CIDR,
    AbsolutePath,
    Address,
    AddressRange,
    AnnounceConfig,
    BgpConfig,
    HostPort,
    L2Config,
    Name,
    OctaviaConfig,
    Section,
    Selectors,
)

MAX_RANGE_LENGTH = 128
"""The maximum length of a range of addresses; two IPv6 addresses have at most 90 characters."""
_SPACES = " \t\n\f\r"
"""The white space of a pattern in a schema of Helm and in a CustomResourceDefinition."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
MAX_SUFFIX_LENGTH = 253 - 40
"""A DNS name has at most 253 characters. An IPv6 address and the dot after it take 40 of them."""

HOUR_S, DAY_S, YEAR_S = 3600, 86_400, 31_536_000
"""Limits of durations: longer ones are mistakes, and the longest do not fit into a Lease or a time
of the kernel."""

INTERFACE = "give the name of an interface, a pattern (eth*), a CIDR, or default-route"
LISTEN = "write an address and a port, such as 127.0.0.1:9440, or *:9440 for all addresses"

RENAMED = {"gateway.way": "gateway.forwarding"}
"""Renamed options: the old name, and the new name."""

RESERVED_ASNS = {
    23456: "AS 23456 stands for numbers above 65535 (RFC 6793)",
    65535: "AS 65535 is reserved (RFC 7300)",
}
"""AS numbers that no network may have, and why."""

PEER_LISTEN = "*:9445"
"""Where a gateway listens for peers that find each other."""
AttachKind = Literal["auto", "xdp", "xdp-generic", "tc"]
ForwardingMethod = Literal["auto", "l2", "ipip", "vxlan"]
TunnelKind = Literal["none", "ipip", "vxlan"]


class LabelRequirement(Section, frozen=True):
    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(Section, frozen=True):
    """A label selector with the semantics of Kubernetes: an object must match all requirements, and
    an empty selector matches every object."""

    match_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


class ServiceAllocation(Section, frozen=True):
    """The Services that may get addresses from a pool. Field names and semantics are those of
    MetalLB: a Service must be in one of the namespaces (by name or by selector, if any are given)
    and match one of the Service selectors (if any are given)."""

    priority: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The pool with the lowest number is tried first. 0 (the default) is tried after all other
    numbers."""
    namespaces: tuple[str, ...] = ()
    namespace_selectors: tuple[LabelSelector, ...] = ()
    service_selectors: tuple[LabelSelector, ...] = ()


class PoolConfig(Section, frozen=True):
    """A range of addresses for Services. Each entry of `addresses` is one address, a CIDR or
    `first-last`."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    addresses: Annotated[tuple[AddressRange, ...], msgspec.Meta(min_length=1)]
    auto_assign: bool = True
    """False: the pool serves only Services that request the pool or one of its addresses."""
    avoid_buggy_ips: bool = msgspec.field(default=False, name="avoidBuggyIPs")
    """Do not assign IPv4 addresses that end in .0 or .255, which some old devices treat as network
    or broadcast addresses."""
    service_allocation: ServiceAllocation | None = None
    """Absent: the pool is for every Service, and is tried after the pools that are restricted to
    some Services."""


class ClusterConfig(Section, frozen=True):
    pod_cidrs: tuple[CIDR, ...] = msgspec.field(default=(), name="podCIDRs")
    """CIDRs of all pods of the cluster. A node uses them to distinguish packets of pods from
    packets from outside of the cluster."""
    service_cidrs: tuple[CIDR, ...] = msgspec.field(default=(), name="serviceCIDRs")
    """CIDRs of all ClusterIPs. A packet to a ClusterIP without a Service is dropped instead of
    being routed out of the cluster."""


class ApiServerConfig(Section, frozen=True):
    """A load balancer for the Kubernetes API server itself. The section is complete in itself,
    because this load balancer starts before the API is reachable."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1)]
    """The addresses where clients connect, of either family: addresses that routers send to the
    gateways, or addresses of the gateway's host."""
    servers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """`address:port` of the API servers. The address is numeric; an IPv6 address is in brackets."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 6443
    source_ranges: tuple[CIDR, ...] = ()
    """CIDRs of the clients that may connect. Empty: every client may connect."""


class PeerTLSConfig(Section, frozen=True):
    """Paths of PEM files. The files are read again when they change."""

    certificate: Annotated[str, msgspec.Meta(min_length=1)]
    """The certificate of this gateway, for client and server authentication, with the DNS name
    `fairlead-gateway`; certificates of intermediate CAs follow it."""
    key: Annotated[str, msgspec.Meta(min_length=1)]
    """The private key of the certificate, without a password."""
    ca: Annotated[str, msgspec.Meta(min_length=1)]
    """The CA by which the certificates of other gateways are verified."""


class GatewayConfig(Section, frozen=True):
    interfaces: Selectors = ()
    """The interfaces where packets for load-balancer addresses arrive."""
    interfaces_by_node: Mapping[str, Annotated[Selectors, msgspec.Meta(min_length=1)]] = (
        msgspec.field(default_factory=dict)
    )
    """Replaces `interfaces` for gateways whose name is the key, or matches the key as a pattern."""
    pin_path: AbsolutePath = "/sys/fs/bpf/fairlead"
    """Directory on a bpffs where the data plane is pinned, so that it continues without the
    process."""
    probe_interval_s: Annotated[float, msgspec.Meta(gt=0, le=HOUR_S)] = 0.1
    """The interval of the probes of each node, whatever the number of Services."""
    probe_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=HOUR_S)] = 0.15
    """The time that a node has to answer a probe. Two unanswered probes in a row mark the node as
    down: with the defaults, within 0.4 s."""
    attach: AttachKind = "auto"
    """The kernel hook that receives packets. `auto`: native XDP if the driver of the network card
    supports it, otherwise tc."""
    forwarding: ForwardingMethod = "auto"
    """How packets are forwarded to a node. `auto`: `l2` if the node is on a link with the gateway,
    otherwise the tunnel of `tunnel.kind`, if there is one."""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=YEAR_S)] = 0.0
    """How long a node keeps its connections of a Service after it stopped receiving new ones. 0:
    until the connections end. The annotation fairlead.io/drain-timeout overrides it for a Service.
    """
    connection_entries: Annotated[int, msgspec.Meta(ge=1024, le=1 << 24)] = 131072
    """Maximum number of open TCP and SCTP connections that are tracked because they began in slots
    in transition. Each takes about 100 bytes. The sizes of the tables of other connections follow
    from it. If the value has changed since the last start, the entries are copied."""
    datagram_entries: Annotated[int, msgspec.Meta(ge=1024, le=1 << 24)] = 65536
    """Maximum number of UDP flows that are tracked for the same reason."""
    table_memory_mib: Annotated[int, msgspec.Meta(ge=1, le=4096)] = msgspec.field(
        default=128, name="tableMemoryMiB"
    )
    """Memory for the tables of all listeners of class fairlead.io/direct; the number of listeners
    follows from it. If the value has changed since the last start, the tables are copied."""
    namespace_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """The maximum fraction of table memory, listeners, retained nodes, source ranges, flow entries
    and HAProxy's connections that one namespace may use, of the capacity that other namespaces
    leave free. 1: namespaces are not limited."""
    proxy_path: AbsolutePath = "/run/fairlead/haproxy"
    """Directory for the configuration and the sockets of the HAProxy process that serves class
    fairlead.io/proxy."""
    proxy_old_workers: Annotated[int, msgspec.Meta(ge=0)] = 20
    """Maximum number of old HAProxy workers that are kept after reloads until their connections
    end. If there are more, a worker is stopped and its connections are closed. One namespace may
    cause half of the workers that others leave. 0: there is no limit."""
    peers: tuple[HostPort, ...] | Literal["auto"] = ()
    """`address:port` of the other gateways that serve the same addresses (their `peer_listen`). The
    address is numeric; an IPv6 address is in brackets. Gateways read new flow entries of slots in
    transition from their peers, so that a connection may move from one gateway to another. The list
    may include this gateway. `auto`: the gateways that have a Lease, at the addresses in their
    Leases."""
    peer_listen: HostPort = ""
    """`address:port` where peers read the entries of this gateway. Empty: they cannot; with `peers:
    auto` it is `*:9445`. Only gateways in `peers` are answered."""
    peer_tls: PeerTLSConfig | None = msgspec.field(name="peerTLS", default=None)
    """Mutual TLS for all connections between gateways. Absent: a peer is identified by its address
    alone, and connections are not encrypted."""
    api_server: ApiServerConfig | None = None
    """Absent: this gateway does not balance the API servers."""

    @property
    def listed_peers(self) -> tuple[HostPort, ...]:
        """The peers that the configuration names."""
        return () if self.peers == "auto" else self.peers

    @property
    def peer_address(self) -> HostPort:
        """Where peers read the entries of this gateway; empty: nowhere."""
        return self.peer_listen or (PEER_LISTEN if self.peers == "auto" else "")


class ProxyConfig(Section, frozen=True):
    """Defaults of class fairlead.io/proxy, which annotations of a Service override."""

    hostname_suffix: str = ""
    """Services that pass the client's address to their members in a header publish the hostname
    `<address>.<suffix>` instead of each address. This is for clusters older than Kubernetes 1.30,
    whose nodes would answer for the address themselves. The name must resolve to the address, as
    the names of nip.io do. Empty: addresses are published."""


class TunnelConfig(Section, frozen=True):
    """The tunnel between gateways and nodes that are behind a router. Gateways and nodes must have
    the same values."""

    kind: TunnelKind = "none"
    vni: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)] = 7471
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4789
    """UDP port of VXLAN."""
    gateways: tuple[CIDR, ...] = ()
    """CIDRs of the gateways; required if there is a tunnel. Nodes drop tunnelled packets from other
    sources."""


class NodeConfig(Section, frozen=True):
    service_proxy: bool = True
    """False if kube-proxy runs: then this role manages only tunnels, segment sizes and the settings
    of the host."""
    interfaces: Selectors = ()
    """The interfaces where packets from gateways arrive. Absent: the interfaces that hold the
    node's addresses."""
    interfaces_by_node: Mapping[str, Annotated[Selectors, msgspec.Meta(min_length=1)]] = (
        msgspec.field(default_factory=dict)
    )
    """Replaces `interfaces` for nodes whose name is the key, or matches the key as a pattern."""
    pod_interfaces: tuple[
        Annotated[
            str,
            msgspec.Meta(
                pattern=r"^[^\s*\"/]{1,15}\*?$",
                description="the name of an interface, or the beginning of names and then *: veth*",
            ),
        ],
        ...,
    ] = ()
    """The interfaces where packets of this node's pods arrive: a bridge, or a name prefix followed
    by `*` (BridgeInterface and InterfaceNamePrefix of kube-proxy). Absent: packets of pods are
    recognized by `cluster.pod_cidrs`."""
    node_port_addresses: tuple[CIDR, ...] = ()
    """NodePorts and health ports listen on those addresses of the host that are in one of these
    CIDRs. Absent: NodePorts listen on the node's first InternalIP of each family, and health ports
    on all addresses."""
    adjust_system: bool = False
    """Whether kernel settings with harmful values are changed. Otherwise they are only reported."""


class ControllerConfig(Section, frozen=True):
    lease_namespace: Name = "kube-system"
    lease_name: Name = "fairlead-controller"
    """The Lease by which the controllers elect a leader."""
    lease_duration_s: Annotated[float, msgspec.Meta(ge=1, le=DAY_S)] = 15.0
    """How long the leader's Lease is valid without a renewal. The leader renews it every 1/7 of
    this time and steps down after 2/3 of it without success."""
    kept_addresses_per_namespace: Annotated[int, msgspec.Meta(ge=0)] = 10
    """How many addresses a namespace may keep for deleted Services (annotation keep-address)."""
    kept_address_days: Annotated[float, msgspec.Meta(ge=0, le=36_500)] = 30.0
    """A kept address becomes free this many days after its Service was deleted. 0: it is kept
    without a time limit."""


class PresenceConfig(Section, frozen=True):
    """How each process announces itself in the Kubernetes API: by a Lease of its own."""

    namespace: Name = "fairlead-presence"
    """The namespace of these Leases. It must differ from the namespace of the leader election
    Lease, because otherwise a gateway or node could write that Lease: RBAC cannot select Leases by
    a prefix of their names."""
    lease_duration_s: Annotated[float, msgspec.Meta(ge=1, le=DAY_S)] = 30.0
    """A process that has not renewed its Lease for this time counts as gone. Processes renew their
    Leases every third of this time."""


class WebConfig(Section, frozen=True):
    listen: HostPort | None = None
    """The address that serves health, metrics and state: `address:port`, or `*:port` for all
    addresses. Absent: 127.0.0.1, with port 9440 for the controller, 9441 for a gateway and 9442 for
    a node. Empty: the server is off. The state is shown only to callers on the host."""
    metrics_from: tuple[CIDR, ...] = ()
    """CIDRs from which metrics may be read, in addition to the host itself. Absent: none."""


class Config(Section, frozen=True):
    default_class: str | None = None
    """The class that serves Services without a loadBalancerClass. Absent: these Services are left
    to other controllers."""
    pools: tuple[PoolConfig, ...] = ()
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    controller: ControllerConfig = msgspec.field(default_factory=ControllerConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    proxy: ProxyConfig = msgspec.field(default_factory=ProxyConfig)
    octavia: OctaviaConfig | None = None
    announce: AnnounceConfig = msgspec.field(default_factory=AnnounceConfig)
    tunnel: TunnelConfig = msgspec.field(default_factory=TunnelConfig)
    node: NodeConfig = msgspec.field(default_factory=NodeConfig)
    presence: PresenceConfig = msgspec.field(default_factory=PresenceConfig)
    web: WebConfig = msgspec.field(default_factory=WebConfig)


def load(path: Path, classes: Collection[str]) -> Config:
    """Return the configuration in the file. `classes`: the values of loadBalancerClass that this
    version serves, from `plan.classes`; `defaultClass` must be one of them. Raise Refused if the
    file cannot be read or is invalid; the message names the file and the path of the option inside
    it."""
    try:
        return parse(path.read_bytes(), str(path), classes)
    except OSError as error:
        raise Refused(
            f"configuration {path} cannot be read: {plain(error)}",
            fix="name a file that exists and may be read in --config",
        ) from error


def parse(text: str | bytes, source: str, classes: Collection[str]) -> Config:
    """Return the configuration in the text. `source`: the origin of the text, for error messages.
    Raise Refused as `load` does."""
    from fairlead.strict_yaml import read  # PyYAML takes long to load

    document = read(text, f"configuration {source}")
    _check_renamed(document, source)
    try:
        config = msgspec.convert(document if document is not None else {}, Config)
    except msgspec.ValidationError as error:
        message, fix = mistake(error, Config, document)
        raise Refused(f"configuration {source}: {message}", fix=fix) from error
    if infinite := _infinite(document, "$"):
        raise Refused(
            f"configuration {source}: infinity is out of range - at {infinite}",
            fix="write a finite number",
        )
    check(config, source, classes)
    return config


def _infinite(value: object, path: str) -> str:
    """Return the path of an infinite number in a document; empty if there is none."""
    if isinstance(value, float) and math.isinf(value):
        return path
    inside: Iterable[tuple[object, str]] = ()
    if isinstance(value, dict):
        inside = ((each, f"{path}.{name}") for name, each in value.items())
    elif isinstance(value, list):
        inside = ((each, f"{path}[{at}]") for at, each in enumerate(value))
    return next(filter(None, (_infinite(each, where) for each, where in inside)), "")


def _check_renamed(document: object, source: str) -> None:
    """Raise Refused for an option that was renamed; the error names the new option."""
    for old, new in RENAMED.items():
        section, _, field = old.partition(".")
        fields = document.get(section) if isinstance(document, dict) else None
        if isinstance(fields, dict) and field in fields:
            raise Refused(
                f"{source}: {old} is now called {new} - at $.{old}", fix=f"write {new} instead"
            )


def check(config: Config, source: str, classes: Collection[str]) -> None:
    """Raise Refused for values that the types of the fields cannot exclude: invalid addresses,
    ranges whose end is before their start, overlapping pools, unknown classes."""
    if config.default_class is not None and config.default_class not in classes:
        raise Refused(
            f"{source}: class {config.default_class!r} is unknown - at $.defaultClass",
            fix=f"write one of: {', '.join(sorted(classes))}",
        )
    if config.presence.namespace == config.controller.lease_namespace:
        raise Refused(
            f"{source}: {config.presence.namespace} is the namespace of the Lease of the "
            "controller, which gateways and nodes could write then - at $.presence.namespace",
            fix="name another namespace here or in controller.leaseNamespace",
        )
    _check_ports(config, source)
    _check_tunnel(config, source)
    _check_interfaces(config, source)
    if config.proxy.hostname_suffix and read_suffix(config.proxy.hostname_suffix) is None:
        raise Refused(
            f"{source}: {config.proxy.hostname_suffix!r} is not a valid DNS zone name - at "
            "$.proxy.hostnameSuffix",
            fix="write a name such as lb.example.com",
        )
    seen: list[tuple[int, int, int, str]] = []
    names: set[str] = set()
    for index, pool in enumerate(config.pools):
        if pool.name in names:
            raise Refused(
                f"{source}: two pools are named {pool.name!r} - at $.pools[{index}].name",
                fix="give each pool its own name",
            )
        names.add(pool.name)
        for at, text in enumerate(pool.addresses):
            where = f"$.pools[{index}].addresses[{at}]"
            version, first, last = _range(text, f"{source}: {where}")
            for other_version, other_first, other_last, other in seen:
                if version == other_version and first <= other_last and other_first <= last:
                    raise Refused(
                        f"{source}: {text} overlaps {other} - at {where}",
                        fix="list each address once",
                    )
            seen.append((version, first, last, text))
    if config.announce.bgp is not None:
        _check_bgp(config.announce.bgp, config, seen, source)
    api, l2 = config.gateway.api_server, config.announce.l2 or L2Config()
    bgp = config.announce.bgp
    if api is not None:
        _check_api_server(api, seen, source)
    for name, cidrs in (
        ("cluster.podCIDRs", config.cluster.pod_cidrs),
        ("cluster.serviceCIDRs", config.cluster.service_cidrs),
        ("gateway.apiServer.sourceRanges", api.source_ranges if api is not None else ()),
        ("tunnel.gateways", config.tunnel.gateways),
        ("announce.l2.networks", l2.networks),
        ("announce.bgp.networks", bgp.networks if bgp is not None else ()),
        ("node.nodePortAddresses", config.node.node_port_addresses),
        ("web.metricsFrom", config.web.metrics_from),
    ):
        for at, cidr in enumerate(cidrs):
            if problem := cidr_problem(cidr):
                message, fix = problem
                raise Refused(f"{source}: {message} - at $.{name}[{at}]", fix=fix)


def _check_ports(config: Config, source: str) -> None:
    listens = {"web.listen": config.web.listen, "gateway.peerListen": config.gateway.peer_listen}
    listens |= {f"gateway.peers[{at}]": peer for at, peer in enumerate(config.gateway.listed_peers)}
    for where, listen in listens.items():
        try:
            if listen:
                split_host_port(listen)
        except ValueError as error:
            raise Refused(f"{source}: {error} - at $.{where}", fix=LISTEN) from error
    peer_listen = config.gateway.peer_listen
    if peer_listen and not peer_listen.startswith("*:") and numeric_host(peer_listen) is None:
        raise Refused(
            f"{source}: {peer_listen!r} has no numeric address - at $.gateway.peerListen",
            fix='write "*:9445", 192.0.2.1:9445 or "[2001:db8::1]:9445"',
        )
    for at, peer in enumerate(config.gateway.listed_peers):
        # A peer that connects is identified by its address, so a hostname is not sufficient.
        if numeric_host(peer) is None:
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
            raise Refused(
                f"{source}: {error} - at {where}.addresses[{at}]",
                fix="write one address that clients and routers can reach",
            ) from error
        for pool_version, low, high, pool in pools:
            if version == pool_version and low <= first <= high:
                raise Refused(
                    f"{source}: {text} overlaps {pool} of a pool, so a Service may get it - at "
                    f"{where}.addresses[{at}]",
                    fix="remove it from the pool",
                )
        if address in own:
            raise Refused(
                f"{source}: {text} is listed twice - at {where}.addresses[{at}]",
                fix="remove one of the two",
            )
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
            raise Refused(
                f"{source}: {server} is an address of the load balancer itself - at "
                f"{where}.servers[{at}]",
                fix="list the addresses of the API servers themselves",
            )
        if server in api.servers[:at]:
            raise Refused(
                f"{source}: {server} is listed twice - at {where}.servers[{at}]",
                fix="remove one of the two",
            )


def _check_bgp(
    bgp: BgpConfig, config: Config, pools: Iterable[tuple[int, int, int, str]], source: str
) -> None:
    where = "$.announce.bgp"
    if config.announce.l2 is not None:
        raise Refused(
            f"{source}: addresses are announced either on layer 2 or by BGP - at $.announce",
            fix="remove announce.l2 or announce.bgp",
        )
    for name, number in (
        ("asn", bgp.asn),
        *((f"routers[{at}].asn", each.asn) for at, each in enumerate(bgp.routers)),
    ):
        if number in RESERVED_ASNS:
            raise Refused(
                f"{source}: {RESERVED_ASNS[number]} - at {where}.{name}",
                fix="write another number, such as one from 64512 to 65534, for private use",
            )
    if bgp.router_id and not _is_router_id(bgp.router_id):
        raise Refused(
            f"{source}: {bgp.router_id!r} is not an IPv4 address - at {where}.routerId",
            fix="write one that differs from those of all other routers, or leave it out",
        )
    names: set[str] = set()
    addresses: set[str] = set()
    for at, each in enumerate(bgp.routers):
        here = f"{where}.routers[{at}]"
        try:
            if ipaddress.ip_address(each.address).compressed != each.address:
                raise ValueError(f"{each.address!r} is not the usual form of this address")
            version, number, _ = parse_range(each.address)
        except ValueError as error:
            raise Refused(
                f"{source}: {error} - at {here}.address",
                fix="write the address of the router on the link of the gateways",
            ) from error
        for pool_version, low, high, pool in pools:
            if version == pool_version and low <= number <= high:
                raise Refused(
                    f"{source}: {each.address} is in {pool} of a pool, so a Service may get it - "
                    f"at {here}.address",
                    fix="remove it from the pool",
                )
        if each.name.endswith("\n"):  # the pattern allows it
            raise Refused(
                f"{source}: the name {each.name!r} ends with a line break - at {here}.name",
                fix="remove the line break",
            )
        if each.name in names or each.address in addresses:
            raise Refused(
                f"{source}: two routers have the name {each.name} or the address {each.address} - "
                f"at {here}",
                fix="list each router once for each of its addresses, with names that differ",
            )
        names.add(each.name)
        addresses.add(each.address)
        if each.password_file and not each.password_file.startswith("/"):
            raise Refused(
                f"{source}: {each.password_file!r} is relative - at {here}.passwordFile",
                fix="write an absolute path",
            )
        if each.keepalive_time_s * 2 > each.hold_time_s:
            raise Refused(
                f"{source}: one lost message would end the session, because the keepalive time of "
                f"{each.keepalive_time_s} s is more than half of the hold time of "
                f"{each.hold_time_s} s - at {here}.keepaliveTimeS",
                fix="write a third of the hold time",
            )
        if each.restarts_gracefully and each.bfd is None:
            raise Refused(
                f"{source}: with graceful restart and without BFD, the router keeps the routes of "
                f"a dead gateway for two minutes - at {here}.gracefulRestart",
                fix="add bfd: {}, or remove gracefulRestart",
            )


def _is_router_id(text: str) -> bool:
    try:
        return int(ipaddress.IPv4Address(text)) > 0
    except ValueError:
        return False


def _check_tunnel(config: Config, source: str) -> None:
    forwarding, tunnel = config.gateway.forwarding, config.tunnel
    if forwarding in ("ipip", "vxlan") and tunnel.kind != forwarding:
        raise Refused(
            f"{source}: gateway.forwarding is {forwarding}, but tunnel.kind is {tunnel.kind} - at "
            "$.gateway.forwarding",
            fix=f"set tunnel.kind to {forwarding} for gateways and nodes, or gateway.forwarding "
            "to auto",
        )
    if tunnel.kind != "none" and not tunnel.gateways:
        raise Refused(
            f"{source}: tunnel.kind is {tunnel.kind}, and tunnel.gateways is empty, so no host may "
            "send through the tunnel - at $.tunnel.gateways",
            fix="list the addresses of the gateways in tunnel.gateways, as CIDRs",
        )


def _check_interfaces(config: Config, source: str) -> None:
    announced = config.announce.l2 or L2Config()
    _check_selectors({"announce.l2.interfaces": announced.interfaces}, source)
    for name, section in (("gateway", config.gateway), ("node", config.node)):
        lists = {f"{name}.interfaces": section.interfaces}
        lists |= {
            f"{name}.interfacesByNode.{host}": selectors
            for host, selectors in section.interfaces_by_node.items()
        }
        _check_selectors(lists, source)


def _check_selectors(lists: Mapping[str, Selectors], source: str) -> None:
    for where, selectors in lists.items():
        for at, selector in enumerate(selectors):
            try:
                selection.check(selector)
            except ValueError as error:
                raise Refused(f"{source}: {error} - at $.{where}[{at}]", fix=INTERFACE) from error


def read_suffix(text: str) -> str | None:
    """Return the DNS name (RFC 1123) in lower case and without outer dots. Return None if the name
    is invalid, or too long to be prefixed with an address."""
    name = text.strip().strip(".").lower()
    return (
        name
        if len(name) <= MAX_SUFFIX_LENGTH and all(map(_LABEL.fullmatch, name.split(".")))
        else None
    )


def _range(text: str, where: str) -> tuple[int, int, int]:
    try:
        return parse_range(text)
    except ValueError as error:
        raise Refused(f"{where}: {error}", fix="give one address, a CIDR or FIRST-LAST") from error


def parse_range(text: str) -> tuple[int, int, int]:
    """Return (IP version, first, last) of `192.0.2.1`, `192.0.2.0/28` or `192.0.2.1-192.0.2.9`.
    Raise ValueError if the range is invalid or includes an address that cannot be routed."""
    if len(text) > MAX_RANGE_LENGTH:
        raise ValueError(f"{text[:MAX_RANGE_LENGTH]!r}... is too long for a range of addresses")
    first_text, dash, last_text = text.partition("-")
    if "/" in text:
        if problem := cidr_problem(text):
            message, fix = problem
            raise ValueError(f"{message} ({fix})")
        network = ipaddress.ip_network(text)
        first, last = network.network_address, network.broadcast_address
    else:
        try:
            first = ipaddress.ip_address(first_text.strip(_SPACES))
            last = ipaddress.ip_address(last_text.strip(_SPACES)) if dash else first
        except ValueError:
            raise ValueError(f"{text!r} is not a range of addresses") from None
    for each in (first, last):
        if problem := ambiguity(each):
            message, fix = problem
            raise ValueError(f"{text!r} {message} ({fix})")
    if first.version != last.version or int(last) < int(first):
        raise ValueError(f"{text!r} is not a range from a lower to a higher address of one family")
    if any(
        each.is_loopback or each.is_multicast or each.is_unspecified or each.is_link_local
        for each in (first, last)
    ):
        raise ValueError(f"{text!r} has addresses that are not reachable from other hosts")
    return first.version, int(first), int(last)
