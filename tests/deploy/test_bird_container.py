"""The containers of the chart that announce addresses by BGP, as processes with the commands and
capabilities of the rendered pod: the router keeps the routes while a pod is replaced, and with
`withdrawAtStop` it loses them before BIRD ends."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from tests.deploy.chart import CHART, capabilities, container, pod_spec, render
from tests.deploy.life import POD, service

from fairlead.lab import process, routing
from fairlead.lab.process import Process
from fairlead.lab.routers import Routing
from fairlead.lab.site import ROLE_PORTS, Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

ADDRESS = "203.0.113.10"
DEADLINE_S = 60.0
DIRECTORY = "/run/fairlead/bird"
SERVICE = service("web", 80, annotations={"fairlead.io/addresses": ADDRESS})
PROGRAM = str(Path(sys.executable).with_name("fairlead"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    routers = Routing(daemon="frr", bfd_interval_ms=100)
    lab = Site.create(
        f"sidecar{os.getpid()}",
        nodes=1,
        gateways=1,
        clients=1,
        announce="bgp",
        routing=routers,
    )
    async with lab as site:
        await site.apply([POD, SERVICE])
        await site.await_pods()
        await remove_gateway(site)
        yield site


async def remove_gateway(site: Site) -> None:
    """Stop the gateway that the lab started, and remove all that it left on the host."""
    await process.one(site.name, "gw1/gateway").stop(10)
    given = ("--config", str(site.directory.config_of("gw1")))
    pins = ("--pin-path", str(site.directory.pins("gw1")))
    code, _, said = await site.exec("gw1", [PROGRAM, "gateway", *given, *pins, "--cleanup"])
    assert code == 0, said


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:.0f} s without success until {what}") from None


class Pod:
    """The pod of the gateway gw1. `withdraws`: whether it has the option `withdrawAtStop`."""

    def __init__(self, site: Site, helm: Path, *, withdraws: bool = False) -> None:
        self._site = site
        option = f"config.announce.withdrawAtStop={str(withdraws).lower()}"
        values = CHART / "ci" / "bgp-values.yaml"
        self._objects = render(helm, "--values", values, "--set", option)
        self.directory = site.directory.bird("gw1")
        config = yaml.safe_load(site.directory.config_of("gw1").read_text())
        config["announce"]["bgp"]["startDaemon"] = False
        config["announce"]["withdrawAtStop"] = withdraws
        self._config = site.directory.path / "pod.yaml"
        self._config.write_text(yaml.safe_dump(config))

    def command(self, words: list[str]) -> list[str]:
        """Return the words with the directory of this lab."""
        return [each.replace(DIRECTORY, str(self.directory)) for each in words]

    def confined(self, name: str, *command: str) -> list[str]:
        given = capabilities(self._objects, "gateway", name)
        bounds = ",".join(("-all", *(f"+{each.lower()}" for each in given)))
        confine = ("setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounds)
        return [*confine, *command]

    async def start(self) -> tuple[Process, Process]:
        """Start both containers, after the init container."""
        await self.prepare()
        return self.start_bird(), self.start_role()

    async def prepare(self) -> None:
        """Run the init container."""
        (files,) = pod_spec(self._objects, "gateway")["initContainers"]
        assert files["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        confine = ("setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", "-all")
        code, _, said = await self._site.exec("gw1", [*confine, *self.command(files["command"])])
        assert code == 0, said

    def start_bird(self) -> Process:
        bird = self.command(container(self._objects, "gateway", "bird")["command"])
        return self._site.spawn("gw1", self.confined("bird", *bird), label="gw1/bird")

    def start_role(self) -> Process:
        files = self._site.directory
        role = [
            *(PROGRAM, "gateway", "--config", str(self._config), "--node-name", "gw1"),
            *("--kubeconfig", str(files.kubeconfig_inside)),
            *("--pin-path", str(files.pins("gw1")), "--proxy-path", str(files.proxy("gw1"))),
        ]
        return self._site.spawn("gw1", self.confined("fairlead", *role), label="gw1/gateway")

    async def stop(self, bird: Process, role: Process) -> None:
        """Stop both containers as the kubelet does: at the same time, BIRD after its hook."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stop_bird(bird))
            tasks.create_task(role.stop(30))

    async def _stop_bird(self, bird: Process) -> None:
        hook = container(self._objects, "gateway", "bird")["lifecycle"]["preStop"]["exec"]
        command = self.command(hook["command"])
        code, _, said = await self._site.exec("gw1", command)
        assert code == 0, said
        await bird.stop(10)


