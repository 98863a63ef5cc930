"""The ledger under random changes of Services and pools: no port is assigned twice, an assignment
of the changed Services gives the same result as an assignment of all Services, and its cost depends
on the Services that the change concerns.

In: Services that are created, changed and deleted, pools that change, grants that are written at
once or later. After each step, the ledger, which gets only the changes, is compared with a ledger
that gets everything."""

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlead.announce_sections import LabelSelector
from fairlead.config import PoolConfig, ServiceAllocation
from fairlead.errors import Refused
from fairlead.model import Family, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import AddressRequest, Assigned, Facts, HeldAddress
from fairlead.plan.ledger import Ledger
from fairlead.plan.pools import ServiceLabels, read_pools

KEYS = [ServiceKey(namespace, name) for namespace in ("one", "two") for name in "abcde"]
POOLS = (
    (PoolConfig("main", ("203.0.113.1-203.0.113.4", "2001:db8::1-2001:db8::2")),),
    (
        PoolConfig("main", ("203.0.113.3-203.0.113.4",)),
        PoolConfig("other", ("198.51.100.0/30",), avoid_buggy_ips=True),
    ),
    (
        PoolConfig("main", ("203.0.113.1-203.0.113.3", "2001:db8::1")),
        PoolConfig("on-request", ("203.0.113.4",), auto_assign=False),
        PoolConfig(
            "two",
            ("198.51.100.1-198.51.100.2",),
            service_allocation=ServiceAllocation(2, namespaces=("two",)),
        ),
        PoolConfig(
            "labelled",
            ("198.51.100.9",),
            service_allocation=ServiceAllocation(
                1, service_selectors=(LabelSelector({"tier": "front"}),)
            ),
        ),
    ),
    (),
)
ADDRESSES = ("203.0.113.1", "203.0.113.2", "203.0.113.4", "2001:db8::1", "198.51.100.2")
PORTS = ("TCP/80", "TCP/443", "UDP/53")
FAMILIES: tuple[tuple[Family, ...], ...] = (("IPv4",), ("IPv6",), ("IPv4", "IPv6"))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "families": draw(st.sampled_from(FAMILIES)),
        "all_families": draw(st.booleans()),
        "requested": draw(
            st.one_of(st.just(()), st.sampled_from(ADDRESSES).map(lambda address: (address,)))
        ),
        "pool": draw(st.sampled_from(("", "", "", "main", "other"))),
        "ports": frozenset(draw(st.sets(st.sampled_from(PORTS), min_size=1))),
        "sharing_key": draw(st.sampled_from(("", "", "k", "l"))),
        "labels": draw(st.sampled_from(({}, {"tier": "front"}))),
    }


def granted(result: Assigned, facts: Facts) -> dict[str, HeldAddress]:
    """Return the addresses of a Service after all its assigned grants are written. They include the
    addresses that it had before."""
    held = dict(facts.held)
    for grant in result.grants:
        before = held.get(grant.address, HeldAddress())
        ports = frozenset(grant.ports) | (before.granted or frozenset())
        held[grant.address] = msgspec.structs.replace(
            before, granted=ports, kept=False, pool=grant.pool, sharing_key=grant.sharing_key
        )
    return held


