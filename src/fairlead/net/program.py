"""eBPF programs in the kernel: load them, and run them on test packets.

In: a program's spec (`elf`) and its maps. Out: a `Program`, the owner of one file descriptor. The
program exists while it is referenced by a descriptor, a pin, or an attachment (`tc`, `xdp`).
Invariant: the error for a program that the kernel rejects contains the verifier's log. Follows
bpf(2) and Linux Documentation/bpf/bpf_prog_run.rst."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from fairlead.errors import FairleadError, Refused
from fairlead.net.bpf import Descriptor, Map, address_of, call, failure, open_pin
from fairlead.net.elf import ProgramSpec

PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP = 3, 6

_PROG_LOAD, _TEST_RUN, _PROG_GET_NEXT_ID, _PROG_GET_FD_BY_ID = 5, 10, 11, 13
_MAX_MAPS = 64
"""The kernel's limit of maps in one program (MAX_USED_MAPS)."""
TEST_CHECKSUM_COMPLETE = 1 << 2
"""A flag for `test_run`: the packet has a checksum from the device (CHECKSUM_COMPLETE). If the
program leaves it inconsistent, the run fails (EBADMSG)."""
_PSEUDO_MAP_FD = 1
_LOG_SIZES = (1 << 20, 1 << 24)
_LOG_LINES_SHOWN = 25


class RunResult(NamedTuple):
    """The result of a test run: the verdict, the packet and the context after the run (no context
    for XDP), and the average duration of one run."""

    verdict: int
    packet: bytes
    context: bytes
    duration_ns: int


class Program(Descriptor):
    """A loaded program. It runs once it is attached."""

    @classmethod
    def load(
        cls,
        spec: ProgramSpec,
        maps: Mapping[str, Map],
        *,
        program_type: int,
        license_name: str = "GPL",
    ) -> Self:
        """Have the kernel verify and compile the program, with the descriptors of these maps
        inserted."""
        code = bytearray(spec.instructions)
        for offset, name in spec.map_references:
            code[offset + 1] = code[offset + 1] & 0x0F | _PSEUDO_MAP_FD << 4
            struct.pack_into("<i", code, offset + 4, maps[name].descriptor)
        try:
            return cls(
                _load_with_retries(bytes(code), spec.name, program_type, license_name),
                f"program {spec.name}",
            )
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                raise failure(error, f"loading program {spec.name}") from error
            reasons = _verifier_log(bytes(code), spec.name, program_type, license_name)
            raise Refused(
                f"the kernel rejected program {spec.name}: {error.strerror}; the verifier "
                f"reports:\n{reasons}",
                fix=f"Linux 5.10 or newer is needed, this is {platform.release()}; if it is, "
                "please report the lines above",
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a pinned program."""
        return cls(open_pin(path), f"program {path.name}")

    def test_run(
        self,
        packet: bytes,
        *,
        context: bytes = b"",
        repeat: int = 1,
        with_context: bool = True,
        flags: int = 0,
    ) -> RunResult:
        """Run the program on a packet (BPF_PROG_TEST_RUN). Nothing is sent, but maps are changed as
        usual.

        `context` is a `struct __sk_buff`, of which the kernel uses a few fields. `with_context`:
        also return the context after the run, which XDP programs do not support."""
        data = ctypes.create_string_buffer(packet, len(packet))
        out = ctypes.create_string_buffer(len(packet) + 512)
        given = ctypes.create_string_buffer(context, len(context)) if context else None
        after = ctypes.create_string_buffer(256) if with_context else None
        attributes = bytearray(
            struct.pack(
                "<IIIIQQIIIIQQIIII",
                *(
                    self.descriptor,
                    0,
                    len(packet),
                    len(out),
                    address_of(data),
                    address_of(out),
                    repeat,
                    0,
                ),
                *(len(context), len(after) if after else 0),
                *(address_of(given) if given else 0, address_of(after) if after else 0),
                *(flags, 0, 0, 0),
            )
        )
        try:
            call(_TEST_RUN, attributes)
        except OSError as error:
            raise failure(error, f"test-running {self.name}") from error
        _, verdict, _, size = struct.unpack_from("<4I", attributes)
        duration_ns, _, context_size = struct.unpack_from("<3I", attributes, 36)
        return RunResult(
            verdict, out.raw[:size], after.raw[:context_size] if after else b"", duration_ns
        )


def maps_of(program_id: int) -> frozenset[int]:
    """Return the IDs of the maps that a loaded program uses; empty if the program is gone or cannot
    be inspected."""
    answer = ctypes.create_string_buffer(80)
    numbers = (ctypes.c_uint32 * _MAX_MAPS)()
    struct.pack_into("<IQ", answer, 52, _MAX_MAPS, ctypes.addressof(numbers))
    try:
        with Descriptor(
            call(_PROG_GET_FD_BY_ID, struct.pack("<III", program_id, 0, 0)), f"program {program_id}"
        ) as program:
            program.read_information(answer)
    except (OSError, FairleadError):
        return frozenset()
    (count,) = struct.unpack_from("<I", answer, 52)
    return frozenset(numbers[:count])


def programs_with(maps: Collection[int]) -> frozenset[int]:
    """Return the IDs of all programs of the machine, in every network namespace, that use one of
    these maps."""
    found: set[int] = set()
    wanted, number = set(maps), 0
    while True:
        attributes = bytearray(struct.pack("<III", number, 0, 0))
        try:
            call(_PROG_GET_NEXT_ID, attributes)
        except OSError:
            return frozenset(found)  # ENOENT: there are no more
        _, number, _ = struct.unpack("<III", attributes)
        if not wanted.isdisjoint(maps_of(number)):
            found.add(number)


def _load(
    code: bytes, name: str, kind: int, license_name: str, log: "ctypes.Array[ctypes.c_char] | None"
) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_text = ctypes.create_string_buffer(license_name.encode())
    return call(
        _PROG_LOAD,
        struct.pack(
            "<IIQQIIQII16s",
            *(kind, len(code) // 8, address_of(instructions), address_of(license_text)),
            *(
                1 if log else 0,
                len(log) if log else 0,
                address_of(log) if log else 0,
                0,
                0,
                name[:15].encode(),
            ),
        )
        + bytes(64),
    )


def _load_with_retries(code: bytes, name: str, kind: int, license_name: str) -> int:
    """Load a program. A signal interrupts the verifier (EAGAIN); try five times, like libbpf."""
    for _ in range(4):
        try:
            return _load(code, name, kind, license_name, None)
        except BlockingIOError:
            continue
    return _load(code, name, kind, license_name, None)


def _verifier_log(code: bytes, name: str, kind: int, license_name: str) -> str:
    """Return the last lines of the verifier's log, which contain its reason."""
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
