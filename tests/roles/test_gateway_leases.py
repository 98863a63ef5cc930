"""A gateway counts as gone only after a time in which its renewals could have been observed."""

from collections.abc import Iterable, Mapping

import msgspec

from fairlead.kube.lease_object import Lease, LeaseSpec
from fairlead.kube.objects import ObjectKey, ObjectMeta
from fairlead.kube.presence import (
    LEAVE_ANNOTATION,
    MAX_ADDRESSES,
    MAX_NAMED,
    MAX_NETWORKS,
    MAX_REASON_LENGTH,
    RECORD_ANNOTATION,
    Claimed,
    NotServed,
    OnLink,
    Presence,
)
from fairlead.model import ServiceKey
from fairlead.plan.direct import DIRECT
from fairlead.plan.gateways import Gateways, gateway_notes
from fairlead.plan.proxying import PROXY
from fairlead.roles.gateways import MAX_PEERS, FoundPeers, GatewayLeases

WEB = ServiceKey("default", "web")
MOST_S = 10.0
DURATION_S = 30


def lease(
    name: str,
    *,
    ready: bool = True,
    refuses: str = "",
    problem: str = "",
    problem_class: str = "",
    announces: tuple[OnLink, ...] = (),
    announced: int = 0,
    claimed: tuple[Claimed, ...] = (),
    macs: tuple[str, ...] = (),
    peer: str = "",
    leaving: str = "",
    asked: str = "",
) -> dict[ObjectKey, Lease | None]:
    """Return a renewed Lease of a gateway."""
    refused = (NotServed(refuses, "no room"),) if refuses else ()
    record = Presence(
        "gateway",
        name,
        "1",
        "",
        ready=ready,
        problem=problem,
        problem_class=problem_class,
        not_served=refused,
        announces=announces,
        announced_count=announced,
        claimed=claimed,
        macs=macs,
        peer=peer,
        leaving=leaving,
    )
    annotations = {RECORD_ANNOTATION: msgspec.json.encode(record).decode()}
    if asked:
        annotations[LEAVE_ANNOTATION] = asked
    metadata = ObjectMeta(name=name, annotations=annotations)
    return {
        ObjectKey("presence", name): Lease(metadata, LeaseSpec(lease_duration_seconds=DURATION_S))
    }


def pass_time(silences: GatewayLeases, seconds: int) -> None:
    for _ in range(seconds):
        silences.advance(1.0)


def test_a_gateway_is_alive_while_it_renews_its_lease() -> None:
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1") | lease("gw2"), first=False)
    pass_time(silences, DURATION_S)
    silences.update(lease("gw2"), first=False)
    assert silences.value().alive == {"gw1", "gw2"}
    pass_time(silences, 1)
    assert silences.value() == Gateways(frozenset({"gw2"}), gone=frozenset({"gw1"}))
    silences.update(lease("gw1"), first=False)
    assert silences.value() == Gateways(frozenset({"gw1", "gw2"}))
    pass_time(silences, DURATION_S)
    silences.update(lease("gw1"), first=False)
    pass_time(silences, 1)
    assert silences.value().gone == {"gw2"}
    silences.update({ObjectKey("presence", "gw2"): None}, first=False)
    assert silences.value().gone == set(), "its Lease was deleted"


def test_silence_counts_only_while_renewals_could_be_observed() -> None:
    """After the API server was unreachable for an hour, gateways have time to renew."""
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1"), first=False)
    silences.advance(3600.0)
    pass_time(silences, DURATION_S - int(MOST_S))
    assert silences.value().alive == {"gw1"}
    pass_time(silences, 1)
    assert not silences.value().alive


def test_a_lease_from_before_the_start_proves_nothing_until_it_changes() -> None:
    silences = GatewayLeases(MOST_S)
    assert silences.decided, "without a Lease no gateway is alive"
    silences.update(lease("gw1") | lease("gw2"), first=True)
    assert not silences.decided
    pass_time(silences, DURATION_S)
    assert not silences.decided
    silences.update(lease("gw2"), first=False)
    assert silences.decided
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1"), first=True)
    pass_time(silences, DURATION_S + 1)
    assert silences.decided
    assert not silences.value().alive


