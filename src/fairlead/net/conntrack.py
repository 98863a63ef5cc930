"""Delete conntrack entries that lead to an endpoint that no longer serves.

In: destinations that clients use (address and port), and for each the endpoints that may answer.
Out: the number of deleted entries. Invariant: an entry is deleted only if its original destination
is a given one and the endpoint that answers it is not an allowed one. Follows
linux/netfilter/nfnetlink_conntrack.h.

The kernel filters the dump (since Linux 5.8), so a large table is walked in the kernel and not
copied. Each destination costs one walk of the machine's whole table, full or empty (7 ms for
262,144 buckets). If one copy of the protocol's entries costs less, they are copied instead. Entries
are parsed as bytes, some microseconds each, in a thread: a node has thousands to inspect whenever a
pod ends, and its liveness probe must be answered meanwhile."""

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Unavailable
from fairlead.net.address import is_ipv6
from fairlead.net.netlink import (
    ACK,
    DONE,
    DUMP,
    ERROR,
    attribute,
    attributes,
    code_of,
    message,
    messages,
)

Endpoint = tuple[str, int]
"""Address and port."""

_BUCKETS_PER_COPY = 400
"""The number of buckets that are walked in the time in which one entry is copied and parsed
(measured, with half of the entries of the requested protocol)."""
_TABLE = Path("/proc/sys/net/netfilter")
_AT_ONCE = 100
"""Entries that are deleted by one call: the responses, which arrive together, fit into the socket's
buffer."""
_BUFFER = 1 << 16

_NETLINK_NETFILTER = 12
_GET, _DELETE = 1 << 8 | 1, 1 << 8 | 2
_NESTED = 0x8000

_ORIGINAL, _REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_IP, _PROTOCOL = 1, 2
_SOURCE = {socket.AF_INET: 1, socket.AF_INET6: 3}
_DESTINATION = {socket.AF_INET: 2, socket.AF_INET6: 4}
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_BY_ADDRESS, _BY_PROTOCOL, _BY_PORT = 1 << 1, 1 << 3, 1 << 5
"""The fields of the destination by which a dump is filtered: CTA_FILTER_F_CTA_... of
net/netfilter/nf_internals.h."""

_Packed = tuple[bytes, bytes]
"""Address and port in network byte order."""


class _Flow(NamedTuple):
    """One entry. `name` holds the attributes that identify it, as the kernel wrote them: its
    original tuple, zone and ID."""

    destination: _Packed
    endpoint: _Packed
    name: bytes


class Conntrack:
    """The conntrack table of one network namespace: the namespace in which `delete_stale` is first
    called. Not for concurrent calls.

    The socket stays open between calls. Closing a netfilter socket waits until nftables has freed
    everything that was deleted before, up to a second after large changes, and blocks the event
    loop meanwhile."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None

    def close(self) -> None:
        """Close the socket; the next call opens another one."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    async def delete_stale(
        self,
        protocol: int,
        endpoints: Mapping[Endpoint, Collection[Endpoint]],
        *,
        timeout_s: float = 60.0,
    ) -> int:
        """Delete the entries to each key of `endpoints` that are not answered by one of its values.
        Return their number.

        The next packet of such a flow is translated like the first packet of a new flow. Raise
        Unavailable if the kernel does not respond in time."""
        deleted = 0
        for family in (socket.AF_INET, socket.AF_INET6):
            mine = {
                destination: allowed
                for destination, allowed in endpoints.items()
                if is_ipv6(destination[0]) == (family == socket.AF_INET6)
            }
            if mine:
                try:
                    # Open the socket and compute the plan here: the thread may be in another
                    # namespace.
                    deleted += await _run_to_completion(
                        _delete_stale,
                        self._socket(timeout_s),
                        family,
                        protocol,
                        *_plan(family, mine),
                    )
                except OSError as error:  # TimeoutError too
                    # Pending responses would be taken for responses to the next request.
                    self.close()
                    raise Unavailable(
                        f"deleting stale tracked flows of protocol {protocol} failed: "
                        f"{error.strerror or 'timed out'}"
                    ) from error
        return deleted

    def _socket(self, timeout_s: float) -> socket.socket:
        if self._netlink is None:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._netlink.settimeout(timeout_s)
        return self._netlink


async def _run_to_completion(call: Callable[..., int], *arguments: object) -> int:
    """Run the call in a thread, and return after it has ended, also when cancelled: the thread uses
    the socket."""
    working = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _plan(
    family: socket.AddressFamily, endpoints: Mapping[Endpoint, Collection[Endpoint]]
) -> tuple[Mapping[_Packed, Set[_Packed]], Set[_Packed]]:
    """Return the allowed endpoints of each destination, and the destinations of the dumps that find
    the entries."""
    allowed = {
        _packed(family, destination): {_packed(family, each) for each in by}
        for destination, by in endpoints.items()
    }
    # The kernel inverts the comparison of IPv6 addresses in this filter: for an address it returns
    # the entries of all other addresses. So IPv6 is filtered by port only.
    destinations = {
        (b"" if family == socket.AF_INET6 else address, port) for address, port in allowed
    }
    if len(destinations) > 1 and _copy_is_cheaper(len(destinations)):
        destinations = {(b"", b"")}
    return allowed, destinations


