"""What a role shows of itself at `/state`, as frozen values.

In: a role's own account (`web`), to which each component adds one part. Out: JSON, which
`fairlead status`, checks and tests decode by `decode`. Every part is a type of its own, and
`PART_FIELDS` names the field in which it stands. Pure.

Invariant: a reader never misreads. `VERSION` rises when a field goes, or changes its name or
meaning; an answer of another version is refused, by name. A field that is only added has a default,
so that an answer of the same version that lacks it is still read; fields that are not known are
passed over."""

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

import msgspec

from fairlead.errors import Refused
from fairlead.model import Finding, LoadBalancer, NodeService, Outcome, Value, Verdict

VERSION = 1

Role = Literal["controller", "gateway", "node"]
PlanT = TypeVar("PlanT", LoadBalancer, NodeService)


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
    """How much of a resource is used, and how much of it there is."""

    used: int
    most: int


class DrainState(Value, frozen=True):
    """A node that keeps connections of a listener (`address:port/protocol`) for `left_s` seconds
    more, and gets no new ones."""

    service: str
    listener: str
    node: str
    left_s: float


class InterfaceState(Value, frozen=True):
    """How packets are taken at an interface, and why in this way."""

    name: str
    attach: str
    why: str


class TrafficState(Value, frozen=True):
    """The part of the eBPF data plane. `untracked`: new flows without a flow entry, because the limit
    of new entries was reached. `unsent`: new entries that were not sent to peers, because they were
    made too fast."""

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
    """What HAProxy has counted of one Service. `open`: connections now. `refused`: clients that no
    source range admits. `failed`: connections to members that were not taken."""

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    failed: int = 0


class WorkerState(Value, frozen=True):
    """HAProxy's worker process: how many connections it has, and can have; all 0 if none runs."""

    pid: int = 0
    connections: int = 0
    limit: int = 0


class ProxyState(Value, frozen=True):
    """The part of the HAProxy that serves Services."""

    services: Mapping[str, ProxiedTraffic] = {}
    worker: WorkerState = WorkerState()


class ApiServerState(Value, frozen=True):
    """What HAProxy finds of one API server. `state`: ready, not ready, down. `open`: connections
    now; `connections`: all so far, of the worker that runs."""

    state: str
    open: int = 0
    connections: int = 0


class ApiServersState(Value, frozen=True):
    """The part of the API server's own balancer: the addresses where it takes connections, and the
    API servers behind it, by `address:port`."""

    addresses: tuple[str, ...] = ()
    servers: Mapping[str, ApiServerState] = {}


class PeerState(Value, frozen=True):
    """Another gateway. `problem`: why this one is not connected to it; empty where it is."""

    address: str
    connected: bool
    problem: str = ""


class PeersState(Value, frozen=True):
    """The part of the exchange with other gateways. `followers`: how many follow this one."""

    gateways: tuple[PeerState, ...] = ()
    followers: int = 0


class ProbedNode(Value, frozen=True):
    """A path by which a node is probed, and the verdict. `node` is empty while the API does not
    show a node of this address."""

    node: str
    address: str
    way: str
    verdict: Verdict


class ProbesState(Value, frozen=True):
    """The part of the probes of nodes."""

    nodes: tuple[ProbedNode, ...] = ()


class TunnelState(Value, frozen=True):
    """The part of a node's end of the tunnels. `packets`: by what became of them."""

    kind: str
    packets: Mapping[str, int] = {}


class MemberHealth(Value, frozen=True):
    """A member of an Octavia load balancer. `asked`: whether a health monitor asks it."""

    address: str
    port: int
    weight: int
    operating: str
    asked: bool


class LoadBalancerHealth(Value, frozen=True):
    """One load balancer by Octavia's account, seen `seen_s_ago` seconds before. `members`: by
    listener, `TCP/80`. `doubts`: where pods are ready and Octavia says otherwise."""

    service: str
    id: str
    provider: str
    address: str
    operating: str
    members: Mapping[str, tuple[MemberHealth, ...]]
    doubts: tuple[str, ...]
    seen_s_ago: float


class OctaviaState(Value, frozen=True):
    """The part of the load balancers at OpenStack."""

    load_balancers: tuple[LoadBalancerHealth, ...] = ()


Part = (
    TrafficState
    | ProxyState
    | ApiServersState
    | PeersState
    | ProbesState
    | TunnelState
    | OctaviaState
)
"""What one component shows of itself."""

PART_FIELDS: Mapping[type[Part], str] = {
    TrafficState: "traffic",
    ProxyState: "proxy",
    ApiServersState: "api_servers",
    PeersState: "peers",
    ProbesState: "probes",
    TunnelState: "tunnel",
    OctaviaState: "octavia",
}
"""The field of a role's state in which each part stands."""


class ServiceState(Value, Generic[PlanT], frozen=True):
    """A Service: what was planned for it, None if nothing is, and what became of that."""

    plan: PlanT | None
    outcome: Outcome | None


class WatchState(Value, frozen=True):
    """How long ago a watch was last proved to be current."""

    age_s: float
    stale: bool


class ApiServerContact(Value, frozen=True):
    """How long ago the API server last answered."""

    answered_s_ago: float


class StateOfAnyRole(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """What every role shows. `node`: the host's name in the cluster; empty for a controller.
    `host`: what is wrong with the host itself. `current`: no watch is stale."""

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


class GatewayState(StateOfAnyRole, frozen=True, kw_only=True, tag="gateway"):
    services: Mapping[str, ServiceState[LoadBalancer]] = {}
    traffic: TrafficState | None = None
    proxy: ProxyState | None = None
    api_servers: ApiServersState | None = None
    peers: PeersState | None = None
    probes: ProbesState | None = None


class NodeState(StateOfAnyRole, frozen=True, kw_only=True, tag="node"):
    services: Mapping[str, ServiceState[NodeService]] = {}
    tunnel: TunnelState | None = None


RoleState = ControllerState | GatewayState | NodeState

STATES: Mapping[Role, type[RoleState]] = {
    "controller": ControllerState,
    "gateway": GatewayState,
    "node": NodeState,
}


class _Header(msgspec.Struct):
    """Read before the rest, so that an answer of another version is named as such."""

    version: int = 0
    role: str = ""
    node: str = ""


_headers = msgspec.json.Decoder(_Header)
_states: msgspec.json.Decoder[RoleState] = msgspec.json.Decoder(RoleState)


def decode(body: bytes, attempt: str) -> RoleState:
    """The state in an answer. `attempt`: how it was asked for, for messages. Raises Refused if it
    is not a role's state, or is one of another version than this program reads."""
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