def test_a_gateway_that_continues_to_answer_is_alive_for_itself() -> None:
    """Others keep it alive while its predecessor's tables are in the kernel."""
    silences = GatewayLeases(MOST_S, "gw1", lambda: True)
    silences.update(lease("gw1", ready=False) | lease("gw2", ready=False), first=True)
    assert silences.value().alive == {"gw1"}
    for _ in range(DURATION_S + 1):
        silences.advance(1.0)
        silences.update(lease("gw1", ready=False), first=False)
    assert silences.value().alive == {"gw1"}
    pass_time(silences, DURATION_S + 1)
    assert not silences.value().alive, "it cannot renew its Lease"


def observers(*names: str, continues: bool = False) -> dict[str, GatewayLeases]:
    """Return the views of these gateways, each at its start."""
    return {name: GatewayLeases(MOST_S, name, lambda: continues) for name in names}


def test_gateways_that_start_together_agree_who_is_alive() -> None:
    """Otherwise each would announce all addresses until it learns that others are ready."""
    views = observers("gw1", "gw2", "gw3")
    steps = [
        (lease("gw1", ready=False) | lease("gw2", ready=False), set()),
        (lease("gw3", ready=False), set()),
        (lease("gw2"), {"gw2"}),
        (lease("gw1"), {"gw1", "gw2"}),
        (lease("gw3"), {"gw1", "gw2", "gw3"}),
        (lease("gw1", ready=False), {"gw1", "gw2", "gw3"}),
    ]
    for number, (changed, alive) in enumerate(steps):
        for each in views.values():
            each.update(changed, first=number == 0)
        assert [each.value().alive for each in views.values()] == [alive] * len(views)


def test_gateways_that_restart_together_stay_alive_for_each_other() -> None:
    """The kernel of each answers for its addresses meanwhile."""
    views = observers("gw1", "gw2", continues=True)
    for each in views.values():
        each.update(lease("gw1", ready=False, announced=2), first=True)
        each.update(lease("gw2", ready=False, announced=1), first=False)
        assert each.value().alive == {"gw1", "gw2"}
    pass_time(views["gw1"], DURATION_S)
    views["gw1"].update(lease("gw2", ready=False, announced=1), first=False)
    pass_time(views["gw1"], 1)
    assert "gw2" not in views["gw1"].value().alive, "its start has no end"


def test_a_restart_is_tolerated_but_not_a_start_without_end() -> None:
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1"), first=False)
    for _ in range(DURATION_S):
        silences.update(lease("gw1", ready=False), first=False)
        pass_time(silences, 1)
    assert silences.value().alive == {"gw1"}
    silences.update(lease("gw1", ready=False), first=False)
    pass_time(silences, 1)
    assert not silences.value().alive, "the process runs, but has not adopted the data plane"
    silences.update(lease("new", ready=False), first=False)
    assert not silences.value().alive
    silences.update(lease("new"), first=False)
    assert silences.value().alive == {"new"}


def test_a_gateway_that_reports_a_problem_of_its_host_is_not_gone() -> None:
    """It is alive, and cannot serve anything."""
    silences = GatewayLeases(MOST_S)
    down = "interface eth0 is down"
    for _ in range(2 * DURATION_S):
        silences.update(lease("gw1", ready=False, problem=down), first=False)
        pass_time(silences, 1)
    assert silences.value() == Gateways(frozenset({"gw1"}), problems={"gw1": down})
    assert [str(each) for each in gateway_notes(silences.value(), WEB, DIRECT)] == [
        "gateway gw1 cannot serve it: interface eth0 is down"
    ]
    silences.update(lease("gw1"), first=False)
    pass_time(silences, DURATION_S - 1)
    assert silences.value().problems == {"gw1": down}
    pass_time(silences, 1)
    assert silences.value() == Gateways(frozenset({"gw1"}))


def changes(reports: Iterable[str]) -> list[Mapping[str, str]]:
    """Return the problems that count, one value for each change, of a gateway that reports one of
    these texts each second."""
    silences = GatewayLeases(MOST_S)
    seen: list[Mapping[str, str]] = [{}]
    for problem in reports:
        silences.update(lease("gw1", ready=not problem, problem=problem), first=False)
        pass_time(silences, 1)
        if silences.value().problems != seen[-1]:
            seen.append(silences.value().problems)
    return seen[1:]


