"""Network namespaces: create, enter temporarily, configure, delete.

In: a name. Out: a namespace mounted at /run/netns/<name>, as ip-netns(8) does it, so that `ip
netns` shows it. Entering changes only the calling *thread* (setns(2)) and ends with the `with`
block, so a block must not await. A socket, a netlink connection or a process that is created inside
stays in the namespace; the rest of the lab relies on this. Follows namespaces(7), ip-netns(8), and
ip/ipnetns.c of iproute2 for the shared mount of /run/netns.
"""

import ctypes
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fairlead.errors import Conflict, Refused, Unavailable

DIRECTORY = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def path(name: str) -> Path:
    """Return the path at which the namespace is mounted."""
    return DIRECTORY / name


def names(prefix: str) -> tuple[str, ...]:
    """Return the names of the namespaces with this prefix, sorted."""
    with suppress(FileNotFoundError):
        return tuple(
            sorted(entry.name for entry in DIRECTORY.iterdir() if entry.name.startswith(prefix))
        )
    return ()


def create(name: str) -> None:
    """Create a namespace; its loopback is down. Raise Conflict when the name is taken."""
    _share_directory()
    try:
        path(name).touch(mode=0o444, exist_ok=False)
    except FileExistsError as error:
        raise Conflict(f"network namespace {name} exists already") from error
    try:
        with _original_namespace():
            _call("unshare", _CLONE_NEWNET)
            _call(
                "mount",
                b"/proc/thread-self/ns/net",
                os.fsencode(path(name)),
                b"none",
                _MS_BIND,
                None,
            )
    except BaseException:
        path(name).unlink()
        raise


def delete(name: str) -> None:
    """Remove the namespace's name. The kernel frees the namespace with its last process and socket.
    Do nothing when the name does not exist."""
    with suppress(OSError):
        _call("umount2", os.fsencode(path(name)), _MNT_DETACH)
    path(name).unlink(missing_ok=True)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Run the block in the namespace. The block must not await. Raise Conflict when the namespace
    does not exist."""
    try:
        target = os.open(path(name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Conflict(f"network namespace {name} does not exist") from error
    try:
        with _original_namespace():
            try:
                _call("setns", target, _CLONE_NEWNET)
            except OSError as error:
                raise Refused(
                    f"tried to enter network namespace {name}: {error.strerror}", fix="run as root"
                ) from error
            yield
    finally:
        os.close(target)


def enter(name: str) -> None:
    """Move the calling thread into the namespace permanently, for a process that is about to
    exec."""
    with path(name).open() as target:
        _call("setns", target.fileno(), _CLONE_NEWNET)


def identity(name: str) -> tuple[int, int]:
    """Return (device, inode): the target of /proc/<pid>/ns/net of each process in this
    namespace."""
    status = path(name).stat()
    return status.st_dev, status.st_ino


def make_socket(
    name: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
) -> socket.socket:
    """Return a socket of this process that sends and receives in the namespace."""
    with inside(name):
        return socket.socket(family, kind, protocol)


def set_sysctls(name: str, values: Mapping[str, object]) -> None:
    """Write sysctls of the namespace, keyed as in "net/ipv4/ip_forward". Raise Unavailable, naming
    the first one that fails."""
    with inside(name):
        for key, value in values.items():
            text = str(value)
            try:
                Path("/proc/sys", key).write_text(text, encoding="ascii")
            except OSError as error:
                raise Unavailable(
                    f"tried to set sysctl {key} to {text} in namespace {name}: {error.strerror}"
                ) from error


@contextmanager
def _original_namespace() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


def _share_directory() -> None:
    """Make /run/netns a shared mount, as ip-netns does before its first use.

    Without it, the next `ip netns add` would bind the directory over itself and hide our mounts
    below, where nothing can unmount them. The lock is the one that iproute2 takes; it serializes
    processes that do this at the same time.
    """
    DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        target = os.fsencode(DIRECTORY)
        try:
            _call("mount", b"", target, b"none", _MS_SHARED | _MS_REC, None)
        except OSError:  # EINVAL: it is not a mount point yet
            _call("mount", target, target, b"none", _MS_BIND | _MS_REC, None)
            _call("mount", b"", target, b"none", _MS_SHARED | _MS_REC, None)
    finally:
        os.close(directory)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
