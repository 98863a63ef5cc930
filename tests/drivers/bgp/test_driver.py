"""The driver with a real BIRD and a real router: addresses are announced and withdrawn, whatever
process ends; and each problem of a session is named."""

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.drivers.inside import Scenario, run_inside
from tests.routers.site import ADDRESSES, GATEWAYS, ROUTER, Site

from fairlead.config import PoolConfig
from fairlead.drivers import Component
from fairlead.drivers.bgp import BgpDriver, NoBgp
from fairlead.drivers.bgp.driver import PROTOCOL, TABLE
from fairlead.drivers.bgp.render import configuration
from fairlead.drivers.bgp.spec import Change, Spec, addresses_of, carried_out, diff, render
from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace
from fairlead.model import Listener, LoadBalancer, Outcome, ServiceKey
from fairlead.net.bird import Bird
from fairlead.net.blackhole import Blackholes
from fairlead.reconcile import Loop, Pace
from fairlead.routers import bird as router_text
from fairlead.routers.planning import reach_of
from fairlead.sections import BfdConfig, BgpConfig, BgpPeerConfig
from fairlead.state import Subscribers

pytestmark = pytest.mark.root

WEB, DNS = ServiceKey("default", "web"), ServiceKey("default", "dns")
POOLS = (PoolConfig("main", ("203.0.113.0/28", "2001:db8:f::/120")),)
KERNEL = "protocol device {}\nprotocol kernel { ipv4 { export all; }; merge paths on; }\n"
WAIT_S = 30


class Stage:
    """The driver on gw1, its BIRD, and the BIRD of the router."""

    def __init__(self, site: Site, bird: Path) -> None:
        self.site, self.bird = site, bird
        self.router = Bird(site.folder / "router.ctl")
        routers = tuple(
            BgpPeerConfig(f"tor-{each}", address, 64512, bfd=BfdConfig())
            for each, address in enumerate(ROUTER, 1)
        )
        self.section = BgpConfig(64513, routers, directory=str(site.folder / "bird"))
        self.shown: set[str] = set()

    def start_router(self, change: Callable[[str], str] = lambda text: text) -> None:
        text = change(router_text.render(reach_of(POOLS, GATEWAYS, bfd=True)))
        file = self.site.folder / "router.conf"
        file.write_text(KERNEL + text)
        self.site.start("router", self.bird, "-f", "-c", file, "-s", self.router.path)

    def start_bird(self, configuration: Path | None = None) -> None:
        used = configuration or self.configuration
        files = ("-c", used, "-s", self.configuration.with_name("bird.ctl"))
        self.site.start("gw1", self.bird, "-f", "-R", *files)

    @property
    def configuration(self) -> Path:
        return Path(self.section.directory, "bird.conf")

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[BgpDriver]:
        """Yield a driver, as a process of a gateway has it, which ends with the block."""
        driver = BgpDriver(self.section, shown=lambda: self.shown)
        await driver.open()
        task = asyncio.create_task(driver.run())
        try:
            yield driver
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.close()

    async def learned(self) -> set[str]:
        return {each.prefix.partition("/")[0] for each in await self.router.routes()}

    async def until_learned(self, *addresses: str) -> None:
        await until(self.router.path.exists)
        async with asyncio.timeout(WAIT_S):
            while await self.learned() != set(addresses):
                await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.05)


async def announce(driver: BgpDriver, desired: Mapping[ServiceKey, Spec]) -> None:
    """Make what the driver announces equal to this, as the loop does: after an audit, the first
    pass applies the plan, and the next one removes what no Service needs."""
    differ = {*desired, *await driver.read(None)}
    for keys in (set(desired), differ - set(desired)):
        wanted = {key: desired[key] for key in keys & set(desired)}
        await driver.apply(diff(wanted, await driver.read(keys)))
    assert await driver.read(None) == desired


def codes(driver: BgpDriver) -> list[str]:
    return [each.code for each in driver.findings()]


