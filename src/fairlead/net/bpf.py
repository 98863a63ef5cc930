"""Maps and programs in the kernel, through bpf(2) alone.

In: specs read from an object (`elf`). Out: `Map` and `Program`, each the owner of one file descriptor. What is made here lives
as long as something holds it: a descriptor, a pin in a bpffs, or for a program the place it is attached at.
Invariant: every failure says what was tried on what, and a program that the kernel refuses comes with the verifier's reasons.
Follows bpf(2) and include/uapi/linux/bpf.h; fields that a kernel does not know are left zero, which it accepts.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.elf import MapSpec, ProgramSpec

MAP_TYPE_PERCPU_HASH, MAP_TYPE_PERCPU_ARRAY, MAP_TYPE_LRU_PERCPU_HASH = 5, 6, 10
PROGRAM_TYPE_SCHED_CLS = 3

_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PROG_LOAD, _PIN, _GET, _TEST_RUN = 0, 1, 2, 3, 4, 5, 6, 7, 10
_INFO, _LOOKUP_BATCH, _UPDATE_BATCH = 15, 24, 26

_PSEUDO_MAP_FD = 1
_LOG_SIZES = (1 << 20, 1 << 24)
_LOG_LINES_SHOWN = 25
_BATCH = 4096

_libc = ctypes.CDLL(None, use_errno=True)


def _call(command: int, attributes: bytes | bytearray) -> int:
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise Refused(f"eBPF cannot be driven on {platform.machine()}", fix="run gateways on x86_64 or aarch64")
    buffer = (ctypes.c_char * len(attributes)).from_buffer(
        attributes if isinstance(attributes, bytearray) else bytearray(attributes)
    )
    result = int(_libc.syscall(number, command, buffer, len(attributes)))
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
        return Refused(message, fix="the map is full: use fewer Services, or more gateways with fewer each")
    if error.errno == errno.ENOSYS:
        return Refused(message, fix="this kernel has no bpf(2), or a seccomp profile forbids it")
    return Unavailable(message)


def possible_cpus() -> int:
    """How many CPUs the kernel keeps a value for in each per-CPU element."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").rsplit("-", 1)[-1]) + 1


def _address(buffer: "ctypes.Array[ctypes.c_char]") -> int:
    return ctypes.addressof(buffer)


