"""What happens when a process ends: the driver's, or BIRD."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import ROUTER, Routers
from tests.drivers.bgp.routers import Neighbor
from tests.drivers.bgp.site import (
    API,
    VIP,
    WEB,
    announced,
    bird,
    driver_in,
    established,
    intent,
    ip,
    peer,
    reconcile,
    running,
    until,
)

from fairlead.announce_sections import BfdConfig, BgpConfig
from fairlead.drivers.bgp import BirdDriver
from fairlead.drivers.bgp.process import BirdProcess
from fairlead.lab import namespace
from fairlead.model import ServiceKey

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
EACH = pytest.mark.parametrize("kind", ["bird", "frr", "gobgp"])


async def test_routes_stay_when_the_process_is_killed_and_the_next_one_adopts_them(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    command = [sys.executable, "-m", "tests.drivers.bgp.process", str(folder / "b"), VIP]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    while b"announced" not in await child.stdout.readline():
        pass
    await router.learns(f"{VIP}/32")
    bird = BirdProcess(folder / "b").pid()
    child.kill()
    await child.wait()
    async with running(folder / "b", [peer()]) as driver:
        assert driver.speaker.bird.pid() == bird
        assert await router.prefixes() == {f"{VIP}/32"}
        actual = await driver.read(None)
        assert list(actual) == [WEB]
        await established(driver, "tor1")
        assert not driver.diff(driver.render({WEB: intent(VIP)}), await driver.read(None))
        # A Service that was deleted meanwhile is withdrawn.
        await announced(driver, {API: intent("203.0.113.9")}, WEB)
        await router.learns("203.0.113.9/32")
        assert driver.speaker.bird.pid() == bird
        assert driver.status().sessions[0].state == "established"


@EACH
async def test_a_killed_bird_is_started_again_and_the_router_keeps_the_routes(
    folder: Path, router_of: Routers, kind: str
) -> None:
    """Datagrams through the router show a missing route (GoBGP has no routing table)."""
    ip("addr", "add", f"{VIP}/32", "dev", "lo")
    # BIRD as a router that follows BFD would flush the route of a neighbor that restarts.
    follows_bfd = kind == "frr"
    router = router_of(kind, Neighbor(bfd=follows_bfd))
    await router.start()
    bfd = BfdConfig() if follows_bfd else None
    peers = [peer(bfd=bfd, graceful_restart=None if follows_bfd else True)]
    if not follows_bfd:
        peers = [peer(bfd=BfdConfig(passive=True), graceful_restart=True)]
    async with running(folder / "b", peers) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        await driver.poll()
        lost = Datagrams(VIP) if router.has_kernel_routes else None
        if lost is not None:
            # The kernel of the router gets the route later than its BGP table.
            await until(lost.pass_router)
        before = driver.speaker.bird.pid()
        assert before is not None
        os.kill(before, signal.SIGKILL)

        async def restarted() -> bool:
            if lost is not None:
                await lost.send(50)
            else:
                assert await router.prefixes() == {f"{VIP}/32"}
            return (
                driver.speaker.restarts == 1 and driver.status().sessions[0].state == "established"
            )

        await until(restarted)
        assert driver.speaker.bird.pid() not in (None, before)
        if lost is not None:
            await lost.send(500)
            assert lost.sent == lost.received
        assert await router.prefixes() == {f"{VIP}/32"}
        outcomes = await reconcile(driver, {WEB: intent()})
        assert all(each.state == "done" for each in outcomes.values())


class Datagrams:
    """Datagrams that the router sends to the address, which this host receives."""

    def __init__(self, address: str) -> None:
        self.sent = self.received = 0
        self._receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._receiver.bind((address, 9999))
        self._receiver.setblocking(False)
        with namespace.inside(ROUTER):
            self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._target = (address, 9999)

    async def pass_router(self) -> bool:
        """Return whether datagrams arrive. The ones that this method sends do not count."""
        self.sent = self.received = 0
        await self.send(1)
        arrived = self.sent == self.received
        self.sent = self.received = 0
        return arrived

    async def send(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            try:
                self._sender.sendto(b"x", self._target)
            except OSError:  # the router has no route
                continue
            await asyncio.sleep(0.001)
            try:
                while True:
                    self._receiver.recv(10)
                    self.received += 1
            except BlockingIOError:
                pass


async def test_a_host_that_withdraws_announces_nothing_until_it_stays(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        await driver.withdraw()
        await router.learns()
        await driver.read(None)
        await reconcile(driver, {API: intent("203.0.113.9")})
        assert driver.status().addresses == ()
        assert await router.prefixes() == set()
        await driver.stay()
        await router.learns(f"{VIP}/32", "203.0.113.9/32")


async def test_a_second_role_with_the_same_directory_announces_nothing_and_says_so(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    section = BgpConfig(asn=64513, directory=str(folder / "b"))
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(), API: intent("203.0.113.9", peers=("tor1",))})
        node = BirdDriver(section, peers=lambda: [peer()], role="node")
        await node.open()
        assert await node.read(None) == {}
        outcome = (await reconcile(node, {API: intent("203.0.113.10")}))[API]
        assert (outcome.state, outcome.in_part) == ("unavailable", True)
        for text in (outcome.message, node.status().problem):
            assert "belongs to role gateway" in text
            assert "announce.bgp.directory" in text
        await node.poll()
        await router.learns(f"{VIP}/32", "203.0.113.9/32")
        # What the file says about a Service goes with it.
        await announced(driver, {WEB: intent()}, API)
        text = driver.speaker.bird.routes.read_text()
        assert str(WEB) in text
        assert str(API) not in text
        assert "tor1" not in text
    # The second role begins when the first one has removed its files.
    await driver.remove()
    await announced(node, {API: intent("203.0.113.10")})
    await router.learns("203.0.113.10/32")
    assert node.status().problem == ""
    await node.remove()


async def test_a_bird_of_another_program_starts_with_what_is_to_be_announced(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()], start_daemon=False) as driver:
        outcomes = await reconcile(driver, {WEB: intent()})
        assert outcomes[WEB].state == "waiting"
        assert "no BIRD answers" in outcomes[WEB].message
        with bird(folder / "b" / "bird.conf", "-R") as sidecar:
            await announced(driver, {WEB: intent()})
            await router.learns(f"{VIP}/32")
            await announced(driver, {WEB: intent("203.0.113.9")})
            await router.learns("203.0.113.9/32")
            assert await driver.remove()
            await router.learns()
            assert sidecar.poll() is None


async def test_the_audit_restores_what_another_program_changed(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent()})
        routes = driver.speaker.bird.routes.read_text()
        driver.speaker.bird.routes.write_text(routes.replace(VIP, "203.0.113.66"))
        await driver.speaker.bird.client.configure()
        await router.learns("203.0.113.66/32")
        await driver.read(None)
        await router.learns(f"{VIP}/32")
        assert driver.speaker.bird.routes.read_text() == routes
        text = driver.speaker.bird.configuration.read_text()
        driver.speaker.bird.configuration.write_text(
            text.replace("protocol bgp", "# protocol bgp", 1)
        )
        await driver.read(None)
        assert driver.speaker.bird.configuration.read_text() == text


@pytest.mark.parametrize("start_daemon", [False, True])
async def test_a_bird_that_does_not_work_has_services_reconciled_once(
    folder: Path, *, start_daemon: bool
) -> None:
    requeued: list[ServiceKey] = []
    # A folder in the place of the control socket: a BIRD that is started here ends with an error.
    (folder / "b" / "bird.ctl").mkdir(parents=True)
    driver = driver_in(folder / "b", [peer()], requeue=requeued.extend, start_daemon=start_daemon)
    await driver.open()
    problem = driver.status().problem
    assert ("BIRD did not start" if start_daemon else "no BIRD answers") in problem
    intents = {WEB: intent(), API: intent("203.0.113.9")}
    for _ in range(20):
        outcomes = await reconcile(driver, intents)
        assert {each.message for each in outcomes.values()} == {problem}
        await driver.poll()
    assert requeued == []
    assert VIP in driver.speaker.bird.routes.read_text()
    (folder / "b" / "bird.ctl").rmdir()
    with bird(folder / "b" / "bird.conf") if not start_daemon else nullcontext():

        async def works() -> bool:
            await driver.poll()
            return not driver.status().problem

        await until(works)
        assert set(requeued) == {WEB, API}
    await driver.remove()


async def test_a_bird_that_ends_right_after_its_start_is_not_started_at_once(
    folder: Path,
) -> None:
    driver = driver_in(folder / "b", [peer()])
    await driver.open()
    pid = driver.speaker.bird.pid()
    assert pid is not None
    started_s = driver.speaker._started_s
    driver.speaker._started_s = float("inf")  # right now, however slow this machine is
    os.kill(pid, signal.SIGKILL)
    await driver.speaker.bird.exited()
    await driver.poll()
    assert "ended right after its start" in driver.status().problem
    assert driver.speaker.bird.pid() is None
    driver.speaker._started_s, driver._retry_s = started_s, 0

    async def restarted() -> bool:
        await driver.poll()
        return driver.speaker.restarts == 1

    await until(restarted)
    assert driver.status().problem == ""
    await driver.remove()


async def test_between_two_attempts_bird_is_left_alone_and_the_files_are_written(
    folder: Path,
) -> None:
    driver = driver_in(folder / "b", [peer()], start_daemon=False)
    await driver.open()
    with bird(folder / "b" / "bird.conf"):
        await until(driver.speaker.bird.answers)
        driver._retry_s = float("inf")
        (outcome,) = (await reconcile(driver, {WEB: intent()})).values()
        assert "no BIRD answers" in outcome.message
        assert VIP in driver.speaker.bird.routes.read_text()
        driver._retry_s = 0
        await driver.poll()
        assert driver.status().problem == ""
        assert await driver.speaker.prefixes() == {f"{VIP}/32"}
        await driver.remove()
