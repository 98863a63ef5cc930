"""The bpf file system, in which eBPF objects outlive processes.

In: a path. Out: a directory on a bpffs, which is mounted if necessary. Pins are removed with their
directory; a pinned object is freed when nothing else references it. Follows
Documentation/bpf/bpf_iterators and the man page bpf(2), BPF_OBJ_PIN."""

import ctypes
import fcntl
import os
from pathlib import Path

from fairlead.errors import Refused, Unavailable

ROOT = Path("/sys/fs/bpf")
_MAGIC = 0xCAFE4A11


def _is_bpffs(path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(256)
    if libc.statfs(os.fsencode(path), answer) != 0:
        return False
    return int.from_bytes(answer.raw[:8], "little") & 0xFFFFFFFF == _MAGIC


def _nearest(path: Path) -> Path:
    return path if path.exists() else _nearest(path.parent)


def _mount(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700") != 0:
        reason = os.strerror(ctypes.get_errno())
        raise Refused(
            f"mounting a bpffs at {path}: {reason}",
            fix=f"mount it on the host (mount -t bpf bpf {path}), or give the container the "
            f"host's {ROOT}",
        )


def prepare(path: Path) -> None:
    """Create the directory `path` on a bpffs.

    If `path` is below /sys/fs/bpf and no bpffs is mounted there, mount one. Raise Refused if that
    is not permitted, or if `path` is on another file system."""
    path = path.absolute()
    if not _is_bpffs(_nearest(path)):
        if ROOT not in (path, *path.parents):
            raise Refused(
                f"{path} is not on a bpffs",
                fix=f"choose a path below {ROOT}, or mount -t bpf bpf {path.parent}",
            )
        _mount(ROOT)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"creating the directory {path}: {error.strerror}") from error


def lock(pin_path: Path) -> int:
    """Lock the pin path for this process, and return the descriptor that holds the lock until it is
    closed. Create the directory and mount the bpffs if they do not exist. Raise Refused if another
    process holds the lock."""
    prepare(pin_path)
    descriptor = os.open(pin_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Refused(
            f"another process uses the pins in {pin_path}",
            fix="stop it first, or use another pin path",
        ) from error
    return descriptor


def remove(path: Path) -> None:
    """Remove the pins in `path` and below, and `path` itself. Do nothing if `path` does not
    exist."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for child in path.iterdir():
        remove(child)
    path.rmdir()
