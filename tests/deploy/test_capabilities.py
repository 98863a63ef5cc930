"""The capabilities that the chart gives to gateways and nodes are sufficient, and all are needed.

Each role is started in a lab like a container: as root with a bounding set, and with
no-new-privileges.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.deploy.chart import EVERYTHING, capabilities, render
from tests.deploy.life import POD, service

from fairlead.lab import process
from fairlead.lab.process import Process
from fairlead.lab.site import ROLE_PORTS, Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

ADDRESS, PROXIED_ADDRESS = "192.0.2.224", "192.0.2.225"
DEADLINE_S = 60.0
ROLES = {"gateway": "gw1", "node": "node1"}
SERVICE = service("web", 80, annotations={"fairlead.io/addresses": ADDRESS})
PROXIED = service(
    "proxied",
    80,
    annotations={"fairlead.io/addresses": PROXIED_ADDRESS},
    loadBalancerClass="fairlead.io/proxy",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    lab = Site.create(f"caps{os.getpid()}", nodes=1, gateways=1, clients=1, announce="l2")
    async with lab as site:
        await site.apply([POD, SERVICE, PROXIED])
        await site.await_pods()
        yield site


@pytest.fixture(scope="module")
def given(helm: Path) -> dict[str, list[str]]:
    """Return the capabilities that the chart gives each role."""
    objects = render(helm, "--values", EVERYTHING)
    return {role: capabilities(objects, role) for role in ROLES}


def start(site: Site, role: str, allowed: list[str]) -> Process:
    """Start a role with nothing in the kernel, and with these capabilities only."""
    host = ROLES[role]
    bounds = ",".join(("-all", *(f"+{each.lower()}" for each in allowed)))
    confine = ["setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounds]
    program = str(Path(sys.executable).with_name("fairlead"))
    files = [
        "--config",
        str(site.directory.config),
        "--kubeconfig",
        str(site.directory.kubeconfig_inside),
    ]
    return site.spawn(
        host,
        [*confine, program, role, *files, "--node-name", host, *pins(site, role)],
        label=f"{host}/{role}",
    )


def pins(site: Site, role: str) -> list[str]:
    host, files = ROLES[role], site.directory
    return (
        ["--pin-path", str(files.pins(host)), "--proxy-path", str(files.proxy(host))]
        if role == "gateway"
        else []
    )


async def clear(site: Site, role: str) -> None:
    """Stop the role, and remove what it left in the kernel."""
    for left in process.find(site.name, f"{ROLES[role]}/{role}"):
        await left.stop(10)
    program = str(Path(sys.executable).with_name("fairlead"))
    config = ["--config", str(site.directory.config)]
    code, _, said = await site.exec(
        ROLES[role], [program, role, *config, *pins(site, role), "--cleanup"]
    )
    assert code == 0, said


async def is_ready(site: Site, role: str) -> bool:
    url = f"http://127.0.0.1:{ROLE_PORTS[role]}/readyz"
    return (await site.exec(ROLES[role], ["curl", "-sf", url]))[0] == 0


async def is_served(site: Site, address: str = ADDRESS) -> bool:
    return (await site.exec("client1", ["curl", "-sfm1", f"http://{address}/"]))[0] == 0


@pytest.mark.parametrize("role", ROLES)
async def test_the_capabilities_of_the_chart_suffice(
    site: Site, given: dict[str, list[str]], role: str
) -> None:
    await clear(site, role)
    assert not await is_served(site)
    start(site, role, given[role])
    async with asyncio.timeout(DEADLINE_S):
        while not (
            await is_ready(site, role)
            and await is_served(site)
            and await is_served(site, PROXIED_ADDRESS)
        ):
            await asyncio.sleep(0.1)


async def test_haproxy_needs_net_bind_service(site: Site, given: dict[str, list[str]]) -> None:
    """Without this capability only class proxy is not served, and the gateway reports HAProxy's
    error."""
    await clear(site, "gateway")
    log = site.directory.log("gw1/gateway")
    log.unlink(missing_ok=True)
    start(site, "gateway", [each for each in given["gateway"] if each != "NET_BIND_SERVICE"])
    async with asyncio.timeout(DEADLINE_S):
        while not (await is_served(site) and "HAProxy did not start" in log.read_text()):
            await asyncio.sleep(0.1)
    assert not await is_served(site, PROXIED_ADDRESS)


async def test_gratuitous_arp_needs_net_raw(site: Site, given: dict[str, list[str]]) -> None:
    """Without this capability the kernel still answers ARP requests, and the log tells what is
    missing."""
    await clear(site, "gateway")
    log = site.directory.log("gw1/gateway")
    log.unlink(missing_ok=True)
    start(site, "gateway", [each for each in given["gateway"] if each != "NET_RAW"])
    async with asyncio.timeout(DEADLINE_S):
        while not (await is_served(site) and "with CAP_NET_RAW" in log.read_text()):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("role", "without"),
    [("gateway", "NET_ADMIN"), ("gateway", "BPF"), ("gateway", "PERFMON"), ("node", "NET_ADMIN")],
)
async def test_each_capability_is_needed(
    site: Site, given: dict[str, list[str]], role: str, without: str
) -> None:
    """A role that lacks a capability reports it and exits, or reports it and serves nothing."""
    await clear(site, role)
    log = site.directory.log(f"{ROLES[role]}/{role}")
    log.unlink(missing_ok=True)
    started = start(site, role, [each for each in given[role] if each != without])
    async with asyncio.timeout(DEADLINE_S):
        while "not permitted" not in log.read_text() and "prohibited" not in log.read_text():
            await asyncio.sleep(0.1)
    assert not await is_served(site)
    assert not await is_ready(site, role)
    await started.kill()


async def test_every_capability_of_the_chart_is_tested(given: dict[str, list[str]]) -> None:
    """The chart gives no capability that is not tested above."""
    assert {role: set(each) for role, each in given.items()} == {
        "gateway": {"NET_ADMIN", "BPF", "PERFMON", "NET_BIND_SERVICE", "NET_RAW"},
        "node": {"NET_ADMIN"},
    }
