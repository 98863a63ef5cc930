"""The words of Fairlead, as frozen values.

Two views of one Service are planned from the same objects: a `LoadBalancer` is all that a balancer
in front of the nodes must do for it, a `NodeService` all that one node must do. Drivers realise
these values and report `Outcome`s.

Invariant: values are sorted by their makers, so equal clusters give equal values and comparing two
plans is `==`. Terms are those of the Kubernetes API (Service, EndpointSlice) and of Octavia
(Listener, Member, HealthMonitor)."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

import msgspec

Family = Literal["IPv4", "IPv6"]
Protocol = Literal["TCP", "UDP", "SCTP"]
TrafficPolicy = Literal["Cluster", "Local"]
IPMode = Literal["VIP", "Proxy"]

MemberState = Literal["active", "draining", "pending", "down"]
"""What a member may get. `active`: new connections, by weight. `draining`: only connections that it
already has. `pending`: nothing yet, the node has not confirmed that it can serve. `down`: nothing
new, the node has stopped answering."""


Verdict = Literal["up", "unready", "down", "flapping", "unasked", "believed"]
"""What probing a node's health port has proved. `up`: it serves. `unready`: the machine lives, the
service does not. `down`: the machine does not answer. `flapping`: it serves, but ceased to more
than once of late. `unasked`: the fault is ours, the question could not be sent. `believed`:
nothing, but a gateway that starts cannot wait until it has asked everybody. None stands for nothing
yet: it is about to be asked, or not asked any more."""


class ServiceKey(NamedTuple):
    """A Service's identity inside a cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `namespace/name`; a bare name is in namespace `default`."""
        namespace, _, name = text.rpartition("/")
        return cls(namespace or "default", name)


class Value(msgspec.Struct, frozen=True, gc=False, order=True):
    """Base of all values: immutable, comparable, sortable by their fields."""


class Member(Value, frozen=True):
    """A node as target of a listener. `weight` is the number of the Service's usable pods behind
    it."""

    node: str
    address: str
    weight: int
    state: MemberState = "active"


class Listener(Value, frozen=True):
    """One port and protocol on which a load balancer takes traffic, on each of its addresses of one
    family. Members are sorted by node; their addresses are of that family."""

    family: Family
    port: int
    protocol: Protocol
    policy: TrafficPolicy
    node_port: int
    members: tuple[Member, ...]
    has_endpoints: bool = True
    """Whether any endpoint, on any node, may get traffic. If not, the balancer refuses new
    connections, as the service proxy of a node does."""


class HealthMonitor(Value, frozen=True):
    """How to ask a node whether it can serve: HTTP GET on `port`; 200 is yes.

    With policy Local it is the Service's healthCheckNodePort, whose answer carries the number of
    ready local endpoints; with policy Cluster it is the service proxy's own health port (KEP-3836).
    """

    port: int
    path: str


Severity = Literal["ok", "info", "warning", "error", "security"]
"""How bad a Finding is, in rising order. `ok`: something was checked and is as it should be.
`info`: worth knowing, with nothing to do. `warning`: it works, but not as its owner may think, or
not for long. `error`: something does not work. `security`: somebody may do what only others
should."""

BlockedCondition = Literal["", "Programmed", "Ready"]
"""The condition of a Service that a Finding keeps from being true; empty: none."""


class Finding(Value, frozen=True):
    """One thing that is wrong or worth knowing: the one form in which the plan, the roles and every
    check tell it. `code`: a CamelCase word that does not change with the text, and the reason of
    the Event where there is one. `subject`: what it is about, as in `Service default/web` or
    `AddressPool public`; empty where the value that holds the Finding says so. `message`: what is
    the case. `evidence`: how that is known, where the message does not say it. `remedy`: what to do
    about it. `str` is the whole text without the subject, as an Event or a condition shows it.

    Invariant: a Finding is the same as long as its cause is, so it counts nothing that comes and
    goes."""

    code: str
    message: str
    severity: Severity = "warning"
    subject: str = ""
    evidence: str = ""
    remedy: str = ""
    blocks: BlockedCondition = ""
    at_start: bool = False
    """This is normal while the pods of a new Service start, so no Event is written in that time."""

    def __str__(self) -> str:
        known = f"{self.message} ({self.evidence})" if self.evidence else self.message
        return f"{known}; {self.remedy}" if self.remedy else known


