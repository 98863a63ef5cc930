"""`fairlead status` with a role of another release, and with a program that is not a role."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from fairlead.role_state import VERSION

PROGRAM = Path(sys.executable).with_name("fairlead")
NEWER = {"role": "gateway", "version": VERSION + 1, "node": "gw1", "services": "moved"}


async def status_of(body: bytes) -> tuple[int | None, str, str]:
    """Return the output of `fairlead status` for an answer with this body; `ADDRESS` replaces the
    address of the server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("status", "--address", address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode().replace(address, "ADDRESS")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            msgspec.json.encode(NEWER),
            f"GET http://ADDRESS/state: gateway gw1 answered with version {VERSION + 1} of its "
            f"state, and version {VERSION} was expected; run the `fairlead` of the same release",
        ),
        (
            b"<html>",
            "GET http://ADDRESS/state: the answer is not the state of a role: ",
        ),
    ],
)
async def test_the_error_names_the_answering_role_and_the_expected_version(
    body: bytes, words: str
) -> None:
    code, output, errors = await status_of(body)
    assert (code, output) == (1, "")
    assert words in errors
