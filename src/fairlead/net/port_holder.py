"""Find the process that listens on a TCP port of this network namespace.

In: a port number. Out: the name and the id of the process, as far as this process may see them: a
process of another container is not visible. Follows proc(5)."""

import os
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def holder_of(port: int) -> str:
    """Return `NAME (process ID)` of the process that listens on the port; `another process` if it
    is not visible; empty if no process listens."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _has_any(entry, inodes):
            with suppress(OSError):
                return f"{(entry / 'comm').read_text().strip()} (process {entry.name})"
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on the port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def _has_any(process: Path, inodes: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    return True
    return False
