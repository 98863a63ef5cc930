"""The driver with a real BIRD and a real router: addresses are announced and withdrawn, whatever
process ends; and each problem of a session is named."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.drivers.inside import run_inside
from tests.routers.site import ADDRESSES, GATEWAYS, ROUTER, Site

from fairlead.config import PoolConfig
from fairlead.drivers.bgp import BgpDriver, NoBgp
from fairlead.drivers.bgp.spec import Spec, diff
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.net.bird import Bird
from fairlead.routers import bird as router_text
from fairlead.routers.planning import reach_of
from fairlead.sections import BfdConfig, BgpConfig, BgpPeerConfig

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
                site.kill("gw1")
                await until(lambda: codes(driver) == ["BirdNotAnswering"])
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
                await announce(driver, {WEB: ADDRESSES})
                await stage.until_learned(ADDRESSES[0])
                await until(lambda: codes(driver) == ["BgpSessionDown"])
                (found,) = driver.findings()
                assert f"router tor-2 ({second.address}, AS {second.asn})" in found.message
                assert not found.blocks

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


@pytest.mark.parametrize("content", ["", "\n", 'with"quote', "x" * 81, "two\nlines", "\u00e4"])
async def test_a_password_that_cannot_be_used_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "password"
    file.write_text(content)
    router = BgpPeerConfig("tor", "192.0.2.1", 64512, password_file=str(file))
    driver = BgpDriver(BgpConfig(64513, (router,), directory=str(tmp_path / "bird")))
    with pytest.raises(Refused, match=r"the password in .* cannot be used: it "):
        await driver.open()
    await driver.close()
    file.unlink()
    with pytest.raises(Refused, match=r"cannot be read from .*: No such file or directory"):
        await driver.open()
    await driver.close()
