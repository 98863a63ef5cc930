"""Probes as a gateway's loop sees them: a driver, behind which a process of its own does the
asking.

In: LoadBalancers with a health monitor. Out: what `monitor` says, `observe` at each change of a
verdict, some steps of two event loops later. Asking a thousand nodes ten times a second takes a
good part of a core, and beside it nothing else of the gateway could be done at once; there, it
takes another core. Invariant: what is to be asked is known here, and so the other process is told
no more than the steps. Should it end by itself the gateway ends too, and starts again: the kernel
forwards meanwhile, and there is one way to begin."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.asking import Asked, Told
from fairlead.drivers.health_targets import (
    ProbeChange,
    Probes,
    StartProbes,
    StopProbes,
    after,
    diff,
    render,
)
from fairlead.drivers.monitor import Observe
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.frames import read, write

END_WITHIN_S = 2.0


class Prober(Component):
    """The driver. `run` has to run beside the loop: it owns the process."""

    name = "monitor"

    def __init__(
        self,
        observe: Observe,
        command: Sequence[str],
        prepare: Callable[[Collection[str]], Awaitable[None]] | None = None,
    ) -> None:
        """`command`: starts the process; see `roles/probing`. `prepare`: called with the addresses
        of nodes before they are asked, so that all probes, from the first one on, take the path of
        forwarded packets."""
        self._observe = observe
        self._prepare = prepare
        self._command = command
        self._wanted: dict[ServiceKey, Probes] = {}
        self._stream: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        """Set once the process has said something: a start counts how long nodes had for their
        answers from when it asks."""
        self._asked = 0
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def ports(self) -> int:
        """How many targets there are, counted for each Service."""
        return sum(len(probes.targets) for probes in self._wanted.values())

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Probes]:
        """See `health_targets.render`."""
        return render(intents)

    def diff(
        self, desired: Mapping[ServiceKey, Probes], actual: Mapping[ServiceKey, Probes]
    ) -> Sequence[ProbeChange]:
        """See `health_targets.diff`."""
        return diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Probes]:
        """What is being asked. Nobody else can change it."""
        return (
            dict(self._wanted)
            if keys is None
            else {key: self._wanted[key] for key in keys if key in self._wanted}
        )

    async def apply(self, changes: Sequence[ProbeChange]) -> Mapping[ServiceKey, Outcome]:
        """Start and stop. Raises Unavailable if there is nobody to tell."""
        await self._up.wait()
        if self._stream is None:
            raise Unavailable("the prober has ended")
        starts = tuple(each for each in changes if isinstance(each, StartProbes))
        stops = tuple(each for each in changes if isinstance(each, StopProbes))
        if self._prepare is not None:
            await self._prepare(
                {target.address for each in starts for target in each.targets if not target.routed}
            )
        self._asked += 1
        self._settled.clear()
        write(self._stream, Asked(starts, stops))
        for change in changes:
            self._note(change)
        await self._stream.drain()
        return {}

    async def settled(self) -> None:
        """Wait until something is known of every target; the caller sets the deadline."""
        await self._settled.wait()

    async def run(self) -> None:
        """Have the process run until cancelled. Raises Unavailable if it ends by itself."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(*self._command, stdin=theirs.fileno())
        reader, self._stream = await asyncio.open_connection(sock=ours)
        decoder = msgspec.msgpack.Decoder(Told)
        try:
            while (told := await read(reader, decoder)) is not None:
                self._up.set()
                for each in told.shown:
                    self._observe(each.address, each.port, each.verdict, each.services, each.routed)
                if told.settled and told.heard == self._asked:
                    self._settled.set()
        finally:
            self._stream.close()  # which it ends by
            self._stream = None
            await _ended(process)
        status = "" if process.returncode is None else f", with status {process.returncode}"
        raise Unavailable(f"the prober ended by itself{status}")

    def _note(self, change: ProbeChange) -> None:
        left = after(self._wanted.pop(change.service, None), change)
        if left.targets:
            self._wanted[change.service] = left


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
