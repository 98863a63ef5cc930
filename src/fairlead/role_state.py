"""The state that a role shows at `/state`, as frozen values.

In: the state of a role (`web`), to which each component adds one part. Out: JSON, which `fairlead
status`, checks and tests decode by `decode`. Each part has a type of its own, and `PART_FIELDS`
names its field. Pure.

Invariant: a reader never misinterprets a state. `VERSION` is raised when a field is removed, or
changes its name or meaning. A state of another version is rejected with an error that names the
version. A field that is only added has a default, so a state of the same version without it is
still valid. Unknown fields are ignored."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar

import msgspec

from fairlead.errors import Refused
from fairlead.model import Finding, LoadBalancer, NodeService, Outcome, Value, Verdict

VERSION = 1

Role = Literal["controller", "gateway", "node"]
PlanT = TypeVar("PlanT", LoadBalancer, NodeService)


def timestamp(moment: datetime) -> str:
    """Return a time as RFC 3339 text in UTC, in whole seconds, as the Kubernetes API writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ServiceTraffic(Value, frozen=True):
    """The traffic of all listeners of a Service. `flows`: new TCP and SCTP connections, and new UDP
    flows. `drops`: dropped packets by reason; only reasons that occurred."""

    packets: int
    bytes: int
    flows: int
    drops: Mapping[str, int]


class NodeTraffic(Value, frozen=True):
    """The traffic that was sent to a node. `forwarding` and `next_hops`: the forwarding methods and
    the addresses of the next hops, at most one for each address family. `returned`: packets that
    came back to this gateway after they had been sent to this node."""

    forwarding: tuple[str, ...]
    next_hops: tuple[str, ...]
    packets: int
    bytes: int
    flows: int
    returned: int = 0


class ResourceState(Value, frozen=True):
    """The usage of a resource, and its limit."""

    used: int
    limit: int


class DrainState(Value, frozen=True):
    """A node that keeps its connections of a listener (`address:port/protocol`) for another
    `left_s` seconds and gets no new connections."""

    service: str
    listener: str
    node: str
    left_s: float


class InterfaceState(Value, frozen=True):
    """The hook at which the data plane is attached to an interface, and the reason."""

    name: str
    attach: str
    why: str


class TrafficState(Value, frozen=True):
    """The part of `/state` about the eBPF data plane. `untracked`: new flows without a flow entry,
    because the rate limit was reached. `unsent`: new entries that were not sent to peers, because
    there were too many in a short time."""

    services: Mapping[str, ServiceTraffic] = {}
    nodes: Mapping[str, NodeTraffic] = {}
    drops: Mapping[str, int] = {}
    messages: Mapping[str, int] = {}
    untracked: int = 0
    unsent: int = 0
    resources: Mapping[str, ResourceState] = {}
    draining: tuple[DrainState, ...] = ()
    interfaces: tuple[InterfaceState, ...] = ()


class ProxiedTraffic(Value, frozen=True):
    """The counters of HAProxy for one Service. `open`: open connections. `refused`: clients outside
    of the source ranges. `failed`: connections that no member accepted."""

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    failed: int = 0


class WorkerState(Value, frozen=True):
    """The worker process of HAProxy: its open connections, and their maximum. All values are 0 if
    no worker runs."""

    pid: int = 0
    connections: int = 0
    limit: int = 0


class ProxyState(Value, frozen=True):
    """The part of `/state` about the HAProxy process that serves Services."""

    services: Mapping[str, ProxiedTraffic] = {}
    worker: WorkerState = WorkerState()


class ApiServerState(Value, frozen=True):
    """The state of one API server, as HAProxy sees it. `state`: ready, not ready, down. `open`:
    open connections. `connections`: the total of the present HAProxy worker."""

    state: str
    open: int = 0
    connections: int = 0


