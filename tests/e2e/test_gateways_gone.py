"""All gateways are killed (SIGKILL), or no gateway ever existed: Services keep their addresses, and
their status shows that no gateway is alive."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import Load, Web, until
from tests.faults.test_real_server import check_unharmed

from fairlead.lab import process
from fairlead.lab.site import Site, tear_down

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

GATEWAYS = ("gw1", "gw2")
PROGRAM = str(Path(sys.executable).with_name("fairlead"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"gone{os.getpid()}", nodes=1, gateways=2, clients=1) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(site: Site) -> Web:
    web = Web(site)
    web.gateways = GATEWAYS
    await web.create()
    await web.place(("node1",))
    return web


def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, f"fairlead-{site.name}")


async def await_ready_condition(site: Site, status: str, reason: str) -> None:
    async def shown() -> bool:
        found = (await kubectl(site).service("web"))["status"].get("conditions", ())
        return (status, reason) in {
            (each["status"], each["reason"])
            for each in found
            if each["type"] == "fairlead.io/Ready"
        }

    await until(shown, f"condition Ready {status}, {reason}")


async def await_described(site: Site, *words: str) -> None:
    async def shown() -> bool:
        text = await kubectl(site)("describe", "service", "web")
        return all(word in text for word in words)

    await until(shown, f"{words} in kubectl describe")


async def status(site: Site, *options: str) -> str:
    """Return the output of `fairlead status --cluster` with the administrator's kubeconfig."""
    files = ("--kubeconfig", str(site.directory.kubeconfig), "--config", str(site.directory.config))
    return await fairlead(site.name, "status", "--cluster", *files, *options)


async def fairlead(lab: str, *words: str) -> str:
    """Return the output of the `fairlead` command on this machine."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        PROGRAM, *words, stdout=pipe, stderr=pipe, env=process.environment(lab, "fairlead")
    )
    async with asyncio.timeout(120):
        output, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return output.decode()


async def instances(site: Site) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (each["role"], each["name"]): each for each in json.loads(await status(site, "-o", "json"))
    }


async def test_fairlead_status_shows_all_roles(web: Web) -> None:
    await await_ready_condition(web.site, "True", "EndpointsReady")
    found = await instances(web.site)
    (controller,) = (each for (role, _), each in found.items() if role == "controller")
    assert controller["state"] == "leads"
    assert found.keys() >= {("gateway", "gw1"), ("gateway", "gw2"), ("node", "node1")}
    gateway = found["gateway", "gw1"]
    assert (
        gateway["state"],
        gateway["interfaces"],
        gateway["served"],
        gateway["not_served_count"],
    ) == (
        "ready",
        ["eth0"],
        1,
        0,
    )
    assert gateway["version"]
    assert gateway["seen_s_ago"] is not None


async def test_killed_gateways_are_reported_and_packets_still_pass(web: Web) -> None:
    site = web.site
    async with Load(site, web.address) as load:
        await site.kill_role("gw1")
        text = await status(site)
        (row,) = [
            row
            for line in text.splitlines()
            if (row := " ".join(line.split())).startswith("gateway gw1 ")
        ]
        assert row.startswith("gateway gw1 gone ")
        assert "by its own clock" in row
        assert "no gateway is alive" not in text
        await await_ready_condition(site, "True", "GatewayGone")

        await site.kill_role("gw2")
        await await_ready_condition(site, "False", "NoGateway")
        await await_described(site, "Warning", "NoGateway", "no gateway is alive", web.address)
        assert "no gateway is alive" in await status(site)

        await site.start_role("gw1")
        await await_ready_condition(site, "True", "GatewayGone")
        await await_described(site, "Normal", "Recovered", "NoGateway no longer holds")
        await site.start_role("gw2")
        check_unharmed(await load.take())


async def test_removing_a_gateway_deletes_its_lease(web: Web) -> None:
    site = web.site
    await site.stop_role("gw2")
    assert ("gateway", "gw2") in await instances(site)
    paths = (
        "--pin-path",
        str(site.directory.pins("gw2")),
        "--proxy-path",
        str(site.directory.proxy("gw2")),
    )
    files = (
        "--config",
        str(site.directory.config),
        "--kubeconfig",
        str(site.directory.kubeconfig_inside),
    )
    code, _, errors = await site.exec(
        "gw2", [PROGRAM, "gateway", "--cleanup", "--node-name", "gw2", *paths, *files]
    )
    assert code == 0, errors
    assert ("gateway", "gw2") not in await instances(site)


async def test_missing_gateways_are_reported() -> None:
    name = f"none{os.getpid()}"
    try:
        await fairlead("tests", "lab", "up", "--name", name, "--gateways", "0", "--nodes", "1")
        site = Site.open(name)
        web = Web(site)
        web.gateways = ()
        await web.create()
        await web.start(("node1",))
        assert web.address
        await await_ready_condition(site, "False", "NoGateway")
        await await_described(site, "Warning", "NoGateway", "no gateway is alive")
        assert "no gateway is alive" in await status(site)
    finally:
        await tear_down(name)