def about(subject: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same findings, about this subject where they name none."""
    return tuple(
        each if each.subject else msgspec.structs.replace(each, subject=subject)
        for each in findings
    )


class UnservedPort(Value, frozen=True):
    """A port of a Service that its load balancer does not take traffic on. `error` says why in the
    form of PortStatus.error, a CamelCase word with our domain before it."""

    port: int
    protocol: Protocol
    error: str


class Grant(Value, frozen=True):
    """An address given to a Service, with the ports (`TCP/80`, sorted) that are its own there.

    `pool`: where it is from; empty: from none. `sharing_key`: Services of the same namespace with
    the same key may have other ports of it; empty: nobody else. `keep`: it is not given to anybody
    else when the Service is gone."""

    address: str
    ports: tuple[str, ...]
    pool: str = ""
    sharing_key: str = ""
    keep: bool = False


ProxyHeader = Literal["", "v1", "v2"]
"""The version of the PROXY protocol by which members are told the client's address; empty: they get
no header."""
ProxyMethod = Literal["roundrobin", "leastconn", "source"]
"""How a terminating balancer chooses a member, in HAProxy's words."""


class MemberChecks(Value, frozen=True):
    """How often a terminating balancer asks members itself, beside Fairlead's own probes. `rise`
    and `fall`: so many answers, or failures, in a row make a difference."""

    interval_ms: int = 5000
    timeout_ms: int = 3000
    rise: int = 1
    fall: int = 3


class DirectSettings(Value, frozen=True, tag="direct"):
    """What a Service may say of the way its packets are forwarded, unmodified, by gateways."""

    drain_timeout_s: float | None = None
    """The time for which a node keeps connections after it has ceased to get new ones; 0: as long
    as it can. None: as the gateway is configured."""


class ProxySettings(Value, frozen=True, tag="proxy"):
    """What a Service may say of the way its connections are passed on, where they end at the
    balancer. Times of 0: no limit, but for `inspect_ms`, where it is none to wait."""

    header: ProxyHeader = ""
    forwarded_for: bool = False
    """Speak HTTP, and add X-Forwarded-For to each request."""
    method: ProxyMethod = "roundrobin"
    client_ms: int = 3_600_000
    """So long a client may be silent."""
    connect_ms: int = 2000
    member_ms: int = 3_600_000
    inspect_ms: int = 0
    connection_limit: int = 0
    """Open connections of one listener; more of them wait. 0: no limit."""
    checks: MemberChecks | None = None
    shared: bool = False
    """Other Services, of whatever class, may have ports of their own at its addresses."""
    drain_timeout_s: float | None = None
    """As in DirectSettings."""


Provider = Literal["amphora", "ovn"]
"""Who carries out what Octavia is told: a virtual machine with HAProxy, or OVN itself."""
OctaviaMethod = Literal["ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", "SOURCE_IP_PORT"]
OctaviaAsking = Literal["HTTP", "TCP", "UDP-CONNECT"]


class OctaviaChecks(Value, frozen=True):
    """How Octavia asks members. `rise` and `fall`: so many answers, or failures, in a row make a
    difference."""

    delay_s: int = 5
    timeout_s: int = 3
    rise: int = 1
    fall: int = 3


class OctaviaPlace(Value, frozen=True):
    """Where a load balancer is made; of one that is there none of this changes. `address`: the one
    that it asks for."""

    subnet_id: str = ""
    network_id: str = ""
    port_id: str = ""
    address: str = ""
    flavor_id: str = ""
    availability_zone: str = ""
    subnet_id_v6: str = ""
    """Where it has a second address, of IPv6; then `subnet_id` is of IPv4."""
    address_v6: str = ""


class ExistingLoadBalancer(Value, frozen=True):
    """The load balancer that the Service of this uid has at the cloud, as the driver saw it last.
    Its provider and its own addresses never change."""

    uid: str
    provider: Provider | None
    """None: a provider that Fairlead does not know."""
    addresses: tuple[str, ...] = ()
    """Its own addresses; the first is that of its VIP port."""
    floating: tuple[str, ...] = ()
    """The floating IPs that lead to it, whoever made them."""
    shared: bool = False
    """The Service only has listeners on it: the load balancer was made for another one."""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of its own addresses. Octavia adds none to an existing load balancer."""
        found: dict[Family, None] = {
            "IPv6" if ":" in each else "IPv4": None for each in self.addresses if each
        }
        return tuple(found) or ("IPv4",)


class SharedOrAdopted(Value, frozen=True):
    """A load balancer that Fairlead did not make for the Service. `id`: the load balancer that the
    Service names; the Service shares it with others. `names`: the names that
    cloud-provider-openstack may have given to the load balancer that it made for the Service and
    that Fairlead adopts; without names nothing is adopted."""

    id: str = ""
    names: tuple[str, ...] = ()


class FloatingWish(Value, frozen=True):
    """A floating IP, by which a load balancer is reached from outside. `network_id`: where it is
    had. `address`: the one that is asked for by name. `again`: one that is taken if it is free.
    `keep`: it stays in the project when the Service goes.

    Of which subnet of the network a new one is: that of `subnet_id`; or one whose name `subnet`
    describes, or whose tags `subnet_tags` do, as OCCM's annotations of these names; or any."""

    network_id: str
    address: str = ""
    again: str = ""
    keep: bool = False
    subnet_id: str = ""
    subnet: str = ""
    subnet_tags: str = ""


class OctaviaSettings(Value, frozen=True, tag="octavia"):
    """What Octavia is to do for a Service, and by which provider. Times of None: as the cloud has
    it."""

    provider: Provider
    why: str = ""
    """Why this provider; for whoever asks."""
    existing: ExistingLoadBalancer | None = None
    """The load balancer that was known when this was planned."""
    held: tuple[str, ...] = ()
    """The addresses that the Service shows. A load balancer that is made asks for them again."""
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
    asking: tuple[tuple[Protocol, OctaviaAsking], ...] = ()
    """How members are asked, by the protocol of the port; those of other protocols are not."""
    member_subnet_id: str = ""
    elsewhere: SharedOrAdopted | None = None
    node_selector: str = ""
    """Labels that members must have."""
    all_nodes: tuple[Protocol, ...] = ()
    """Of listeners of these protocols all nodes are members, and not only those with ready pods."""
    floating: FloatingWish | None = None
    """None: it is reached by its own address alone."""
    secured: bool = False
    """Nodes let in who is to reach them through it, by a security group."""


Settings = DirectSettings | ProxySettings | OctaviaSettings
"""What is of one kind of load balancer alone. Drivers choose by its type what they serve."""


class LoadBalancer(Value, frozen=True):
    """All that one Service should get from a load balancer. Listeners are sorted by (family, port,
    protocol)."""

    service: ServiceKey
    uid: str
    class_name: str
    addresses: tuple[str, ...]
    """Where it listens, in the order of the Service's families."""
    listeners: tuple[Listener, ...]
    health_monitor: HealthMonitor | None = None
    affinity_timeout_s: int = 0
    """0: no affinity. Otherwise connections of one client address go to one member
    (sessionAffinity: ClientIP)."""
    source_ranges: tuple[str, ...] = ()
    """CIDRs that may connect; empty: everybody."""
    ip_mode: IPMode = "VIP"
    """The hairpin contract (KEP-1860): with VIP a node may answer for the addresses itself, with
    Proxy traffic from inside the cluster must go out through the balancer."""
    settings: Settings = DirectSettings()
    """With OctaviaSettings `addresses` are those of the load balancer that exists; before that,
    those that the Service shows."""
    hostname_suffix: str = ""
    """Publish the addresses as hostnames that end so, and nothing else: what has no address nobody
    answers for inside the cluster, also where ip_mode is not understood. Empty: publish
    addresses."""
    hostname: str = ""
    """Publish this name, and no address. Empty: as said before."""
    notes: tuple[Finding, ...] = ()
    unserved_ports: tuple[UnservedPort, ...] = ()
    grants: tuple[Grant, ...] = ()
    """By what the addresses are held, in their order. Of the controller's plan only."""

    def listening(self, listener: Listener) -> tuple[str, ...]:
        """The addresses that a listener of its takes traffic on: those of its family."""
        return tuple(
            address for address in self.addresses if (":" in address) == (listener.family == "IPv6")
        )


class Backend(Value, frozen=True):
    """A pod address and port that answers for a Service port. `local`: it is on this node, or may
    be: nobody says where."""

    address: str
    port: int
    local: bool = False


class NodeServicePort(Value, frozen=True):
    """One port of a Service, for one address family, as one node must serve it."""

    family: Family
    protocol: Protocol
    port: int
    name: str
    cluster_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    """Ingress addresses with ipMode VIP: the node itself answers for them. Those with ipMode Proxy
    are not here."""
    external_ips: tuple[str, ...]
    node_port: int
    """0: none."""
    cluster_backends: tuple[Backend, ...]
    """Who gets traffic that may go anywhere: the ready ones, or else those serving and terminating
    (KEP-1669)."""
    local_backends: tuple[Backend, ...]
    """Who gets traffic that must stay on this node: the same choice, made among this node's
    endpoints alone."""
    serving_backends: tuple[Backend, ...] = ()
    """All that serve, whether they get new traffic or not: flows to any other are stale. Of UDP and
    SCTP; what TCP has open ends by itself."""


class HealthCheck(Value, frozen=True):
    """The healthCheckNodePort of a Service with policy Local, and how many *ready* endpoints this
    node has for it."""

    port: int
    local_endpoints: int


class NodeService(Value, frozen=True):
    """All that one node does for one Service. Ports are sorted by (family, protocol, port)."""

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
"""`waiting`: on its way, nobody has to do anything. `refused`: somebody must change something.
`unavailable`: tried again."""


class Outcome(Value, frozen=True):
    """What became of one Service in one driver. `message` is for the user; empty when all is well.
    `reason`: that of the Event, where the driver knows a better one than its role. `again_s`: when
    to look again at the earliest; of one that is done, when there will be something to do.
    `in_part`: of one that is not done: the driver serves the Service all the same, in part or as it
    was before. Only a Service that is not served at all is withheld from the drivers that follow.
    `missing`: the listeners (`address:port/protocol`) that the driver should serve and does not.
    `coarse`: of one that is unavailable; everything is served, but not as exactly as the Service
    asks for. `notes`: what happened to the Service in this pass, each to be told once."""

    state: OutcomeState
    message: str = ""
    reason: str = ""
    again_s: float = 0.0
    in_part: bool = False
    missing: tuple[str, ...] = ()
    coarse: bool = False
    notes: tuple[Finding, ...] = ()

    def joined(self, later: Self) -> Self:
        """The outcome in two drivers of one chain, of which `later` is the second. It is tried
        again if either driver asks for that, and served in part only if both say so."""
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
