"""Replies of BIRD 2.0.12 and 3.1.8 as values, and answers of a BIRD that is broken.

`tests/net/bird` has the replies of a gateway's BIRD (status, protocols, bfd), which reads the
routes of a kernel table and has sessions with a router and with an absent neighbor, and of the BIRD
of that router (routes)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.errors import Refused, Unavailable
from fairlead.net import bird
from fairlead.net.bird import Bird
from fairlead.net.bird_replies import BfdSession, Channel, Protocol, Route

REPLIES = Path(__file__).with_name("bird")
VERSIONS = ("2.0.12", "3.1.8")
GREETING = b"0001 BIRD 2.0.12 ready.\n"


async def serving(path: Path, *answers: bytes, silent: bool = False) -> Bird:
    """Serve a greeting and then an answer to each command, and close the connection unless it shall
    stay `silent`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[0])
        for each in answers[1:]:
            await reader.readline()
            writer.write(each)
        await writer.drain()
        if silent:
            await reader.read()
        writer.close()

    await asyncio.start_unix_server(serve, path)
    return Bird(path, timeout_s=0.1 if silent else 10)


def reply(name: str, version: str) -> bytes:
    return (REPLIES / f"{name}-{version}.txt").read_bytes()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "bird.ctl"


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_protocols_of_both_versions_are_read_alike(place: Path, version: str) -> None:
    found = await (await serving(place, GREETING, reply("protocols", version))).protocols()
    by_name = {each.name: each for each in found}
    assert set(by_name) == {
        "device1",
        "bfd1",
        "fairlead_routes4",
        "fairlead_routes6",
        "fairlead4_1",
        "fairlead6_1",
        "absent",
    }
    up = by_name["fairlead4_1"]
    assert up.since.startswith("22:10:")
    assert up == Protocol(
        "fairlead4_1",
        "BGP",
        "up",
        up.since,
        "Established",
        "Established",
        "192.0.2.1",
        64512,
        "",
        (Channel("ipv4", "UP", 0, 1),),
    )
    assert up.established
    absent = by_name["absent"]
    assert (absent.state, absent.info) == ("start", "Connect Socket: No route to host")
    assert absent.last_error == "Socket: No route to host"
    assert absent.channels == (Channel("ipv4", "DOWN"),)
    assert not absent.established
    assert by_name["fairlead_routes6"].channels == (Channel("ipv6", "UP", 1, 0),)
    assert not by_name["device1"].established


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_routes_of_both_versions_are_read_alike(place: Path, version: str) -> None:
    found = await (await serving(place, GREETING, reply("routes", version))).routes()
    assert [
        (each.prefix, each.kind, each.protocol, each.best, each.next_hops) for each in found
    ] == [
        ("203.0.113.10/32", "unicast", "fairlead4_1", True, (("192.0.2.11", "br0"),)),
        ("203.0.113.10/32", "unicast", "fairlead4_2", False, (("192.0.2.12", "br0"),)),
        ("2001:db8:f::10/128", "unicast", "fairlead6_1", True, (("2001:db8:2::11", "br0"),)),
        ("2001:db8:f::10/128", "unicast", "fairlead6_2", False, (("2001:db8:2::12", "br0"),)),
    ]
    for each in found:
        attributes = dict(each.attributes)
        assert (attributes["path"], attributes["local_pref"]) == ("64513", "100")


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_bfd_sessions_of_both_versions_are_read_alike(place: Path, version: str) -> None:
    found = await (await serving(place, GREETING, reply("bfd", version))).bfd_sessions()
    assert sorted(found, key=lambda each: each.address) == [
        BfdSession("192.0.2.1", "eth0", "Up"),
        BfdSession("192.0.2.99", "eth0", "Down"),
        BfdSession("2001:db8:2::1", "eth0", "Up"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_version_is_read(place: Path, version: str) -> None:
    assert await (await serving(place, GREETING, reply("status", version))).version() == version


async def test_a_date_is_part_of_the_time_of_a_change(place: Path) -> None:
    row = b"1002-tor BGP --- up 2026-11-24 15:02:28.123 Established\n0000 \n"
    (found,) = await (await serving(place, GREETING, row)).protocols()
    assert (found.since, found.info) == ("2026-11-24 15:02:28.123", "Established")


async def test_a_route_without_next_hop_has_its_kind(place: Path) -> None:
    text = b"1007-Table t:\n 203.0.113.1/32       blackhole [k 22:10:07] * (10)\n0000 \n"
    found = await (await serving(place, GREETING, text)).routes()
    assert found == (Route("203.0.113.1/32", "blackhole", "k", True),)


@pytest.mark.parametrize(
    "text", [b"0000 \n", b"1002-\n0000 \n", b"1006-  Channel ipv4\n0000 \n", b"1020-x y\n0000 \n"]
)
async def test_rows_that_are_not_understood_are_left_out(place: Path, text: bytes) -> None:
    server = await serving(place, GREETING, text)
    assert await server.protocols() == ()
    assert await server.routes() == ()
    assert await server.bfd_sessions() == ()


async def test_messages_outside_of_a_reply_are_skipped(place: Path) -> None:
    text = b"+bird: <INFO> reconfigured\n1000-BIRD 3.1.8\n+more\n0013 up\n"
    assert await (await serving(place, GREETING, text)).version() == "3.1.8"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((GREETING, b"garbage\n"), "the line 'garbage' of the answer has no code"),
        ((GREETING, b" continued\n"), "the line ' continued' of the answer has no code"),
        ((GREETING, b"1000-BIRD 2.0.12\n"), "the answer ended after 17 bytes, before its last"),
        ((GREETING, b"1000-BIRD 2.0.12\n0013 u"), "the answer ended after 23 bytes"),
        ((GREETING, b"\xff\xfe\n"), "of the answer has no code"),
        ((b"9999 go away\n",), "the greeting is 'go away'"),
        ((b"",), "the answer ended after 0 bytes"),
    ],
)
async def test_a_malformed_answer_or_one_that_is_cut_off_is_an_error_in_words(
    place: Path, answers: tuple[bytes, ...], words: str
) -> None:
    server = await serving(place, *answers)
    with pytest.raises(Unavailable) as raised:
        await server.version()
    assert str(raised.value).startswith(f"asking BIRD at {place} for 'show status': ")
    assert words in str(raised.value)


