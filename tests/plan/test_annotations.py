"""How annotations of Fairlead and of other systems are read."""

import pytest

from fairlead.plan.annotations import (
    ADDRESSES,
    KEEP_ADDRESS,
    POOL,
    SHARING_KEY,
    found,
    without_effect,
)
from fairlead.plan.direct import SUBSTITUTES


@pytest.mark.parametrize(
    ("names", "annotations", "expected"),
    [
        (
            ADDRESSES,
            {"metallb.io/loadBalancerIPs": "203.0.113.7"},
            ("metallb.io/loadBalancerIPs", "203.0.113.7"),
        ),
        (
            ADDRESSES,
            {"metallb.universe.tf/loadBalancerIPs": " 203.0.113.7 "},
            ("metallb.universe.tf/loadBalancerIPs", "203.0.113.7"),
        ),
        (
            ADDRESSES,
            {"metallb.io/loadBalancerIPs": "203.0.113.7", "fairlead.io/addresses": "203.0.113.8"},
            ("fairlead.io/addresses", "203.0.113.8"),
        ),
        (
            ADDRESSES,
            {"metallb.io/loadBalancerIPs": "203.0.113.7", "fairlead.io/addresses": ""},
            ("metallb.io/loadBalancerIPs", "203.0.113.7"),
        ),
        (
            POOL,
            {"metallb.universe.tf/address-pool": "a"},
            ("metallb.universe.tf/address-pool", "a"),
        ),
        (SHARING_KEY, {"metallb.io/allow-shared-ip": "k"}, ("metallb.io/allow-shared-ip", "k")),
        (
            KEEP_ADDRESS,
            {"loadbalancer.openstack.org/keep-floatingip": "true"},
            ("loadbalancer.openstack.org/keep-floatingip", "true"),
        ),
        (KEEP_ADDRESS, {}, ("", "")),
    ],
    ids=[
        "addresses of MetalLB",
        "addresses of an old MetalLB, with spaces",
        "Fairlead precedes MetalLB",
        "an empty annotation does not count",
        "pool of MetalLB",
        "sharing key of MetalLB",
        "kept floating IP of OpenStack",
        "no annotation",
    ],
)
def test_a_fairlead_annotation_takes_precedence_over_one_of_another_system(
    names: tuple[str, ...], annotations: dict[str, str], expected: tuple[str, str]
) -> None:
    assert found(annotations, names) == expected


def test_annotations_without_effect_are_reported_once_for_each_substitute() -> None:
    notes = without_effect(
        {
            "loadbalancer.openstack.org/proxy-protocol": "v2",
            "loadbalancer.openstack.org/x-forwarded-for": "true",
            "loadbalancer.openstack.org/connection-limit": "100",
            "loadbalancer.openstack.org/load-balancer-address": "203.0.113.7",
            "example.com/anything": "true",
        },
        SUBSTITUTES,
    )
    assert [str(note).partition(":")[0] for note in notes] == [
        "loadbalancer.openstack.org/connection-limit has no effect",
        "loadbalancer.openstack.org/proxy-protocol, loadbalancer.openstack.org/x-forwarded-for "
        "have no effect",
    ]


def test_an_annotation_that_requests_nothing_is_not_reported() -> None:
    off = {"proxy-protocol": "false", "connection-limit": "-1", "enable-health-monitor": "False"}
    assert (
        without_effect(
            {f"loadbalancer.openstack.org/{name}": value for name, value in off.items()},
            SUBSTITUTES,
        )
        == []
    )


def test_the_report_of_each_annotation_without_effect_names_the_annotation() -> None:
    for name in SUBSTITUTES:
        [note] = without_effect({f"loadbalancer.openstack.org/{name}": "x"}, SUBSTITUTES)
        assert name in str(note)


def test_the_claim_annotation_is_not_reported_as_without_effect() -> None:
    """`fairlead.io/class` records the class that serves the Service. OpenStack's annotation of the
    same name selects a class of OpenStack's configuration."""
    assert without_effect({"fairlead.io/class": "fairlead.io/direct"}, SUBSTITUTES) == []
    [note] = without_effect(
        {"fairlead.io/class": "fairlead.io/direct", "loadbalancer.openstack.org/class": "gold"},
        SUBSTITUTES,
    )
    assert str(note).startswith("loadbalancer.openstack.org/class has no effect")
