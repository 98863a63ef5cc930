"""The parts that the processes of all roles share."""

import asyncio
import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.roles.process import run_until_signalled, tune_garbage_collector
from fairlead.state import State

DEADLINE_S = 60


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


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


@pytest.mark.usefixtures("collector")
async def test_memory_that_a_start_has_freed_is_returned_to_the_kernel() -> None:
    state = State(("services",))
    state.mark_synced("services")
    blocks = [b"x" * size for size in [2000] * 20_000]
    del blocks[:-1]  # The last one keeps the end of the heap in use.
    before_mib = resident_mib()
    await tune_garbage_collector(state, state.has_synced)
    assert resident_mib() < before_mib - 20


NAMES = """
import asyncio, socket, sys
from fairlead.config import Config
from fairlead.kube.access import Access
from fairlead.roles.process import KnownHosts
from fairlead.state import State

async def main():
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 53))
    state = State(())
    hosts = KnownHosts(state, Config(), Access("https://192.0.2.7:1", proxy="http://api.test:1"))
    for step in hosts.resolve, hosts.run:
        await step()
        found = [last for last in (7, 8) if state.exclusions.host_at(f"192.0.2.{last}")]
        print(found, file=sys.stderr, flush=True)

asyncio.run(main())
"""
"""Prints which addresses are known after the start, and when all names are resolved."""


@pytest.mark.root
def test_a_start_does_not_wait_for_a_silent_resolver_and_the_name_is_resolved_later(
    tmp_path: Path,
) -> None:
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("")
    # In total, the resolver tries for longer than this test waits.
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    steps = (
        f"mount --bind {hosts} /etc/hosts",
        f"mount --bind {resolver} /etc/resolv.conf",
        "ip link set lo up",
        'exec "$@"',
    )
    inside = ["unshare", "--mount", "--net", "sh", "-c", " && ".join(steps), "sh"]
    with subprocess.Popen(
        [*inside, sys.executable, "-c", NAMES], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        try:
            assert process.stderr.readline() == "[7]\n"
            hosts.write_text("192.0.2.8 api.test\n")
            assert process.stderr.readline() == "[7, 8]\n"
        finally:
            watchdog.cancel()
            process.kill()


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
