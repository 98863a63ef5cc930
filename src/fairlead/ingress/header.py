"""The PROXY protocol header that a load balancer writes at the start of a connection: version 1
(text) and version 2 (binary).

In: the address and port of the client and of the destination, of one family. Out: bytes. Pure.
Follows HAProxy's doc/proxy-protocol.txt, sections 2.1 and 2.2.
"""

import struct
from ipaddress import ip_address

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
PROXY_COMMAND = 0x21
TCP4, TCP6 = 0x11, 0x21


def version_1(source: str, source_port: int, target: str, target_port: int) -> bytes:
    """Return a header of version 1 for a TCP connection."""
    family = f"TCP{ip_address(source).version}"
    return f"PROXY {family} {source} {target} {source_port} {target_port}\r\n".encode()


def version_2(source: str, source_port: int, target: str, target_port: int) -> bytes:
    """Return a header of version 2 for a TCP connection, without TLVs."""
    ends = (ip_address(source), ip_address(target))
    family = TCP4 if ends[0].version == 4 else TCP6
    body = ends[0].packed + ends[1].packed + struct.pack("!HH", source_port, target_port)
    return SIGNATURE + struct.pack("!BBH", PROXY_COMMAND, family, len(body)) + body
