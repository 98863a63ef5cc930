"""Malformed answers and notifications: the client reports an error, connects again, and is right.

The server of these tests answers from a script. On its first connection, one message is malformed,
and the server then closes the connection. Later connections are right."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.net.ovsdb_servers import TIMEOUT_S, until

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.ovsdb import Database, Insert, Result, Row, Table, by_uuid, new_uuid
from fairlead.net.ovsdb.framing import Framer
from fairlead.net.ovsdb.operations import Update

NAME = "Lab"
ROW, NEW = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
TRANSACTION = "00000000-0000-0000-0000-00000000000f"
SCHEMA = {
    "name": NAME,
    "version": "1.0.0",
    "tables": {
        "T": {
            "columns": {
                "name": {"type": "string"},
                "vips": {
                    "type": {"key": "string", "value": "string", "min": 0, "max": "unlimited"}
                },
            }
        }
    },
}
SERVER_ROW = {
    "name": NAME,
    "model": "standalone",
    "connected": True,
    "leader": True,
    "cid": ["set", []],
    "index": ["set", []],
}
RIGHT_ROW = {"name": "right", "vips": ["map", [["a", "b"]]]}
EXPECTED = {ROW: Row(ROW, {"name": "right", "vips": {"a": "b"}})}
RESULTS: Mapping[str, Any] = {
    "_Server": [False, TRANSACTION, {"Database": {ROW: {"initial": SERVER_ROW}}}],
    "get_schema": SCHEMA,
    NAME: [False, TRANSACTION, {"T": {ROW: {"initial": RIGHT_ROW}}}],
    "transact": [{"count": 1}],
}
"""The results of requests, by the name of the monitored database or by the method."""
NOTIFICATION = {
    "id": None,
    "method": "update3",
    "params": [NAME, TRANSACTION, {"T": {ROW: {"modify": {"name": "x", "vips": ["map", []]}}}}],
}


class ScriptedServer:
    """`spoil` returns the bytes to send instead of the answer, or None for the right answer."""

    def __init__(
        self,
        spoil: Callable[[str, bytes], bytes | None] = lambda *_: None,
        sends: bytes = b"",
        closes: bool = True,
    ) -> None:
        """`sends`: what the server sends after it has sent the rows. Then it closes the connection,
        if it `closes`."""
        self._closes = closes
        self.received: list[dict[str, Any]] = []
        self.connections = 0
        self._spoil = spoil
        self._sends = sends

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        first = self.connections == 1
        framer = Framer(1 << 20)
        while chunk := await reader.read(1 << 16):
            for each in framer.feed(chunk):
                request = json.loads(each)
                self.received.append(request)
                if "method" in request and request["method"] != "echo":
                    self._answer(request, writer, first)
        writer.close()

    def _answer(self, request: Any, writer: asyncio.StreamWriter, first: bool) -> None:
        method = request["method"]
        name = request["params"][0] if method == "monitor_cond_since" else method
        right = message({"id": request["id"], "result": RESULTS[name], "error": None})
        spoiled = self._spoil(name, right) if first else None
        writer.write(right if spoiled is None else spoiled)
        sends = self._sends if first and name == NAME else b""
        writer.write(sends)
        if spoiled is not None or (sends and self._closes):
            writer.close()


def message(value: Any) -> bytes:
    return json.dumps(value).encode()


async def converse(server: ScriptedServer) -> None:
    """Let a client read the rows and write. Whatever the first connection sent, the rows are
    right in the end, and no exception escapes."""
    escaped: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s"
        listener = await asyncio.start_unix_server(server.serve, path)
        database = Database(NAME, [f"unix:{path}"] * 2, {"T": Table(("name", "vips"))})
        running = asyncio.create_task(database.run())
        try:
            await database.wait_synced(TIMEOUT_S)
            try:
                (result,) = await database.transact(
                    [Update("T", by_uuid(ROW), {"name": "x"})], timeout_s=TIMEOUT_S
                )
            except FairleadError:
                pass
            else:
                assert isinstance(result, Result)
            await until(lambda: database.synced and dict(database.rows("T")) == EXPECTED)
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            listener.close()
    assert escaped == []


values = st.recursive(
    st.sampled_from(
        [None, True, 0, -1, 1.5, 1 << 70, "", "x", ROW, "map", "set", "uuid", "update3"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "error", "result", "T", ROW, "x"]), inner)
    ),
    max_leaves=6,
)


def changed(value: Any, draw: st.DrawFn) -> Any:
    """Return the value with one part replaced, removed or repeated."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)) > 0:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {each: part for each, part in value.items() if each != key}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)) > 0:
        index = draw(st.integers(0, len(value) - 1))
        part = [] if draw(st.integers(0, 5)) == 0 else [changed(value[index], draw)]
        return [*value[:index], *part, *value[index + 1 :]]
    return draw(values)


