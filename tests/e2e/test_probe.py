"""`fairlead probe` on a lab's client: no false gap while nothing happens, one gap when a node with
pods dies, and its broken connections."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from datetime import datetime

import pytest
from tests.e2e.load import CLIENT, Web

from fairlead.lab import namespace
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.soak]

QUIET_S = 60.0
HELD = 30


def start(site: Site, *arguments: str) -> subprocess.Popen[str]:
    """Start the probe on the client."""
    with namespace.inside(site.namespace(CLIENT)):
        return subprocess.Popen(
            [sys.executable, "-m", "fairlead", "probe", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )


async def test_a_dead_node_is_one_gap_and_silence_before_it_is_none() -> None:
    async with Site.create(f"probe{os.getpid()}", nodes=3, gateways=1, clients=1) as site:
        web = Web(site)
        await web.create()
        await web.place(("node1", "node2", "node2"))
        pods = set(await web.pods())
        target = f"{web.address}:80"
        options = [f"--held={HELD}", "--interval=0.05", "--timeout=1", "-o", "json"]
        child = start(site, target, *options)
        try:
            await asyncio.sleep(QUIET_S)
            await site.kill_node("node2")
            await asyncio.sleep(15)
        finally:
            child.send_signal(signal.SIGINT)
            output, _ = await asyncio.to_thread(child.communicate, timeout=60)
    lines = [json.loads(line) for line in output.splitlines()]
    gaps = [each for each in lines if each.get("event") == "gap-ended"]
    print(json.dumps({"gaps": gaps, "report": lines[-1]}, indent=1))
    report = lines[-1]
    assert report["answered"] > QUIET_S / 0.05 * 0.9
    assert report["gap_count"] == len(gaps)
    assert set(report["clients"]) == set(report["own_addresses"])
    assert set(report["pods"]) == pods
    # Half of the open connections or more were those of the dead node.
    assert 0 < sum(report["broken"].values()) < HELD
    first = min(report["gaps"], key=lambda gap: gap["begun"])
    last = max(report["gaps"], key=lambda gap: gap["begun"])
    assert _seconds(last["begun"]) - _seconds(first["begun"]) < 2, report["gaps"]
    assert report["longest_gap_s"] < 2


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
