"""Listening TCP sockets on all addresses of this host, or on some.

In: a port number, addresses. Out: sockets that listen and do not block.
"""

import contextlib
import errno
import socket
from collections.abc import Callable, Collection

from fairlead.net.address import socket_family

EVERYWHERE = ("0.0.0.0", "::")
"""Every address of this host. An IP family that this host does not have is skipped."""


def listen(
    number: int,
    addresses: Collection[str],
    *,
    backlog: int,
    prepare: Callable[[socket.socket], None] = lambda _: None,
) -> list[socket.socket]:
    """Return a listening socket for each of the addresses, or a single one for EVERYWHERE, because
    a node may have ten thousand ports. `prepare`: called with each socket before it listens.

    Raise OSError: EADDRINUSE if the port is taken at one of the addresses, EADDRNOTAVAIL if one of
    them does not belong to this host."""
    if tuple(addresses) == EVERYWHERE:
        with contextlib.suppress(_NoFamily):
            return [_listening("::", number, backlog, prepare, both=True)]
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as on_failure:
        for address in addresses:
            with contextlib.suppress(_NoFamily):
                sockets.append(_listening(address, number, backlog, prepare))
                on_failure.callback(sockets[-1].close)
        on_failure.pop_all()
    return sockets


class _NoFamily(Exception):
    """This host has no addresses of the family."""


def _listening(
    address: str,
    number: int,
    backlog: int,
    prepare: Callable[[socket.socket], None],
    *,
    both: bool = False,
) -> socket.socket:
    """Return a listening socket. `both`: it accepts IPv4 as well. Raise OSError or _NoFamily."""
    family = socket_family(address)
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            raise _NoFamily from error
        raise
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        prepare(listener)
        listener.bind((address, number))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if address == "::" and error.errno == errno.EADDRNOTAVAIL:  # IPv6 is disabled
            raise _NoFamily from error
        raise
    return listener
