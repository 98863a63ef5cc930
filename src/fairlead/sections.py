"""The base of all sections of the configuration file, and the sections for class
fairlead.io/octavia.

In: YAML. Out: frozen values, each within its limits. `config` reads the file."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Base of all sections: names are camelCase in the file, and unknown fields are rejected."""


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
    node_selector: Annotated[str, msgspec.Meta(pattern=r"^([\w./-]+(=[\w.-]*)?(,|$))*$")] = ""
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


class OvnTLSConfig(Section, frozen=True):
    """Paths of PEM files for connections to the databases of OVN (`ssl:` addresses)."""

    ca: Annotated[str, msgspec.Meta(min_length=1)]
    """The CA by which the certificates of the servers are verified."""
    certificate: Annotated[str, msgspec.Meta(min_length=1)]
    key: Annotated[str, msgspec.Meta(min_length=1)]
    check_names: bool = False
    """Whether the certificate of a server must be valid for the host in its address. Certificates
    of OVN usually name no host."""


NODE_PLACEHOLDER = "{node}"
"""Stands for the name of a node in the names of gateway routers."""
OvsdbAddress = Annotated[str, msgspec.Meta(pattern=r"^(unix:.+|(tcp|ssl):.+:[0-9]+)$")]


class OvnConfig(Section, frozen=True, kw_only=True):
    """The OVN that serves class fairlead.io/ovn. Absent: the class is not served."""

    northbound: Annotated[tuple[OvsdbAddress, ...], msgspec.Meta(min_length=1)]
    """The addresses of the servers of the northbound database, as in OVN's tools:
    `ssl:192.0.2.1:6641`, `tcp:...`, `unix:PATH`."""
    cluster_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Marks the load balancers of this cluster. It must be unique among the clusters that use the
    database, and must not change."""
    southbound: tuple[OvsdbAddress, ...] = ()
    """The addresses of the servers of the southbound database. Empty: messages do not name a
    chassis that does not answer, and the gateway chassis are not checked."""
    tls: OvnTLSConfig | None = None
    topology: Literal["router", "gateways"] = "router"
    """`router`: one router, on which all backends of a Service are reached. `gateways`: each node
    has a gateway router, which sends to the pods of this node only."""
    router: str = ""
    """With topology `router`: the name of the logical router to which load balancers are attached.
    Packets for the addresses of Services must arrive there, and it must be the way out of the
    backends."""
    routers: str = ""
    """With topology `gateways`: the name of the gateway router of a node, where `{node}` stands for
    the name of the node, as in `GR_{node}`."""
    switches: tuple[str, ...] = ()
    """The names of logical switches with clients inside of OVN, such as pods. Load balancers are
    attached to them as well."""
    backends: Literal["pods", "nodePorts"] = "pods"
    """Whether the router sends to pods, or to node ports because it has no route to pods."""
    slots: Literal[16, 32, 64, 128, 256] = 64
    """The length of the list of backends that OVN hashes to. It is doubled, up to 256, for more
    equal shares."""
    drain_address: str = "192.0.2.1"
    drain_address_v6: str = "100::1"
    """Addresses to which nothing is routed, under which backends that drain are listed."""
    drain_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """How long a backend that no longer exists in the Kubernetes API keeps its connections."""
    neighbor_responder: Literal["reachable", "none"] = "reachable"
    """Whether the router answers ARP and neighbor discovery for addresses that are in a network of
    the router."""
    hairpin_address: str = ""
    """The source address, of one or both families, of connections from a pod to itself. Empty: the
    address of the Service."""
