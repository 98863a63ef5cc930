"""Put into nftables what libnftables cannot write, or writes slowly, and count rules without
listing what they look up, as netlink messages of our own.

In: a table, a chain, expressions; elements of its sets (`nfelements`). Out: the chain with that one
rule, or the elements as wanted, in one transaction; the elements that a set has; how many rules
chains have. Invariant: all of it is there or nothing. Follows linux/netfilter/nf_tables.h and
nfnetlink.h.

Why a rule: libnftables 1.0.6 (Debian 12) ends the process ("Assertion `dreg < ctx->reg_low'
failed") on a map update whose key or value is a concatenation of more than 16 bytes, so on every
one with an IPv6 address in it."""

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
"""Of struct nfgenmsg, before the attributes."""
_SO_SNDBUFFORCE, _CAP_ACK = 32, 10
_SEND_BYTES = 16 << 20
"""A batch is one datagram: 5,000 elements are half a megabyte, those of the largest Service
more."""

_META_NFPROTO, _META_L4PROTO = 15, 16
_EQUAL = 0
_CT_PROTO_DST, _CT_SRC_IP6, _CT_DST_IP6 = 12, 21, 22
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_DYNSET_UPDATE = 1
_READINGS = 20
"""So often rules are read anew because they have changed meanwhile."""
_REGISTER = 8
"""NFT_REG32_00: registers of 4 bytes; a concatenation lies in consecutive ones."""


class ElementChange(NamedTuple):
    """Elements of one set, made by `nfelements.element`, that come or go."""

    verb: Literal["delete", "add"]
    set: str
    elements: Iterable[bytes]


class Expression(NamedTuple):
    """One step of a rule: its kind and its attributes."""

    name: str
    attributes: bytes


def remember_ipv6(map_name: str, timeout_s: int) -> tuple[Expression, ...]:
    """`update @map { ct original ip6 daddr . meta l4proto . ct original proto-dst . ct original ip6
    saddr timeout Ns : ip6 daddr . th dport }`, for packets of IPv6."""
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


class Nfnetlink:
    """A netfilter netlink socket. It belongs to the network namespace in which it was made."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(
            SOL_NETLINK, _CAP_ACK, 1
        )  # a refusal does not repeat what it refuses
        with contextlib.suppress(
            PermissionError
        ):  # whoever may not do this may change no rules either, and is told so then
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BYTES)
        self._sequence = 0

    def close(self) -> None:
        """Give the socket back. May be repeated."""
        self._socket.close()

    def generation(self) -> int:
        """The number of the present ruleset: it grows with every transaction of anybody in this
        namespace, and not when packets fill a map. Raises Refused without the right to ask,
        Unavailable if the kernel does not answer."""
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
                _acknowledgements(
                    answer, self._sequence
                )  # a refusal comes as an error, and nothing after it
                kind, sequence = struct.unpack_from("=4xH2xI", answer)
                if kind == _SUBSYSTEM << 8 | _NEW_GENERATION and sequence == self._sequence:
                    (number,) = struct.unpack_from(">I", answer, 24)  # NFTA_GEN_ID comes first
                    return int(number)
        except PermissionError as error:
            tried = f"asking for the generation of the nftables ruleset: {error.strerror}"
            raise Refused(
                tried, fix="run as root or with CAP_NET_ADMIN in this network namespace"
            ) from error
        except OSError as error:
            raise Unavailable(
                "asking for the generation of the nftables ruleset failed: "
                f"{error.strerror or 'timed out'}"
            ) from error

    def rules(self, table: str) -> Counter[str]:
        """How many rules each chain of the table of family `inet` has; none where there is no such
        table. Raises Unavailable if the kernel does not answer, or others change rules all the
        while."""
        try:
            for _ in range(_READINGS):
                chains = list(self._dumped(table))
                if "" not in chains:
                    return Counter(chains)
        except OSError as error:
            raise Unavailable(
                f"counting the rules of table inet {table} over netlink failed: "
                f"{error.strerror or 'timed out'}"
            ) from error
        raise Unavailable(
            f"counting the rules of table inet {table} over netlink: others change them all the "
            "while"
        )

    def _dumped(self, table: str) -> Iterator[str]:
        """For each rule its chain; nothing for a reading during which rules have changed."""
        self._sequence += 1
        asked = _message(
            _SUBSYSTEM << 8 | _GET_RULE, DUMP, INET, _text(1, table), sequence=self._sequence
        )
        self._socket.send(asked)
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
        """Carry out all of them, in their order, in one transaction. Blocks; thousands of elements
        take some ten milliseconds.

        Raises Conflict if a set, an element to delete or a chain to go to is not there, or an
        element is there with another value; Refused without the right, else Unavailable."""
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
        """The elements of a set; none if there is no such set. Elements that somebody changes
        meanwhile may be among them or not. Raises Refused without the right, else Unavailable."""
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
        """Wait until the last message of a batch is confirmed. Raises what the first that was
        refused stands for."""
        last = max(about)
        while True:
            for kind, _, sequence, body in messages(self._socket.recv(1 << 17)):
                if kind != ERROR or sequence not in about:
                    continue  # what is left of a batch that was refused
                if code := code_of(body):
                    raise _failure(about[sequence], OSError(code, os.strerror(code)))
                if sequence == last:
                    return

    def add_chain(self, table: str, chain: str, rule: tuple[Expression, ...]) -> None:
        """Make the chain in the table of family `inet`, with this one rule. Blocks for a moment.

        Raises Conflict if the table or a map is not there, Refused without the right or on an old
        kernel, else Unavailable."""
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
    """The error that an answer of the kernel, or none in time, stands for."""
    if isinstance(error, TimeoutError):
        return Unavailable(f"{tried}: no answer in time")
    said = f"{tried}: {error.strerror}"
    match error.errno:
        case errno.ENOENT | errno.EEXIST | errno.EBUSY:
            return Conflict(said)
        case errno.EPERM | errno.EOPNOTSUPP | errno.EINVAL:
            return Refused(said, fix="it takes CAP_NET_ADMIN and Linux 5.10 or newer")
    return Unavailable(said)


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
    """How many messages of this sequence number the answers confirm. Raises OSError for the first
    that was refused.

    Answers to an earlier batch may still come: a refused one leaves more than one behind.
    """
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
