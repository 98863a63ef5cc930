"""The routes of Services as values, and the texts that BIRD gets."""

import struct
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.drivers.bgp.site import API, VIP, WEB, intent, peer

from fairlead.announce_sections import BfdConfig, BgpConfig
from fairlead.drivers.bgp import communities, process, render, spec
from fairlead.drivers.bgp.peers import (
    ALL_MARK,
    HostFacts,
    check,
    is_session_of,
    mark_of,
    next_hop_limits,
    same_neighbor,
    symbol,
    with_next_hops,
)
from fairlead.drivers.bgp.spec import Actual, BgpSpec, Report, Route, SetRoutes, Withdraw
from fairlead.errors import Unavailable
from fairlead.model import Announcement, ServiceKey

SECTION = BgpConfig(asn=64513)


def test_equal_states_give_no_change_and_changes_lead_to_the_desired_state() -> None:
    intents = {WEB: intent(VIP, "2001:db8::1", weight=2), API: intent("203.0.113.9")}
    desired = spec.specs_of(intents)
    actual = {key: Actual(each.contributions) for key, each in desired.items()}
    assert spec.diff(desired, actual) == []
    changes = spec.diff(desired, {})
    assert changes == [SetRoutes(key, each.contributions) for key, each in desired.items()]
    assert spec.diff({}, actual) == [Withdraw(WEB), Withdraw(API)]
    assert [str(each) for each in spec.diff({}, actual)] == [
        "bgp: withdraw the addresses of default/web",
        "bgp: withdraw the addresses of default/api",
    ]
    assert str(changes[1]) == "bgp: announce 203.0.113.9/32 for default/api"


def test_an_address_that_a_service_loses_is_withdrawn_first() -> None:
    both, one = intent(VIP, "2001:db8::1"), intent(VIP)
    found = spec.specs_of({WEB: both})[WEB].contributions
    kept = spec.specs_of({WEB: one})[WEB].contributions
    actual = {WEB: Actual(found)}
    assert spec.withdrawals({WEB: both}, actual) == []
    assert spec.withdrawals({WEB: one}, actual) == [SetRoutes(WEB, kept)]
    nothing = msgspec.structs.replace(one, announcements=())
    assert spec.withdrawals({WEB: nothing}, actual) == [Withdraw(WEB)]
    # The next diff is the same whether or not the withdrawal has been carried out.
    desired = spec.specs_of({WEB: one})
    assert spec.diff(desired, actual) == [SetRoutes(WEB, kept)]
    assert spec.diff(desired, {WEB: Actual(kept)}) == []


def test_an_address_whose_announcement_changes_is_not_withdrawn_first() -> None:
    actual = {WEB: Actual(spec.specs_of({WEB: intent(VIP)})[WEB].contributions)}
    other = msgspec.structs.replace(intent(), announcements=(Announcement((VIP,), "l2"),))
    assert spec.withdrawals({WEB: other, API: intent(VIP, weight=3)}, actual) == []


def test_announcements_of_other_methods_are_not_announced_by_bgp() -> None:
    other = msgspec.structs.replace(intent(), announcements=(Announcement((VIP,), "l2"),))
    assert spec.diff(spec.specs_of({WEB: other}), {}) == []


def test_an_address_is_kept_until_another_method_announces_it() -> None:
    both, one = intent(VIP, "203.0.113.9"), intent(VIP)
    found = spec.specs_of({WEB: both})[WEB].contributions
    left = spec.specs_of({WEB: one})[WEB].contributions

    def moving(**fields: Any) -> dict[ServiceKey, BgpSpec]:
        moves = Announcement(("203.0.113.9",), "l2", **fields)
        announcements = (*one.announcements, moves)
        return spec.specs_of({WEB: msgspec.structs.replace(one, announcements=announcements)})

    assert spec.diff(moving(), {WEB: Actual(found)}) == [Report(WEB, kept=("203.0.113.9",))]
    moved = Actual(found, moved=frozenset({"203.0.113.9"}))
    assert spec.diff(moving(), {WEB: moved}) == [SetRoutes(WEB, left)]
    assert spec.diff(moving(), {WEB: Actual(left)}) == []
    # It moves back meanwhile, or the host leaves, or it is not announced any more.
    assert spec.diff(spec.specs_of({WEB: both}), {WEB: Actual(found)}) == []
    assert spec.diff(moving(leaving=True), {WEB: Actual(found)}) == [SetRoutes(WEB, left)]
    assert spec.diff(spec.specs_of({WEB: one}), {WEB: Actual(found)}) == [SetRoutes(WEB, left)]
    # What else changes is changed at once.
    weighted = spec.specs_of({WEB: intent(VIP, weight=7)})[WEB].contributions
    (change,) = spec.diff(
        {WEB: msgspec.structs.replace(moving()[WEB], contributions=weighted)}, {WEB: Actual(found)}
    )
    assert isinstance(change, SetRoutes)
    assert change.kept == ("203.0.113.9",)
    assert {each.address: each.weight for each in change.contributions} == {
        VIP: 7,
        "203.0.113.9": 0,
    }


