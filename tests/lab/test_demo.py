"""The demo as a user runs it: its JSON has the documented form, Fairlead meets its promises, and
the other load balancers show their problems."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.lab import namespace

pytestmark = pytest.mark.long

FAIRLEAD = Path(sys.executable).with_name("fairlead")
NAME = f"demo{os.getpid()}"
CALLERS = 5
WATCHED = ("--watch", "9")
"""The duration of each phase in seconds, shorter than the default. Persistent failures show within
this time, and the effect on Fairlead's clients is over. Only the monitor, which needs up to 15 s,
would look better in a longer run."""


def test_the_demo_shows_what_it_promises_with_real_packets() -> None:
    try:
        done = subprocess.run(
            [FAIRLEAD, "demo", "--name", NAME, *WATCHED, "-o", "json"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    # An interrupt, which ends the demo, too, or a timeout.
    except BaseException:
        subprocess.run([FAIRLEAD, "lab", "down", "--name", NAME], timeout=60, check=False)
        raise
    assert done.returncode == 0, done.stderr
    setups = {setup["setup"]: setup for setup in json.loads(done.stdout)["setups"]}
    assert list(setups) == ["cluster", "local-blind", "local-monitored", "fairlead"]
    for setup in setups.values():
        assert set(setup) == {
            "setup",
            "requests",
            "answered",
            "client_address_kept",
            "busiest_pod_over_fair",
            "pod_moved",
            "node_killed",
        }
        for event in ("pod_moved", "node_killed"):
            assert set(setup[event]) == {"failed", "broken", "longest_gap_ms"}
    print(done.stdout)
    ours = setups["fairlead"]
    assert ours["requests"] == ours["answered"] == 20_000
    assert ours["client_address_kept"]
    assert ours["busiest_pod_over_fair"] <= 1.05
    assert (
        ours["pod_moved"]["failed"]
        == ours["pod_moved"]["broken"]
        == ours["node_killed"]["broken"]
        == 0
    )
    # A client retries after 0.4 s. Fairlead removes the node before the third attempt of any
    # client; the other load balancers never remove it.
    assert ours["node_killed"]["failed"] <= 2 * CALLERS
    assert not setups["cluster"]["client_address_kept"]
    assert setups["local-blind"]["answered"] < 0.85 * setups["local-blind"]["requests"]
    assert setups["local-monitored"]["busiest_pod_over_fair"] > 1.3
    for other in ("cluster", "local-blind", "local-monitored"):
        assert setups[other]["node_killed"]["failed"] > 2 * CALLERS
    assert namespace.names(f"fl-{NAME}-") == ()
