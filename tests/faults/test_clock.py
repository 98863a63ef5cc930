"""The wall clock jumps under a running controller: the controller remains the leader, does not
wait, and makes no more requests than before.

libfaketime gives one process another time of day, which a file changes while the process runs. The
monotonic clock is unchanged, as when the time is set with clock_settime(2)."""

import asyncio
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.faults.test_api_faults import requests_made, service, until_served
from tests.faults.trial import Trial, trial

from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import SERVICES, ObjectKey

LIBRARY = Path(f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1")
LEASE = ObjectKey("kube-system", "fairlead-controller")
JUMPS = (timedelta(days=10), timedelta(days=-400), timedelta())
LEASE_S = 6
"""Longer than a busy machine lets a process wait, so that a lost Lease has one cause only: a jump,
which is longer by far."""
WHILE_S = 4.5
"""The length of the jumps. The Lease is renewed more than twice in this time."""
MOST = 20
"""The maximum number of requests for one new Service in this time; a list must not be repeated."""


class Clock:
    """The time of day of a process, with an offset."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.jump(timedelta())

    def jump(self, off: timedelta) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(f"{off.total_seconds():+.0f}\n")
        # The process reads the file at every reading of the clock, so the file must never be
        # incomplete.
        draft.replace(self._path)

    @property
    def command(self) -> list[str]:
        settings = {
            "LD_PRELOAD": LIBRARY,
            "FAKETIME_TIMESTAMP_FILE": self._path,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items())]


async def renewed(one: Trial) -> tuple[str, datetime]:
    """Return the leader, and its last renewal by its own time of day."""
    spec = (await one.client.get(LEASES, LEASE)).spec
    return spec.holder_identity or "", datetime.fromisoformat(str(spec.renew_time))


@pytest.mark.soak
async def test_a_jump_of_the_wall_clock_does_not_affect_a_controller(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    async with trial(tmp_path / "trial", controller={"leaseDurationS": LEASE_S}) as one:
        one.start(under=clock.command)
        await one.leading()
        await one.make_endpoints("a", "b")
        leader, _ = await renewed(one)
        for off in JUMPS:
            clock.jump(off)
            one.forwarder.requests.clear()
            await one.client.create(SERVICES, service("a", 80), namespace="default")
            await until_served(one, f"a Service made when it is off by {off}", a=(80,))
            await asyncio.sleep(WHILE_S)

            async def has_jumped(off: timedelta = off) -> bool:
                _, by_its_clock = await renewed(one)
                return abs(by_its_clock - datetime.now(UTC) - off) < timedelta(hours=1)

            # Otherwise the test would show nothing.
            await one.until(has_jumped, f"the renewal of the Lease when it is off by {off}")
            now_leading, _ = await renewed(one)
            assert now_leading == leader
            assert len(requests_made(one)) <= MOST, requests_made(one)
            await one.client.delete(SERVICES, ObjectKey("default", "a"))
            await until_served(one, f"deleted when it is off by {off}")
        assert one.log.read_text().count('"event": "leading"') == 1, one.log.read_text()
