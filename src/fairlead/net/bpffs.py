"""The file system in which maps outlive processes.

In: a path. Out: a directory there, on a bpffs that is mounted if need be. Pins are removed with the
directory they are in; what they pinned goes once nothing else holds it. Follows
Documentation/bpf/bpf_iterators and the man page bpf(2), BPF_OBJ_PIN."""

import ctypes
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
            fix=f"mount it from outside (mount -t bpf bpf {path}), or give the container the "
            f"host's {ROOT}",
        )


def prepare(path: Path) -> None:
    """Make the directory `path` on a bpffs, mounting one at /sys/fs/bpf if `path` is below it and
    none is there.

    Raises Refused where that is not permitted, or where `path` lies on another file system.
    """
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
        raise Unavailable(f"making the directory {path}: {error.strerror}") from error


def remove(path: Path) -> None:
    """Remove the pins in `path` and below, and `path` itself. Nothing there: nothing is done."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for child in path.iterdir():
        remove(child)
    path.rmdir()
