"""What annotations say, ours and those of other systems."""

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
)
def test_our_own_name_comes_first(
    names: tuple[str, ...], annotations: dict[str, str], expected: tuple[str, str]
) -> None:
    assert found(annotations, names) == expected


def test_wishes_that_are_met_otherwise_are_told_once_for_each_thing_done_instead() -> None:
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


def test_what_wishes_for_nothing_is_not_mentioned() -> None:
    off = {"proxy-protocol": "false", "connection-limit": "-1", "enable-health-monitor": "False"}
    assert (
        without_effect(
            {f"loadbalancer.openstack.org/{wish}": value for wish, value in off.items()},
            SUBSTITUTES,
        )
        == []
    )


def test_every_wish_has_an_answer_that_stands_for_itself() -> None:
    for wish in SUBSTITUTES:
        [note] = without_effect({f"loadbalancer.openstack.org/{wish}": "x"}, SUBSTITUTES)
        assert wish in str(note)


def test_the_controllers_own_mark_is_no_wish() -> None:
    """It says who serves the Service; OpenStack's annotation of that name asks for a class of its
    configuration."""
    assert without_effect({"fairlead.io/class": "fairlead.io/direct"}, SUBSTITUTES) == []
    [note] = without_effect(
        {"fairlead.io/class": "fairlead.io/direct", "loadbalancer.openstack.org/class": "gold"},
        SUBSTITUTES,
    )
    assert str(note).startswith("loadbalancer.openstack.org/class has no effect")
