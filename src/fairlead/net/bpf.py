"""Maps in the kernel, and what every use of bpf(2) needs, through the system call alone.

In: specs read from an object (`elf`). Out: `Map`s, each the owner of one file descriptor. What is
made here lives as long as something holds it: a descriptor, a pin in a bpffs, or a program that
works on it. Invariant: every failure says what was tried on what. Follows bpf(2) and
include/uapi/linux/bpf.h; fields that a kernel does not know are left zero, which it accepts."""

import ctypes
import errno
import mmap
import os
import platform
import resource
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.elf import MapSpec

MAP_TYPE_PERCPU_HASH, MAP_TYPE_PERCPU_ARRAY, MAP_TYPE_LRU_PERCPU_HASH = 5, 6, 10

_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PIN, _GET = 0, 1, 2, 3, 4, 6, 7
_INFO, _LOOKUP_BATCH, _UPDATE_BATCH, _DELETE_BATCH = 15, 24, 26, 27

_BATCH = 4096
_NOT_SUPPORTED = 524
"""ENOTSUPP, which the C library does not know: this kind of map has no such command (an LPM trie
before Linux 5.13)."""

_libc = ctypes.CDLL(None, use_errno=True)
# For one element the kernel takes a microsecond. To let go of the interpreter for so long costs a
# thread's turn to get it back, five hundred times that, whenever another thread wants it too.
_at_once = ctypes.PyDLL(None, use_errno=True)


@cache
def _number() -> int:
    """Of bpf(2) on this machine. Raises Refused where it is not known."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise Refused(
            f"eBPF cannot be driven on {platform.machine()}",
            fix="run gateways on x86_64 or aarch64",
        )
    return number


class _Element(ctypes.Structure):
    """The attributes of a call for one element. Made for each call, as calls may come from several
    threads; the bytes are used where they lie, which costs half of what packing and copying them
    did."""

    _fields_ = (
        ("map", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("key", ctypes.c_char_p),
        ("value", ctypes.c_char_p),
        ("flags", ctypes.c_uint64),
    )


class _Room(ctypes.Structure):
    """The same, with room for the value that the kernel is asked for."""

    _fields_ = (
        *_Element._fields_[:3],
        ("value", ctypes.POINTER(ctypes.c_char)),
        ("flags", ctypes.c_uint64),
    )


_ELEMENT_BYTES = ctypes.sizeof(_Element)


def call(command: int, attributes: bytes | bytearray) -> int:
    """bpf(2). Raises OSError."""
    buffer = (ctypes.c_char * len(attributes)).from_buffer(
        attributes if isinstance(attributes, bytearray) else bytearray(attributes)
    )
    result = int(_libc.syscall(_number(), command, buffer, len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def failure(error: OSError, tried: str) -> FairleadError:
    """The error to raise for what the kernel answered when `tried` was tried."""
    message = f"{tried}: {error.strerror}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return Refused(message, fix="run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")
    if error.errno in (errno.E2BIG, errno.ENOSPC):
        return Refused(
            message, fix="the map is full: use fewer Services, or more gateways with fewer each"
        )
    if error.errno == errno.ENOSYS:
        return Refused(message, fix="this kernel has no bpf(2), or a seccomp profile forbids it")
    return Unavailable(message)


def possible_cpus() -> int:
    """How many CPUs the kernel keeps a value for in each per-CPU element."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").rsplit("-", 1)[-1]) + 1


def address_of(buffer: "ctypes.Array[ctypes.c_char]") -> int:
    """Where a buffer lies, for the attributes of a call."""
    return ctypes.addressof(buffer)


def runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Numbers in ascending order as runs of consecutive ones: the first of each, and how many,
    `most` at a time."""
    first, count = 0, 0
    for number in numbers:
        if count and (number != first + count or count == most):
            yield first, count
            count = 0
        if not count:
            first = number
        count += 1
    if count:
        yield first, count


class Descriptor:
    """Owner of one file descriptor of bpf(2)."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    def information(self, size: int) -> bytes:
        """What the kernel says of it, `struct bpf_{map,prog,link}_info`, as far as it and `size`
        go."""
        answer = ctypes.create_string_buffer(size)
        self.inform(answer)
        return answer.raw

    def inform(self, answer: "ctypes.Array[ctypes.c_char]") -> None:
        """The same into a buffer, which may contain pointers to other buffers for the kernel to
        fill."""
        try:
            call(_INFO, struct.pack("<IIQ", self.descriptor, len(answer), address_of(answer)))
        except OSError as error:
            raise failure(error, f"asking what {self.name} is") from error

    def close(self) -> None:
        """Let go. What is pinned or attached stays in the kernel."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pin(self, path: Path) -> None:
        """Give it a name in a bpffs, under which it outlives this process."""
        text = ctypes.create_string_buffer(os.fsencode(path))
        try:
            call(_PIN, struct.pack("<QII", address_of(text), self.descriptor, 0))
        except OSError as error:
            raise failure(error, f"pinning {self.name} at {path}") from error


def open_pin(path: Path) -> int:
    """A descriptor of what is pinned there."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    try:
        return call(_GET, struct.pack("<QII", address_of(text), 0, 0))
    except OSError as error:
        raise failure(error, f"opening the pin {path}") from error


