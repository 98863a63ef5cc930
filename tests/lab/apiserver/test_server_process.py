"""The API server as a process: its ready file, an inherited socket, and an immediate stop."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

DEADLINE_S = 60


@asynccontextmanager
async def running(
    ready: Path, *arguments: str, pass_fds: Sequence[int] = ()
) -> AsyncIterator[tuple[Any, asyncio.subprocess.Process]]:
    """Run the process; yield it and the content of its ready file. Kill it at the end if it still
    runs."""
    command = [
        sys.executable,
        "-m",
        "fairlead.lab.apiserver",
        "--ready-file",
        str(ready),
        *arguments,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, pass_fds=pass_fds, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (line := await asyncio.to_thread(_read, ready)):
                assert process.returncode is None, "the server ended before it was ready"
                await asyncio.sleep(0.02)
        yield json.loads(line), process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_exits_at_once_with_an_open_watch(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with running(tmp_path / "ready", "--listen", "127.0.0.1:0", "--listen", "[::1]:0") as (
        output,
        process,
    ):
        assert output["pid"] == process.pid
        assert len(output["urls"]) == 2
        async with aiohttp.ClientSession() as session:
            for url in output["urls"]:
                async with session.get(f"{url}/api/v1/namespaces/default") as answer:
                    assert (await answer.json())["metadata"]["name"] == "default"
            async with session.get(f"{output['urls'][0]}/api/v1/services?watch=true") as watch:
                process.send_signal(number)
                async with asyncio.timeout(DEADLINE_S):
                    assert await watch.content.read() == b""
                    assert await process.wait() == 0


async def test_the_process_serves_on_an_inherited_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.fileno()
        arguments = ("--fd", str(descriptor), "--service-cidr", "2001:db8:96::/112")
        async with running(tmp_path / "ready", *arguments, pass_fds=[descriptor]) as (
            output,
            process,
        ):
            listener.close()
            assert output["urls"] == [f"http://127.0.0.1:{port}"]
            async with aiohttp.ClientSession() as session:
                url = f"{output['urls'][0]}/api/v1/namespaces/default/services"
                service = {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}}
                async with session.post(url, json=service) as answer:
                    assert (await answer.json())["spec"]["ipFamilies"] == ["IPv6"]
                fault = {"action": "refuse", "refuse_s": 0.2}
                async with session.post(f"{output['urls'][0]}/_faults", json=fault):
                    pass
                async with asyncio.timeout(DEADLINE_S):
                    while not await _answers(session, url):
                        await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == 0


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_an_address_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "fairlead.lab.apiserver", "--listen", address]
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        async with asyncio.timeout(DEADLINE_S):
            _, output = await process.communicate()
    assert process.returncode == 1
    assert f"binding the API server to '{address}' failed" in output.decode()