def test_a_problem_that_comes_and_goes_changes_little() -> None:
    """Each change concerns all Services."""
    minutes = 60 * DURATION_S
    assert changes(["down", ""] * minutes) == [], "it has never lasted for two seconds"
    assert changes(["down", "down", ""] * minutes) == [{"gw1": "down"}]
    assert changes(["", "", "down", "down", *[""] * DURATION_S]) == [{"gw1": "down"}, {}]
    assert changes(["down"] * 2 + [""] * (DURATION_S - 1) + ["down"] * 9) == [{"gw1": "down"}]


def test_a_text_that_changes_counts_once_in_the_duration_of_a_lease() -> None:
    texts = [f"down {second}" for second in range(3 * DURATION_S + 2)]
    assert changes(texts) == [
        {"gw1": f"down {second}"} for second in range(1, len(texts), DURATION_S)
    ]


def test_a_problem_that_exists_at_the_start_counts_at_once() -> None:
    """Otherwise each restart of the controller would show the Services as ready for a moment."""
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1", ready=False, problem="down"), first=True)
    assert silences.value().problems == {"gw1": "down"}


def ready_or_not(gateways: Gateways, class_name: str = DIRECT) -> list[tuple[str, str]]:
    return [(str(each), each.blocks) for each in gateway_notes(gateways, WEB, class_name)]


def test_a_service_is_ready_while_a_gateway_forwards_and_serves_it() -> None:
    both = frozenset({"gw1", "gw2"})
    down = "gateway gw1 cannot serve it: down"
    assert ready_or_not(Gateways(both, problems={"gw1": "down"})) == [(down, "")]
    assert ready_or_not(Gateways(both, problems={"gw1": "down", "gw2": "down"})) == [
        (f"{down}; gateway gw2 cannot serve it: down", "Ready")
    ]
    no_room = {WEB: {"gw2": "no room"}}
    assert ready_or_not(Gateways(both, no_room)) == [("gateway gw2 cannot serve it: no room", "")]
    assert ready_or_not(Gateways(both, no_room, problems={"gw1": "down"})) == [
        (f"{down}; gateway gw2 cannot serve it: no room", "Ready")
    ]


def test_a_problem_of_one_class_concerns_only_the_services_of_this_class() -> None:
    """HAProxy does not answer: the packets of class direct do not pass it."""
    silences = GatewayLeases(MOST_S)
    hanging, text = "HAProxy does not answer", "gateway gw1 cannot serve it: "

    def report(problem: str, class_name: str, seconds: int) -> list[list[tuple[str, str]]]:
        for _ in range(seconds):
            silences.update(
                lease("gw1", ready=not problem, problem=problem, problem_class=class_name),
                first=False,
            )
            pass_time(silences, 1)
        return [ready_or_not(silences.value(), each) for each in (DIRECT, PROXY)]

    blocked = [(text + hanging, "Ready")]
    assert report(hanging, PROXY, 2) == [[], blocked]
    assert silences.value().forwarding == set(), "addresses of both classes move elsewhere"
    both = f"{hanging}; eth0 is down"
    assert report(both, "", 1) == [[], blocked]
    assert report(both, "", 1) == [[(text + both, "Ready")]] * 2
    assert report(hanging, PROXY, DURATION_S - 1) == [[(text + both, "Ready")]] * 2
    assert report(hanging, PROXY, 1) == [[], blocked]
    assert report("", "", DURATION_S) == [[], []]


def test_a_gateway_that_was_gone_counts_again_when_it_is_ready() -> None:
    """The gateway's host has rebooted: the kernel forwards nothing until the process has started
    completely."""
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1"), first=False)
    pass_time(silences, DURATION_S + 1)
    silences.update(lease("gw1", ready=False), first=False)
    assert not silences.value().alive
    silences.update(lease("gw1"), first=False)
    assert silences.value().alive == {"gw1"}


def test_only_gateways_that_are_alive_can_refuse_a_service() -> None:
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1", refuses="default/web") | lease("gw2"), first=False)
    assert silences.value().refusals == {ServiceKey("default", "web"): {"gw1": "no room"}}
    pass_time(silences, DURATION_S)
    silences.update(lease("gw2"), first=False)
    pass_time(silences, 1)
    assert silences.value().refusals == {}


