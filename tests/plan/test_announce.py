"""The owner of an announced address: which gateways can own it, shares, and what moves when the
gateways change."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.kube.objects import EXCLUDE_LABEL, Node, ObjectMeta
from fairlead.kube.presence import OnLink
from fairlead.model import Announcement, Listener, LoadBalancer, ServiceKey
from fairlead.plan.announce import (
    Announcers,
    announce_notes,
    announcements_of,
    announcers_of,
    moved,
    owner_of,
)
from fairlead.plan.gateways import Gateways
from fairlead.plan.members import excluded
from fairlead.plan.projection import CLOUD_CONTROLLER, CONTROLLER, GATEWAY, including_excluded

LAN, LAN6 = OnLink("eth0", "192.0.2.0/24"), OnLink("eth0", "2001:db8:1::/64")
EVERYWHERE = (OnLink("eth0", "0.0.0.0/0"), OnLink("eth0", "::/0"))
ADDRESSES = [f"198.51.{number >> 8}.{number & 255}" for number in range(1000)]
ADDRESSES6 = [f"2001:db8:1::{number:x}" for number in range(1000)]
GATEWAYS = st.sets(st.text("abcdefgh-0123456789", min_size=1, max_size=12), min_size=2, max_size=8)


def announcers(links: Mapping[str, tuple[OnLink, ...]]) -> Announcers:
    return announcers_of(Gateways(frozenset(links), announcers=links), {})


def on_lan(*names: str) -> Announcers:
    return announcers(dict.fromkeys(names, (LAN,)))


def anywhere(*names: str) -> Announcers:
    """Return gateways that can announce every address."""
    return announcers(dict.fromkeys(names, EVERYWHERE))


def owners(addresses: list[str], names: Announcers) -> dict[str, str]:
    found = {each: owner_of(each, names) for each in addresses}
    return {address: each.owner for address, each in found.items() if each is not None}


@pytest.mark.parametrize(
    ("address", "links", "interface"),
    [
        ("192.0.2.9", {"gw1": (LAN,)}, "eth0"),
        ("192.0.3.9", {"gw1": (LAN,)}, None),
        ("192.0.2.9", {"gw1": (OnLink("eth1", "192.0.2.8/30"), LAN)}, "eth1"),
        ("192.0.2.9", {"gw1": (OnLink("eth1", "192.0.2.0/24"), LAN)}, "eth0"),
        ("192.0.2.9", {"gw1": (OnLink("eth1", "nonsense"), OnLink("eth2", "2001:db8::/32"))}, None),
        ("192.0.2.9", {}, None),
        ("2001:db8:1::9", {"gw1": (LAN, LAN6)}, "eth0"),
        ("2001:db8:2::9", {"gw1": (LAN, LAN6)}, None),
        ("2001:db8:1::9", {"gw1": (OnLink("eth1", "2001:db8:1::8/125"), LAN6)}, "eth1"),
        ("192.0.2.9", {"gw1": (OnLink("eth1", "::/0"),)}, None),
        ("192.0.2.9", {"gw1": (OnLink("eth1", "::ffff:192.0.2.0/120"),)}, None),
        ("2001:db8:1::9", {"gw1": (OnLink("eth1", "0.0.0.0/0"),)}, None),
    ],
)
def test_an_address_is_announced_where_a_network_contains_it(
    address: str, links: Mapping[str, tuple[OnLink, ...]], interface: str | None
) -> None:
    found = owner_of(address, announcers(links))
    assert (found.interface if found is not None else None) == interface


def test_only_a_gateway_in_the_network_of_an_address_owns_it() -> None:
    other = (OnLink("eth0", "203.0.113.0/24"),)
    names = announcers({"gw1": (LAN,), "gw2": (LAN,), "gw3": other})
    assert set(owners([f"192.0.2.{n}" for n in range(1, 255)], names).values()) == {"gw1", "gw2"}
    assert set(owners([f"203.0.113.{n}" for n in range(1, 255)], names).values()) == {"gw3"}


@pytest.mark.parametrize("addresses", [ADDRESSES, ADDRESSES6], ids=["IPv4", "IPv6"])
def test_addresses_are_shared_equally(addresses: list[str]) -> None:
    names = anywhere("node1", "node2", "node3", "node4")
    shares = Counter(owners(addresses, names).values())
    # Four standard deviations of a binomial distribution are 55.
    assert all(195 <= count <= 305 for count in shares.values()), shares
    assert len(shares) == 4


def test_the_choice_is_the_same_in_every_version() -> None:
    names = on_lan("gw1", "gw2", "gw3")
    found = owners([f"192.0.2.{number}" for number in range(224, 232)], names)
    assert list(found.values()) == ["gw2", "gw1", "gw1", "gw1", "gw2", "gw3", "gw3", "gw3"]
    names = announcers(dict.fromkeys(("gw1", "gw2", "gw3"), (LAN6,)))
    found = owners([f"2001:db8:1::{number:x}" for number in range(224, 232)], names)
    assert list(found.values()) == ["gw1", "gw2", "gw3", "gw3", "gw1", "gw3", "gw1", "gw1"]


@given(GATEWAYS)
def test_the_loss_of_a_gateway_moves_only_its_addresses(names: set[str]) -> None:
    lost = min(names)
    before, after = anywhere(*names), anywhere(*names - {lost})
    addresses = [*ADDRESSES[:100], *ADDRESSES6[:100]]
    first, second = owners(addresses, before), owners(addresses, after)
    differing = {each for each in addresses if first[each] != second[each]}
    assert differing == {each for each in addresses if first[each] == lost}
    assert differing <= moved(addresses, before, after), "others may have another heir"


def test_what_moves() -> None:
    before = on_lan("gw1", "gw2")
    addresses = [f"192.0.2.{number}" for number in range(1, 100)]
    assert moved(addresses, before, on_lan("gw2", "gw1")) == set()
    assert moved([*addresses, "2001:db8::1"], None, before) == {*addresses, "2001:db8::1"}
    other = announcers({"gw1": (OnLink("eth1", "192.0.2.0/24"),), "gw2": (LAN,)})
    found = owners(addresses, before)
    assert moved([*addresses, "2001:db8::1"], before, other) == {
        each for each, owner in found.items() if owner == "gw1"
    }, "another interface of the same owner"
    third = moved(addresses, before, on_lan("gw1", "gw2", "gw3"))
    assert {
        each
        for each, owner in owners(addresses, on_lan("gw1", "gw2", "gw3")).items()
        if owner == "gw3"
    } < third, "and those of which it is the heir"


def test_an_address_returns_to_a_gateway_only_when_its_link_is_steady() -> None:
    settling = msgspec.structs.replace(LAN, settles=True)
    addresses = [f"192.0.2.{number}" for number in range(1, 100)]
    steady = on_lan("gw1", "gw2", "gw3")
    before = on_lan("gw2", "gw3")
    returned = announcers({"gw1": (settling,), "gw2": (LAN,), "gw3": (LAN,)})
    assert owners(addresses, returned) == owners(addresses, before)
    back = {each for each, owner in owners(addresses, steady).items() if owner == "gw1"}
    assert back <= moved(addresses, returned, steady)
    every = announcers(dict.fromkeys(("gw1", "gw2", "gw3"), (settling,)))
    assert owners(addresses, every) == owners(addresses, steady), "no link is steady"


def test_a_gateway_that_leaves_owns_only_what_no_other_can_announce() -> None:
    """Of gateways that all leave, the last one keeps the addresses: the others may be down."""
    addresses = [f"192.0.2.{number}" for number in range(1, 100)]
    other = OnLink("eth1", "203.0.113.0/24")
    settling = msgspec.structs.replace(LAN, settles=True)

    def owners_if(links: Mapping[str, tuple[OnLink, ...]], **leaving: str) -> set[str]:
        gateways = Gateways(frozenset(links), announcers=links, leaving=leaving)
        return set(owners(addresses, announcers_of(gateways, {})).values())

    three = {"gw1": (LAN, other), "gw2": (LAN,), "gw3": (LAN,)}
    assert owners_if(three, gw1="2026-01-01T00:00:01Z") == {"gw2", "gw3"}
    left = announcers_of(Gateways(frozenset(three), announcers=three, leaving={"gw1": "x"}), {})
    found = owners(["203.0.113.7"], left)
    assert found == {"203.0.113.7": "gw1"}
    without = on_lan("gw2", "gw3")
    assert owners(addresses, left) == owners(addresses, without), "the others keep theirs"
    assert owners_if({**three, "gw2": (settling,)}, gw1="x", gw3="x") == {"gw2"}
    all_leave = {f"gw{number}": f"2026-01-01T00:00:0{number}Z" for number in (1, 2, 3)}
    assert owners_if(three, **all_leave) == {"gw3"}


def test_gateways_that_do_not_forward_or_are_excluded_own_nothing() -> None:
    names = frozenset(("gw1", "gw2", "gw3"))
    links = dict.fromkeys(names, (LAN,))
    gateways = Gateways(names, announcers=links, problems={"gw1": "eth0 is down"})
    labelled = {"gw2": Node(ObjectMeta("gw2", labels={EXCLUDE_LABEL: ""}))}
    assert announcers_of(gateways, {}).keys() == {"gw2", "gw3"}
    assert announcers_of(gateways, labelled).keys() == {"gw3"}
    broken = msgspec.structs.replace(gateways, problems=dict.fromkeys(names, "no interface"))
    assert announcers_of(broken, {}).keys() == names, "where nobody forwards, nothing moves"
    partly = msgspec.structs.replace(broken, problem_classes={"gw1": "fairlead.io/proxy"})
    assert announcers_of(partly, {}).keys() == partly.serving(
        ServiceKey("a", "b"), "fairlead.io/direct"
    )
    assert announcers_of(partly, {}).keys() == {"gw1"}, "it forwards for another class"
    excluded = {"gw1": labelled["gw2"]}
    assert announcers_of(partly, excluded).keys() == {"gw2", "gw3"}


def test_a_load_balancer_is_announced_at_its_addresses() -> None:
    listener = Listener("IPv4", 80, "TCP", "Local", 30080, ())
    only_v6 = msgspec.structs.replace(listener, family="IPv6")
    balancer = LoadBalancer(
        ServiceKey("default", "web"),
        "uid",
        "fairlead.io/direct",
        ("192.0.2.10", "2001:db8:1::10", "203.0.113.10"),
        (listener, only_v6),
    )
    first = Announcement("192.0.2.10", "gw1", "eth0")
    dual = announcers({"gw1": (LAN, LAN6)})
    second = Announcement("2001:db8:1::10", "gw1", "eth0")
    assert announcements_of(balancer, dual) == (first, second)
    assert announcements_of(balancer, on_lan("gw1")) == (first,)
    assert announcements_of(balancer, {}) == ()
    names = on_lan("gw1", "gw2", "gw3")
    (owner,) = announcements_of(balancer, names)
    (other,) = announcements_of(balancer, names, lambda _: {owner.owner})
    assert other.owner == owner.heir
    assert announcements_of(balancer, names, lambda _: names.keys()) == (owner,), "none can serve"
    no_ipv4 = msgspec.structs.replace(balancer, listeners=(only_v6,))
    assert announcements_of(no_ipv4, dual) == (second,), "no port is served at the others"


def texts(addresses: list[str], gateways: Gateways, **nodes: Node) -> list[str]:
    return [
        f"{each.code} {each.blocks}: {each}" for each in announce_notes(addresses, gateways, nodes)
    ]


def test_an_address_that_nobody_announces_is_reported_with_the_remedy() -> None:
    links = {"gw1": (LAN,), "gw2": (LAN, OnLink("eth1", "198.51.100.0/24"))}
    gateways = Gateways(frozenset(links), announcers=links)
    assert texts(["192.0.2.224"], gateways) == []
    assert texts(["203.0.113.10", "2001:db8::10"], gateways) == [
        f"AddressNotOnSegment : no gateway announces {address}: it is in no network of their "
        "interfaces (eth0 192.0.2.0/24, eth1 198.51.100.0/24); use an address of such a network, "
        "or route it to the gateways; if routers and clients reach it without a router, add its "
        "network to announce.l2.networks"
        for address in ("203.0.113.10", "2001:db8::10")
    ]


def test_a_service_is_not_ready_if_no_gateway_can_announce() -> None:
    links = {"gw1": (LAN,), "gw2": (LAN,)}
    gateways = Gateways(frozenset(links), announcers=links)
    labels = {EXCLUDE_LABEL: ""}
    nodes = {name: Node(ObjectMeta(name, labels=labels)) for name in links}
    assert texts(["192.0.2.224"], gateways, gw1=nodes["gw1"]) == []
    (labelled,) = texts(["192.0.2.224"], gateways, **nodes)
    assert labelled.startswith("AddressNotAnnounced Ready: no gateway announces 192.0.2.224: all")
    assert f"kubectl label nodes --all {EXCLUDE_LABEL}-" in labelled
    (unable,) = texts(["192.0.2.224"], Gateways(frozenset(links)))
    assert unable.startswith("AddressNotAnnounced Ready: ")
    assert "check announce.l2" in unable
    assert texts(["192.0.2.224"], Gateways()) == [], "that there is no gateway is reported anyway"


def test_the_label_that_excludes_nodes_can_be_ignored() -> None:
    node = Node(ObjectMeta("node1", labels={EXCLUDE_LABEL: "", "zone": "a"}))
    for each in (GATEWAY, CONTROLLER, CLOUD_CONTROLLER):
        before, after = each.node(node), including_excluded(each).node(node)
        assert before is not None
        assert after is not None
        assert excluded(before)
        assert not excluded(after)
        assert after.metadata.labels == {
            name: text for name, text in before.metadata.labels.items() if name != EXCLUDE_LABEL
        }
