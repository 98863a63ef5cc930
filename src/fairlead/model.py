"""The data model, as frozen values.

One Service is planned from the same objects in two views: a `LoadBalancer` is everything that a
load balancer in front of the nodes must do for the Service, and a `NodeService` is everything that
one node must do for it. Drivers implement these values and report an `Outcome`.

Invariant: the functions that create values sort them. So equal clusters give equal values, and two
plans are compared by `==`. The terms are those of the Kubernetes API (Service, EndpointSlice) and
of Octavia (Listener, Member, HealthMonitor)."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

import msgspec

Family = Literal["IPv4", "IPv6"]
Protocol = Literal["TCP", "UDP", "SCTP"]
TrafficPolicy = Literal["Cluster", "Local"]
IPMode = Literal["VIP", "Proxy"]

MemberState = Literal["active", "draining", "pending", "down"]
"""The traffic that a member may get. `active`: new connections, in proportion to its weight.
`draining`: only packets of its existing connections. `pending`: no traffic, because no probe has
confirmed yet that the node serves. `down`: no new connections, because the node stopped answering.
"""


Verdict = Literal["up", "unready", "down", "flapping", "probe_failed", "assumed_up"]
"""The result of the probes of a node's health port. `up`: the node serves. `unready`: the host
answers, but the node does not serve. `down`: the host does not answer. `flapping`: the node serves,
but stopped serving more than once recently. `probe_failed`: this gateway could not send the probe.
`assumed_up`: there is no result yet, and a starting gateway relies on the API server until it has
probed all nodes. None: the node is not probed, or there is no result yet."""


class ServiceKey(NamedTuple):
    """The identity of a Service inside a cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `namespace/name`. A name without a namespace is in namespace `default`."""
        namespace, _, name = text.rpartition("/")
        return cls(namespace or "default", name)


class Value(msgspec.Struct, frozen=True, gc=False, order=True):
    """Base of all values: immutable, compared and sorted by their fields."""


class Member(Value, frozen=True):
    """A node as the target of a listener. `weight`: the number of usable pods of the Service on the
    node."""

    node: str
    address: str
    weight: int
    state: MemberState = "active"


class Listener(Value, frozen=True):
    """One port and protocol on which a load balancer takes traffic, on all its addresses of one
    family. Members are sorted by node; their addresses are of the same family."""

    family: Family
    port: int
    protocol: Protocol
    policy: TrafficPolicy
    node_port: int
    members: tuple[Member, ...]
    has_endpoints: bool = True
    """Whether any endpoint, on any node, may get traffic. If not, the load balancer refuses new
    connections, as the service proxy of a node does."""


class HealthMonitor(Value, frozen=True):
    """How to probe whether a node serves: HTTP GET on `port`; status 200 means that it does.

    With policy Local, the port is the Service's healthCheckNodePort, whose answer contains the
    number of ready local endpoints. With policy Cluster, it is the health port of the service proxy
    itself (KEP-3836)."""

    port: int
    path: str


Severity = Literal["ok", "info", "warning", "error", "security"]
"""The severity of a Finding, in rising order. `ok`: a check passed. `info`: useful to know, with
nothing to do. `warning`: it works, but perhaps not as its owner expects, or not for long. `error`:
something does not work. `security`: a user or host has access that only others should have."""

BlockedCondition = Literal["", "Programmed", "Ready"]
"""The condition of a Service that is false because of a Finding; empty: no condition."""


class Finding(Value, frozen=True):
    """A fact that a user should know, usually a problem. The plan, the roles and all checks report
    facts in this form. `code`: a CamelCase identifier that does not change with the text; it is the
    reason of the Event, if there is one. `subject`: the object concerned, such as `Service
    default/web` or `AddressPool public`; empty if the container of the Finding names the object.
    `message`: the fact. `evidence`: the observation behind the fact, unless the message contains
    it. `remedy`: what the user should do. `str` is the whole text without the subject, as an Event
    or a condition shows it.

    Invariant: a Finding does not change while its cause is the same, so its text contains no number
    that varies meanwhile."""

    code: str
    message: str
    severity: Severity = "warning"
    subject: str = ""
    evidence: str = ""
    remedy: str = ""
    blocks: BlockedCondition = ""
    at_start: bool = False
    """The fact is normal while the pods of a new Service start, so no Event is written during that
    time."""

    def __str__(self) -> str:
        known = f"{self.message} ({self.evidence})" if self.evidence else self.message
        return f"{known}; {self.remedy}" if self.remedy else known


def about(subject: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, with this subject for each finding that has none."""
    return tuple(
        each if each.subject else msgspec.structs.replace(each, subject=subject)
        for each in findings
    )