def test_addresses_follow_the_services_and_survive_every_process(
    bird: Path, tmp_path: Path
) -> None:
    with Site.running(tmp_path) as site:
        stage = Stage(site, bird)

        async def scenario() -> None:
            stage.start_router()
            async with stage.driver() as driver:
                assert codes(driver) == ["BirdNotAnswering"]
                stage.start_bird()
                await announce(driver, {WEB: ADDRESSES, DNS: ADDRESSES[:1]})
                await stage.until_learned(*ADDRESSES)
                await until(lambda: not codes(driver))
                assert [each.state for each in driver.status().sessions] == ["Established"] * 2
                assert [each.bfd for each in driver.status().sessions] == ["Up"] * 2
                assert driver.status().addresses == 2
                await announce(driver, {DNS: ADDRESSES[:1]})
                await stage.until_learned(ADDRESSES[0])
                await announce(driver, {DNS: ADDRESSES[:1], WEB: (ADDRESSES[1],)})
                await stage.until_learned(*ADDRESSES)
            assert await stage.learned() == set(ADDRESSES), "no process of Fairlead runs"
            stage.shown = {ADDRESSES[1]}
            async with stage.driver() as driver:
                assert not codes(driver)
                # The plan of WEB is refused, so it is not passed to the driver.
                await driver.apply(diff({}, await driver.read(None)))
                await stage.until_learned(ADDRESSES[1])
                await announce(driver, {DNS: ADDRESSES[:1]})
                await stage.until_learned(*ADDRESSES)
                with capture_logs() as logs:
                    site.kill("gw1")
                    await until(lambda: codes(driver) == ["BirdNotAnswering"])
                changes = [(each["router"], each["state"]) for each in logs if "router" in each]
                assert changes == [("tor-1", "unknown"), ("tor-2", "unknown")]
                stage.start_bird()
                await until(lambda: not codes(driver))
                await stage.until_learned(*ADDRESSES)
                removed = await driver.remove()
                assert removed[0] == "routes announced by BGP (2)"
                await stage.until_learned()
            assert await NoBgp().remove() == []
            assert removed[1:] == [str(stage.configuration)]

        run_inside(site.name("gw1"), scenario, deadline_s=120)


def test_a_gateway_without_the_section_withdraws_what_was_announced(tmp_path: Path) -> None:
    with Site.running(tmp_path) as site:
        stage = Stage(site, tmp_path)

        async def scenario() -> None:
            async with stage.driver() as driver:
                await announce(driver, {WEB: ADDRESSES})
            await NoBgp().open()
            async with stage.driver() as driver:
                assert await driver.read(None) == {}

        run_inside(site.name("gw1"), scenario, deadline_s=60)


def test_a_new_process_withdraws_what_no_service_has_any_more(tmp_path: Path) -> None:
    with Site.running(tmp_path) as site:
        stage = Stage(site, tmp_path)

        async def scenario() -> None:
            async with stage.driver() as driver:
                await announce(driver, {WEB: ADDRESSES})
            async with stage.driver() as driver:
                await announce(driver, {DNS: ADDRESSES[:1]})

        run_inside(site.name("gw1"), scenario, deadline_s=60)


@pytest.mark.parametrize(
    "fault",
    [
        "absent router",
        pytest.param("AS number", marks=pytest.mark.soak),
        pytest.param("password", marks=pytest.mark.soak),
    ],
)
def test_a_session_that_is_not_possible_is_named_and_the_other_one_goes_on(
    bird: Path, tmp_path: Path, fault: str
) -> None:
    password = tmp_path / "password"
    password.write_text("a secret\n")
    with Site.running(tmp_path) as site:
        stage = Stage(site, bird)
        first, second = stage.section.routers
        match fault:
            case "AS number":
                second = msgspec.structs.replace(second, asn=64999)
            case "password":
                second = msgspec.structs.replace(second, password_file=str(password))
            case "absent router":
                second = msgspec.structs.replace(second, address="2001:db8:2::99")
        stage.section = msgspec.structs.replace(stage.section, routers=(first, second))

        async def scenario() -> None:
            stage.start_router()
            async with stage.driver() as driver:
                stage.start_bird()
                await announce(driver, {WEB: ADDRESSES[:1]})
                await stage.until_learned(ADDRESSES[0])
                await until(lambda: codes(driver) == ["BgpSessionDown"])
                (found,) = driver.findings()
                assert f"router tor-2 ({second.address}, AS {second.asn})" in found.message
                assert not found.blocks
                await announce(driver, {WEB: ADDRESSES})
                await until(lambda: [each.blocks for each in driver.findings()] == ["Ready"])

        run_inside(site.name("gw1"), scenario, deadline_s=90)
        assert stage.configuration.stat().st_mode & 0o777 == 0o600
        assert ('password "a secret";' in stage.configuration.read_text()) == (fault == "password")


