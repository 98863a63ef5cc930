"""For how long a row is waited for, and when it needs a further step."""

import asyncio
import math
import time

from tests.drivers.ovn.rows import NOW_S

from fairlead.drivers.ovn.deadlines import Deadlines
from fairlead.drivers.ovn.flows import PATIENCE_S, SHORT_PATIENCE_S, Flows
from fairlead.drivers.ovn.marks import due_of

TIMEOUT_S = 60.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_row_is_settled_once_every_chassis_has_reached_its_number() -> None:
    flows = Flows(Clock())
    flows.written(["row"], 7)
    assert flows.follow(7, 6) == ()
    assert not flows.installed("row")
    assert flows.follow(7, 7) == ("row",)
    assert flows.installed("row")
    flows.written(["row"], 7)
    assert flows.installed("row")


def test_there_is_no_limit_to_the_time_for_northd() -> None:
    clock = Clock()
    flows = Flows(clock)
    flows.written(["row"], 7)
    flows.follow(6, 6)
    clock.now_s += 100 * PATIENCE_S
    assert flows.left_s("row") == PATIENCE_S
    assert not flows.is_processed("row")
    flows.follow(7, 6)
    assert flows.is_processed("row")
    assert flows.left_s("row") == PATIENCE_S
    clock.now_s += PATIENCE_S
    assert flows.left_s("row") == 0


def test_after_one_row_the_patience_is_short_until_the_chassis_move() -> None:
    clock = Clock()
    flows = Flows(clock)
    flows.written(["first", "second"], 7)
    flows.follow(7, 6)
    assert flows.is_patient
    clock.now_s += PATIENCE_S
    assert flows.give_up("first") == 7
    assert flows.installed("first")
    assert flows.left_s("second") == 0
    flows.written(["third"], 8)
    flows.follow(8, 6)
    assert not flows.is_patient
    assert flows.left_s("third") == SHORT_PATIENCE_S
    flows.follow(8, 7)
    assert flows.is_patient
    assert flows.left_s("third") == PATIENCE_S


def test_a_row_that_was_deleted_is_not_waited_for() -> None:
    flows = Flows(Clock())
    flows.written(["row"], 7)
    flows.forget("row")
    assert flows.follow(7, 7) == ()


def test_a_row_that_is_going_to_be_deleted_needs_no_step_before() -> None:
    drains = {"fairlead.io/drains": "a:1=5,b:1=7"}
    assert due_of(drains) == 5
    assert due_of({**drains, "fairlead.io/removed": "7"}) == 7
    assert due_of({}) is None


async def test_the_time_of_a_row_is_reported_once_and_not_after_it_was_taken_back() -> None:
    found = asyncio.Queue[set[str]]()
    clock = Clock()
    clock.now_s = NOW_S
    deadlines = Deadlines(clock, lambda rows: found.put_nowait({*rows}))
    running = asyncio.create_task(deadlines.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            deadlines.note("kept", math.ceil(NOW_S) - 2)
            deadlines.note("changed", math.ceil(NOW_S) + 2)
            assert await found.get() == {"kept"}
            deadlines.note("changed", None)
            clock.now_s += 10
            deadlines.note("later", math.ceil(NOW_S) + 3)
            assert await found.get() == {"later"}
            assert found.empty()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_time_in_the_future_is_waited_for() -> None:
    found = asyncio.Queue[float]()
    deadlines = Deadlines(time.time, lambda _: found.put_nowait(time.time()))
    running = asyncio.create_task(deadlines.run())
    due = math.ceil(time.time())
    try:
        await asyncio.sleep(0)  # it waits already
        deadlines.note("row", due)
        async with asyncio.timeout(TIMEOUT_S):
            assert await found.get() >= due
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
