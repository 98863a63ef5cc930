"""eBPF maps, and the parts of bpf(2) that maps, programs and links share, through the system call
alone.

In: specs from an object file (`elf`). Out: `Map`s, each the owner of one file descriptor. A kernel
object exists while it is referenced by a descriptor, a pin in a bpffs, or a program that uses it.
Invariant: every error states the operation and the object. Follows bpf(2) and
include/uapi/linux/bpf.h; attributes that a kernel does not know are zero, which it accepts."""

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
MAP_TYPE_LRU_HASH = 9

_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PIN, _GET = 0, 1, 2, 3, 4, 6, 7
_INFO, _LOOKUP_BATCH, _UPDATE_BATCH, _DELETE_BATCH = 15, 24, 26, 27

_BATCH = 4096
_NOT_SUPPORTED = 524
"""ENOTSUPP, which the C library does not define: this map type does not support the command (an LPM
trie before Linux 5.13)."""

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL holds the GIL during the call. An operation on one element takes a microsecond; after
# releasing the GIL for it, this thread would wait five hundred times as long to get it back
# whenever another thread wants it.
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)


@cache
def _number() -> int:
    """Return the system call number of bpf(2) on this machine. Raise Refused if it is not known."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise Refused(
            f"the system call number of bpf(2) on {platform.machine()} is unknown",
            fix="run gateways on x86_64 or aarch64",
        )
    return number


class _Element(ctypes.Structure):
    """The attributes of an operation on one element.

    Each call has its own object, because several threads may call. Key and value are passed by
    pointer, which costs half as much as packing and copying them."""

    _fields_ = (
        ("map", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("key", ctypes.c_char_p),
        ("value", ctypes.c_char_p),
        ("flags", ctypes.c_uint64),
    )


class _ElementBuffer(ctypes.Structure):
    """Like `_Element`, with a buffer for the value that the kernel returns."""

    _fields_ = (
        *_Element._fields_[:3],
        ("value", ctypes.POINTER(ctypes.c_char)),
        ("flags", ctypes.c_uint64),
    )


_ELEMENT_BYTES = ctypes.sizeof(_Element)


def call(command: int, attributes: bytes | bytearray) -> int:
    """Call bpf(2). Raise OSError."""
    buffer = (ctypes.c_char * len(attributes)).from_buffer(
        attributes if isinstance(attributes, bytearray) else bytearray(attributes)
    )
    result = int(_libc.syscall(_number(), command, buffer, len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def failure(error: OSError, tried: str) -> FairleadError:
    """Return the error to raise when the operation `tried` failed."""
    message = f"{tried}: {error.strerror}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return Refused(
            message,
            fix="run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; in a container, a "
            "seccomp profile may forbid bpf(2)",
        )
    if error.errno in (errno.E2BIG, errno.ENOSPC):
        return Refused(
            message, fix="the map is full: use fewer Services, or more gateways with fewer each"
        )
    if error.errno == errno.ENOSYS:
        return Refused(message, fix="this kernel has no bpf(2), or a seccomp profile forbids it")
    return Unavailable(message)


def possible_cpus() -> int:
    """Return the number of CPUs for which a per-CPU element has a value."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").rsplit("-", 1)[-1]) + 1


def address_of(buffer: "ctypes.Array[ctypes.c_char]") -> int:
    """Return the address of a buffer, for the attributes of a call."""
    return ctypes.addressof(buffer)