class UnservedPort(Value, frozen=True):
    """A port of a Service on which its load balancer takes no traffic. `error`: the reason in the
    form of PortStatus.error, a CamelCase identifier prefixed with the domain of this project."""

    port: int
    protocol: Protocol
    error: str


class Grant(Value, frozen=True):
    """An address that a Service holds, with the ports (`TCP/80`, sorted) that belong to the Service
    on this address.

    `pool`: the pool of the address; empty: the address is from no pool. `sharing_key`: Services of
    the same namespace with the same key may hold other ports of the address; empty: the address is
    not shared. `keep`: the address stays reserved after the Service is deleted."""

    address: str
    ports: tuple[str, ...]
    pool: str = ""
    sharing_key: str = ""
    keep: bool = False


ProxyHeader = Literal["", "v1", "v2"]
"""The version of the PROXY protocol header that passes the client's address to members; empty:
members get no header."""
ProxyMethod = Literal["roundrobin", "leastconn", "source"]
"""How a terminating load balancer chooses a member, by HAProxy's names."""


class MemberChecks(Value, frozen=True):
    """The health checks that a terminating load balancer sends to its members, in addition to the
    probes of the gateway. `rise` and `fall`: the number of successes, or of failures, in a row that
    change the state of a member."""

    interval_ms: int = 5000
    timeout_ms: int = 3000
    rise: int = 1
    fall: int = 3


class DirectSettings(Value, frozen=True, tag="direct"):
    """The settings of a Service of class fairlead.io/direct, whose packets gateways forward
    unmodified."""

    drain_timeout_s: float | None = None
    """How long a node keeps its connections after it stopped receiving new ones. 0: until the
    connections end. None: the default of the gateway."""


class ProxySettings(Value, frozen=True, tag="proxy"):
    """The settings of a Service of class fairlead.io/proxy, whose connections end at the load
    balancer. A time-out of 0 means that there is no limit; `inspect_ms` of 0 means that there is no
    wait."""

    header: ProxyHeader = ""
    forwarded_for: bool = False
    """Parse HTTP, and add X-Forwarded-For to each request."""
    method: ProxyMethod = "roundrobin"
    client_ms: int = 3_600_000
    """The idle time-out of the client's side of a connection."""
    connect_ms: int = 2000
    member_ms: int = 3_600_000
    inspect_ms: int = 0
    connection_limit: int = 0
    """Maximum number of open connections of one listener; further connections wait. 0: no limit."""
    checks: MemberChecks | None = None
    shared: bool = False
    """Other Services, of any class, may hold other ports of its addresses."""
    drain_timeout_s: float | None = None
    """As in DirectSettings."""


Provider = Literal["amphora", "ovn"]
"""The Octavia provider that runs a load balancer: a virtual machine with HAProxy, or OVN."""
OctaviaMethod = Literal["ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", "SOURCE_IP_PORT"]
OctaviaMonitorType = Literal["HTTP", "TCP", "UDP-CONNECT"]


class OctaviaChecks(Value, frozen=True):
    """The health monitor that Octavia runs for members. `rise` and `fall`: the number of successes,
    or of failures, in a row that change the state of a member."""

    delay_s: int = 5
    timeout_s: int = 3
    rise: int = 1
    fall: int = 3


class OctaviaPlace(Value, frozen=True):
    """Where a load balancer is created. These values do not change for an existing load balancer.
    `address`: the VIP address to request."""

    subnet_id: str = ""
    network_id: str = ""
    port_id: str = ""
    address: str = ""
    flavor_id: str = ""
    availability_zone: str = ""
    subnet_id_v6: str = ""
    """The subnet of an additional IPv6 address; then `subnet_id` is an IPv4 subnet."""
    address_v6: str = ""