def _delete_stale(
    netlink: socket.socket,
    family: socket.AddressFamily,
    protocol: int,
    allowed: Mapping[_Packed, Set[_Packed]],
    destinations: Set[_Packed],
) -> int:
    stale: list[_Flow] = []
    for destination in destinations:
        flows = _dump(netlink, family, protocol, destination)
        stale += [
            flow
            for flow in flows
            if flow.endpoint not in allowed.get(flow.destination, (flow.endpoint,))
        ]
    return _delete(netlink, family, stale)


def _dump(
    netlink: socket.socket, family: socket.AddressFamily, protocol: int, destination: _Packed
) -> Iterator[_Flow]:
    """Yield the protocol's entries to this destination; an empty address or port matches any."""
    netlink.send(_message(_GET, DUMP, family, _filter(family, protocol, destination)))
    while True:
        for kind, _, _, body in messages(netlink.recv(_BUFFER)):
            if kind == DONE:
                return
            if kind == ERROR:
                raise _failure(body)
            # Kernels before Linux 5.8 do not filter.
            if (flow := _flow(family, protocol, body)) is not None:
                yield flow


def _delete(netlink: socket.socket, family: socket.AddressFamily, flows: Sequence[_Flow]) -> int:
    """Delete these entries. Return how many of them still existed."""
    deleted = 0
    for start in range(0, len(flows), _AT_ONCE):
        some = flows[start : start + _AT_ONCE]
        netlink.send(b"".join(_message(_DELETE, ACK, family, flow.name) for flow in some))
        waiting = len(some)
        while waiting:
            for kind, _, _, body in messages(netlink.recv(_BUFFER)):
                if kind != ERROR:
                    continue
                waiting -= 1
                problem = _failure(body)
                if problem.errno not in (0, errno.ENOENT):
                    raise problem
                deleted += problem.errno == 0
    return deleted


def _copy_is_cheaper(walks: int) -> bool:
    """Return whether a copy costs less than this many walks of the table of this thread's
    namespace."""
    try:
        flows, buckets = (
            int((_TABLE / name).read_text())
            for name in ("nf_conntrack_count", "nf_conntrack_buckets")
        )
    except OSError:  # nothing is tracked yet
        return False
    return _BUCKETS_PER_COPY * flows < buckets * walks


def _packed(family: socket.AddressFamily, endpoint: Endpoint) -> _Packed:
    address, port = endpoint
    return socket.inet_pton(family, address), port.to_bytes(2, "big")


def _filter(family: socket.AddressFamily, protocol: int, destination: _Packed) -> bytes:
    address, port = destination
    by = _BY_PROTOCOL | (_BY_ADDRESS if address else 0) | (_BY_PORT if port else 0)
    wanted = attribute(_IP | _NESTED, attribute(_DESTINATION[family], address)) if address else b""
    number = attribute(_NUMBER, bytes([protocol]))
    wanted += attribute(
        _PROTOCOL | _NESTED, number + (attribute(_DESTINATION_PORT, port) if port else b"")
    )
    # CTA_FILTER_ORIG_FLAGS and CTA_FILTER_REPLY_FLAGS: compare these fields of the original tuple,
    # and none of the reply tuple.
    flags = attribute(1, struct.pack("=I", by)) + attribute(2, struct.pack("=I", 0))
    return attribute(_ORIGINAL | _NESTED, wanted) + attribute(_FILTER | _NESTED, flags)


def _flow(family: socket.AddressFamily, protocol: int, body: bytes) -> _Flow | None:
    """Return the entry in a message; None if it is of another protocol."""
    found = dict(attributes(body, 4))
    original, reply = dict(attributes(found[_ORIGINAL], 0)), dict(attributes(found[_REPLY], 0))
    to, back = dict(attributes(original[_PROTOCOL], 0)), dict(attributes(reply[_PROTOCOL], 0))
    if to[_NUMBER][0] != protocol or _DESTINATION_PORT not in to:
        return None
    destination = dict(attributes(original[_IP], 0))[_DESTINATION[family]]
    endpoint = dict(attributes(reply[_IP], 0))[_SOURCE[family]]
    name = attribute(_ORIGINAL | _NESTED, found[_ORIGINAL])
    name += b"".join(attribute(kind, found[kind]) for kind in (_ID, _ZONE) if kind in found)
    return _Flow((destination, to[_DESTINATION_PORT]), (endpoint, back[_SOURCE_PORT]), name)


def _failure(body: bytes) -> OSError:
    """Return the error in a response of kind ERROR; its number is 0 for an acknowledgement."""
    code = code_of(body)
    return OSError(code, os.strerror(code))


def _message(kind: int, flags: int, family: int, content: bytes) -> bytes:
    return message(kind, flags, bytes((family, 0, 0, 0)) + content)