def runs(numbers: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive numbers, as (first, count), with at most `max_length` numbers each.

    `numbers` is sorted."""
    first, count = 0, 0
    for number in numbers:
        if count and (number != first + count or count == max_length):
            yield first, count
            count = 0
        if not count:
            first = number
        count += 1
    if count:
        yield first, count


class Descriptor:
    """The owner of one file descriptor of bpf(2)."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    def information(self, size: int) -> bytes:
        """Return the `struct bpf_{map,prog,link}_info` of the object, at most `size` bytes."""
        answer = ctypes.create_string_buffer(size)
        self.read_information(answer)
        return answer.raw

    def read_information(self, answer: "ctypes.Array[ctypes.c_char]") -> None:
        """Write the result of `information` into a buffer, which may contain pointers to other
        buffers that the kernel fills."""
        try:
            call(_INFO, struct.pack("<IIQ", self.descriptor, len(answer), address_of(answer)))
        except OSError as error:
            raise failure(error, f"reading the information of {self.name}") from error

    def close(self) -> None:
        """Close the descriptor. Pinned or attached objects stay in the kernel."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pin(self, path: Path) -> None:
        """Pin the object in a bpffs, so that it outlives this process."""
        text = ctypes.create_string_buffer(os.fsencode(path))
        try:
            call(_PIN, struct.pack("<QII", address_of(text), self.descriptor, 0))
        except OSError as error:
            raise failure(error, f"pinning {self.name} at {path}") from error


def open_pin(path: Path) -> int:
    """Return a descriptor of the object that is pinned at `path`."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    try:
        return call(_GET, struct.pack("<QII", address_of(text), 0, 0))
    except OSError as error:
        raise failure(error, f"opening the pin {path}") from error


class Map(Descriptor):
    """A map. Keys and values are bytes of the sizes in its spec; a value of a per-CPU map holds the
    values of all CPUs in a row."""

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
        """Create an empty map."""
        name = spec.name[:15].encode()
        # The attributes after map_flags are inner_map_fd and numa_node, then the name, then
        # attributes for devices and BTF, which are not used.
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
        """Open a pinned map; its spec is read from the kernel."""
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
        """The kernel's ID of the map."""
        return int(struct.unpack_from("<I", self.information(88), 4)[0])

    def _element(self, command: int, attributes: "_Element | _ElementBuffer") -> None:
        if _libc_with_gil.syscall(_number(), command, ctypes.byref(attributes), _ELEMENT_BYTES) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def lookup(self, key: bytes) -> bytes | None:
        """Return the value at `key`; None if there is none."""
        value = ctypes.create_string_buffer(self._value_bytes)
        try:
            self._element(_LOOKUP, _ElementBuffer(self.descriptor, 0, key, value, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise failure(error, f"reading {self.name}") from error
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set the value at `key`; atomic for readers if the map is a hash."""
        if len(key) != self.spec.key_size or len(value) != self._value_bytes:
            self._check_sizes(1, key, value)
        try:
            self._element(_UPDATE, _Element(self.descriptor, 0, key, value, 0))
        except OSError as error:
            raise failure(error, f"writing to {self.name}") from error

    def delete(self, key: bytes) -> bool:
        """Delete the element at `key`. Return False if there was none."""
        try:
            self._element(_DELETE, _Element(self.descriptor, 0, key, None, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise failure(error, f"deleting from {self.name}") from error
        return True

    def update_all(self, elements: Mapping[bytes, bytes]) -> None:
        """Set these values. After an error some may be set."""
        done = 0
        if len(elements) > 1:
            done = self._change_batch(
                _UPDATE_BATCH, elements, b"".join(elements.values()), f"writing to {self.name}"
            )
        for key in list(elements)[done:]:
            self.update(key, elements[key])

    def delete_all(self, keys: Collection[bytes]) -> None:
        """Delete the elements at these keys, as far as they exist."""
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
        """Run a batch command. Return the number of keys, in order, that were processed.

        If it is less than the number of keys, the caller has to process the remaining keys one by
        one."""
        joined = b"".join(keys)
        # The kernel would read beyond buffers that are too short.
        self._check_sizes(len(keys), joined, values or None)
        key_buffer, value_buffer = (
            ctypes.create_string_buffer(each, len(each) or 1) for each in (joined, values)
        )
        addresses = address_of(key_buffer), address_of(value_buffer) if values else 0
        attributes = bytearray(
            # in_batch, out_batch, keys, values, count, map_fd, elem_flags, flags of union bpf_attr
            struct.pack("<QQQQIIQQ", 0, 0, *addresses, len(keys), self.descriptor, 0, 0)
        )
        try:
            call(command, attributes)
        except OSError as error:
            if error.errno in (_NOT_SUPPORTED, errno.EINVAL):
                return 0
            if error.errno not in (errno.ENOENT, errno.ENOSPC):
                raise failure(error, tried) from error
        # The kernel writes the number of processed elements into `count`, also after an error.
        (count,) = struct.unpack_from("<I", attributes, 32)
        return int(count)

    def clear_values(self, key: bytes) -> None:
        """Set the value at `key` to zeros, on every CPU."""
        self.update(key, bytes(self._value_bytes))

    def clear_all(self, keys: Collection[bytes]) -> None:
        """Set the values at these keys to zeros, on every CPU."""
        self.update_all(dict.fromkeys(keys, bytes(self._value_bytes)))

    def per_cpu(self, key: bytes) -> tuple[bytes, ...]:
        """Return the values of each CPU at `key` of a per-CPU map."""
        values = self.lookup(key) or bytes(self._value_bytes)
        stride = -(-self.spec.value_size // 8) * 8
        return tuple(values[at : at + self.spec.value_size] for at in range(0, len(values), stride))

    def rows(self, indices: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield index and value for these indices of an array, read in batches.

        A value of a per-CPU array holds the values of all CPUs in a row."""
        for first, count in runs(sorted(set(indices)), _BATCH):
            size = self._value_bytes
            # A single lookup costs a fifth of a batch of one.
            values = (
                self._run(first, count)
                if count > 1
                else self.lookup(struct.pack("=I", first)) or bytes(size)
            )
            for index in range(count):
                yield first + index, values[index * size : (index + 1) * size]

    def _run(self, first: int, count: int) -> bytes:
        """Return the values of `count` consecutive elements of an array."""
        keys, values = (
            ctypes.create_string_buffer(4 * count),
            ctypes.create_string_buffer(self._value_bytes * count),
        )
        # The batch begins after this element.
        before = ctypes.create_string_buffer(struct.pack("=I", max(first - 1, 0)), 4)
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
            if error.errno in (_NOT_SUPPORTED, errno.EINVAL):  # per-CPU arrays before Linux 5.13
                return b"".join(
                    self.lookup(struct.pack("=I", first + index)) or b"" for index in range(count)
                )
            if error.errno != errno.ENOENT:  # ENOENT: the batch reached the end of the array
                raise failure(error, f"reading {self.name}") from error
        return values.raw

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every element, read in batches. An element that is added or deleted meanwhile may
        be included or missing."""
        key_size, value_size = self.spec.key_size, self._value_bytes
        for count, keys, values in self._batches():
            for i in range(count):
                yield (
                    keys[i * key_size : (i + 1) * key_size],
                    values[i * value_size : (i + 1) * value_size],
                )

    def count(self) -> int:
        """Return the number of elements; approximate for a large hash."""
        return sum(count for count, _, _ in self._batches())

    def _batches(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield batches: the number of elements, their keys in a row, their values in a row."""
        key_size, value_size, batch = (
            self.spec.key_size,
            self._value_bytes,
            min(_BATCH, self.spec.max_entries),
        )
        cursor = ctypes.create_string_buffer(max(key_size, 4))
        first = True
        while True:
            keys, values = (
                ctypes.create_string_buffer(key_size * batch),
                ctypes.create_string_buffer(value_size * batch),
            )
            before = 0 if first else address_of(cursor)
            attributes = bytearray(
                struct.pack(
                    "<QQQQIIQQ",
                    before,
                    address_of(cursor),
                    address_of(keys),
                    address_of(values),
                    batch,
                    self.descriptor,
                    0,
                    0,
                )
            )
            last = False
            try:
                call(_LOOKUP_BATCH, attributes)
            except OSError as error:
                # A bucket of the hash holds more elements than the buffers do.
                if error.errno == errno.ENOSPC:
                    batch *= 2
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
        """Yield the same as `_batches` on kernels without batch commands for this map."""
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
        """Return an array that was created with BPF_F_MMAPABLE as memory: writes to it change the
        map."""
        size = -(-self.spec.value_size * self.spec.max_entries // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return mmap.mmap(
                self.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            raise failure(error, f"mapping {self.name} into memory") from error


def create_maps(specs: Sequence[MapSpec]) -> dict[str, Map]:
    """Create all of these maps, or none.

    Before Linux 5.11 maps count as locked memory, whose limit may be low; the limit is raised if
    that is permitted."""
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
