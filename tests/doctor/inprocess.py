"""The command line in the process of the test, beside an API server in a thread. A process of its
own takes ten times as long.

In: the options of `fairlead doctor`. Out: its exit status, its output, and its errors."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from click.testing import CliRunner

from fairlead.cli.doctor import doctor

ResultT = TypeVar("ResultT")
DEADLINE_S = 60
SHORT = ("--grace", "0", "--observe", "0.1")


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self) -> "Background":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run the coroutine in the thread. Return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)


def run_doctor(*options: str, environment: Mapping[str, str] = os.environ) -> tuple[int, str, str]:
    """Run the command. Return its exit status, its output, and its errors."""
    with _own_signals():
        answer = CliRunner().invoke(doctor, [*SHORT, *options], env=dict(environment))
    assert answer.exception is None or isinstance(answer.exception, SystemExit)
    return answer.exit_code, answer.stdout, answer.stderr


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handlers of signals that a command replaces."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