def test_the_order_of_addresses_does_not_matter() -> None:
    one, other = intent("203.0.113.1", "203.0.113.2"), intent("203.0.113.2", "203.0.113.1")
    assert spec.specs_of({WEB: one}) == spec.specs_of({WEB: other})


def test_contributions_to_one_prefix_are_merged() -> None:
    intents = {
        WEB: intent(VIP, peers=("a",), communities=("64512:1",), local_preference=100, weight=2),
        API: intent(VIP, peers=("b",), communities=("64512:2",), local_preference=200, weight=3),
    }
    services = {key: each.contributions for key, each in spec.specs_of(intents).items()}
    wanted = Route(f"{VIP}/32", ("a", "b"), ("64512:1", "64512:2"), 200, 5)
    assert spec.routes_of(services) == {f"{VIP}/32": wanted}
    services[API] = spec.specs_of({API: intent(VIP)})[API].contributions
    assert spec.routes_of(services)[f"{VIP}/32"].peers is None


def test_two_addresses_of_a_service_in_one_aggregate_count_its_pods_once() -> None:
    intents = {WEB: intent("203.0.113.1", "203.0.113.2", aggregation_length=24, weight=3)}
    services = {key: each.contributions for key, each in spec.specs_of(intents).items()}
    assert spec.routes_of(services) == {"203.0.113.0/24": Route("203.0.113.0/24", weight=3)}


@pytest.mark.parametrize(
    ("weights", "limit", "hops"),
    [
        ((3, 1, 1), 3, [3, 1, 1]),
        ((3, 1, 1), 8, [3, 1, 1]),
        ((6, 2, 2), 3, [3, 1, 1]),
        ((9, 4, 1), 3, [3, 1, 1]),
        ((5, 5, 5), 1, [1, 1, 1]),
        ((0, 0, 0), 3, [1, 1, 1]),
    ],
)
def test_next_hops_tell_weights_within_the_number_of_addresses(
    weights: Sequence[int], limit: int, hops: Sequence[int]
) -> None:
    most = max(weights)
    routes = [Route("203.0.113.7/32", weight=each, most=most) for each in weights]
    assert [spec.next_hops_of(each, limit) for each in routes] == hops


def test_the_highest_weight_of_a_prefix_is_the_sum_over_its_services() -> None:
    intents = {WEB: intent(VIP, weight=1, most=3), API: intent(VIP, weight=2, most=4)}
    services = {key: each.contributions for key, each in spec.specs_of(intents).items()}
    assert spec.routes_of(services) == {f"{VIP}/32": Route(f"{VIP}/32", weight=3, most=7)}


def test_next_hops_are_the_addresses_of_the_host_in_the_networks() -> None:
    some = peer(next_hops=("198.51.100.8/29", "2001:db8::/64"), families=("IPv4",))
    addresses = ("198.51.100.1", "198.51.100.11", "198.51.100.9", "2001:db8::1")
    facts = HostFacts(addresses=frozenset(map(ip_address, addresses)))
    found = with_next_hops(some, facts)
    assert found.next_hops == ("198.51.100.9", "198.51.100.11", "2001:db8::1")
    assert next_hop_limits([found, peer("other")]) == {"ipv4": 2, "ipv6": 1}
    assert next_hop_limits([with_next_hops(some, HostFacts())]) == {"ipv4": 1, "ipv6": 1}
    assert next_hop_limits([peer()]) == {"ipv4": 1, "ipv6": 1}