class Bounded(Ledger):
    """A ledger that fails if one change takes more than 200 evaluations."""

    def assign(self, facts: Mapping[ServiceKey, Facts]) -> set[ServiceKey]:
        self.limit = self.evaluations + 200
        return super().assign(facts)

    def _draft_held(self, key: ServiceKey) -> None:
        assert self.evaluations < self.limit, f"{key} and others are evaluated endlessly"
        super()._draft_held(key)


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Bounded()
        self.facts: dict[ServiceKey, Facts] = {}
        self.clock = 0
        self.configured: tuple[PoolConfig, ...] = POOLS[0]
        self.ledger.use(read_pools(self.configured, ()))

    def assign(self, changed: Mapping[ServiceKey, Facts]) -> None:
        self.facts.update(changed)
        self.ledger.assign(changed)
        for key in [key for key, facts in self.facts.items() if facts == Facts()]:
            del self.facts[key]

    def request(self, key: ServiceKey, request: dict[str, Any], since: str) -> AddressRequest:
        rest = {name: value for name, value in request.items() if name != "labels"}
        return AddressRequest(
            **rest, since=since, service_labels=ServiceLabels(key.namespace, request["labels"])
        )

    @rule(changes=st.dictionaries(st.sampled_from(KEYS), requests(), min_size=1, max_size=3))
    def create_or_change(self, changes: dict[ServiceKey, dict[str, Any]]) -> None:
        changed = {}
        for key, request in changes.items():
            facts = self.facts.get(key, Facts())
            self.clock += 1
            since = (
                facts.request.since
                if isinstance(facts.request, AddressRequest)
                else f"{self.clock % 7}"
            )
            changed[key] = Facts(self.request(key, request, since), facts.held)
        self.assign(changed)

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1, max_size=3), kept=st.booleans())
    def delete(self, keys: set[ServiceKey], kept: bool) -> None:
        changed = {}
        for key in keys & self.facts.keys():
            left = {
                address: HeldAddress(kept=True, sharing_key=held.sharing_key)
                for address, held in self.facts[key].held.items()
            }
            changed[key] = Facts(None, left if kept else {})
        self.assign(changed)

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1, max_size=4))
    def write_grants(self, keys: set[ServiceKey]) -> None:
        changed = {}
        for key in keys & self.facts.keys():
            if isinstance(result := self.ledger.result(key), Assigned):
                changed[key] = Facts(self.facts[key].request, granted(result, self.facts[key]))
        self.assign(changed)

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1, max_size=4))
    def release_surplus(self, keys: set[ServiceKey]) -> None:
        changed = {}
        for key in keys & self.facts.keys():
            if isinstance(result := self.ledger.result(key), Assigned):
                mine = {grant.address: frozenset(grant.ports) for grant in result.grants}
                left = {
                    address: msgspec.structs.replace(
                        held, granted=(held.granted or frozenset()) & mine[address]
                    )
                    for address, held in self.facts[key].held.items()
                    if address in mine
                }
                changed[key] = Facts(self.facts[key].request, left)
        self.assign(changed)

    @rule(pools=st.sampled_from(POOLS))
    def change_pools(self, pools: tuple[PoolConfig, ...]) -> None:
        self.configured = pools
        self.ledger.use(read_pools(pools, ()))
        self.assign({**dict.fromkeys(self.ledger.known, Facts()), **self.facts})

    @invariant()
    def no_port_is_assigned_twice(self) -> None:
        assigned_to: dict[tuple[str, str], ServiceKey] = {}
        for key in self.facts:
            if isinstance(result := self.ledger.result(key), Assigned):
                for grant in result.grants:
                    for port in grant.ports:
                        other = assigned_to.setdefault((grant.address, port), key)
                        assert other == key, f"{grant.address} {port}: {other}, {key}"

    @invariant()
    def a_granted_port_is_assigned_to_no_other_service(self) -> None:
        for key, facts in self.facts.items():
            for address, held in facts.held.items():
                for other in self.facts.keys() - {key}:
                    if isinstance(result := self.ledger.result(other), Assigned):
                        ports = {
                            port
                            for grant in result.grants
                            if grant.address == address
                            for port in grant.ports
                        }
                        assert not ports & (held.granted or frozenset())

    @invariant()
    def new_addresses_are_shared_only_by_sharing_key_within_a_namespace(self) -> None:
        holders: dict[str, set[tuple[str, str]]] = {}
        for key, facts in self.facts.items():
            if isinstance(result := self.ledger.result(key), Assigned) and isinstance(
                facts.request, AddressRequest
            ):
                for address in result.addresses:
                    if address not in facts.held:
                        holders.setdefault(address, set()).add(
                            (key.namespace, facts.request.sharing_key or str(key))
                        )
        assert all(len(each) == 1 for each in holders.values()), holders

    @invariant()
    def an_assignment_of_all_services_changes_nothing(self) -> None:
        whole = copy.deepcopy(self.ledger)
        whole.assign(self.facts)
        for key in self.facts:
            result, before = whole.result(key), self.ledger.result(key)
            # If there are several reasons for a refusal, it may name another one.
            assert result == before or (
                isinstance(result, Refused) and isinstance(before, Refused)
            ), key

    @invariant()
    def a_new_ledger_gives_the_same_result_when_all_grants_are_written(self) -> None:
        new = Bounded()
        new.use(read_pools(self.configured, ()))
        results = {key: self.ledger.result(key) for key in self.facts}
        facts = {
            key: Facts(each.request, granted(result, each))
            if isinstance(result := results[key], Assigned)
            else each
            for key, each in self.facts.items()
        }
        new.assign(facts)
        # A written grant contains the sharing key of its address, with which another Service may
        # get the address as well. So the old ledger is compared after it has the grants, too.
        old = copy.deepcopy(self.ledger)
        old.assign(facts)
        for key in results:
            if isinstance(result := old.result(key), Assigned):
                repeated = new.result(key)
                assert isinstance(repeated, Assigned)
                assert (repeated.addresses, repeated.rivals) == (result.addresses, result.rivals)
            else:
                assert type(new.result(key)) is type(result)

    @invariant()
    def each_pool_counts_at_least_the_addresses_in_use(self) -> None:
        held = {address for facts in self.facts.values() for address in facts.held}
        for key in self.facts:
            if isinstance(result := self.ledger.result(key), Assigned):
                held.update(result.addresses)
        for pool in self.ledger.pools.in_order:
            for family in ("IPv4", "IPv6"):
                mine = {
                    a
                    for a in held
                    if family_of(a) == family and (f := self.ledger.pools.find(a)) and f[0] is pool
                }
                assert pool.assigned[family] >= len(mine)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=80, stateful_step_count=12, deadline=None, report_multiple_bugs=False
)


