"""The desired state at Octavia for a Service."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.octavia.site import listener, member, service, settings

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.balancers import BalancerSpec
from fairlead.drivers.octavia.marks import Owner, service_of
from fairlead.drivers.octavia.render import MAX_WEIGHT, NO_SOURCE, specs_of
from fairlead.model import LoadBalancer, ServiceKey

OWNER = Owner("cluster-uid", "test")


def tree(intent: LoadBalancer) -> BalancerSpec:
    return specs_of({intent.service: intent}, OWNER)[intent.service]


def test_only_tcp_pools_use_the_proxy_protocol() -> None:
    wanted = service(listener(53), listener(53, protocol="UDP"), octavia=settings(header="v1"))
    assert [(each.protocol, each.pool.protocol) for each in tree(wanted).listeners] == [
        ("TCP", "PROXY"),
        ("UDP", "UDP"),
    ]


def test_source_ranges_are_normalized_and_limited_to_the_family_of_the_listener() -> None:
    (found,) = tree(service(source_ranges=("10.1.2.3/8", "2001:db8::/32", "10.0.0.0/8"))).listeners
    assert found.cidrs == ("10.0.0.0/8",)
    (found,) = tree(service(source_ranges=("2001:db8::/32",))).listeners
    assert found.cidrs == (NO_SOURCE["IPv4"],)
    assert bodies.listener(found, ())["allowed_cidrs"] == [NO_SOURCE["IPv4"]]
    (found,) = tree(service()).listeners
    assert "allowed_cidrs" not in bodies.listener(found, ())


def test_session_affinity_is_expressed_in_the_terms_of_each_provider() -> None:
    both = (listener(80), listener(53, protocol="UDP"))
    for provider, method, expected in (
        ("amphora", "ROUND_ROBIN", {"TCP": ("ROUND_ROBIN", 0), "UDP": ("ROUND_ROBIN", 86400)}),
        ("ovn", "SOURCE_IP_PORT", {"TCP": ("SOURCE_IP", None), "UDP": ("SOURCE_IP_PORT", 65535)}),
    ):
        wanted = service(
            *both, octavia=settings(provider=provider, method=method), affinity_timeout_s=86400
        )
        assert {
            each.protocol: (each.pool.method, each.pool.affinity_s)
            for each in tree(wanted).listeners
        } == expected


def test_pools_of_provider_ovn_have_no_weights_and_no_members_of_weight_0() -> None:
    wanted = service(
        listener(80, member(1, 3), member(2, 0)),
        octavia=settings(provider="ovn", monitor_types=(("TCP", "TCP"),)),
    )
    (found,) = tree(wanted).listeners
    assert [(each.address, each.weight, each.monitor_port) for each in found.pool.members] == [
        ("10.1.0.1", 1, None)
    ]


def test_two_nodes_with_one_address_are_one_member_in_the_better_state() -> None:
    """A host that was registered again under another name."""
    new = member(1, 2)
    for old in (
        msgspec.structs.replace(new, node="old-name", weight=0, state="draining"),
        msgspec.structs.replace(new, node="a-name", weight=1, state="down"),
        msgspec.structs.replace(new, node="z-name", weight=1),
    ):
        for provider, weights in (("amphora", [2, 1]), ("ovn", [1, 1])):
            wanted = service(
                listener(80, *sorted((new, old, member(2)))), octavia=settings(provider=provider)
            )
            (found,) = tree(wanted).listeners
            assert [each.address for each in found.pool.members] == ["10.1.0.1", "10.1.0.2"]
            assert [each.weight for each in found.pool.members] == weights


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_weights_are_scaled_to_the_range_that_octavia_accepts(weights: list[int]) -> None:
    wanted = service(
        listener(80, *(member(number, weight) for number, weight in enumerate(weights, 1)))
    )
    (found,) = tree(wanted).listeners
    for requested, made in zip(
        weights, sorted(found.pool.members, key=lambda each: int(each.address[7:])), strict=True
    ):
        assert 0 <= made.weight <= MAX_WEIGHT
        assert bool(requested) == bool(made.weight)
        assert made.weight <= requested


@given(
    st.text("abcdefghij-0123456789", min_size=1, max_size=63),
    st.text("abcdefghij-0123456789", min_size=1, max_size=63),
)
def test_the_service_can_be_read_back_from_its_marks(namespace: str, name: str) -> None:
    key = ServiceKey(namespace, name)
    tags = OWNER.tags(key, "some-uid")
    assert service_of(("foreign", *tags)) == (key, "some-uid")
    assert all(len(tag) <= 255 and "," not in tag for tag in tags)
    assert service_of(("foreign", tags[0])) is None
    assert len(OWNER.load_balancer_name(key)) <= 255
