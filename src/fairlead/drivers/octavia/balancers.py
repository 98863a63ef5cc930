"""A load balancer of Octavia with everything below it, as it should be and as it was read.

Octavia's tree: a load balancer has listeners, each with a default pool, which has members and a
health monitor. Invariant: values are normalized as the API normalizes them (CIDRs, the spelling of
an IPv6 address) and sorted, so that the actual and the desired state can be compared."""

from typing import Literal

from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    FloatingIpRequest,
    OctaviaPlace,
    Provider,
    ServiceKey,
    SharedOrAdopted,
    Value,
)

Status = str
"""A provisioning status: ACTIVE, ERROR, DELETED, or PENDING_ with the operation in progress."""
ACTIVE, ERROR, DELETED = "ACTIVE", "ERROR", "DELETED"

Explicit = Literal[
    "timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect"
]


class Member(Value, frozen=True):
    """A node as a member. `monitor_port`: the port for health checks, if it is not `port`.
    `subnet_id`: the subnet of the address; if empty, Octavia determines it."""

    address: str
    port: int
    weight: int = 1
    monitor_port: int | None = None
    subnet_id: str = ""


class Monitor(Value, frozen=True):
    """A health monitor; times in seconds. `path` is set for type HTTP only, where status 200 means
    healthy."""

    type: str
    delay_s: int
    timeout_s: int
    max_retries: int
    max_retries_down: int
    path: str = ""


class Pool(Value, frozen=True):
    """A pool. `affinity_s`: for how many seconds a client stays with a member; 0: the provider
    decides; None: no affinity."""

    protocol: str
    method: str
    members: tuple[Member, ...] = ()
    monitor: Monitor | None = None
    affinity_s: int | None = None


class Listener(Value, frozen=True):
    """A listener. `timeouts`: the time-outs that the Service sets, by their names in the API; the
    cloud's defaults apply to the others. `cidrs`: the sources that may connect; if empty, all."""

    protocol: str
    port: int
    pool: Pool
    connection_limit: int = -1
    timeouts: tuple[tuple[Explicit, int], ...] = ()
    cidrs: tuple[str, ...] = ()
    forwarded_for: bool = False


class Rule(Value, frozen=True):
    """A source that may reach a port of nodes. `protocol` is lower-case. `source`: a CIDR; if
    empty, the load balancer itself."""

    protocol: str
    port: int
    source: str = ""


class FoundRule(Value, frozen=True):
    id: str
    rule: Rule


class BalancerSpec(Value, frozen=True):
    """The desired state for one Service. `addresses`: the addresses that the Service shows, to be
    requested again. `why`: why the load balancer has this provider, for users. `shared_or_adopted`:
    the load balancer that the Service is to share or adopt; None: a load balancer is created for
    the Service."""

    service: ServiceKey
    uid: str
    provider: Provider
    name: str
    description: str
    tags: tuple[str, ...]
    child_tags: tuple[str, ...]
    place: OctaviaPlace
    listeners: tuple[Listener, ...]
    addresses: tuple[str, ...] = ()
    why: str = ""
    shared_or_adopted: SharedOrAdopted | None = None
    existing: ExistingLoadBalancer | None = None
    """The load balancer that was known when the Service was planned."""
    floating: FloatingIpRequest | None = None
    rules: tuple[Rule, ...] | None = None
    """None: security groups are not managed."""
    families: tuple[Family, ...] = ("IPv4",)
    """The families of the load balancer's addresses."""
    network_marks: tuple[str, str] = ("", "")
    """The descriptions of the Service's objects at Neutron: first of an object that is deleted with
    the Service, then of an object that is kept."""

    covering: tuple[str, ...] = ()
    """Tags for monitors that are created now: the floating IPs for which they check members."""

    def network_mark(self, kept: bool) -> str:
        return self.network_marks[kept]

    @property
    def monitor_tags(self) -> tuple[str, ...]:
        """The tags of a new monitor."""
        return (*self.child_tags, *self.covering)


class FloatingIp(Value, frozen=True):
    """An existing floating IP. `port_id`: the port to which it is attached; empty: none. `service`:
    the Service whose mark it carries; None: it is not Fairlead's. `kept`: according to its mark, it
    outlives the Service. `revision`: Neutron's revision number of this state."""

    id: str
    address: str
    network_id: str
    port_id: str = ""
    fixed_address: str = ""
    service: ServiceKey | None = None
    kept: bool = False
    description: str = ""
    revision: int = 0


class FoundMember(Value, frozen=True):
    id: str
    status: Status
    member: Member
    operating: str = ""


class FoundMonitor(Value, frozen=True):
    id: str
    status: Status
    monitor: Monitor
    tags: tuple[str, ...] = ()


