"""The life of a Service in its objects, on both API servers. The effects on packets are tested in
tests/e2e."""

import asyncio
import json
from typing import Any

import pytest
from tests.e2e.kubectl import addresses_of
from tests.roles.cluster import FINALIZER, Cluster, until

from fairlead.errors import Conflict
from fairlead.kube.objects import SERVICES, ObjectKey

TIME = "2026-01-01T00:00:00Z"
FULLY = {
    "Accepted": "True/Accepted",
    "Programmed": "True/Programmed",
    "Ready": "True/EndpointsReady",
}


class History:
    """Every version of the namespace's Services that a watch delivers: (name, whether claimed,
    addresses)."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[tuple[str, bool, bool]] = []
        self._cluster = cluster

    async def follow(self, began: asyncio.Event) -> None:
        client, namespace = self._cluster.client, self._cluster.namespace
        page = json.loads(await client.request("GET", SERVICES.path(namespace)))
        parameters = {"resourceVersion": page["metadata"]["resourceVersion"]}
        began.set()
        async for lines in client.stream(SERVICES, parameters=parameters, namespace=namespace):
            for event in map(json.loads, lines):
                shown: Any = event["object"]
                meta = shown["metadata"]
                if event["type"] != "DELETED":
                    claimed = (
                        FINALIZER in meta.get("finalizers", ())
                        and "fairlead.io/class" in meta["annotations"]
                    )
                    self.seen.append((meta["name"], claimed, bool(addresses_of(shown))))


async def test_the_finalizer_is_added_before_the_address_and_removed_after_it(
    cluster: Cluster,
) -> None:
    history, began = History(cluster), asyncio.Event()
    following = asyncio.ensure_future(history.follow(began))
    try:
        await began.wait()
        await cluster.apply("web")
        await cluster.addresses("web")
        await cluster.kubectl("delete", "service", "web", "--timeout=10s")

        async def caught_up() -> bool:
            return any(claimed and not shown for _, claimed, shown in history.seen[-3:])

        await until(caught_up, "the last version in the watch")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    steps = [
        step
        for number, step in enumerate(history.seen)
        if number == 0 or step != history.seen[number - 1]
    ]
    assert steps == [
        ("web", False, False),
        ("web", True, False),
        ("web", True, True),
        ("web", True, False),
    ]


async def test_only_services_of_own_classes_are_claimed(cluster: Cluster) -> None:
    await cluster.stop_controller()
    cluster.default_class = None
    await cluster.start_controller()
    await cluster.apply("named", loadBalancerClass="fairlead.io/direct")
    await cluster.addresses("named")
    await cluster.apply("unnamed")
    await cluster.apply("foreign", loadBalancerClass="example.com/other")
    await cluster.apply("last", loadBalancerClass="fairlead.io/direct")
    await cluster.addresses("last")
    for name in ("unnamed", "foreign"):
        shown = await cluster.released(name)
        assert await cluster.events(name) == []
        assert "finalizers" not in shown["metadata"]
    await cluster.stop_controller()
    cluster.default_class = "fairlead.io/direct"
    await cluster.start_controller()
    await cluster.addresses("unnamed")
    assert await cluster.events("foreign") == []


async def test_changing_the_type_releases_the_service_and_back_claims_it(cluster: Cluster) -> None:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web")
    await cluster.addresses("web")
    await cluster.has("web", **FULLY)
    foreign = {
        "type": "example.com/Known",
        "status": "True",
        "reason": "Known",
        "message": "",
        "lastTransitionTime": TIME,
    }
    body = {"status": {"conditions": [foreign]}}
    await cluster.client.apply(
        SERVICES,
        ObjectKey(cluster.namespace, "web"),
        body,
        field_manager="other",
        subresource="status",
    )
    await cluster.patch("web", {"type": "ClusterIP"})
    shown = await cluster.released("web")
    assert shown["status"]["conditions"] == [foreign]
    await cluster.described("web", "DeletingLoadBalancer", "DeletedLoadBalancer")
    await cluster.patch("web", {"type": "LoadBalancer", "externalTrafficPolicy": "Local"})
    await cluster.addresses("web")
    await cluster.has("web", **FULLY)


async def test_a_service_with_a_new_class_is_released(cluster: Cluster) -> None:
    """The Service has another type meanwhile, because the class of a load balancer is immutable."""
    await cluster.apply("web")
    await cluster.addresses("web")
    await cluster.stop_controller()
    await cluster.patch("web", {"type": "ClusterIP"})
    await cluster.patch("web", {"type": "LoadBalancer", "loadBalancerClass": "example.com/other"})
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.200"}]}}}
    await cluster.kubectl(
        "patch", "service", "web", "--subresource=status", "--type=merge", "-p", json.dumps(status)
    )
    await cluster.start_controller()

    async def let_go() -> bool:
        shown = await cluster.kubectl.service("web")
        ours = (
            FINALIZER in shown["metadata"].get("finalizers", ())
            or "fairlead.io/class" in shown["metadata"]["annotations"]
        )
        return not ours and not await cluster.conditions("web")

    await until(let_go, "the removal of claim and conditions")
    assert addresses_of(await cluster.kubectl.service("web")) == ["198.51.100.200"]


async def test_a_service_deleted_without_a_controller_is_released_by_the_next_one(
    cluster: Cluster,
) -> None:
    await cluster.apply("web")
    (address,) = await cluster.addresses("web")
    await cluster.stop_controller()
    await cluster.kubectl("delete", "service", "web", "--wait=false")
    shown = await cluster.kubectl.service("web")
    assert (
        FINALIZER in shown["metadata"]["finalizers"],
        "deletionTimestamp" in shown["metadata"],
    ) == (True, True)
    await cluster.start_controller()
    await cluster.gone("web")
    await cluster.apply("next")
    assert await cluster.addresses("next") == [address]


async def test_a_service_recreated_during_its_deletion_is_served(cluster: Cluster) -> None:
    await cluster.apply("web")
    await cluster.addresses("web")
    old = (await cluster.kubectl.service("web"))["metadata"]["uid"]
    await cluster.stop_controller()
    await cluster.kubectl("delete", "service", "web", "--wait=false")
    body = {
        "metadata": {"name": "web"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 8080}]},
    }
    path = SERVICES.path(cluster.namespace)
    starting = asyncio.ensure_future(cluster.start_controller())

    async def created() -> bool:
        # The name is free as soon as the old Service is gone, and the new Service is created
        # immediately after.
        try:
            await cluster.client.request("POST", path, body=body)
        except Conflict:
            return False
        return True

    await until(created, "the release of the name")
    await starting
    await cluster.addresses("web")
    shown = await cluster.kubectl.service("web")
    assert shown["metadata"]["uid"] != old
    assert FINALIZER in shown["metadata"]["finalizers"]
    assert shown["status"]["loadBalancer"]["ingress"][0]["ports"] == [
        {"port": 8080, "protocol": "TCP"}
    ]
    new = [event for event in await cluster.events("web") if event["involvedObject"]["uid"] != old]
    # A real API server also writes Events about its own repairs. The Event about missing ready
    # endpoints appears if the controller is slow.
    ours = {
        event["reason"]: event["count"]
        for event in new
        if event["source"].get("component") == "fairlead-controller"
    }
    ours.pop("NoReadyEndpoints", None)
    assert ours == {"EnsuringLoadBalancer": 1, "EnsuredLoadBalancer": 1}


async def test_addresses_follow_the_ip_families(cluster: Cluster) -> None:
    await cluster.apply("web", ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"])
    (four,) = await cluster.addresses("web")
    await cluster.patch(
        "web", {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv4", "IPv6"]}
    )
    both = await cluster.addresses("web", 2)
    assert both[0] == four
    await cluster.patch(
        "web", {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"], "clusterIPs": None}
    )
    assert await cluster.addresses("web") == [four]
    await cluster.apply("six", ipFamilyPolicy="SingleStack", ipFamilies=["IPv6"])
    (six,) = await cluster.addresses("six")
    assert ":" in six


async def test_a_service_without_node_ports_is_served(cluster: Cluster) -> None:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web", allocateLoadBalancerNodePorts=False)
    await cluster.addresses("web")
    await cluster.has("web", **FULLY)
    assert "nodePort" not in (await cluster.kubectl.service("web"))["spec"]["ports"][0]


async def test_ports_are_shown_and_follow_the_spec(cluster: Cluster) -> None:
    both = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    await cluster.apply("web", ports=both, ipFamilyPolicy="RequireDualStack")
    await cluster.addresses("web", 2)
    entries = (await cluster.kubectl.service("web"))["status"]["loadBalancer"]["ingress"]
    shown = [{"port": 53, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]
    assert [(each["ipMode"], each["ports"]) for each in entries] == [("VIP", shown), ("VIP", shown)]
    await cluster.patch("web", {"ports": [{"name": "web", "port": 443}]})

    async def follows() -> bool:
        entries = (await cluster.kubectl.service("web"))["status"]["loadBalancer"]["ingress"]
        return all(each["ports"] == [{"port": 443, "protocol": "TCP"}] for each in entries)

    await until(follows, "the new port")
    await cluster.described("web", "UpdatedLoadBalancer")


async def test_a_condition_keeps_its_time_until_its_status_changes(cluster: Cluster) -> None:
    await cluster.apply("web", selector={"app": "a"})
    first = (await cluster.has("web", Ready="False/NoReadyEndpoints"))["Ready"]
    # Times have a resolution of one second.
    await asyncio.sleep(1.1)
    await cluster.patch("web", {"selector": {"app": "b"}})

    async def other_words() -> Any:
        ready = (await cluster.conditions("web"))["Ready"]
        return ready if ready["message"] != first["message"] else None

    second = await until(other_words, "the new selector in the message")
    assert "app=b" in second["message"]
    assert second["lastTransitionTime"] == first["lastTransitionTime"]
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    third = (await cluster.has("web", Ready="True/EndpointsReady"))["Ready"]
    assert third["lastTransitionTime"] > first["lastTransitionTime"]


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
async def test_a_service_without_endpoints_keeps_its_address(cluster: Cluster, policy: str) -> None:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web", externalTrafficPolicy=policy)
    address = await cluster.addresses("web")
    await cluster.has("web", **FULLY)
    await cluster.set_endpoints("web")
    await cluster.has("web", Programmed="True/Programmed", Ready="False/NoReadyEndpoints")
    assert await cluster.addresses("web") == address
    await cluster.set_endpoints("web", ("10.244.1.2", "life-2", True), name="another")
    await cluster.has("web", **FULLY)
    assert await cluster.addresses("web") == address
