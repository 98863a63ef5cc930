"""Run a command that creates resources, so that it removes them whichever signal ends it."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

ResultT = TypeVar("ResultT")


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run the coroutine and return its result. SIGTERM (a time-out, a service manager) and SIGHUP
    (a closed terminal) act like Ctrl-C: the coroutine is cancelled and cleans up, and the command
    is aborted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise click.Abort from None