class FoundPool(Value, frozen=True):
    id: str
    status: Status
    name: str
    protocol: str
    method: str
    affinity_s: int | None = None
    members: tuple[FoundMember, ...] = ()
    monitor: FoundMonitor | None = None
    tags: tuple[str, ...] = ()


class FoundListener(Value, frozen=True):
    """An existing listener. `timeouts`: the actual values of all time-outs."""

    id: str
    status: Status
    protocol: str
    port: int
    pool_id: str = ""
    connection_limit: int = -1
    timeouts: tuple[tuple[str, int], ...] = ()
    cidrs: tuple[str, ...] = ()
    forwarded_for: bool = False
    tags: tuple[str, ...] = ()


Ownership = Literal["own", "guest", "foreign"]
"""The relation of a Service to a load balancer that it is on: `own` (the load balancer was made for
it), `guest` (the Service has listeners on a shared load balancer), `foreign` (the load balancer is
being adopted and does not carry the Service's mark yet)."""


class PortInUse(Value, frozen=True):
    """A port of a load balancer that a listener of another holder occupies."""

    protocol: str
    port: int
    holder: str


class BalancerState(Value, frozen=True):
    """The state of one Service on one load balancer. `listeners` and `pools` are those of the
    Service, according to their marks. `others`: the number of other listeners; `ports_in_use`: the
    known ports of other listeners."""

    id: str
    service: ServiceKey
    uid: str
    status: Status
    provider: str
    address: str
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    created: str = ""
    operating: str = ""
    port_id: str = ""
    subnet_id: str = ""
    """The port and the subnet of `address`."""
    further: tuple[tuple[str, str], ...] = ()
    """The load balancer's further addresses, each with its subnet."""
    floating: tuple[FloatingIp, ...] = ()
    """The floating IPs that are attached to it, also if Fairlead did not create them."""
    sources: tuple[str, ...] = ()
    """CIDRs from which the load balancer itself connects to members."""
    listeners: tuple[FoundListener, ...] = ()
    pools: tuple[FoundPool, ...] = ()
    ownership: Ownership = "own"
    others: int = 0
    ports_in_use: tuple[PortInUse, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """All addresses of the load balancer, with floating IPs."""
        return (*self.own, *(each.address for each in self.floating))

    @property
    def own(self) -> tuple[str, ...]:
        """The addresses of the load balancer without floating IPs."""
        return (self.address, *(address for address, _ in self.further))

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(dict.fromkeys(family_of(address) for address in self.own if address))

    @property
    def is_pending(self) -> bool:
        """True while Octavia is working on the load balancer."""
        return self.status not in (ACTIVE, ERROR)


class Found(Value, frozen=True):
    """Everything that was read for one Service. `balancers`: all load balancers of the Service;
    there should be one. `attempts`: how often a failed load balancer was repaired or recreated
    since it last worked. `located_for`: the shared or adopted load balancer that was last searched
    for; `located_id`: the id of the result; empty: none was found. `after`: the writes that were
    made immediately before this state was read. `poll_s`: while Octavia works on a load balancer,
    the seconds until the next poll."""

    balancers: tuple[BalancerState, ...]
    attempts: int = 0
    located_for: SharedOrAdopted | None = None
    located_id: str = ""
    after: tuple[object, ...] = ()
    poll_s: float = 1.0
    covers: bool = False
    """True if monitors that provider ovn creates also check members for floating IPs that are
    attached later."""
    unattached_ips: tuple[FloatingIp, ...] = ()
    """Floating IPs with the mark of the Service that are attached to no port."""
    rules: tuple[FoundRule, ...] = ()
    """The security group rules of the Service."""
    secured_addresses: frozenset[str] = frozenset()
    """Addresses of the nodes whose ports have the cluster's security group."""
    idle: tuple[str, ...] = ()
    """Addresses of nodes that have the group and have not been members of any load balancer for a
    long time. The list is part of the state of only one Service."""


class Candidate(Value, frozen=True):
    """A load balancer that a Service may share or adopt, as it was read."""

    id: str
    name: str
    description: str
    tags: tuple[str, ...]
    provider: str
    address: str


def pool_name(listener: Listener) -> str:
    """Return the name of a listener's pool. The name is unique within a load balancer, and it
    changes with the protocol of the pool, because such a change needs a new pool."""
    return f"{listener.protocol}-{listener.port}-{listener.pool.protocol}"


def family_of(address: str) -> Family:
    return "IPv6" if ":" in address else "IPv4"


def transport(protocol: str) -> str:
    """Return the transport protocol whose port a listener of this protocol occupies."""
    return protocol if protocol in ("UDP", "SCTP") else "TCP"


def provider_of(name: str) -> Provider | None:
    """Return the provider with this name, which may be an alias; None if it is unsupported."""
    if name in ("amphora", "octavia", "amphorav2"):
        return "amphora"
    return "ovn" if name == "ovn" else None
