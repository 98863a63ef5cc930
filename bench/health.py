"""Health ports of many nodes, for a gateway that probes them. Run `python -m bench.health` in the
namespace that has the nodes' addresses.

In: a file with the ports, as JSON. Out: an empty file, created once all ports are served. From then
on, until the process is killed, every request on any of them is answered as kube-proxy does for a
node with one ready pod (pkg/proxy/healthcheck).
"""

import asyncio
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

BODY = b'{"localEndpoints":1}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Load-Balancing-Endpoint-Weight: 1\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
BACKLOG = 512


class Answering(asyncio.Protocol):
    """A connection. It stays open until the prober closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        # A probe is one small segment, so a request never arrives in parts.
        self._transport.write(ANSWER * data.count(b"\r\n\r\n"))


async def main(ports: Sequence[int], serving: Path) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Answering, "0.0.0.0", port, backlog=BACKLOG)
    await asyncio.to_thread(serving.touch)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])))
