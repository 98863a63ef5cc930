"""The base of all sections of the configuration file, and the sections for class
fairlead.io/octavia and for the announcement of addresses.

In: YAML. Out: frozen values, each within its limits. `config` reads the file."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Base of all sections: names are camelCase in the file, and unknown fields are rejected."""


Selectors = tuple[Annotated[str, msgspec.Meta(min_length=1)], ...]
"""Network interfaces by name, by pattern, by subnet or by default route; see `net.selection`."""

# `config.check` checks these texts. Here they are described for the schema of the chart's values,
# whose templates check networks further.
CIDR = Annotated[
    str,
    msgspec.Meta(
        extra_json_schema={"pattern": "^[0-9a-fA-F.:]+/[0-9]+$"},
        description="a CIDR, such as 192.0.2.0/24",
    ),
]
Address = Annotated[
    str,
    msgspec.Meta(
        extra_json_schema={"pattern": "^[0-9a-fA-F.:]+$"},
        description="an IPv4 or IPv6 address",
    ),
]
AddressRange = Annotated[
    str,
    msgspec.Meta(
        extra_json_schema={
            "pattern": r"^\s*[0-9a-fA-F.:]+(/[0-9]+|\s*-\s*[0-9a-fA-F.:]+)?\s*$",
            "maxLength": 128,
        },
        description="an address, a CIDR, or the first and the last address: 192.0.2.1-192.0.2.9",
    ),
]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
        description="a name of lower-case letters, digits, - and .",
    ),
]
"""The name of an object of Kubernetes (RFC 1123)."""
AbsolutePath = Annotated[str, msgspec.Meta(pattern="^/", description="an absolute path")]
HostPort = Annotated[
    str,
    msgspec.Meta(
        extra_json_schema={"pattern": "^$|:[0-9]+$"},
        description="address:port, such as 192.0.2.1:9440",
    ),
]


class L2Config(Section, frozen=True):
    """The announcement of addresses on layer 2: by answers to ARP requests and neighbor
    solicitations."""

    interfaces: Selectors = ()
    """The interfaces on which gateways announce addresses. Absent: those of `gateway.interfaces`.
    """
    networks: tuple[CIDR, ...] = ()
    """CIDRs that routers and clients on these links reach without a router, although no
    interface of a gateway has an address in them."""


AsNumber = Annotated[int, msgspec.Meta(ge=1, le=4294967294)]
"""The number of an autonomous system, as BGP identifies it."""


BIRD_DIRECTORY = "/run/fairlead/bird"
"""The default of `announce.bgp.directory`."""


class BfdConfig(Section, frozen=True):
    """Bidirectional forwarding detection (RFC 5880): a peer that does not receive `multiplier`
    packets in a row knows that this host is gone."""

    interval_ms: Annotated[int, msgspec.Meta(ge=10, le=10_000)] = 100
    multiplier: Annotated[int, msgspec.Meta(ge=2, le=50)] = 3


