"""The command `fairlead doctor`: its output, its exit status, and its progress."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from tests.doctor.inprocess import DEADLINE_S, SHORT, Background, run_doctor

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import PODS, SERVICES
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.settings import kubeconfig

PROGRAM = Path(sys.executable).with_name("fairlead")
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


class Cluster:
    """An API server in a thread, with a Service whose selector has no pod."""

    def __init__(self, background: Background, path: Path) -> None:
        self.run = background.run
        self.path = path
        self._stack = AsyncExitStack()

    async def up(self) -> None:
        self.server = await self._stack.enter_async_context(ApiServer())
        access = Access(self.server.url)
        self.client = await self._stack.enter_async_context(Client(access))
        await self.client.create(SERVICES, WEB)
        await self.client.patch(SERVICES, ("default", "web"), SHOWN, subresource="status")
        self.path.write_text(kubeconfig("doctor", access))

    async def down(self) -> None:
        await self._stack.aclose()

    async def serve(self) -> None:
        await self.client.create(PODS, POD)
        await self.client.patch(PODS, ("default", "w"), READY, subresource="status")

    def doctor(self, *options: str) -> tuple[int, str, str]:
        return run_doctor("--kubeconfig", str(self.path), *options)

    @property
    def words(self) -> list[str]:
        """The command line of a process."""
        return [str(PROGRAM), "doctor", "--kubeconfig", str(self.path), *SHORT]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Background() as background:
        cluster = Cluster(background, tmp_path / "kubeconfig")
        background.run(cluster.up())
        yield cluster
        background.run(cluster.down())


def test_the_formats_contain_the_same_findings(cluster: Cluster) -> None:
    status, table, errors = cluster.doctor()
    assert (status, errors) == (1, "")
    assert table.startswith("ERROR  SelectorMatchesNothing  Service default/web\n")
    assert (
        "1 Service looked at (default/web, served by an unknown controller), 1 finding\n" in table
    )
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        status, text, _ = cluster.doctor("-o", output)
        report = read(text)
        (found,) = report["findings"]
        assert (status, found["code"]) == (1, "SelectorMatchesNothing")
        assert {"subject", "severity", "message", "known_by", "remedy", "actor"} <= found.keys()
        assert {"service": "default/web", "owner": "an unknown controller"} in report["services"]


def test_without_findings_the_status_is_0_and_what_was_not_looked_at_is_said(
    cluster: Cluster,
) -> None:
    cluster.run(cluster.serve())
    status, output, _ = cluster.doctor("web")
    assert (status, output.partition(", nothing wrong\n")[0]) == (
        0,
        "1 Service looked at (default/web, served by an unknown controller)",
    )
    assert "not looked at: packets, kernels of hosts, and clouds" in output


def test_services_are_those_of_the_namespace_unless_all_are_wanted(cluster: Cluster) -> None:
    status, output, _ = cluster.doctor("-n", "kube-system")
    assert (status, output.splitlines()[0]) == (0, "0 Services looked at")
    assert "namespace kube-system has no Service of type LoadBalancer; -A looks" in output
    assert cluster.doctor("-A")[0] == 1
    assert cluster.doctor("default/web", "-n", "shop")[0] == 2
    assert cluster.doctor("web", "-A")[0] == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["unknown"], "Service default/unknown does not exist; see `kubectl get services -n def"),
        (["wep"], "Service default/wep does not exist; did you mean default/web?"),
        (["web", "-n", "shop"], "Service shop/web does not exist; did you mean default/web?"),
        (["-n", "shop"], "namespace shop does not exist; see `kubectl get namespaces`"),
        (["a/b/c"], "'a/b/c' is no name of a Service; write NAMESPACE/NAME, or NAME"),
        (["/web"], "'/web' is no name of a Service; write NAMESPACE/NAME, or NAME"),
    ],
)
def test_what_does_not_exist_is_not_healthy(
    options: list[str], problem: str, cluster: Cluster
) -> None:
    status, output, errors = cluster.doctor(*options)
    assert (status, output) == (2, "")
    assert errors.startswith(f"fairlead: {problem}")


def test_a_dead_api_server_is_not_healthy(cluster: Cluster) -> None:
    cluster.server.faults.add(Fault("reset", "GET", "/services", count=0))
    status, output, errors = cluster.doctor()
    assert (status, output) == (2, "")
    assert errors.startswith("fairlead: ")
    cluster.run(cluster.down())
    status, output, errors = cluster.doctor()
    assert (status, output) == (2, "")
    assert "GET http" in errors
    assert errors.endswith(
        "failed: Connection refused; check that an API server runs at this address, and that "
        "this host can reach it\n"
    )


def test_a_terminal_shows_what_the_command_waits_for(cluster: Cluster) -> None:
    ours, theirs = pty.openpty()

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            *cluster.words, stdout=asyncio.subprocess.DEVNULL, stderr=theirs
        )
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()

    asyncio.run(run())
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\r\x1b[Kreading services" in shown
    assert shown.endswith("\r\x1b[K")


def test_an_interrupted_command_says_so_and_has_a_status_of_its_own(cluster: Cluster) -> None:
    cluster.server.requests.clear()
    cluster.server.faults.add(Fault("stall", "GET", "/services", count=0))

    async def run() -> tuple[int | None, bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            *cluster.words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DEADLINE_S):
            while not len(cluster.server.requests):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            output, errors = await process.communicate()
        return process.returncode, output, errors

    status, output, errors = asyncio.run(run())
    assert (status, output) == (INTERRUPTED, b"")
    assert errors == b"fairlead: interrupted before the end\n"
