"""Attach programs to ingress or egress of an interface (tc), and list where they are attached.

In: a loaded program, an interface's index. Out: a filter of the clsact qdisc at ingress or egress,
in direct-action mode. A filter is identified by its name; its priority and a fixed handle determine
its position, so replacing it is one step in the kernel, with no packet between the old program and
the new one. The qdisc stays when the last filter is deleted, because other programs may use it.
Follows tc-bpf(8), and include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h."""

import errno
import struct
import sys
from collections.abc import Collection
from typing import NamedTuple

from fairlead.net.netlink import ACK, CREATE, DUMP, EXCLUSIVE, attribute, attributes
from fairlead.net.rtnetlink import open_rtnetlink

_GET_LINK, _NEW_QDISC, _NEW_FILTER, _DELETE_FILTER, _GET_FILTER = 18, 36, 44, 45, 46
_LINK = struct.Struct("=BxHiII")
_MESSAGE = struct.Struct("=B3xiIII")
"""struct tcmsg: family, interface, handle, parent, and for a filter its priority and, in network
byte order, its protocol."""
_KIND, _OPTIONS = 1, 2
_FD, _NAME, _FLAGS, _ID = 6, 7, 8, 11
_DIRECT_ACTION = 1
_CLSACT_HANDLE, _CLSACT, _INGRESS, _EGRESS = 0xFFFF0000, 0xFFFFFFF1, 0xFFFFFFF2, 0xFFFFFFF3
_HANDLE = 1
_ALL_PROTOCOLS = 0x0300  # ETH_P_ALL


_EVENTS = frozenset((36, 37, 40, 41, 44, 45, 100, 101))
"""RTM_NEWQDISC, RTM_DELQDISC, and the same of traffic classes, filters and chains."""


class Filter(NamedTuple):
    """A program at an interface's ingress or egress. `program`: its ID in the kernel."""

    interface: int
    name: str
    priority: int
    program: int = 0
    egress: bool = False


async def attach(
    interface: int, program: int, *, name: str, priority: int, egress: bool = False
) -> None:
    """Attach the program with this file descriptor to the interface. It replaces a filter with the
    same priority."""
    options = attribute(_FD, struct.pack("=I", program)) + attribute(_NAME, _text(name))
    options += attribute(_FLAGS, struct.pack("=I", _DIRECT_ACTION))
    qdisc = _MESSAGE.pack(0, interface, _CLSACT_HANDLE, _CLSACT, 0) + attribute(
        _KIND, _text("clsact")
    )
    with open_rtnetlink(f"attaching {name} to interface {interface}") as kernel:
        try:
            kernel.exchange(_NEW_QDISC, CREATE | EXCLUSIVE | ACK, qdisc)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
        kernel.exchange(
            _NEW_FILTER,
            CREATE | ACK,
            _filter_head(interface, priority, egress=egress) + attribute(_OPTIONS, options),
        )


async def filters(
    name: str, interfaces: Collection[int] | None = None, *, egress: bool = False
) -> tuple[Filter, ...]:
    """Return the filters with this name, on these interfaces or on all of this network
    namespace."""
    found = []
    with open_rtnetlink(f"listing the filters called {name}") as kernel:
        if interfaces is None:
            interfaces = [
                _LINK.unpack_from(body)[2]
                for body in kernel.exchange(_GET_LINK, DUMP, _LINK.pack(0, 0, 0, 0, 0))
            ]
        for index in interfaces:
            try:
                dump = kernel.exchange(
                    _GET_FILTER,
                    DUMP,
                    _MESSAGE.pack(0, index, 0, _EGRESS if egress else _INGRESS, 0),
                )
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
                    continue  # the interface is gone, or has no clsact
                raise
            for body in dump:
                fields = dict(attributes(body, _MESSAGE.size))
                options = dict(attributes(fields.get(_OPTIONS, b""), 0))
                if (fields.get(_KIND), options.get(_NAME)) == (_text("bpf"), _text(name)):
                    number = int.from_bytes(options.get(_ID, b""), sys.byteorder)
                    found.append(
                        Filter(index, name, _MESSAGE.unpack_from(body)[4] >> 16, number, egress)
                    )
    return tuple(found)


async def detach(filter_: Filter) -> None:
    """Detach the filter. Do nothing if it is already gone."""
    with open_rtnetlink(f"detaching {filter_.name} from interface {filter_.interface}") as kernel:
        try:
            kernel.exchange(
                _DELETE_FILTER,
                ACK,
                _filter_head(filter_.interface, filter_.priority, egress=filter_.egress),
            )
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                raise


def changed_hook(kind: int, body: bytes) -> int | None:
    """Return the index of the interface on which an event of the group RTNLGRP_TC reports a changed
    qdisc or filter; None for events of other kinds."""
    return int(_MESSAGE.unpack_from(body)[1]) if kind in _EVENTS else None


def _filter_head(interface: int, priority: int, *, egress: bool) -> bytes:
    """Return the head of a message that identifies the filter."""
    parent = _EGRESS if egress else _INGRESS
    return _MESSAGE.pack(
        0, interface, _HANDLE, parent, priority << 16 | _ALL_PROTOCOLS
    ) + attribute(_KIND, _text("bpf"))


def _text(text: str) -> bytes:
    return text.encode() + b"\0"
