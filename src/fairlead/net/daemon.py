"""Programs that run as daemons and outlive this process: call them, wait for their end, reap them.

In: the path of a program, or a process id. Out: an exit status with the errors that the program
printed, or the end of a process that is not a child of this one. Follows pidfd_open(2)."""

import asyncio
import os
import shutil
from contextlib import suppress

SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""The folders that are searched for a program, as in PATH: daemons are often in the last two."""


def find(program: str, search: str = SEARCH) -> str | None:
    """Return the path of the program; None if it is not installed."""
    return shutil.which(program, path=search)


async def call(program: str, *options: str, search: str = SEARCH) -> tuple[int, str]:
    """Run the program until it exits, or continues as a daemon. Return its exit status and what it
    wrote to standard error. The daemon inherits only `search` as its PATH, because it outlives this
    process."""
    process = await asyncio.create_subprocess_exec(
        program,
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": search},
        start_new_session=True,
    )
    _, output = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")


async def exited(pid: int) -> None:
    """Wait until the process ends, and reap it if it is our child: the first process of a container
    inherits orphans. Return at once if the process does not exist."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    reap(pid)


def reap(pid: int) -> None:
    """Reap the process if it is an ended child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
