"""nftables over netlink, for operations that libnftables cannot do or does slowly: rules with wide
concatenations, many elements, and counts of rules without their expressions.

In: a table, a chain, expressions; elements of its sets (`nfelements`). Out: the chain with that one
rule, or the changed elements, in one transaction; the elements of a set; the number of rules of
each chain. Invariant: a transaction is applied as a whole or not at all. Follows
linux/netfilter/nf_tables.h and nfnetlink.h.

Why a rule is added here: libnftables 1.0.6 (Debian 12) aborts the process ("Assertion `dreg <
ctx->reg_low' failed") on a map update whose key or value is a concatenation of more than 16 bytes,
that is, on every one with an IPv6 address."""

import contextlib
import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.net.netlink import (
    ACK,
    APPEND,
    CREATE,
    DONE,
    DUMP,
    DUMP_INTERRUPTED,
    ERROR,
    SOL_NETLINK,
    attribute,
    attributes,
    code_of,
    message,
    messages,
)
from fairlead.net.nfelements import Listed, changing, listed, listing

INET = 1
"""NFPROTO_INET: tables of family `inet`."""

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_CHAIN, _NEW_RULE, _GET_RULE, _NEW_GENERATION, _GET_GENERATION = 3, 6, 7, 15, 16
_NEW_ELEMENT, _GET_ELEMENT, _DELETE_ELEMENT = 12, 13, 14
_NESTED = 0x8000
_HEADER_BYTES = 4
"""The size of struct nfgenmsg, which precedes the attributes."""
_SO_SNDBUFFORCE, _CAP_ACK = 32, 10
_SEND_BYTES = 16 << 20
"""A batch is one datagram: 5,000 elements are half a megabyte; the elements of the largest Service
take more."""

_META_NFPROTO, _META_L4PROTO = 15, 16
_EQUAL = 0
_CT_PROTO_DST, _CT_SRC_IP6, _CT_DST_IP6 = 12, 21, 22
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_DYNSET_UPDATE = 1
_ATTEMPTS = 20
"""The number of attempts to read rules while they change."""
_REGISTER = 8
"""NFT_REG32_00: registers of 4 bytes; a concatenation occupies consecutive registers."""


class ElementChange(NamedTuple):
    """Elements of one set to add or delete, made by `nfelements.element`."""

    verb: Literal["delete", "add"]
    set: str
    elements: Iterable[bytes]


class Expression(NamedTuple):
    """One expression of a rule: its name and its attributes."""

    name: str
    attributes: bytes


def update_ipv6_map(map_name: str, timeout_s: int) -> tuple[Expression, ...]:
    """Return the rule `update @map { ct original ip6 daddr . meta l4proto . ct original proto-dst .
    ct original ip6 saddr timeout Ns : ip6 daddr . th dport }`, for IPv6 packets."""
    original = attribute(3, b"\0")
    ipv6 = attribute(3 | _NESTED, attribute(1, bytes([socket.AF_INET6])))
    return (
        Expression("meta", _number(2, _META_NFPROTO) + _number(1, _REGISTER)),
        Expression("cmp", _number(1, _REGISTER) + _number(2, _EQUAL) + ipv6),
        Expression("ct", _number(2, _CT_DST_IP6) + original + _number(1, _REGISTER)),
        Expression("meta", _number(2, _META_L4PROTO) + _number(1, _REGISTER + 4)),
        Expression("ct", _number(2, _CT_PROTO_DST) + original + _number(1, _REGISTER + 5)),
        Expression("ct", _number(2, _CT_SRC_IP6) + original + _number(1, _REGISTER + 6)),
        _payload(_NETWORK_HEADER, offset=24, length=16, register=_REGISTER + 10),
        _payload(_TRANSPORT_HEADER, offset=2, length=2, register=_REGISTER + 14),
        Expression(
            "dynset",
            _text(1, map_name)
            + _number(3, _DYNSET_UPDATE)
            + _number(4, _REGISTER)
            + _number(5, _REGISTER + 10)
            + attribute(6, struct.pack(">Q", timeout_s * 1000)),
        ),
    )


class RulesetChanges:
    """Whether any process in this network namespace has changed nftables rules since the last call.
    A call takes 20 us. Close it after use."""

    def __init__(self) -> None:
        self._netlink: Nfnetlink | None = None
        self._generation = -1

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        if self._netlink is not None:
            self._netlink.close()

    def seen(self) -> bool:
        """Return whether there was a change, or this is the first call. Raise the errors of
        `Nfnetlink.generation`."""
        self._netlink = self._netlink or Nfnetlink()
        before, self._generation = self._generation, self._netlink.generation()
        return self._generation != before