def test_a_route_leaves_only_if_all_its_contributions_do() -> None:
    leaving = spec.specs_of({WEB: intent(leaving=True, communities=("64512:1",))})[WEB]
    staying = spec.specs_of({API: intent()})[API]
    both = {WEB: leaving.contributions, API: staying.contributions}
    assert spec.routes_of(both)[f"{VIP}/32"] == Route(f"{VIP}/32")
    (alone,) = spec.routes_of({WEB: leaving.contributions}).values()
    assert alone.leaving


def test_a_leaving_address_stays_for_the_grace_time_and_is_not_announced_again() -> None:
    staying = spec.specs_of({WEB: intent()})[WEB]
    leaving = spec.specs_of({WEB: intent(leaving=True)})
    assert spec.diff(leaving, {}) == []
    assert spec.diff(leaving, {WEB: Actual(staying.contributions)}) == [
        SetRoutes(WEB, leaving[WEB].contributions)
    ]
    left = leaving[WEB].contributions
    assert spec.diff(leaving, {WEB: Actual(left)}) == []
    assert spec.diff(leaving, {WEB: Actual(left, grace_ended=True)}) == [SetRoutes(WEB, ())]
    back = spec.diff({WEB: staying}, {WEB: Actual(left)})
    assert back == [SetRoutes(WEB, staying.contributions)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "169.254.1.1", "fe80::1", "224.0.0.1"])
def test_an_address_that_no_router_may_learn_keeps_the_present_state(address: str) -> None:
    desired = spec.specs_of({WEB: intent(VIP, address)})
    present = spec.specs_of({WEB: intent(VIP)})[WEB].contributions
    (change,) = spec.diff(desired, {WEB: Actual(present)})
    assert isinstance(change, Report)
    assert address in change.problem


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("64512:100", (64512, 100)),
        ("64512:1:4294967295", (64512, 1, 4294967295)),
        ("no-export", (65535, 65281)),
        ("65536:1", None),
        ("1:2:4294967296", None),
        ("1", None),
        ("1:2:3:4", None),
        ("no-such-name", None),
        ("-1:2", None),
    ],
)
def test_the_notation_of_communities(text: str, numbers: tuple[int, ...] | None) -> None:
    assert communities.parse(text) == numbers


@pytest.mark.parametrize(("weight", "asn"), [(1, 64513), (3, 64513), (1000, 4_200_000_000)])
def test_link_bandwidth_is_transitive_and_in_proportion_to_the_weight(
    weight: int, asn: int
) -> None:
    first, second = communities.link_bandwidth(weight, asn)
    assert first == 0x0004_0000 | (asn if asn < 65536 else 23456)
    (value,) = struct.unpack("!f", struct.pack("!I", second))
    assert value == 125_000 * weight


def test_a_weight_is_a_large_community_if_the_as_number_has_four_bytes() -> None:
    found = communities.collected((), weight=3, asn=4_200_000_000, leaving=False)
    assert found == communities.Communities((), ((4_200_000_000, 0, 3),))


def test_the_file_of_routes_tells_the_next_process_what_is_announced() -> None:
    names = ("a", "b\u2028c")  # of an annotation, so any text
    intents = {WEB: intent(VIP, "2001:db8::1", weight=2, peers=names), API: intent("203.0.113.9")}
    services = {key: each.contributions for key, each in spec.specs_of(intents).items()}
    since = {VIP: "2026-01-01T00:00:00Z"}
    text = render.routes_text(spec.routes_of(services), services, since, asn=64513)
    records = render.records_of(text + "# service: {broken\n")
    assert {key: each.contributions for key, each in records.items()} == services
    assert records[WEB].since[VIP] == "2026-01-01T00:00:00Z"
    assert text.count("\n  route ") == 3


def test_bird_conf_names_its_role_and_its_router_id() -> None:
    text = render.configuration(
        SECTION, [peer()], role="node", router_id="192.0.2.1", routes_file="r", log_file=""
    )
    assert render.owner_of(text) == "node"
    assert render.router_id_of(text) == "192.0.2.1"
    assert render.owner_of("# something else\n") is None
    assert render.router_id_of("") == ""