class ExistingLoadBalancer(Value, frozen=True):
    """The load balancer in the cloud of the Service with this uid, as the driver last read it. The
    provider and the own addresses of a load balancer never change."""

    uid: str
    provider: Provider | None
    """None: the provider is unsupported."""
    addresses: tuple[str, ...] = ()
    """Its own addresses. The first one is the address of its VIP port."""
    floating: tuple[str, ...] = ()
    """The floating IPs that are attached to it, including floating IPs that this project did not
    create."""
    shared: bool = False
    """The load balancer was created for another Service; this Service only has listeners on it."""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of its own addresses. Octavia cannot add a family to an existing load
        balancer."""
        found: dict[Family, None] = {
            "IPv6" if ":" in each else "IPv4": None for each in self.addresses if each
        }
        return tuple(found) or ("IPv4",)


class SharedOrAdopted(Value, frozen=True):
    """A load balancer that was not created for this Service. `id`: the load balancer that the
    Service names and shares with other Services. `names`: the names that cloud-provider-openstack
    may have given to the load balancer that it created for the Service and that is to be adopted;
    empty: no load balancer is adopted."""

    id: str = ""
    names: tuple[str, ...] = ()


class FloatingIpRequest(Value, frozen=True):
    """The request for a floating IP, the external address of a load balancer. `network_id`: the
    external network. `address`: the specific address that the Service requests. `reuse_address`: an
    address to reuse if it is free. `keep`: the floating IP is kept in the project when the Service
    is deleted.

    The subnet of a new floating IP is `subnet_id`, or a subnet whose name matches `subnet`, or a
    subnet with the tags `subnet_tags`, or any subnet of the network. The semantics are those of the
    annotations of cloud-provider-openstack with these names."""

    network_id: str
    address: str = ""
    reuse_address: str = ""
    keep: bool = False
    subnet_id: str = ""
    subnet: str = ""
    subnet_tags: str = ""


class OctaviaSettings(Value, frozen=True, tag="octavia"):
    """The settings of a Service of class fairlead.io/octavia. A time-out of None means the default
    of the cloud."""

    provider: Provider
    why: str = ""
    """Why this provider was chosen, for display."""
    existing: ExistingLoadBalancer | None = None
    """The load balancer that existed when the Service was planned."""
    held: tuple[str, ...] = ()
    """The addresses in the status of the Service. A new load balancer requests them again."""
    place: OctaviaPlace = OctaviaPlace()
    header: ProxyHeader = ""
    forwarded_for: bool = False
    method: OctaviaMethod = "ROUND_ROBIN"
    client_ms: int | None = None
    connect_ms: int | None = None
    member_ms: int | None = None
    inspect_ms: int | None = None
    connection_limit: int = -1
    checks: OctaviaChecks | None = None
    monitor_types: tuple[tuple[Protocol, OctaviaMonitorType], ...] = ()
    """The type of the health monitor by the protocol of the port. Ports of other protocols have no
    health monitor."""
    member_subnet_id: str = ""
    shared_or_adopted: SharedOrAdopted | None = None
    node_selector: str = ""
    """The label selector of the nodes that may be members."""
    all_nodes: tuple[Protocol, ...] = ()
    """For listeners of these protocols, all nodes are members, also nodes without ready pods."""
    floating: FloatingIpRequest | None = None
    """None: the load balancer is reachable only at its own address."""
    secured: bool = False
    """Whether a security group on the nodes' ports admits the traffic of the load balancer."""


Settings = DirectSettings | ProxySettings | OctaviaSettings
"""The settings that are specific to one type of load balancer. A driver selects the Services that
it serves by the type of their settings."""


class Announcement(Value, frozen=True):
    """The gateway that announces an address in its network, and the interface of this gateway on
    which it does so. `heir`: the gateway that announces it if the owner is lost; empty: none can.
    `lost`: the gateway that would own it if it answered the gateway that plans; empty: the owner
    would."""

    address: str
    owner: str
    interface: str
    heir: str = ""
    lost: str = ""


class LoadBalancer(Value, frozen=True):
    """Everything that one Service should get from a load balancer. Listeners are sorted by (family,
    port, protocol)."""

    service: ServiceKey
    uid: str
    class_name: str
    addresses: tuple[str, ...]
    """The addresses where the load balancer listens, in the order of the Service's families."""
    listeners: tuple[Listener, ...]
    health_monitor: HealthMonitor | None = None
    affinity_timeout_s: int = 0
    """0: no affinity. Otherwise connections from one client address use the same member
    (sessionAffinity: ClientIP)."""
    source_ranges: tuple[str, ...] = ()
    """CIDRs of the clients that may connect; empty: every client may connect."""
    ip_mode: IPMode = "VIP"
    """How nodes handle the addresses (KEP-1860). VIP: a node may translate the addresses itself.
    Proxy: traffic from inside the cluster must pass through the load balancer."""
    settings: Settings = DirectSettings()
    """With OctaviaSettings, `addresses` are the addresses of the existing load balancer. Before it
    exists, they are the addresses in the status of the Service."""
    hostname_suffix: str = ""
    """Publish each address as a hostname with this suffix, and not as an IP address. So nodes do
    not answer for the address themselves, even if they do not support ipMode. Empty: publish IP
    addresses."""
    hostname: str = ""
    """Publish this hostname instead of addresses. Empty: see `hostname_suffix`."""
    notes: tuple[Finding, ...] = ()
    unserved_ports: tuple[UnservedPort, ...] = ()
    grants: tuple[Grant, ...] = ()
    """The grants by which the Service holds the addresses, in their order. Only in the plan of the
    controller."""
    announcements: tuple[Announcement, ...] = ()
    """How the addresses are announced, as far as they are. Only in the plan of a gateway."""

    @property
    def terminates_connections(self) -> bool:
        """Whether connections end at the gateway, which then connects to members by the routes of
        its host. So members are probed on these routes, not on the path of forwarded packets."""
        return isinstance(self.settings, ProxySettings)

    def listening(self, listener: Listener) -> tuple[str, ...]:
        """Return the addresses on which the listener takes traffic: the addresses of its family."""
        return tuple(
            address for address in self.addresses if (":" in address) == (listener.family == "IPv6")
        )


