"""The state that a role shows at `/state`: the values, and how `fairlead status` prints them.

- `state`: the state of each role, and its decoding.
- `part`: the base of all parts. A part is the type of what one component shows, with its tables.
- `traffic`: the eBPF data plane.
- `proxy`: HAProxy, for Services and for the API servers.
- `announce`: the announcement of addresses on layer 2.
- `bgp`: the announcement of addresses by BGP.
- `peers`: the exchange with other gateways.
- `probes`: the probes of nodes.
- `tunnel`: the node's end of the tunnels.
- `octavia`: the load balancers in OpenStack."""

from fairlead.role_state.announce import AnnouncedAddress, AnnounceState
from fairlead.role_state.bgp import BgpSessionState, BgpState
from fairlead.role_state.octavia import LoadBalancerHealth, MemberHealth, OctaviaState
from fairlead.role_state.part import Part, Table, listed
from fairlead.role_state.peers import PeersState, PeerState
from fairlead.role_state.probes import ProbedNode, ProbesState
from fairlead.role_state.proxy import (
    ApiServersState,
    ApiServerState,
    ProxiedTraffic,
    ProxyState,
    WorkerState,
)
from fairlead.role_state.state import (
    PART_FIELDS,
    STATES,
    VERSION,
    ApiServerContact,
    ControllerState,
    GatewayState,
    NodeState,
    Role,
    RoleState,
    ServiceState,
    StateOfAnyRole,
    WatchState,
    decode,
    parts_of,
)
from fairlead.role_state.traffic import (
    DrainState,
    InterfaceState,
    ListenerTraffic,
    NodeTraffic,
    ResourceState,
    ServiceTraffic,
    TrafficState,
)
from fairlead.role_state.tunnel import TunnelState

__all__ = [
    "PART_FIELDS",
    "STATES",
    "VERSION",
    "AnnounceState",
    "AnnouncedAddress",
    "ApiServerContact",
    "ApiServerState",
    "ApiServersState",
    "BgpSessionState",
    "BgpState",
    "ControllerState",
    "DrainState",
    "GatewayState",
    "InterfaceState",
    "ListenerTraffic",
    "LoadBalancerHealth",
    "MemberHealth",
    "NodeState",
    "NodeTraffic",
    "OctaviaState",
    "Part",
    "PeerState",
    "PeersState",
    "ProbedNode",
    "ProbesState",
    "ProxiedTraffic",
    "ProxyState",
    "ResourceState",
    "Role",
    "RoleState",
    "ServiceState",
    "ServiceTraffic",
    "StateOfAnyRole",
    "Table",
    "TrafficState",
    "TunnelState",
    "WatchState",
    "WorkerState",
    "decode",
    "listed",
    "parts_of",
]
