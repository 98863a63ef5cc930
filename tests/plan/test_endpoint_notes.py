"""The findings about endpoints and their nodes: a Service is ready exactly if every listener has a
member that gets new connections, and each finding names the cause and a remedy."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import makers
from tests.plan.findings import (
    ADDRESSES,
    BOTH,
    CLUSTER,
    LOCAL,
    MakeService,
    MakeSlice,
    codes_and_blocks,
    findings,
)

from fairlead.config import Config
from fairlead.kube.objects import (
    EndpointSlice,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    ServicePort,
    Taint,
)
from fairlead.model import DONE, Family, LoadBalancer
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import DIRECT, OCTAVIA
from fairlead.plan.status import conditions_of
from fairlead.sections import OctaviaConfig

EXCLUDE = {"node.kubernetes.io/exclude-from-external-load-balancers": ""}


NO_ENDPOINTS, NO_NODES, NO_NODE_NAME = (
    "NoReadyEndpoints",
    "UnAvailableLoadBalancer",
    "EndpointsWithoutNode",
)
ENDPOINTS: dict[
    str, tuple[dict[str, object], list[tuple[str, str, str]], list[tuple[str, str]]]
] = {
    "a ready endpoint: no finding": (LOCAL, [("10.0.1.1", "node1", "ready")], []),
    "only terminating endpoints that serve: no finding": (
        LOCAL,
        [("10.0.1.1", "node1", "draining")],
        [],
    ),
    "no endpoint": (LOCAL, [], [(NO_ENDPOINTS, "Ready")]),
    "no ready endpoint": (CLUSTER, [("10.0.1.1", "node1", "unready")], [(NO_ENDPOINTS, "Ready")]),
    "Local: the only endpoint is on a node that does not exist": (
        LOCAL,
        [("10.0.9.1", "gone", "ready")],
        [(NO_NODES, "Ready")],
    ),
    "Cluster: the only endpoint is on a node that does not exist": (
        CLUSTER,
        [("10.0.9.1", "gone", "ready")],
        [],
    ),
    "Local: one of two nodes does not exist": (
        LOCAL,
        [("10.0.1.1", "node1", "ready"), ("10.0.9.1", "gone", "ready")],
        [("EndpointsOfMissingNode", "")],
    ),
    "Cluster: one of two nodes does not exist": (
        CLUSTER,
        [("10.0.1.1", "node1", "ready"), ("10.0.9.1", "gone", "ready")],
        [],
    ),
    "Local: no endpoint names a node": (
        LOCAL,
        [("10.0.9.1", "", "ready")],
        [(NO_NODE_NAME, "Ready")],
    ),
    "Local: one of two endpoints names no node": (
        LOCAL,
        [("10.0.9.1", "", "ready"), ("10.0.1.1", "node1", "ready")],
        [(NO_NODE_NAME, "")],
    ),
    "Cluster: no endpoint names a node": (CLUSTER, [("10.0.9.1", "", "ready")], []),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_findings_about_endpoints(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node], name: str
) -> None:
    fields, rows, expected = ENDPOINTS[name]
    notes = findings(make_service(**fields), [make_slice(rows)], nodes)
    assert codes_and_blocks(notes) == expected
    members = (
        plan_load_balancer(make_service(**fields), [make_slice(rows)], nodes, ADDRESSES, DIRECT)
        .listeners[0]
        .members
    )
    served = any(member.weight and member.state == "active" for member in members)
    assert served is not any(note.blocks == "Ready" for note in notes), (
        "a finding blocks Ready if and only if no member gets connections"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [],
            "it has no endpoint; see `kubectl get pods -n default -l app=web`; if it shows no "
            "pod, make spec.selector",
        ),
        (
            [("10.0.1.1", "node1", "unready")],
            "it has endpoints, and none of them is ready; see `kubectl get pods",
        ),
    ],
    ids=["no pod, or only pods without an address", "only unready pods"],
)
def test_the_advice_claims_only_facts_that_endpoint_slices_show(
    make_service: MakeService,
    make_slice: MakeSlice,
    nodes: dict[str, Node],
    rows: list[tuple[str, str, str]],
    words: str,
) -> None:
    """A pod whose container is being created has no address, and so no endpoint. EndpointSlices do
    not show whether its labels match the selector."""
    for slices in ([make_slice(rows)], [make_slice(rows)] * 2):
        (note,) = findings(make_service(selector={"app": "web"}), slices, nodes)
        assert str(note).startswith(words)
        assert note.at_start


@pytest.mark.parametrize("fields", [LOCAL, CLUSTER], ids=["Local", "Cluster"])
def test_a_service_without_any_eligible_node_is_reported(
    make_service: MakeService,
    make_slice: MakeSlice,
    nodes: dict[str, Node],
    fields: dict[str, object],
) -> None:
    slice_ = make_slice([("10.0.1.1", "node1", "ready")])
    taint = NodeSpec(taints=(Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),))
    leaving = {name: msgspec.structs.replace(node, spec=taint) for name, node in nodes.items()}
    assert codes_and_blocks(findings(make_service(**fields), [slice_], leaving)) == [
        (NO_NODES, "Ready")
    ]
    assert codes_and_blocks(findings(make_service(**fields), [slice_], {})) == [(NO_NODES, "Ready")]


def test_a_missing_endpoint_is_reported_with_its_port_and_family(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node]
) -> None:
    service = make_service(ports=(ServicePort(80, name="a"), ServicePort(81, name="b")))
    slices = [
        make_slice([("10.0.1.1", "node1", "ready")], ports=[("a", 8080), ("b", 8081)]),
        make_slice(
            [("2001:db8:244::1", "node2", "ready")], name="six", family="IPv6", ports=[("a", 8080)]
        ),
    ]
    (note,) = findings(service, slices, nodes, BOTH)
    assert (note.code, note.blocks) == (NO_ENDPOINTS, "Ready")
    assert str(note).startswith("81/TCP (IPv6): no endpoint has this port")


def test_a_finding_does_not_change_with_the_number_of_endpoints(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node]
) -> None:
    few = findings(make_service(), [make_slice([("10.0.1.1", "node1", "unready")])], nodes)
    many = findings(
        make_service(),
        [make_slice([(f"10.0.1.{i}", f"node{1 + i % 4}", "unready") for i in range(1, 9)])],
        nodes,
    )
    assert few == many


def node(name: str, *addresses: tuple[str, str], labels: dict[str, str] | None = None) -> Node:
    """Return a Node with these addresses, each with its type."""
    status = NodeStatus(tuple(NodeAddress(*each) for each in addresses))
    return Node(ObjectMeta(name=name, labels=labels or {}), status=status)


FOUR, SIX = ("InternalIP", "192.0.2.21"), ("InternalIP", "2001:db8:1::21")
ONLY_EXTERNAL = {"robot": node("robot", ("ExternalIP", "198.51.100.77"), ("Hostname", "robot"))}
ONLY_FOUR = {"robot": node("robot", FOUR)}
READY = [("10.0.1.1", "robot", "ready")]
READY_SIX = [("2001:db8:244::1", "robot", "ready")]


def ready_of(made: LoadBalancer) -> tuple[str, str]:
    ready = next(each for each in conditions_of(made, DONE, ()) if each.type.endswith("Ready"))
    return f"{ready.status}/{ready.reason}", ready.message


@pytest.mark.parametrize("fields", [LOCAL, CLUSTER], ids=["Local", "Cluster"])
def test_a_node_without_an_internal_address_does_not_make_a_service_ready(
    make_service: MakeService, make_slice: MakeSlice, fields: dict[str, object]
) -> None:
    made = plan_load_balancer(
        make_service(**fields), [make_slice(READY)], ONLY_EXTERNAL, ADDRESSES, DIRECT
    )
    condition, message = ready_of(made)
    assert condition == "False/NodeAddressMissing"
    assert "IPv4 InternalIP" in message
    assert "--node-ip" in message


@pytest.mark.parametrize("fields", [LOCAL, CLUSTER], ids=["Local", "Cluster"])
def test_a_family_that_no_node_has_does_not_make_a_service_ready(
    make_service: MakeService, make_slice: MakeSlice, fields: dict[str, object]
) -> None:
    slices = [make_slice(READY), make_slice(READY_SIX, name="six", family="IPv6")]
    made = plan_load_balancer(make_service(**fields), slices, ONLY_FOUR, BOTH, DIRECT)
    condition, message = ready_of(made)
    assert condition == "False/NodeAddressMissing"
    assert message.startswith("80/TCP (IPv6): no")
    assert [bool(each.members) for each in made.listeners] == [True, False]


def test_with_policy_cluster_a_node_that_has_the_family_takes_the_traffic_of_one_that_has_not(
    make_service: MakeService, make_slice: MakeSlice
) -> None:
    slices = [make_slice(READY_SIX, family="IPv6")]
    nodes = ONLY_FOUR | {"other": node("other", SIX)}
    made = plan_load_balancer(make_service(**CLUSTER), slices, nodes, BOTH[1:], DIRECT)
    assert [(each.node, each.weight) for each in made.listeners[0].members] == [("other", 1)]
    assert ready_of(made)[0] == "True/EndpointsReady"


def test_a_node_selector_that_excludes_the_nodes_of_the_pods_does_not_make_a_service_ready(
    make_service: MakeService, make_slice: MakeSlice
) -> None:
    nodes = ONLY_FOUR | {"other": node("other", ("InternalIP", "192.0.2.22"), labels={"zone": "a"})}
    config = Config(octavia=OctaviaConfig(subnet_id="four", node_selector="zone=a"))

    def made(fields: dict[str, object], nodes: dict[str, Node]) -> LoadBalancer:
        service = make_service(**fields)
        slices = [make_slice(READY)]
        return plan_load_balancer(service, slices, nodes, ADDRESSES, OCTAVIA, config=config)

    condition, message = ready_of(made(LOCAL, nodes))
    assert condition == "False/UnAvailableLoadBalancer"
    assert "its pods are ready on robot, without the labels of the node selector" in message
    assert ready_of(made(CLUSTER, nodes))[0] == "True/EndpointsReady"
    condition, message = ready_of(made(CLUSTER, ONLY_FOUR))
    assert condition == "False/UnAvailableLoadBalancer"
    assert "has the labels of the node selector" in message


def test_each_cause_is_named_if_several_nodes_have_no_traffic(
    make_service: MakeService, make_slice: MakeSlice
) -> None:
    nodes = ONLY_EXTERNAL | {"barred": node("barred", FOUR, labels=EXCLUDE)}
    rows = [(f"10.0.1.{at}", name, "ready") for at, name in enumerate(("robot", "barred", "gone"))]
    (note,) = findings(make_service(), [make_slice(rows)], nodes)
    assert note.message == (
        "There are no available nodes for LoadBalancer: its pods are ready on barred, excluded by "
        "label or about to be deleted; on robot, without an IPv4 InternalIP; on gone, not in the "
        "cluster"
    )


def test_one_finding_names_all_nodes_without_an_address(
    make_service: MakeService, make_slice: MakeSlice
) -> None:
    nodes = {f"n{at}": node(f"n{at}") for at in range(7)} | ONLY_FOUR
    rows = [(f"10.0.1.{at}", name, "ready") for at, name in enumerate(nodes)]
    (note,) = findings(make_service(), [make_slice(rows)], nodes)
    assert (note.code, note.blocks) == ("NodeAddressMissing", "")
    assert note.message.startswith("nodes n0, n1, n2, n3, n4 and others have pods of this Service")


NAMES = ("n1", "n2", "n3", "")
ANY_ADDRESSES = st.lists(
    st.sampled_from((FOUR, SIX, ("ExternalIP", "198.51.100.77"), ("ExternalIP", "2001:db8:2::77"))),
    unique=True,
    max_size=3,
)
ANY_LABELS = st.sampled_from(({}, EXCLUDE, {"zone": ""}))
ROWS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(("ready", "unready", "draining"))), max_size=3
)


@given(
    st.dictionaries(st.sampled_from(NAMES[:3]), st.tuples(ANY_ADDRESSES, ANY_LABELS)),
    ROWS,
    ROWS,
    st.booleans(),
    st.sampled_from(("", "zone")),
)
def test_a_service_is_ready_exactly_if_every_listener_has_a_member_for_new_connections(
    made_nodes: dict[str, tuple[list[tuple[str, str]], dict[str, str]]],
    four: list[tuple[str, str]],
    six: list[tuple[str, str]],
    local: bool,
    selector: str,
) -> None:
    nodes = {
        name: node(name, *addresses, labels=labels)
        for name, (addresses, labels) in made_nodes.items()
    }
    families: dict[Family, list[tuple[str, str]]] = {"IPv4": four, "IPv6": six}
    slices = [
        makers.make_slice(
            [
                (f"10.0.1.{at}" if family == "IPv4" else f"2001:db8::{at}", name, state)
                for at, (name, state) in enumerate(rows, start=1)
            ],
            name=f"web-{family}",
            family=family,
        )
        for family, rows in families.items()
    ]
    make: MakeService = makers.make_service
    service = make(**(LOCAL if local else CLUSTER))
    config = Config(octavia=OctaviaConfig(subnet_id="four", node_selector=selector))
    class_ = OCTAVIA if selector else DIRECT
    made = plan_load_balancer(service, slices, nodes, BOTH, class_, config=config)
    served = all(
        any(member.weight and member.state == "active" for member in listener.members)
        for listener in made.listeners
    )
    assert ready_of(made)[0].startswith("True") == served


def other_port(**fields: object) -> EndpointSlice:
    """Return a slice with a ready endpoint, whose port has these fields."""
    made = makers.make_slice(READY)
    (port,) = made.ports or ()
    return msgspec.structs.replace(made, ports=(msgspec.structs.replace(port, **fields),))


PORTS: dict[str, tuple[dict[str, object], EndpointSlice, str, str]] = {
    "another name, no selector": (
        {},
        other_port(name="https"),
        "no endpoint has this port: ports are joined by name, and the port of the Service is "
        "without a name, those of its EndpointSlices are 'https'",
        "give the port the same name in the Service and in its EndpointSlices",
    ),
    "no name, no selector": (
        {"ports": (ServicePort(80, name="http", node_port=30080),)},
        other_port(name=None),
        "no endpoint has this port: ports are joined by name, and the port of the Service is "
        "named 'http', those of its EndpointSlices are without a name",
        "give the port the same name in the Service and in its EndpointSlices",
    ),
    "no port, as for a targetPort that pods do not have": (
        {"selector": {"app": "web"}},
        msgspec.structs.replace(makers.make_slice(READY), ports=None),
        "no endpoint has this port",
        "check that its targetPort names a port of the pods",
    ),
    "another protocol": (
        {},
        other_port(protocol="UDP"),
        "no endpoint has this port: in its EndpointSlices the port without a name has protocol UDP",
        "set protocol TCP there, or the other protocol in the Service",
    ),
    "no number": (
        {},
        other_port(port=None),
        "no endpoint has this port: in its EndpointSlices the port without a name has no number",
        "set it there",
    ),
    "host names": (
        {},
        makers.make_slice([("a.example", "", "ready")], family="FQDN"),
        "no endpoint has an IPv4 address: the addressType of its EndpointSlices is FQDN",
        "create an EndpointSlice with addressType IPv4; service proxies serve no host names",
    ),
    "pods with addresses of the other family": (
        {"selector": {"app": "web"}},
        makers.make_slice(READY_SIX, family="IPv6"),
        "no endpoint has an IPv4 address: the addressType of its EndpointSlices is IPv6",
        "give the pods IPv4 addresses, or remove IPv4 from spec.ipFamilies",
    ),
    "a slice without endpoints": (
        {},
        makers.make_slice([]),
        "its EndpointSlices have no endpoint",
        "see the controller that writes them",
    ),
}


def test_the_remedy_for_a_service_without_selector_names_endpoints_objects(
    make_service: MakeService,
) -> None:
    (note,) = findings(make_service(), [], ONLY_FOUR)
    assert note.message == "it has neither a selector nor an EndpointSlice"
    assert "an Endpoints object counts only once the control plane has mirrored it" in note.remedy


@pytest.mark.parametrize("name", PORTS)
def test_the_cause_of_a_port_without_endpoints_is_named(
    make_service: MakeService, name: str
) -> None:
    fields, slice_, message, remedy = PORTS[name]
    (note,) = findings(make_service(**fields), [slice_], ONLY_FOUR)
    assert (note.code, note.blocks) == (NO_ENDPOINTS, "Ready")
    assert (note.message, note.remedy) == (message, remedy)
