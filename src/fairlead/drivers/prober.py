"""The driver of probes in a gateway's loop. A separate process sends the probes.

In: LoadBalancers with a health monitor. Out: `observe` is called at each change of a verdict, with
what `monitor` reports in the process, a few event-loop steps later. To probe a thousand nodes ten
times a second takes a large part of a CPU core, and would hold up everything else in the gateway's
event loop; in its own process it takes another core.

Invariant: the driver knows all targets, so it sends only the changes to the process. If the process
ends by itself, the gateway ends too and is restarted, so that there is only one way to start. The
kernel forwards packets meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.child import child
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
from fairlead.drivers.probe_protocol import ProbeReport, ProbeRequest
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.frames import read, write


class Prober(Component):
    """Driver of probes. `run` owns the process and must run beside the loop."""

    name = "monitor"

    def __init__(
        self,
        observe: Observe,
        command: Sequence[str],
        prepare: Callable[[Collection[str]], Awaitable[None]] | None = None,
    ) -> None:
        """`command` starts the process, see `roles/prober_process`. `prepare` is called with the
        addresses of nodes before they are probed, so that all probes, including the first, take the
        path of forwarded packets."""
        self._observe = observe
        self._prepare = prepare
        self._command = command
        self._wanted: dict[ServiceKey, Probes] = {}
        self._stream: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        """Set when the first message of the process arrives. `apply` waits for it: a gateway that
        starts measures the time that nodes had to answer from its first request, so the process
        must run by then."""
        self._requests = 0
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def ports(self) -> int:
        """The number of targets, where a target of several Services counts once for each."""
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
        """Return the targets that are being probed. Only this driver changes them."""
        return (
            dict(self._wanted)
            if keys is None
            else {key: self._wanted[key] for key in keys if key in self._wanted}
        )

    async def apply(self, changes: Sequence[ProbeChange]) -> Mapping[ServiceKey, Outcome]:
        """Send the changes to the process. Raise Unavailable if the process has ended."""
        await self._up.wait()
        if self._stream is None:
            raise Unavailable("the prober has ended")
        starts = tuple(each for each in changes if isinstance(each, StartProbes))
        stops = tuple(each for each in changes if isinstance(each, StopProbes))
        if self._prepare is not None:
            await self._prepare(
                {target.address for each in starts for target in each.targets if not target.routed}
            )
        self._requests += 1
        self._settled.clear()
        write(self._stream, ProbeRequest(starts, stops))
        for change in changes:
            self._note(change)
        await self._stream.drain()
        return {}

    async def settled(self) -> None:
        """Wait until every target has a verdict. The caller sets the deadline."""
        await self._settled.wait()

    async def run(self) -> None:
        """Run the process until cancelled. Raise Unavailable if the process ends by itself."""
        decoder = msgspec.msgpack.Decoder(ProbeReport)
        async with child(self._command) as running:
            self._stream = running.writer
            try:
                while (report := await read(running.reader, decoder)) is not None:
                    self._up.set()
                    for each in report.changes:
                        self._observe(
                            each.address, each.port, each.verdict, each.services, each.routed
                        )
                    if report.settled and report.requests == self._requests:
                        self._settled.set()
            finally:
                self._stream = None
        raise Unavailable(f"the prober ended by itself{running.status}")

    def _note(self, change: ProbeChange) -> None:
        left = after(self._wanted.pop(change.service, None), change)
        if left.targets:
            self._wanted[change.service] = left
