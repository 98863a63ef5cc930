"""The slot table of a load balancer of OVN: its list of backends, with an entry for each slot.

In: the previous list, the weight of each backend. Out: the new list. Pure. OVN gives the list to a
select group of Open vSwitch, which maps the hash of a connection to a position of the list. It has
at least 16 hash values, and their number is a power of two; a list of another length gets unequal
shares. Every chassis computes the same hash, so a connection that moves to another chassis stays
with its pod if the position of the pod has not changed.

Invariants: the length is a power of two up to `MAX_SLOTS`; the number of slots of each backend is
its quota by largest remainder; a slot changes only if its backend has left, is above its quota, or
the length changes. The list is never sorted."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat, zip_longest

from fairlead.net.maglev import quotas

MIN_SLOTS = 16
"""The smallest number of hash values of a select group (ofproto-dpif.c of Open vSwitch)."""
MAX_SLOTS = 256
"""The largest number of hash values. A longer list makes Open vSwitch hash each connection in its
slow path."""
MAX_ERROR = 0.02
"""A table is doubled until the share of no backend is larger than its weight by more than this
fraction, or the table has `MAX_SLOTS`."""


def table_size(weights: Mapping[str, int], default: int) -> int:
    """Return the length of the table. `default`: the configured length, which is a power of two.
    With more backends than `MAX_SLOTS`, each backend occurs once."""
    if len(weights) > MAX_SLOTS:
        return len(weights)
    if len(weights) <= 2 and len(set(weights.values())) <= 1:
        return min(MIN_SLOTS, default)
    size = default
    while size < MAX_SLOTS and error_of(weights, size) > MAX_ERROR:
        size *= 2
    return size


def error_of(weights: Mapping[str, int], size: int) -> float:
    """Return by which fraction the largest share is above its weight, in a table of this length:
    0.02 if a backend gets 102 connections instead of 100."""
    total = sum(weights.values())
    slots = quotas(list(weights.values()), size)
    return max(
        count * total / (size * weight) - 1
        for count, weight in zip(slots, weights.values(), strict=True)
    )


def assign(previous: Sequence[str], weights: Mapping[str, int], size: int) -> tuple[str, ...]:
    """Return the table of this length for backends with these positive weights; empty without
    backends. `previous`: the present table, of any length."""
    if not weights:
        return ()
    old = _resized(previous, size)
    # Among backends with equal remainders, `quotas` gives the additional slots to the first ones.
    # So the backends that have an additional slot already come first, and keep it.
    total = sum(weights.values())
    extra = {name: old.count(name) - size * weights[name] // total for name in weights}
    names = sorted(weights, key=lambda name: (-extra[name], name))
    left = dict(zip(names, quotas([weights[name] for name in names], size), strict=True))
    table: list[str] = []
    for name in old:
        kept = name if left.get(name, 0) else ""
        if kept:
            left[kept] -= 1
        table.append(kept)
    rounds = zip_longest(*(repeat(name, left[name]) for name in sorted(left)))
    missing = filter(None, chain.from_iterable(rounds))
    return tuple(name or next(missing) for name in table)


def _resized(previous: Sequence[str], size: int) -> Sequence[str]:
    """Return the previous table with the new length. A hash value that is below both lengths keeps
    its backend, because Open vSwitch uses the lowest bits of the hash."""
    if len(previous) >= size:
        return previous[:size]
    if previous and size % len(previous) == 0:
        return tuple(previous) * (size // len(previous))
    return (*previous, *repeat("", size - len(previous)))
