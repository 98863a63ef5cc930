"""Weighted Maglev tables with exact shares: which node has which slot.

In: names with weights. Out: a `Table`. Two gateways that know the same names and weights make the
same table, without a word between them, because a node's walk over the table comes from its name
alone. Invariant: each node has as many slots as its share of the weights says, to within one slot
(largest remainder). Follows Eisenbud et al., "Maglev" (NSDI'16), section 3.4, with credits for
weights and quotas for exactness.

Sizes are 1,021 doubled 0 to 6 times, the first that has 100 slots for each unit of weight. They are
not the primes that the paper takes, for two reasons. A prime that follows the weights changes with
nearly every pod that comes or goes, and a new size deals all slots anew. And when the size does
change, each slot of the smaller table is exactly 2^k of the larger one (slots are found by
multiplication, `hash * size >> 32`), so old owners can be carried over without loss; see
`transition`. The paper needs a prime only so that every walk visits each slot; an odd skip that is
no multiple of 1,021 does that too."""

import ctypes
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Refused

SMALLEST = 1021
DOUBLINGS = 6
SLOTS_PER_WEIGHT = 100
MOST_NODES = 4096
SMALL = 2 * SMALLEST
SMALL_KEPT = 16384
_OBJECT = Path(__file__).resolve().parent.parent / "objects" / "maglev.so"
_EMPTY = 0xFFFF


class Table(NamedTuple):
    """`slots[i]` is the place in `nodes` of the node that has slot i. Empty when no node has a
    weight.

    `nodes` are sorted and only those that have a slot; `slots` are unsigned 16-bit numbers, in the
    machine's order."""

    nodes: tuple[str, ...]
    slots: bytes


EMPTY = Table((), b"")

Weights = tuple[tuple[str, int], ...]
Members = list[tuple[str, int]]


class Walks(NamedTuple):
    """The input of a fill: for each node its walk, its weight, and how many slots it is to get."""

    size: int
    offsets: Sequence[int]
    skips: Sequence[int]
    weights: Sequence[int]
    quotas: Sequence[int]


def table_size(total_weight: int) -> int:
    """Slots for this sum of weights: 1,021 doubled until it is 100 a unit, at most 65,344."""
    for doubling in range(DOUBLINGS):
        if SMALLEST << doubling >= SLOTS_PER_WEIGHT * total_weight:
            return SMALLEST << doubling
    return SMALLEST << DOUBLINGS


def sizes_down_from(size: int) -> Iterator[int]:
    """The sizes of tables from this one down to the smallest, each half of the previous one. 0: the
    empty table."""
    yield size
    while size > SMALLEST:
        size //= 2
        yield size


def quotas(weights: Sequence[int], size: int) -> list[int]:
    """How many of `size` slots each weight gets: its share rounded down, the rest to the largest
    remainders (ties: first)."""
    total = sum(weights)
    if weights[0] * len(weights) == total and len(set(weights)) == 1:
        whole, left = divmod(size, len(weights))
        return [whole + 1] * left + [whole] * (len(weights) - left)
    shares = [divmod(size * weight, total) for weight in weights]
    counts = [whole for whole, _ in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: -shares[i][1])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


@lru_cache(maxsize=32768)
def walk(name: str, size: int) -> tuple[int, int]:
    """Where a node's walk over the table begins, and its stride, which visits every slot. Both from
    its name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    skip = int.from_bytes(digest[8:], "little") % (size - 1) | 1
    if skip % SMALLEST == 0:
        skip += 2
    return int.from_bytes(digest[:8], "little") % size, skip


def walks(members: Sequence[tuple[str, int]], size: int = 0) -> Walks:
    """The input of a fill for these (name, weight) pairs. `size`: slots; 0: as many as the weights
    call for."""
    weights = [weight for _, weight in members]
    size = size or table_size(sum(weights))
    turns = [walk(name, size) for name, _ in members]
    return Walks(
        size,
        [offset for offset, _ in turns],
        [skip for _, skip in turns],
        weights,
        quotas(weights, size),
    )


def fill_in_python(turns: Walks) -> "array[int]":
    """The reference: what the C fill must give."""
    slots = array("H", [_EMPTY]) * turns.size
    at, left = list(turns.offsets), list(turns.quotas)
    credit = [0] * len(at)
    greatest = max(turns.weights)
    filled = 0
    while filled < turns.size:
        for i, weight in enumerate(turns.weights):
            credit[i] += weight
            if credit[i] < greatest or not left[i]:
                continue
            credit[i] -= greatest
            while slots[at[i]] != _EMPTY:
                at[i] = (at[i] + turns.skips[i]) % turns.size
            slots[at[i]] = i
            left[i] -= 1
            filled += 1
    return slots


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The work on tables that is done in C: bpf/maglev.c, bpf/transition.c. Raises Refused if it
    has not been built.

    It takes some microseconds, for which the interpreter is kept: to get it back could take a
    thread a hundred times that."""
    try:
        return ctypes.PyDLL(str(_OBJECT))
    except OSError as error:
        raise Refused(
            f"cannot load {_OBJECT}: {error}", fix="build it: python hatch_build.py"
        ) from error


