"""Forward a port of this machine to an address inside a network namespace.

`python -m fairlead.lab.forwarder NAMESPACE ADDRESS PORT READY_FILE`. In: a network namespace and an
address and port in it. Out: a free port on 127.0.0.1; the ready file contains its URL,
`https://127.0.0.1:PORT`. Bytes are forwarded unchanged, TLS included.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from fairlead.lab import namespace

BLOCK_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 10.0


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection until it ends, then end the other side's input."""
    with suppress(ConnectionError):
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Forwarder:
    """A TCP forwarder that opens one connection inside the namespace for each connection it
    accepts."""

    def __init__(self, inside: str, address: str, port: int) -> None:
        self._inside = inside
        self._target = (address, port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until both sides have ended it or one side has aborted it."""
        try:
            sock = namespace.make_socket(self._inside)
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, self._target)
            far_reader, far_writer = await asyncio.open_connection(sock=sock)
        except OSError:  # no listener at the target: reset the client, as a connection inside is
            writer.transport.abort()
            return
        try:
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()


async def _main(inside: str, address: str, port: str, ready_file: str) -> None:
    forwarder = Forwarder(inside, address, int(port))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await asyncio.start_server(forwarder.serve, "127.0.0.1", 0) as server:
        here = server.sockets[0].getsockname()[1]
        _write_atomically(
            Path(ready_file), msgspec.json.encode({"urls": [f"https://127.0.0.1:{here}"]})
        )
        await stop.wait()


def _write_atomically(path: Path, content: bytes) -> None:
    """Write the file atomically, so that a process that waits for it never reads a part of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
