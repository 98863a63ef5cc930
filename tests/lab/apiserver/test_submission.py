"""What `fairlead plan` expects of the API server is what the API server does."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.lab.apiserver.api import Api, Failed

from fairlead.kube.objects import Node, NodeAddress, NodeStatus, ObjectMeta, Service
from fairlead.kube.submission import Families, Submission, families_of_cluster, submit
from fairlead.lab.apiserver.kinds import SERVICES

Object = dict[str, Any]
DUAL_STACK = Families(("IPv4", "IPv6"), certain=True)
PORT = {"port": 80}
LOCAL = {"externalTrafficPolicy": "Local"}
SPECS: Mapping[str, Object] = {
    "one port": {},
    "local": LOCAL,
    "local with ports": LOCAL
    | {"healthCheckNodePort": 30111, "ports": [PORT | {"nodePort": 30112}]},
    "no node ports": {"allocateLoadBalancerNodePorts": False},
    "a node port in spite of that": {
        "allocateLoadBalancerNodePorts": False,
        "ports": [PORT | {"nodePort": 30113}],
    },
    "TCP and UDP": {
        "ports": [PORT | {"name": "t"}, PORT | {"name": "u", "protocol": "UDP", "nodePort": 30114}]
    },
    "dual stack required": {"ipFamilyPolicy": "RequireDualStack"},
    "dual stack preferred": {"ipFamilyPolicy": "PreferDualStack"},
    "IPv6": {"ipFamilies": ["IPv6"]},
    "IPv6 first": {"ipFamilies": ["IPv6"], "ipFamilyPolicy": "RequireDualStack"},
    "two families, one stack": {"ipFamilies": ["IPv4", "IPv6"]},
    "a family twice": {"ipFamilies": ["IPv4", "IPv4"], "ipFamilyPolicy": "RequireDualStack"},
    "no such family": {"ipFamilies": ["IPv5"]},
    "no such family policy": {"ipFamilyPolicy": "Dual"},
    "nulls": dict.fromkeys(
        ("clusterIP", "externalIPs", "ipFamilies", "loadBalancerIP", "sessionAffinity", "selector")
    )
    | {"ports": [PORT | dict.fromkeys(("name", "protocol", "targetPort", "nodePort"))]},
    "a null in strings": {"selector": {"app": None}},
    "affinity": {"sessionAffinity": "ClientIP"},
    "affinity without time": {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}},
    },
    "cluster IP": {"type": "ClusterIP"},
    "external IP": {"type": "ClusterIP", "externalIPs": ["198.51.100.7"]},
    "external name": {"type": "ExternalName", "externalName": "example.com", "ports": None},
    "headless": {"type": "ClusterIP", "clusterIP": "None"},
    "headless load balancer": {"clusterIP": "None"},
    "headless node port": {"type": "NodePort", "clusterIP": "None"},
    "health port is a node port": LOCAL
    | {"healthCheckNodePort": 30115, "ports": [PORT | {"nodePort": 30115}]},
    "health port without local": {"healthCheckNodePort": 30116},
    "no port": {"ports": None},
    "port 0": {"ports": [{"port": 0}]},
    "port as text": {"ports": [{"port": "80"}]},
    "port name": {"ports": [PORT | {"name": "HTTP"}]},
    "ports without names": {"ports": [PORT, {"port": 81}]},
    "ports of one name": {"ports": [PORT | {"name": "a"}, {"name": "a", "port": 81}]},
    "one node port": {
        "ports": [
            PORT | {"name": "a", "nodePort": 30117},
            {"name": "b", "port": 81, "nodePort": 30117},
        ]
    },
    "target name": {"ports": [PORT | {"targetPort": "longer-than-15-letters"}]},
    "no such protocol": {"ports": [PORT | {"protocol": "tcp"}]},
    "no such type": {"type": "Loadbalancer"},
    "no such policy": {"externalTrafficPolicy": "local"},
    "no such internal policy": {"internalTrafficPolicy": "local"},
    "source ranges": {"loadBalancerSourceRanges": [" 198.51.100.0/24"]},
    "no source range": {"loadBalancerSourceRanges": ["198.51.100.0"]},
    "class of another type": {"type": "NodePort", "loadBalancerClass": "fairlead.io/direct"},
    "no class name": {"loadBalancerClass": "a b"},
    "cluster IPs alone": {"clusterIPs": ["10.96.0.77"]},
    "cluster IPs that differ": {"clusterIP": "10.96.0.77", "clusterIPs": ["10.96.0.78"]},
    "cluster IPs of one family": {
        "clusterIP": "10.96.0.77",
        "clusterIPs": ["10.96.0.77", "10.96.0.78"],
        "ipFamilyPolicy": "RequireDualStack",
    },
    "no cluster IP": {"clusterIP": "10.96.0.300"},
    "loopback": {"externalIPs": ["127.0.0.1"]},
}


def service(namespace: str, spec: Object) -> Object:
    fields = {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [PORT]} | spec
    metadata = {"name": "web", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": fields}


async def test_services_are_completed_and_refused_as_by_the_api_server(api: Api) -> None:
    different = {}
    for name, spec in SPECS.items():
        written = service(api.namespace, spec)
        (ours,) = submit([written], DUAL_STACK)
        try:
            stored = await api.create(SERVICES, written)
        except Failed as failed:
            if not agree(ours, failed):
                different[name] = (ours, failed.message)
            continue
        await api.call("DELETE", f"/api/v1/namespaces/{api.namespace}/services/web")
        theirs = msgspec.convert(stored, Service)
        if ours.service is None or essence(ours.service) != essence(theirs):
            different[name] = (ours, stored["spec"])
        elif not spec.get("clusterIP") and ours.service.spec.cluster_ip:
            different[name] = (ours, "nobody knows its ClusterIP beforehand")
    assert not different


def agree(ours: Submission, failed: Failed) -> bool:
    """Return whether the refusal was expected, for the same reason. For a wrong type the server
    answers 400, with a message in the terms of Go."""
    return bool(ours.refused) and (failed.code == 400 or failed.message.endswith(ours.refused))


def essence(stored: Service) -> object:
    """Return the spec, with what the server chooses reduced to the fact that it has chosen."""
    spec = stored.spec
    return msgspec.structs.replace(
        spec,
        cluster_ip="",
        cluster_ips=(),
        health_check_node_port=int(bool(spec.health_check_node_port)),
        ports=tuple(
            msgspec.structs.replace(each, node_port=int(bool(each.node_port)))
            for each in spec.ports
        ),
    )


def test_what_the_server_chooses_is_never_a_reason_to_refuse() -> None:
    """The chosen ports are neither those that later Services request, nor few."""
    many = [{"name": f"p{number}", "port": number} for number in range(1, 4001)]
    requested = [
        {"name": f"p{port}", "port": port, "nodePort": port} for port in range(30000, 32768)
    ]
    found = submit(
        [service("a", LOCAL), service("b", {"ports": many}), service("c", {"ports": requested})],
        Families(),
    )
    assert [each.refused for each in found] == [""] * 3
    first, _, last = found
    assert first.chosen_node_ports == frozenset([(80, "TCP")])
    assert first.chosen_health_port
    assert (last.chosen_node_ports, last.known_later) == (frozenset(), ())


def test_a_port_or_address_that_another_service_has_is_refused() -> None:
    port = {"ports": [PORT | {"nodePort": 30080}]}
    _, taken = submit([service("a", port), service("b", port)], Families())
    assert taken.refused.endswith("provided port is already allocated (Service a/web has 30080)")
    address = {"clusterIP": "10.96.0.9"}
    _, taken = submit([service("a", address), service("b", address)], Families())
    assert taken.refused.endswith("(Service a/web has 10.96.0.9)")


def test_what_depends_on_the_cluster_is_not_refused_unless_the_cluster_is_known() -> None:
    required = service("a", {"ipFamilyPolicy": "RequireDualStack"})
    preferred = service("b", {"ipFamilyPolicy": "PreferDualStack"})
    port = service("c", {"ports": [PORT | {"nodePort": 80}]})
    bits = service("d", {"loadBalancerSourceRanges": ["198.51.100.7/24"]})
    found = submit([required, preferred, port, bits], Families())
    assert [bool(each.refused) for each in found] == [False] * 4
    assert [each.service.spec.ip_families for each in found[:2] if each.service] == [
        ("IPv4", "IPv6"),
        ("IPv4",),
    ]
    later = [" ".join(each.known_later) for each in found]
    assert "unless its cluster has Services of IPv4 and IPv6" in later[0]
    assert "if the cluster has Services of both" in later[1]
    assert "refuses node port 80 unless its option --service-node-port-range" in later[2]
    assert "Kubernetes 1.36 refuses it, and older versions accept it" in later[3]
    alone = Families(("IPv4",), certain=True)
    found = submit([required, preferred], alone)
    assert "not configured for dual-stack services" in found[0].refused
    assert found[1].service is not None
    assert found[1].service.spec.ip_families == ("IPv4",)
    (found_dual,) = submit([preferred], DUAL_STACK)
    assert found_dual.service is not None
    assert found_dual.service.spec.ip_families == ("IPv4", "IPv6")


def test_a_service_that_a_server_has_stored_is_not_completed() -> None:
    """It has what it was allocated. Missing ports were not wanted when it was created."""
    stored = service("a", LOCAL | {"allocateLoadBalancerNodePorts": None})
    stored["metadata"]["uid"] = "1"
    (found,) = submit([stored], Families())
    assert found.service is not None
    assert (found.service.spec.health_check_node_port, found.known_later) == (0, ())


@pytest.mark.parametrize(
    ("nodes", "service_cidrs", "families"),
    [
        ([], (), Families(("IPv4",))),
        ([], ("2001:db8:96::/112",), Families(("IPv6",), certain=True)),
        (
            [("192.0.2.1", "2001:db8::1"), ("192.0.2.2", "2001:db8::2")],
            (),
            Families(("IPv4", "IPv6")),
        ),
        ([("2001:db8::1", "192.0.2.1"), ("2001:db8::2",)], (), Families(("IPv6",))),
        ([("2001:db8::1",), ("2001:db8::2",)], ("10.0.0.0/8",), Families(("IPv4",), certain=True)),
    ],
)
def test_the_families_of_a_cluster_are_those_of_its_configuration_or_of_its_nodes(
    nodes: Sequence[Sequence[str]], service_cidrs: Sequence[str], families: Families
) -> None:
    made = [
        Node(
            ObjectMeta(name=f"n{number}"),
            status=NodeStatus(tuple(NodeAddress("InternalIP", each) for each in addresses)),
        )
        for number, addresses in enumerate(nodes)
    ]
    assert families_of_cluster(made, service_cidrs) == families
