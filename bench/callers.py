"""All callers of one address on a client of a lab, as seen by `bench.announce`.

In: a lab and an address that answers. Out: an `Effect` for each event. There are the steady callers
of `bench/caller.py`, and connections that stay open, with a request each second (`probe.crowd`). An
open connection is broken if it is reset, closed without an announcement, answered by another pod,
or silent for `SILENCE_S`.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Self

import msgspec
from bench.announced import Effect
from bench.caller import CALL_PORT, Called

from fairlead.errors import Unavailable
from fairlead.lab import process
from fairlead.lab.piped import Piped
from fairlead.lab.site import Site
from fairlead.probe.crowd import Count

CLIENT = "client1"
INTERVAL_S, SILENCE_S = 1.0, 3.0
PRIORITY = -15
CHECK_S = 0.3
CALM_MS = 200
"""Callers with shorter gaps are undisturbed, also on a busy machine."""
SETTLED_WITHIN_S = 60.0
CALLER = Path(__file__).with_name("caller.py")
RARELY = "0.001"


class Callers:
    """The callers of one address. Use as an asynchronous context manager; inside, all connections
    are open and the address answers."""

    def __init__(
        self, site: Site, address: str, *, open_connections: int, flows: int, calls_per_s: float
    ) -> None:
        self._site = site
        self._open = open_connections
        self._target = f"tcp {address} {CALL_PORT}"
        caller = [str(CALLER), address, "--flows", str(flows), "--calls", str(calls_per_s)]
        crowd = ["-m", "fairlead.probe", "crowd", "--new", RARELY, "--patience", str(SILENCE_S)]
        crowd += ["--interval", str(INTERVAL_S), "--silence", str(SILENCE_S)]
        crowd += ["--flows", *self._target.split(), str(open_connections)]
        self._taken_s = 0.0
        self._argvs = [[sys.executable, *caller], [sys.executable, *crowd]]

    async def __aenter__(self) -> Self:
        self._pipes = [Piped(self._site, CLIENT, argv) for argv in self._argvs]
        prioritize(self._site)
        self._taken_s = time.monotonic()
        try:
            if await self.settled():
                return self
            raise Unavailable(
                f"{self._target} of lab {self._site.name} did not answer all callers within "
                f"{SETTLED_WITHIN_S:.0f} s; last result: {await self.take()}"
            )
        except BaseException:
            self._kill()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._kill()

    async def take(self) -> Effect:
        """Return the effect since the last call."""
        called, crowd = await asyncio.gather(*(each.ask("") for each in self._pipes))
        now_s = time.monotonic()
        count = msgspec.json.decode(crowd, type=dict[str, Count])[self._target]
        nodes: dict[str, int] = {}
        for pod, why in count.broken.items():
            node = pod.rpartition("-")[2]  # see `announcers.pod`
            nodes[node] = nodes.get(node, 0) + sum(why.values())
        seconds, self._taken_s = now_s - self._taken_s, now_s
        return Effect(msgspec.json.decode(called, type=Called), count.open, nodes, seconds)

    async def settled(self, *, within_s: float = SETTLED_WITHIN_S) -> bool:
        """Wait until no call fails and all connections are open. Return whether that happened in
        time. In either case, the next period begins."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            await asyncio.sleep(CHECK_S)
            effect = await self.take()
            called = effect.called
            if (
                effect.open == self._open
                and called.calls
                and not called.failed
                and called.longest_gap_ms < CALM_MS
            ):
                return True
        return False

    def _kill(self) -> None:
        for each in self._pipes:
            each.kill()


def prioritize(site: Site) -> None:
    """Give all processes of the lab the same high priority. Hosts, pods and clients would be
    machines of their own, so other work of this machine must not delay them."""
    for each in process.find(site.name):
        if each.leads:
            process.set_nice(each.pid, PRIORITY)