def at(numbers: "array[int]") -> ctypes.c_void_p:
    """Where an array lies, for as long as it is held and keeps its length."""
    return ctypes.c_void_p(numbers.buffer_info()[0])


def fill_in_c(turns: Walks) -> "array[int]":
    """The same through the compiled fill. Raises Refused if it has not been built."""
    slots, count = array("H", bytes(2 * turns.size)), len(turns.weights)
    # One array of four columns, and plain numbers: to make what C is given would take longer than
    # what it does with it.
    columns = array("I", [*turns.offsets, *turns.skips, *turns.weights, *turns.quotas])
    address, _ = columns.buffer_info()
    places = [address + 4 * count * column for column in range(4)]
    if _filling()(count, *places, turns.size, slots.buffer_info()[0]) != 0:
        raise MemoryError("filling a Maglev table")
    return slots


@lru_cache(maxsize=1)
def _filling() -> Callable[..., int]:
    """`fill` of bpf/maglev.c."""
    fill = library().fill
    number, place = ctypes.c_uint32, ctypes.c_void_p
    fill.argtypes = (number, place, place, place, place, number, place)
    return fill


def table(weights: Weights) -> Table:
    """The table for these (name, weight) pairs, in whatever order they come. Weights of 0 are
    passed over.

    Raises Refused for more nodes than a slot can name.
    """
    found = _small.get(weights)
    if found is None:
        if not _is_small(weights):
            return _large(weights)
        _small[weights] = found = _deal(weights)
    return found


def table_of(weights: Weights, size: int) -> Table:
    """The table for these pairs with `size` slots, one of the sizes above, instead of the size that
    the weights call for. With fewer slots shares are coarser, and a node whose share is less than
    half a slot has no slot. Raises Refused as `table`."""
    return _sized(weights, size)


def prepare(many: Iterable[Weights]) -> None:
    """Have the small tables among these at hand for `table`. They are filled in one call, beside
    which other threads work."""
    missing = {
        weights: members for weights in many if weights not in _small and (members := _few(weights))
    }
    given = [walks(members) for members in missing.values()]
    columns = array("I", chain.from_iterable(column for each in given for column in each[1:]))
    counts, sizes = (
        array("I", [len(each.weights) for each in given]),
        array("I", [each.size for each in given]),
    )
    slots = array("H", bytes(2 * sum(sizes)))
    if (
        _filling_all()(
            len(given), *(each.buffer_info()[0] for each in (counts, sizes, columns, slots))
        )
        != 0
    ):
        raise MemoryError("filling Maglev tables")
    end = 0
    for (weights, members), each in zip(missing.items(), given, strict=True):
        begin, end = end, end + each.size
        _small[weights] = _named(members, each, slots[begin:end])


@lru_cache(maxsize=1)
def _filling_all() -> Callable[..., int]:
    """`fill_all` of bpf/maglev.c, beside which other threads have the interpreter."""
    library()  # says it if it has not been built
    fill_all = ctypes.CDLL(str(_OBJECT)).fill_all
    fill_all.argtypes = (ctypes.c_uint32, *[ctypes.c_void_p] * 4)
    return fill_all


def _is_small(weights: Weights) -> bool:
    return table_size(sum([weight for _, weight in weights])) <= SMALL


def _few(weights: Weights) -> Members:
    """The members of a small table; none if it is a large one."""
    return _members(weights) if _is_small(weights) else []


def _members(weights: Weights) -> Members:
    return sorted([each for each in weights if each[1] > 0])


def _deal(weights: Weights, size: int = 0) -> Table:
    members = _members(weights)
    if not members:
        return EMPTY
    if len(members) > MOST_NODES:
        raise Refused(
            f"{len(members)} nodes for one listener",
            fix=f"at most {MOST_NODES} nodes can share one",
        )
    given = walks(members, size)
    return _named(members, given, fill_in_c(given))


def _named(members: Members, given: Walks, slots: "array[int]") -> Table:
    """The slots with the names of those that have any: a node whose share is less than half a slot
    may have none, and names without slots would make equal tables look different."""
    names = [name for name, _ in members]
    if 0 in given.quotas:
        has_slot = [quota > 0 for quota in given.quotas]
        place = [sum(has_slot[:i]) for i in range(len(members))]
        slots = array("H", (place[i] for i in slots))
        names = list(compress(names, has_slot))
    return Table(tuple(names), slots.tobytes())


class _Kept(dict[Weights, Table]):
    """Of the tables that were made last so many as there are to be; threads may use it at the same
    time."""

    def __setitem__(self, weights: Weights, made: Table) -> None:
        super().__setitem__(weights, made)
        if len(self) > SMALL_KEPT:
            for oldest in list(self)[: SMALL_KEPT // 4]:
                self.pop(oldest, None)


# Apart, so that memory is bounded: 2 KiB or 4 KiB for each small table, of which a cluster has
# thousands, up to 128 KiB for each large one, of which a rolling update makes hundreds.
_small = _Kept()
_large = lru_cache(maxsize=128)(_deal)
_sized = lru_cache(maxsize=64)(_deal)
