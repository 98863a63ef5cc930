"""The status of AddressPools."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.config import PoolConfig
from fairlead.kube.crds import AddressPool, AddressPoolStatus, KeptAddresses
from fairlead.model import ServiceKey
from fairlead.plan.addresses import AddressRequest, Facts, HeldAddress
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pool_status import PoolState, pool_states
from fairlead.plan.pools import OVERLAPS, read_pools

A = ServiceKey("default", "a")
LIMITS = KeptAddressLimits(10, 30)
PORTS = frozenset({"TCP/80"})


def pool(name: str, *addresses: str, **meta: str) -> AddressPool:
    return msgspec.convert(
        {"metadata": {"name": name, **meta}, "spec": {"addresses": addresses}}, AddressPool
    )


def states(
    pools: Sequence[AddressPool], held: Mapping[str, str], configured: Sequence[PoolConfig] = ()
) -> dict[str, PoolState]:
    """Return the state of each pool. `held`: the addresses of one Service, each with the pool from
    which the Service got it."""
    ledger = Ledger()
    ledger.use(read_pools(configured, pools))
    grants = {address: HeldAddress(granted=PORTS, pool=name) for address, name in held.items()}
    ledger.assign({A: Facts(AddressRequest(("IPv4", "IPv6"), ports=PORTS), grants)})
    return pool_states(ledger, {each.metadata.name: each for each in pools}, LIMITS)


def shown(state: PoolState) -> dict[str, str]:
    return {each.type: f"{each.status}/{each.reason}" for each in state.conditions}


def test_a_pool_counts_its_assigned_and_available_addresses_by_family() -> None:
    state = states(
        [pool("main", "203.0.113.1-203.0.113.4", "2001:db8::1")],
        {"203.0.113.2": "main", "2001:db8::1": "main"},
    )["main"]
    assert (state.assigned, state.available, state.in_use) == ((1, 1), (3, 0), True)
    assert shown(state) == {
        "Ready": "True/Used",
        "Stranded": "False/None",
        "Excluded": "False/None",
        "Scarce": "False/None",
    }


@pytest.mark.parametrize(
    ("size", "assigned", "scarce", "then"),
    [
        (20, 18, False, "False"),
        (20, 19, False, "True"),
        (20, 17, True, "True"),
        (20, 16, True, "False"),
        (10, 10, False, "True"),
        (9, 9, False, "False"),
    ],
)
def test_a_pool_is_scarce_until_a_fifth_of_its_addresses_is_free_again(
    size: int, assigned: int, scarce: bool, then: str
) -> None:
    made = pool("main", f"203.0.113.1-203.0.113.{size}", "2001:db8::1")
    if scarce:
        made = msgspec.structs.replace(
            made,
            status=msgspec.convert(
                {"conditions": [{"type": "Scarce", "status": "True"}]}, AddressPoolStatus
            ),
        )
    held = {f"203.0.113.{number}": "main" for number in range(1, assigned + 1)}
    state = states([made], {**held, "2001:db8::1": "main"})["main"]
    assert {each.type: each.status for each in state.conditions}["Scarce"] == then


def test_the_stranded_condition_names_the_service_that_holds_an_address_outside_the_pool() -> None:
    state = states([pool("main", "203.0.113.1")], {"203.0.113.2": "main"})["main"]
    assert shown(state)["Stranded"] == "True/AddressesHeld"
    message = state.conditions[1].message
    assert "203.0.113.2 (Service default/a)" in message
    assert "kubectl delete addressgrant" in message


def test_an_edit_or_the_deletion_of_a_pool_does_not_change_its_count_of_assigned_addresses() -> (
    None
):
    held = {"203.0.113.2": "main", "2001:db8::1": "main"}
    since = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    for addresses in (("203.0.113.0/28", "2001:db8::1"), ("203.0.113.9",), ("203.0.113.2/31",)):
        alive = states([pool("main", *addresses)], held)["main"]
        going = states([pool("main", *addresses, **since)], held)["main"]
        assert alive.assigned == going.assigned == (1, 1), addresses
    assert states([pool("main", "203.0.113.9")], held)["main"].available == (1, 0)


def test_the_status_shows_how_many_addresses_each_namespace_keeps_and_until_when() -> None:
    ledger = Ledger()
    ledger.use(read_pools((), [main := pool("main", "203.0.113.1-203.0.113.9")]))
    since = {
        "203.0.113.1": "2026-01-03T00:00:00Z",
        "203.0.113.2": "2026-01-02T00:00:00Z",
        "203.0.113.3": "",
    }
    names = {
        "203.0.113.1": ServiceKey("shop", "a"),
        "203.0.113.2": ServiceKey("shop", "b"),
        "203.0.113.3": A,
    }
    for address, key in names.items():
        ledger.assign(
            {
                key: Facts(
                    None, {address: HeldAddress(kept=True, kept_since=since[address], pool="main")}
                )
            }
        )
    [state] = pool_states(ledger, {"main": main}, LIMITS).values()
    assert (state.assigned, state.kept_addresses, ledger.kept_in("shop")) == ((3, 0), 3, 2)
    assert state.kept == (
        KeptAddresses("shop", 2, "2026-01-02T00:00:00Z", "2026-02-01T00:00:00Z"),
        KeptAddresses("default", 1),
    )
    [endless] = pool_states(ledger, {"main": main}, KeptAddressLimits(10, 0)).values()
    assert [each.until for each in endless.kept] == ["", ""]
    ledger.assign({names[address]: Facts() for address in names})
    [state] = pool_states(ledger, {"main": main}, LIMITS).values()
    assert (state.kept_addresses, state.kept, ledger.kept_in("shop")) == (0, (), 0)


def test_a_pool_in_deletion_has_no_available_addresses() -> None:
    going = pool("main", "2001:db8::1", deletionTimestamp="2026-01-01T00:00:00Z")
    state = states([going], {"2001:db8::1": "main"})["main"]
    assert (state.assigned, state.available, state.in_use) == ((0, 1), (0, 0), True)
    assert shown(state)["Ready"] == "False/BeingDeleted"


def test_an_address_pool_does_not_count_the_addresses_of_a_configured_pool_with_its_name() -> None:
    state = states(
        [pool("lab", "198.51.100.1")], {"203.0.113.1": "lab"}, [PoolConfig("lab", ("203.0.113.1",))]
    )["lab"]
    assert (state.assigned, state.in_use) == ((0, 0), False)
    assert shown(state) == {
        "Ready": "False/OverlapsAnotherPool",
        "Stranded": "False/None",
        "Excluded": "False/None",
        "Scarce": "False/None",
    }


def test_a_pool_with_addresses_that_no_client_can_reach_is_not_ready() -> None:
    for text in ("127.0.0.1", "224.0.0.0/24", "0.0.0.0", "::1", "fe80::/64"):
        conditions = shown(states([pool("main", text)], {})["main"])
        assert conditions["Ready"] == "False/InvalidAddresses", text


RANGES = st.tuples(st.integers(1, 30), st.integers(0, 6))


@given(st.lists(st.lists(RANGES, min_size=1, max_size=4), max_size=4))
def test_a_pool_is_used_unless_it_overlaps_itself_or_a_pool_that_is_used(
    pools: list[list[tuple[int, int]]],
) -> None:
    used: set[int] = set()
    expected = []
    for ranges in pools:
        numbers = [number for first, more in ranges for number in range(first, first + more + 1)]
        if overlaps := len(set(numbers)) < len(numbers) or not used.isdisjoint(numbers):
            expected.append(OVERLAPS)
        if not overlaps:
            used.update(numbers)
    objects = [
        pool(f"pool{at}", *(f"10.0.0.{first}-10.0.0.{first + more}" for first, more in ranges))
        for at, ranges in enumerate(pools)
    ]
    assert [each.code for each in read_pools((), objects).problems.values()] == expected