class Map(Descriptor):
    """A map. Keys and values are bytes of the sizes that its spec says; of a per-CPU map the values
    of all CPUs in a row."""

    def __init__(self, descriptor: int, spec: MapSpec) -> None:
        super().__init__(descriptor, f"map {spec.name}")
        self.spec = spec
        per_cpu = spec.type in (
            MAP_TYPE_PERCPU_HASH,
            MAP_TYPE_PERCPU_ARRAY,
            MAP_TYPE_LRU_PERCPU_HASH,
        )
        self._value_bytes = (
            -(-spec.value_size // 8) * 8 * possible_cpus() if per_cpu else spec.value_size
        )

    @classmethod
    def create(cls, spec: MapSpec) -> Self:
        """Make it anew, empty."""
        name = spec.name[:15].encode()
        head = (spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags, 0, 0)
        try:
            return cls(
                call(_MAP_CREATE, struct.pack("<7I16s5IQ", *head, name, 0, 0, 0, 0, 0, 0)), spec
            )
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise Unavailable(
                    f"no memory for map {spec.name} of {spec.max_entries} entries",
                    fix="make it smaller, or add memory",
                ) from error
            raise failure(
                error, f"creating map {spec.name} of {spec.max_entries} entries"
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a pinned one; what it is, it says itself."""
        opened = Descriptor(open_pin(path), f"the pin {path}")
        try:
            kind, _, key_size, value_size, max_entries, flags = struct.unpack_from(
                "<6I", opened.information(88)
            )
        except FairleadError:
            opened.close()
            raise
        return cls(
            opened.descriptor, MapSpec(path.name, kind, key_size, value_size, max_entries, flags)
        )

    @property
    def number(self) -> int:
        """The kernel's number of it."""
        return int(struct.unpack_from("<I", self.information(88), 4)[0])

    def _element(self, command: int, attributes: "_Element | _Room") -> None:
        if _at_once.syscall(_number(), command, ctypes.byref(attributes), _ELEMENT_BYTES) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def lookup(self, key: bytes) -> bytes | None:
        """The value at `key`; None if there is none."""
        value = ctypes.create_string_buffer(self._value_bytes)
        try:
            self._element(_LOOKUP, _Room(self.descriptor, 0, key, value, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise failure(error, f"reading {self.name}") from error
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set the value at `key`, at once for every reader if it is a hash."""
        if len(key) != self.spec.key_size or len(value) != self._value_bytes:
            self._check_sizes(1, key, value)
        try:
            self._element(_UPDATE, _Element(self.descriptor, 0, key, value, 0))
        except OSError as error:
            raise failure(error, f"writing to {self.name}") from error

    def delete(self, key: bytes) -> bool:
        """Take the element out. False if there was none."""
        try:
            self._element(_DELETE, _Element(self.descriptor, 0, key, None, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise failure(error, f"deleting from {self.name}") from error
        return True

    def update_all(self, elements: Mapping[bytes, bytes]) -> None:
        """Set these values. Where it fails some may be set."""
        done = 0
        if len(elements) > 1:
            done = self._change_batch(
                _UPDATE_BATCH, elements, b"".join(elements.values()), f"writing to {self.name}"
            )
        for key in list(elements)[done:]:
            self.update(key, elements[key])

    def delete_all(self, keys: Collection[bytes]) -> None:
        """Take these elements out, those that are there."""
        if not keys:
            return
        done = self._change_batch(_DELETE_BATCH, keys, b"", f"deleting from {self.name}")
        for key in list(keys)[done:]:
            self.delete(key)

    def _check_sizes(self, number: int, keys: bytes, values: bytes | None) -> None:
        wrong = values is not None and len(values) != number * self._value_bytes
        if wrong or len(keys) != number * self.spec.key_size:
            raise ValueError(
                f"{self.name} takes keys of {self.spec.key_size} and values of "
                f"{self._value_bytes} bytes"
            )

    def _change_batch(
        self, command: int, keys: Collection[bytes], values: bytes, tried: str
    ) -> int:
        """How many of the keys, in order, are done with. Fewer than all: the next one is to be
        looked at by itself."""
        joined = b"".join(keys)
        self._check_sizes(len(keys), joined, values or None)  # the kernel would read on behind them
        key_buffer, value_buffer = (
            ctypes.create_string_buffer(each, len(each) or 1) for each in (joined, values)
        )
        addresses = address_of(key_buffer), address_of(value_buffer) if values else 0
        attributes = bytearray(
            struct.pack("<QQQQIIQQ", 0, 0, *addresses, len(keys), self.descriptor, 0, 0)
        )
        try:
            call(command, attributes)
        except OSError as error:
            if error.errno in (_NOT_SUPPORTED, errno.EINVAL):
                return 0
            if error.errno not in (errno.ENOENT, errno.ENOSPC):
                raise failure(error, tried) from error
        (count,) = struct.unpack_from("<I", attributes, 32)
        return int(count)

    def clear_values(self, key: bytes) -> None:
        """Set the value at `key` to zeros, on every CPU."""
        self.update(key, bytes(self._value_bytes))

    def clear_all(self, keys: Collection[bytes]) -> None:
        """The same for many."""
        self.update_all(dict.fromkeys(keys, bytes(self._value_bytes)))

    def per_cpu(self, key: bytes) -> tuple[bytes, ...]:
        """The values of each CPU at `key` of a per-CPU map."""
        values = self.lookup(key) or bytes(self._value_bytes)
        stride = -(-self.spec.value_size // 8) * 8
        return tuple(values[at : at + self.spec.value_size] for at in range(0, len(values), stride))

    def rows(self, indices: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """The values at these indices of an array, many at a time; of a per-CPU array those of all
        CPUs in a row."""
        for first, count in runs(sorted(set(indices)), _BATCH):
            size = self._value_bytes
            # One by itself costs a fifth of a batch of one.
            values = (
                self._run(first, count)
                if count > 1
                else self.lookup(struct.pack("=I", first)) or bytes(size)
            )
            for place in range(count):
                yield first + place, values[place * size : (place + 1) * size]

    def _run(self, first: int, count: int) -> bytes:
        """The values of `count` elements of an array."""
        keys, values = (
            ctypes.create_string_buffer(4 * count),
            ctypes.create_string_buffer(self._value_bytes * count),
        )
        before = ctypes.create_string_buffer(
            struct.pack("=I", max(first - 1, 0)), 4
        )  # the element that they come after
        places = (
            address_of(before) if first else 0,
            address_of(before),
            address_of(keys),
            address_of(values),
        )
        try:
            call(
                _LOOKUP_BATCH,
                bytearray(struct.pack("<QQQQIIQQ", *places, count, self.descriptor, 0, 0)),
            )
        except OSError as error:
            if error.errno in (_NOT_SUPPORTED, errno.EINVAL):  # of per-CPU arrays since Linux 5.13
                return b"".join(
                    self.lookup(struct.pack("=I", first + place)) or b"" for place in range(count)
                )
            if error.errno != errno.ENOENT:  # that was the last of the array
                raise failure(error, f"reading {self.name}") from error
        return values.raw

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every element, many at a time. Elements that come or go meanwhile may or may not be among
        them."""
        key_size, value_size = self.spec.key_size, self._value_bytes
        for count, keys, values in self._batches():
            for i in range(count):
                yield (
                    keys[i * key_size : (i + 1) * key_size],
                    values[i * value_size : (i + 1) * value_size],
                )

    def count(self) -> int:
        """How many elements there are; of a large hash, about as many."""
        return sum(count for count, _, _ in self._batches())

    def _batches(self) -> Iterator[tuple[int, bytes, bytes]]:
        """How many, their keys in a row, their values in a row."""
        key_size, value_size, room = (
            self.spec.key_size,
            self._value_bytes,
            min(_BATCH, self.spec.max_entries),
        )
        cursor = ctypes.create_string_buffer(max(key_size, 4))
        first = True
        while True:
            keys, values = (
                ctypes.create_string_buffer(key_size * room),
                ctypes.create_string_buffer(value_size * room),
            )
            before = 0 if first else address_of(cursor)
            attributes = bytearray(
                struct.pack(
                    "<QQQQIIQQ",
                    before,
                    address_of(cursor),
                    address_of(keys),
                    address_of(values),
                    room,
                    self.descriptor,
                    0,
                    0,
                )
            )
            last = False
            try:
                call(_LOOKUP_BATCH, attributes)
            except OSError as error:
                if (
                    error.errno == errno.ENOSPC
                ):  # a bucket of the hash holds more than there is room for
                    room *= 2
                    continue
                if error.errno in (_NOT_SUPPORTED, errno.EINVAL) and first:
                    yield from self._one_by_one()
                    return
                if error.errno != errno.ENOENT:
                    raise failure(error, f"reading {self.name}") from error
                last = True
            (count,) = struct.unpack_from("<I", attributes, 32)
            yield count, keys.raw[: count * key_size], values.raw[: count * value_size]
            if last:
                return
            first = False

    def _one_by_one(self) -> Iterator[tuple[int, bytes, bytes]]:
        """As `_batches`, where the kernel has no command for many at a time."""
        key, following = None, ctypes.create_string_buffer(self.spec.key_size)
        while True:
            try:
                at = ctypes.create_string_buffer(key, len(key)) if key is not None else None
                call(
                    _NEXT_KEY,
                    struct.pack(
                        "<IIQQ",
                        self.descriptor,
                        0,
                        address_of(at) if at else 0,
                        address_of(following),
                    ),
                )
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise failure(error, f"reading {self.name}") from error
                return
            key = following.raw
            if (value := self.lookup(key)) is not None:
                yield 1, key, value

    def memory(self) -> mmap.mmap:
        """An array made with BPF_F_MMAPABLE, as memory: writing to it writes to the map."""
        size = -(-self.spec.value_size * self.spec.max_entries // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return mmap.mmap(
                self.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            raise failure(error, f"mapping {self.name} into memory") from error


def create_maps(specs: Sequence[MapSpec]) -> dict[str, Map]:
    """Make all of them, or none. Before Linux 5.11 maps count as locked memory, of which a process
    may have little: the limit is raised, where that is permitted."""
    with suppress(OSError, ValueError):
        resource.setrlimit(
            resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
    made: dict[str, Map] = {}
    try:
        for spec in specs:
            made[spec.name] = Map.create(spec)
    except FairleadError:
        for each in made.values():
            each.close()
        raise
    return made
