"""The division of changes into transactions, and the Service that gets a contested frontend,
without a kernel."""

from collections.abc import Mapping

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import NODE4, NODE6, backends, port, service

from fairlead.drivers.nodeproxy.elements import (
    NO_SERVICE,
    Change,
    Element,
    Spec,
    difference,
    elements_of,
    frontend_of,
)
from fairlead.drivers.nodeproxy.transactions import (
    ELEMENTS_PER_TRANSACTION,
    NOTHING,
    PrecedenceOf,
    Resolution,
    batches,
    carried_out,
    effective,
    frontends,
    resolve,
)
from fairlead.model import Backend, Protocol, ServiceKey
from fairlead.plan.conflicts import Basis, Precedence

A, B, C = (ServiceKey("default", name) for name in "abc")


def at(key: ServiceKey, *addresses: str, pods: tuple[str, ...] = ("local1",)) -> Spec:
    """Return a Service with these load-balancer addresses and its own ClusterIP."""
    number = 1 + "abc".index(key.name)
    each = port(backends(*pods), cluster_ip=f"172.30.0.{number}", balancers=addresses, node_port=0)
    return frozenset(
        element
        for element in elements_of(service(each, name=key.name), (NODE4, NODE6))
        if not element.key.startswith("198.51.100.20 ")
    )


def in_order_of(since: Mapping[ServiceKey, str]) -> PrecedenceOf:
    """Return the precedence of these Services, which show the frontend and were created at these
    times. Other Services do not exist."""
    return lambda key, *_: Precedence(Basis.SHOWN, since[key], key) if key in since else None


def outcome(
    desired: dict[ServiceKey, Spec],
    actual: dict[ServiceKey, Spec],
    created: dict[ServiceKey, str] | None = None,
) -> tuple[dict[ServiceKey, Spec], Resolution]:
    """Return the content of the kernel after the resolved Changes. `created`: the times of
    creation; other Services do not exist."""
    since = dict.fromkeys(desired, "") if created is None else created
    owners = {e.key: key for key, spec in actual.items() for e in frontends(spec)}
    told = resolve(actual, owners, difference(desired, actual), in_order_of(since))
    found = {
        key: carried_out(
            actual.get(key, NOTHING), [change for change in told.changes if change.service == key]
        )
        for key in desired.keys() | actual.keys()
    }
    return found, told


def without(spec: Spec, *addresses: str) -> Spec:
    """Return the elements except those of port 80 at these addresses."""
    return frozenset(
        e
        for e in spec
        if frontend_of(e.key) not in {f"{address} . 6 . 80" for address in addresses}
    )


X, Y, Z = "198.51.100.1", "198.51.100.2", "198.51.100.3"


@pytest.mark.parametrize(("created", "first"), [({A: "1", B: "1"}, A), ({A: "2", B: "1"}, B)])
@pytest.mark.parametrize("had", [(), (A,), (B,)], ids=["nobody", "a", "b"])
def test_the_service_with_precedence_gets_a_contested_frontend_and_the_other_all_its_others(
    had: tuple[ServiceKey, ...], created: dict[ServiceKey, str], first: ServiceKey
) -> None:
    """The older Service gets the frontend; of the same age, the first by name. Endpoints change at
    the same time."""
    actual = {key: at(key, X, Y) if key == A else at(key, X, Z) for key in had}
    desired = {A: at(A, X, Y, pods=("local2",)), B: at(B, X, Z, pods=("local1", "local2"))}
    found, told = outcome(desired, actual, created)
    last = B if first == A else A
    assert found == {first: desired[first], last: without(desired[last], X)}
    assert set(told.conflicts) == {last}
    again, _ = outcome(desired, found, created)
    assert again == found


def test_an_unchanged_service_loses_a_frontend_to_a_service_with_precedence() -> None:
    actual, created = {B: at(B, X)}, {A: "1", B: "2"}
    owners = {e.key: B for e in frontends(actual[B])}
    told = resolve(actual, owners, difference({A: at(A, X)}, {}), in_order_of(created))
    assert {change.service for change in told.changes if change.verb == "delete"} == {B}
    assert carried_out(
        actual[B], [change for change in told.changes if change.service == B]
    ) == without(actual[B], X)
    assert set(told.conflicts) == {B}