def test_a_bird_with_another_configuration_is_named_until_it_reads_that_of_the_driver(
    bird: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.conf"
    other.write_text("protocol device {}\n")
    with Site.running(tmp_path) as site:
        stage = Stage(site, bird)

        async def scenario() -> None:
            stage.start_router()
            async with stage.driver() as driver:
                stage.start_bird(other)
                await until(lambda: codes(driver) == ["BirdConfigurationRefused"])
                site.kill("gw1")
                stage.start_bird()
                await until(lambda: not codes(driver))
            stage.section = msgspec.structs.replace(
                stage.section, routers=stage.section.routers[:1], asn=64514
            )
            async with stage.driver() as driver:
                await until(lambda: codes(driver) == ["BgpSessionDown"])
                assert len(driver.status().sessions) == 1, "BIRD has read the new configuration"

        run_inside(site.name("gw1"), scenario, deadline_s=90)


def test_audits_repair_what_others_change_and_drift_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loop_of(tmp_path, "203.0.113.99") as (driver, loop, _, kernel):
            await until(lambda: kernel.routes() == {"203.0.113.10"})
            kernel.delete_routes(["203.0.113.10"])
            await until(lambda: kernel.routes() == {"203.0.113.10"} and loop.drift == 1)
            await asyncio.sleep(3 * AUDIT_S)
            assert loop.drift == 1
            assert driver.addresses == {"203.0.113.10"}

    inside_an_empty_namespace(scenario)


def test_an_address_is_withdrawn_before_other_drivers_stop_serving_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loop_of(tmp_path) as (_, _, chain, kernel):
            await until(lambda: kernel.routes() == {"203.0.113.10"})
            chain.addresses, chain.reachable = ("203.0.113.11",), False
            chain.subscribers.mark([WEB])
            await until(lambda: not kernel.routes())
            chain.reachable = True
            await until(lambda: kernel.routes() == {"203.0.113.11"})
            assert not chain.wrong, "no address is announced that is not served"

    inside_an_empty_namespace(scenario)


AUDIT_S = 0.2


class Chain(Component):
    """A State with one Service, and the driver before that of BGP. `reachable`: whether this one
    can carry out changes."""

    name = "direct"

    def __init__(self, kernel: Blackholes) -> None:
        self.has_synced = asyncio.Event()
        self.has_synced.set()
        self.services = [WEB]
        self.subscribers = Subscribers[ServiceKey]()
        self.addresses: tuple[str, ...] = ("203.0.113.10",)
        self.reachable = True
        self.wrong: list[set[str]] = []
        self._kernel = kernel
        self._known: Mapping[ServiceKey, Spec] = {}
        self.render, self.diff = render, diff

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        listeners = (Listener("IPv4", 80, "TCP", "Local", 30080, ()),)
        web = LoadBalancer(WEB, "1", "fairlead.io/direct", self.addresses, listeners)
        return {key: web for key in keys if key == WEB}

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Spec]:
        return {key: self._known[key] for key in self._known if keys is None or key in keys}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        if not self.reachable:
            raise Unavailable("tried")
        self._known = carried_out(self._known, changes)
        left = addresses_of(self._known)
        if announced := self._kernel.routes() - left:
            self.wrong.append(announced)
        return {}


@asynccontextmanager
async def loop_of(
    directory: Path, *leftovers: str
) -> AsyncIterator[tuple[BgpDriver, Loop[ServiceKey, LoadBalancer], Chain, Blackholes]]:
    """Yield a loop with the driver and another one before it, and the table in the kernel, which
    has leftovers."""
    router = BgpPeerConfig("tor", "192.0.2.1", 64512)
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(directory)))
    with closing(Blackholes(TABLE, PROTOCOL)) as kernel:
        kernel.add_routes(leftovers)
        chain = Chain(kernel)
        loop = Loop(
            "forwarding",
            chain,
            chain.plan,
            [driver.withdrawals, chain, driver],
            lambda _intents, _outcomes: None,
            pace=Pace(audit_interval_s=AUDIT_S, plan_slice=50),
        )
        await driver.open()
        task = asyncio.create_task(loop.run())
        try:
            yield driver, loop, chain, kernel
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.close()