@pytest.mark.parametrize("endless", [b"1000-" + b"x" * 5000, b"1000-x\n" * 1000])
async def test_an_answer_that_does_not_end_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, endless: bytes
) -> None:
    monkeypatch.setattr(bird, "MAX_REPLY_BYTES", 1000)
    server = await serving(place, GREETING, endless)
    with pytest.raises(Unavailable, match="the answer is longer than 64 MiB"):
        await server.version()


@pytest.mark.parametrize("answers", [(b"",), (GREETING, b""), (GREETING, b"1000-BIRD\n")])
async def test_an_answer_that_does_not_come_is_an_error(
    place: Path, answers: tuple[bytes, ...]
) -> None:
    server = await serving(place, *answers, silent=True)
    with pytest.raises(Unavailable, match="there was no answer in time"):
        await server.version()


async def test_a_missing_socket_is_an_error(place: Path) -> None:
    with pytest.raises(Unavailable, match="No such file or directory"):
        await Bird(place).version()


@pytest.mark.parametrize(
    ("ask", "answer", "words"),
    [
        (Bird.configure, b"0002-Reading\n8002 x, line 3: syntax error\n", "line 3: syntax error"),
        (lambda one: one.exported("x"), b"9001 syntax error, unexpected\n", "export 'x'': syntax"),
        (Bird.bfd_sessions, b"9001 There are multiple BFD protocols running\n", "multiple BFD"),
    ],
)
async def test_a_rejected_command_is_refused_in_the_words_of_bird(
    place: Path, ask: Callable[[Bird], object], answer: bytes, words: str
) -> None:
    server = await serving(place, GREETING, answer)
    with pytest.raises(Refused) as raised:
        await ask(server)  # type: ignore[misc]
    assert words in str(raised.value)


@pytest.mark.parametrize("code", [b"0003 Reconfigured", b"0004 in progress", b"0005 queued"])
async def test_a_configuration_that_takes_effect_later_is_accepted(
    place: Path, code: bytes
) -> None:
    await (await serving(place, GREETING, b"0002-Reading\n" + code + b"\n")).configure()


async def test_a_configuration_that_is_not_read_is_an_error(place: Path) -> None:
    server = await serving(place, GREETING, b"0007 Shutdown requested, ignored\n")
    with pytest.raises(Unavailable, match="Shutdown requested"):
        await server.configure()


async def test_a_bird_without_bfd_has_no_bfd_sessions(place: Path) -> None:
    answer = b"9001 There is no BFD protocol running\n"
    assert await (await serving(place, GREETING, answer)).bfd_sessions() == ()


async def test_two_commands_in_one_are_not_sent(place: Path) -> None:
    with pytest.raises(ValueError, match="one line"):
        await Bird(place).query("show status\ndown")