class ApiServersState(Value, frozen=True):
    """The part of `/state` about the load balancer for the API server: the addresses where it
    accepts connections, and the API servers behind it, by `address:port`."""

    addresses: tuple[str, ...] = ()
    servers: Mapping[str, ApiServerState] = {}


class PeerState(Value, frozen=True):
    """Another gateway. `problem`: why this gateway is not connected to it; empty if it is
    connected."""

    address: str
    connected: bool
    problem: str = ""


class PeersState(Value, frozen=True):
    """The part of `/state` about the exchange with other gateways. `followers`: the number of
    gateways that read the flow entries of this one. `findings`: why others cannot connect."""

    gateways: tuple[PeerState, ...] = ()
    followers: int = 0
    findings: tuple[Finding, ...] = ()


class ProbedNode(Value, frozen=True):
    """The verdict for one path by which a node is probed. `node`: empty if the API shows no node
    with this address."""

    node: str
    address: str
    path: str
    verdict: Verdict


class ProbesState(Value, frozen=True):
    """The part of `/state` about the probes of nodes."""

    nodes: tuple[ProbedNode, ...] = ()


class TunnelState(Value, frozen=True):
    """The part of `/state` about the node's end of the tunnels. `packets`: the number of packets by
    result."""

    kind: str
    packets: Mapping[str, int] = {}


class MemberHealth(Value, frozen=True):
    """A member of an Octavia load balancer. `operating`: its operating status. `monitored`: whether
    a health monitor checks it."""

    address: str
    port: int
    weight: int
    operating: str
    monitored: bool


class LoadBalancerHealth(Value, frozen=True):
    """One load balancer as Octavia showed it `seen_s_ago` seconds ago. `members`: the members by
    listener (`TCP/80`). `discrepancies`: messages about ready pods that Octavia reports as failed.
    """

    service: str
    id: str
    provider: str
    address: str
    operating: str
    members: Mapping[str, tuple[MemberHealth, ...]]
    discrepancies: tuple[str, ...]
    seen_s_ago: float


class OctaviaState(Value, frozen=True):
    """The part of `/state` about the load balancers in OpenStack."""

    load_balancers: tuple[LoadBalancerHealth, ...] = ()


class OvnDatabaseState(Value, frozen=True):
    """A database of OVN. `connected`: what the role shows of it is up to date. `stale_s`: for how
    many seconds it has not been. `problem`: why; empty before the first failure."""

    name: str
    connected: bool
    stale_s: float = 0.0
    problem: str = ""


class OvnLoadBalancer(Value, frozen=True):
    """A row of table Load_Balancer of OVN. `address`: address and port. `positions`: the number of
    positions of each backend in the list of backends. `draining`: the backends that only keep their
    connections. `attached`: the routers and switches that have the row. `installed`: whether every
    chassis has the row, as far as they have confirmed it. `removed`: the Service needs the row no
    longer, and it is deleted when the time for its open connections is over. `node`: the node whose
    pods the row has; empty: the row has the backends of all nodes."""

    service: str
    id: str
    address: str
    protocol: str
    positions: Mapping[str, int]
    draining: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    installed: bool = True
    removed: bool = False
    node: str = ""


class OvnState(Value, frozen=True):
    """The part of `/state` about load balancers in OVN. `router`: the router of the configuration;
    with topology `gateways`, the pattern of the names of the routers. `chassis_behind`: the chassis
    that have not confirmed the last change, as far as the southbound database is configured. While
    a database is not connected, everything is as of its last contact."""

    router: str
    databases: tuple[OvnDatabaseState, ...] = ()
    load_balancers: tuple[OvnLoadBalancer, ...] = ()
    chassis_behind: tuple[str, ...] = ()


