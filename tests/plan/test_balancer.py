"""Who is a member, with which weight, in which state."""

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
    "weights are ready pods": (
        [
            ("10.0.1.1", "node1", "ready"),
            ("10.0.1.2", "node1", "ready"),
            ("10.0.2.1", "node2", "ready"),
        ],
        {"node1": (2, "active"), "node2": (1, "active")},
    ),
    "a condition that is not there counts as ready": (
        [("10.0.1.1", "node1", "unknown")],
        {"node1": (1, "active")},
    ),
    "unready pods get nothing new": (
        [("10.0.1.1", "node1", "unready"), ("10.0.2.1", "node2", "ready")],
        {"node1": (0, "draining"), "node2": (1, "active")},
    ),
    "a terminating pod leaves new connections at once": (
        [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "ready")],
        {"node1": (0, "draining"), "node2": (1, "active")},
    ),
    "serving and terminating ones are the last resort": (
        [("10.0.1.1", "node1", "draining"), ("10.0.2.1", "node2", "dying")],
        {"node1": (1, "active"), "node2": (0, "draining")},
    ),
    "one of which it is not said whether it serves does": (
        [("10.0.1.1", "node1", "leaving"), ("10.0.2.1", "node2", "dying")],
        {"node1": (1, "active"), "node2": (0, "draining")},
    ),
    "nobody left": ([("10.0.1.1", "node1", "dying")], {"node1": (0, "draining")}),
    "an endpoint on a node that is not there": ([("10.0.9.1", "gone", "ready")], {}),
    "an endpoint without a node is never local": ([("10.0.9.1", "", "ready")], {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_members_under_local(make: Makers, name: str) -> None:
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
)
def test_a_listener_knows_whether_any_endpoint_may_get_traffic(
    make: Makers, rows: list[tuple[str, str, str]], expected: bool, policy: str
) -> None:
    """Wherever it is: that no node can be reached is another matter."""
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


def test_flows_of_datagrams_are_not_kept_where_nobody_serves(make: Makers) -> None:
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


def test_cluster_policy_with_endpoints_that_name_no_node_keeps_every_node(make: Makers) -> None:
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


def test_dual_stack_takes_endpoints_and_node_addresses_of_each_family(make: Makers) -> None:
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
    "all confirmed": (
        {"node1": "up", "node2": "up"},
        {"node1": "active", "node2": "active"},
        False,
    ),
    "one not asked yet": (
        {"node1": "up", "node2": None},
        {"node1": "active", "node2": "pending"},
        False,
    ),
    "one dead": ({"node1": "up", "node2": "down"}, {"node1": "active", "node2": "down"}, False),
    "one not serving": (
        {"node1": "up", "node2": "unready"},
        {"node1": "active", "node2": "draining"},
        False,
    ),
    "none asked yet: not before it is confirmed": (
        {},
        {"node1": "pending", "node2": "pending"},
        False,
    ),
    "one dead, one not asked yet": (
        {"node1": "down"},
        {"node1": "down", "node2": "pending"},
        False,
    ),
    "nobody can be asked: the API is believed, and it is said": (
        {"node1": "probe_failed", "node2": "probe_failed"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "all fail: the API is believed, and it is said": (
        {"node1": "unready", "node2": "unready"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "all are dead: the API is believed, and it is said": (
        {"node1": "down", "node2": "down"},
        {"node1": "active", "node2": "active"},
        True,
    ),
    "one flaps: it gets nothing new": (
        {"node1": "up", "node2": "flapping"},
        {"node1": "active", "node2": "draining"},
        False,
    ),
    "all flap: one that flaps is better than none": (
        {"node1": "flapping", "node2": "flapping"},
        {"node1": "active", "node2": "active"},
        False,
    ),
    "one flaps, the others are dead or unready": (
        {"node1": "flapping", "node2": "down"},
        {"node1": "active", "node2": "down"},
        False,
    ),
    "all fail, one of them is dead: it is the worst choice": (
        {"node1": "down", "node2": "unready"},
        {"node1": "down", "node2": "active"},
        True,
    ),
}


@pytest.mark.parametrize("name", PROBES)
def test_membership_is_confirmed_by_probes(make: Makers, name: str) -> None:
    make_service, make_slice, nodes = make
    verdicts, expected, noted = PROBES[name]
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
    assert (HEALTH_CHECKS_FAILING in [note.code for note in balancer.notes]) is noted


def test_health_ports_that_refuse_pods_on_their_way_out_are_as_they_should(make: Makers) -> None:
    make_service, make_slice, nodes = make
    rows = [("10.0.1.1", "node1", "draining")]
    balancer = plan_at_gateway(
        make_service(), [make_slice(rows)], nodes, ["203.0.113.10"], DIRECT, lambda *_: "unready"
    )
    assert states(balancer) == {"node1": (1, "active")}
    assert balancer.notes == ()


def test_until_a_new_pod_is_confirmed_the_one_that_is_about_to_go_may_take_what_comes(
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
    """KEP-1669: only a terminating endpoint stands in where no endpoint is ready."""
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


def test_a_connection_outlives_the_readiness_of_its_pod_whatever_carries_it(make: Makers) -> None:
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


@pytest.mark.parametrize(
    ("text", "limit_s"), [("300", 300.0), ("5m", 300.0), ("0", 0.0), ("", None), ("soon", None)]
)
def test_the_limit_of_a_drain_is_the_service_s_own(
    make: Makers, text: str, limit_s: float | None
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
    assert [note.code for note in balancer.notes] == ["AnnotationNotUnderstood"] * (text == "soon")


def test_a_port_that_is_refused_is_left_out_and_its_protocol_counts(make: Makers) -> None:
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
    "by the plan alone, before anything is published": (
        [],
        [("IPv4", "TCP", 80), ("IPv4", "UDP", 80), ("IPv6", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "without ports, as before they were shown": (
        [LoadBalancerIngress("203.0.113.10"), LoadBalancerIngress("2001:db8:f::10")],
        [("IPv4", "TCP", 80), ("IPv4", "UDP", 80), ("IPv6", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "some with an error, some not there": (
        [
            LoadBalancerIngress(
                "203.0.113.10",
                ports=(PortStatus(80, "TCP"), PortStatus(80, "UDP", "fairlead.io/PortConflict")),
            ),
            LoadBalancerIngress("2001:db8:f::10", ports=(PortStatus(80, "UDP"),)),
        ],
        [("IPv4", "TCP", 80), ("IPv6", "UDP", 80)],
    ),
    "something that nobody can read": (
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


def test_source_ranges_are_trimmed_and_the_field_wins(make: Makers) -> None:
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
