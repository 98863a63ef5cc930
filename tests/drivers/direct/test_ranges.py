"""Source ranges: the clients that may connect, tested with packets, and the content of the map,
also after errors and crashes."""

from ipaddress import ip_network

import msgspec
import pytest
from tests.drivers.direct.applying import apply_changes
from tests.drivers.direct.conftest import (
    CLIENT4,
    DROP,
    REDIRECT,
    SERVICE,
    VIP4,
    VIP6,
    Forwarder,
    tcp,
)

from fairlead.drivers.direct import spec
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import DROPS
from fairlead.drivers.direct.spec import DirectSpec, ListenerKey, ListenerSpec
from fairlead.model import Outcome, ServiceKey
from fairlead.net.bpf import Map

pytestmark = pytest.mark.root

KEYS = (ListenerKey(VIP4, 80, "TCP"), ListenerKey(VIP6, 80, "TCP"))
OTHER = ServiceKey("default", "other")


def wanted(*cidrs: str, keys: tuple[ListenerKey, ...] = KEYS) -> DirectSpec:
    """Return the spec of a Service with these source ranges, served by node1."""
    listeners = tuple(
        ListenerSpec(key, False, (("node1", 1),), ("node1",), restricted=bool(cidrs))
        for key in keys
    )
    return DirectSpec("uid", listeners, (), cidrs)


def reconcile(
    tables: ListenerMaps, specs: dict[ServiceKey, DirectSpec]
) -> dict[ServiceKey, Outcome]:
    return apply_changes(tables, spec.diff(specs, tables.actual(None)), {})


def admits(forwarder: Forwarder, client: str) -> bool:
    answer = forwarder.run(tcp("A", client=client, ipv6=":" in client))
    assert answer.verdict in (REDIRECT, DROP)
    return answer.verdict == REDIRECT


def restart(forwarder: Forwarder) -> None:
    """Adopt the maps as another process does."""
    forwarder.tables.close()
    forwarder.tables = ListenerMaps(forwarder.maps)
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline(), with_entries=True))


