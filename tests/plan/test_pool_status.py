"""The status of AddressPools."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.config import PoolConfig
from fairlead.kube.crds import AddressPool, KeptAddresses
from fairlead.model import ServiceKey
from fairlead.plan.addresses import AddressRequest, Facts, HeldAddress
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pool_status import PoolState, pool_states
from fairlead.plan.pools import read_pools

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
    assert shown(state) == {"Ready": "True/Used", "Stranded": "False/None"}


def test_the_stranded_condition_names_the_service_that_holds_an_address_outside_the_pool() -> None:
    state = states([pool("main", "203.0.113.1")], {"203.0.113.2": "main"})["main"]
    assert shown(state)["Stranded"] == "True/AddressesHeld"
    message = state.conditions[1].message
    assert "203.0.113.2 (Service default/a)" in message
    assert "kubectl delete addressgrant" in message


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
    assert shown(state) == {"Ready": "False/OverlapsAnotherPool", "Stranded": "False/None"}


def test_a_pool_with_addresses_that_no_client_can_reach_is_not_ready() -> None:
    for text in ("127.0.0.1", "224.0.0.0/24", "0.0.0.0", "::1", "fe80::/64"):
        conditions = shown(states([pool("main", text)], {})["main"])
        assert conditions["Ready"] == "False/InvalidAddresses", text


def test_the_status_has_the_last_valid_section_announce() -> None:
    def announce_of(section: object, last: object = None) -> object:
        status = {} if last is None else {"announce": last}
        body = {"metadata": {"name": "main"}, "spec": {"announce": section}, "status": status}
        return states([msgspec.convert(body, AddressPool)], {})["main"].announce

    assert announce_of({"method": "l2"}, {"method": "bgp"}) == {"method": "l2"}
    assert announce_of({"interfaces": ["10.0.0.0/33"]}, {"method": "bgp"}) == {"method": "bgp"}
    assert announce_of({"interfaces": ["10.0.0.0/33"]}) is None
