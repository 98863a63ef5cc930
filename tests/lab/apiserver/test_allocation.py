"""Cluster addresses and node ports: allocated, kept, released, and never allocated twice.

Requested numbers are in the lower part of each range, from which no server allocates before the
upper part is exhausted (KEP-3070, KEP-3668).
"""

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lab.apiserver.api import DEADLINE_S, Api, Failed

from fairlead.kube.rules.allocation import Allocator, NodePorts, addresses_of, ports_of
from fairlead.lab.apiserver import ApiFailure, Deletion, Registry, Store, Write
from fairlead.lab.apiserver.kinds import SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")


async def create(api: Api, service: Object) -> Object:
    return await api.create(SERVICES, service)


async def create_at_a_released_address(api: Api, service: Object) -> Object:
    """Create a Service at an address that an update has released a moment ago.

    A loop of kube-apiserver repairs allocations from two caches, of Services and of addresses. When
    the cache of Services is behind the other, the loop allocates the released address again for the
    former Service ("is not allocated; repairing"). The same loop releases it after 5 seconds
    (pkg/registry/core/service/ipallocator/controller/repairip.go).
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await create(api, service)
            except Failed as failed:
                if api.name != "real" or "provided IP is already allocated" not in failed.message:
                    raise
                await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("spec", "families"),
    [
        ({}, ["IPv4"]),
        ({"ipFamilies": ["IPv6"]}, ["IPv6"]),
        ({"ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"]),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]}, ["IPv6", "IPv4"]),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}, ["IPv6", "IPv4"]),
        ({"clusterIP": "2001:db8:96::77"}, ["IPv6"]),
    ],
)
async def test_cluster_ips_follow_the_ip_families(
    api: Api, make_service: Make, spec: Object, families: list[str]
) -> None:
    made = (await create(api, make_service(**spec)))["spec"]
    assert made["ipFamilies"] == families
    assert [("IPv6" if ":" in address else "IPv4") for address in made["clusterIPs"]] == families
    assert made["clusterIP"] == made["clusterIPs"][0]


def test_a_single_stack_cluster_refuses_the_other_family(make_service: Make) -> None:
    registry = Registry(Store(), Allocator(["10.96.0.0/24"]))

    def create(service: Object) -> Object:
        return registry.create(SERVICES, "default", service, WRITE).object

    assert create(make_service("a", ipFamilyPolicy="PreferDualStack"))["spec"]["ipFamilies"] == [
        "IPv4"
    ]
    with pytest.raises(ApiFailure, match="this cluster is not configured for dual-stack services"):
        create(make_service("b", ipFamilyPolicy="RequireDualStack"))
    with pytest.raises(
        ApiFailure,
        match=r'spec.ipFamilies\[0\]: Invalid value: "IPv6": not configured on this cluster',
    ):
        create(make_service("c", ipFamilies=["IPv6"]))


async def test_the_secondary_address_is_allocated_and_released(
    api: Api, make_service: Make
) -> None:
    made = await create(api, make_service())
    dual = deepcopy(made)
    dual["spec"]["ipFamilyPolicy"] = "RequireDualStack"
    both = await api.update(SERVICES, "web", dual)
    assert len(both["spec"]["clusterIPs"]) == 2
    assert both["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    single = deepcopy(both)
    single["spec"]["ipFamilyPolicy"] = "SingleStack"
    one = await api.update(SERVICES, "web", single)
    assert one["spec"]["clusterIPs"] == made["spec"]["clusterIPs"]
    again = make_service("again", clusterIP=both["spec"]["clusterIPs"][1])
    created = await create_at_a_released_address(api, again)
    assert created["spec"]["clusterIPs"] == [both["spec"]["clusterIPs"][1]]


async def test_the_primary_address_cannot_change(api: Api, make_service: Make) -> None:
    made = await create(api, make_service())
    changed = deepcopy(made)
    changed["spec"]["clusterIP"] = "10.96.0.99"
    with pytest.raises(
        Failed, match=r"spec.clusterIPs\[0\]: Invalid value: .*: may not change once set"
    ):
        await api.update(SERVICES, "web", changed)
    await create(api, make_service("other", clusterIP="10.96.0.99"))


async def test_an_address_in_use_is_refused(api: Api, make_service: Make) -> None:
    made = await create(api, make_service(clusterIP="10.96.0.33"))
    assert made["spec"]["clusterIPs"] == ["10.96.0.33"]
    with pytest.raises(
        Failed, match=r"failed to allocate IP 10\.96\.0\.33: provided IP is already allocated"
    ):
        await create(api, make_service("b", clusterIP="10.96.0.33"))
    with pytest.raises(
        Failed,
        match=r"failed to allocate IP 10\.97\.0\.1: the provided network does not match the "
        r"current range",
    ):
        await create(api, make_service("b", clusterIP="10.97.0.1"))


async def test_the_error_messages_about_node_ports(api: Api, make_service: Make) -> None:
    await create(api, make_service(ports=[{"port": 80, "nodePort": 30001}]))
    with pytest.raises(
        Failed,
        match=r"spec.ports\[0\].nodePort: Invalid value: 30001: provided port is already allocated",
    ):
        await create(api, make_service("b", ports=[{"port": 80, "nodePort": 30001}]))
    with pytest.raises(
        Failed,
        match=r"provided port is not in the valid range\. The range of valid ports is 30000-32767",
    ):
        await create(api, make_service("b", ports=[{"port": 80, "nodePort": 80}]))
    expected = (
        "failed to allocate requested HealthCheck NodePort 30001: provided port is already "
        "allocated"
    )
    with pytest.raises(Failed, match=expected):
        await create(
            api, make_service("b", externalTrafficPolicy="Local", healthCheckNodePort=30001)
        )


async def test_headless_services_get_no_cluster_ip(api: Api, make_service: Make) -> None:
    made = (await create(api, make_service(type="ClusterIP", clusterIP="None")))["spec"]
    assert (made["clusterIP"], made["clusterIPs"], made["ipFamilies"]) == (
        "None",
        ["None"],
        ["IPv4"],
    )
    alone = (
        await create(api, make_service("alone", type="ClusterIP", clusterIP="None", selector=None))
    )["spec"]
    assert (alone["ipFamilyPolicy"], alone["ipFamilies"]) == ("RequireDualStack", ["IPv4", "IPv6"])


async def test_a_refused_write_allocates_nothing(api: Api, make_service: Make) -> None:
    for _ in range(3):
        with pytest.raises(Failed):
            await create(
                api,
                make_service(
                    clusterIP="10.96.0.55", ports=[{"port": 80, "nodePort": 30005}, {"port": 81}]
                ),
            )
    made = await create(
        api, make_service(clusterIP="10.96.0.55", ports=[{"port": 80, "nodePort": 30005}])
    )
    assert ports_of(made) == [30005]


async def test_a_dry_run_allocates_nothing(api: Api, make_service: Make) -> None:
    service = make_service(clusterIP="10.96.0.56")
    shown = await api.create(SERVICES, service, dryRun="All")
    assert shown["spec"]["clusterIP"] == "10.96.0.56"
    assert await api.find(SERVICES, "web") is None
    assert (await create(api, service))["spec"]["clusterIP"] == "10.96.0.56"


async def test_a_service_with_a_finalizer_keeps_its_addresses(api: Api, make_service: Make) -> None:
    service = make_service(clusterIP="10.96.0.66", ports=[{"port": 80, "nodePort": 30006}])
    service["metadata"]["finalizers"] = ["example.com/hold"]
    await create(api, service)
    await api.delete(SERVICES, "web")
    for spec in ({"clusterIP": "10.96.0.66"}, {"ports": [{"port": 80, "nodePort": 30006}]}):
        with pytest.raises(Failed, match="already allocated"):
            await create(api, make_service("b", **spec))
    free = await api.get(SERVICES, "web")
    del free["metadata"]["finalizers"]
    await api.update(SERVICES, "web", free)
    assert await api.find(SERVICES, "web") is None
    await create(
        api, make_service("b", clusterIP="10.96.0.66", ports=[{"port": 80, "nodePort": 30006}])
    )


def test_an_exhausted_range_is_an_error() -> None:
    ports = NodePorts(30000, 30001)
    assert [ports.take_any(), ports.take_any()] == [30000, 30001]
    with pytest.raises(ValueError, match="range is full"):
        ports.take_any()
    ports.free(30000)
    assert ports.take_any() == 30000


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "gone"]),
        st.sampled_from(["Cluster", "Local"]),
        st.sampled_from([0, 30000, 30001, 30002]),
        st.sampled_from(["SingleStack", "PreferDualStack", "RequireDualStack"]),
    ),
    max_size=25,
)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_no_value_is_allocated_twice_or_leaked(
    make_service: Make, steps: list[tuple[str, str, str, int, str]]
) -> None:
    """After any sequence of accepted, rejected and deleted writes, exactly the values that Services
    hold are allocated, and each value is held once."""
    store = Store()
    allocator = Allocator(["10.96.0.0/24", "2001:db8:96::/120"])
    registry = Registry(store, allocator)
    refusals: list[int] = []
    for name, kind, policy, port, families in steps:
        spec: Object = {
            "type": kind,
            "ipFamilyPolicy": families,
            "ports": [{"port": 80} | ({"nodePort": port} if port else {})],
        }
        if kind in ("NodePort", "LoadBalancer"):
            spec["externalTrafficPolicy"] = policy
        if kind == "ExternalName":
            spec = {"type": kind, "externalName": "a.example"}
        service = make_service(name) | {"spec": spec}
        try:
            if kind == "gone":
                registry.delete(SERVICES, "default", name, Deletion())
            elif store.get(SERVICES, "default", name):
                registry.update(SERVICES, "default", name, service, WRITE)
            else:
                registry.create(SERVICES, "default", service, WRITE)
        except ApiFailure as refusal:
            refusals.append(refusal.code)
        assert set(refusals) <= {404, 422, 500}
        held = [stored.object for stored in store.all_of(SERVICES)]
        ports = [port for service in held for port in set(ports_of(service))]
        assert sorted(ports) == sorted(allocator.ports.taken)
        addresses = [address for service in held for address in addresses_of(service)]
        assert (
            len(addresses)
            == len(set(addresses))
            == sum(len(each.taken) for each in allocator.addresses.values())
        )
