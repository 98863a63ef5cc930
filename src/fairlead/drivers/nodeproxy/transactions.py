"""Divides Changes into transactions, and decides which Service gets a contested frontend. Pure.

In: Changes, what the kernel holds, the owner of each frontend. Out: the Changes that have an
effect, in batches of whole Services; the Services that lack a frontend because another Service has
it. Invariants: of two Services that want one frontend, the same one always has it, whatever
happened before, and the other has everything else. A frontend passes from one Service to another
within one batch. If a Service has too many Changes for one batch, they are in several, and after
each of these every frontend is consistent: it has either its old or its new state."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from fairlead.drivers.nodeproxy.elements import (
    NO_SERVICE,
    Change,
    Element,
    Spec,
    difference,
    frontend_of,
)
from fairlead.drivers.nodeproxy.skeleton import PROTOCOL_NUMBERS
from fairlead.model import ServiceKey
from fairlead.plan.conflicts import Basis, Precedence, first

ELEMENTS_PER_TRANSACTION = 5_000
"""Maximum number of elements in one transaction. libnftables needs about 3 kB per element, and
larger transactions are not faster."""

PrecedenceOf = Callable[[ServiceKey, str, str], Precedence | None]
"""Returns the precedence of a Service for a port (`TCP/80`) of an address; None if there is no such
Service. The port is empty if the whole address is meant."""

_PROTOCOL_NAMES = {str(number): name for name, number in PROTOCOL_NUMBERS.items()}

NOTHING: Spec = frozenset()
_VERBS: tuple[Literal["delete"], Literal["add"]] = ("delete", "add")


class Resolution(NamedTuple):
    """The Changes without conflicts, and for each Service that lacks a frontend, a description of
    the conflict."""

    changes: Sequence[Change]
    conflicts: Mapping[ServiceKey, str]


def effective(known: Mapping[ServiceKey, Spec], changes: Sequence[Change]) -> list[Change]:
    """Return the Changes without the parts that are in force already. The same Changes may come
    again after some of them were carried out."""
    left = []
    for change in changes:
        present = known.get(change.service, NOTHING)
        elements = tuple(
            element
            for element in change.elements
            if (element in present) == (change.verb == "delete")
        )
        if len(elements) == len(change.elements):
            left.append(change)
        elif elements:
            left.append(msgspec.structs.replace(change, elements=elements))
    return left


def resolve(
    known: Mapping[ServiceKey, Spec],
    owners: Mapping[str, ServiceKey],
    changes: Sequence[Change],
    precedence_of: PrecedenceOf,
) -> Resolution:
    """Resolve conflicts: if one Service wants a frontend that another Service wants or has, the
    Service that comes first gets it (see `plan.conflicts`). A Service that has the frontend and
    comes later loses it, even if there is no other change for that Service."""
    rivals: dict[str, set[ServiceKey]] = {}
    for change in changes:
        for element in change.elements if change.verb == "add" and is_exclusive(change.map) else ():
            rivals.setdefault(element.key, {owners.get(element.key, change.service)}).add(
                change.service
            )
    contested = {key: contenders for key, contenders in rivals.items() if len(contenders) > 1}
    if not contested:
        return Resolution(changes, {})
    before = {
        service: known.get(service, NOTHING)
        for contenders in contested.values()
        for service in contenders
    }
    wanted = before | {
        service: carried_out(before[service], own_changes)
        for service, own_changes in _by_service(changes)
        if service in before
    }
    wanted_keys = {
        service: {element.key for element in frontends(spec)} for service, spec in wanted.items()
    }
    lost: dict[ServiceKey, dict[str, ServiceKey]] = {}
    for key, contenders in sorted(contested.items()):
        # A Service that has the frontend takes no part if its own Changes give the frontend up.
        requesters = [service for service in contenders if key in wanted_keys[service]]
        owner = first(
            _precedence(key, service, wanted_keys[service], precedence_of) for service in requesters
        )
        for service in sorted(requesters):
            if service != owner:
                lost.setdefault(service, {})[key] = owner
    after = wanted | {
        service: frozenset(
            element for element in wanted[service] if frontend_of(element.key) not in winners
        )
        for service, winners in lost.items()
    }
    uncontested = [change for change in changes if change.service not in before]
    conflicts = {
        service: _conflict_message(service, *next(iter(winners.items())))
        for service, winners in lost.items()
    }
    return Resolution([*uncontested, *difference(after, before)], conflicts)


def batches(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Divide Changes into batches of as many whole Services as one transaction may hold. Services
    with deletions come first. Services that pass elements to each other are in the same batch.
    Services that are too large for one transaction come last, in parts."""
    groups = _passing_together(dict(_by_service(changes)))
    weights = {id(group): sum(len(change.elements) for change in group) for group in groups}
    groups.sort(
        key=lambda group: (
            weights[id(group)] > ELEMENTS_PER_TRANSACTION,
            all(c.verb == "add" for c in group),
        )
    )
    batch: list[Change] = []
    size = 0
    for group in groups:
        weight = weights[id(group)]
        if weight > ELEMENTS_PER_TRANSACTION:
            if batch:
                yield batch
                batch, size = [], 0
            yield from _in_parts(group)
            continue
        if batch and size + weight > ELEMENTS_PER_TRANSACTION:
            yield batch
            batch, size = [], 0
        batch += group
        size += weight
    if batch:
        yield batch