class AnnouncedAddress(Value, frozen=True):
    """An address that this host announces. `services`: the Services that have the address, sorted.
    `interfaces`: method `l2`, the interfaces on which this host answers for the address. `peers`:
    method `bgp`, the peers to which the route is exported now, sorted; a peer whose session is down
    or whose router answers that it has no route is not among them. `since`: the time since which
    this host announces it without interruption.
    `cause`: why this host began to announce it, as the end of a sentence such as `because gw-2 is
    gone`; empty if no other host announced it before."""

    address: str
    services: tuple[str, ...] = ()
    since: str = ""
    interfaces: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cause: str = ""


MemberState = Literal["ready", "leaving", "stale", "gone"]
"""`ready`: it may own addresses. `leaving`: it hands its addresses over. `stale`: its kernel
answers, but its process has not confirmed that for a while. `gone`: it does not answer."""


class AnnouncerMember(Value, frozen=True):
    """Another announcer of the same network, as this host observes it on one interface. `since`:
    the time since which it has this state."""

    name: str
    interface: str
    state: MemberState
    since: str = ""


class AddressConflict(Value, frozen=True):
    """An address that a host outside of Fairlead claims too. `mac`: the MAC address of that host.
    `since`: when the claim was heard first; `seen`: when it was heard last."""

    address: str
    interface: str
    mac: str
    services: tuple[str, ...] = ()
    since: str = ""
    seen: str = ""


class L2State(Value, frozen=True):
    """The part of `/state` about the announcement of addresses by ARP and neighbor discovery.
    `interfaces`: where addresses are announced. `members`: without this host. `moves`: how often
    this process began to announce an address that another announcer had announced before. Times are
    RFC 3339 in UTC. Values change only when something has happened."""

    interfaces: tuple[str, ...] = ()
    addresses: tuple[AnnouncedAddress, ...] = ()
    members: tuple[AnnouncerMember, ...] = ()
    conflicts: tuple[AddressConflict, ...] = ()
    moves: int = 0
    findings: tuple[Finding, ...] = ()


BgpSessionState = Literal["established", "connecting", "down", "disabled"]
"""`connecting`: attempts to open the session go on. `down`: it was refused, or its neighbor is not
reachable."""
BfdState = Literal["", "up", "down"]


class BgpSession(Value, frozen=True):
    """A BGP session of this host. `peer`: the name of the peer in the configuration, or of its
    BGPPeer. `address`: of the neighbor, or the interface of an unnumbered session. `since`: the
    time since which it has this state. `last_error`: why the session was closed or refused last;
    it stays after the session is established again. `announced`: the number of exported prefixes;
    `accepted`: how many of them the neighbor has accepted, or None if the protocol does not tell.
    `bfd`: empty without BFD."""

    peer: str
    address: str
    state: BgpSessionState
    since: str = ""
    last_error: str = ""
    announced: int = 0
    accepted: int | None = None
    bfd: BfdState = ""


PEER_REFUSED = "PeerRefused"
"""The code of the Finding about a peer that cannot be used."""
PEER_SUBJECT = "BGPPeer "
"""The subject of such a Finding, before the name of the peer."""


class RouteCheck(Value, frozen=True):
    """The route of an announced address that a directly connected router is not known to have.
    `state`: `refused` if the router answers that it has no route, `missing` if the router brings
    back packets to other addresses but not to this one, `unknown` if nothing shows that it has a
    route, `unchecked` if no probes are sent; then `address` is empty. `since`: the time since
    which this is so."""

    peer: str
    address: str
    state: Literal["refused", "missing", "unknown", "unchecked"]
    since: str
    reason: str


class BgpState(Value, frozen=True):
    """The part of `/state` about the announcement of addresses by BGP. `speaker`: `bird`, or
    `routes` if another routing daemon of the host has the sessions, which are then unknown.
    `sessions`: sorted by peer. `problem`: why the speaker does not work; empty if it works.
    `routes`: the routes that routers are not known to have, as far as they are checked. Times are
    RFC 3339 in UTC. Values change only when something has happened."""

    speaker: str = "bird"
    addresses: tuple[AnnouncedAddress, ...] = ()
    sessions: tuple[BgpSession, ...] = ()
    problem: str = ""
    findings: tuple[Finding, ...] = ()
    routes: tuple[RouteCheck, ...] = ()


