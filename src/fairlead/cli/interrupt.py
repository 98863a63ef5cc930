"""Run a command that makes things, so that however it is asked to end, it takes away what it has
made."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

ResultT = TypeVar("ResultT")


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run to the end. SIGTERM (a time-out, a service manager) and SIGHUP (a closed terminal) count
    as Ctrl-C: the work is cancelled, its clean-up runs, the command is aborted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise click.Abort from None