@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
def test_precedence_is_decided_for_each_port_of_an_address(protocol: Protocol) -> None:
    """A and B share an address. A is older, and its status shows another port there."""

    def precedence_of(key: ServiceKey, address: str, port: str) -> Precedence:
        shown = (key, address, port) == (B, X, f"{protocol}/80")
        return Precedence(Basis.SHOWN if shown else Basis.ASSIGNED, "1" if key == A else "2", key)

    each = port(backends("local1"), protocol=protocol, balancers=(X,), node_port=0)
    one, other = (
        frozenset(
            e._replace(comment=str(key)) if e.comment else e
            for e in elements_of(service(each, name=key.name), (NODE4, NODE6))
            if e.key.startswith(f"{X} ")
        )
        for key in (A, B)
    )
    told = resolve({}, {}, difference({A: one, B: other}, {}), precedence_of)
    assert set(told.conflicts) == {A}


@pytest.mark.parametrize("had", [(), (A,)], ids=["nobody", "the older"])
def test_a_cluster_ip_belongs_to_its_service(had: tuple[ServiceKey, ...]) -> None:
    """An older Service that requests the address as another type does not get it."""
    own = "172.30.0.2"
    desired = {A: at(A, own), B: at(B, X)}
    found, told = outcome(desired, {key: desired[key] for key in had}, {A: "1", B: "2"})
    assert found == {A: without(desired[A], own), B: desired[B]}
    assert set(told.conflicts) == {A}


def test_two_services_with_one_cluster_ip_share_its_ports() -> None:
    """An API server does not permit this. The set of ClusterIPs contains the address once."""
    other = frozenset(e._replace(comment=str(B)) if e.comment else e for e in at(A, X))
    found, told = outcome({A: at(A, Y), B: other}, {})
    assert found == {
        A: at(A, Y),
        B: frozenset(e for e in other if frontend_of(e.key).startswith(X)),
    }
    assert told.conflicts[B].startswith(
        "serving default/b on 172.30.0.1: Service default/a has this "
    )


def test_elements_without_a_service_are_replaced() -> None:
    """The elements have no owner, or belong to a Service that was deleted while no process ran."""
    for gone in (NO_SERVICE, A):
        found, told = outcome({B: at(B, X)}, {gone: at(A, X)}, {B: "1"})
        assert found[B] == at(B, X)
        assert not told.conflicts


def test_a_frontend_may_pass_to_another_service() -> None:
    assert outcome({B: at(B, X)}, {A: at(A, X)})[0] == {A: NOTHING, B: at(B, X)}
    crosswise = {A: at(A, Y), B: at(B, X)}
    found, told = outcome(crosswise, {A: at(A, X), B: at(B, Y)})
    assert found == crosswise
    assert not told.conflicts


def test_the_message_about_a_contested_frontend_names_both_services() -> None:
    _, told = outcome({A: at(A, X), B: at(B, X)}, {A: at(A, X)})
    (message,) = told.conflicts.values()
    assert message == (
        "serving default/b on 198.51.100.1 port 80 (IP protocol 6): Service default/a has this "
        "frontend; give one of the two Services another address or port"
    )


def test_services_that_exchange_a_frontend_are_in_one_transaction() -> None:
    """The two Services are in one batch, also with many other Services that would come between
    them."""
    between = [ServiceKey("default", f"a{number:04}") for number in range(600)]
    going = {
        key: frozenset(e._replace(key=f"{key.name}.{e.key}") for e in at(A, X, Y))
        for key in between
    }
    changes = difference({B: at(B, X), C: at(C, Y)}, going | {A: at(A, X), B: at(B, Y)})
    parts = list(batches(changes))
    assert len(parts) > 1
    assert len([part for part in parts if {A, B, C} & {change.service for change in part}]) == 1


def test_elements_that_exist_already_are_not_written() -> None:
    changes = difference({A: at(A, X)}, {})
    assert effective({}, changes) == list(changes)
    assert effective({A: at(A, X)}, changes) == []
    some = frozenset(sorted(at(A, X))[:3])
    assert (
        sum(len(change.elements) for change in effective({A: some}, changes)) == len(at(A, X)) - 3
    )


