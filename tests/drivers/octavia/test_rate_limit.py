"""A cloud gets at most as many calls per second as its configuration allows."""

import asyncio
import selectors
from collections.abc import Mapping

import pytest

from fairlead.drivers.octavia.cloud import Cloud
from fairlead.sections import OctaviaConfig


class _Selector(selectors.SelectSelector):
    """A selector by which time passes only while all tasks wait."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


async def turns_of(calls_per_s: float, at_s: Mapping[float, int]) -> list[float]:
    """Return the start of each call, for calls that are requested at these times."""
    cloud, clock = Cloud(OctaviaConfig(calls_per_s=calls_per_s)), asyncio.get_running_loop().time
    begun_s, turns_s = clock(), []

    async def call(asked_s: float) -> None:
        await asyncio.sleep(asked_s)
        await cloud._turn()
        turns_s.append(clock() - begun_s)

    await asyncio.gather(
        *(call(asked_s) for asked_s, number in at_s.items() for _ in range(number))
    )
    cloud.close()
    return sorted(turns_s)


@pytest.mark.parametrize("calls_per_s", [20.0, 7.5, 0.5])
def test_no_second_has_more_calls_than_configured(calls_per_s: float) -> None:
    """After a time without calls, calls start at once. No call waits longer than necessary."""
    number = int(calls_per_s * 10)
    with asyncio.Runner(loop_factory=Loop) as runner:
        turns_s = runner.run(turns_of(calls_per_s, {0.0: number, 60.5: number, 61.0: number}))
    assert len(turns_s) == 3 * number
    max_calls = max(int(calls_per_s), 1)
    second_s = max_calls / calls_per_s - 1e-6
    assert (
        max(sum(first <= each < first + second_s for each in turns_s) for first in turns_s)
        == max_calls
    )
    assert [each for each in turns_s if each < 60][-1] == pytest.approx(
        (number - 1) // max_calls * max_calls / calls_per_s
    )
    assert turns_s[number : number + max_calls] == pytest.approx([60.5] * max_calls)