Part = (
    TrafficState
    | ProxyState
    | ApiServersState
    | PeersState
    | ProbesState
    | TunnelState
    | OctaviaState
    | OvnState
    | L2State
    | BgpState
)
"""The part of `/state` that one component provides."""

PART_FIELDS: Mapping[type[Part], str] = {
    TrafficState: "traffic",
    ProxyState: "proxy",
    ApiServersState: "api_servers",
    PeersState: "peers",
    ProbesState: "probes",
    TunnelState: "tunnel",
    OctaviaState: "octavia",
    OvnState: "ovn",
    L2State: "l2",
    BgpState: "bgp",
}
"""The field of a role's state that contains each part."""


class ServiceState(Value, Generic[PlanT], frozen=True):
    """A Service: its plan, or None if there is none, and the outcome."""

    plan: PlanT | None
    outcome: Outcome | None


class WatchState(Value, frozen=True):
    """The time since a watch was last proved to be current."""

    age_s: float
    stale: bool


class ApiServerContact(Value, frozen=True):
    """The time since the last answer of the API server."""

    answered_s_ago: float


class StateOfAnyRole(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """The fields of every role. `node`: the name of the host in the cluster; empty for a
    controller. `host`: problems with the settings of the host. `current`: no watch is stale."""

    version: int
    node: str
    ready: bool
    host: tuple[Finding, ...] = ()
    current: bool = True
    api_server: ApiServerContact | None = None
    watches: Mapping[str, WatchState] = {}


class ControllerState(StateOfAnyRole, frozen=True, kw_only=True, tag="controller"):
    services: Mapping[str, ServiceState[LoadBalancer]] = {}
    octavia: OctaviaState | None = None
    ovn: OvnState | None = None


class GatewayState(StateOfAnyRole, frozen=True, kw_only=True, tag="gateway"):
    services: Mapping[str, ServiceState[LoadBalancer]] = {}
    traffic: TrafficState | None = None
    proxy: ProxyState | None = None
    api_servers: ApiServersState | None = None
    peers: PeersState | None = None
    probes: ProbesState | None = None
    l2: L2State | None = None
    bgp: BgpState | None = None


class NodeState(StateOfAnyRole, frozen=True, kw_only=True, tag="node"):
    services: Mapping[str, ServiceState[NodeService]] = {}
    tunnel: TunnelState | None = None
    l2: L2State | None = None
    bgp: BgpState | None = None


RoleState = ControllerState | GatewayState | NodeState

STATES: Mapping[Role, type[RoleState]] = {
    "controller": ControllerState,
    "gateway": GatewayState,
    "node": NodeState,
}


class _Header(msgspec.Struct):
    """The fields that are decoded first, so that the error about another version can name that
    version."""

    version: int = 0
    role: str = ""
    node: str = ""


_headers = msgspec.json.Decoder(_Header)
_states: msgspec.json.Decoder[RoleState] = msgspec.json.Decoder(RoleState)


def decode(body: bytes, attempt: str) -> RoleState:
    """Return the state in an answer. `attempt`: a description of the request, for messages. Raise
    Refused if the answer is not the state of a role, or has another version than this program
    supports."""
    try:
        header = _headers.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(
            f"{attempt}: the answer is not the state of a role: {error}",
            fix="does another program listen there?",
        ) from error
    who = " ".join(filter(None, (header.role, header.node))) or "a role without a name"
    if header.version != VERSION:
        raise Refused(
            f"{attempt}: {who} answered with version {header.version} of its state, and version "
            f"{VERSION} was expected",
            fix="run the `fairlead` of the same release as the role",
        )
    try:
        return _states.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(
            f"{attempt}: {who} answered with a state that does not fit version {VERSION}: {error}",
            fix="run the `fairlead` of the same release as the role",
        ) from error