@st.composite
def spoiled(draw: st.DrawFn, right: bytes) -> bytes:
    """Draw bytes to send instead of a message."""
    match draw(st.integers(0, 4)):
        case 0:
            return draw(st.binary(max_size=40))
        case 1:
            return right[: draw(st.integers(0, len(right) - 1))]
        case 2:
            at = draw(st.integers(0, len(right) - 1))
            return right[:at] + draw(st.binary(min_size=1, max_size=2)) + right[at + 1 :]
    return message(changed(json.loads(right), draw))


@pytest.mark.parametrize("name", list(RESULTS))
@settings(max_examples=60)
@given(data=st.data())
def test_a_malformed_answer_is_an_error_and_the_next_connection_is_right(
    name: str, data: st.DataObject
) -> None:
    def spoil(method: str, right: bytes) -> bytes | None:
        return data.draw(spoiled(right)) if method == name else None

    asyncio.run(converse(ScriptedServer(spoil)))


@settings(max_examples=100)
@given(st.lists(spoiled(message(NOTIFICATION)), min_size=1, max_size=3))
@example([message({**NOTIFICATION, "params": 5 * [[]]})])
@example([message({**NOTIFICATION, "method": "stolen"}), b'{"method":"x"}'])
@example([b'{"id":[{}],"method":"echo","params":"x"}'])
@example([b'{"id":9,"result":' + 100_000 * b"[" + 100_000 * b"]" + b"}"])
@example([100_000 * b'{"a":' + b"1" + 100_000 * b"}"])
@example([b'{"method":"update3","params":' + 9_999 * b"[" + 9_999 * b"]" + b"}"])
def test_malformed_notifications_are_an_error_and_the_next_connection_is_right(
    sent: list[bytes],
) -> None:
    asyncio.run(converse(ScriptedServer(sends=b"".join(sent))))


async def test_an_echo_request_is_answered() -> None:
    asked = message({"id": "e", "method": "echo", "params": [1]})
    server = ScriptedServer(sends=asked, closes=False)
    await converse(server)
    assert {"id": "e", "result": [1], "error": None} in server.received


async def test_a_notification_that_arrives_together_with_the_rows_is_applied_after_them(
    tmp_path: Path,
) -> None:
    server = ScriptedServer(sends=message(NOTIFICATION), closes=False)
    listener = await asyncio.start_unix_server(server.serve, tmp_path / "s")
    database = Database(NAME, [f"unix:{tmp_path}/s"], {"T": Table(("name", "vips"))})
    running = asyncio.create_task(database.run())
    await database.wait_synced(TIMEOUT_S)
    await until(lambda: database.rows("T")[ROW].string("name") == "x")
    assert server.connections == 1
    running.cancel()
    listener.close()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ("unknown method", Refused, "use Open vSwitch 2.13 or later"),
        ({"error": "unknown method", "details": "no"}, Refused, "'unknown method: no'"),
        ({"error": "unknown database", "details": "no"}, Unavailable, "'unknown database: no'"),
        (5, Unavailable, "get_schema was answered by '5'"),
    ],
)
async def test_an_error_of_a_request_is_reported_in_words(
    tmp_path: Path, error: Any, kind: type[FairleadError], text: str
) -> None:
    def spoil(name: str, right: bytes) -> bytes | None:
        return message({**json.loads(right), "error": error}) if name == "get_schema" else None

    listener = await asyncio.start_unix_server(ScriptedServer(spoil).serve, tmp_path / "s")
    database = Database(NAME, [f"unix:{tmp_path}/s"], {})
    running = asyncio.create_task(database.run())
    await until(lambda: database.problem is not None)
    running.cancel()
    listener.close()
    assert isinstance(database.problem, kind)
    assert text in str(database.problem)


async def test_a_server_that_floods_with_echo_requests_and_reads_nothing_is_left(
    tmp_path: Path,
) -> None:
    """The answers that wait for the server are limited: the client reads no further request."""
    asked = message({"id": 1, "method": "echo", "params": [100 * "x"]})

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            while True:
                writer.write(1000 * asked)
                await writer.drain()
        except OSError:
            writer.close()

    listener = await asyncio.start_unix_server(flood, tmp_path / "s")
    database = Database(NAME, [f"unix:{tmp_path}/s"], {}, echo_after_s=0.5, echo_timeout_s=0.5)
    running = asyncio.create_task(database.run())
    await until(lambda: database.problem is not None)
    running.cancel()
    listener.close()
    assert "the server sent nothing for 1 s" in str(database.problem)


def test_a_new_uuid_is_one_of_ovsdb() -> None:
    assert Insert("T", {}, new_uuid()).uuid != new_uuid()
