"""Whether a Service's load balancer has a floating IP, and which."""

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
    ("annotations", "requested"),
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
def test_annotations_and_configuration(
    annotations: dict[str, str], requested: FloatingIpRequest | None
) -> None:
    assert read(annotations) == (requested, [])


def test_an_address_is_asked_for_by_the_service() -> None:
    found, _ = read({}, "203.0.113.9")
    assert found == FloatingIpRequest("net", "203.0.113.9", subnet="pool-*")


def test_what_has_no_effect_is_told() -> None:
    assert read({}, internal=True) == (None, [])
    found, told = read({OPENSTACK + "keep-floatingip": "true", INTERNAL: "true"})
    assert (found, told) == (
        None,
        [f"{OPENSTACK}keep-floatingip has no effect: an internal load balancer has no floating IP"],
    )
    found, told = read({OPENSTACK + "floating-subnet": "x"}, family="IPv6")
    assert (found, told) == (
        None,
        [f"{OPENSTACK}floating-subnet has no effect: there are no IPv6 floating IPs"],
    )
    found, told = read(
        {OPENSTACK + "floating-network-id": "x", INTERNAL: "false"}, floating_network_id=""
    )
    (note,) = told
    assert f"floating-network-id, {INTERNAL} have no effect: no floating IPs are configured" in note
    assert read({INTERNAL: "true"}, floating_network_id="") == (None, [])
    _, told = read({INTERNAL: "perhaps"})
    assert told == [f"{INTERNAL} is 'perhaps'; allowed: true, false; the annotation is ignored"]
