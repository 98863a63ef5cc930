"""Replies of BIRD 2 and BIRD 3 as values; malformed answers are errors with their text."""

import asyncio
from pathlib import Path

import pytest

from fairlead.errors import Refused, Unavailable
from fairlead.net.bird import Bird
from fairlead.net.bird_replies import (
    BfdSession,
    Channel,
    Line,
    Protocol,
    TableRoute,
    bfd_sessions_of,
    protocols_of,
    routes_of,
)

PROTOCOLS = """\
2002-Name       Proto      Table      State  Since         Info
1002-device1    Device     ---        up     2026-11-24 15:02:28
1006-
1002-p.tor-1    BGP        ---        up     2026-11-24 15:02:29.123  Established
1006-  BGP state:          Established
     Neighbor address: 198.51.100.254
     Neighbor AS:      64512
     Local AS:         64513
   Channel ipv4
     State:          UP
     Table:          master4
     Routes:         0 imported, 17 exported, 0 preferred
     BGP Next hop:   198.51.100.1
   Channel ipv6
     State:          UP
     Routes:         0 imported, 2 exported, 0 preferred
     BGP Next hop:   :: fe80::1
1002-p.tor-2    BGP        ---        start  15:04:19.248  Active        Socket: Connection refused
1006-  BGP state:          Active
     Last error:       Socket: Connection refused
     Unknown field:    of a newer version
0000
"""
ROUTES = """\
1007-Table master4:
 203.0.113.1/32       unreachable [fairlead4 2026-11-24 15:02:28] * (200)
1008-\tType: static univ
1012-\tBGP.local_pref: 200
 \tBGP.community: (64512,100) (65535,0)
1007-
 Table master6:
 2001:db8:f::1/128    unreachable [fairlead6 2026-11-24 15:02:28] * (200)
1012-\tbgp_community: (1,2)
0000
"""
BFD = """\
1020-bfd1:
 IP address                Interface  State      Since         Interval  Timeout
 198.51.100.254            e0         Up         2026-11-24 15:02:29    0.100    0.500
0000
"""


def lines(text: str) -> list[Line]:
    found: list[Line] = []
    for each in text.splitlines():
        if each.startswith(" "):
            found.append(Line(found[-1].code, each[1:]))
        else:
            found.append(Line(int(each[:4]), each[5:]))
    return found


def test_protocols() -> None:
    device, up, down = protocols_of(lines(PROTOCOLS))
    assert device == Protocol("device1", "Device", "up", "2026-11-24 15:02:28", "")
    assert up == Protocol(
        "p.tor-1",
        "BGP",
        "up",
        "2026-11-24 15:02:29.123",
        "Established",
        "Established",
        "198.51.100.254",
        64512,
        "",
        (Channel("ipv4", "UP", 17, "198.51.100.1"), Channel("ipv6", "UP", 2, "fe80::1")),
    )
    assert up.established
    assert (down.state, down.since) == ("start", "15:04:19.248")
    assert down.last_error == "Socket: Connection refused"
    assert not down.established


def test_routes_and_bfd_sessions() -> None:
    assert routes_of(lines(ROUTES)) == (
        TableRoute(
            "203.0.113.1/32",
            "fairlead4",
            (
                ("type", "static univ"),
                ("local_pref", "200"),
                ("community", "(64512,100) (65535,0)"),
            ),
        ),
        TableRoute("2001:db8:f::1/128", "fairlead6", (("community", "(1,2)"),)),
    )
    assert bfd_sessions_of(lines(BFD)) == (BfdSession("198.51.100.254", "e0", "Up"),)


@pytest.mark.parametrize(
    "text", ["", "1002-\n0000 \n", "1006-  Channel ipv4\n0000 \n", "1020-x y\n"]
)
def test_incomplete_rows_are_left_out(text: str) -> None:
    assert protocols_of(lines(text)) == ()
    assert routes_of(lines(text)) == ()
    assert bfd_sessions_of(lines(text)) == ()


async def ask(path: Path, *answers: bytes) -> Bird:
    """Serve a greeting and the answers at the socket, as a broken BIRD would."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[0])
        for each in answers[1:]:
            await reader.readline()
            writer.write(each)
        await writer.drain()
        writer.close()

    await asyncio.start_unix_server(serve, path)
    return Bird(path)


GREETING = b"0001 BIRD 2.0.12 ready.\n"


async def test_an_answer_ends_with_its_last_line(tmp_path: Path) -> None:
    bird = await ask(
        tmp_path / "b", GREETING, b"1000-BIRD 3.1.8\n1011-Router ID is 1.2.3.4\n0013 up\n"
    )
    assert await bird.version() == "3.1.8"
    assert await bird.router_id() == "1.2.3.4"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((GREETING, b"garbage\n"), "malformed answer 'garbage'"),
        ((GREETING, b"1000-BIRD 2.0.12\n"), "for 'show status'"),
        ((b"9999 go away\n",), "unexpected greeting 'go away'"),
        ((GREETING, b"\xff\xfe\n"), "malformed answer"),
        ((b"",), "for 'show status'"),
    ],
)
async def test_a_malformed_answer_is_an_error_with_its_text(
    tmp_path: Path, answers: tuple[bytes, ...], words: str
) -> None:
    bird = await ask(tmp_path / "b", *answers)
    with pytest.raises(Unavailable, match="asking BIRD at") as raised:
        await bird.version()
    assert words in str(raised.value)


async def test_a_rejected_command_is_refused_with_the_text_of_bird(tmp_path: Path) -> None:
    reply = b"0002-Reading configuration from x\n8002 x, line 3: syntax error\n"
    bird = await ask(tmp_path / "b", GREETING, reply)
    with pytest.raises(Refused, match="line 3: syntax error"):
        await bird.configure()


async def test_a_configuration_that_waits_for_the_previous_one_is_accepted(tmp_path: Path) -> None:
    reply = (
        b"0002-Reading configuration from x\n"
        b"0005 Reconfiguration already in progress, queueing new config\n"
    )
    await (await ask(tmp_path / "b", GREETING, reply)).configure()


async def test_a_missing_socket_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        await Bird(tmp_path / "none").version()
