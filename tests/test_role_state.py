"""The states of roles: each state is decoded to an equal value. A response that could be
misinterpreted is refused with an error that names its role."""

from typing import Any

import msgspec
import pytest

from fairlead.drivers import Component
from fairlead.errors import Refused
from fairlead.model import (
    Backend,
    Finding,
    HealthCheck,
    Listener,
    LoadBalancer,
    Member,
    NodeService,
    NodeServicePort,
    Outcome,
    ProxySettings,
    ServiceKey,
    UnservedPort,
)
from fairlead.role_state import (
    PART_FIELDS,
    STATES,
    VERSION,
    AnnouncedAddress,
    AnnounceState,
    ApiServerContact,
    ApiServersState,
    ApiServerState,
    BgpSessionState,
    BgpState,
    ControllerState,
    DrainState,
    GatewayState,
    InterfaceState,
    ListenerTraffic,
    LoadBalancerHealth,
    MemberHealth,
    NodeState,
    NodeTraffic,
    OctaviaState,
    Part,
    PeersState,
    PeerState,
    ProbedNode,
    ProbesState,
    ProxiedTraffic,
    ProxyState,
    ResourceState,
    RoleState,
    ServiceState,
    ServiceTraffic,
    Table,
    TrafficState,
    TunnelState,
    WatchState,
    WorkerState,
    decode,
    parts_of,
)
from fairlead.web import View

KEY = ServiceKey("default", "web")
NO_ENDPOINT = Finding(
    "NoReadyEndpoints", "it has no endpoint", "error", blocks="Ready", at_start=True
)
BALANCER = LoadBalancer(
    KEY,
    "uid",
    "fairlead.io/proxy",
    ("203.0.113.1", "2001:db8::1"),
    (Listener("IPv4", 80, "TCP", "Local", 30080, (Member("node1", "192.0.2.21", 2),)),),
    settings=ProxySettings(header="v2"),
    notes=(NO_ENDPOINT,),
    unserved_ports=(UnservedPort(53, "UDP", "fairlead.io/ProtocolNotSupported"),),
)
NODE_SERVICE = NodeService(
    KEY,
    "uid",
    "Cluster",
    "Local",
    (
        NodeServicePort(
            "IPv4",
            "TCP",
            80,
            "http",
            ("10.96.0.1",),
            ("203.0.113.1",),
            (),
            30080,
            (Backend("10.244.0.5", 8080, local=True),),
            (),
        ),
    ),
    health_check=HealthCheck(30090, 1),
)
HARMFUL_SETTING = Finding(
    "HostSettingHarmful", "x is 1", subject="sysctl x", remedy="sysctl -w x=2"
)
COMMON: dict[str, Any] = {
    "version": VERSION,
    "ready": True,
    "host": (HARMFUL_SETTING,),
    "current": False,
    "api_server": ApiServerContact(41.5),
    "watches": {"services": WatchState(3.0, stale=False), "nodes": WatchState(43.0, stale=True)},
}
GATEWAY = GatewayState(
    **COMMON,
    node="gw1",
    services={
        "default/web": ServiceState(BALANCER, Outcome("unavailable", "no route", in_part=True)),
        "default/gone": ServiceState(None, None),
    },
    traffic=TrafficState(
        services={"default/web": ServiceTraffic(3, 180, 1, {"forbidden": 2})},
        listeners={"203.0.113.1:80/TCP": ListenerTraffic(3, 180, 1)},
        nodes={"node1": NodeTraffic(("l2",), ("192.0.2.21",), 3, 180, 1, 5)},
        drops={"fragment": 2},
        messages={"echo_reply": 4},
        untracked=7,
        unsent=8,
        resources={"listeners": ResourceState(1, 100)},
        draining=(DrainState("default/web", "203.0.113.1:80/TCP", "node2", 299.9),),
        interfaces=(InterfaceState("eth0", "tc", "it is a veth"),),
    ),
    proxy=ProxyState({"default/web": ProxiedTraffic(9, 2, 30, 40, 1, 0)}, WorkerState(1, 2, 99, 3)),
    api_servers=ApiServersState(
        ("203.0.113.5:6443",), {"192.0.2.1:6443": ApiServerState("ready", 3, 8)}
    ),
    announce=AnnounceState(
        (
            AnnouncedAddress("192.0.2.224", "gw1", "eth0", 3.5),
            AnnouncedAddress("192.0.2.225", "gw2", "eth1"),
        ),
        {"answered": 3, "dropped": 1},
    ),
    bgp=BgpState(
        3, (BgpSessionState("tor1", "192.0.2.1", 64512, "Active", "Down", 0, "Socket: refused"),)
    ),
    peers=PeersState((PeerState("192.0.2.12:7946", False, "refused"),), 1),
    probes=ProbesState((ProbedNode("node1", "192.0.2.21", "route", "up"),)),
)
NODE = NodeState(
    **COMMON,
    node="node1",
    services={"default/web": ServiceState(NODE_SERVICE, Outcome("done"))},
    tunnel=TunnelState("ipip", {"decapsulated": 5}),
)
CONTROLLER = ControllerState(
    **COMMON,
    node="",
    services={"default/web": ServiceState(BALANCER, Outcome("refused", "no such pool"))},
    octavia=OctaviaState(
        (
            LoadBalancerHealth(
                "default/web",
                "8ea0",
                "amphora",
                "198.51.100.1",
                "ONLINE",
                {"TCP/80": (MemberHealth("192.0.2.21", 30080, 1, "ERROR", monitored=True),)},
                ("pods are ready, and Octavia says ERROR",),
                1.5,
            ),
        )
    ),
)


