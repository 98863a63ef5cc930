"""The prober of a gateway: a real process, real health ports, and the end of one process when the
other dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.children import children
from tests.drivers.test_monitor import API, DEADLINE_S, WEB, HealthPort, VerdictLog, balancer

from fairlead.drivers.prober import Prober
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer
from fairlead.roles.prober_process import NICENESS, command

COMMAND = command(0.02, 0.2)
PROGRAM = "fairlead.roles.prober_process"


@asynccontextmanager
async def running(
    log: VerdictLog, argv: Sequence[str] = COMMAND
) -> AsyncIterator[tuple[Prober, "asyncio.Task[None]"]]:
    driver = Prober(log, argv)
    task = asyncio.create_task(driver.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield driver, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Unavailable):
            await task


async def set_balancers(driver: Prober, *balancers: LoadBalancer) -> None:
    desired = driver.render({item.service: item for item in balancers})
    await driver.apply(driver.diff(desired, await driver.read(None)))
    assert await driver.read(None) == desired


async def test_verdicts_follow_health_ports_of_added_and_removed_services() -> None:
    log = VerdictLog()
    async with HealthPort(2).listen() as health, running(log) as (driver, _):
        await set_balancers(driver, balancer(WEB, health.port, "127.0.0.1"))
        await driver.settled()
        await log.wait("127.0.0.1", health.port, "up")
        health.endpoints = 0
        await log.wait("127.0.0.1", health.port, "unready")
        assert driver.ports == 1
        async with HealthPort(1).listen() as other:
            await set_balancers(
                driver,
                balancer(WEB, other.port, "127.0.0.1"),
                balancer(API, other.port, "127.0.0.1"),
            )
            await driver.settled()
            await log.wait("127.0.0.1", other.port, "up")
            await log.wait("127.0.0.1", health.port, None)
            await set_balancers(driver)
            await driver.settled()
            await log.wait("127.0.0.1", other.port, None)
    assert children(PROGRAM) == []


def loaded(pid: int) -> str:
    """Return the files that the process has mapped, among them its modules of C."""
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_prober_has_a_lower_priority_than_its_gateway_and_loads_no_tls() -> None:
    async with HealthPort(1).listen() as health, running(VerdictLog()) as (driver, _):
        await set_balancers(
            driver,
            balancer(WEB, health.port, "127.0.0.1"),
            # The prober is up once it has received a message.
        )
        (pid,) = children(PROGRAM)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(
            19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        )
        assert "_asyncio" in loaded(pid)
        assert "_ssl" not in loaded(pid)


async def test_a_gateway_exits_when_its_prober_dies() -> None:
    async with running(VerdictLog()) as (driver, task):
        await set_balancers(driver, balancer(WEB, 1, "127.0.0.1"))
        (pid,) = children(PROGRAM)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="ended by itself, with status -9"):
            await task
        with pytest.raises(Unavailable, match="has ended"):
            await driver.apply(())


async def test_a_prober_exits_when_its_gateway_dies() -> None:
    script = (
        "import asyncio, os\nfrom fairlead.drivers.prober import Prober\nfrom "
        "fairlead.roles.prober_process import NICENESS, command\n"
        "async def main():\n"
        "    driver = Prober(lambda *_: None, command(0.02, 0.2))\n"
        "    task = asyncio.create_task(driver.run())\n"
        "    await driver.apply(())\n"
        "    print(open('/proc/self/task/%d/children' % os.getpid()).read(), flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        prober = os.pidfd_open(int(await gateway.stdout.readline()))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(prober, ended.set)
        try:
            gateway.kill()
            await gateway.wait()
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(prober)
            os.close(prober)