def test_services_are_not_divided_and_those_that_lose_a_frontend_come_first() -> None:
    changes: list[Change] = []
    for number in range(1200):
        key = ServiceKey("default", f"s{number:04}")
        spec = frozenset(e._replace(key=f"{number}.{e.key}") for e in at(A, X))
        changes += difference({key: spec}, {}) if number % 2 else difference({}, {key: spec})
    parts = list(batches(changes))
    assert len(parts) > 1
    assert all(
        sum(len(change.elements) for change in part) <= ELEMENTS_PER_TRANSACTION for part in parts
    )
    order = [change.service for part in parts for change in part]
    assert [change for part in parts for change in part] != changes
    assert sorted(map(str, (c for part in parts for c in part))) == sorted(map(str, changes))
    verbs = [change.verb for part in parts for change in part]
    assert verbs == sorted(verbs, reverse=True)
    homes = {
        key: {i for i, part in enumerate(parts) if any(c.service == key for c in part)}
        for key in order
    }
    assert {len(found) for found in homes.values()} == {1}


def huge(first: int, endpoints: int, ports: int = 60, external: str = "Cluster") -> Spec:
    """Return a Service with more elements than fit into one transaction."""
    pods = tuple(
        Backend(f"10.1.{first}.{number}", 8080, number % 2 == 0)
        for number in range(1, endpoints + 1)
    )
    each = [
        port(pods, number=number, node_port=0, cluster_ip="172.30.0.1", balancers=(X,))
        for number in range(1, ports + 1)
    ]
    bare = [msgspec.structs.replace(one, external_ips=()) for one in each]
    return elements_of(
        service(*bare, name="a", external=external, source_ranges=("192.0.2.0/24",)), (NODE4, NODE6)
    )


def reached_at(elements: dict[tuple[str, str], Element], frontend: str) -> dict[str, object]:
    """Return all elements that a packet to this frontend encounters."""
    found: dict[str, object] = {
        name: elements[name, frontend].value
        for name in ("services4", "outside4", "masquerade4", "restricted4")
        if (name, frontend) in elements
    }
    for name, verdict in list(found.items()):
        chain, _, count = str(verdict).removeprefix("goto ").rpartition("_")
        if chain in ("pick", "pick_local"):
            table = f"{'local_' if chain == 'pick_local' else ''}endpoints4_{count}"
            found[f"{name} endpoints"] = [
                elements[table, f"{frontend} . {slot}"].value for slot in range(int(count))
            ]
    found["allowed"] = ("allowed4", f"{frontend} . 192.0.2.0/24") in elements
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NOTHING, huge(1, 100)),
        (huge(1, 100), NOTHING),
        (huge(1, 100), huge(1, 101)),
        (huge(1, 100), huge(2, 100)),
        (huge(1, 100), huge(1, 100, external="Local")),
        (huge(1, 100), huge(1, 100, ports=120)),
    ],
    ids=["new", "gone", "one more", "others", "another policy", "more ports"],
)
def test_every_frontend_is_complete_after_each_part_of_a_divided_service(
    before: Spec, after: Spec
) -> None:
    """If the sequence is interrupted anywhere, for example by SIGKILL, packets encounter the old or
    the new state of a frontend."""
    parts = list(batches(difference({A: after}, {A: before})))
    elements, wanted = ({(e.map, e.key): e for e in spec} for spec in (before, after))
    had = dict(elements)
    names = {e.key for e in frontends(before | after) if e.map.startswith("services")}
    assert len(parts) > 2
    for part in parts:
        assert sum(len(change.elements) for change in part) <= ELEMENTS_PER_TRANSACTION
        # Like in the kernel, deletions come first.
        for change in part:
            for element in change.elements if change.verb == "delete" else ():
                del elements[element.map, element.key]
        for change in part:
            for element in change.elements if change.verb == "add" else ():
                assert (element.map, element.key) not in elements
                elements[element.map, element.key] = element
        for frontend in names:
            assert reached_at(elements, frontend) in (
                reached_at(had, frontend),
                reached_at(wanted, frontend),
            )
    assert elements == wanted