async def is_served(site: Site) -> bool:
    return (await site.exec("client1", ["curl", "-sfm1", f"http://{ADDRESS}/"]))[0] == 0


async def is_ready(site: Site) -> bool:
    probe = ["curl", "-sfm1", f"http://127.0.0.1:{ROLE_PORTS['gateway']}/readyz"]
    return (await site.exec("gw1", probe))[0] == 0


async def has_no_route(site: Site) -> bool:
    view = await routing.view(site)
    return not any(each.destination.startswith(ADDRESS) for each in view.reach)


async def has_session(site: Site) -> bool:
    """Return whether the router has a session with BFD, and a route to the address."""
    view = await routing.view(site)
    return any(each.state == "Established" and each.bfd == "up" for each in view.sessions)


async def test_routes_stay_while_a_pod_is_replaced(site: Site, helm: Path, tmp_path: Path) -> None:
    pod = Pod(site, helm)
    bird, role = await pod.start()
    await until("the Service is reached through the router", lambda: is_served(site))
    await until("BFD is up", lambda: has_session(site))
    log = tmp_path / "routes"
    watch = ["sh", "-c", f"exec ip -o monitor route >{log}"]
    monitor = site.spawn("router", watch, label="router/monitor")
    await until("the monitor runs", lambda: asyncio.sleep(0, log.exists()))
    await pod.stop(bird, role)
    assert await is_served(site)
    bird, role = await pod.start()
    await until("the session is back", lambda: has_session(site))
    await until("the Service is reached", lambda: is_served(site))
    await monitor.stop(10)
    deleted = [each for each in log.read_text().splitlines() if each.startswith("Deleted")]
    assert not [each for each in deleted if ADDRESS in each]
    await pod.stop(bird, role)


async def test_routes_are_withdrawn_before_bird_ends(site: Site, helm: Path) -> None:
    """With `withdrawAtStop`. While the hook runs, BIRD reads the routes with the community
    graceful-shutdown, and then no routes. The router keeps no stale route."""
    pod = Pod(site, helm, withdraws=True)
    bird, role = await pod.start()
    await until("the Service is reached through the router", lambda: is_served(site))
    await until("BFD is up", lambda: has_session(site))
    await until("the role is ready", lambda: is_ready(site))
    log = site.directory.log("gw1/bird")
    before = len(log.read_bytes())
    await pod.stop(bird, role)
    during = log.read_bytes()[before:].partition(b"Shutting down")[0]
    assert during.count(b"Reconfiguring") >= 2, during
    await until("the router has no route", lambda: has_no_route(site))


async def test_files_that_outlived_bird_announce_nothing(site: Site, helm: Path) -> None:
    """BIRD starts without the role if it ran shortly before, and otherwise waits for the role."""
    pod = Pod(site, helm)
    bird, role = await pod.start()
    await until("the Service is reached through the router", lambda: is_served(site))
    await until("BFD is up", lambda: has_session(site))
    await pod.stop(bird, role)
    await pod.prepare()
    bird = pod.start_bird()
    await until("BIRD runs without the role", lambda: has_session(site))
    await bird.stop(10)
    alive = pod.directory / "alive"
    old_s = alive.stat().st_mtime - 3600
    os.utime(alive, (old_s, old_s))
    await pod.prepare()
    assert not [each for each in pod.directory.iterdir() if each.suffix == ".conf"]
    bird, role = await pod.start()
    await until("the Service is reached through the role", lambda: is_served(site))

    async def marked() -> bool:
        return alive.exists()

    await until("the mark that BIRD runs", marked)
    await pod.stop(bird, role)
