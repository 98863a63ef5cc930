"""The command `fairlead doctor` as a process: its output, its exit status, and its progress."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
import yaml

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import PODS, SERVICES
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.settings import kubeconfig

PROGRAM = Path(sys.executable).with_name("fairlead")
DEADLINE_S = 60
INTERRUPTED = 130
WEB = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"port": 80}]},
}
SHOWN = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.99", "ipMode": "VIP"}]}}}
POD = {
    "metadata": {"name": "w", "namespace": "default", "labels": {"app": "web"}},
    "spec": {"containers": [{"name": "web", "image": "web"}], "nodeName": "node1"},
}
READY = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}


class Command:
    """The command line, for an API server with a Service whose selector has no pod."""

    def __init__(self, server: ApiServer, client: Client, config: Path) -> None:
        self.server = server
        self.client = client
        self.words = [
            str(PROGRAM),
            "doctor",
            "--kubeconfig",
            str(config),
            "--grace",
            "0",
            "--observe",
            "0.1",
        ]

    async def __call__(self, *options: str) -> tuple[int | None, str, str]:
        """Run the command. Return its exit status, its output, and its errors."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.words, *options, stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
        assert b"Traceback" not in errors
        return process.returncode, output.decode(), errors.decode()


@pytest_asyncio.fixture
async def command(tmp_path: Path) -> AsyncIterator[Command]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await client.create(SERVICES, WEB)
        await client.patch(SERVICES, ("default", "web"), SHOWN, subresource="status")
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig("doctor", Access(server.url)))
        yield Command(server, client, path)


async def test_the_formats_contain_the_same_findings(command: Command) -> None:
    status, table, errors = await command()
    assert (status, errors) == (1, "")
    assert table.startswith("ERROR  SelectorMatchesNothing  Service default/web\n")
    assert (
        "1 Service looked at (default/web, served by an unknown controller), 1 finding\n" in table
    )
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        status, text, _ = await command("-o", output)
        report = read(text)
        (found,) = report["findings"]
        assert (status, found["code"]) == (1, "SelectorMatchesNothing")
        assert {"subject", "severity", "message", "known_by", "remedy", "actor"} <= found.keys()
        assert {"service": "default/web", "owner": "an unknown controller"} in report["services"]


async def test_without_findings_the_status_is_0_and_what_was_not_looked_at_is_said(
    command: Command,
) -> None:
    await command.client.create(PODS, POD)
    await command.client.patch(PODS, ("default", "w"), READY, subresource="status")
    status, output, _ = await command("web")
    assert (status, output.partition(", nothing wrong\n")[0]) == (
        0,
        "1 Service looked at (default/web, served by an unknown controller)",
    )
    assert "not looked at: packets, kernels of hosts, and clouds" in output


async def test_services_are_those_of_the_namespace_unless_all_are_wanted(command: Command) -> None:
    status, output, _ = await command("-n", "shop")
    assert status == 0
    assert "namespace shop has no Service of type LoadBalancer; -A looks everywhere" in output
    assert (await command("-A"))[0] == 1
    assert (await command("default/web", "-n", "shop"))[0] == 2
    assert (await command("web", "-A"))[0] == 2


async def test_a_service_that_does_not_exist_is_not_healthy(command: Command) -> None:
    status, output, errors = await command("unknown")
    assert (status, output) == (2, "")
    assert "Service default/unknown does not exist" in errors


async def test_a_dead_api_server_is_not_healthy(command: Command) -> None:
    command.server.faults.add(Fault("reset", "GET", "/services", count=0))
    status, output, errors = await command()
    assert (status, output) == (2, "")
    assert errors.startswith("fairlead: ")


async def test_a_terminal_shows_what_the_command_waits_for(command: Command) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *command.words, stdout=asyncio.subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    async with asyncio.timeout(DEADLINE_S):
        await process.wait()
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\r\x1b[Kreading services" in shown
    assert shown.endswith("\r\x1b[K")


async def test_an_interrupted_command_says_so_and_has_a_status_of_its_own(command: Command) -> None:
    command.server.requests.clear()
    command.server.faults.add(Fault("stall", "GET", "/services", count=0))
    process = await asyncio.create_subprocess_exec(
        *command.words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        while not len(command.server.requests):
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    assert (process.returncode, output) == (INTERRUPTED, b"")
    assert errors == b"fairlead: interrupted before the end\n"
