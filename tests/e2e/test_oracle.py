"""The oracle, compared with the tables of kube-proxy's own packet tests and with simple cases of a
load balancer with policy Local."""

from typing import Any, Literal

import pytest
from tests.e2e.oracle import (
    Answer,
    Cluster,
    Expected,
    Observed,
    Source,
    Target,
    expect,
    health_answer,
    objection,
)

HERE, THERE, VIP, CLUSTER_IP = "192.0.2.21", "192.0.2.22", "203.0.113.10", "10.96.0.10"
NODE_PORT = 30080
SOURCES = {
    "pod": Source("default/caller", "pod", "node1", ("10.244.1.9",)),
    "endpoint": Source("default/here", "pod", "node1", ("10.244.1.2",)),
    "pod elsewhere": Source("default/far", "pod", "node3", ("10.244.3.9",)),
    "node": Source("node1", "node", "node1", (HERE,)),
    "client": Source("client1", "client", "", ("198.51.100.11",)),
}
TARGETS = {
    "ClusterIP": Target(CLUSTER_IP, 80, "TCP"),
    "NodePort": Target(HERE, NODE_PORT, "TCP"),
    "load balancer": Target(VIP, 80, "TCP"),
}
State = Literal["ready", "unready", "terminating", "terminating unready"]


def pod(name: str, node: str, address: str, state: State = "ready") -> dict[str, Any]:
    metadata: dict[str, Any] = {"namespace": "default", "name": name, "labels": {"app": "web"}}
    if state in ("terminating", "terminating unready"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = "True" if state in ("ready", "terminating") else "False"
    return {
        "metadata": metadata,
        "spec": {
            "nodeName": node,
            "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}],
        },
        "status": {
            "phase": "Running",
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def cluster(
    *, here: State = "ready", there: State = "ready", pods: bool = True, **spec: Any
) -> Cluster:
    """Return a cluster with one Service, and an endpoint on node1 (`here`) and one on node2
    (`there`)."""
    fields = {
        "type": "LoadBalancer",
        "selector": {"app": "web"},
        "clusterIPs": [CLUSTER_IP],
        "ipFamilies": ["IPv4"],
        "externalTrafficPolicy": "Cluster",
        "ports": [{"name": "web", "port": 80, "targetPort": "web", "nodePort": NODE_PORT}],
    } | spec
    service = {
        "metadata": {"namespace": "default", "name": "web"},
        "spec": fields,
        "status": {"loadBalancer": {"ingress": [{"ip": VIP, "ipMode": "VIP"}]}},
    }
    both = [pod("here", "node1", "10.244.1.2", here), pod("there", "node2", "10.244.2.2", there)]
    addresses = {"node1": HERE, "node2": THERE, "node3": "192.0.2.23"}
    nodes = [
        {
            "metadata": {"name": name},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]},
        }
        for name, address in addresses.items()
    ]
    return Cluster([service], both if pods else [], nodes)


def table_entry(expected: Expected) -> str:
    """Return the result as the tables show it: the pods that may answer, with SNAT if they see an
    address of a node instead of the source."""
    if not expected.answers:
        return expected.otherwise
    nodes = {HERE, THERE, "192.0.2.23"}
    hidden = {
        answer.pod.removeprefix("default/") for answer in expected.answers if answer.seen in nodes
    }
    plain = {
        answer.pod.removeprefix("default/")
        for answer in expected.answers
        if answer.seen not in nodes
    }
    return " ".join(sorted({f"{name} SNAT" for name in hidden} | plain))


BOTH, BOTH_HIDDEN = "here there", "here SNAT there SNAT"
POLICIES: dict[str, dict[str, Any]] = {
    "all_cluster": {},
    "external_local": {"externalTrafficPolicy": "Local"},
    "internal_local": {"internalTrafficPolicy": "Local"},
}


@pytest.mark.parametrize(
    ("source", "target", "all_cluster", "external_local", "internal_local"),
    [
        ("pod", "ClusterIP", BOTH, BOTH, "here"),
        ("pod", "NodePort", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),
        ("pod", "load balancer", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),
        ("node", "ClusterIP", BOTH_HIDDEN, BOTH_HIDDEN, "here SNAT"),
        ("node", "NodePort", BOTH_HIDDEN, BOTH_HIDDEN, BOTH_HIDDEN),
        ("node", "load balancer", BOTH_HIDDEN, BOTH_HIDDEN, BOTH_HIDDEN),
        ("client", "NodePort", BOTH_HIDDEN, "here", BOTH_HIDDEN),
        ("endpoint", "ClusterIP", "here SNAT there", "here SNAT there", "here SNAT"),
        ("endpoint", "load balancer", BOTH_HIDDEN, "here SNAT there", BOTH_HIDDEN),
        ("pod elsewhere", "NodePort", BOTH_HIDDEN, "here", BOTH_HIDDEN),
        # A load balancer in front of the nodes sends a share to each node with pods.
        ("client", "load balancer", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),
    ],
)
def test_policies_determine_the_pods_and_the_source_address(
    source: str, target: str, all_cluster: str, external_local: str, internal_local: str
) -> None:
    answers = [
        table_entry(expect(cluster(**POLICIES[name]), SOURCES[source], TARGETS[target]))
        for name in POLICIES
    ]
    assert answers == [all_cluster, external_local, internal_local]


@pytest.mark.parametrize("source", ["pod", "node", "client"])
@pytest.mark.parametrize("target", ["ClusterIP", "NodePort", "load balancer"])
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_a_service_without_endpoints_is_refused(source: str, target: str, policy: str) -> None:
    """As in kube-proxy's TestNoEndpointsReject, also at a load balancer in front of the nodes. A
    client's packet to a ClusterIP is not routed at all."""
    empty = cluster(pods=False, externalTrafficPolicy=policy)
    silent = source == "client" and target == "ClusterIP"
    assert table_entry(expect(empty, SOURCES[source], TARGETS[target])) == (
        "silence" if silent else "refused"
    )


@pytest.mark.parametrize(
    ("here", "there", "through_balancer", "at_node"),
    [
        ("ready", "unready", "here", "here"),
        ("unready", "ready", "there", "silence"),
        ("unready", "unready", "refused", "refused"),
        (
            "terminating",
            "ready",
            "there",
            "here",
            # KEP-1669: the node chooses only among its own endpoints.
        ),
        ("terminating", "unready", "here", "here"),
        ("terminating", "terminating", BOTH, "here"),
        ("terminating unready", "ready", "there", "silence"),
    ],
)
def test_with_policy_local_ready_pods_of_the_node_answer(
    here: State, there: State, through_balancer: str, at_node: str
) -> None:
    now = cluster(here=here, there=there, externalTrafficPolicy="Local")
    assert table_entry(expect(now, SOURCES["client"], TARGETS["load balancer"])) == through_balancer
    assert table_entry(expect(now, SOURCES["client"], TARGETS["NodePort"])) == at_node
    ready = here == "ready"
    now.services[0]["spec"]["healthCheckNodePort"] = 30999
    assert health_answer(now, now.services[0], "node1") == (200 if ready else 503, int(ready))


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("client", "load balancer", "silence"),
        ("pod", "load balancer", "silence"),
        ("node", "load balancer", BOTH_HIDDEN),
        ("client", "NodePort", BOTH_HIDDEN),
        ("pod", "ClusterIP", BOTH),
    ],
)
def test_source_ranges_apply_to_load_balancer_addresses_only(
    source: str, target: str, wanted: str
) -> None:
    now = cluster(loadBalancerSourceRanges=[" 192.0.2.0/24"])
    assert table_entry(expect(now, SOURCES[source], TARGETS[target])) == wanted


