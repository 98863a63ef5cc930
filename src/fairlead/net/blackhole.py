"""Blackhole routes for packets from other hosts: a routing table of blackhole routes, and for each
interface a rule that looks up packets from this interface in the table.

In: addresses, names of interfaces. Out: the kernel's rules and routes. The rules do not match
packets of this host itself, nor packets from other interfaces: a process on this host may still
connect to such an address if another program answers for it (the service proxy of a node, after
routing). Invariant: only the one table and the rules that lead to it are changed; every operation
may be repeated. An object belongs to the network namespace in which it was created. Follows
rtnetlink(7), Linux include/uapi/linux/{rtnetlink,fib_rules}.h."""

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.errors import FairleadError, Refused, Unavailable, plain
from fairlead.net.address import is_ipv6
from fairlead.net.netlink import (
    ACK,
    CREATE,
    DONE,
    DUMP,
    ERROR,
    EXCLUSIVE,
    SOL_NETLINK,
    attribute,
    attributes,
    code_of,
    message,
    messages,
)

RULE_PRIORITY = 7471
"""After the rule of the local table (0) and before the rule of the main table (32766)."""

_NEW_ROUTE, _DELETE_ROUTE, _GET_ROUTE, _NEW_RULE, _DELETE_RULE, _GET_RULE = 24, 25, 26, 32, 33, 34
_BODY = struct.Struct("=8BI")
"""Both struct rtmsg (family, prefix lengths, TOS, table, protocol, scope, type, flags) and struct
fib_rule_hdr (family, prefix lengths, TOS, table, two reserved fields, action, flags)."""
_DESTINATION, _TABLE = 1, 15
_RULE_INTERFACE, _RULE_PRIORITY, _RULE_TABLE, _RULE_PROTOCOL = 3, 6, 15, 21
_BLACKHOLE, _TO_TABLE = 6, 1
_MATCHED_ROUTE = 0x2000
"""RTM_F_FIB_MATCH: the kernel returns the matching route instead of the result of the lookup."""
_STRICT_CHECK, _SHORT_ANSWERS = 12, 10
_AT_ONCE = 100
"""Requests in one message: the responses to this many fit into the socket's buffer."""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Rule(NamedTuple):
    """A rule: packets of this family from that interface are looked up in the table."""

    ipv6: bool
    interface: str


