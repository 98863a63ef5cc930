"""IP addresses and CIDRs as they stand in objects, read as Kubernetes' own components read them.

In: text that somebody else wrote. Out: the one way of writing it that all of Fairlead compares, or
None. Pure. Old objects may hold what today's API server refuses: `010.0.0.1`, whose zeros Go's
early parsers took for decimal (`k8s.io/utils/net`, ParseIPSloppy, ParseCIDRSloppy), and bits set
behind the prefix."""

import ipaddress
import socket
from functools import lru_cache

from fairlead.net.address import canonical


@lru_cache(maxsize=65536)
def read_address(text: str) -> str | None:
    """`203.0.113.7`, `2001:db8::1`; None if it is none. An IPv4-mapped one is the IPv4 address, as
    in Go; with a zone it is an address of one host's link, and none for a cluster."""
    try:
        # As nearly all are written: this takes four plain numbers alone, and for each address there
        # is one way to write them.
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


def read_network(text: str) -> str | None:
    """`203.0.113.0/24`; None if it is none. A prefix length must be there, as in
    ParseCIDRSloppy."""
    address, slash, length = text.strip().partition("/")
    if not slash or not length.isdecimal():
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
