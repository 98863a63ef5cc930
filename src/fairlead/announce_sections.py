"""The sections of the configuration about the announcement of addresses, and the BGP peers.

In: YAML, or the spec of a BGPPeer or AddressPool. Out: frozen values, each within its limits.
`config` reads the file, and `plan.announce` decides from these values what a host announces."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from fairlead.sections import Section

AnnounceMethod = Literal["none", "l2", "bgp"]
"""How the network learns where an address is. `l2`: one host of the link answers ARP and neighbor
discovery for the address. `bgp`: hosts announce a route to the address. `none`: routes to the hosts
exist already, or another system announces the address."""
Speaker = Literal["bird", "routes"]
"""Which program speaks BGP. `bird`: a BIRD of Fairlead's own. `routes`: the routing daemon that the
operator already runs on the host; Fairlead hands it the addresses as kernel routes."""

Asn = Annotated[int, msgspec.Meta(ge=1, le=4_294_967_294)]
"""An autonomous system number. 0 and the last number are reserved (RFC 7607, RFC 7300)."""
Selectors = tuple[Annotated[str, msgspec.Meta(min_length=1)], ...]
"""Network interfaces by name, by pattern, by subnet or by default route; see `net.selection`."""


class LabelRequirement(Section, frozen=True):
    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(Section, frozen=True):
    """A label selector with the semantics of Kubernetes: an object must match all requirements, and
    an empty selector matches every object."""

    match_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


class BfdConfig(Section, frozen=True):
    """Bidirectional forwarding detection (RFC 5880): how fast a dead neighbor is noticed. The
    detection time is `interval_ms` times `multiplier`."""

    interval_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 100
    multiplier: Annotated[int, msgspec.Meta(ge=2, le=255)] = 3
    passive: bool = False
    """Wait for the first packet of the neighbor."""


class SecretRef(Section, frozen=True):
    """A key of a Secret in the namespace of Fairlead's roles."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    key: str = "password"


class BgpPeerSpec(Section, frozen=True):
    """One BGP neighbor: the fields of the section `announce.bgp.peers`, and of a BGPPeer."""

    asn: Asn | Literal["external", "internal"]
    """The AS number of the neighbor. `external`: any but that of the host; `internal`: that one."""
    address: str = ""
    """The address of the neighbor. Exactly one of `address` and `interface` is set."""
    interface: str = ""
    """The interface of an unnumbered session, which uses link-local addresses (RFC 5549)."""
    local_asn: Asn | None = msgspec.field(default=None, name="localASN")
    """The AS number of the host in this session. Absent: `announce.bgp.asn`."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 179
    source_address: str = ""
    """The address of the host in this session. Empty: the kernel's choice."""
    node_selectors: tuple[LabelSelector, ...] = ()
    """The hosts that have this session, by the labels of their Nodes. Absent: every host."""
    password_file: str = ""
    """A file that contains the password of the session (TCP MD5, RFC 2385). A role in a pod has no
    files of the host."""
    password_secret: SecretRef | None = None
    """A Secret that contains the password."""
    multihop: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    """The maximum number of hops to the neighbor. 0: the neighbor is directly connected."""
    ttl_security: bool = False
    """Accept only packets of a neighbor that is directly connected (GTSM, RFC 5082)."""
    hold_time_s: Annotated[int, msgspec.Meta(ge=3, le=65535)] = 9
    keepalive_time_s: Annotated[int, msgspec.Meta(ge=1, le=21845)] = 3
    connect_time_s: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    """The interval of the attempts to connect."""
    bfd: BfdConfig | None = None
    """Absent: without BFD a dead host is noticed after `hold_time_s`."""
    graceful_restart: bool | None = None
    """Whether the neighbor keeps our routes while the routing daemon restarts (RFC 4724). Absent:
    only with BFD, because without BFD the neighbor also keeps the routes of a dead host."""
    graceful_restart_time_s: Annotated[int, msgspec.Meta(ge=1, le=4095)] = 20
    long_lived_stale_time_s: Annotated[int, msgspec.Meta(ge=0, le=16_777_215)] = 60
    """How long the neighbor keeps our routes as a last resort after the restart time (RFC 9494).
    0: not at all."""
    families: tuple[Literal["IPv4", "IPv6"], ...] = ()
    """The families of the routes of this session, whatever the family of the session. Absent:
    both."""
    next_hops: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """Networks: the addresses of the host in them are next hops. A host then tells its weight by
    the number of its next hops (ADD-PATH, RFC 7911), and not by link bandwidth. Absent: the next
    hop is the address of the host in the session."""


