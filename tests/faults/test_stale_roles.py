"""kube-apiserver hangs (SIGSTOP) or is killed (SIGKILL) in a lab with load: packets are still
forwarded, and every role reports that its state is stale. When the server is back, no Event has
reported that a Service has no gateway."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, Load, Web, fetch, output, until
from tests.e2e.logs import entries_of
from tests.faults.real import RealServer
from tests.faults.test_real_server import check_unharmed

from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.kubeapiserver import LABEL
from fairlead.lab.site import ROLE_PORTS, Site

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

ROLES = {"control": "controller", GATEWAY: "gateway", "node1": "node"}
WATCHES = {
    "control": {
        "services",
        "endpointslices",
        "nodes",
        "namespaces",
        "addresspools",
        "addressgrants",
        "leases",
    },
    GATEWAY: {"services", "endpointslices", "nodes"},
    "node1": {"services", "endpointslices", "nodes"},
}
STALE = "watches of the API server are stale: continuing with the last known state"
CURRENT = "watches of the API server are current again"
DEADLINE_S = 120.0
"""A role logs a stale state at most once a minute. After a hang, a watch may wait for half a minute
before it is started again, and for a minute for a streamed list."""
PROGRAM = str(Path(sys.executable).with_name("fairlead"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(real_programs: None) -> AsyncIterator[Web]:
    async with Site.create(
        f"stale{os.getpid()}", nodes=1, gateways=1, clients=1, apiserver="real"
    ) as site:
        web = Web(site)
        await web.create()
        await web.place(("node1", "node1"))
        await until(lambda: ready(web), "readiness of the Service")
        yield web


async def ready(web: Web) -> str:
    """Return the time at which the Service became ready; empty if it is not ready."""
    async with web.site.client() as client:
        service = await client.get(SERVICES, ObjectKey("default", "web"))
    found = [
        each
        for each in service.status.conditions
        if each.type == "fairlead.io/Ready" and each.status == "True"
    ]
    return found[0].last_transition_time or "" if found else ""


async def code(site: Site, host: str, path: str) -> int:
    """Return the HTTP status code of the role on a host."""
    port = ROLE_PORTS[site.topology.host(host).kind]
    where = f"http://127.0.0.1:{port}{path}"
    return int(
        await output(site, host, "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", where)
    )


async def all_stale(site: Site) -> None:
    for host, watches in WATCHES.items():

        async def is_stale(host: str = host, watches: set[str] = watches) -> bool:
            shown = await fetch(site, host, "/state")
            return {name for name, each in shown["watches"].items() if each["stale"]} == watches

        await until(is_stale, f"the stale state of all watches of {host}")
        assert (await code(site, host, "/readyz"), await code(site, host, "/readyz/current")) == (
            200,
            503,
        )
        metrics = await output(
            site,
            host,
            "curl",
            "-s",
            f"http://127.0.0.1:{ROLE_PORTS[site.topology.host(host).kind]}/metrics",
        )
        assert "fairlead_api_reachable 0.0" in metrics
        assert "continues with a stale state" in await output(site, host, PROGRAM, "status")
        assert "in step with the cluster" not in await output(site, host, PROGRAM, "status")


async def all_current(site: Site) -> None:
    for host in WATCHES:

        async def is_current(host: str = host) -> bool:
            return await code(site, host, "/readyz/current") == 200

        what = f"the current state of all watches of {host}"
        await until(is_current, what, deadline_s=DEADLINE_S)
        assert "in step with the cluster" in await output(site, host, PROGRAM, "status")


async def logged(site: Site, host: str, event: str) -> list[str]:
    """Wait until this is the role's last log line about the age of its state. Return all these
    lines."""
    entries: list[dict[str, Any]] = []

    async def is_last() -> bool:
        nonlocal entries
        log = entries_of(site.directory.log(f"{host}/{ROLES[host]}"))
        entries = [each for each in log if each.get("event") in (STALE, CURRENT)]
        return bool(entries) and entries[-1]["event"] == event

    try:
        await until(is_last, f"the log line of {host}: {event}", deadline_s=DEADLINE_S)
    except AssertionError as late:
        watches = (await fetch(site, host, "/state")).get("watches")
        raise AssertionError(f"{late}; log lines: {entries}; watches now: {watches}") from late
    return [each["event"] for each in entries]


async def check_no_event_about_gateways(web: Web, since: str) -> None:
    async with web.site.client() as client:
        events = json.loads(await client.request("GET", "/api/v1/namespaces/default/events"))[
            "items"
        ]
    assert "NoGateway" not in {event["reason"] for event in events}
    assert await ready(web) == since


async def test_roles_report_stale_state_while_the_api_server_hangs(web: Web) -> None:
    site, server = web.site, process.one(web.site.name, LABEL)
    since = await ready(web)

    async def hang() -> None:
        server.send(signal.SIGSTOP)
        try:
            await all_stale(site)
            # A stale state that ends before the role checks it again is not logged.
            for host in ROLES:
                await logged(site, host, STALE)
        finally:
            server.send(signal.SIGCONT)
        await all_current(site)

    async with Load(site, web.address) as load:
        check_unharmed(await load.counts_during(hang()))
    for host in ROLES:
        lines = await logged(site, host, CURRENT)
        # On a busy machine, the state may have become stale for another reason, too.
        assert lines == [STALE, CURRENT] * (len(lines) // 2), (
            "one line of each type for all watches"
        )
    await check_no_event_about_gateways(web, since)


@pytest.mark.soak
async def test_roles_report_stale_state_after_the_api_server_is_killed(web: Web) -> None:
    server = RealServer(web.site)
    since = await ready(web)

    async def die_and_return() -> None:
        await server.kill(LABEL)
        await all_stale(web.site)
        server.start(LABEL)
        await server.ready()
        await all_current(web.site)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(die_and_return()))
    await check_no_event_about_gateways(web, since)
