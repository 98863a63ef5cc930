"""A process on a lab's host that answers each line on its standard input with a line on its
standard output."""

import asyncio
import subprocess
from collections.abc import Sequence

from fairlead.errors import Unavailable, plain
from fairlead.lab import namespace
from fairlead.lab.process import SUPPORT_NICE, environment, set_nice
from fairlead.lab.site import Site


class Piped:
    """A process that is controlled through pipes. Its standard error goes to the lab's logs."""

    def __init__(self, site: Site, host: str, argv: Sequence[str]) -> None:
        self._name = f"{host}: {' '.join(argv)}"
        with (
            site.directory.log(f"{host}/piped").open("ab") as log,
            namespace.inside(site.namespace(host)),
        ):
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(site.name, f"{host}/piped"),
                start_new_session=True,
            )
        set_nice(self._child.pid, SUPPORT_NICE)

    async def ask(self, line: str, *, timeout_s: float = 10) -> bytes:
        """Send a line and return the line that answers it. Raise Unavailable if the process has
        ended or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(self._exchange, line)
        except (TimeoutError, OSError) as error:
            raise Unavailable(f"{self._name} did not answer: {plain(error)}") from error

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._child.kill()
        self._child.wait()

    def _exchange(self, line: str) -> bytes:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(line.encode() + b"\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise OSError("the process has ended")
        return answer
