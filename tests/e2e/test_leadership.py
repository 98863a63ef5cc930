"""Two controllers, of which one is the leader: after any change of leadership, every Service has
its own address, which was written once."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.process import Process
from fairlead.lab.rundir import ApiServerKind
from fairlead.lab.server import real_server
from fairlead.lab.site import Site

LEASE = ObjectKey("fairlead-system", "fairlead-controller")
DEADLINE_S = 60.0


class Controllers:
    """The lab's own controller, and further ones that the test starts."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def start(self, name: str) -> Process:
        files = self.site.directory
        argv = [str(Path(sys.executable).with_name("fairlead")), "controller", "--listen", ""]
        argv += [
            "--config",
            str(files.config),
            "--kubeconfig",
            str(files.kubeconfig_of("controller")),
        ]
        return self.site.spawn("control", argv, label=f"control/{name}")

    async def holder(self) -> str:
        async with self.site.client() as client:
            return (await client.get(LEASES, LEASE)).spec.holder_identity or ""

    async def other_than(self, before: str) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while (now := await self.holder()) in ("", before):
                await asyncio.sleep(0.05)
        return now


async def create(site: Site, names: list[str]) -> None:
    async with site.client() as client:
        for name in names:
            body = {
                "metadata": {"name": name},
                "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
            }
            await client.create(SERVICES, body, namespace="default")
            await asyncio.sleep(0.02)


async def addresses(site: Site, names: list[str]) -> dict[str, str]:
    """Wait until each Service has its address."""
    async with site.client() as client, asyncio.timeout(DEADLINE_S):
        while True:
            services = {
                each.metadata.name: each
                for each in await client.list(SERVICES, namespace="default")
            }
            shown = {name: services[name].status.load_balancer.ingress for name in names}
            if all(shown.values()):
                return {name: ingress[0].ip for name, ingress in shown.items()}
            await asyncio.sleep(0.1)


class Written(NamedTuple):
    """How often the address of each Service was written, according to the API server's log.
    `interrupted`: Services whose write got no answer because the writer was killed; the write may
    have taken effect or not."""

    times: Counter[str]
    interrupted: set[str]


def published(site: Site) -> Written:
    writes = [
        (path.split("/")[-2], code)
        for path, query, code in patches(site)
        if "fieldManager=fairlead-publish" in query
    ]
    return Written(
        Counter(name for name, code in writes if code == 200),
        {name for name, code in writes if code not in (200, 409)},
    )


def patches(site: Site) -> Iterator[tuple[str, str, int]]:
    """Return path, query and status code of every PATCH in the API server's log."""
    if site.size.apiserver == "embedded":
        with urllib.request.urlopen(f"{site.url}/_requests", timeout=10) as answer:
            yield from (
                (each["path"], each["query"], 200)
                for each in json.load(answer)
                if each["method"] == "PATCH"
            )
        return
    for line in (
        real_server(site.topology, site.directory).audit_log.read_text().splitlines(keepends=True)
    ):
        if not line.endswith("\n"):
            # This line is incomplete: its request is later than all complete ones.
            continue
        told = json.loads(line)
        if told["verb"] == "patch" and told["stage"] in ("ResponseComplete", "Panic"):
            path, _, query = told["requestURI"].partition("?")
            yield path, query, told.get("responseStatus", {}).get("code", 0)


GATE = (("embedded", signal.SIGKILL), ("real", signal.SIGTERM))
"""The rows that `make test` runs: one with each API server."""


@pytest.fixture
async def site(apiserver: ApiServerKind) -> AsyncIterator[Site]:
    made = Site.create(f"leaders{os.getpid()}", nodes=1, apiserver=apiserver)
    await made.up()
    try:
        yield made
    finally:
        await made.down()


@pytest.mark.parametrize(
    ("apiserver", "ending"),
    [
        pytest.param(
            apiserver,
            ending,
            id=f"{apiserver}-{ending.name}",
            marks=() if (apiserver, ending) in GATE else pytest.mark.soak,
        )
        for apiserver in ("embedded", "real")
        for ending in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    ],
    indirect=["apiserver"],
)
async def test_every_service_gets_one_address_when_the_leader_changes(
    site: Site, ending: signal.Signals
) -> None:
    controllers = Controllers(site)
    leader = process.one(site.name, "control/controller")
    before = await controllers.holder()
    second = controllers.start("second")
    try:
        names = [f"{ending.name.lower()}-{number}" for number in range(60)]
        load = asyncio.ensure_future(create(site, names))
        await asyncio.sleep(0.6)
        leader.send(ending)
        # Leadership may change again before the end: on a busy machine a controller may fail to
        # renew in time, and lose the Lease.
        await controllers.other_than(before)
        if ending == signal.SIGSTOP:
            leader.send(signal.SIGCONT)
        await load
        assigned = await addresses(site, names)
        assert len(set(assigned.values())) == len(names), "two Services on one address"
        written = published(site)
        wrong = {name: written.times[name] for name in names if written.times[name] != 1}
        assert {
            name for name, times in wrong.items() if times or name not in written.interrupted
        } == set(), f"written so often: {wrong}"
    finally:
        await second.stop(5)
