"""A HAProxy that exists and does not answer: the gateway reports it, and starts no second one."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.drivers.proxy.site import (
    WEB,
    balancer,
    new_answers,
    nodes,
    opened,
    reconcile,
    remaining,
    until,
)

from fairlead.drivers.proxy import ProxyDriver, driver, process, runtime
from fairlead.errors import Unavailable
from fairlead.model import ProxySettings
from fairlead.plan.proxying import PROXY

HEADER = ProxySettings(header="v1")
pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HANG_S", 0.5)
    monkeypatch.setattr(driver, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(driver, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(runtime, "ANSWER_S", 0.5)


@asynccontextmanager
async def running(made: ProxyDriver) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def pid_of_worker(made: ProxyDriver) -> int:
    (found,), _ = await runtime.workers(made.haproxy.master)
    return found.pid


async def test_a_gateway_is_not_ready_while_the_worker_of_haproxy_is_stopped(folder: Path) -> None:
    async with nodes("node1", "node2"), opened(folder) as made, running(made):
        first, both = balancer({"node1": 1}), balancer({"node1": 1, "node2": 1})
        await reconcile(made, first)
        assert not made.findings()
        worker = await pid_of_worker(made)
        os.kill(worker, signal.SIGSTOP)

        async def is_noticed() -> bool:
            return bool(made.findings())

        await until(is_noticed)
        (finding,) = made.findings()
        assert (finding.code, finding.blocks) == (driver.NOT_ANSWERING, "Ready")
        assert made.problem_class == PROXY, "the others are served"
        assert f"process {worker}" in finding.message
        outcomes = await made.apply(made.diff(made.render({WEB: both}), await made.read([WEB])))
        assert outcomes[WEB].state == "unavailable"
        with ExitStack() as waiting:  # as many as the kernel accepts for the process
            with suppress(BlockingIOError):
                while True:
                    caller = waiting.enter_context(socket.socket(socket.AF_UNIX))
                    caller.setblocking(False)
                    caller.connect(str(made.haproxy.worker))
            assert await made.haproxy.hangs()
        assert await remaining(made, first) == (), "an audit knows no more than what was set"

        os.kill(worker, signal.SIGCONT)

        async def is_over() -> bool:
            return not made.findings()

        await until(is_over)
        await reconcile(made, both)
        assert {node for node, *_ in await new_answers(4)} == {"node1", "node2"}
        assert await pid_of_worker(made) == worker
        assert made.counters.unexpected_exits() == 0


async def test_a_worker_that_is_stopped_gets_no_second_one_beside_it(folder: Path) -> None:
    """The kernel would divide the connections between both. A new process of the gateway, to which
    HAProxy does not show what it serves, is not ready either."""
    first, changed = balancer({"node1": 1}), balancer({"node1": 1}, settings=HEADER)
    async with nodes("node1"), opened(folder) as made:
        await reconcile(made, first)
        worker, text = await pid_of_worker(made), made.haproxy.text()
        os.kill(worker, signal.SIGSTOP)
        successor = ProxyDriver(folder, reload_pause_s=0.1)
        for each in (made, successor):
            with pytest.raises(Unavailable, match="does not answer"):
                await each.apply(each.diff(each.render({WEB: changed}), await each.read([WEB])))
        assert made.haproxy.text() == text, "what the worker runs with"
        async with running(successor):

            async def is_noticed() -> bool:
                return bool(successor.findings())

            await until(is_noticed)
        os.kill(worker, signal.SIGCONT)
        assert await pid_of_worker(made) == worker
        await reconcile(made, changed)
        assert await new_answers() == [["node1", "v1:127.0.0.1", "x"]]


async def test_a_stopped_master_of_haproxy_gets_no_second_one_beside_it(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as made:
        first = balancer({"node1": 1})
        await reconcile(made, first)
        master = made.haproxy.master_pid()
        assert master is not None
        os.kill(master, signal.SIGSTOP)
        try:
            changed = made.render({WEB: balancer({"node1": 1}, settings=HEADER)})
            with pytest.raises(Unavailable, match=f"process {master}"):
                await made.apply(made.diff(changed, await made.read([WEB])))
            async with running(made):
                await asyncio.sleep(1)
                assert await new_answers() == [["node1", "-", "x"]]
            assert made.haproxy.master_pid() == master
            assert made.counters.unexpected_exits() == 0
        finally:
            os.kill(master, signal.SIGCONT)
        await reconcile(made, balancer({"node1": 1}, settings=HEADER))
        assert await new_answers() == [["node1", "v1:127.0.0.1", "x"]]


@pytest.mark.parametrize("stopped", ["master", "worker"])
async def test_a_haproxy_that_is_stopped_is_not_forgotten_with_its_last_service(
    folder: Path, stopped: str
) -> None:
    """Before anybody knows that it does not answer, a request to end has no effect on it."""
    async with nodes("node1"), opened(folder) as made:
        first = balancer({"node1": 1})
        await reconcile(made, first)
        worker, master = await pid_of_worker(made), made.haproxy.master_pid()
        assert master is not None
        frozen = master if stopped == "master" else worker
        os.kill(frozen, signal.SIGSTOP)
        try:
            removals = made.diff({}, await made.read([WEB]))
            with pytest.raises(Unavailable, match=f"HAProxy's {stopped} .*cannot be stopped"):
                await made.apply(removals)
            assert made.haproxy.alive()
        finally:
            os.kill(frozen, signal.SIGCONT)
        await made.apply(removals)
        assert not made.haproxy.master.exists()


async def test_no_change_waits_for_a_master_that_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker serves, and takes what needs no reload. If the worker ends, nobody starts another
    one, which is noticed too."""
    made: ProxyDriver

    async def is_noticed() -> bool:
        return bool(made.findings())

    async def is_not_ready() -> bool:
        return [each.blocks for each in made.findings()] == ["Ready"]

    async def is_over() -> bool:
        return not made.findings() and await made.haproxy.running()

    async def is_counted() -> bool:
        return made.counters.services()[WEB].connections >= 4

    async with nodes("node1", "node2"), opened(folder) as made, running(made):
        await reconcile(made, balancer({"node1": 1}))
        await made.poll()
        worker, master = await pid_of_worker(made), made.haproxy.master_pid()
        assert master is not None
        os.kill(master, signal.SIGSTOP)
        try:
            await until(is_noticed)
            (finding,) = made.findings()
            assert (finding.code, finding.blocks) == (driver.NOT_ANSWERING, "")
            assert f"master (process {master})" in finding.message
            assert "kill -KILL" not in finding.remedy, "its worker would end too"
            monkeypatch.setattr(runtime, "ANSWER_S", 600.0)
            async with asyncio.timeout(60):
                both = balancer({"node1": 1, "node2": 1})
                await reconcile(made, both)
                assert {node for node, *_ in await new_answers(4)} == {"node1", "node2"}
                await until(is_counted)
                changed = made.render({WEB: balancer({"node1": 1, "node2": 1}, settings=HEADER)})
                outcomes = await made.apply(made.diff(changed, await made.read([WEB])))
                assert (outcomes[WEB].state, outcomes[WEB].in_part) == ("unavailable", True)
                assert await remaining(made, both) == (), "an audit does not wait either"
            os.kill(worker, signal.SIGKILL)
            await until(is_not_ready)
        finally:
            os.kill(master, signal.SIGKILL)

        await until(is_over)
        assert {node for node, *_ in await new_answers(4)} == {"node1", "node2"}
        assert made.counters.unexpected_exits() == 1


@pytest.mark.soak
async def test_a_master_that_is_stopped_soon_after_a_restart_is_noticed_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no check has found in between that the new one answered."""
    made: ProxyDriver

    async def is_noticed() -> bool:
        return made.haproxy.master_hangs and bool(made.findings())

    async def is_restarted() -> bool:
        return made.reloads > reloads

    async with nodes("node1"), opened(folder) as made, running(made):
        await reconcile(made, balancer({"node1": 1}))
        first, reloads = made.haproxy.master_pid(), made.reloads
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await until(is_noticed)
        monkeypatch.setattr(driver, "CHECK_INTERVAL_S", 2.0)
        await asyncio.sleep(0.7)  # the next check is some time away
        os.kill(first, signal.SIGKILL)
        await until(is_restarted)
        second = made.haproxy.master_pid()
        assert second is not None
        os.kill(second, signal.SIGSTOP)
        monkeypatch.setattr(driver, "CHECK_INTERVAL_S", 0.05)
        try:
            await until(is_noticed)
            assert f"process {second}" in made.findings()[0].message
        finally:
            os.kill(second, signal.SIGCONT)
