"""The parts that the processes of all roles share."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.roles.process import run_until_signalled, tune_garbage_collector
from fairlead.state import State


@pytest.fixture
def collector() -> Iterator[None]:
    """Restore the settings of the garbage collector, which is global."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.mark.usefixtures("collector")
async def test_events_cause_no_full_garbage_collection() -> None:
    """At 10,000 Services a full collection would delay all other work for a tenth of a second,
    every few seconds while there are many events."""
    state = State(("services",))
    state.mark_synced("services")
    await tune_garbage_collector(state, state.has_synced)
    assert gc.isenabled()
    before, young = full_collections(), gc.get_stats()[1]["collections"]
    for version in range(5):
        for number in range(10_000):
            meta = ServiceMeta(
                name=f"s{number}", namespace="default", resource_version=str(version)
            )
            state.update_services(
                {ObjectKey("default", f"s{number}"): Service(meta, ServiceSpec())}
            )
    assert gc.get_stats()[1]["collections"] > young, "young objects are still collected"
    assert full_collections() == before


@pytest.mark.usefixtures("collector")
async def test_a_start_that_takes_too_long_enables_the_collector_again() -> None:
    state = State(("services",))
    task = asyncio.ensure_future(tune_garbage_collector(state, state.has_synced, within_s=0.01))
    await asyncio.sleep(0)
    assert not gc.isenabled()
    await asyncio.sleep(0.05)
    assert gc.isenabled()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def beside_another(*failures: FairleadError) -> None:
    """A role in which some tasks fail at once, while another would continue forever."""

    async def fail(failure: FairleadError) -> None:
        raise failure

    async with asyncio.TaskGroup() as group:
        for failure in failures:
            group.create_task(fail(failure))
        await asyncio.Event().wait()


def test_the_error_of_a_failed_task_is_raised_itself() -> None:
    refused, unavailable = Refused("no", fix="ask for less"), Unavailable("gone")
    with pytest.raises(Refused) as raised:
        run_until_signalled(beside_another(refused))
    assert raised.value is refused
    with pytest.raises(BaseExceptionGroup) as all_of_them:
        run_until_signalled(beside_another(refused, unavailable))
    assert all_of_them.value.exceptions == (refused, unavailable)
