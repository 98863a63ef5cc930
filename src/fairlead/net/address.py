"""IP addresses, and `address:port`, as text.

In: texts that are valid addresses, or networks that a person wrote. Out: their family, their
canonical form, their 16 bytes; `address:port` split and joined as in RFC 3986 (`[2001:db8::1]:80`);
what is wrong with a network. Pure. Texts of Kubernetes objects may be invalid, and are parsed by
`kube.networks`."""

import ipaddress
import re
import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

MAPPED_PREFIX = bytes(10) + b"\xff\xff"
"""The first 12 bytes of an IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2)."""
HIGHEST_PORT = 65_535


def is_ipv6(address: str) -> bool:
    """Return whether a valid address is IPv6."""
    return ":" in address


def family_of(address: str) -> Literal["IPv4", "IPv6"]:
    """Return the family of a valid address."""
    return "IPv6" if ":" in address else "IPv4"


def socket_family(address: str) -> socket.AddressFamily:
    """Return the socket family for a valid address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@lru_cache(maxsize=65536)
def canonical(address: str) -> str:
    """Return the canonical form of an address.

    An IPv4-mapped address becomes the IPv4 address; a zone is retained. Raise OSError or ValueError
    for a text that is not an address."""
    if ":" not in address:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, address))
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed)


def bracketed(host: str) -> str:
    """Return the host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def join_host_port(host: str, port: int | str) -> str:
    """Return `host:port`, like Go's net.JoinHostPort."""
    return f"{bracketed(host)}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Return the host, without the brackets of an IPv6 address, and the port.

    Raise ValueError unless there are both and the port is from 1 to 65535."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    valid = bare and not any(each.isspace() or each in "[]/" for each in bare)
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    if not (valid and colon and 0 < number <= HIGHEST_PORT):
        raise ValueError(f"{text!r} is not address:port")
    return bare, number


def numeric_host(text: str) -> str | None:
    """Return the address in `address:port`, without the brackets that an IPv6 address must have;
    None if the host is a name or the brackets are missing."""
    host = text.rpartition(":")[0]
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    try:
        return bare if ipaddress.ip_address(bare).version == (4 if bare == host else 6) else None
    except ValueError:
        return None


def cidr_problem(text: str, *, alone: bool = False) -> tuple[str, str] | None:
    """Return what is wrong with a CIDR, and what to write instead; None if it is valid. An address
    without a prefix length is valid only if it may stand `alone`: more often than a single address,
    a network is meant."""
    address, slash, length = text.partition("/")
    try:
        single = ipaddress.ip_network(address)
    except ValueError:
        return f"{text!r} is not a CIDR", "write a network such as 192.0.2.0/24 or 2001:db8::/64"
    if problem := ambiguity(single.network_address):
        return f"{text} {problem[0]}", problem[1]
    if not slash:
        fix = f"write {single} for this address alone, or the length of the whole network"
        return None if alone else (f"{text} has no prefix length", fix)
    if not re.fullmatch("[0-9]{1,3}", length) or int(length) > single.max_prefixlen:
        longest = f"write a length from 0 to {single.max_prefixlen}"
        return f"{length!r} in {text} is not a prefix length of {family_of(address)}", longest
    if length != str(int(length)):  # Some programs read such a number as octal.
        return f"the prefix length of {text} begins with 0", f"write {address}/{int(length)}"
    network = ipaddress.ip_network(text, strict=False)
    if network.network_address != single.network_address:
        return f"{text} has host bits set", f"write {network}"
    return None


def ambiguity(address: IPv4Address | IPv6Address) -> tuple[str, str] | None:
    """Return why packets have another address than this IPv6 address, and what to write; None if
    they have this one."""
    if isinstance(address, IPv4Address):
        return None
    if (mapped := address.ipv4_mapped) is not None:
        return "is an IPv4-mapped IPv6 address", f"write it as IPv4: {mapped}"
    if address.scope_id is not None:
        return "has a zone, which has a meaning on one host only", f"remove %{address.scope_id}"
    return None


@lru_cache(maxsize=65536)
def pack_address(text: str) -> bytes:
    """Return an address as 16 bytes, the format in eBPF maps (IPv4 as an IPv4-mapped address)."""
    return (
        IPv6Address(text).packed
        if ":" in text
        else MAPPED_PREFIX + socket.inet_pton(socket.AF_INET, text)
    )


def unpack_address(data: bytes) -> str:
    """Return the address in these 16 bytes."""
    return (
        socket.inet_ntop(socket.AF_INET, data[12:])
        if data.startswith(MAPPED_PREFIX)
        else str(IPv6Address(data))
    )
