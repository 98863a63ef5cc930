"""One request to an entry point of an ingress, as a client or as a load balancer sends it.

In: an entry point (address and port, with or without TLS) and the variant of the request: without
additions, with a PROXY header of either version that claims a forged source address, or with a
forged X-Forwarded-For. Out: an `Answer`.

The forged addresses are from the ranges for benchmarks of network devices (RFC 2544, RFC 5180). No
client has such an address, so an address of these ranges in an answer or in a log was sent by this
module. Each variant has its own address. Certificates are not verified, because the check finds out
whether a server answers and not which one.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address

from fairlead.errors import plain
from fairlead.ingress import header
from fairlead.ingress.entrypoint import NOT_HTTP, Answer, EntryPoint, Variant
from fairlead.net.address import bracketed, is_ipv6

FORGED: Mapping[Variant, tuple[str, str]] = {
    "v1": ("198.18.254.1", "2001:2:0:fe::1"),
    "v2": ("198.18.254.2", "2001:2:0:fe::2"),
    "forwarded-for": ("198.18.254.3", "2001:2:0:fe::3"),
}
"""The source address that each variant claims: (IPv4, IPv6)."""
FORGED_PORT = 40000
MAX_ANSWER_BYTES = 1 << 16
"""The part of an answer that is read, in bytes. The rest is ignored."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_CANDIDATE = re.compile(r"(?<![\w.:])[0-9a-fA-F:.]{2,60}(?!\w)")


def forged_address(variant: Variant, peer: str) -> str:
    """Return the source address that the variant claims, of the family of the peer's address; empty
    for the variant `plain`."""
    return FORGED[variant][is_ipv6(peer)] if variant in FORGED else ""


async def call(entry_point: EntryPoint, variant: Variant, timeout_s: float) -> Answer:
    """Open a connection, send one request and return the answer.

    Every failure of the network or of the server is an outcome of the answer, not an exception. The
    connection and the answer together take at most `timeout_s` seconds."""
    own = claimed = ""
    writer: asyncio.StreamWriter | None = None
    received = b""
    try:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_connection(
                    entry_point.address, entry_point.port
                )
            except ssl.SSLError:  # It is an OSError too, and must not count as unreachable.
                raise
            except OSError as problem:
                return Answer("unreachable", plain(problem))
            except UnicodeError:  # The hostname of a status has a label that DNS does not allow.
                return Answer("unreachable", "not a valid DNS name")
            own, peer = writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0]
            claimed = forged_address(variant, peer)
            writer.write(_header(variant, peer, entry_point.port))
            if entry_point.tls:
                await writer.start_tls(_context(), server_hostname=entry_point.host or None)
            writer.write(_request(entry_point, claimed if variant == "forwarded-for" else ""))
            while not _is_complete(received) and (part := await reader.read(MAX_ANSWER_BYTES)):
                received += part
    except TimeoutError:
        if writer is None:
            return Answer("unreachable", "no connection in time")
        if not received:
            return Answer("silent", "connected, but no answer in time", own=own, claimed=claimed)
    except OSError as problem:  # Includes ssl.SSLError. Bytes received before a reset count.
        if not received:
            return Answer("rejected", _describe(problem, entry_point), own=own, claimed=claimed)
    finally:
        if writer is not None:
            writer.transport.abort()
    return read_answer(received, own, claimed)


def read_answer(received: bytes, own: str = "", claimed: str = "") -> Answer:
    """Return the answer that the received bytes represent: all bytes of a connection until its end,
    until the body is complete, or until the timeout. Pure."""
    if not received:
        return Answer("rejected", "closed without an answer", own=own, claimed=claimed)
    found = _STATUS.match(received)
    if not found:
        return Answer("rejected", NOT_HTTP, own=own, claimed=claimed)
    status = int(found[1])
    if status == 400:
        return Answer("rejected", "answered 400 Bad Request", 400, own=own, claimed=claimed)
    return Answer(
        "answered",
        f"answered {status}",
        status,
        shown_addresses(received.decode("latin-1")),
        own,
        claimed,
    )


def shown_addresses(text: str) -> tuple[str, ...]:
    """Return every IP address in a text once, in the order of the text.

    IPv4-mapped addresses, which a dual-stack server may write (::ffff:192.0.2.1), become IPv4
    addresses. An address may be followed by a colon and a port."""
    found: dict[str, None] = {}
    for candidate in _CANDIDATE.findall(text):
        if address := _read_address(candidate.rstrip(".:")) or _read_address(
            candidate.rpartition(":")[0]
        ):
            found[address] = None
    return tuple(found)


def _read_address(text: str) -> str:
    """Return the address in its shortest form; empty if the text only resembles one (a time of day,
    a version) or is the unspecified address."""
    try:
        address = ip_address(text)
    except ValueError:
        return ""
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return "" if address.is_unspecified else str(address)


def _header(variant: Variant, peer: str, port: int) -> bytes:
    if variant not in ("v1", "v2"):
        return b""
    write = header.version_1 if variant == "v1" else header.version_2
    return write(forged_address(variant, peer), FORGED_PORT, peer, port)


def _request(entry_point: EntryPoint, forwarded_for: str) -> bytes:
    address = bracketed(entry_point.address)
    lines = [
        f"GET {entry_point.path} HTTP/1.1",
        f"Host: {entry_point.host or address}",
        "User-Agent: fairlead",
        "Connection: close",
    ]
    if forwarded_for:
        lines.append(f"X-Forwarded-For: {forwarded_for}")
    return "\r\n".join((*lines, "", "")).encode()


def _context() -> ssl.SSLContext:
    """Return a TLS context that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _is_complete(received: bytes) -> bool:
    """Whether no further bytes are needed: the body has the length that the head announces, or the
    limit is reached. Without Content-Length the answer ends with the connection."""
    head, found, body = received.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return len(received) >= MAX_ANSWER_BYTES or bool(
        found and length and len(body) >= int(length[1])
    )


def _describe(problem: OSError, entry_point: EntryPoint) -> str:
    if isinstance(problem, ssl.SSLError):
        return "no TLS: " + (problem.reason or "handshake failed").replace("_", " ").lower()
    if isinstance(problem, ConnectionResetError):
        return "closed in the TLS handshake" if entry_point.tls else "reset"
    return plain(problem)