class Blackholes:
    """The routes and rules of one table. Close it after use.

    `protocol` is the routing protocol number that marks the routes and rules as created by this
    program."""

    def __init__(self, table: int, protocol: int) -> None:
        self._table, self._protocol = table, protocol
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        self._socket.settimeout(10.0)
        for option in (_STRICT_CHECK, _SHORT_ANSWERS):
            self._socket.setsockopt(SOL_NETLINK, option, 1)
        self._sequence = 0

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()

    def routes(self) -> set[str]:
        """Return the addresses that have a blackhole route. Raise Unavailable."""
        found = set()
        for family in _FAMILIES:
            request = _BODY.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + attribute(
                _TABLE, _number(self._table)
            )
            for body in self._dump(_GET_ROUTE, request, "listing blackhole routes"):
                fields = dict(attributes(body, _BODY.size))
                if fields.get(_TABLE) == _number(self._table) and _DESTINATION in fields:
                    found.add(str(ip_address(fields[_DESTINATION])))
        return found

    def rules(self) -> set[Rule]:
        """Return the rules that lead to the table. Raise Unavailable."""
        found = set()
        for family in _FAMILIES:
            for body in self._dump(
                _GET_RULE, _BODY.pack(family, 0, 0, 0, 0, 0, 0, 0, 0), "listing rules"
            ):
                fields = dict(attributes(body, _BODY.size))
                if fields.get(_RULE_TABLE) == _number(self._table):
                    name = fields.get(_RULE_INTERFACE, b"").rstrip(b"\0").decode()
                    found.add(Rule(family == socket.AF_INET6, name))
        return found

    def add_routes(self, addresses: Collection[str]) -> None:
        """Add blackhole routes for these addresses. Raise Refused without permission, otherwise
        Unavailable."""
        self._change(
            _NEW_ROUTE,
            CREATE | EXCLUSIVE,
            (self._route(each, self._protocol, _BLACKHOLE) for each in addresses),
            "adding a blackhole route",
            errno.EEXIST,
        )

    def delete_routes(self, addresses: Collection[str]) -> None:
        """Delete the routes for these addresses from the table, also those that another program
        added."""
        self._change(
            _DELETE_ROUTE,
            0,
            (self._route(each) for each in addresses),
            "deleting a blackhole route",
            errno.ESRCH,
        )

    def add_rules(self, rules: Collection[Rule]) -> None:
        """Add rules, by which packets from these interfaces are looked up in the table. An
        interface need not exist yet."""
        self._change(
            _NEW_RULE, CREATE | EXCLUSIVE, map(self._rule, rules), "adding a rule", errno.EEXIST
        )

    def delete_rules(self, rules: Collection[Rule]) -> None:
        """Delete these rules."""
        self._change(_DELETE_RULE, 0, map(self._rule, rules), "deleting a rule", errno.ENOENT)

    def routed_elsewhere(self, addresses: Sequence[str]) -> list[str]:
        """Return the addresses that have a host route of another program (a /32 or /128 in another
        table)."""
        found = []
        for at in range(0, len(addresses), _AT_ONCE):
            requested = addresses[at : at + _AT_ONCE]
            requests = (
                _BODY.pack(*_of(each), 0, 0, 0, 0, 0, 0, _MATCHED_ROUTE) + _destination(each)
                for each in requested
            )
            first = self._send(_GET_ROUTE, 0, requests)
            for kind, number, body in self._responses(first, len(requested)):
                address = requested[number - first]
                if kind == _NEW_ROUTE and body[1] == _of(address)[1]:
                    found.append(address)
        return found

    def _route(self, address: str, protocol: int = 0, kind: int = 0) -> bytes:
        return (
            _BODY.pack(*_of(address), 0, 0, 0, protocol, 0, kind, 0)
            + _destination(address)
            + attribute(_TABLE, _number(self._table))
        )

    def _rule(self, rule: Rule) -> bytes:
        return (
            _BODY.pack(
                socket.AF_INET6 if rule.ipv6 else socket.AF_INET, 0, 0, 0, 0, 0, 0, _TO_TABLE, 0
            )
            + attribute(_RULE_INTERFACE, rule.interface.encode() + b"\0")
            + attribute(_RULE_PRIORITY, _number(RULE_PRIORITY))
            + attribute(_RULE_TABLE, _number(self._table))
            + attribute(_RULE_PROTOCOL, bytes([self._protocol]))
        )

    def _change(
        self, kind: int, flags: int, bodies: Iterable[bytes], tried: str, ignored: int
    ) -> None:
        """Send all requests, then raise the first error. The error `ignored` means that nothing
        had to be done."""
        waiting, problem = list(bodies), None
        for at in range(0, len(waiting), _AT_ONCE):
            sent = waiting[at : at + _AT_ONCE]
            first = self._send(kind, flags | ACK, sent)
            for _, _, body in self._responses(first, len(sent)):
                code = code_of(body)
                if code not in (0, ignored) and problem is None:
                    problem = _failure(code, tried)
        if problem:
            raise problem

    def _dump(self, kind: int, request: bytes, tried: str) -> list[bytes]:
        first = self._send(kind, DUMP, [request])
        found: list[bytes] = []
        while True:
            for got, _, sequence, body in messages(self._receive()):
                if sequence != first:
                    continue
                if got == DONE:
                    return found
                if got == ERROR:
                    code = code_of(body)
                    # There is no such table yet, or this kernel has no IPv6.
                    if code in (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
                        return []
                    raise _failure(code, tried)
                found.append(body)

    def _send(self, kind: int, flags: int, bodies: Iterable[bytes]) -> int:
        """Send the requests. Return the sequence number of the first; the others have consecutive
        numbers."""
        first = self._sequence + 1
        requested = []
        for self._sequence, body in enumerate(bodies, first):
            requested.append(message(kind, flags, body, sequence=self._sequence))
        self._socket.send(b"".join(requested))
        return first

    def _responses(self, first: int, count: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield the response to each request: kind, sequence number and body. The body of an error
        or acknowledgement is a struct nlmsgerr."""
        while count:
            for kind, _, sequence, body in messages(self._receive()):
                if sequence >= first:  # older: the response to a request that was given up
                    count -= 1
                    yield kind, sequence, body

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 18)
        except OSError as error:
            raise Unavailable(f"the kernel's routing did not answer: {plain(error)}") from error


def _of(address: str) -> tuple[int, int]:
    """Return family and number of bits."""
    return (socket.AF_INET6, 128) if is_ipv6(address) else (socket.AF_INET, 32)


def _destination(address: str) -> bytes:
    return attribute(_DESTINATION, socket.inet_pton(_of(address)[0], address))


def _failure(code: int, tried: str) -> FairleadError:
    message = f"{tried}: {os.strerror(code)}"
    if code in (errno.EPERM, errno.EACCES):
        return Refused(message, fix="run as root or with CAP_NET_ADMIN in this network namespace")
    return Unavailable(message)


def _number(value: int) -> bytes:
    return struct.pack("=I", value)