def test_a_record_that_is_too_long_is_truncated() -> None:
    """The text is shown in conditions, and the API server rejects conditions that are too long."""
    silences = GatewayLeases(MOST_S)
    refused = tuple(
        NotServed(f"default/web-{number}", "no room " * 10_000) for number in range(1500)
    )
    record = Presence("gateway", "gw1" * 10_000, "1", "", ready=True, not_served=refused)
    metadata = ObjectMeta(
        name="gw1", annotations={RECORD_ANNOTATION: msgspec.json.encode(record).decode()}
    )
    silences.update(
        {ObjectKey("presence", "gw1"): Lease(metadata, LeaseSpec(lease_duration_seconds=30))},
        first=False,
    )
    refusals = silences.value().refusals
    assert len(refusals) == MAX_NAMED
    assert {
        len(name) + len(message)
        for reasons in refusals.values()
        for name, message in reasons.items()
    } == {2 * MAX_REASON_LENGTH}


def test_a_lease_without_a_record_is_ignored() -> None:
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1"), first=False)
    silences.update({ObjectKey("presence", "gw1"): Lease(ObjectMeta(name="gw1"))}, first=False)
    silences.update({ObjectKey("presence", "gw2"): None}, first=False)
    assert silences.gateways == {}


def test_the_addresses_of_a_gateway_are_known_while_its_lease_exists() -> None:
    """An entry that is not an address is ignored: a gateway must not exclude a whole network."""
    texts = ("192.0.2.11", "0.0.0.0/0", "2001:DB8::1", "x", *(["192.0.2.12"] * MAX_ADDRESSES))
    record = Presence("gateway", "gw1", "1", "", ready=True, addresses=texts)
    metadata = ObjectMeta(
        name="gw1", annotations={RECORD_ANNOTATION: msgspec.json.encode(record).decode()}
    )
    silences = GatewayLeases(MOST_S)
    key = ObjectKey("presence", "gw1")
    spec = LeaseSpec(lease_duration_seconds=DURATION_S)
    silences.update({key: Lease(metadata, spec)}, first=False)
    pass_time(silences, DURATION_S + 1)
    assert not silences.value().alive
    [addresses] = silences.addresses().values()
    assert addresses[:2] == ["192.0.2.11", "2001:db8::1"]
    assert len(addresses) == MAX_ADDRESSES - 2
    silences.update({key: None}, first=False)
    assert silences.addresses() == {}


def test_a_gateway_announces_the_networks_of_its_record_while_it_is_alive() -> None:
    silences = GatewayLeases(MOST_S)
    links = tuple(OnLink("eth0", f"192.0.2.{number}/32") for number in range(MAX_NETWORKS + 1))
    silences.update(lease("gw1", announces=links[:1]) | lease("gw2"), first=False)
    assert silences.value().announcers == {"gw1": links[:1]}
    silences.update(lease("gw1", announces=links), first=False)
    assert silences.value().announcers == {"gw1": links[:MAX_NETWORKS]}, "a client can write more"
    pass_time(silences, DURATION_S + 1)
    assert silences.value().announcers == {}


def test_an_address_that_another_station_uses_is_known_while_its_gateway_is_alive() -> None:
    silences = GatewayLeases(MOST_S)
    claims = (Claimed("192.0.2.224", "eth0", "02:00:00:00:00:99"), Claimed("x", "eth0", ""))
    silences.update(lease("gw1", claimed=claims) | lease("gw2"), first=False)
    assert silences.value().claimed == {"192.0.2.224": ("gw1", claims[0])}
    pass_time(silences, DURATION_S + 1)
    assert silences.value().claimed == {}


