"""Weighted Maglev tables with exact shares: which node has which slot.

In: names with weights. Out: a `Table`. Two gateways that know the same names and weights compute
the same table without communication, because a node's permutation of the slots depends on its name
alone. Invariant: the number of a node's slots equals its share of the weights, to within one slot
(largest remainder). Follows Eisenbud et al., "Maglev" (NSDI'16), section 3.4, with credits for
weights and quotas for exactness.

Sizes are 1,021 doubled 0 to 6 times: the first size with at least 100 slots for each unit of
weight. They are not primes as in the paper, for two reasons. First, a prime that follows the
weights would change with nearly every pod that is added or removed, and a new size reassigns all
slots. Second, when the size does change, each slot of the smaller table corresponds to exactly 2^k
slots of the larger one (a slot is found by multiplication, `hash * size >> 32`), so previous nodes
can be carried over without loss; see `transition`. The paper needs a prime only so that every
permutation visits each slot; an odd skip that is not a multiple of 1,021 ensures that too."""

import ctypes
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Refused, plain

MIN_SIZE = 1021
DOUBLINGS = 6
SLOTS_PER_WEIGHT = 100
MAX_NODES = 4096
SMALL = 2 * MIN_SIZE
SMALL_CACHED = 16384
_OBJECT = Path(__file__).resolve().parent.parent / "objects" / "maglev.so"
_EMPTY = 0xFFFF


class Table(NamedTuple):
    """`slots[i]` is the index in `nodes` of the node that has slot i. Empty if no node has a
    weight.

    `nodes` is sorted and contains only nodes that have a slot; `slots` are unsigned 16-bit numbers
    in the machine's byte order."""

    nodes: tuple[str, ...]
    slots: bytes


EMPTY = Table((), b"")

Weights = tuple[tuple[str, int], ...]
Members = list[tuple[str, int]]


class Permutations(NamedTuple):
    """The input of a fill: for each node its walk (offset and skip), its weight, and its number of
    slots."""

    size: int
    offsets: Sequence[int]
    skips: Sequence[int]
    weights: Sequence[int]
    quotas: Sequence[int]


def table_size(total_weight: int) -> int:
    """Return the number of slots for this sum of weights: 1,021 doubled until there are 100 per
    unit, at most 65,344."""
    for doubling in range(DOUBLINGS):
        if MIN_SIZE << doubling >= SLOTS_PER_WEIGHT * total_weight:
            return MIN_SIZE << doubling
    return MIN_SIZE << DOUBLINGS


def sizes_down_from(size: int) -> Iterator[int]:
    """Yield the table sizes from this one down to the smallest, each half of the previous one. For
    0, the empty table, yield 0."""
    yield size
    while size > MIN_SIZE:
        size //= 2
        yield size


def quotas(weights: Sequence[int], size: int) -> list[int]:
    """Return how many of `size` slots each weight gets: its share rounded down, the rest to the
    largest remainders (ties: the first)."""
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
def permutation(name: str, size: int) -> tuple[int, int]:
    """Return the first slot of a node's walk over the table, and its stride, with which it visits
    every slot. Both depend on the name and the size alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    skip = int.from_bytes(digest[8:], "little") % (size - 1) | 1
    if skip % MIN_SIZE == 0:
        skip += 2
    return int.from_bytes(digest[:8], "little") % size, skip


def permutations(members: Sequence[tuple[str, int]], size: int = 0) -> Permutations:
    """Return the input of a fill for these (name, weight) pairs.

    `size`: number of slots; 0: the size that the weights require."""
    weights = [weight for _, weight in members]
    size = size or table_size(sum(weights))
    each_walk = [permutation(name, size) for name, _ in members]
    return Permutations(
        size,
        [offset for offset, _ in each_walk],
        [skip for _, skip in each_walk],
        weights,
        quotas(weights, size),
    )


def fill_in_python(fill: Permutations) -> "array[int]":
    """Fill a table. This is the reference implementation, to which the one in C is compared."""
    slots = array("H", [_EMPTY]) * fill.size
    at, left = list(fill.offsets), list(fill.quotas)
    credit = [0] * len(at)
    greatest = max(fill.weights)
    filled = 0
    while filled < fill.size:
        for i, weight in enumerate(fill.weights):
            # A node with the greatest weight takes a slot in every round, others in proportion.
            credit[i] += weight
            if credit[i] < greatest or not left[i]:
                continue
            credit[i] -= greatest
            while slots[at[i]] != _EMPTY:
                at[i] = (at[i] + fill.skips[i]) % fill.size
            slots[at[i]] = i
            left[i] -= 1
            filled += 1
    return slots


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the compiled parts of table computation: bpf/maglev.c, bpf/transition.c. Raise Refused
    if the library has not been built.

    PyDLL holds the GIL during the call, which takes some microseconds. If the thread released the
    GIL, getting it back could take a hundred times as long."""
    try:
        return ctypes.PyDLL(str(_OBJECT))
    except OSError as error:
        raise Refused(
            f"cannot load {_OBJECT}: {plain(error)}", fix="build it: python hatch_build.py"
        ) from error


