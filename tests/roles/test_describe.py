"""The Events and conditions in `kubectl describe service` when there is a problem: the problem, and
its remedy. Each row is one problem, created as in a real cluster. All rows are created at the same
time, because a problem must last for a while before it is reported."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.roles.cluster import Cluster


async def requested_in_no_pool(cluster: Cluster) -> None:
    await cluster.apply("no-pool", annotations={"fairlead.io/addresses": "192.0.2.200"})
    await cluster.described(
        "no-pool",
        "Warning",
        "SyncLoadBalancerFailed",
        "192.0.2.200 is in no pool",
        "request another address",
    )
    found = await cluster.has(
        "no-pool", Accepted="False/Refused", Programmed="False/Refused", Ready="False/Refused"
    )
    assert "request another address" in found["Accepted"]["message"]


async def requested_held_by_another(cluster: Cluster) -> None:
    wish = {"fairlead.io/addresses": "203.0.113.29"}
    await cluster.apply("holder", annotations=wish)
    await cluster.addresses("holder")
    await cluster.apply("late", annotations=wish)
    await cluster.described(
        "late",
        "Warning",
        "203.0.113.29",
        f"Service {cluster.namespace}/holder",
        "request another address",
    )
    await cluster.has("late", Accepted="False/Refused")


async def no_pod(cluster: Cluster) -> None:
    await cluster.apply("no-pod", selector={"app": "nothing"})
    look = f"kubectl get pods -n {cluster.namespace} -l app=nothing"
    await cluster.described(
        "no-pod", "Warning", "NoReadyEndpoints", "it has no endpoint", look, "make spec.selector"
    )
    await cluster.has(
        "no-pod",
        Accepted="True/Accepted",
        Programmed="True/Programmed",
        Ready="False/NoReadyEndpoints",
    )


async def pods_not_ready(cluster: Cluster) -> None:
    await cluster.set_endpoints("unready", ("10.244.1.1", "life-1", False))
    await cluster.apply("unready")
    await cluster.described(
        "unready",
        "Warning",
        "NoReadyEndpoints",
        "it has endpoints, and none of them is ready",
        "readiness probes",
    )
    await cluster.has("unready", Ready="False/NoReadyEndpoints")


async def a_port_that_no_pod_has(cluster: Cluster) -> None:
    ports = [
        {"name": "web", "port": 80},
        {"name": "admin", "port": 81, "targetPort": "no-such-name"},
    ]
    await cluster.set_endpoints("no-port", ("10.244.1.2", "life-1", True))
    await cluster.apply("no-port", ports=ports)
    await cluster.described(
        "no-port",
        "Warning",
        "81/TCP (IPv4): no endpoint has this port",
        "check that its targetPort names",
    )


async def neither_selector_nor_slice(cluster: Cluster) -> None:
    await cluster.apply("by-hand", selector=None)
    await cluster.described(
        "by-hand",
        "Warning",
        "NoReadyEndpoints",
        "neither a selector nor an EndpointSlice",
        "create an EndpointSlice",
    )


async def pods_on_a_node_that_is_gone(cluster: Cluster) -> None:
    await cluster.set_endpoints("gone-node", ("10.244.9.1", "life-9", True))
    await cluster.apply("gone-node")
    words = (
        "UnAvailableLoadBalancer",
        "There are no available nodes for LoadBalancer",
        "life-9, not in the cluster",
    )
    await cluster.described("gone-node", "Warning", *words)
    await cluster.has("gone-node", Ready="False/UnAvailableLoadBalancer")


async def pods_on_an_excluded_node(cluster: Cluster) -> None:
    label = "node.kubernetes.io/exclude-from-external-load-balancers"
    await cluster.add_node("life-3", 3)
    await cluster.kubectl("label", "node", "life-3", f"{label}=")
    await cluster.set_endpoints("excluded", ("10.244.3.1", "life-3", True))
    await cluster.apply("excluded")
    await cluster.described(
        "excluded", "Warning", "ready on life-3, excluded by label", f"remove the label {label}"
    )
    await cluster.kubectl("label", "node", "life-3", "--overwrite", f"{label}=false")
    await cluster.has("excluded", Ready="True/EndpointsReady")


async def endpoints_without_node(cluster: Cluster) -> None:
    await cluster.set_endpoints("homeless", ("10.244.1.3", "", True))
    await cluster.apply("homeless", selector=None)
    address = await cluster.addresses("homeless")
    await cluster.described(
        "homeless",
        "Warning",
        "EndpointsWithoutNode",
        "set nodeName in their EndpointSlice",
        "externalTrafficPolicy to Cluster",
    )
    await cluster.has("homeless", Programmed="True/Programmed", Ready="False/EndpointsWithoutNode")
    assert await cluster.addresses("homeless") == address
    await cluster.patch("homeless", {"externalTrafficPolicy": "Cluster"})
    await cluster.has("homeless", Ready="True/EndpointsReady")


async def an_unknown_class(cluster: Cluster) -> None:
    await cluster.apply("nonsense", loadBalancerClass="fairlead.io/nonsense")
    words = (
        "there is no class fairlead.io/nonsense",
        "recreate the Service with one of fairlead.io/announce, fairlead.io/direct",
    )
    await cluster.described("nonsense", "Warning", "SyncLoadBalancerFailed", *words)
    await cluster.has("nonsense", Accepted="False/Refused")


async def every_protocol(cluster: Cluster) -> None:
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "sip", "port": 5060, "protocol": "SCTP"},
    ]
    await cluster.set_endpoints(
        "mixed", ("10.244.1.4", "life-1", True), ports=[("dns", 53, "UDP"), ("sip", 5060, "SCTP")]
    )
    await cluster.apply("mixed", ports=ports)
    await cluster.has(
        "mixed", Accepted="True/Accepted", Programmed="True/Programmed", Ready="True/EndpointsReady"
    )
    shown = await cluster.kubectl.service("mixed")
    (entry,) = shown["status"]["loadBalancer"]["ingress"]
    assert entry["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 5060, "protocol": "SCTP"}]


async def an_invalid_duration(cluster: Cluster) -> None:
    await cluster.set_endpoints("soon", ("10.244.1.6", "life-1", True))
    await cluster.apply("soon", annotations={"fairlead.io/drain-timeout": "soon"})
    await cluster.described(
        "soon",
        "Warning",
        "AnnotationNotUnderstood",
        "fairlead.io/drain-timeout is 'soon'",
        "as in 5m",
    )


async def health_monitor_numbers_out_of_range(cluster: Cluster) -> None:
    annotations = {
        "fairlead.io/health-monitor-delay": "1h",
        "loadbalancer.openstack.org/health-monitor-max-retries": "11",
        "fairlead.io/proxy-protocol": "v2",
    }
    await cluster.set_endpoints("asked", ("10.244.1.7", "life-1", True))
    await cluster.apply("asked", loadBalancerClass="fairlead.io/proxy", annotations=annotations)
    first = "fairlead.io/health-monitor-delay is '1h'; allowed: a whole number from 1 to 3600"
    second = (
        "loadbalancer.openstack.org/health-monitor-max-retries is '11'; allowed: a whole "
        "number from 1 to 10"
    )
    await cluster.described("asked", "Warning", "AnnotationNotUnderstood", first, second)
    await cluster.has("asked", Accepted="True/Accepted", Ready="True/EndpointsReady")
    shown = await cluster.kubectl.service("asked")
    assert [entry["ipMode"] for entry in shown["status"]["loadBalancer"]["ingress"]] == ["Proxy"]


async def source_ranges_without_pods(cluster: Cluster) -> None:
    await cluster.add_node("life-4", 4, pod_cidrs=["10.244.4.0/24"])
    await cluster.set_endpoints("ranged", ("10.244.4.1", "life-4", True))
    await cluster.apply("ranged", loadBalancerSourceRanges=["198.51.100.0/24"])
    words = (
        "LoadBalancerSourceRanges",
        "for example in 10.244.4.0/24",
        "add the ranges of the pods, or let pods use the ClusterIP",
    )
    await cluster.described("ranged", "Warning", *words)
    await cluster.has(
        "ranged",
        Accepted="True/Accepted",
        Programmed="True/Programmed",
        Ready="True/EndpointsReady",
    )


async def another_service_proxy(cluster: Cluster) -> None:
    await cluster.set_endpoints("proxied", ("10.244.1.5", "life-1", True))
    await cluster.apply("proxied")
    await cluster.kubectl(
        "label", "service", "proxied", "service.kubernetes.io/service-proxy-name=other"
    )
    await cluster.described("proxied", "Warning", "OtherServiceProxy", "remove the label")


async def foreign_finalizer(cluster: Cluster) -> None:
    await cluster.apply("kept")
    await cluster.addresses("kept")
    finalizers = '[{"op":"add","path":"/metadata/finalizers/-","value":"example.com/keep"}]'
    await cluster.kubectl("patch", "service", "kept", "--type=json", "-p", finalizers)
    await cluster.kubectl("delete", "service", "kept", "--wait=false")
    await cluster.described(
        "kept",
        "DeletedLoadBalancer",
        "until finalizer example.com/keep is removed",
        "kubectl edit service",
    )
    await cluster.released("kept")


SITUATIONS: list[Callable[[Cluster], Coroutine[Any, Any, None]]] = [
    requested_in_no_pool,
    requested_held_by_another,
    no_pod,
    pods_not_ready,
    a_port_that_no_pod_has,
    neither_selector_nor_slice,
    pods_on_a_node_that_is_gone,
    pods_on_an_excluded_node,
    endpoints_without_node,
    an_unknown_class,
    every_protocol,
    an_invalid_duration,
    health_monitor_numbers_out_of_range,
    source_ranges_without_pods,
    another_service_proxy,
    foreign_finalizer,
]


async def test_describe_shows_the_problem_and_the_remedy(cluster: Cluster) -> None:
    cluster.pool = ("203.0.113.10-203.0.113.29",)
    await cluster.stop_controller()
    await cluster.start_controller()
    async with asyncio.TaskGroup() as group:
        for situation in SITUATIONS:
            group.create_task(situation(cluster), name=situation.__name__)


async def test_an_exhausted_pool_is_reported(cluster: Cluster) -> None:
    await cluster.stop_controller()
    cluster.pool = ("203.0.113.20",)
    await cluster.start_controller()
    await cluster.apply("first")
    (address,) = await cluster.addresses("first")
    await cluster.apply("second")
    await cluster.described(
        "second", "Warning", "SyncLoadBalancerFailed", "no IPv4 address is free", "delete a Service"
    )
    await cluster.has("second", Accepted="False/Refused")
    await cluster.kubectl("delete", "service", "first")
    assert await cluster.addresses("second") == [address]
    await cluster.has("second", Accepted="True/Accepted", Programmed="True/Programmed")


async def test_a_cluster_without_nodes_is_reported(cluster: Cluster) -> None:
    await cluster.remove_node("life-1")
    await cluster.remove_node("life-2")
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web", externalTrafficPolicy="Cluster")
    (address,) = await cluster.addresses("web")
    await cluster.described(
        "web", "Warning", "There are no available nodes for LoadBalancer: there is no Node"
    )
    await cluster.add_node("life-1", 1)
    await cluster.has("web", Ready="True/EndpointsReady")
    assert await cluster.addresses("web") == [address]
