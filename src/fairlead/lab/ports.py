"""Ports for servers on this machine's loopback that somebody else is to bind.

In: how many, of which kind. Out: ports on which nobody listens, and which no connection gets as its
own before they are bound: those come from 32768 up (net.ipv4.ip_local_port_range), nodePorts from
30000 up."""

import random
import socket
from contextlib import suppress

PORTS = range(10000, 30000)


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """So many, all different."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with suppress(OSError), socket.socket(socket.AF_INET, kind) as tried:
            tried.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """One."""
    return free_ports(1, kind)[0]
