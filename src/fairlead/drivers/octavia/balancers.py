"""A load balancer of Octavia with all that hangs on it, as it should be and as it was found.

Octavia's tree: a load balancer has listeners, each with its default pool, which has members and a
monitor that asks them. Invariant: values are normalised as the API normalises them (CIDRs, the one
way of writing an IPv6 address), and sorted, so that what was found can be compared with what was
wanted."""

from typing import Literal

from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    FloatingWish,
    OctaviaPlace,
    Provider,
    ServiceKey,
    SharedOrAdopted,
    Value,
)

Status = str
"""ACTIVE, ERROR, DELETED, or PENDING_ and what is being done."""
ACTIVE, ERROR, DELETED = "ACTIVE", "ERROR", "DELETED"

Explicit = Literal[
    "timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect"
]


class Member(Value, frozen=True):
    """A node. `monitor_port`: where it is asked, if not where it serves. `subnet_id`: where it is;
    empty: as Octavia finds."""

    address: str
    port: int
    weight: int = 1
    monitor_port: int | None = None
    subnet_id: str = ""


class Monitor(Value, frozen=True):
    """How members are asked; times in seconds. `path`: of HTTP alone, where 200 is yes."""

    type: str
    delay_s: int
    timeout_s: int
    max_retries: int
    max_retries_down: int
    path: str = ""


class Pool(Value, frozen=True):
    """`affinity_s`: so long a client stays with a member; 0: as long as the provider sees fit;
    None: not at all."""

    protocol: str
    method: str
    members: tuple[Member, ...] = ()
    monitor: Monitor | None = None
    affinity_s: int | None = None


class Listener(Value, frozen=True):
    """`timeouts`: those that were asked for, by their names; others are left to the cloud. `cidrs`:
    who may connect; none: everybody."""

    protocol: str
    port: int
    pool: Pool
    connection_limit: int = -1
    timeouts: tuple[tuple[Explicit, int], ...] = ()
    cidrs: tuple[str, ...] = ()
    forwarded_for: bool = False


class Rule(Value, frozen=True):
    """Who may reach a port of nodes. `protocol`: in small letters. `source`: a CIDR; empty: the
    load balancer itself."""

    protocol: str
    port: int
    source: str = ""


class FoundRule(Value, frozen=True):
    id: str
    rule: Rule


class BalancerSpec(Value, frozen=True):
    """What one Service is to have. `addresses`: what it shows, to be had again. `why`: its
    provider, for whoever asks. `elsewhere`: the load balancer that it is to be on, if not on one
    made for it."""

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
    elsewhere: SharedOrAdopted | None = None
    existing: ExistingLoadBalancer | None = None
    """The load balancer that was known when this was planned."""
    floating: FloatingWish | None = None
    rules: tuple[Rule, ...] | None = None
    """None: security groups are left as they are."""
    families: tuple[Family, ...] = ("IPv4",)
    """Of its addresses."""
    network_marks: tuple[str, str] = ("", "")
    """The descriptions of what it has at Neutron: that goes with the Service, that is kept."""

    covering: tuple[str, ...] = ()
    """Tags that tell, on a monitor that is made now, for which floating IPs it asks members."""

    def network_mark(self, kept: bool) -> str:
        return self.network_marks[kept]

    @property
    def monitor_tags(self) -> tuple[str, ...]:
        """Of a new one."""
        return (*self.child_tags, *self.covering)


class FloatingIp(Value, frozen=True):
    """A floating IP that is there. `port_id`: whose it is; empty: nobody's. `service`: of which it
    carries the mark; None: it is not ours. `kept`: it carries the mark that it outlives the
    Service. `revision`: which state of it this is."""

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
    """`timeouts`: all of them, as they are."""

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
"""What a Service is to a load balancer that it is on: the one for whom it was made; one of several,
which has listeners on it; or it is to be the Service's own, and does not carry its mark yet."""


class PortInUse(Value, frozen=True):
    """A port of a load balancer on which somebody else listens."""

    protocol: str
    port: int
    holder: str


class BalancerState(Value, frozen=True):
    """What one Service has on one load balancer. `listeners` and `pools` are the Service's, by
    their marks. `others`: how many listeners are not; `taken`: those of them of which more is
    known."""

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
    """Those of `address`."""
    further: tuple[tuple[str, str], ...] = ()
    """Its other addresses, each with its subnet."""
    floating: tuple[FloatingIp, ...] = ()
    """Those that lead to it, whoever made them."""
    sources: tuple[str, ...] = ()
    """CIDRs from which it speaks to members itself."""
    listeners: tuple[FoundListener, ...] = ()
    pools: tuple[FoundPool, ...] = ()
    ownership: Ownership = "own"
    others: int = 0
    ports_in_use: tuple[PortInUse, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """All addresses by which it may be known."""
        return (*self.own, *(each.address for each in self.floating))

    @property
    def own(self) -> tuple[str, ...]:
        """Without floating IPs."""
        return (self.address, *(address for address, _ in self.further))

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(dict.fromkeys(family_of(address) for address in self.own if address))

    @property
    def is_pending(self) -> bool:
        """Octavia is working on it."""
        return self.status not in (ACTIVE, ERROR)


class Found(Value, frozen=True):
    """All load balancers of one Service; there should be one. `attempts`: how often one that had
    failed was repaired or made anew since it last worked. `located_for`: the shared or adopted load
    balancer that was last looked for; `located_id`: the id of the one that was found then; empty:
    there is none. `after`: the writes that were made right before this was read. `look_s`: while
    Octavia works on one of them, when to look again."""

    balancers: tuple[BalancerState, ...]
    attempts: int = 0
    located_for: SharedOrAdopted | None = None
    located_id: str = ""
    after: tuple[object, ...] = ()
    look_s: float = 1.0
    covers: bool = False
    """Monitors that provider ovn makes cover floating IPs that come later."""
    unattached_ips: tuple[FloatingIp, ...] = ()
    """Floating IPs with the mark of the Service that lead to none of these."""
    rules: tuple[FoundRule, ...] = ()
    """Of the Service."""
    secured_addresses: frozenset[str] = frozenset()
    """Addresses of nodes that have the cluster's security group."""
    idle: tuple[str, ...] = ()
    """Addresses of nodes that have it, and have not been members of any load balancer for long;
    told with one Service."""


class Candidate(Value, frozen=True):
    """A load balancer that a Service may come to be on, as it was found."""

    id: str
    name: str
    description: str
    tags: tuple[str, ...]
    provider: str
    address: str


def pool_name(listener: Listener) -> str:
    """Unique within a load balancer, and another one for a pool that cannot be made of the one
    before."""
    return f"{listener.protocol}-{listener.port}-{listener.pool.protocol}"


def family_of(address: str) -> Family:
    return "IPv6" if ":" in address else "IPv4"


def transport(protocol: str) -> str:
    """What a listener occupies a port of."""
    return protocol if protocol in ("UDP", "SCTP") else "TCP"


def provider_of(name: str) -> Provider | None:
    """A provider by any of its names; None for one that is neither."""
    if name in ("amphora", "octavia", "amphorav2"):
        return "amphora"
    return "ovn" if name == "ovn" else None
