"""The handshake of a real HAProxy with members: the last packet contains data, and no side waits
needlessly, whether the client or the server sends first."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.drivers.proxy.site import (
    NODE_PORT,
    VIP,
    address_of,
    balancer,
    new_answers,
    nodes,
    opened,
    reconcile,
)

from fairlead.model import ProxyHeader, ProxySettings

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

TRIES = 20
ALL_FRAMES = 3
OUTGOING = 4
SYN = 0x02
SO_RCVBUFFORCE = 33
"""A socket option of Linux for which the socket module has no name."""
WITHIN_S = 60


@asynccontextmanager
async def greeters(header: ProxyHeader) -> AsyncIterator[None]:
    """Run a server on node1 that sends first, after it has received the header."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if header == "v2":
            start = await reader.readexactly(16)
            await reader.readexactly(struct.unpack_from("!H", start, 14)[0])
        elif header == "v1":
            await reader.readline()
        writer.write(b"220 node1\r\n")
        writer.write((await reader.readline()).upper())
        writer.close()

    server = await asyncio.start_server(greet, address_of("node1"), NODE_PORT)
    try:
        yield
    finally:
        server.close()


def openings(frames: list[bytes]) -> list[int]:
    """Return, for each connection to a node, the number of bytes in the packet after its SYN."""
    found: dict[int, int] = {}
    for frame in frames:
        at = 14 + (frame[14] & 15) * 4
        source, destination, _, _, offset, flags = struct.unpack_from("!HHIIBB", frame, at)
        if frame[23] == socket.IPPROTO_TCP and destination == NODE_PORT and not flags & SYN:
            length = struct.unpack_from("!H", frame, 16)[0]
            found.setdefault(source, length - (frame[14] & 15) * 4 - (offset >> 4) * 4)
    return list(found.values())


async def test_the_header_is_sent_with_the_last_packet_of_the_handshake(folder: Path) -> None:
    """The header is always in the last packet of the handshake, unless HAProxy does not run within
    40 ms; then the kernel sends an empty packet. Without the socket option the kernel would always
    send an empty packet first."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES)) as wire:
        wire.setblocking(False)
        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
        async with nodes("node1"), opened(folder) as driver:
            await reconcile(driver, balancer({"node1": 1}, settings=ProxySettings(header="v2")))
            assert {node for node, _, _ in await new_answers(TRIES)} == {"node1"}
        frames = []
        while True:
            try:
                frame, (_, _, way, _, _) = wire.recvfrom(2048)
            except BlockingIOError:
                break
            if way != OUTGOING and frame[12:14] == b"\x08\x00":
                frames.append(frame)
    seen = openings(frames)
    assert len(seen) == TRIES
    assert any(seen), seen


@pytest.mark.parametrize("header", ["", "v1", "v2"])
async def test_a_client_may_wait_for_a_server_that_speaks_first(
    folder: Path, header: ProxyHeader
) -> None:
    async with greeters(header), opened(folder) as driver, asyncio.timeout(WITHIN_S):
        await reconcile(driver, balancer({"node1": 1}, settings=ProxySettings(header=header)))
        reader, writer = await asyncio.open_connection(VIP, 80, local_addr=("127.0.0.1", 0))
        assert await reader.readline() == b"220 node1\r\n"
        writer.write(b"helo\n")
        assert await reader.readline() == b"HELO\n"
        writer.close()
