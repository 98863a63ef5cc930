"""The command `fairlead doctor` as a process: its output, its exit status, and `--watch`."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.settings import kubeconfig

pytestmark = pytest.mark.asyncio

PROGRAM = Path(sys.executable).with_name("fairlead")
DEADLINE_S = 60
WEB = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"port": 80}]},
}
SHOWN = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.99", "ipMode": "VIP"}]}}}


@pytest_asyncio.fixture
async def command(tmp_path: Path) -> AsyncIterator[tuple[Client, list[str]]]:
    """An API server with a Service without pods, and the command line."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await client.create(SERVICES, WEB)
        await client.patch(SERVICES, ("default", "web"), SHOWN, subresource="status")
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig("doctor", Access(server.url)))
        yield client, [str(PROGRAM), "doctor", "--kubeconfig", str(path), "--grace", "0"]


async def run(*words: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_formats_contain_the_same_findings(
    command: tuple[Client, list[str]],
) -> None:
    _, words = command
    status, table = await run(*words)
    assert status == 1
    assert table.startswith("BROKEN  selector-matches-nothing  Service default/web\n")
    assert "1 finding, 1 Service examined" in table
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        status, text = await run(*words, "-o", output)
        (found,) = read(text)["findings"]
        assert (status, found["id"]) == (1, "selector-matches-nothing")


async def test_a_watch_prints_findings_that_disappear(command: tuple[Client, list[str]]) -> None:
    client, words = command
    process = await asyncio.create_subprocess_exec(
        *words, "--watch", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while b"1 finding, 1 Service examined" not in await process.stdout.readline():
                pass
            await client.delete(SERVICES, ("default", "web"))
            while b"solved: selector-matches-nothing: Service default/web" not in (
                await process.stdout.readline()
            ):
                pass
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 1