def inside_an_empty_namespace(scenario: Scenario) -> None:
    name = f"flt-{os.getpid()}-bgp"
    namespace.create(name)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        run_inside(name, scenario, deadline_s=60)
    finally:
        namespace.delete(name)


@pytest.mark.parametrize("content", ["", "\n", 'with"quote', "x" * 81, "two\nlines", "\u00e4"])
async def test_a_password_that_cannot_be_used_is_named_and_the_old_file_stays(
    tmp_path: Path, content: str
) -> None:
    file, directory = tmp_path / "password", tmp_path / "bird"
    directory.mkdir()
    configured = directory / "bird.conf"
    configured.write_bytes(b"the previous one \xff")
    file.write_text(content)
    router = BgpPeerConfig("tor", "192.0.2.1", 64512, password_file=str(file))
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(directory)))
    for pattern in (
        r"the password in .* cannot be used: it ",
        r"cannot be read from .*: No such file or directory",
    ):
        await driver.open()
        (found,) = driver.findings()
        assert (found.code, found.blocks) == ("BirdConfigurationRefused", "Ready")
        assert re.search(pattern, found.message)
        await driver.close()
        file.unlink(missing_ok=True)
    assert configured.read_bytes() == b"the previous one \xff"


async def test_a_password_that_is_corrected_is_used(tmp_path: Path) -> None:
    file = tmp_path / "password"
    router = BgpPeerConfig("tor", "192.0.2.1", 64512, password_file=str(file))
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(tmp_path)))
    await driver.open()
    assert codes(driver) == ["BirdConfigurationRefused"]
    file.write_text("a secret")
    task = asyncio.create_task(driver.run())
    await until(lambda: codes(driver) == ["BirdNotAnswering"])
    task.cancel()
    await driver.close()
    assert 'password "a secret";' in (tmp_path / "bird.conf").read_text()


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    router = BgpPeerConfig("tor", "192.0.2.1", 64512)
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(tmp_path / "file" / "bird")))
    await driver.open()
    assert codes(driver) == ["BirdConfigurationRefused"]
    await driver.close()


async def test_only_root_reads_the_configuration_and_it_goes_with_the_section(
    tmp_path: Path,
) -> None:
    router = BgpPeerConfig("tor", "192.0.2.1", 64512)
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(tmp_path)))
    file, draft, other = (tmp_path / each for each in ("bird.conf", "bird.new", "other"))
    other.touch()
    draft.touch(mode=0o644)
    for attempt in range(3):
        if attempt == 1:
            file.chmod(0o644)
        if attempt == 2:
            file.unlink()
            draft.symlink_to(other)
        await driver.open()
        await driver.close()
        assert file.stat().st_mode & 0o777 == 0o600
    assert (file.is_symlink(), other.read_text()) == (False, "")
    assert str(file) in await NoBgp(tmp_path).remove()
    assert not file.exists()
    file.write_text("# by an operator")
    assert await NoBgp(tmp_path).remove() == []
    assert file.exists()


def test_a_bird_that_an_ended_process_has_not_told_reads_the_file(
    bird: Path, tmp_path: Path
) -> None:
    with Site.running(tmp_path) as site:
        stage = Stage(site, bird)

        async def scenario() -> None:
            stage.start_router()
            async with stage.driver() as driver:
                stage.start_bird()
                await until(lambda: not codes(driver))
                since = [each.since for each in await driver._bird.protocols()]
            async with stage.driver() as driver:
                assert [each.since for each in await driver._bird.protocols()] == since
            # A process wrote the file of one router, and was killed before it told BIRD.
            stage.section = msgspec.structs.replace(
                stage.section, routers=stage.section.routers[:1]
            )
            stage.configuration.write_text(configuration(stage.section, {}, table=TABLE))
            async with stage.driver() as driver:
                await until(lambda: not codes(driver))
                names = {each.name for each in await driver._bird.protocols()}
                assert "fairlead_to_tor_2" not in names

        run_inside(site.name("gw1"), scenario, deadline_s=60)