class BgpPeerConfig(Section, frozen=True):
    """A router on a link of the gateways. A session carries the routes of the family of its
    address."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$",
            description="a name of at most 40 lower-case letters, digits and -",
        ),
    ]
    address: Annotated[str, msgspec.Meta(min_length=1)]
    asn: AsNumber
    password_file: str = ""
    """The path of a file with the password of the session (RFC 2385). Empty: none."""
    bfd: BfdConfig | None = None
    """Absent: a dead gateway is noticed after the hold time."""
    graceful_restart: bool | None = None
    """Whether the router keeps the routes while BIRD restarts (RFC 4724). Absent: if there is BFD.
    """
    hold_time_s: Annotated[int, msgspec.Meta(ge=3, le=65_535)] = 9
    keepalive_time_s: Annotated[int, msgspec.Meta(ge=1, le=21_845)] = 3

    @property
    def restarts_gracefully(self) -> bool:
        """Whether the router keeps the routes while BIRD restarts."""
        return self.bfd is not None if self.graceful_restart is None else self.graceful_restart


class BgpConfig(Section, frozen=True):
    """The announcement of addresses by BGP, through a BIRD on the host of each gateway."""

    asn: AsNumber
    """The AS number of the gateways."""
    routers: Annotated[tuple[BgpPeerConfig, ...], msgspec.Meta(min_length=1)]
    directory: AbsolutePath = BIRD_DIRECTORY
    """Directory for the configuration of BIRD, `bird.conf`, and for its control socket,
    `bird.ctl`."""
    networks: tuple[CIDR, ...] = ()
    """The CIDRs of which single addresses may be announced. Empty: those of all Services."""
    router_id: str = ""
    """The identifier of a gateway in BGP, an IPv4 address. Empty: BIRD chooses an address of the
    host, which needs an IPv4 address then."""


class AnnounceConfig(Section, frozen=True):
    """How gateways announce the addresses of Services themselves. Absent: they do not, and routes
    lead to them."""

    l2: L2Config | None = None
    """Absent: no address is announced on layer 2."""
    bgp: BgpConfig | None = None
    """Absent: no address is announced by BGP."""
    ignore_exclude_label: bool = False
    """Whether Nodes with the label node.kubernetes.io/exclude-from-external-load-balancers get
    traffic and announce addresses like others. kubeadm gives the label to nodes of the control
    plane, which may be all nodes of a cluster."""


class OctaviaMonitorConfig(Section, frozen=True):
    """Defaults of the health monitors that Octavia runs for members. Annotations of a Service
    override them."""

    enabled: bool = True
    delay_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 5
    timeout_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 3
    max_retries: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    max_retries_down: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3


class OctaviaClassConfig(Section, frozen=True):
    """The networks of the load balancers of Services that select this class by the annotation
    `class`. Empty: the value of the section `octavia`."""

    subnet_id: str = ""
    subnet_id_v6: str = ""
    network_id: str = ""
    member_subnet_id: str = ""
    floating_network_id: str = ""
    floating_subnet_id: str = ""
    floating_subnet: str = ""
    floating_subnet_tags: str = ""


class OctaviaConfig(Section, frozen=True):
    """The cloud whose Octavia serves class fairlead.io/octavia. Absent: the class is not served."""

    cloud: str = ""
    """The name of the cloud in clouds.yaml. Empty: the cloud of the environment variables
    (OS_CLOUD, OS_AUTH_URL and so on)."""
    clouds_file: str = ""
    """The path of clouds.yaml. Empty: the directories where the openstack command searches for it.
    """
    cluster_name: Annotated[str, msgspec.Meta(min_length=1, max_length=60)] = "kubernetes"
    """A name for this cluster in the names of its load balancers, for people only. Ownership does
    not depend on it."""
    provider: Literal["auto", "amphora", "ovn"] = "auto"
    """`auto`: chosen for each Service by the features that it requests, in a cloud that has both
    providers."""
    subnet_id: str = ""
    network_id: str = ""
    """The subnet or network of the addresses of load balancers. One of the two is required, unless
    every Service specifies it."""
    subnet_id_v6: str = ""
    """The subnet of the addresses of IPv6 Services, and of the second address of dual-stack
    Services; in the same network as `subnet_id`. Empty: Services have no IPv6 address."""
    member_subnet_id: str = ""
    """The subnet in which Octavia reaches the nodes. Empty: Octavia uses its own routes."""
    flavor_id: str = ""
    availability_zone: str = ""
    lb_method: Literal["", "ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", "SOURCE_IP_PORT"] = ""
    """The load balancing algorithm, if a Service does not specify it and the provider supports it.
    Empty: an algorithm that the provider supports."""
    node_selector: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^([\w./-]+(=[\w.-]*)?(,|$))*$",
            description="labels with or without a value, separated by commas: zone=a,disk",
        ),
    ] = ""
    """The labels that a node must have to be a member: `zone=a,disk`."""
    members: Literal["ready", "all"] = "ready"
    """`ready`: nodes with ready pods are members. `all`: all nodes are members, and the health
    monitor of Octavia finds the nodes with ready pods."""
    floating_network_id: str = ""
    """The external network of the floating IPs of load balancers. Empty: load balancers have no
    floating IP, and Neutron is not called."""
    floating_subnet_id: str = ""
    floating_subnet: str = ""
    floating_subnet_tags: str = ""
    """The subnet of the external network, selected by its id, by a pattern of its name, or by its
    tags. Empty: any subnet."""
    manage_security_groups: bool = False
    """Whether the ports of nodes get a security group that admits the traffic of load balancers."""
    internal: bool = False
    """Whether load balancers have no floating IP by default. A Service may override it."""
    classes: Mapping[str, OctaviaClassConfig] = msgspec.field(default_factory=dict)
    monitor: OctaviaMonitorConfig = msgspec.field(default_factory=OctaviaMonitorConfig)
    ip_mode: Literal["auto", "Proxy"] = "auto"
    """`Proxy`: traffic from inside the cluster passes through every load balancer of provider
    amphora. `auto`: only if pods expect a header that the load balancer adds."""
    adopt_from: str = ""
    """The --cluster-name of cloud-provider-openstack. Load balancers that it created for Services
    are adopted unchanged. Empty: no load balancer is adopted."""
    calls_per_s: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """Maximum rate of API calls to the cloud, whatever the number of Services."""

    @property
    def uses_floating_ips(self) -> bool:
        """Whether any load balancer may have a floating IP."""
        return bool(self.floating_network_id) or any(
            each.floating_network_id for each in self.classes.values()
        )
