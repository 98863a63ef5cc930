"""Whether the load balancer of a Service has a floating IP, and which one."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from fairlead.model import Family, FloatingIpRequest
from fairlead.plan.annotation_reader import AnnotationReader
from fairlead.plan.floating import floating_of
from fairlead.sections import OctaviaConfig

OPENSTACK = "loadbalancer.openstack.org/"
INTERNAL = "service.beta.kubernetes.io/openstack-internal-load-balancer"
CONFIG = OctaviaConfig(floating_network_id="net", floating_subnet="pool-*")


def read(
    annotations: Mapping[str, str], address: str = "", family: Family = "IPv4", **config: Any
) -> tuple[FloatingIpRequest | None, list[str]]:
    reader = AnnotationReader(annotations)
    found = floating_of(
        reader, annotations, msgspec.structs.replace(CONFIG, **config), family, address
    )
    return found, [str(note) for note in reader.notes]


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, FloatingIpRequest("net", subnet="pool-*")),
        ({OPENSTACK + "floating-network-id": "other"}, FloatingIpRequest("other")),
        (
            {OPENSTACK + "floating-subnet-tags": "!a,b"},
            FloatingIpRequest("net", subnet_tags="!a,b"),
        ),
        ({"fairlead.io/floating-subnet-id": "one"}, FloatingIpRequest("net", subnet_id="one")),
        (
            {OPENSTACK + "keep-floatingip": "true"},
            FloatingIpRequest("net", subnet="pool-*", keep=True),
        ),
        (
            {"fairlead.io/keep-address": "true"},
            FloatingIpRequest("net", subnet="pool-*", keep=True),
        ),
        (
            {OPENSTACK + "load-balancer-address": "203.0.113.9"},
            FloatingIpRequest("net", subnet="pool-*", reuse_address="203.0.113.9"),
        ),
        ({INTERNAL: "true"}, None),
        ({INTERNAL: "false"}, FloatingIpRequest("net", subnet="pool-*")),
        ({"fairlead.io/internal": "true"}, None),
    ],
)
def test_annotations_override_the_configured_floating_ips(
    annotations: dict[str, str], expected: FloatingIpRequest | None
) -> None:
    assert read(annotations) == (expected, [])


def test_the_address_that_the_service_requests_becomes_the_floating_ip() -> None:
    found, _ = read({}, "203.0.113.9")
    assert found == FloatingIpRequest("net", "203.0.113.9", subnet="pool-*")


def test_annotations_without_effect_are_reported() -> None:
    assert read({}, internal=True) == (None, [])
    found, messages = read({OPENSTACK + "keep-floatingip": "true", INTERNAL: "true"})
    assert (found, messages) == (
        None,
        [f"{OPENSTACK}keep-floatingip has no effect: an internal load balancer has no floating IP"],
    )
    found, messages = read({OPENSTACK + "floating-subnet": "x"}, family="IPv6")
    assert (found, messages) == (
        None,
        [f"{OPENSTACK}floating-subnet has no effect: there are no IPv6 floating IPs"],
    )
    found, messages = read(
        {OPENSTACK + "floating-network-id": "x", INTERNAL: "false"}, floating_network_id=""
    )
    (note,) = messages
    assert f"floating-network-id, {INTERNAL} have no effect: no floating IPs are configured" in note
    assert read({INTERNAL: "true"}, floating_network_id="") == (None, [])
    _, messages = read({INTERNAL: "perhaps"})
    assert messages == [f"{INTERNAL} is 'perhaps'; allowed: true, false; the annotation is ignored"]
