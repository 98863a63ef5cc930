"""Parse IP addresses and CIDRs in objects as Kubernetes' own components do.

In: text written by a user or another program. Out: the canonical form, which all of Fairlead
compares, or None. Pure. Old objects may contain values that current API servers reject:
`010.0.0.1`, whose leading zeros Go's early parsers ignored (`k8s.io/utils/net`, ParseIPSloppy,
ParseCIDRSloppy), and host bits in a network address."""

import ipaddress
import socket
from functools import lru_cache

from fairlead.net.address import canonical, join_host_port, split_host_port

MAX_LENGTH = 64
"""The maximum length of an address or a CIDR. The longest forms have 45 and 49 characters. A longer
text, of which there may be thousands, is neither read nor stored in a cache."""


def read_address(text: str) -> str | None:
    """Return the canonical form, such as `203.0.113.7` or `2001:db8::1`; None if the text is not an
    address.

    An IPv4-mapped address is returned as the IPv4 address, as in Go. An address with a zone is
    valid only on one link of one host, so it is not an address in a cluster: None."""
    return _read(text) if len(text) <= MAX_LENGTH else None


@lru_cache(maxsize=65536)
def _read(text: str) -> str | None:
    try:
        # Fast path for nearly all addresses. For IPv4, inet_pton accepts only four decimal numbers
        # without leading zeros, so the text is already canonical.
        socket.inet_pton(socket.AF_INET, text)
    except (ValueError, OSError):
        return _read_sloppily(text)
    return text


def _read_sloppily(text: str) -> str | None:
    address = _decimal(text.strip())
    try:
        return None if "%" in address else canonical(address)
    except (ValueError, OSError):
        return None


def read_peer(text: str) -> str | None:
    """Return `address:port` in its canonical form; None if the text is no address and port, or the
    address is not that of a host that others can reach."""
    try:
        host, port = split_host_port(text[: MAX_LENGTH + 1])
    except ValueError:
        return None
    address = read_address(host)
    if address is None:
        return None
    parsed = ipaddress.ip_address(address)
    if parsed.is_multicast or parsed.is_unspecified or parsed.is_loopback or parsed.is_link_local:
        return None
    return join_host_port(address, port)


def read_network(text: str) -> str | None:
    """Return the canonical form, such as `203.0.113.0/24`; None if the text is not a CIDR.

    The prefix length is required, as in ParseCIDRSloppy."""
    address, slash, length = text.strip().partition("/")
    if len(text) > MAX_LENGTH or not slash or not (length.isascii() and length.isdecimal()):
        return None
    try:
        return str(ipaddress.ip_network(f"{_decimal(address)}/{length}", strict=False))
    except ValueError:
        return None


def _decimal(address: str) -> str:
    parts = address.split(".")
    return (
        ".".join(part.lstrip("0") or "0" for part in parts)
        if all(part.isdecimal() for part in parts)
        else address
    )
