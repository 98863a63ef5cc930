"""Amphorae and hypervisors that can fail or be slow: upstream's no-op drivers, which a test
controls at each step.

In: files in Octavia's directory, which are read at each step. `fail-STEP`: the driver raises;
`hold-STEP`: it waits until the file is deleted; `slow-STEP`: it takes as many seconds as the file
says. Steps: `boot` (a machine is requested; after a failure a new load balancer ends in ERROR) and
`configure` (an amphora gets its configuration; after a failure the changed object ends in ERROR
while its load balancer is ACTIVE). Everything that follows a failure is Octavia's own behaviour."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 0.01


def install_faults(directory: Path) -> None:
    from octavia.amphorae.drivers.noop_driver import driver as amphora
    from octavia.compute.drivers.noop_driver import driver as compute

    for manager, method, step in (
        (compute.NoopManager, "build", "boot"),
        (amphora.NoopManager, "update", "configure"),
        (amphora.NoopManager, "delete", "configure"),
    ):
        setattr(manager, method, _with_faults(getattr(manager, method), directory, step))


def _with_faults(function: Callable[..., Any], directory: Path, step: str) -> Callable[..., Any]:
    hold, fail, slow = (directory / f"{fault}-{step}" for fault in ("hold", "fail", "slow"))

    def with_faults(*arguments: Any, **named: Any) -> Any:
        while hold.exists():
            time.sleep(POLL_S)
        with suppress(FileNotFoundError):
            time.sleep(float(slow.read_text()))
        if fail.exists():
            raise RuntimeError(f"the test makes step {step} fail")
        return function(*arguments, **named)

    return with_faults
