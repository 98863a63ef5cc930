"""Which nodes are members of a listener, with which weight and in which state."""

from collections.abc import Callable

import msgspec
import pytest
from tests.makers import plan_at_gateway

from fairlead.kube.objects import (
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    ObjectMeta,
    PortStatus,
    Service,
    ServicePort,
    ServiceStatus,
    Taint,
)
from fairlead.model import DirectSettings, LoadBalancer, Member, Protocol, UnservedPort, Verdict
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import DIRECT
from fairlead.plan.members import HEALTH_CHECKS_FAILING

Makers = tuple[Callable[..., Service], Callable[..., EndpointSlice], dict[str, Node]]


@pytest.fixture
def make(
    make_service: Callable[..., Service],
    make_slice: Callable[..., EndpointSlice],
    nodes: dict[str, Node],
) -> Makers:
    return make_service, make_slice, nodes


def states(balancer: LoadBalancer, at: int = 0) -> dict[str, tuple[int, str]]:
    return {member.node: (member.weight, member.state) for member in balancer.listeners[at].members}


ROWS = {
    "the weight is the number of ready pods": (
        [
            ("10.0.1.1", "node1", "ready"),
            ("10.0.1.2", "node1", "ready"),
            ("10.0.2.1", "node2", "ready"),
        ],
        {"node1": (2, "active"), "node2": (1, "active")},
    ),
    "an endpoint without conditions counts as ready": (
        [("10.0.1.1", "node1", "unknown")],
        {"node1": (1, "active")},
    ),
    "a node with only unready pods drains": (
        [("10.0.1.1", "node1", "unready"), ("10.0.2.1", "node2", "ready")],
        {"node1": (0, "draining"), "node2": (1, "active")},
    ),
    "a node with only terminating pods drains if there are ready pods": (
        [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "ready")],
        {"node1": (0, "draining"), "node2": (1, "active")},
    ),
    "terminating pods that serve are used if no pod is ready": (
        [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "dying")],
        {"node1": (1, "active"), "node2": (0, "draining")},
    ),
    "a terminating pod without the condition serving counts as serving": (
        [("10.0.1.1", "node1", "leaving"), ("10.0.2.1", "node2", "dying")],
        {"node1": (1, "active"), "node2": (0, "draining")},
    ),
    "a node with only pods that no longer serve drains": (
        [("10.0.1.1", "node1", "dying")],
        {"node1": (0, "draining")},
    ),
    "an endpoint on a node that does not exist is ignored": ([("10.0.9.1", "gone", "ready")], {}),
    "an endpoint without a node name is ignored": ([("10.0.9.1", "", "ready")], {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_members_with_policy_local(make: Makers, name: str) -> None:
    make_service, make_slice, nodes = make
    rows, expected = ROWS[name]
    assert (
        states(
            plan_load_balancer(make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT)
        )
        == expected
    )


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], False),
        ([("10.0.1.1", "node1", "unready"), ("10.0.2.1", "node2", "dying")], False),
        ([("10.0.1.1", "node1", "draining")], True),
        ([("10.0.9.1", "gone", "ready")], True),
        ([("10.0.9.1", "", "ready")], True),
    ],
    ids=[
        "no endpoint",
        "only endpoints that do not serve",
        "a terminating endpoint that serves",
        "an endpoint on a node that does not exist",
        "an endpoint without a node name",
    ],
)
def test_a_listener_has_endpoints_if_an_endpoint_on_any_node_may_get_traffic(
    make: Makers, rows: list[tuple[str, str, str]], expected: bool, policy: str
) -> None:
    """The result does not depend on whether the node of the endpoint may be a member."""
    make_service, make_slice, nodes = make
    excluded = {
        name: msgspec.structs.replace(
            node,
            spec=msgspec.structs.replace(
                node.spec, taints=(Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),)
            ),
        )
        for name, node in nodes.items()
    }
    service = make_service(external_traffic_policy=policy)
    for there in (nodes, excluded):
        balancer = plan_load_balancer(service, [make_slice(rows)], there, ["203.0.113.10"], DIRECT)
        assert [listener.has_endpoints for listener in balancer.listeners] == [expected]


def test_a_node_without_a_serving_pod_does_not_keep_udp_flows(make: Makers) -> None:
    make_service, make_slice, nodes = make
    service = make_service(ports=(ServicePort(53, protocol="UDP"),))
    rows = [
        ("10.0.1.1", "node1", "ready"),
        ("10.0.2.1", "node2", "unready"),
        ("10.0.3.1", "node3", "draining"),
    ]
    slice_ = make_slice(rows)
    slice_ = msgspec.structs.replace(slice_, ports=(EndpointPort("", 53, "UDP"),))
    balancer = plan_load_balancer(service, [slice_], nodes, ["203.0.113.10"], DIRECT)
    assert states(balancer) == {"node1": (1, "active"), "node3": (0, "draining")}


