"""The EndpointSlices and Endpoints that a Service gets from the existing pods."""

from collections.abc import Iterable, Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.kube.objects import (
    Condition,
    Container,
    ContainerPort,
    EndpointConditions,
    EndpointPort,
    PodIP,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
)
from fairlead.lab.objects import Endpoints, Meta, Pod, PodSpec, PodStatus, Slice
from fairlead.lab.slices import MAX_ENDPOINTS, compare, plan_endpoints, plan_slices

READY = EndpointConditions(True, True, False)
NOT_READY = EndpointConditions(False, False, False)
TERMINATING = EndpointConditions(False, True, True)


def make_service(*ports: ServicePort, **spec: object) -> Service:
    fields: dict[str, object] = {
        "selector": {"app": "web"},
        "ip_families": ("IPv4",),
        "ports": ports or (ServicePort(80),),
    }
    metadata = ServiceMeta("web", "default", "uid-web", labels={"tier": "front"})
    return Service(metadata, ServiceSpec(**fields | spec))  # type: ignore[arg-type]


def make_pod(
    number: int,
    *,
    ready: bool = True,
    deleted: bool = False,
    phase: str = "Running",
    ports: Sequence[ContainerPort] = (),
    labels: dict[str, str] | None = None,
    addressed: bool = True,
) -> Pod:
    metadata = Meta(
        f"web-{number:04}",
        "default",
        f"uid-{number}",
        labels=labels or {"app": "web", "extra": "x"},
        deletion_timestamp="2026-01-01T00:00:00Z" if deleted else None,
    )
    addresses = (
        (PodIP(f"10.244.{number >> 8}.{number & 255}"), PodIP(f"2001:db8:244::{number:x}"))
        if addressed
        else ()
    )
    conditions = (Condition("Ready", str(ready)),)
    spec = PodSpec((Container("web", ports=tuple(ports)),), f"node{number % 3}")
    return Pod(metadata, spec, PodStatus(phase, addresses, conditions))


def conditions_of(slices: Iterable[Slice]) -> list[EndpointConditions]:
    return [endpoint.conditions for slice_ in slices for endpoint in slice_.endpoints or ()]


def test_the_slice_of_one_ready_pod_as_json() -> None:
    (slice_,) = plan_slices(
        make_service(ServicePort(80, "http", target_port=8080)), [make_pod(1)]
    ).values()
    assert msgspec.json.decode(msgspec.json.encode(slice_)) == {
        "metadata": {
            "name": "web-ipv4-0",
            "namespace": "default",
            "labels": {
                "tier": "front",
                "kubernetes.io/service-name": "web",
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": "web",
                    "uid": "uid-web",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["10.244.0.1"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": "node1",
                "targetRef": {
                    "kind": "Pod",
                    "namespace": "default",
                    "name": "web-0001",
                    "uid": "uid-1",
                },
            }
        ],
        "ports": [{"port": 8080, "name": "http"}],
    }


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_pod(1), READY),
        (make_pod(1, ready=False), NOT_READY),
        (make_pod(1, deleted=True), TERMINATING),
        (make_pod(1, ready=False, deleted=True), EndpointConditions(False, False, True)),
    ],
)
def test_conditions_follow_the_pod(pod: Pod, expected: EndpointConditions) -> None:
    assert conditions_of(plan_slices(make_service(), [pod]).values()) == [expected]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_pod(1, ready=False), EndpointConditions(True, False, False)),
        (make_pod(1, deleted=True), EndpointConditions(True, True, True)),
    ],
)
def test_not_ready_addresses_are_published_on_request(
    pod: Pod, expected: EndpointConditions
) -> None:
    service = make_service(publish_not_ready_addresses=True)
    assert conditions_of(plan_slices(service, [pod]).values()) == [expected]


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(1, labels={"app": "other"}),
        make_pod(1, phase="Succeeded"),
        make_pod(1, phase="Failed"),
        make_pod(1, addressed=False),
    ],
)
def test_a_pod_that_cannot_answer_is_no_endpoint(pod: Pod) -> None:
    assert plan_slices(make_service(), [pod]) == {}


@pytest.mark.parametrize("spec", [{"selector": None}, {"selector": {}}, {"type": "ExternalName"}])
def test_a_service_without_selector_is_left_alone(spec: dict[str, object]) -> None:
    assert plan_slices(make_service(**spec), [make_pod(1)]) == {}


def test_each_family_has_its_own_slices() -> None:
    slices = plan_slices(make_service(ip_families=("IPv6", "IPv4")), [make_pod(7)])
    assert {
        slice_.address_type: slice_.endpoints[0].addresses
        for slice_ in slices.values()
        if slice_.endpoints
    } == {
        "IPv4": ("10.244.0.7",),
        "IPv6": ("2001:db8:244::7",),
    }


def test_a_named_port_is_resolved_for_each_pod() -> None:
    old = make_pod(1, ports=[ContainerPort(8080, "web"), ContainerPort(9090, "web", "UDP")])
    new = make_pod(2, ports=[ContainerPort(8081, "web")])
    without = make_pod(3)
    slices = plan_slices(
        make_service(ServicePort(80, "http", target_port="web")), [new, without, old]
    )
    assert {
        slice_.ports: [endpoint.addresses[0] for endpoint in slice_.endpoints or ()]
        for slice_ in slices.values()
    } == {
        (): ["10.244.0.3"],
        (EndpointPort("http", 8080),): ["10.244.0.1"],
        (EndpointPort("http", 8081),): ["10.244.0.2"],
    }


