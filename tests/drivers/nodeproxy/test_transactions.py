"""What goes together, and who may have which frontend, without a kernel."""

from tests.drivers.nodeproxy.conftest import NODE4, NODE6, backends, port, service

from fairlead.drivers.nodeproxy.elements import Change, Spec, difference, rendered
from fairlead.drivers.nodeproxy.transactions import ELEMENTS_PER_TRANSACTION, batches, contested, effective
from fairlead.model import ServiceKey

A, B, C = (ServiceKey("default", name) for name in "abc")


def at(key: ServiceKey, *addresses: str, pods: tuple[str, ...] = ("local1",)) -> Spec:
    """A Service at these load-balancer addresses and its own ClusterIP."""
    number = 1 + "abc".index(key.name)
    each = port(backends(*pods), cluster_ip=f"172.30.0.{number}", balancers=addresses, node_port=0)
    return frozenset(
        element
        for element in rendered(service(each, name=key.name), (NODE4, NODE6))
        if not element.key.startswith("198.51.100.20 ")
    )


def owners(specs: dict[ServiceKey, Spec]) -> dict[str, ServiceKey]:
    return {e.key: key for key, spec in specs.items() for e in spec if e.map.startswith("services")}


def refused(desired: dict[ServiceKey, Spec], actual: dict[ServiceKey, Spec]) -> set[ServiceKey]:
    return set(contested(difference(desired, actual), owners(actual)))


X, Y, Z = "198.51.100.1", "198.51.100.2", "198.51.100.3"


def test_a_frontend_stays_with_who_has_it() -> None:
    assert refused({A: at(A, X), B: at(B, X)}, {A: at(A, X)}) == {B}
    assert refused({A: at(A, X), B: at(B, X)}, {B: at(B, X)}) == {A}
    # Also while its endpoints change, which rewrites the frontend's element.
    assert refused({A: at(A, X), B: at(B, X, pods=("local1", "local2"))}, {B: at(B, X)}) == {A}


def test_of_two_newcomers_the_first_by_name_gets_it() -> None:
    assert refused({A: at(A, X), B: at(B, X)}, {}) == {B}


def test_a_frontend_may_pass_on() -> None:
    assert refused({B: at(B, X)}, {A: at(A, X)}) == set()
    assert refused({A: at(A, Y), B: at(B, X)}, {A: at(A, X), B: at(B, Y)}) == set()


def test_who_cannot_move_gives_nothing_up() -> None:
    """A wants C's Z and would leave X, which B wants."""
    actual = {A: at(A, X), B: at(B, Y), C: at(C, Z)}
    assert refused({A: at(A, Z), B: at(B, X), C: at(C, Z)}, actual) == {A, B}
    assert refused({A: at(A, Z), B: at(B, X)}, actual) == set()


def test_what_is_wrong_is_said() -> None:
    actual = {A: at(A, X)}
    (message,) = contested(difference({A: at(A, X), B: at(B, X)}, actual), owners(actual)).values()
    assert message.startswith("serving default/b on 198.51.100.1 port 80 (IP protocol 6): Service default/a has it; ")


def test_what_is_so_already_is_left_out() -> None:
    changes = difference({A: at(A, X)}, {})
    assert effective({}, changes) == list(changes)
    assert effective({A: at(A, X)}, changes) == []
    some = frozenset(sorted(at(A, X))[:3])
    assert sum(len(change.elements) for change in effective({A: some}, changes)) == len(at(A, X)) - 3


def test_services_stay_whole_and_those_that_give_something_up_go_first() -> None:
    changes: list[Change] = []
    for number in range(1200):
        key = ServiceKey("default", f"s{number:04}")
        spec = frozenset(e._replace(key=f"{number}.{e.key}") for e in at(A, X))
        changes += difference({key: spec}, {}) if number % 2 else difference({}, {key: spec})
    parts = list(batches(changes))
    assert len(parts) > 1
    assert all(sum(len(change.elements) for change in part) <= ELEMENTS_PER_TRANSACTION for part in parts)
    order = [change.service for part in parts for change in part]
    assert [change for part in parts for change in part] != changes
    assert sorted(map(str, (c for part in parts for c in part))) == sorted(map(str, changes))
    verbs = [change.verb for part in parts for change in part]
    assert verbs == sorted(verbs, reverse=True)
    homes = {key: {i for i, part in enumerate(parts) if any(c.service == key for c in part)} for key in order}
    assert {len(found) for found in homes.values()} == {1}