def test_graceful_restart_needs_bfd_by_default() -> None:
    def text(**fields: Any) -> str:
        return render.configuration(
            SECTION,
            [peer(**fields)],
            role="gateway",
            router_id="192.0.2.1",
            routes_file="r",
            log_file="",
        )

    assert "graceful restart on;" not in text()
    assert "graceful restart on;" in text(bfd=BfdConfig())
    assert "graceful restart on;" not in text(bfd=BfdConfig(), graceful_restart=False)
    assert "long lived stale time" not in text(bfd=BfdConfig(), long_lived_stale_time_s=0)


def test_marks_and_names_of_peers_do_not_depend_on_others() -> None:
    assert mark_of("tor1") == mark_of("tor1") != mark_of("tor2")
    assert ALL_MARK not in {mark_of(f"peer{number}") for number in range(1000)}
    assert symbol(peer("tor1")) == "p.tor1"
    odd = peer("a b; include '/etc/passwd'")
    assert set(symbol(odd)) <= set("h.0123456789abcdef")
    long = peer("x" * 63)
    assert len(symbol(long)) < 60
    unnumbered = peer("tor1", interface="e0")
    assert is_session_of(unnumbered, "p.tor1.session12")
    assert not is_session_of(unnumbered, "p.tor1")
    assert not is_session_of(peer("tor1"), "p.tor12")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keepalive_time_s": 9}, "keepaliveTimeS 9"),
        ({"ttl_security": True, "multihop": 2}, "ttlSecurity"),
        ({"graceful_restart": True}, "gracefulRestart without bfd"),
        ({"password": 'a"b'}, "quotation mark"),
        ({"password": "x" * 81}, "80 bytes"),
        ({"address": "fe80::1"}, "link-local"),
        ({"address": "0.0.0.0"}, "cannot be the address of a router"),
        ({"source_address": "2001:db8::1"}, "different families"),
        ({"source_address": "nonsense"}, "not an IP address"),
    ],
)
def test_a_peer_that_cannot_be_configured_is_refused_with_the_reason(
    fields: dict[str, Any], words: str
) -> None:
    checked = check(SECTION, [peer("bad", **fields), peer("good", "192.0.2.1")], HostFacts())
    assert [each.name for each in checked.accepted] == ["good"]
    (finding,) = checked.refused
    assert finding.code == "PeerRefused"
    assert finding.remedy
    assert words in finding.message


def test_of_two_peers_with_the_same_neighbor_the_first_is_used() -> None:
    checked = check(SECTION, [peer("old", "192.0.2.1"), peer("new", "192.0.2.1")], HostFacts())
    assert [each.name for each in checked.accepted] == ["old"]
    assert "peer old has the same neighbor 192.0.2.1" in checked.refused[0].message


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({"address": "2001:db8::1"}, {"address": "2001:DB8:0::1"}, True),
        ({"address": "2001:db8::1"}, {"address": "2001:db8::2"}, False),
        ({"address": "fe80::1%eth0"}, {"address": "FE80:0::1%eth0"}, True),
        ({"address": "fe80::1%eth0"}, {"address": "fe80::1%eth1"}, False),
        ({"address": "fe80::1%eth0"}, {"address": "", "interface": "eth0"}, True),
        ({"address": "fe80::1%eth0"}, {"address": "", "interface": "eth1"}, False),
        ({"address": "2001:db8::1"}, {"address": "", "interface": "eth0"}, False),
        ({"address": "", "interface": "eth0"}, {"address": "", "interface": "eth0"}, True),
    ],
)
def test_a_neighbor_is_recognized_however_it_is_written(
    old: dict[str, Any], new: dict[str, Any], *, same: bool
) -> None:
    assert same_neighbor(peer("old", **old), peer("new", **new)) == same


def test_a_peer_without_any_own_as_number_is_refused() -> None:
    checked = check(
        BgpConfig(), [peer("one"), peer("two", "192.0.2.1", local_asn=65001)], HostFacts()
    )
    assert [each.name for each in checked.accepted] == ["two"]
    assert "announce.bgp.asn" in checked.refused[0].remedy


def test_a_password_does_not_appear_in_logs() -> None:
    assert "secret" not in f"{peer(password='secret')}"
    assert spec.specs_of({WEB: intent()})[WEB] == BgpSpec((spec.Contribution(f"{VIP}/32", VIP),))


def test_a_file_that_cannot_be_written_is_a_problem_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file or directory"):
        process.write(tmp_path / "gone" / "routes.conf", "")
