"""The state that a role shows at `/state`, as frozen values.

In: the state of a role (`web`), to which each component adds one part. Out: JSON, which `fairlead
status`, checks and tests decode by `decode`. Each part has a type of its own: a field of this type
in the state of a role is where the part appears (`PART_FIELDS`). Pure.

Invariant: a reader never misinterprets a state. `VERSION` is raised when a field is removed, or
changes its name or meaning. A state of another version is rejected with an error that names the
version. A field that is only added has a default, so a state of the same version without it is
still valid. Unknown fields are ignored."""

from collections.abc import Mapping, Sequence
from typing import Generic, Literal, TypeVar, get_args

import msgspec

from fairlead.errors import Refused
from fairlead.mistakes import explain
from fairlead.model import Finding, LoadBalancer, NodeService, Outcome, Value
from fairlead.role_state.announce import AnnounceState
from fairlead.role_state.bgp import BgpState
from fairlead.role_state.octavia import OctaviaState
from fairlead.role_state.part import Part
from fairlead.role_state.peers import PeersState
from fairlead.role_state.probes import ProbesState
from fairlead.role_state.proxy import ApiServersState, ProxyState
from fairlead.role_state.traffic import TrafficState
from fairlead.role_state.tunnel import TunnelState

VERSION = 1

Role = Literal["controller", "gateway", "node"]
PlanT = TypeVar("PlanT", LoadBalancer, NodeService)


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


class GatewayState(StateOfAnyRole, frozen=True, kw_only=True, tag="gateway"):
    services: Mapping[str, ServiceState[LoadBalancer]] = {}
    proxy: ProxyState | None = None
    api_servers: ApiServersState | None = None
    traffic: TrafficState | None = None
    announce: AnnounceState | None = None
    bgp: BgpState | None = None
    probes: ProbesState | None = None
    peers: PeersState | None = None


class NodeState(StateOfAnyRole, frozen=True, kw_only=True, tag="node"):
    services: Mapping[str, ServiceState[NodeService]] = {}
    tunnel: TunnelState | None = None


RoleState = ControllerState | GatewayState | NodeState

STATES: Mapping[Role, type[RoleState]] = {
    "controller": ControllerState,
    "gateway": GatewayState,
    "node": NodeState,
}


def _part_fields() -> Mapping[type[Part], str]:
    return {
        kind: field.name
        for state in STATES.values()
        for field in msgspec.structs.fields(state)
        for kind in get_args(field.type)
        if isinstance(kind, type) and issubclass(kind, Part)
    }


PART_FIELDS = _part_fields()
"""The field of a role's state that contains each part."""


def parts_of(state: RoleState) -> Sequence[Part]:
    """Return the parts that the state has, in the order of its fields."""
    values = (getattr(state, name) for name in state.__struct_fields__)
    return [each for each in values if isinstance(each, Part)]


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
            f"{attempt}: the answer is not the state of a role: {explain(error, _Header)}",
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
            f"{attempt}: {who} answered with a state that does not fit version {VERSION}: "
            f"{explain(error, RoleState)}",
            fix="run the `fairlead` of the same release as the role",
        ) from error
