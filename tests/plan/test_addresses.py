"""The assignment of addresses: held addresses come first, then requested ones; a held address does
not change, and no address is assigned twice."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.config import PoolConfig
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.plan.addresses import AddressRequest, Assigned, Facts, HeldAddress
from fairlead.plan.ledger import Ledger
from fairlead.plan.pools import read_pools

POOL = PoolConfig("main", ("203.0.113.1-203.0.113.4",))
POOL6 = PoolConfig("six", ("2001:db8:f::1-2001:db8:f::2",))
A, B, C = (ServiceKey("default", name) for name in "abc")


Result = Assigned | Refused | None


def assign(
    pools: Sequence[PoolConfig],
    held: Mapping[ServiceKey, Sequence[str]],
    requests: Mapping[ServiceKey, AddressRequest],
) -> dict[ServiceKey, Result]:
    """Return the result of one assignment of all Services. `held`: addresses in their status."""
    ledger = Ledger()
    ledger.use(read_pools(pools, ()))
    facts = {}
    for key in held.keys() | requests.keys():
        request = requests.get(key)
        ports = request.ports if request is not None else frozenset({"TCP/80"})
        facts[key] = Facts(
            request, {address: HeldAddress(shown=ports) for address in held.get(key, ())}
        )
    ledger.assign(facts)
    return {key: ledger.result(key) for key in requests}


def granted(result: dict[ServiceKey, Result], key: ServiceKey) -> tuple[str, ...]:
    grant = result[key]
    assert isinstance(grant, Assigned), str(grant)
    return grant.addresses


def test_a_sharing_key_gives_only_an_address_at_which_a_requested_port_is_free() -> None:
    web, other = frozenset({"TCP/80"}), frozenset({"TCP/81"})
    keyed = {
        key: AddressRequest(("IPv4",), ports=ports, sharing_key="k")
        for key, ports in ((A, web), (B, web), (C, other))
    }
    result = assign([POOL], {A: ["203.0.113.1"]}, keyed)
    assert [granted(result, key) for key in (A, B, C)] == [
        ("203.0.113.1",),
        ("203.0.113.2",),
        ("203.0.113.1",),
    ]


def test_an_address_is_not_shared_by_services_of_gateways_and_of_nodes() -> None:
    web, other = frozenset({"TCP/80"}), frozenset({"TCP/81"})
    of_gateways = AddressRequest(("IPv4",), ports=web, sharing_key="k")
    for requested in ((), ("203.0.113.1",)):
        of_nodes = AddressRequest(
            ("IPv4",), ports=other, sharing_key="k", requested=requested, place="nodes"
        )
        held = {A: ["203.0.113.1"]}
        for first, second, words in (
            (of_gateways, of_nodes, "gateways serve the address 203.0.113.1 for Service default/a"),
            (
                msgspec.structs.replace(of_nodes, requested=()),
                msgspec.structs.replace(of_gateways, ports=web, requested=requested),
                "nodes announce the address 203.0.113.1 for Service default/a",
            ),
        ):
            result = assign([POOL], held, {A: first, B: second})
            assert granted(result, A) == ("203.0.113.1",)
            assert isinstance(result[B], Refused)
            assert words in str(result[B])
            assert "the same class" in str(result[B])
            same = msgspec.structs.replace(second, place=first.place)
            result = assign([POOL], held, {A: first, B: same})
            assert granted(result, B) == ("203.0.113.1",)


def test_a_change_of_the_requested_pool_does_not_change_the_address_and_is_reported() -> None:
    request = AddressRequest(("IPv4",), pool="other", ports=frozenset({"TCP/80"}))
    result = assign(
        [POOL, PoolConfig("other", ("198.51.100.1",))], {A: ["203.0.113.1"]}, {A: request}
    )[A]
    assert isinstance(result, Assigned)
    assert result.addresses == ("203.0.113.1",)
    assert ["an address does not change by itself" in str(note) for note in result.notes] == [True]


def test_a_held_address_is_not_assigned_to_a_new_service() -> None:
    result = assign(
        [POOL], {B: ["203.0.113.1"]}, {A: AddressRequest(("IPv4",)), B: AddressRequest(("IPv4",))}
    )
    assert granted(result, B) == ("203.0.113.1",)
    assert granted(result, A) == ("203.0.113.2",)


def test_a_service_that_requests_an_address_comes_before_services_that_take_any_address() -> None:
    result = assign(
        [POOL],
        {},
        {A: AddressRequest(("IPv4",)), B: AddressRequest(("IPv4",), requested=("203.0.113.1",))},
    )
    assert granted(result, B) == ("203.0.113.1",)
    assert granted(result, A) == ("203.0.113.2",)


def test_an_address_changes_only_if_the_service_requests_another_one() -> None:
    held = {A: ["203.0.113.3"], B: ["198.51.100.9"]}
    result = assign(
        [POOL],
        held,
        {A: AddressRequest(("IPv4",), requested=("203.0.113.4",)), B: AddressRequest(("IPv4",))},
    )
    assert granted(result, A) == ("203.0.113.4",)
    assert granted(result, B) == ("198.51.100.9",), "a held address stays, even outside all pools"


@pytest.mark.parametrize(
    ("address_request", "words"),
    [
        (AddressRequest(("IPv4",), requested=("203.0.113.1",)), "is held by Service default/b"),
        (AddressRequest(("IPv4",), requested=("192.0.2.1",)), "is in no pool (main)"),
        (AddressRequest(("IPv4",), requested=("2001:db8:f::1",)), "is IPv6, which is not among"),
        (AddressRequest(("IPv6",)), "no IPv6 address is free"),
        (AddressRequest(("IPv4",), pool="none"), "there is no pool 'none'"),
        (AddressRequest(("IPv4", "IPv6"), all_families=True), "no IPv6 address is free"),
    ],
)
def test_a_refusal_tells_its_reason(address_request: AddressRequest, words: str) -> None:
    result = assign(
        [POOL], {B: ["203.0.113.1"]}, {A: address_request, B: AddressRequest(("IPv4",))}
    )
    error = result[A]
    assert isinstance(error, Refused)
    assert words in str(error)


def test_an_address_family_without_a_free_address_is_reported() -> None:
    grant = assign([POOL], {}, {A: AddressRequest(("IPv4", "IPv6"))})[A]
    assert isinstance(grant, Assigned)
    assert grant.addresses == ("203.0.113.1",)
    assert [note.code for note in grant.notes] == ["AddressFamilySkipped"]


def test_a_refusal_says_that_no_pool_is_configured() -> None:
    error = assign([], {}, {A: AddressRequest(("IPv4",))})[A]
    assert isinstance(error, Refused)
    assert "no address pool is configured" in str(error)


KEYS = st.sampled_from([ServiceKey("default", f"s{i}") for i in range(8)])
ADDRESSES = [f"203.0.113.{i}" for i in range(1, 7)] + [
    "2001:db8:f::1",
    "2001:db8:f::2",
    "2001:db8:f::3",
]
WANTED = st.builds(
    AddressRequest,
    ports=st.just(frozenset({"TCP/80"})),
    families=st.sampled_from([("IPv4",), ("IPv6",), ("IPv4", "IPv6"), ("IPv6", "IPv4")]),
    all_families=st.booleans(),
    requested=st.lists(st.sampled_from(ADDRESSES), max_size=1).map(tuple),
    pool=st.sampled_from(["", "main", "six"]),
    since=st.sampled_from(["", "2026-01-01", "2026-01-02"]),
)


@given(
    st.dictionaries(KEYS, st.lists(st.sampled_from(ADDRESSES), max_size=2)),
    st.dictionaries(KEYS, WANTED),
)
def test_no_address_is_assigned_twice_and_another_assignment_keeps_all_addresses(
    held: dict[ServiceKey, list[str]], request: dict[ServiceKey, AddressRequest]
) -> None:
    first = assign([POOL, POOL6], held, request)
    assigned = [
        address
        for grant in first.values()
        if isinstance(grant, Assigned)
        for address in grant.addresses
    ]
    assert len(assigned) == len(set(assigned))
    kept = {key: grant.addresses for key, grant in first.items() if isinstance(grant, Assigned)}
    second = assign([POOL, POOL6], kept, request)
    for key, addresses in kept.items():
        assert set(addresses) <= set(granted(second, key)), (
            "a second assignment may add an address that became free, but takes none away"
        )