def at(numbers: "array[int]") -> ctypes.c_void_p:
    """Return the address of an array, valid while the array exists and keeps its length."""
    return ctypes.c_void_p(numbers.buffer_info()[0])


def fill_in_c(fill: Permutations) -> "array[int]":
    """Fill a table with the compiled implementation. Raise Refused if it has not been built."""
    slots, count = array("H", bytes(2 * fill.size)), len(fill.weights)
    # One array of four columns and plain numbers: creating an argument object for each column would
    # take longer than the fill itself.
    columns = array("I", [*fill.offsets, *fill.skips, *fill.weights, *fill.quotas])
    address, _ = columns.buffer_info()
    places = [address + 4 * count * column for column in range(4)]
    if _filling()(count, *places, fill.size, slots.buffer_info()[0]) != 0:
        raise MemoryError("filling a Maglev table")
    return slots


@lru_cache(maxsize=1)
def _filling() -> Callable[..., int]:
    """Return `fill` of bpf/maglev.c."""
    fill = library().fill
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    fill.argtypes = (number, pointer, pointer, pointer, pointer, number, pointer)
    return fill


def table(weights: Weights) -> Table:
    """Return the table for these (name, weight) pairs, in any order. Weights of 0 are ignored.

    Raise Refused for more nodes than a slot can name."""
    found = _small.get(weights)
    if found is None:
        if not _is_small(weights):
            return _large(weights)
        _small[weights] = found = _compute(weights)
    return found


def table_of(weights: Weights, size: int) -> Table:
    """Return the table for these pairs with `size` slots, one of the sizes above, instead of the
    size that the weights require.

    With fewer slots shares are coarser, and a node whose share is less than half a slot has no
    slot. Raise Refused like `table`."""
    return _sized(weights, size)


def prepare(many: Iterable[Weights]) -> None:
    """Compute the small tables among these in advance, for `table`. They are filled in one call
    that releases the GIL."""
    missing = {
        weights: members
        for weights in many
        if weights not in _small and (members := _small_members(weights))
    }
    fill = [permutations(members) for members in missing.values()]
    columns = array("I", chain.from_iterable(column for each in fill for column in each[1:]))
    counts, sizes = (
        array("I", [len(each.weights) for each in fill]),
        array("I", [each.size for each in fill]),
    )
    slots = array("H", bytes(2 * sum(sizes)))
    if (
        _filling_all()(
            len(fill), *(each.buffer_info()[0] for each in (counts, sizes, columns, slots))
        )
        != 0
    ):
        raise MemoryError("filling Maglev tables")
    end = 0
    for (weights, members), each in zip(missing.items(), fill, strict=True):
        begin, end = end, end + each.size
        _small[weights] = _named(members, each, slots[begin:end])


@lru_cache(maxsize=1)
def _filling_all() -> Callable[..., int]:
    """Return `fill_all` of bpf/maglev.c, which releases the GIL during the call."""
    library()  # raises Refused if the library has not been built
    fill_all = ctypes.CDLL(str(_OBJECT)).fill_all
    fill_all.argtypes = (ctypes.c_uint32, *[ctypes.c_void_p] * 4)
    return fill_all


def _is_small(weights: Weights) -> bool:
    return table_size(sum([weight for _, weight in weights])) <= SMALL


def _small_members(weights: Weights) -> Members:
    """Return the members of a small table; an empty list for a large one."""
    return _members(weights) if _is_small(weights) else []


def _members(weights: Weights) -> Members:
    return sorted([each for each in weights if each[1] > 0])


def _compute(weights: Weights, size: int = 0) -> Table:
    members = _members(weights)
    if not members:
        return EMPTY
    if len(members) > MAX_NODES:
        raise Refused(
            f"{len(members)} nodes for one listener",
            fix=f"at most {MAX_NODES} nodes can share one",
        )
    fill = permutations(members, size)
    return _named(members, fill, fill_in_c(fill))


def _named(members: Members, fill: Permutations, slots: "array[int]") -> Table:
    """Return the table with the names of the nodes that have slots.

    A node whose share is less than half a slot may have none, and names without slots would make
    equal tables compare as different."""
    names = [name for name, _ in members]
    if 0 in fill.quotas:
        has_slot = [quota > 0 for quota in fill.quotas]
        place = [sum(has_slot[:i]) for i in range(len(members))]
        slots = array("H", (place[i] for i in slots))
        names = list(compress(names, has_slot))
    return Table(tuple(names), slots.tobytes())


class _Cache(dict[Weights, Table]):
    """A cache of the tables that were computed last; threads may use it concurrently."""

    def __setitem__(self, weights: Weights, made: Table) -> None:
        super().__setitem__(weights, made)
        if len(self) > SMALL_CACHED:
            for oldest in list(self)[: SMALL_CACHED // 4]:
                self.pop(oldest, None)


# The caches are separate to bound their memory: 2 KiB or 4 KiB for each small table, of which a
# cluster has thousands, and up to 128 KiB for each large one, of which a rolling update creates
# hundreds.
_small = _Cache()
_large = lru_cache(maxsize=128)(_compute)
_sized = lru_cache(maxsize=64)(_compute)
