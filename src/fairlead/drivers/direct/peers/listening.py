"""The port on which other gateways connect, which another process may have.

In: an address, a server. Out: connections for the server, or a Finding about the port. Invariant:
a port that is taken stops nothing: the gateway forwards, follows the others, and tries again.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

import structlog

from fairlead.backoff import Backoff
from fairlead.drivers.direct.peers.server import PeerServer
from fairlead.model import Finding
from fairlead.net.address import split_host_port
from fairlead.net.listening import EVERYWHERE, listen
from fairlead.net.port_holder import holder_of

log = structlog.get_logger()

NOT_LISTENING = "PeersNotListening"
RETRY_S = (0.2, 5.0)
"""The first and the longest delay before the port is tried again."""
BACKLOG = 64


async def serve_at(
    address: str, server: PeerServer, changed: Callable[[Finding | None], None]
) -> None:
    """Accept connections for the server until cancelled. `address`: `address:port`, `*:port` for
    all addresses, empty for none. `changed`: called with a Finding when listening fails, and with
    None as soon as others can connect."""
    listeners: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        if address:
            listeners = await _listening(address, changed)
        for each in listeners:
            loop.add_reader(each.fileno(), server.accept, each)
        await loop.create_future()  # until cancelled
    finally:
        for each in listeners:
            loop.remove_reader(each.fileno())
            each.close()
        await server.close()


async def _listening(
    address: str, changed: Callable[[Finding | None], None]
) -> list[socket.socket]:
    """Return the listening sockets, as soon as listening is possible."""
    host, port = split_host_port(address)
    told: Finding | None = None
    retry = Backoff(*RETRY_S)
    while True:
        try:
            found = listen(port, EVERYWHERE if host == "*" else (host,), backlog=BACKLOG)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            holder = await asyncio.to_thread(holder_of, port) if taken else ""
            finding = not_listening(address, holder, error.strerror or str(error))
            if finding != told:
                log.error("other gateways cannot connect", problem=str(finding))
                changed(finding)
            told = finding
        else:
            if told is not None:
                log.info("other gateways can connect", address=address)
            changed(None)
            return found
        await asyncio.sleep(retry.next_s())


def not_listening(address: str, holder: str, reason: str) -> Finding:
    """Return the Finding about a port that cannot be opened. `holder`: the process that has it, if
    it is known."""
    why = f"{holder} has the port" if holder else reason
    return Finding(
        NOT_LISTENING,
        f"listening on {address} for other gateways failed: {why}. They do not get the flow "
        "entries of this gateway, so connections may break when they move to another gateway",
        "error",
        remedy="stop that process, or set gateway.peerListen to a free port on all gateways"
        if holder
        else "set gateway.peerListen to an address of this host",
    )
