"""A role of a lab under `tracer`: the calls by which it changes the kernel, and its end at one of
them.

In: a lab, a host with a role. Out: the calls of a run without kills; kills; and the resulting state
of the kernel, as a value that is equal for all runs with the same result: without handles, ids or
counters."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.e2e.load import output, until

from fairlead.lab import process
from fairlead.lab.process import Process
from fairlead.lab.site import ROLES, Site
from fairlead.net.bpf import Map

TRACER = Path(__file__).with_name("tracer.py")
QUIET_S = 0.5
DEADLINE_S = 60.0
COUNTED = (
    "listeners",
    "owners",
    "addresses",
    "ranges",
    "retained_nodes",
    "next_hops",
    "node_names",
)
"""The maps of a gateway whose entries are not compared: flow entries depend on packets."""
BLACKHOLES = "7471100"
"""The routing table of a gateway's blackhole routes, of each family."""
FAMILIES = ("-4", "-6")


class Traced:
    """The role of one host."""

    def __init__(self, site: Site, host: str) -> None:
        self.site = site
        self.host = host
        self.role = ROLES[site.topology.host(host).kind]
        self._label = f"{host}/{self.role}"
        running = process.one(site.name, self._label)
        self._command = [
            os.fsdecode(word)
            for word in Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        ]
        self._report = site.directory.path / f"calls-{host}"
        self._tracer: Process | None = None

    @property
    def calls(self) -> list[str]:
        """Return the changes since the tracer began."""
        return [line.partition(" ")[2] for line in self._lines() if line[0].isdigit()]

    @property
    def killed(self) -> bool:
        return self._lines()[-1:] == ["killed"]

    async def start(self, number: int = 0, moment: str = "before") -> None:
        """Start the role under a tracer, which kills it at its `number`th call; 0: never."""
        await self._trace(number, moment, *self._command)

    async def follow(self, number: int = 0, moment: str = "before") -> None:
        """Attach a tracer to the running role."""
        running = process.one(self.site.name, self._label)
        await self._trace(number, moment, "--pid", str(running.pid))

    async def restart_after_kill(self) -> str:
        """Wait until the role has been killed at its call, restart it without a tracer, and return
        that call."""
        assert self._tracer is not None
        await self._tracer.wait()
        assert self.killed, (
            f"{self.host} ended by itself: "
            f"{self.site.directory.log(self._label).read_text()[-2000:]}"
        )
        await self.site.start_role(self.host)
        return self.calls[-1]

    async def quiet(self) -> list[str]:
        """Wait until the role makes no more changes. Return the changes."""
        before: list[str] | None = None
        while self.calls != before:
            before = self.calls
            await asyncio.sleep(QUIET_S)
        return before

    async def release(self) -> None:
        """Stop the role, and with it the tracer."""
        for each in process.find(self.site.name, self._label):
            await each.kill()
        if self._tracer is not None:
            await self._tracer.kill()

    async def clean(self) -> None:
        """Delete everything that the role has left in the kernel. The role must not run."""
        if self.role == "gateway":
            self.site.directory.remove_pins(self.host)
            await output(self.site, self.host, "tc", "qdisc", "del", "dev", "eth0", "clsact")
            gone = "; ".join(
                f"ip {family} {what} table {BLACKHOLES}"
                for family in FAMILIES
                for what in ("route flush", "rule del")
            )
            await output(self.site, self.host, "sh", "-c", f"({gone}) 2>/dev/null; true")
        else:
            await output(self.site, self.host, "nft", "delete", "table", "inet", "fairlead")

    async def left(self) -> Any:
        """Return the state of the kernel."""
        if self.role == "node":
            printed = await output(
                self.site, self.host, "nft", "--stateless", "list", "table", "inet", "fairlead"
            )
            return sorted(part.strip() for part in re.split(r"[,\n{}]", printed))
        pins = self.site.directory.pins(self.host)
        (layout,) = pins.iterdir()
        filters = json.loads(
            await output(
                self.site, self.host, "tc", "-j", "filter", "show", "dev", "eth0", "ingress"
            )
        )
        attached = [
            (each["pref"], each["kind"], each.get("options", {}).get("bpf_name"))
            for each in filters
        ]
        shown = "; ".join(
            f"ip {family} {what} show table {BLACKHOLES}"
            for family in FAMILIES
            for what in ("route", "rule")
        )
        routes = await output(self.site, self.host, "sh", "-c", f"({shown}) 2>/dev/null; true")
        pinned = sorted(pin.name for pin in layout.iterdir())
        entries = _entries(layout)
        if entries["listeners"]:
            # A listener has retained nodes if its nodes were confirmed one by one, and none if they
            # were confirmed at the same time, which depends on timing.
            del entries["retained_nodes"]
        return {"pins": pinned, "filters": attached, "entries": entries, "routes": routes}

    async def _trace(self, number: int, moment: str, *what: str) -> None:
        self._report.unlink(missing_ok=True)
        argv = [sys.executable, str(TRACER), str(self._report), str(number), moment, *what]
        # A command that the tracer starts has the tracer's label, by which the lab recognizes the
        # role.
        label = f"{self.host}/tracer" if what[0] == "--pid" else self._label
        self._tracer = self.site.spawn(self.host, argv, label=label)

        async def begun() -> bool:
            return "tracing" in self._lines()

        await until(begun, f"the start of the tracer of {self.host}")

    def _lines(self) -> list[str]:
        return self._report.read_text().splitlines() if self._report.exists() else []


def _entries(layout: Path) -> dict[str, int]:
    """Return the number of entries of each map; for an array, of entries that are not all zeros."""
    counts = {}
    for name in COUNTED:
        opened = Map.open(layout / name)
        try:
            counts[name] = sum(any(value) for _, value in opened.items())
        finally:
            opened.close()
    return counts
