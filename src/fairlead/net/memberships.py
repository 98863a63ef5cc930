"""Membership of interfaces in IPv6 multicast groups, held by the kernel without a process.

In: interfaces and groups. Out: the interface receives the frames of the groups, and the kernel
reports the membership to routers and to switches that snoop on MLD (RFC 3810). Without it, a
network card or a switch discards neighbor solicitations for an address that the host does not have.

The kernel holds a membership as an address of the interface with the flag IFA_F_MCAUTOJOIN, as `ip
address add GROUP dev DEVICE autojoin` adds it, so a killed process stays reachable. Where that is
not possible, because IPv6 is off on the interface or the kernel's memory for memberships is used
up, the interface only receives the frames (SIOCADDMULTI, as `ip maddress add`).

Invariant: every operation may be repeated. Follows rtnetlink(7), netdevice(7), RFC 4861, 7.2.1."""

import errno
import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address

from fairlead.net.ndp import multicast_mac
from fairlead.net.netlink import ACK, CREATE, DUMP, attribute, attributes
from fairlead.net.rtnetlink import RtnetlinkSocket

_NEW_ADDRESS, _DELETE_ADDRESS, _GET_ADDRESS = 20, 21, 22
_ADDRESS, _FLAGS = struct.Struct("=4BI"), struct.Struct("=I")
_ADDRESS_OWN, _ADDRESS_FLAGS = 1, 8
_NO_DAD, _NO_ROUTE, _AUTOJOIN = 0x02, 0x200, 0x400
_ADD_MULTICAST, _DELETE_MULTICAST = 0x8931, 0x8932
_IFREQ = struct.Struct("16sH6s16x")


def join(kernel: RtnetlinkSocket, index: int, name: str, group: str) -> bool:
    """Join the group. Return whether the kernel reports the membership too. Raise OSError if the
    interface is gone."""
    try:
        kernel.exchange(_NEW_ADDRESS, CREATE | ACK, _request(index, group))
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.EADDRINUSE):
            return True
        if error.errno == errno.ENODEV:
            raise
        _set_filter(_ADD_MULTICAST, name, group)
        return False
    return True


def leave(kernel: RtnetlinkSocket, index: int, name: str, group: str) -> None:
    """Leave the group. Do nothing if the interface is gone.

    If the interface was down meanwhile, the kernel has forgotten the address, and keeps the
    membership as long as the interface exists."""
    with suppress(OSError):
        kernel.exchange(_DELETE_ADDRESS, ACK, _request(index, group))
    with suppress(OSError):
        _set_filter(_DELETE_MULTICAST, name, group)


def joined(kernel: RtnetlinkSocket) -> Iterator[tuple[int, str]]:
    """Yield the index of the interface and the group of each membership that is held as an
    address. Raise OSError."""
    head = _ADDRESS.pack(socket.AF_INET6, 0, 0, 0, 0)
    for body in kernel.exchange(_GET_ADDRESS, DUMP, head):
        fields = dict(attributes(body, _ADDRESS.size))
        own = fields.get(_ADDRESS_OWN, b"")
        if len(own) == 16 and (group := IPv6Address(own)).is_multicast:
            yield _ADDRESS.unpack_from(body)[-1], str(group)


def _request(index: int, group: str) -> bytes:
    packed = socket.inet_pton(socket.AF_INET6, group)
    return (
        _ADDRESS.pack(socket.AF_INET6, 8 * len(packed), 0, 0, index)
        + attribute(_ADDRESS_OWN, packed)
        + attribute(_ADDRESS_FLAGS, _FLAGS.pack(_NO_DAD | _NO_ROUTE | _AUTOJOIN))
    )


def _set_filter(request: int, name: str, group: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(
            any_socket,
            request,
            _IFREQ.pack(name.encode(), socket.AF_UNSPEC, multicast_mac(group)),
        )