def request(number: int, **request: Any) -> AddressRequest:
    return AddressRequest(
        ("IPv4",),
        since=f"{number:06}",
        ports=frozenset({"TCP/80"}),
        service_labels=ServiceLabels("default"),
        **request,
    )


def test_the_rivals_of_a_service_name_the_holder_of_a_port_at_each_address() -> None:
    """A Service has a port at all of its addresses or at none. So a port that it lacks at one
    address may later be assigned to another Service at its other address."""
    history = History()
    a, b, c = KEYS[:3]
    request: dict[str, Any] = {
        "all_families": False,
        "requested": (),
        "pool": "",
        "sharing_key": "k",
        "labels": {},
    }
    history.create_or_change({a: request | {"families": ("IPv4",), "ports": frozenset({"TCP/80"})}})
    history.create_or_change(
        {c: request | {"families": ("IPv4", "IPv6"), "ports": frozenset({"TCP/80", "TCP/443"})}}
    )
    history.create_or_change({b: request | {"families": ("IPv6",), "ports": frozenset({"TCP/80"})}})
    result = history.ledger.result(c)
    assert isinstance(result, Assigned)
    assert {(rival.address, rival.holder) for rival in result.rivals} == {
        ("203.0.113.1", a),
        ("2001:db8::1", b),
    }


@pytest.fixture
def ten_thousand() -> tuple[Ledger, dict[ServiceKey, Facts]]:
    """Return a ledger in which all 9,000 addresses of a pool are assigned and 1,000 Services wait,
    and the facts of all Services."""
    ledger = Ledger()
    ledger.use(read_pools([PoolConfig("main", ("10.0.0.0-10.0.35.39",))], ()))
    facts = {
        ServiceKey("default", f"s{number:05}"): Facts(request(number)) for number in range(10_000)
    }
    ledger.assign(facts)
    assert sum(isinstance(ledger.result(key), Assigned) for key in facts) == 9_000
    return ledger, facts


def test_a_change_evaluates_only_the_services_that_it_concerns(
    ten_thousand: tuple[Ledger, dict[ServiceKey, Facts]],
) -> None:
    ledger, facts = ten_thousand
    keys = list(facts)

    def cost(changed: Mapping[ServiceKey, Facts]) -> tuple[int, set[ServiceKey]]:
        before = ledger.evaluations
        touched = ledger.assign(changed)
        return ledger.evaluations - before, touched

    assert cost({keys[5]: facts[keys[5]]}) == (1, set()), "the facts are the same"
    evaluations, touched = cost({keys[5]: Facts()})
    assert touched == {keys[5], keys[9_000]}, "the first waiting Service gets the free address"
    assert evaluations <= 4
    assert ledger.result(keys[9_000]).addresses == ("10.0.0.5",)  # type: ignore[union-attr]
    evaluations, touched = cost({ServiceKey("default", "new"): Facts(request(20_000))})
    assert touched == {ServiceKey("default", "new")}
    assert evaluations == 1
    evaluations, touched = cost({key: Facts() for key in keys[10:60]})
    assert len(touched) == 100
    assert evaluations <= 200