def test_the_target_port_defaults_to_the_port() -> None:
    (slice_,) = plan_slices(make_service(ServicePort(53, "dns", "UDP")), [make_pod(1)]).values()
    assert slice_.ports == (EndpointPort("dns", 53, "UDP"),)


def test_a_headless_service_is_labelled() -> None:
    (slice_,) = plan_slices(make_service(cluster_ip="None"), [make_pod(1)]).values()
    assert slice_.metadata.labels["service.kubernetes.io/headless"] == ""


@given(st.integers(0, 350))
def test_slices_hold_every_pod_once_and_are_never_too_large(count: int) -> None:
    slices = plan_slices(make_service(), [make_pod(number) for number in range(count)]).values()
    sizes = [len(slice_.endpoints or ()) for slice_ in slices]
    assert sum(sizes) == count
    assert max(sizes, default=0) <= MAX_ENDPOINTS
    assert len(sizes) == -(-count // MAX_ENDPOINTS)


PODS = st.lists(
    st.builds(make_pod, st.integers(1, 300), ready=st.booleans(), deleted=st.booleans()),
    unique_by=lambda pod: pod.metadata.name,
    max_size=20,
)


@given(PODS, st.randoms())
def test_the_order_of_pods_does_not_matter(pods: list[Pod], random: Random) -> None:
    shuffled = list(pods)
    random.shuffle(shuffled)
    assert plan_slices(make_service(), pods) == plan_slices(make_service(), shuffled)


@given(PODS, PODS)
def test_applying_the_result_of_compare_gives_the_desired_slices(
    before: list[Pod], after: list[Pod]
) -> None:
    service = make_service(ip_families=("IPv4", "IPv6"))
    written = {
        name: msgspec.structs.replace(
            slice_, metadata=msgspec.structs.replace(slice_.metadata, resource_version="7", uid="u")
        )
        for name, slice_ in plan_slices(service, before).items()
    }
    desired = plan_slices(service, after)
    difference = compare(desired, written)
    assert all(slice_.metadata.resource_version == "7" for slice_ in difference.replace)
    for slice_ in difference.delete:
        del written[slice_.metadata.name]
    for slice_ in difference.create:
        assert slice_.metadata.name not in written
    written |= {
        slice_.metadata.name: slice_ for slice_ in (*difference.create, *difference.replace)
    }
    assert compare(desired, written) == ((), (), ())
    assert {name: slice_.endpoints for name, slice_ in written.items()} == {
        name: slice_.endpoints for name, slice_ in desired.items()
    }


def endpoints_of(service: Service, *pods: Pod) -> Endpoints:
    found = plan_endpoints(service, pods)
    assert found is not None
    return found


def test_endpoints_as_json() -> None:
    """The Endpoints contain only addresses of the first family. Unready pods are listed separately,
    terminating pods not at all."""
    web = make_service(ServicePort(80, "http", target_port=8080), ip_families=("IPv6", "IPv4"))
    pods = (
        make_pod(1),
        make_pod(2, ready=False),
        make_pod(3, deleted=True),
        make_pod(4, phase="Failed"),
    )

    def pod_with_number(number: int) -> dict[str, object]:
        reference = {
            "kind": "Pod",
            "namespace": "default",
            "name": f"web-{number:04}",
            "uid": f"uid-{number}",
        }
        return {
            "ip": f"2001:db8:244::{number}",
            "nodeName": f"node{number % 3}",
            "targetRef": reference,
        }

    assert msgspec.json.decode(msgspec.json.encode(endpoints_of(web, *pods))) == {
        "metadata": {
            "name": "web",
            "namespace": "default",
            "labels": {
                "tier": "front",
                "endpoints.kubernetes.io/managed-by": "endpoint-controller",
            },
        },
        "subsets": [
            {
                "addresses": [pod_with_number(1)],
                "notReadyAddresses": [pod_with_number(2)],
                "ports": [{"name": "http", "port": 8080}],
            }
        ],
    }


def test_endpoints_have_a_subset_for_each_set_of_ports() -> None:
    web = make_service(ServicePort(80, "http", target_port="web"))
    pods = [
        make_pod(n, ports=[ContainerPort(port, "web")] if port else ())
        for n, port in ((1, 8080), (2, 9090), (3, 0))
    ]
    subsets = endpoints_of(web, *pods).subsets or ()
    assert [
        ([a.ip for a in subset.addresses], [p.port for p in subset.ports]) for subset in subsets
    ] == [
        (["10.244.0.1"], [8080]),
        (["10.244.0.2"], [9090]),
    ]


def test_endpoints_list_unready_pods_with_publish_not_ready_addresses() -> None:
    web = make_service(publish_not_ready_addresses=True)
    (subset,) = endpoints_of(web, make_pod(1, ready=False), make_pod(2, deleted=True)).subsets or ()
    assert [address.ip for address in subset.addresses] == ["10.244.0.1", "10.244.0.2"]
    assert subset.not_ready_addresses == ()


def test_endpoints_of_a_service_without_a_selector_or_without_pods() -> None:
    assert plan_endpoints(make_service(selector={}), [make_pod(1)]) is None
    assert endpoints_of(make_service()).subsets == ()
