"""Find free ports on this machine's loopback for servers that another process will bind.

In: a number and a socket type. Out: ports that are free, and that the kernel does not assign to a
connection in the meantime: it assigns ports from 32768 (net.ipv4.ip_local_port_range). Ports from
30000 are nodePorts.
"""

import random
import socket
from contextlib import suppress

PORTS = range(10000, 30000)


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """Return `count` different free ports."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with suppress(OSError), socket.socket(socket.AF_INET, kind) as tried:
            tried.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """Return one free port."""
    return free_ports(1, kind)[0]