ROWS: dict[str, tuple[tuple[str, ...], dict[str, bool]]] = {
    "no ranges: every client": ((), {CLIENT4: True, "2001:db8:c::7": True}),
    "first and last address": (
        ("198.51.100.64/26", "2001:db8:c::/48"),
        {
            "198.51.100.63": False,
            "198.51.100.64": True,
            "198.51.100.127": True,
            "198.51.100.128": False,
            "2001:db8:b:ffff:ffff:ffff:ffff:ffff": False,
            "2001:db8:c::": True,
            "2001:db8:c:ffff:ffff:ffff:ffff:ffff": True,
            "2001:db8:d::": False,
        },
    ),
    "one address": (("198.51.100.7/32",), {"198.51.100.7": True, "198.51.100.6": False}),
    "ranges of IPv4 alone: no client over IPv6": (
        ("0.0.0.0/0",),
        {CLIENT4: True, "2001:db8:c::7": False},
    ),
    "ranges of IPv6 alone: no client over IPv4": (
        ("::/0",),
        {CLIENT4: False, "2001:db8:c::7": True},
    ),
    "one within another": (
        ("198.51.0.0/16", "198.51.100.0/24"),
        {"198.51.100.7": True, "198.51.7.7": True, "198.52.0.1": False},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_source_ranges_decide_which_clients_may_connect(forwarder: Forwarder, name: str) -> None:
    cidrs, clients = ROWS[name]
    assert reconcile(forwarder.tables, {SERVICE: wanted(*cidrs)}) == {}
    assert {client: admits(forwarder, client) for client in clients} == clients
    assert reconcile(forwarder.tables, {SERVICE: wanted(*cidrs)}) == {}
    assert spec.diff({SERVICE: wanted(*cidrs)}, forwarder.tables.actual(None)) == ()


def test_thousands_of_ranges_change_in_place_and_only_where_they_differ(
    forwarder: Forwarder,
) -> None:
    cidrs = [str(each) for each in ip_network("198.18.0.0/15").subnets(new_prefix=27)][:4000]
    assert reconcile(forwarder.tables, {SERVICE: wanted(*cidrs[:3000])}) == {}
    before = dict(forwarder.maps["listeners"].items())
    assert [
        admits(forwarder, cidr.split("/")[0]) for cidr in (cidrs[0], cidrs[2999], cidrs[3000])
    ] == [True, True, False]
    assert reconcile(forwarder.tables, {SERVICE: wanted(*cidrs[1000:])}) == {}
    assert [
        admits(forwarder, cidr.split("/")[0])
        for cidr in (cidrs[0], cidrs[999], cidrs[1000], cidrs[3999])
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert dict(forwarder.maps["listeners"].items()) == before, "no listener was touched"
    assert forwarder.maps["ranges"].count() == 3000


def test_a_removed_range_cuts_open_connections_and_counts_their_packets(
    forwarder: Forwarder,
) -> None:
    reconcile(forwarder.tables, {SERVICE: wanted("198.51.100.0/24")})
    assert forwarder.run(tcp("S")).verdict == REDIRECT
    reconcile(forwarder.tables, {SERVICE: wanted("192.0.2.0/24")})
    assert forwarder.run(tcp("A")).verdict == DROP
    assert forwarder.event(DROPS.index("forbidden")) == 1
    reconcile(forwarder.tables, {SERVICE: wanted()})
    assert forwarder.run(tcp("A")).verdict == REDIRECT
    assert forwarder.maps["ranges"].count() == 0


def test_services_do_not_share_ranges(forwarder: Forwarder) -> None:
    mine, theirs = wanted("198.51.100.0/24", keys=KEYS[:1]), wanted("192.0.2.0/24", keys=KEYS[1:])
    reconcile(forwarder.tables, {SERVICE: mine, OTHER: theirs})
    assert admits(forwarder, CLIENT4)
    assert not admits(forwarder, "2001:db8:c::7")
    reconcile(forwarder.tables, {OTHER: theirs})
    assert forwarder.maps["ranges"].count() == 1
    taken = wanted("198.51.100.0/25", keys=KEYS)  # with a listener of SERVICE
    reconcile(forwarder.tables, {OTHER: taken})
    assert admits(forwarder, CLIENT4)
    assert not admits(forwarder, "198.51.100.200")


def test_ranges_survive_a_restart_and_unused_ones_are_removed(forwarder: Forwarder) -> None:
    service = wanted("198.51.100.0/24", "2001:db8:c::/48")
    reconcile(forwarder.tables, {SERVICE: service})
    forwarder.tables.set_ranges(OTHER, ("192.0.2.0/24",))  # then the process dies
    assert forwarder.maps["ranges"].count() == 3
    restart(forwarder)
    assert forwarder.maps["ranges"].count() == 2
    (actual,) = forwarder.tables.actual(None).values()
    assert actual.source_ranges == service.source_ranges
    assert admits(forwarder, CLIENT4)
    reconcile(forwarder.tables, {SERVICE: service})
    assert forwarder.maps["ranges"].count() == 2


def test_an_incomplete_set_is_repaired_after_a_restart(
    forwarder: Forwarder,
) -> None:
    service = wanted("198.51.100.0/24", "192.0.2.0/24")
    reconcile(forwarder.tables, {SERVICE: service})
    key, *_ = dict(forwarder.maps["ranges"].items())
    forwarder.maps["ranges"].delete(key)  # as if the process died during a change
    restart(forwarder)
    changes = spec.diff({SERVICE: service}, forwarder.tables.actual(None))
    assert str(changes[0]) == "set ranges default/web 198.51.100.0/24,192.0.2.0/24"
    apply_changes(forwarder.tables, changes, {})
    assert forwarder.maps["ranges"].count() == 2


def test_if_the_map_is_full_no_further_client_may_connect_and_other_services_keep_theirs(
    forwarder: Forwarder,
) -> None:
    full = forwarder.maps["ranges"].spec._replace(max_entries=8)
    with Map.create(full) as small:
        forwarder.tables.close()
        forwarder.tables = ListenerMaps(forwarder.maps | {"ranges": small})
        forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
        reconcile(
            forwarder.tables, {SERVICE: wanted("198.51.100.0/24", "192.0.2.0/24", keys=KEYS[:1])}
        )
        many = wanted("198.51.100.0/24", *(f"203.0.113.{i}/32" for i in range(9)), keys=KEYS[:1])
        other = wanted("2001:db8:c::/48", keys=KEYS[1:])
        outcomes = reconcile(forwarder.tables, {SERVICE: many, OTHER: other})
        assert outcomes.keys() == {SERVICE}
        assert outcomes[SERVICE].state == "unavailable"
        assert "capacity for source ranges is used up" in outcomes[SERVICE].message
        actual = forwarder.tables.actual(None)
        assert actual[SERVICE].source_ranges == ("198.51.100.0/24",), "removed ranges are gone"
        assert actual[OTHER].source_ranges == other.source_ranges
        fewer = msgspec.structs.replace(many, source_ranges=many.source_ranges[:3])
        assert reconcile(forwarder.tables, {SERVICE: fewer, OTHER: other}) == {}
        assert forwarder.tables.actual([SERVICE])[SERVICE].source_ranges == fewer.source_ranges


def test_ranges_that_change_during_a_survey_are_not_overwritten_by_it(
    forwarder: Forwarder,
) -> None:
    tables = forwarder.tables
    reconcile(
        tables,
        {
            SERVICE: wanted("198.51.100.0/24", keys=KEYS[:1]),
            OTHER: wanted("192.0.2.0/24", keys=KEYS[1:]),
        },
    )
    survey = tables.survey(tables.baseline())
    reconcile(tables, {SERVICE: wanted("203.0.113.0/24", keys=KEYS[:1])})  # removes OTHER
    tables.set_ranges(OTHER, ("198.51.100.128/25",))  # its listeners are set later
    tables.adopt(survey)
    assert tables.actual(None)[SERVICE].source_ranges == ("203.0.113.0/24",)
    assert forwarder.maps["ranges"].count() == 2
    reconcile(
        tables,
        {
            SERVICE: wanted("203.0.113.0/24", keys=KEYS[:1]),
            OTHER: wanted("198.51.100.128/25", keys=KEYS[1:]),
        },
    )
    assert tables.actual(None)[OTHER].source_ranges == ("198.51.100.128/25",)
    before = tables.actual(None)
    tables.adopt(tables.survey(tables.baseline()))
    assert tables.actual(None) == before