def test_with_policy_cluster_every_node_is_a_member_even_if_endpoints_name_no_node(
    make: Makers,
) -> None:
    make_service, make_slice, nodes = make
    service = make_service(external_traffic_policy="Cluster", health_check_node_port=0)
    balancer = plan_load_balancer(
        service, [make_slice([("10.0.9.1", "", "ready")])], nodes, ["203.0.113.10"], DIRECT
    )
    assert states(balancer) == {f"node{i}": (1, "active") for i in range(1, 5)}
    assert balancer.health_monitor is not None
    assert balancer.health_monitor.port == 10256


def test_slices_are_joined_by_port_name_and_an_endpoint_counts_once(make: Makers) -> None:
    make_service, make_slice, nodes = make
    service = make_service(ports=(ServicePort(80, name="http"), ServicePort(443, name="https")))
    first = make_slice(
        [("10.0.1.1", "node1", "ready")], name="a", ports=[("http", 8080), ("https", 8443)]
    )
    second = make_slice(
        [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "ready")],
        name="b",
        ports=[("http", 8080)],
    )
    third = make_slice(
        [("10.0.3.1", "node3", "ready")], name="c", ports=[("http", 9090), ("metrics", 1)]
    )
    balancer = plan_load_balancer(service, [first, second, third], nodes, ["203.0.113.10"], DIRECT)
    assert states(balancer, 0) == {
        "node1": (1, "active"),
        "node2": (1, "active"),
        "node3": (1, "active"),
    }
    assert states(balancer, 1) == {"node1": (1, "active")}


def test_listeners_of_each_family_use_endpoints_and_node_addresses_of_the_family(
    make: Makers,
) -> None:
    make_service, make_slice, nodes = make
    slices = [
        make_slice([("10.0.1.1", "node1", "ready")]),
        make_slice([("2001:db8:244::1", "node2", "ready")], name="web-6", family="IPv6"),
    ]
    balancer = plan_load_balancer(
        make_service(), slices, nodes, ["203.0.113.10", "2001:db8:f::10"], DIRECT
    )
    by_family = {listener.family: listener.members for listener in balancer.listeners}
    assert balancer.addresses == ("203.0.113.10", "2001:db8:f::10")
    assert by_family["IPv4"] == (Member("node1", "192.0.2.21", 1),)
    assert by_family["IPv6"] == (Member("node2", "2001:db8:1::2", 1),)


@pytest.mark.parametrize(
    ("label", "excluded"),
    [
        ("", True),
        ("true", True),
        ("0", False),
        ("f", False),
        ("false", False),
        ("FALSE", False),
        ("fAlse", True),
        ("no", True),
    ],
)
def test_a_node_excluded_by_label_drains(make: Makers, label: str, excluded: bool) -> None:
    make_service, make_slice, nodes = make
    meta = ObjectMeta(
        name="node1", labels={"node.kubernetes.io/exclude-from-external-load-balancers": label}
    )
    nodes["node1"] = msgspec.structs.replace(nodes["node1"], metadata=meta)
    rows = [("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")]
    balancer = plan_load_balancer(
        make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT
    )
    assert states(balancer)["node1"] == ((0, "draining") if excluded else (1, "active"))


def test_a_node_that_the_autoscaler_is_about_to_delete_drains(make: Makers) -> None:
    make_service, make_slice, nodes = make
    spec = msgspec.structs.replace(
        nodes["node1"].spec, taints=(Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),)
    )
    nodes["node1"] = msgspec.structs.replace(nodes["node1"], spec=spec)
    rows = [("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")]
    assert states(
        plan_load_balancer(make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT)
    ) == {
        "node1": (0, "draining"),
        "node2": (1, "active"),
    }


