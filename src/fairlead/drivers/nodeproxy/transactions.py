"""Which Changes go to the kernel, and which of them together. Pure.

In: Changes, what the kernel holds, who has each frontend. Out: the Changes that change anything, in batches of whole
Services; the Services whose Changes cannot go because another one has what they want.
Invariant: a frontend passes from one Service to another only if the first gives it up, in the same batch or before.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from fairlead.drivers.nodeproxy.elements import OWNERLESS, Change, Element, Spec
from fairlead.model import ServiceKey

ELEMENTS_PER_TRANSACTION = 5_000
"""libnftables needs some 3 kB for each element of a transaction; more at once is no faster."""

_NOTHING: Spec = frozenset()


def effective(known: Mapping[ServiceKey, Spec], changes: Sequence[Change]) -> list[Change]:
    """Without what is so already: the same Changes may come again after some of them were carried out."""
    left = []
    for change in changes:
        present = known.get(change.service, _NOTHING)
        elements = tuple(element for element in change.elements if (element in present) == (change.verb == "delete"))
        if len(elements) == len(change.elements):
            left.append(change)
        elif elements:
            left.append(msgspec.structs.replace(change, elements=elements))
    return left


def batches(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Whole Services, those that give something up first, as many as one transaction may carry."""
    by_service = [list(group) for _, group in groupby(sorted(changes, key=lambda c: c.service), key=lambda c: c.service)]
    by_service.sort(key=lambda group: all(change.verb == "add" for change in group))
    batch: list[Change] = []
    size = 0
    for group in by_service:
        weight = sum(len(change.elements) for change in group)
        if batch and size + weight > ELEMENTS_PER_TRANSACTION:
            yield batch
            batch, size = [], 0
        batch += group
        size += weight
    if batch:
        yield batch


def contested(batch: Sequence[Change], owners: Mapping[str, ServiceKey]) -> dict[ServiceKey, str]:
    """The Services of a batch that want a frontend which another one has and does not give up; and what is wrong, in words.

    A Service that cannot have what it wants keeps what it has, so others may not get that either.
    """
    found: dict[ServiceKey, str] = {}
    while more := _contested([change for change in batch if change.service not in found], owners):
        found |= more
    return found


def frontends(change: Change) -> tuple[Element, ...]:
    """The elements of a Change that make frontends."""
    return change.elements if change.map.startswith("services") else ()


def _contested(changes: Sequence[Change], owners: Mapping[str, ServiceKey]) -> dict[ServiceKey, str]:
    wanted = {(change.service, element.key) for change in changes if change.verb == "add" for element in frontends(change)}
    # Who deletes a frontend only to write it anew, with another verdict, keeps it.
    given = {
        element.key
        for change in changes
        if change.verb == "delete"
        for element in frontends(change)
        if (change.service, element.key) not in wanted
    }
    taken = {key: owner for key in {key for _, key in wanted} if key not in given and (owner := owners.get(key)) is not None}
    found: dict[ServiceKey, str] = {}
    for service, key in sorted(wanted):
        owner = taken.setdefault(key, service)
        if owner != service:
            address, protocol, port = key.split(" . ")
            who = "nobody that is known" if owner == OWNERLESS else f"Service {owner}"
            why = f"serving {service} on {address} port {port} (IP protocol {protocol}): {who} has it"
            found.setdefault(service, f"{why}; give one of the two another address or port")
    return found