@pytest.mark.parametrize("state", [GATEWAY, NODE, CONTROLLER], ids=lambda each: type(each).__name__)
def test_a_state_is_decoded_to_an_equal_value(state: RoleState) -> None:
    assert decode(msgspec.json.encode(state), "GET /state") == state
    plain = msgspec.to_builtins(state)
    empty = [
        name
        for name in type(state).__struct_fields__
        if not plain[name] and name not in ("node", "current")
    ]
    assert empty == [], "the test has a value for every field"


@pytest.mark.parametrize("role", STATES)
def test_a_response_without_optional_fields_is_read(role: str) -> None:
    state = decode(
        msgspec.json.encode({"role": role, "version": VERSION, "node": "n", "ready": False}), ""
    )
    assert (state.current, state.host, state.services, state.watches) == (True, (), {}, {})


def test_unknown_fields_are_ignored() -> None:
    body = msgspec.json.decode(msgspec.json.encode(GATEWAY)) | {"later": 1}
    assert decode(msgspec.json.encode(body), "GET /state") == GATEWAY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"version": VERSION + 1},
            f"gateway gw1 answered with version {VERSION + 1} of its state, and version {VERSION} "
            "was expected; run the `fairlead` of the same release",
        ),
        ({"version": None}, "the answer is not the state of a role"),
        ({"role": "ghost"}, f"ghost gw1 answered with a state that does not fit version {VERSION}"),
        ({"ready": "yes"}, "this is a text, not true or false - at $.ready"),
    ],
)
def test_a_response_that_could_be_misinterpreted_is_refused_with_the_name_of_the_role(
    changes: dict[str, object], words: str
) -> None:
    body = msgspec.json.decode(msgspec.json.encode(GATEWAY)) | changes
    with pytest.raises(Refused) as refusal:
        decode(msgspec.json.encode(body), "GET http://127.0.0.1:9441/state")
    assert str(refusal.value).startswith("GET http://127.0.0.1:9441/state: ")
    assert words in str(refusal.value)


def test_a_response_without_a_version_is_refused_with_the_name_of_the_role() -> None:
    body = b'{"role": "node", "node": "node1", "ready": true, "services": {}, "traffic": {}}'
    with pytest.raises(Refused, match=f"node node1 answered with version 0 .* version {VERSION}"):
        decode(body, "GET /state")


@pytest.mark.parametrize("body", [b"ok\n", b"", b"[1]"])
def test_a_response_of_another_program_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="is not the state of a role"):
        decode(body, "GET /state")


def test_every_part_has_a_field_in_a_state() -> None:
    assert set(PART_FIELDS) == set(Part.__subclasses__())


class ComponentWithStatus(Component):
    """A component with this status."""

    def __init__(self, part: Part | None) -> None:
        self._part = part

    def status(self) -> Part | None:
        return self._part


def test_a_view_contains_the_status_of_its_components() -> None:
    view = View("gateway", "gw1")
    assert GATEWAY.peers is not None
    peers = GATEWAY.peers
    view.host = lambda: (HARMFUL_SETTING,)
    view.record({KEY: BALANCER}, {KEY: Outcome("done")})
    alone = GatewayState(
        version=VERSION,
        node="gw1",
        ready=False,
        host=(HARMFUL_SETTING,),
        services={"default/web": ServiceState(BALANCER, Outcome("done"))},
    )
    with view.showing(ComponentWithStatus(None)), view.showing(ComponentWithStatus(peers)):
        together = msgspec.structs.replace(alone, peers=peers)
        assert decode(msgspec.json.encode(view.state()), "") == together
    assert decode(msgspec.json.encode(view.state()), "") == alone


@pytest.mark.parametrize("state", [GATEWAY, NODE, CONTROLLER], ids=lambda each: type(each).__name__)
def test_every_part_is_shown_in_the_order_of_the_fields(state: RoleState) -> None:
    parts = parts_of(state)
    assert [PART_FIELDS[type(each)] for each in parts] == [
        name for name in type(state).__struct_fields__ if name in PART_FIELDS.values()
    ]
    for part in parts:
        shown = list(part.shown())
        assert shown, f"{type(part).__name__} has something to tell"
        for each in shown:
            if isinstance(each, Table):
                assert {len(row) for row in each.rows} <= {len(each.header)}
