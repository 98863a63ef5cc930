"""Labs are created and removed: at the same time, interrupted, or after any process was killed.
Nothing is left."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import Refused
from fairlead.lab import namespace, process
from fairlead.lab.rundir import ROOT
from fairlead.lab.server import SERVER_LABEL
from fairlead.lab.site import CLUSTER_LABEL, Site, tear_down

pytestmark = pytest.mark.root

DEADLINE_S = 60


def pod(name: str) -> dict[str, Any]:
    container = {"name": "c", "image": "echo", "ports": [{"containerPort": 8080}]}
    spec = {"nodeName": "node1", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def answering_pod(site: Site) -> str:
    """Return the name of the first pod of node1, as it reports itself."""
    _, output, errors = await site.exec(
        "client1", ["curl", "-sS", "-m", "5", "http://10.244.1.2:8080/"]
    )
    assert output, errors
    return str(json.loads(output)["pod"])


def traces(lab: str) -> list[str]:
    """Return all processes, files and namespaces of a lab that exist on the machine."""
    found = [*namespace.names(f"fl-{lab}-"), *(running.label for running in process.find(lab))]
    mounts = [
        line
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if f"/fl-{lab}-" in line
    ]
    links = [
        path.name for path in Path("/sys/class/net").iterdir() if path.name not in ("lo", "eth0")
    ]
    directory = [str(ROOT / lab)] if (ROOT / lab).exists() else []
    return [
        *found,
        *mounts,
        *directory,
        *(link for link in links if link.startswith(("pod", "node", "gw", "client"))),
    ]


async def test_two_labs_are_created_and_removed_twice_at_the_same_time(lab_name: str) -> None:
    async with Site.create(f"{lab_name}stays", nodes=1, gateways=0, clients=1, roles=False) as site:
        await site.apply([pod("stays")])
        await site.await_pods()
        await up_and_down_twice(lab_name)
        assert await answering_pod(site) == "stays"


async def up_and_down_twice(lab_name: str) -> None:
    other = Site.create(lab_name, nodes=1, gateways=0, clients=1, roles=False)
    for _ in range(2):
        async with other:
            await other.apply([pod("a")])
            await other.await_pods()
            assert await answering_pod(other) == "a"
            with pytest.raises(Refused, match="exists already"):
                await Site.create(lab_name).up()
            assert await answering_pod(other) == "a"
        assert traces(lab_name) == []


async def test_a_lab_with_a_real_api_server_leaves_nothing(
    real_programs: None, lab_name: str
) -> None:
    async with Site.create(
        lab_name, nodes=1, gateways=0, clients=1, roles=False, apiserver="real"
    ) as lab:
        await lab.apply([pod("a")])
        await lab.await_pods()
        assert await answering_pod(lab) == "a"
        assert {"lab/etcd", "lab/kube-apiserver", "lab/forwarder"} <= {
            each.label for each in process.find(lab_name)
        }
    assert traces(lab_name) == []


@pytest.mark.parametrize("name", ["../x", "..", "", "a/b", "A"])
async def test_an_invalid_name_removes_nothing(name: str) -> None:
    with pytest.raises(Refused, match="not a valid lab name"):
        await tear_down(name)
    with pytest.raises(Refused, match="not a valid lab name"):
        Site.open(name)


@pytest.mark.parametrize("victim", [CLUSTER_LABEL, SERVER_LABEL])
async def test_down_leaves_nothing_after_a_process_was_killed(lab_name: str, victim: str) -> None:
    lab = Site.create(lab_name, nodes=1, gateways=0, clients=0, roles=False)
    await lab.up()
    try:
        await lab.apply([pod("a")])
        await lab.await_pods()
        lab.spawn("node1", ["sleep", "600"])
        assert len(traces(lab_name)) > 5
        await process.one(lab_name, victim).kill()
    finally:
        await lab.down()
    assert traces(lab_name) == []
    await lab.down()


async def test_a_restarted_control_plane_restarts_the_pods(lab_name: str) -> None:
    async with Site.create(lab_name, nodes=1, gateways=0, clients=0, roles=False) as lab:
        await lab.apply([pod("a")])
        await lab.await_pods()
        before = process.one(lab_name, "pod/node1/default.a").pid
        await process.one(lab_name, CLUSTER_LABEL).kill()
        assert process.one(lab_name, "pod/node1/default.a").pid == before
        await lab.start_cluster()

        async with asyncio.timeout(DEADLINE_S):
            while not any(found.pid != before for found in process.find(lab_name, "pod/")):
                await asyncio.sleep(0.02)
        await lab.await_pods()


async def test_an_interrupted_up_leaves_nothing(lab_name: str) -> None:
    steps: list[str] = []

    async def give_up() -> None:
        task = asyncio.current_task()
        assert task is not None

        def progress(step: str) -> None:
            steps.append(step)
            if step == "API server":
                task.cancel()

        await Site.create(lab_name, nodes=1, gateways=1, clients=1, roles=False).up(progress)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.get_running_loop().create_task(give_up())
    assert steps[-1] == "API server"
    assert traces(lab_name) == []
