"""A load balancer of Octavia with all that hangs on it, as it should be and as it was found.

Octavia's tree: a load balancer has listeners, each with its default pool, which has members and a monitor that asks them.
Invariant: values are normalised as the API normalises them (CIDRs, the one way of writing an IPv6 address), and sorted, so that
what was found can be compared with what was wanted.
"""

from typing import Literal

from fairlead.model import OctaviaPlace, Provider, ServiceKey, Value

Status = str
"""ACTIVE, ERROR, DELETED, or PENDING_ and what is being done."""
ACTIVE, ERROR, DELETED = "ACTIVE", "ERROR", "DELETED"

Explicit = Literal["timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect"]


class Member(Value, frozen=True):
    """A node. `monitor_port`: where it is asked, if not where it serves. `subnet_id`: where it is; empty: as Octavia finds."""

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
    """`affinity_s`: so long a client stays with a member; 0: as long as the provider sees fit; None: not at all."""

    protocol: str
    method: str
    members: tuple[Member, ...] = ()
    monitor: Monitor | None = None
    affinity_s: int | None = None


class Listener(Value, frozen=True):
    """`timeouts`: those that were asked for, by their names; others are left to the cloud. `cidrs`: who may connect; none:
    everybody."""

    protocol: str
    port: int
    pool: Pool
    connection_limit: int = -1
    timeouts: tuple[tuple[Explicit, int], ...] = ()
    cidrs: tuple[str, ...] = ()
    forwarded_for: bool = False


class Tree(Value, frozen=True):
    """What one Service is to have. `addresses`: what it shows, to be had again. `why`: its provider, for whoever asks."""

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


class FoundMember(Value, frozen=True):
    id: str
    status: Status
    member: Member
    operating: str = ""


class FoundMonitor(Value, frozen=True):
    id: str
    status: Status
    monitor: Monitor


class FoundPool(Value, frozen=True):
    id: str
    status: Status
    name: str
    protocol: str
    method: str
    affinity_s: int | None = None
    members: tuple[FoundMember, ...] = ()
    monitor: FoundMonitor | None = None


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


class FoundTree(Value, frozen=True):
    """One load balancer with our mark. `pools` are those that carry it as well."""

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
    listeners: tuple[FoundListener, ...] = ()
    pools: tuple[FoundPool, ...] = ()


class Found(Value, frozen=True):
    """All load balancers of one Service; there should be one. `attempts`: how often one that had failed was repaired or made
    anew since it last worked."""

    trees: tuple[FoundTree, ...]
    attempts: int = 0


def pool_name(listener: Listener) -> str:
    """Unique within a load balancer, and another one for a pool that cannot be made of the one before."""
    return f"{listener.protocol}-{listener.port}-{listener.pool.protocol}"


def transport(protocol: str) -> str:
    """What a listener occupies a port of."""
    return protocol if protocol in ("UDP", "SCTP") else "TCP"


def provider_of(name: str) -> Provider | None:
    """A provider by any of its names; None for one that is neither."""
    if name in ("amphora", "octavia", "amphorav2"):
        return "amphora"
    return "ovn" if name == "ovn" else None