class Nfnetlink:
    """A netfilter netlink socket. It belongs to the network namespace in which it was created."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.settimeout(timeout_s)
        # With NETLINK_CAP_ACK an error response does not contain the request.
        self._socket.setsockopt(SOL_NETLINK, _CAP_ACK, 1)
        # Without this permission the process cannot change rules either, which is reported then.
        with contextlib.suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BYTES)
        self._sequence = 0

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()

    def generation(self) -> int:
        """Return the generation ID of the ruleset.

        It increases with every transaction of any process in this namespace, and not when packets
        add elements to a map. Raise Refused without permission, Unavailable if the kernel does not
        respond."""
        self._sequence += 1
        try:
            self._socket.send(
                _message(
                    _SUBSYSTEM << 8 | _GET_GENERATION,
                    0,
                    socket.AF_UNSPEC,
                    b"",
                    sequence=self._sequence,
                )
            )
            while True:
                answer = self._socket.recv(65536)
                # An error is the only response to its request.
                _acknowledgements(answer, self._sequence)
                kind, sequence = struct.unpack_from("=4xH2xI", answer)
                if kind == _SUBSYSTEM << 8 | _NEW_GENERATION and sequence == self._sequence:
                    (number,) = struct.unpack_from(">I", answer, 24)  # NFTA_GEN_ID comes first
                    return int(number)
        except PermissionError as error:
            tried = f"reading the generation of the nftables ruleset: {error.strerror}"
            raise Refused(
                tried, fix="run as root or with CAP_NET_ADMIN in this network namespace"
            ) from error
        except OSError as error:
            raise Unavailable(
                "reading the generation of the nftables ruleset failed: "
                f"{error.strerror or 'timed out'}"
            ) from error

    def rules(self, table: str) -> Counter[str]:
        """Return the number of rules of each chain of the table of family `inet`; empty if there is
        no such table.

        Raise Unavailable if the kernel does not respond, or other processes change rules during all
        attempts."""
        try:
            for _ in range(_ATTEMPTS):
                chains = list(self._dump_chains(table))
                if "" not in chains:
                    return Counter(chains)
        except OSError as error:
            raise Unavailable(
                f"counting the rules of table inet {table} over netlink failed: "
                f"{error.strerror or 'timed out'}"
            ) from error
        raise Unavailable(
            f"counting the rules of table inet {table} over netlink: other processes keep changing "
            "them"
        )

    def _dump_chains(self, table: str) -> Iterator[str]:
        """Yield the chain of each rule, and an empty string if rules changed during the dump."""
        self._sequence += 1
        request = _message(
            _SUBSYSTEM << 8 | _GET_RULE, DUMP, INET, _text(1, table), sequence=self._sequence
        )
        self._socket.send(request)
        while True:
            received = self._socket.recv(1 << 16)
            _acknowledgements(received, self._sequence)
            for kind, flags, sequence, body in messages(received):
                if sequence != self._sequence:
                    continue
                if flags & DUMP_INTERRUPTED:
                    yield ""
                if kind == DONE:
                    return
                if kind == _SUBSYSTEM << 8 | _NEW_RULE:
                    found = dict(attributes(body, _HEADER_BYTES))
                    if found[1].rstrip(b"\0").decode() == table:
                        yield found[2].rstrip(b"\0").decode()

    def change(self, table: str, changes: Iterable[ElementChange]) -> None:
        """Apply all changes, in their order, in one transaction. Blocks: thousands of elements take
        some tens of milliseconds.

        Raise Conflict if a set, an element to delete or the target chain of a verdict is missing,
        or an element exists with another value; Refused without permission; otherwise
        Unavailable."""
        self._sequence += 1
        begin = self._sequence
        bodies = [
            (each.verb, each.set, body)
            for each in changes
            for body in changing(table, each.set, each.elements)
        ]
        if not bodies:
            return
        parts = [
            _message(_BATCH_BEGIN, 0, socket.AF_UNSPEC, b"", resource=_SUBSYSTEM, sequence=begin)
        ]
        about = {begin: "committing changes of elements"}
        for verb, name, body in bodies:
            self._sequence += 1
            about[self._sequence] = f"{verb} element inet {table} {name}"
            kind, flags = (_DELETE_ELEMENT, 0) if verb == "delete" else (_NEW_ELEMENT, CREATE)
            last = ACK if self._sequence == begin + len(bodies) else 0
            parts.append(
                _message(_SUBSYSTEM << 8 | kind, flags | last, INET, body, sequence=self._sequence)
            )
        parts.append(_message(_BATCH_END, 0, socket.AF_UNSPEC, b"", resource=_SUBSYSTEM))
        try:
            self._socket.send(b"".join(parts))
            self._acknowledged(about)
        except OSError as error:
            raise _failure("changing elements over netlink", error) from error

    def elements(self, table: str, name: str) -> list[Listed]:
        """Return the elements of a set; an empty list if there is no such set.

        Elements that change meanwhile may be included or missing. Others may be missing too while
        the kernel grows or shrinks the hash table of the set, some milliseconds after changes
        (nft_rhash_walk in net/netfilter/nft_set_hash.c goes on when the walk is interrupted). Raise
        Refused without permission,
        otherwise Unavailable."""
        self._sequence += 1
        found: list[Listed] = []
        try:
            body = listing(table, name)
            self._socket.send(
                _message(_SUBSYSTEM << 8 | _GET_ELEMENT, DUMP, INET, body, sequence=self._sequence)
            )
            while True:
                for kind, _, sequence, body in messages(self._socket.recv(1 << 17)):
                    if sequence != self._sequence:
                        continue
                    if kind == DONE:
                        return found
                    if kind == ERROR:
                        if (code := code_of(body)) == errno.ENOENT:
                            return []
                        raise OSError(code, os.strerror(code))
                    found += listed(body[_HEADER_BYTES:])
        except OSError as error:
            raise _failure(
                f"listing the elements of {name} in table inet {table}", error
            ) from error

    def _acknowledged(self, about: Mapping[int, str]) -> None:
        """Wait until the last message of a batch is acknowledged. Raise the error of the first
        message that was rejected."""
        last = max(about)
        while True:
            for kind, _, sequence, body in messages(self._socket.recv(1 << 17)):
                if kind != ERROR or sequence not in about:
                    continue  # a response to a previous batch that was rejected
                if code := code_of(body):
                    raise _failure(about[sequence], OSError(code, os.strerror(code)))
                if sequence == last:
                    return

    def add_chain(self, table: str, chain: str, rule: tuple[Expression, ...]) -> None:
        """Create the chain in the table of family `inet`, with this one rule. Blocks briefly.

        Raise Conflict if the table or a map is missing, Refused without permission or on an old
        kernel, otherwise Unavailable."""
        try:
            self._sequence += 1
            self._socket.send(_batch(table, chain, rule, self._sequence))
            acknowledged = 0
            while acknowledged < 2:
                acknowledged += _acknowledgements(self._socket.recv(65536), self._sequence)
        except OSError as error:
            raise _failure(
                f"adding chain {chain} to table inet {table} over netlink", error
            ) from error


def _failure(tried: str, error: OSError) -> FairleadError:
    """Return the error to raise for an error response of the kernel, or for none in time."""
    if isinstance(error, TimeoutError):
        return Unavailable(f"{tried}: no response in time")
    text = f"{tried}: {error.strerror}"
    match error.errno:
        case errno.ENOENT | errno.EEXIST | errno.EBUSY:
            return Conflict(text)
        case errno.EPERM | errno.EOPNOTSUPP | errno.EINVAL:
            return Refused(text, fix="use CAP_NET_ADMIN and Linux 5.10 or newer")
    return Unavailable(text)


def _batch(table: str, chain: str, rule: tuple[Expression, ...], sequence: int) -> bytes:
    listed = b"".join(
        attribute(
            1 | _NESTED, _text(1, expression.name) + attribute(2 | _NESTED, expression.attributes)
        )
        for expression in rule
    )
    here = _text(1, table)
    return b"".join(
        (
            _message(_BATCH_BEGIN, 0, socket.AF_UNSPEC, b"", resource=_SUBSYSTEM),
            _message(
                _SUBSYSTEM << 8 | _NEW_CHAIN,
                ACK | CREATE,
                INET,
                here + _text(3, chain),
                sequence=sequence,
            ),
            _message(
                _SUBSYSTEM << 8 | _NEW_RULE,
                ACK | CREATE | APPEND,
                INET,
                here + _text(2, chain) + attribute(4 | _NESTED, listed),
                sequence=sequence,
            ),
            _message(_BATCH_END, 0, socket.AF_UNSPEC, b"", resource=_SUBSYSTEM),
        )
    )


def _acknowledgements(received: bytes, sequence: int) -> int:
    """Return how many messages with this sequence number are acknowledged. Raise OSError for the
    first that was rejected.

    Responses to a previous batch may still arrive: a rejected batch leaves several."""
    count = 0
    for kind, _, number, body in messages(received):
        if kind == ERROR and number == sequence:
            if code := code_of(body):
                raise OSError(code, os.strerror(code))
            count += 1
    return count


def _message(
    kind: int, flags: int, family: int, body: bytes, *, resource: int = 0, sequence: int = 0
) -> bytes:
    return message(kind, flags, struct.pack(">BBH", family, 0, resource) + body, sequence=sequence)


def _payload(base: int, *, offset: int, length: int, register: int) -> Expression:
    return Expression(
        "payload", _number(1, register) + _number(2, base) + _number(3, offset) + _number(4, length)
    )


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")
