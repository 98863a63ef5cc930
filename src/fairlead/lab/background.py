"""A process of a lab that works with its API server until SIGTERM.

In: the name of the lab, and how to create the work. Out: the work has run until the signal."""

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

import structlog

from fairlead.kube.client import Client
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.topology import Topology

log = structlog.get_logger()


class Work(Protocol):
    """What a process does until it is cancelled."""

    async def run(self) -> None: ...


async def run_until_sigterm(
    lab: str, name: str, create: Callable[[Client, Topology, RunDirectory], Work]
) -> None:
    """Create and run the work. `name`: the name of the work in the log."""
    directory = RunDirectory(lab)
    async with Client(directory.access()) as client:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await create(client, directory.topology(), directory).run()
        except asyncio.CancelledError:
            log.info(f"{name} stopped")