class BgpPeerConfig(BgpPeerSpec, frozen=True, kw_only=True):
    """A BGP neighbor of the configuration file."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class BgpConfig(Section, frozen=True):
    asn: Asn | None = None
    """The AS number of the hosts. Required for sessions without a `localASN` of their own."""
    router_id: Annotated[str, msgspec.Meta(pattern=r"^$|^\d{1,3}(\.\d{1,3}){3}$")] = ""
    """Empty: the first IPv4 address of the host."""
    speaker: Speaker = "bird"
    directory: str = "/run/fairlead/bird"
    """The directory of BIRD's configuration and control socket."""
    start_daemon: bool = True
    """Whether this process starts BIRD. False: a sidecar or a unit starts it."""
    local_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 179
    """The port where BIRD accepts sessions. Choose another one, such as 1179, if another daemon of
    the host has port 179; then only BIRD opens sessions."""
    route_table: Annotated[int, msgspec.Meta(ge=1, le=4_294_967_295)] = 7471
    """With speaker `routes`: the kernel's routing table of the announced addresses. 254 is the
    main table."""
    check_routes: bool = True
    """Whether probes show which announced addresses directly connected routers have routes for."""
    peers: tuple[BgpPeerConfig, ...] = ()


class L2Config(Section, frozen=True):
    interfaces: Selectors = ()
    """The interfaces where addresses are announced. Absent: for a gateway `gateway.interfaces`, for
    a node the interfaces that have the node's addresses."""
    interfaces_by_node: Mapping[str, Annotated[Selectors, msgspec.Meta(min_length=1)]] = (
        msgspec.field(default_factory=dict)
    )
    """Replaces `interfaces` for hosts whose name is the key, or matches the key as a pattern."""
    hello_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=10_000)] = 50
    """The interval at which announcers check each other."""
    hello_multiplier: Annotated[int, msgspec.Meta(ge=2, le=100)] = 3
    """After this number of unanswered checks in a row, an announcer counts as dead."""
    stale_s: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    """After this time without its process, the kernel of an announcer still answers, but yields to
    any other announcer."""


class AnnounceConfig(Section, frozen=True):
    """How hosts announce the addresses of Services. Pools and Services may override `method`."""

    method: AnnounceMethod = "none"
    l2: L2Config = msgspec.field(default_factory=L2Config)
    bgp: BgpConfig = msgspec.field(default_factory=BgpConfig)
    resilient: bool = False
    """Whether the routers keep connections when their ECMP routes change (resilient hashing). Only
    for class fairlead.io/announce: without it, joins and changes of weights are collected."""
    withdraw_without_api_s: Annotated[float, msgspec.Meta(ge=5)] | None = None
    """After this time without an answer of the API server, a host hands over or withdraws what it
    announces, until the API server answers again. Absent: everything stays announced."""
    withdraw_at_stop: bool = False
    """Whether a host hands over or withdraws what it announces when a signal stops its role. After
    a crash or kill -9 everything stays announced."""


class PoolAnnounce(Section, frozen=True):
    """How the addresses of a pool are announced. The same fields in an AddressPool."""

    method: AnnounceMethod | None = None
    """Absent: `announce.method`."""
    interfaces: Selectors = ()
    """Method `l2`: replaces the interfaces of the section `announce.l2`."""
    node_selectors: tuple[LabelSelector, ...] = ()
    """The hosts that may announce, by the labels of their Nodes. Absent: every host."""
    peers: tuple[str, ...] = ()
    """Method `bgp`: the names of the peers that get the routes. Absent: every peer."""
    communities: tuple[str, ...] = ()
    """`64512:100`, a large community `64512:1:2` (RFC 8092), or a well-known name such as
    `no-export`."""
    local_preference: Annotated[int, msgspec.Meta(ge=0, le=4_294_967_295)] | None = None
    """Only internal peers get it."""
    aggregation_length: Annotated[int, msgspec.Meta(ge=8, le=32)] = 32
    aggregation_length_v6: Annotated[int, msgspec.Meta(ge=16, le=128)] = 128
    """The length of the announced prefixes. Shorter prefixes cover several addresses."""