class Backend(Value, frozen=True):
    """A pod address and port that answers for a Service port. `local`: the endpoint is on this
    node, or its EndpointSlice names no node."""

    address: str
    port: int
    local: bool = False


class NodeServicePort(Value, frozen=True):
    """One port of a Service for one address family, as one node serves it."""

    family: Family
    protocol: Protocol
    port: int
    name: str
    cluster_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    """The ingress addresses with ipMode VIP, for which the node itself answers. Addresses with
    ipMode Proxy are not included."""
    external_ips: tuple[str, ...]
    node_port: int
    """0: none."""
    cluster_backends: tuple[Backend, ...]
    """The backends for traffic that may go to any node: the ready endpoints or, if there are none,
    the endpoints that are serving and terminating (KEP-1669)."""
    local_backends: tuple[Backend, ...]
    """The backends for traffic that must stay on this node: the same choice, made only among the
    endpoints of this node."""
    serving_backends: tuple[Backend, ...] = ()
    """All backends that serve, including backends that get no new traffic. Flows to other backends
    are stale. Only for UDP and SCTP, because open TCP connections end by themselves."""


class HealthCheck(Value, frozen=True):
    """The healthCheckNodePort of a Service with policy Local, the number of its *ready* endpoints
    on this node, and their addresses, sorted."""

    port: int
    local_endpoints: int
    addresses: tuple[str, ...] = ()


class NodeService(Value, frozen=True):
    """Everything that one node does for a Service. Ports are sorted by (family, protocol, port)."""

    service: ServiceKey
    uid: str
    internal_policy: TrafficPolicy
    external_policy: TrafficPolicy
    ports: tuple[NodeServicePort, ...]
    affinity_timeout_s: int = 0
    source_ranges: tuple[str, ...] = ()
    health_check: HealthCheck | None = None
    notes: tuple[Finding, ...] = ()


OutcomeState = Literal["done", "waiting", "refused", "unavailable"]
"""`waiting`: in progress, no action is needed. `refused`: a user must change something.
`unavailable`: the operation failed and is retried."""


class Outcome(Value, frozen=True):
    """The result of one driver for one Service. `message`: the text for the user; empty on success.
    `reason`: the reason of the Event, if the driver knows a more specific one than the default of
    its role. `again_s`: the minimum delay until the next attempt; if the Service is done, the delay
    until the driver has work to do for it again. `in_part`: although the Service is not done, the
    driver serves it in part or in its previous form. Only a Service that is not served at all is
    withheld from the drivers that follow. `missing`: the listeners (`address:port/protocol`) that
    the driver should serve and does not serve. `coarse`: the state is unavailable, but everything
    is served, only less exactly than the Service requests. `notes`: what happened to the Service in
    this pass; each is reported once."""

    state: OutcomeState
    message: str = ""
    reason: str = ""
    again_s: float = 0.0
    in_part: bool = False
    missing: tuple[str, ...] = ()
    coarse: bool = False
    notes: tuple[Finding, ...] = ()

    def joined(self, later: Self) -> Self:
        """Return the combined outcome of two drivers of one chain, of which `later` is the second.
        The Service is retried if either outcome requests a retry. It is served in part only if both
        drivers serve it at least in part."""
        if self.state == "done" or later.state == "done":
            whole = self if later.state == "done" else later
            return msgspec.structs.replace(whole, notes=self.notes + later.notes)
        retried = [each for each in (self, later) if each.state == "unavailable"]
        waiting = [each for each in (self, later) if each.state == "waiting"]
        first = (*retried, *waiting, self)[0]
        return msgspec.structs.replace(
            first,
            message="; ".join(dict.fromkeys(filter(None, (self.message, later.message)))),
            again_s=max(each.again_s for each in (*retried, *waiting, first)),
            in_part=self.in_part and later.in_part,
            missing=self.missing + later.missing,
            coarse=self.coarse and later.coarse,
            notes=self.notes + later.notes,
        )


DONE = Outcome("done")