def test_other_ports_other_classes_and_excluded_nodes_get_no_traffic() -> None:
    pod_, client = SOURCES["pod"], SOURCES["client"]
    assert table_entry(expect(cluster(), pod_, Target(CLUSTER_IP, 81, "TCP"))) == "refused"
    assert table_entry(expect(cluster(), pod_, Target(CLUSTER_IP, 80, "UDP"))) == "refused"
    assert table_entry(expect(cluster(), client, Target(HERE, NODE_PORT, "UDP"))) == "refused"
    assert table_entry(expect(cluster(), client, Target("203.0.113.99", 80, "TCP"))) == "silence"
    foreign = cluster(loadBalancerClass="example.com/other")
    assert table_entry(expect(foreign, client, TARGETS["load balancer"])) == "silence"
    assert table_entry(expect(foreign, pod_, TARGETS["load balancer"])) == BOTH_HIDDEN
    for policy, wanted in (("Local", "there"), ("Cluster", BOTH_HIDDEN)):
        excluding = cluster(externalTrafficPolicy=policy)
        excluding.nodes[0]["metadata"]["labels"] = {
            "node.kubernetes.io/exclude-from-external-load-balancers": "true"
        }
        assert table_entry(expect(excluding, client, TARGETS["load balancer"])) == wanted


@pytest.mark.parametrize(
    ("expected", "observed", "good"),
    [
        (Expected(frozenset({Answer("a", "x")})), [Answer("a", "x")], True),
        (Expected(frozenset({Answer("a", "x")})), [Answer("a", "x"), Answer("b", "x")], False),
        (Expected(frozenset({Answer("a", "x")})), [Answer("a", "y")], False),
        (Expected(frozenset({Answer("a", "x")})), ["silence"], False),
        (Expected(frozenset({Answer("a", "x")}), must_answer=False), ["silence"], True),
        (
            Expected(frozenset({Answer("a", "x"), Answer("b", "x")}), one_pod=True),
            [Answer("a", "x"), Answer("b", "x")],
            False,
        ),
        (Expected(frozenset(), "refused"), ["refused"], True),
        (Expected(frozenset(), "refused"), ["silence"], False),
        (Expected(frozenset(), "refused"), ["unreachable"], False),
        (Expected(frozenset(), "silence"), ["unreachable", "silence"], True),
        (Expected(frozenset(), "silence"), ["refused"], False),
        (Expected(frozenset(), "silence"), [Answer("a", "x")], False),
        (Expected(frozenset(), "silence"), ["broken"], False),
    ],
)
def test_observations_that_contradict_the_rules_are_rejected(
    expected: Expected, observed: list[Observed], good: bool
) -> None:
    assert (objection(expected, observed) == "") is good
