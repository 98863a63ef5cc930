"""IP addresses, and `address:port`, as text.

In: texts that are addresses. Out: their family, their one canonical form, their 16 bytes, and
`address:port` taken apart and put together as RFC 3986 has it (`[2001:db8::1]:80`). Pure. Texts of
Kubernetes objects, which may be anything, are read by `kube.networks`."""

import ipaddress
import socket
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Literal

MAPPED_PREFIX = bytes(10) + b"\xff\xff"
"""The first 12 bytes of an IPv4 address among IPv6 addresses (RFC 4291, section 2.5.5.2)."""
HIGHEST_PORT = 65_535


def is_ipv6(address: str) -> bool:
    """Whether a valid address is of IPv6."""
    return ":" in address


def family_of(address: str) -> Literal["IPv4", "IPv6"]:
    """The family of a valid address."""
    return "IPv6" if ":" in address else "IPv4"


def socket_family(address: str) -> socket.AddressFamily:
    """The family of a socket for a valid address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@lru_cache(maxsize=65536)
def canonical(address: str) -> str:
    """The one way of writing an address. An IPv4-mapped address is the IPv4 address; a zone stays.
    Raises OSError or ValueError for a text that is no address."""
    if ":" not in address:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, address))
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed)


def bracketed(host: str) -> str:
    """The host as it stands before a port: an IPv6 address has brackets around it."""
    return f"[{host}]" if ":" in host else host


def join_host_port(host: str, port: int | str) -> str:
    """`host:port`, as Go's net.JoinHostPort."""
    return f"{bracketed(host)}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The host, without the brackets of an IPv6 address, and the port. Raises ValueError unless
    there are both and the port is from 1 to 65535."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) <= HIGHEST_PORT):
        raise ValueError(f"{text!r} is not address:port")
    return (host[1:-1] if host[0] == "[" and host[-1] == "]" else host), int(port)


def numeric_host(text: str) -> str | None:
    """The address in `address:port`, without the brackets that an IPv6 address must have; None if
    the host is a name or lacks the brackets."""
    host = text.rpartition(":")[0]
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    try:
        return bare if ipaddress.ip_address(bare).version == (4 if bare == host else 6) else None
    except ValueError:
        return None


@lru_cache(maxsize=65536)
def pack_address(text: str) -> bytes:
    """An address in 16 bytes, as programs in the kernel have it."""
    return (
        IPv6Address(text).packed
        if ":" in text
        else MAPPED_PREFIX + socket.inet_pton(socket.AF_INET, text)
    )


def unpack_address(data: bytes) -> str:
    """The address in these 16 bytes."""
    return (
        socket.inet_ntop(socket.AF_INET, data[12:])
        if data.startswith(MAPPED_PREFIX)
        else str(IPv6Address(data))
    )