PROBES: dict[str, tuple[dict[str, Verdict | None], dict[str, str], bool]] = {
    "all nodes are up": (
        {"node1": "up", "node2": "up"},
        {"node1": "active", "node2": "active"},
        False,
    ),
    "a node without a verdict is pending": (
        {"node1": "up", "node2": None},
        {"node1": "active", "node2": "pending"},
        False,
    ),
    "a node that does not answer is down": (
        {"node1": "up", "node2": "down"},
        {"node1": "active", "node2": "down"},
        False,
    ),
    "an unready node drains": (
        {"node1": "up", "node2": "unready"},
        {"node1": "active", "node2": "draining"},
        False,
    ),
    "no node has a verdict: all are pending": (
        {},
        {"node1": "pending", "node2": "pending"},
        False,
    ),
    "a node is not active before it is confirmed, even if the other is down": (
        {"node1": "down"},
        {"node1": "down", "node2": "pending"},
        False,
    ),
    "no node can be probed: readiness in the API decides, with a finding": (
        {"node1": "probe_failed", "node2": "probe_failed"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "all nodes are unready: readiness in the API decides, with a finding": (
        {"node1": "unready", "node2": "unready"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "all nodes are down: readiness in the API decides, with a finding": (
        {"node1": "down", "node2": "down"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "a flapping node drains": (
        {"node1": "up", "node2": "flapping"},
        {"node1": "active", "node2": "draining"},
        False,
    ),
    "all nodes flap: they are active": (
        {"node1": "flapping", "node2": "flapping"},
        {"node1": "active", "node2": "active"},
        False,
    ),
    "one node flaps and the other is down: the flapping one is active": (
        {"node1": "flapping", "node2": "down"},
        {"node1": "active", "node2": "down"},
        False,
    ),
    "one node is unready and the other is down: the unready one is active, with a finding": (
        {"node1": "down", "node2": "unready"},
        {"node1": "down", "node2": "active"},
        True,
    ),
}


@pytest.mark.parametrize("name", PROBES)
def test_membership_is_confirmed_by_probes(make: Makers, name: str) -> None:
    make_service, make_slice, nodes = make
    verdicts, expected, reported = PROBES[name]
    by_address = {
        nodes[node].status.addresses[0].address: verdict for node, verdict in verdicts.items()
    }
    rows = [("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")]
    balancer = plan_at_gateway(
        make_service(),
        [make_slice(rows)],
        nodes,
        ["203.0.113.10"],
        DIRECT,
        lambda address, _port: by_address.get(address),
    )
    assert {node: state for node, (_, state) in states(balancer).items()} == expected
    assert (HEALTH_CHECKS_FAILING in [note.code for note in balancer.notes]) is reported


def test_unready_health_ports_of_nodes_with_only_terminating_pods_are_not_reported(
    make: Makers,
) -> None:
    make_service, make_slice, nodes = make
    rows = [("10.0.1.1", "node1", "draining")]
    balancer = plan_at_gateway(
        make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT, lambda *_: "unready"
    )
    assert states(balancer) == {"node1": (1, "active")}
    assert balancer.notes == ()


def test_a_node_with_a_terminating_pod_gets_connections_until_the_node_of_a_new_pod_is_confirmed(
    make: Makers,
) -> None:
    make_service, make_slice, nodes = make
    rows = [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "ready")]
    verdicts: dict[str, Verdict | None] = {"192.0.2.21": "unready"}

    def planned() -> dict[str, tuple[int, str]]:
        service = make_service()
        return states(
            plan_at_gateway(
                service,
                [make_slice(rows)],
                nodes,
                ["203.0.113.10"],
                DIRECT,
                lambda address, _: verdicts.get(address),
            )
        )

    assert planned() == {"node1": (1, "draining"), "node2": (1, "pending")}
    verdicts["192.0.2.22"] = "up"
    assert planned() == {"node1": (0, "draining"), "node2": (1, "active")}


def test_an_endpoint_that_serves_but_is_not_ready_gets_nothing_unless_it_terminates(
    make: Makers,
) -> None:
    """KEP-1669: if no endpoint is ready, only terminating endpoints that serve replace it."""
    make_service, make_slice, nodes = make
    rows = [("10.0.1.1", "node1", "serving"), ("10.0.2.1", "node2", "unready")]
    assert states(
        plan_load_balancer(make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT)
    ) == {
        "node1": (0, "draining"),
        "node2": (0, "draining"),
    }
    rows += [("10.0.3.1", "node3", "draining")]
    assert states(
        plan_load_balancer(make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT)
    )["node3"] == (
        1,
        "active",
    )


def test_every_protocol_is_served(make: Makers) -> None:
    make_service, make_slice, nodes = make
    ports = (
        ServicePort(80, name="a"),
        ServicePort(81, name="b", protocol="UDP"),
        ServicePort(82, name="c", protocol="SCTP"),
    )
    slice_ = make_slice([("10.0.1.1", "node1", "ready")], ports=[("a", 8080)])
    balancer = plan_load_balancer(
        make_service(ports=ports), [slice_], nodes, ["203.0.113.10"], DIRECT
    )
    assert [(listener.port, listener.protocol) for listener in balancer.listeners] == [
        (80, "TCP"),
        (81, "UDP"),
        (82, "SCTP"),
    ]
    assert balancer.unserved_ports == ()


def test_a_node_whose_pod_becomes_unready_keeps_its_tcp_and_sctp_connections(make: Makers) -> None:
    make_service, make_slice, nodes = make
    cases: tuple[tuple[Protocol, int], ...] = (("SCTP", 1), ("TCP", 1), ("UDP", 0))
    for protocol, members in cases:
        slice_ = make_slice([("10.0.1.1", "node1", "unready")])
        slice_ = msgspec.structs.replace(slice_, ports=(EndpointPort("", 8080, protocol),))
        service = make_service(ports=(ServicePort(80, protocol=protocol),))
        (listener,) = plan_load_balancer(
            service, [slice_], nodes, ["203.0.113.10"], DIRECT
        ).listeners
        assert len(listener.members) == members


@pytest.mark.parametrize(("text", "limit_s"), [("300", 300.0), ("5m", 300.0), ("0", 0.0)])
def test_the_drain_timeout_of_a_service_is_read_from_its_annotation(
    make: Makers, text: str, limit_s: float
) -> None:
    make_service, make_slice, nodes = make
    service = make_service()
    metadata = msgspec.structs.replace(
        service.metadata, annotations={"fairlead.io/drain-timeout": text}
    )
    service = msgspec.structs.replace(service, metadata=metadata)
    balancer = plan_load_balancer(
        service, [make_slice([("10.0.1.1", "node1", "ready")])], nodes, ["203.0.113.10"], DIRECT
    )
    assert balancer.settings == DirectSettings(limit_s)
    assert list(balancer.notes) == []


def test_an_unserved_port_has_no_listener_for_its_protocol_only(make: Makers) -> None:
    make_service, make_slice, nodes = make
    service = make_service(
        ports=(ServicePort(53, name="a"), ServicePort(53, name="b", protocol="UDP"))
    )
    conflict = UnservedPort(53, "UDP", "fairlead.io/PortConflict")
    balancer = plan_load_balancer(
        service, [make_slice([])], nodes, ["203.0.113.10"], DIRECT, unserved=[conflict]
    )
    assert [(listener.port, listener.protocol) for listener in balancer.listeners] == [(53, "TCP")]
    assert balancer.unserved_ports == (conflict,)


PUBLISHED: dict[str, tuple[list[LoadBalancerIngress], list[tuple[str, str, int]]]] = {
    "no address is published: all ports": (
        [],
        [("IPv4", "TCP", 80), ("IPv4", "UDP", 80), ("IPv6", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "addresses are published without ports, as older versions did: all ports": (
        [LoadBalancerIngress("203.0.113.10"), LoadBalancerIngress("2001:db8:f::10")],
        [("IPv4", "TCP", 80), ("IPv4", "UDP", 80), ("IPv6", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "ports with an error and ports without an entry are not served": (
        [
            LoadBalancerIngress(
                "203.0.113.10",
                ports=(PortStatus(80, "TCP"), PortStatus(80, "UDP", "fairlead.io/PortConflict")),
            ),
            LoadBalancerIngress("2001:db8:f::10", ports=(PortStatus(80, "UDP"),)),
        ],
        [("IPv4", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "an entry without a protocol: no port": (
        [LoadBalancerIngress("203.0.113.10", ports=(PortStatus(80, ""),))],
        [],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_gateways_serve_the_published_ports(make: Makers, name: str) -> None:
    make_service, _, nodes = make
    ingress, expected = PUBLISHED[name]
    service = make_service(
        ports=(ServicePort(80, name="a"), ServicePort(80, name="b", protocol="UDP"))
    )
    service = msgspec.structs.replace(
        service, status=ServiceStatus(LoadBalancerStatus(tuple(ingress)))
    )
    addresses = [entry.ip for entry in ingress] or ["203.0.113.10", "2001:db8:f::10"]
    balancer = plan_at_gateway(service, [], nodes, addresses, DIRECT, lambda *_: None)
    assert [(each.family, each.protocol, each.port) for each in balancer.listeners] == expected


def test_source_ranges_are_read_without_spaces_and_the_field_takes_precedence(make: Makers) -> None:
    make_service, _, nodes = make
    old = {
        "service.beta.kubernetes.io/load-balancer-source-ranges": "198.51.100.0/24, 192.0.2.0/24"
    }
    by_annotation = plan_load_balancer(
        make_service(annotations=old), [], nodes, ["203.0.113.10"], DIRECT
    )
    assert by_annotation.source_ranges == ("192.0.2.0/24", "198.51.100.0/24")
    service = make_service(annotations=old, load_balancer_source_ranges=(" 10.0.0.0/8",))
    assert plan_load_balancer(service, [], nodes, ["203.0.113.10"], DIRECT).source_ranges == (
        "10.0.0.0/8",
    )
