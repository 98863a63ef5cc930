"""Put rules into nftables that libnftables cannot write, as netlink messages of our own.

In: a table, a chain, expressions. Out: the chain with that one rule, made in one transaction.
Invariant: the chain is there with its rule or not at all. Follows linux/netfilter/nf_tables.h and nfnetlink.h.

Why: libnftables 1.0.6 (Debian 12) ends the process ("Assertion `dreg < ctx->reg_low' failed") on a map update whose key or
value is a concatenation of more than 16 bytes, so on every one with an IPv6 address in it.
"""

import errno
import os
import socket
import struct
from typing import NamedTuple

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.net.netlink import ACK, APPEND, CREATE, ERROR, attribute, code_of, message, messages

INET = 1
"""NFPROTO_INET: tables of family `inet`."""

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_CHAIN, _NEW_RULE, _NEW_GENERATION, _GET_GENERATION = 3, 6, 15, 16
_NESTED = 0x8000

_META_NFPROTO, _META_L4PROTO = 15, 16
_EQUAL = 0
_CT_PROTO_DST, _CT_SRC_IP6, _CT_DST_IP6 = 12, 21, 22
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_DYNSET_UPDATE = 1
_REGISTER = 8
"""NFT_REG32_00: registers of 4 bytes; a concatenation lies in consecutive ones."""


class Expression(NamedTuple):
    """One step of a rule: its kind and its attributes."""

    name: str
    attributes: bytes


def remember_ipv6(map_name: str, timeout_s: int) -> tuple[Expression, ...]:
    """`update @map { ct original ip6 daddr . meta l4proto . ct original proto-dst . ct original ip6 saddr timeout Ns :
    ip6 daddr . th dport }`, for packets of IPv6."""
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
        self._sequence = 0

    def close(self) -> None:
        """Give the socket back. May be repeated."""
        self._socket.close()

    def generation(self) -> int:
        """The number of the present ruleset: it grows with every transaction of anybody in this namespace, and not when
        packets fill a map. Raises Refused without the right to ask, Unavailable if the kernel does not answer."""
        self._sequence += 1
        try:
            self._socket.send(_message(_SUBSYSTEM << 8 | _GET_GENERATION, 0, socket.AF_UNSPEC, b"", sequence=self._sequence))
            while True:
                answer = self._socket.recv(65536)
                _acknowledgements(answer, self._sequence)  # a refusal comes as an error, and nothing after it
                kind, sequence = struct.unpack_from("=4xH2xI", answer)
                if kind == _SUBSYSTEM << 8 | _NEW_GENERATION and sequence == self._sequence:
                    (number,) = struct.unpack_from(">I", answer, 24)  # NFTA_GEN_ID comes first
                    return int(number)
        except PermissionError as error:
            tried = f"asking for the generation of the nftables ruleset: {error.strerror}"
            raise Refused(tried, fix="run as root or with CAP_NET_ADMIN in this network namespace") from error
        except OSError as error:
            raise Unavailable(f"asking for the generation of the nftables ruleset failed: {error!r}") from error

    def add_chain(self, table: str, chain: str, rule: tuple[Expression, ...]) -> None:
        """Make the chain in the table of family `inet`, with this one rule. Blocks for a moment.

        Raises Conflict if the table or a map is not there, Refused without the right or on an old kernel, else Unavailable.
        """
        try:
            self._sequence += 1
            self._socket.send(_batch(table, chain, rule, self._sequence))
            acknowledged = 0
            while acknowledged < 2:
                acknowledged += _acknowledgements(self._socket.recv(65536), self._sequence)
        except TimeoutError as error:
            raise Unavailable(f"adding chain {chain} to table inet {table} over netlink: no answer in time") from error
        except OSError as error:
            tried = f"adding chain {chain} to table inet {table} over netlink: {error.strerror}"
            match error.errno:
                case errno.ENOENT | errno.EEXIST | errno.EBUSY:
                    raise Conflict(tried) from error
                case errno.EPERM | errno.EOPNOTSUPP | errno.EINVAL:
                    raise Refused(tried, fix="it takes CAP_NET_ADMIN and Linux 5.10 or newer") from error
            raise Unavailable(tried) from error


def _batch(table: str, chain: str, rule: tuple[Expression, ...], sequence: int) -> bytes:
    listed = b"".join(
        attribute(1 | _NESTED, _text(1, expression.name) + attribute(2 | _NESTED, expression.attributes)) for expression in rule
    )
    here = _text(1, table)
    return b"".join(
        (
            _message(_BATCH_BEGIN, 0, socket.AF_UNSPEC, b"", resource=_SUBSYSTEM),
            _message(_SUBSYSTEM << 8 | _NEW_CHAIN, ACK | CREATE, INET, here + _text(3, chain), sequence=sequence),
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
    """How many messages of this sequence number the answers confirm. Raises OSError for the first that was refused.

    Answers to an earlier batch may still come: a refused one leaves more than one behind.
    """
    count = 0
    for kind, _, number, body in messages(received):
        if kind == ERROR and number == sequence:
            if code := code_of(body):
                raise OSError(code, os.strerror(code))
            count += 1
    return count


def _message(kind: int, flags: int, family: int, body: bytes, *, resource: int = 0, sequence: int = 0) -> bytes:
    return message(kind, flags, struct.pack(">BBH", family, 0, resource) + body, sequence=sequence)


def _payload(base: int, *, offset: int, length: int, register: int) -> Expression:
    return Expression("payload", _number(1, register) + _number(2, base) + _number(3, offset) + _number(4, length))


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")
