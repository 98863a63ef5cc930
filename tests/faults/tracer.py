"""Kill a process at its nth call that changes the kernel: `tracer.py REPORT NUMBER MOMENT (--pid
PID | COMMAND...)`.

In: a running process, or a command to start; the number of the call (0: only report), and whether
the process is to be killed before the kernel receives the call or right after it. Out: in REPORT
one line for each such call, in order; the last line is `killed` if the tracer killed the process.
Calls count if their effect outlives the process or is visible outside: pins and elements of BPF
maps, directories, netlink requests except reads. An object that is created and not pinned (a map, a
program) vanishes with the process. The tracer follows ptrace(2): every thread is seized; a process
that is killed while it stops at the entry of a call does not make the call. strace could do this
too, but it counts separately for each thread, and it also counts calls that only read."""

import ctypes
import os
import platform
import signal
import struct
import sys
from pathlib import Path
from typing import NamedTuple, TextIO

CALLS = {
    "x86_64": {321: "bpf", 44: "sendto", 46: "sendmsg", 83: "mkdir", 87: "unlink", 84: "rmdir"},
    "aarch64": {280: "bpf", 206: "sendto", 211: "sendmsg", 34: "mkdirat", 35: "unlinkat"},
}[platform.machine()]
LASTING = {
    2: "BPF_MAP_UPDATE_ELEM",
    3: "BPF_MAP_DELETE_ELEM",
    6: "BPF_OBJ_PIN",
    26: "BPF_MAP_UPDATE_BATCH",
    27: "BPF_MAP_DELETE_BATCH",
}
"""Commands of bpf(2) with a lasting effect."""
HEAD, NLM_F_REQUEST = 16, 1
NFNL_MSG_BATCH_BEGIN, RTM_BASE, RTM_END, CONNTRACK_NEW, CONNTRACK_DELETE = 16, 16, 128, 0x100, 0x102
BPFFS = b"/sys/fs/bpf/"

SYSCALL, INTERRUPT, SEIZE, LISTEN, SYSCALL_INFO = 24, 0x4207, 0x4206, 0x4208, 0x420E
OPTIONS = 0x1 | 0x8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
EVENT_STOP = 128
ENTRY = 1
WALL = 0x40000000
STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class Entered(NamedTuple):
    """A call that a thread is about to make."""

    name: str
    arguments: tuple[int, ...]


def ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    """Call ptrace(2). Raise ProcessLookupError for a thread that has ended."""
    if _libc.ptrace(request, thread, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of {thread}: {os.strerror(number)}")


def entered(thread: int) -> Entered | None:
    """Return the call of interest that a thread is about to make; None at the end of a call, or for
    any other call."""
    buffer = ctypes.create_string_buffer(88)
    ptrace(SYSCALL_INFO, thread, len(buffer), ctypes.addressof(buffer))
    kind, number, *arguments = struct.unpack_from("=B23xQ6Q", buffer.raw)
    return Entered(CALLS[number], tuple(arguments)) if kind == ENTRY and number in CALLS else None


def change(process: int, call: Entered) -> str:
    """Describe the change that the call makes; "" if it does not count."""
    first, second, third, *_ = call.arguments
    match call.name:
        case "bpf":
            return of_bpf(process, first, second)
        case "sendto":
            return request(read(process, second, 8), third)
        case "sendmsg":
            start, length = (
                pointer(process, pointer(process, second + 16) + offset) for offset in (0, 8)
            )
            return request(read(process, start, 8), length)
        case "mkdir" | "unlink" | "rmdir" | "mkdirat" | "unlinkat":
            path = read(process, second if call.name.endswith("at") else first, 256).split(b"\0")[0]
            return f"{call.name} {path.decode()}" if path.startswith(BPFFS) else ""
        case _:
            return ""


def of_bpf(process: int, command: int, attributes: int) -> str:
    """Describe a bpf(2) command, with the sizes of key and value for commands about elements, which
    distinguish most maps."""
    name = LASTING.get(command, "")
    if not name or name == "BPF_OBJ_PIN":
        return name
    (descriptor,) = struct.unpack(
        "=I", read(process, attributes + (36 if name.endswith("BATCH") else 0), 4)
    )
    sizes = dict(
        line.split()
        for line in Path(f"/proc/{process}/fdinfo/{descriptor}").read_text().splitlines()
    )
    return f"{name} {sizes['key_size:']}:{sizes['value_size:']}"


def request(head: bytes, length: int) -> str:
    """Describe the netlink request at the start of a sent message, unless it only reads:
    rtnetlink's types have the order new, del, get, set. A netlink message begins with its length;
    other messages that are sent here (HTTP) begin with letters, which make far too large a number.
    """
    stated_length, kind, flags = struct.unpack("=IHH", head.ljust(8, b"\0"))
    if not HEAD <= stated_length <= length or not flags & NLM_F_REQUEST:
        return ""
    lasting = kind in (NFNL_MSG_BATCH_BEGIN, CONNTRACK_NEW, CONNTRACK_DELETE) or (
        RTM_BASE < kind < RTM_END and kind % 4 != 2
    )
    return f"netlink {kind:#x}" if lasting else ""


def read(process: int, address: int, length: int) -> bytes:
    descriptor = os.open(f"/proc/{process}/mem", os.O_RDONLY)
    try:
        return os.pread(descriptor, length, address)
    finally:
        os.close(descriptor)


def pointer(process: int, address: int) -> int:
    return int.from_bytes(read(process, address, 8), sys.byteorder)


def seize(process: int) -> None:
    for thread in map(int, os.listdir(f"/proc/{process}/task")):
        ptrace(SEIZE, thread, 0, OPTIONS)
        ptrace(INTERRUPT, thread)


def start(argv: list[str]) -> int:
    """Start the command in a child that waits until it is seized."""
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.execv(argv[0], argv)
    os.waitpid(child, os.WUNTRACED)
    seize(child)
    os.kill(child, signal.SIGCONT)
    return child


def follow(process: int, number: int, moment: str, report: TextIO) -> None:
    """Trace until the process ends by itself or is killed here."""
    count = 0
    # The thread that is in its last call.
    last_call_thread: int | None = None
    while True:
        try:
            thread, status = os.waitpid(-1, WALL)
        except ChildProcessError:
            return
        if not os.WIFSTOPPED(status):
            continue
        signum, event = os.WSTOPSIG(status), status >> 16
        passed = 0
        if signum == signal.SIGTRAP | 0x80:
            try:
                call = entered(thread)
                what = change(process, call) if call is not None else ""
            # Another process has killed it.
            except OSError:
                continue
            if what:
                count += 1
                print(count, what, file=report, flush=True)
            if thread == last_call_thread or (what and count == number and moment == "before"):
                os.kill(process, signal.SIGKILL)
                print("killed", file=report, flush=True)
                last_call_thread = None
            elif what and count == number:
                last_call_thread = thread
        elif not event:
            passed = signum
        try:
            ptrace(
                LISTEN if event == EVENT_STOP and signum in STOPPING else SYSCALL, thread, 0, passed
            )
        except ProcessLookupError:
            continue


def main() -> None:
    path, number, moment, *rest = sys.argv[1:]
    with Path(path).open("w") as report:
        if rest[0] == "--pid":
            process = int(rest[1])
            seize(process)
        else:
            process = start(rest)
        print("tracing", file=report, flush=True)
        follow(process, int(number), moment, report)


if __name__ == "__main__":
    main()
