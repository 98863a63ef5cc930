"""`fairlead probe` as users run it: results, exit status, the metrics, Services of a cluster, and
Ctrl-C."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "probe" / "deployment.yaml"
DEADLINE_S = 60.0
BODY = b'{"pod": "web-1", "peer": "127.0.0.1"}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
NAMESPACE = "probed"
PROBE = (sys.executable, "-m", "fairlead", "probe")
CHILDREN: list[asyncio.subprocess.Process] = []
"""The processes of the present test."""


@asynccontextmanager
async def serving(accepted: list[object] | None = None) -> AsyncIterator[int]:
    """Serve HTTP on loopback during the block. Each connection is added to `accepted`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if accepted is not None:
            accepted.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def is_called(accepted: list[object]) -> bool:
    """Return whether connections arrive within twenty intervals."""
    before = len(accepted)
    await asyncio.sleep(0.4)
    return len(accepted) > before


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(autouse=True)
async def children() -> AsyncIterator[None]:
    """Ends the processes that a failed test leaves."""
    yield
    while CHILDREN:
        child = CHILDREN.pop()
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def run(*words: str) -> asyncio.subprocess.Process:
    """Start a program in a process group of its own."""
    pipe = asyncio.subprocess.PIPE
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONUNBUFFERED": "1"}
    child = await asyncio.create_subprocess_exec(
        *words, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    CHILDREN.append(child)
    return child


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await run(*PROBE, *arguments)


async def ended(child: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(DEADLINE_S):
        output, errors = await child.communicate()
    assert child.returncode is not None
    return child.returncode, output.decode(), errors.decode()


async def probed(*arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of the command."""
    return await ended(await start(*arguments))


async def test_answers_end_with_status_0_and_a_table() -> None:
    async with serving() as port:
        target = f"http://127.0.0.1:{port}"
        status, output, errors = await probed(
            target, "--interval=0.02", "--timeout=20", "--duration=1"
        )
    assert (status, errors) == (0, "")
    header, row = output.splitlines()
    cells = dict(zip(header.split(), row.split("   "), strict=False))
    assert cells["TARGET"] == target
    assert "100 % of" in row
    assert "kept" in row
    assert "web-1 100 %" in row


async def test_a_silent_target_ends_with_status_1_and_says_since_when() -> None:
    async with serving() as port:
        silent, good = f"127.0.0.1:{closed_port()}", f"http://127.0.0.1:{port}"
        arguments = ("--interval=0.02", "--timeout=20", "--duration=1", "-o", "json")
        status, output, _ = await probed(silent, good, *arguments)
    lines = [json.loads(line) for line in output.splitlines()]
    (event,) = [each for each in lines if "event" in each]
    assert (event["event"], event["target"]) == ("gap-begun", silent)
    assert event["message"] == "no answer: connection refused"
    reports = {each["target"]: each for each in lines if "answered" in each}
    assert status == 1
    assert reports[good]["failed"] == 0
    assert reports[good]["answered"] > 5
    assert reports[good]["clients"] == reports[good]["own_addresses"]
    assert reports[good]["pods"] == {"web-1": reports[good]["answered"]}
    assert reports[silent]["answered"] == 0
    (gap,) = reports[silent]["gaps"]
    assert (gap["over"], gap["problem"]) == (False, "connection refused")
    assert gap["begun"] == event["time"]


async def test_ctrl_c_shows_the_results() -> None:
    async with serving() as port:
        child = await start(f"http://127.0.0.1:{port}", f"127.0.0.1:{closed_port()}")
        assert child.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            first = await child.stdout.readline()
        assert b"connection refused" in first
        child.send_signal(signal.SIGINT)
        status, output, errors = await ended(child)
    assert status == 1
    assert output.startswith("TARGET")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give at least one TARGET"),
        (("192.0.2.1",), "'192.0.2.1' has no port"),
        (("udp://192.0.2.1:53",), "cannot call udp"),
        (("192.0.2.1:80", "-n", "shop"), "belong to --services"),
        (("192.0.2.1:80", "--interval", "0"), "0.0 is not in the range"),
        (("192.0.2.1:80", "--interval", "nan"), "nan is not a number of seconds"),
        (("192.0.2.1:80", "--listen", "foo"), "--listen foo: not [ADDRESS]:PORT"),
        (("192.0.2.1:80", "--listen", "192.0.2.1:9450"), "cannot listen on 192.0.2.1:9450"),
        (("--services", "--kubeconfig", "/nonexistent/config"), "/nonexistent/config"),
    ],
)
async def test_what_cannot_be_probed_is_said(arguments: tuple[str, ...], said: str) -> None:
    status, output, errors = await probed(*arguments)
    assert status == 2
    assert output == ""
    assert said in errors
    assert "Traceback" not in errors


async def test_without_an_api_server_there_is_one_message(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "current-context: a\n"
        "contexts: [{name: a, context: {cluster: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n"
    )
    status, output, errors = await probed("--services", "--kubeconfig", str(kubeconfig))
    assert (status, output) == (2, "")
    assert errors.startswith("fairlead: GET http://127.0.0.1:1/api/v1/services failed: ")
    assert len(errors.splitlines()) == 1


async def probe_with_limit(limit: str) -> tuple[list[dict[str, Any]], str]:
    """Probe 60 targets with this `ulimit`. Return the lines of the output, and the errors."""
    async with serving() as port:
        targets = " ".join(f"http://127.0.0.1:{port}/{number}" for number in range(60))
        options = "-o json --duration 2 --timeout 20 --interval 0.5"
        _, output, errors = await ended(
            await run(*("sh", "-c", f"ulimit {limit}; exec {' '.join(PROBE)} {options} {targets}"))
        )
    return [json.loads(line) for line in output.splitlines()], errors


async def test_a_lack_of_file_descriptors_is_not_a_failure_of_the_target() -> None:
    lines, errors = await probe_with_limit("-n 20")
    assert not any(each["event"] == "gap-begun" for each in lines if "event" in each)
    assert sum(each["unknown"] for each in lines if "event" not in each)
    assert "no resources for them (too many open files)" in errors
    assert "Traceback" not in errors


async def test_all_file_descriptors_that_the_host_permits_are_used() -> None:
    lines, errors = await probe_with_limit("-S -n 20")
    assert len(lines) == 60
    assert all(each["answered"] for each in lines)
    assert "no resources" not in errors


async def test_a_closed_output_ends_the_probe() -> None:
    targets = f"127.0.0.1:{closed_port()} 127.0.0.2:{closed_port()}"
    child = await run("sh", "-c", f"{' '.join(PROBE)} --interval 0.1 {targets} | head -1")
    _, output, errors = await ended(child)
    assert "connection refused" in output
    assert errors == ""


async def test_no_result_is_not_a_success() -> None:
    status, _, errors = await probed(f"127.0.0.1:{closed_port()}", "--duration=0")
    assert (status, "no call has a result" in errors) == (2, True)


async def test_metrics_are_served_while_it_runs() -> None:
    listen = closed_port()
    async with serving() as port:
        target = f"http://127.0.0.1:{port}"
        child = await start(target, "--interval=0.02", f"--listen=127.0.0.1:{listen}")
        try:
            text = ""
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
                while f'fairlead_probe_answers{{target="{target}"}} 1.0' not in text:
                    await asyncio.sleep(0.05)
                    with suppress(aiohttp.ClientError):
                        async with session.get(f"http://127.0.0.1:{listen}/metrics") as answer:
                            text = await answer.text()
        finally:
            child.send_signal(signal.SIGTERM)
            status, _, _ = await ended(child)
    assert status == 0
    assert f'fairlead_probe_pods_total{{pod="web-1",target="{target}"}}' in text
    assert f'fairlead_probe_clients_total{{address="kept",target="{target}"}}' in text


async def test_an_api_server_accepts_the_example(real_apiserver: KubeApiServer) -> None:
    (deployment,) = yaml.safe_load_all(EXAMPLE.read_text())
    async with Client(real_apiserver.access) as client:
        await client.request(
            "POST",
            "/apis/apps/v1/namespaces/default/deployments",
            parameters={"dryRun": "All", "fieldValidation": "Strict"},
            body=deployment,
        )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    status, _, errors = await probed(*container["args"][1:])
    assert (status, "/etc/fairlead/kubeconfig" in errors) == (2, True)


async def test_the_services_of_a_cluster_are_called_as_they_come_and_go(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(settings.kubeconfig("real", real_apiserver.access))
    accepted: list[object] = []
    async with serving(accepted) as port, Client(real_apiserver.access) as client:
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
        child = await start(
            *("--services", "-n", NAMESPACE, "--kubeconfig", str(kubeconfig)),
            *("--interval=0.02", "--timeout=20", "-o", "json"),
        )
        assert child.stderr is not None
        spec = {"type": "LoadBalancer", "ports": [{"port": port, "appProtocol": "http"}]}
        made = {"metadata": {"name": "web", "namespace": NAMESPACE}, "spec": spec}
        await client.create(SERVICES, made)
        async with asyncio.timeout(DEADLINE_S):
            said = await child.stderr.readline()
        assert said == f"fairlead: {NAMESPACE}/web has no address\n".encode()
        status = {"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}]}}
        key = (NAMESPACE, "web")
        await client.patch(SERVICES, key, {"status": status}, subresource="status")
        async with asyncio.timeout(DEADLINE_S):
            while len(accepted) < 10:
                await asyncio.sleep(0.02)
        await client.delete(SERVICES, key)
        async with asyncio.timeout(DEADLINE_S):
            while await is_called(accepted):
                pass
        child.send_signal(signal.SIGINT)
        code, output, errors = await ended(child)
    assert code == 0, errors
    (report,) = (json.loads(line) for line in output.splitlines())
    assert report["target"] == f"{NAMESPACE}/web 127.0.0.1:{port}"
    assert report["answered"] > 0
    assert report["failed"] == 0