def test_another_gateway_that_accepts_an_address_too_is_no_foreign_station() -> None:
    """Where addresses are announced, it must not answer for the address of another one."""
    silences = GatewayLeases(MOST_S)
    foreign = Claimed("192.0.2.224", "eth0", "02:00:00:00:00:99")
    claims = (foreign, Claimed("192.0.2.225", "eth0", "02:00:00:00:00:02"))
    other = lease("gw2", macs=("02:00:00:00:00:02",))
    silences.update(lease("gw1", claimed=claims) | other, first=False)
    assert silences.value().claimed == {"192.0.2.224": ("gw1", foreign)}
    links = (OnLink("eth0", "192.0.2.0/24"),)
    silences.update(lease("gw1", claimed=claims, announces=links), first=False)
    assert len(silences.value().claimed) == 2


def test_a_lease_from_before_the_start_does_not_prove_that_its_gateway_is_alive() -> None:
    silences = GatewayLeases(MOST_S)
    silences.update(lease("gw1") | lease("gw2"), first=True)
    silences.update(lease("gw2"), first=False)
    assert silences.value().unproved == {"gw1"}
    pass_time(silences, DURATION_S + 1)
    assert silences.value().unproved == set(), "it is gone"


def test_the_peers_of_a_gateway_are_the_others_with_a_lease() -> None:
    """A gateway that is not alive any more may still forward, and may connect."""
    leases = GatewayLeases(MOST_S, own="gw1")
    leases.update(lease("gw2", peer="192.0.2.12:9445") | lease("gw3"), first=True)
    assert leases.peers() is None, "the others do not know this gateway yet"
    leases.update(lease("gw1", peer="192.0.2.11:9445"), first=False)
    other = frozenset({"192.0.2.12:9445"})
    assert leases.peers() == FoundPeers(other, other)
    pass_time(leases, DURATION_S + 1)
    assert leases.peers() == FoundPeers(frozenset(), other)
    leases.update(lease("gw2", peer="[2001:DB8::2]:9445"), first=False)
    moved = frozenset({"[2001:db8::2]:9445"})
    assert leases.peers() == FoundPeers(moved, moved)
    leases.update({ObjectKey("presence", "gw2"): None}, first=False)
    assert leases.peers() == FoundPeers()


def test_addresses_of_peers_that_no_other_host_has_are_left_out() -> None:
    """Any client with the token of a gateway may write a record."""
    leases = GatewayLeases(MOST_S, own="gw1")
    leases.update(lease("gw1", peer="192.0.2.11:9445"), first=False)
    texts = ["x", "x:1", "127.0.0.1:9445", "0.0.0.0:1", "224.0.0.1:1", "[fe80::1]:1", "[::1]:1"]
    texts += ["192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1", f"192.0.2.1:{'1' * 100_000}"]
    for number, text in enumerate(texts):
        leases.update(lease(f"other{number}", peer=text), first=False)
    assert leases.peers() == FoundPeers()


def test_a_gateway_has_a_limited_number_of_peers() -> None:
    """Of more gateways, all choose the same."""
    names = [f"gw{number:03}" for number in range(MAX_PEERS + 1)]
    for own, count in ((names[0], MAX_PEERS - 1), (names[-1], 0)):
        leases = GatewayLeases(MOST_S, own=own)
        for number, name in enumerate(names):
            leases.update(lease(name, peer=f"192.0.2.{number + 1}:9445"), first=False)
        found = leases.peers()
        assert found is not None
        assert len(found.live) == len(found.known) == count


def test_gateways_that_leave_are_known_while_they_are_alive() -> None:
    leases = GatewayLeases(MOST_S, own="gw1")
    text = "x" * 10_000
    leases.update(
        lease("gw1", leaving="2026-01-01T00:00:00Z") | lease("gw2", leaving=text), first=False
    )
    known = {"gw1": "2026-01-01T00:00:00Z", "gw2": text[:MAX_REASON_LENGTH]}
    assert leases.value().leaving == known
    pass_time(leases, DURATION_S + 1)
    leases.update(lease("gw2"), first=False)
    assert leases.value().leaving == {}


def test_only_the_lease_of_a_gateway_asks_it_to_leave() -> None:
    leases = GatewayLeases(MOST_S, own="gw1")
    leases.update(lease("gw2", asked="host_1"), first=False)
    assert leases.asked_to_leave == ""
    leases.update(lease("gw1", asked="host_2"), first=False)
    assert leases.asked_to_leave == "host_2"
    leases.update(lease("gw1"), first=False)
    assert leases.asked_to_leave == ""