class _Descriptor:
    """Owner of one file descriptor of bpf(2)."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

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
            _call(_PIN, struct.pack("<QII", _address(text), self.descriptor, 0))
        except OSError as error:
            raise failure(error, f"pinning {self.name} at {path}") from error


def _open_pin(path: Path) -> int:
    text = ctypes.create_string_buffer(os.fsencode(path))
    try:
        return _call(_GET, struct.pack("<QII", _address(text), 0, 0))
    except OSError as error:
        raise failure(error, f"opening the pin {path}") from error


class Map(_Descriptor):
    """A map. Keys and values are bytes of the sizes that its spec says; of a per-CPU map the values of all CPUs in a row."""

    def __init__(self, descriptor: int, spec: MapSpec) -> None:
        super().__init__(descriptor, f"map {spec.name}")
        self.spec = spec
        per_cpu = spec.type in (MAP_TYPE_PERCPU_HASH, MAP_TYPE_PERCPU_ARRAY, MAP_TYPE_LRU_PERCPU_HASH)
        self._value_bytes = -(-spec.value_size // 8) * 8 * possible_cpus() if per_cpu else spec.value_size

    @classmethod
    def create(cls, spec: MapSpec) -> Self:
        """Make it anew, empty."""
        name = spec.name[:15].encode()
        head = (spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags, 0, 0)
        try:
            return cls(_call(_MAP_CREATE, struct.pack("<7I16s5IQ", *head, name, 0, 0, 0, 0, 0, 0)), spec)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise Unavailable(
                    f"no memory for map {spec.name} of {spec.max_entries} entries", fix="make it smaller, or add memory"
                ) from error
            raise failure(error, f"creating map {spec.name} of {spec.max_entries} entries") from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a pinned one; what it is, it says itself."""
        descriptor = _open_pin(path)
        information = ctypes.create_string_buffer(88)
        try:
            _call(_INFO, struct.pack("<IIQ", descriptor, len(information), _address(information)))
        except OSError as error:
            os.close(descriptor)
            raise failure(error, f"asking what {path} is") from error
        kind, _, key_size, value_size, max_entries, flags = struct.unpack_from("<6I", information.raw)
        return cls(descriptor, MapSpec(path.name, kind, key_size, value_size, max_entries, flags))

    def _element(self, command: int, key: bytes, value: "ctypes.Array[ctypes.c_char] | None", flags: int = 0) -> None:
        at = ctypes.create_string_buffer(key, len(key))
        _call(command, struct.pack("<IIQQQ", self.descriptor, 0, _address(at), _address(value) if value else 0, flags))

    def lookup(self, key: bytes) -> bytes | None:
        """The value at `key`; None if there is none."""
        value = ctypes.create_string_buffer(self._value_bytes)
        try:
            self._element(_LOOKUP, key, value)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise failure(error, f"reading {self.name}") from error
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set the value at `key`, at once for every reader if it is a hash."""
        if len(value) != self._value_bytes or len(key) != self.spec.key_size:
            raise ValueError(f"{self.name} takes keys of {self.spec.key_size} and values of {self._value_bytes} bytes")
        try:
            self._element(_UPDATE, key, ctypes.create_string_buffer(value, len(value)))
        except OSError as error:
            raise failure(error, f"writing to {self.name}") from error

    def delete(self, key: bytes) -> bool:
        """Take the element out. False if there was none."""
        try:
            self._element(_DELETE, key, None)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise failure(error, f"deleting from {self.name}") from error
        return True

    def clear_values(self, key: bytes) -> None:
        """Set the value at `key` to zeros, on every CPU."""
        self.update(key, bytes(self._value_bytes))

    def per_cpu(self, key: bytes) -> tuple[bytes, ...]:
        """The values of each CPU at `key` of a per-CPU map."""
        values = self.lookup(key) or bytes(self._value_bytes)
        stride = -(-self.spec.value_size // 8) * 8
        return tuple(values[at : at + self.spec.value_size] for at in range(0, len(values), stride))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every element, many at a time. Elements that come or go meanwhile may or may not be among them."""
        key_size, value_size = self.spec.key_size, self._value_bytes
        for count, keys, values in self._batches():
            for i in range(count):
                yield keys[i * key_size : (i + 1) * key_size], values[i * value_size : (i + 1) * value_size]

    def count(self) -> int:
        """How many elements there are; of a large hash, about as many."""
        return sum(count for count, _, _ in self._batches())

    def _batches(self) -> Iterator[tuple[int, bytes, bytes]]:
        """How many, their keys in a row, their values in a row."""
        key_size, value_size, room = self.spec.key_size, self._value_bytes, min(_BATCH, self.spec.max_entries)
        cursor = ctypes.create_string_buffer(max(key_size, 4))
        first = True
        while True:
            keys, values = ctypes.create_string_buffer(key_size * room), ctypes.create_string_buffer(value_size * room)
            before = 0 if first else _address(cursor)
            attributes = bytearray(
                struct.pack(
                    "<QQQQIIQQ", before, _address(cursor), _address(keys), _address(values), room, self.descriptor, 0, 0
                )
            )
            last = False
            try:
                _call(_LOOKUP_BATCH, attributes)
            except OSError as error:
                if error.errno == errno.ENOSPC:  # a bucket of the hash holds more than there is room for
                    room *= 2
                    continue
                if error.errno != errno.ENOENT:
                    raise failure(error, f"reading {self.name}") from error
                last = True
            (count,) = struct.unpack_from("<I", attributes, 32)
            yield count, keys.raw[: count * key_size], values.raw[: count * value_size]
            if last:
                return
            first = False

    def memory(self) -> mmap.mmap:
        """An array made with BPF_F_MMAPABLE, as memory: writing to it writes to the map."""
        size = -(-self.spec.value_size * self.spec.max_entries // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return mmap.mmap(self.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise failure(error, f"mapping {self.name} into memory") from error


class Trial(NamedTuple):
    """What a program did with a packet: its verdict, the packet after it, and the context after it."""

    verdict: int
    packet: bytes
    context: bytes


class Program(_Descriptor):
    """A loaded program. It runs once something attaches it."""

    @classmethod
    def load(cls, spec: ProgramSpec, maps: Mapping[str, Map], *, program_type: int, license_name: str = "GPL") -> Self:
        """Have the kernel verify and compile it, with these maps in the places where it names them."""
        code = bytearray(spec.instructions)
        for offset, name in spec.map_references:
            code[offset + 1] = code[offset + 1] & 0x0F | _PSEUDO_MAP_FD << 4
            struct.pack_into("<i", code, offset + 4, maps[name].descriptor)
        try:
            return cls(_load(bytes(code), spec.name, program_type, license_name, None), f"program {spec.name}")
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                raise failure(error, f"loading program {spec.name}") from error
            reasons = _verifier_log(bytes(code), spec.name, program_type, license_name)
            raise Refused(
                f"the kernel refused program {spec.name}: {error.strerror}; the verifier said:\n{reasons}",
                fix=f"Linux 5.10 or newer is needed, this is {platform.release()}; if it is, please report the lines above",
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a pinned one."""
        return cls(_open_pin(path), f"program {path.name}")

    def test_run(self, packet: bytes, *, context: bytes = b"", repeat: int = 1) -> Trial:
        """Run it on a packet without sending anything (BPF_PROG_TEST_RUN).

        `context` is a `struct __sk_buff` of which the kernel honours a few fields. Sends nothing, but maps change as ever.
        """
        data = ctypes.create_string_buffer(packet, len(packet))
        out = ctypes.create_string_buffer(len(packet) + 512)
        given = ctypes.create_string_buffer(context, len(context)) if context else None
        after = ctypes.create_string_buffer(256)
        attributes = bytearray(
            struct.pack(
                "<IIIIQQIIIIQQIIII",
                *(self.descriptor, 0, len(packet), len(out), _address(data), _address(out), repeat, 0),
                *(len(context), len(after), _address(given) if given else 0, _address(after), 0, 0, 0, 0),
            )
        )
        try:
            _call(_TEST_RUN, attributes)
        except OSError as error:
            raise failure(error, f"test-running {self.name}") from error
        _, verdict, _, size = struct.unpack_from("<4I", attributes)
        (context_size,) = struct.unpack_from("<I", attributes, 44)
        return Trial(verdict, out.raw[:size], after.raw[:context_size])


def _load(code: bytes, name: str, kind: int, license_name: str, log: "ctypes.Array[ctypes.c_char] | None") -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_text = ctypes.create_string_buffer(license_name.encode())
    return _call(
        _PROG_LOAD,
        struct.pack(
            "<IIQQIIQII16s",
            *(kind, len(code) // 8, _address(instructions), _address(license_text)),
            *(1 if log else 0, len(log) if log else 0, _address(log) if log else 0, 0, 0, name[:15].encode()),
        )
        + bytes(64),
    )


def _verifier_log(code: bytes, name: str, kind: int, license_name: str) -> str:
    """The end of what the verifier says, where its reason is."""
    text = ""
    for size in _LOG_SIZES:
        log = ctypes.create_string_buffer(size)
        try:
            os.close(_load(code, name, kind, license_name, log))
        except OSError as error:
            text = log.value.decode(errors="replace")
            if error.errno == errno.ENOSPC:
                continue
        break
    return "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:]) or "(nothing)"


def create_maps(specs: Sequence[MapSpec]) -> dict[str, Map]:
    """Make all of them, or none."""
    made: dict[str, Map] = {}
    try:
        for spec in specs:
            made[spec.name] = Map.create(spec)
    except FairleadError:
        for each in made.values():
            each.close()
        raise
    return made