def frontends(elements: Iterable[Element]) -> Iterator[Element]:
    """Return the elements that only one Service can have: its frontends and its ClusterIPs."""
    return (element for element in elements if is_exclusive(element.map))


def is_exclusive(name: str) -> bool:
    """Whether only one Service can have an element of this map."""
    return name.startswith(("services", "cluster_ips"))


def carried_out(spec: Spec, changes: Iterable[Change]) -> Spec:
    """Return a Service's elements after these Changes."""
    now = set(spec)
    for change in changes:
        if change.verb == "delete":
            now.difference_update(change.elements)
        else:
            now.update(change.elements)
    return frozenset(now)


def _precedence(
    key: str, service: ServiceKey, wanted: Collection[str], precedence_of: PrecedenceOf
) -> Precedence:
    """Return the precedence of a Service for the frontend `key`. `wanted`: the keys of all
    frontends and ClusterIPs that the Service wants."""
    address, *rest = key.split(" . ")
    port = f"{_PROTOCOL_NAMES.get(rest[0], rest[0])}/{rest[1]}" if rest else ""
    found = precedence_of(service, address, port) if service != NO_SERVICE else None
    if found is None:
        return Precedence(Basis.GONE, "", service)
    return found._replace(basis=Basis.OWN) if address in wanted else found


def _passing_together(changes: dict[ServiceKey, list[Change]]) -> list[list[Change]]:
    """Return groups of Changes: the Changes of a Service are in one group with those of every
    Service to which it passes elements, or from which it gets elements."""
    if len(changes) == 1:
        return list(changes.values())
    givers = {
        (change.map, element.key): service
        for service, own_changes in changes.items()
        for change in own_changes
        if change.verb == "delete"
        for element in change.elements
    }
    group_of = {service: [service] for service in changes}
    for service, own_changes in changes.items() if givers else ():
        for change in own_changes:
            for element in change.elements if change.verb == "add" else ():
                giver = givers.get((change.map, element.key), service)
                if group_of[giver] is not group_of[service]:
                    group_of[giver] += group_of[service]
                    group_of |= dict.fromkeys(group_of[service], group_of[giver])
    distinct = {id(group): group for group in group_of.values()}
    return [
        [change for service in group for change in changes[service]] for group in distinct.values()
    ]


def _in_parts(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Divide the Changes of a large Service so that each frontend changes as a whole.

    First come new endpoints, which no packet looks up until a verdict leads to them. Then, frontend
    by frontend, the elements that packets encounter, including endpoints that replace others. Last
    come the deletions of elements that packets no longer look up."""
    keys = {
        verb: {
            (each.map, each.key)
            for change in changes
            if change.verb == verb
            for each in change.elements
            if _is_indirect(each)
        }
        for verb in ("add", "delete")
    }
    indirect: dict[str, list[tuple[Change, Element]]] = {"add": [], "delete": []}
    by_frontend: dict[str, list[tuple[Change, Element]]] = {}
    for change in changes:
        others = keys["delete" if change.verb == "add" else "add"]
        for element in change.elements:
            if _is_indirect(element) and (element.map, element.key) not in others:
                indirect[change.verb].append((change, element))
            else:
                by_frontend.setdefault(frontend_of(element.key), []).append((change, element))
    for groups in (
        [[each] for each in indirect["add"]],
        list(by_frontend.values()),
        [[each] for each in indirect["delete"]],
    ):
        part: list[tuple[Change, Element]] = []
        for together in groups:
            if part and len(part) + len(together) > ELEMENTS_PER_TRANSACTION:
                yield _joined(part)
                part = []
            part += together
        if part:
            yield _joined(part)


def _is_indirect(element: Element) -> bool:
    """Whether packets look up the element only after another element of its frontend led them
    there."""
    return "endpoints" in element.map or element.map.startswith("hairpin")


def _joined(part: Sequence[tuple[Change, Element]]) -> list[Change]:
    """Combine elements to Changes: one for each verb, Service and map, deletions first."""
    found: dict[tuple[str, ServiceKey, str], list[Element]] = {}
    for change, element in part:
        found.setdefault((change.verb, change.service, change.map), []).append(element)
    deleted, added = (
        [
            Change(service, verb, name, tuple(of))
            for (each, service, name), of in found.items()
            if each == verb
        ]
        for verb in _VERBS
    )
    return [*deleted, *added]


def _by_service(changes: Iterable[Change]) -> Iterator[tuple[ServiceKey, list[Change]]]:
    for service, own_changes in groupby(
        sorted(changes, key=lambda change: change.service), key=lambda change: change.service
    ):
        yield service, list(own_changes)


def _conflict_message(service: ServiceKey, key: str, owner: ServiceKey) -> str:
    """Describe the conflict for the Service that lacks the frontend."""
    address, *rest = key.split(" . ")
    where = f"{address} port {rest[1]} (IP protocol {rest[0]})" if rest else address
    return (
        f"serving {service} on {where}: Service {owner} has this frontend; give one of the two "
        "Services another address or port"
    )
