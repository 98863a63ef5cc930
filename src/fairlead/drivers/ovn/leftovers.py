"""Rows of this cluster that no Service needs.

In: the rows by Service, and the Services that may have rows. Out: leftovers, in the order of their
names. Pure. A running controller removes such rows itself; they remain if it was stopped before the
Services were deleted."""

from collections.abc import Iterable

from fairlead.drivers.ovn.marks import SERVICE, removed_of
from fairlead.drivers.ovn.spec import Row
from fairlead.model import ServiceKey, Value


class Leftover(Value, frozen=True):
    """A row to delete. `draining_until`: the Unix time until which its open connections continue;
    None: no controller has begun to remove it."""

    service: str
    name: str
    vip: str
    uuid: str
    draining_until: int | None = None


def find_leftovers(
    rows: Iterable[tuple[ServiceKey, Row]], needed: Iterable[ServiceKey], now_s: float
) -> tuple[Leftover, ...]:
    """Return the rows whose Service is not among `needed`, except those whose open connections
    continue at this Unix time."""
    kept = frozenset(needed)
    return tuple(
        sorted(
            Leftover(
                row.columns.external_ids.get(SERVICE, ""),
                row.columns.name,
                row.frontend.vip,
                row.uuid,
                removed_of(row.columns.external_ids),
            )
            for key, row in rows
            if key not in kept and (removed_of(row.columns.external_ids) or 0) <= now_s
        )
    )
