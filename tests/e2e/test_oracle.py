"""The oracle against the tables of kube-proxy's own tests, and against plain cases of a load
balancer with policy Local."""

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
    "cIP": Target(CLUSTER_IP, 80, "TCP"),
    "NP": Target(HERE, NODE_PORT, "TCP"),
    "LB": Target(VIP, 80, "TCP"),
}
State = Literal["ready", "unready", "leaving", "gone"]


def pod(name: str, node: str, address: str, state: State = "ready") -> dict[str, Any]:
    metadata: dict[str, Any] = {"namespace": "default", "name": name, "labels": {"app": "web"}}
    if state in ("leaving", "gone"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = "True" if state in ("ready", "leaving") else "False"
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
    """One Service; an endpoint on node1 (`here`) and one on node2 (`there`)."""
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


def told(expected: Expected) -> str:
    """Return the result in the terms of the tables: the pods that may answer, and whether they see
    the source or an address of a node."""
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
    "svc1": {},
    "svc2": {"externalTrafficPolicy": "Local"},
    "svc3": {"internalTrafficPolicy": "Local"},
}


@pytest.mark.parametrize(
    ("source", "target", "svc1", "svc2", "svc3"),
    [
        ("pod", "cIP", BOTH, BOTH, "here"),  # P7.1-3
        ("pod", "NP", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),  # P7.4-6
        ("pod", "LB", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),  # P7.7-9
        ("node", "cIP", BOTH_HIDDEN, BOTH_HIDDEN, "here SNAT"),  # P7.10-12
        ("node", "NP", BOTH_HIDDEN, BOTH_HIDDEN, BOTH_HIDDEN),  # P7.13-15
        ("node", "LB", BOTH_HIDDEN, BOTH_HIDDEN, BOTH_HIDDEN),  # P7.16-18
        ("client", "NP", BOTH_HIDDEN, "here", BOTH_HIDDEN),  # P7.22-24
        ("endpoint", "cIP", "here SNAT there", "here SNAT there", "here SNAT"),  # P2.2
        ("endpoint", "LB", BOTH_HIDDEN, "here SNAT there", BOTH_HIDDEN),
        ("pod elsewhere", "NP", BOTH_HIDDEN, "here", BOTH_HIDDEN),
        # Through a balancer in front of the nodes: each node with pods takes a share.
        ("client", "LB", BOTH_HIDDEN, BOTH, BOTH_HIDDEN),
    ],
)
def test_the_matrix_of_policies(source: str, target: str, svc1: str, svc2: str, svc3: str) -> None:
    answers = [
        told(expect(cluster(**POLICIES[name]), SOURCES[source], TARGETS[target]))
        for name in POLICIES
    ]
    assert answers == [svc1, svc2, svc3]


@pytest.mark.parametrize("source", ["pod", "node", "client"])
@pytest.mark.parametrize("target", ["cIP", "NP", "LB"])
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_without_endpoints(source: str, target: str, policy: str) -> None:
    """P1, at a balancer in front of the nodes too; but a ClusterIP is not routed to it."""
    empty = cluster(pods=False, externalTrafficPolicy=policy)
    silent = source == "client" and target == "cIP"
    assert told(expect(empty, SOURCES[source], TARGETS[target])) == (
        "silence" if silent else "refused"
    )


@pytest.mark.parametrize(
    ("here", "there", "through_balancer", "at_node"),
    [
        ("ready", "unready", "here", "here"),
        ("unready", "ready", "there", "silence"),
        ("unready", "unready", "refused", "refused"),
        (
            "leaving",
            "ready",
            "there",
            "here",
        ),  # KEP-1669: the node's own choice is made among its own endpoints
        ("leaving", "unready", "here", "here"),
        ("leaving", "leaving", BOTH, "here"),
        ("gone", "ready", "there", "silence"),
    ],
)
def test_readiness_with_policy_local(
    here: State, there: State, through_balancer: str, at_node: str
) -> None:
    now = cluster(here=here, there=there, externalTrafficPolicy="Local")
    assert told(expect(now, SOURCES["client"], TARGETS["LB"])) == through_balancer
    assert told(expect(now, SOURCES["client"], TARGETS["NP"])) == at_node
    ready = here == "ready"
    now.services[0]["spec"]["healthCheckNodePort"] = 30999
    assert health_answer(now, now.services[0], "node1") == (200 if ready else 503, int(ready))


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("client", "LB", "silence"),  # P3.6
        ("pod", "LB", "silence"),  # P3.8
        ("node", "LB", BOTH_HIDDEN),  # P3.10
        ("client", "NP", BOTH_HIDDEN),  # P3.3
        ("pod", "cIP", BOTH),  # P3.1
    ],
)
def test_source_ranges(source: str, target: str, wanted: str) -> None:
    now = cluster(loadBalancerSourceRanges=[" 192.0.2.0/24"])
    assert told(expect(now, SOURCES[source], TARGETS[target])) == wanted


def test_other_ports_classes_and_excluded_nodes() -> None:
    pod_, client = SOURCES["pod"], SOURCES["client"]
    assert told(expect(cluster(), pod_, Target(CLUSTER_IP, 81, "TCP"))) == "refused"
    assert told(expect(cluster(), pod_, Target(CLUSTER_IP, 80, "UDP"))) == "refused"
    assert told(expect(cluster(), client, Target(HERE, NODE_PORT, "UDP"))) == "refused"
    assert told(expect(cluster(), client, Target("203.0.113.99", 80, "TCP"))) == "silence"
    foreign = cluster(loadBalancerClass="example.com/other")
    assert told(expect(foreign, client, TARGETS["LB"])) == "silence"
    assert told(expect(foreign, pod_, TARGETS["LB"])) == BOTH_HIDDEN
    for policy, wanted in (("Local", "there"), ("Cluster", BOTH_HIDDEN)):
        excluding = cluster(externalTrafficPolicy=policy)
        excluding.nodes[0]["metadata"]["labels"] = {
            "node.kubernetes.io/exclude-from-external-load-balancers": "true"
        }
        assert told(expect(excluding, client, TARGETS["LB"])) == wanted


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
def test_objections(expected: Expected, observed: list[Observed], good: bool) -> None:
    assert (objection(expected, observed) == "") is good
