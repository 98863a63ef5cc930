"""Membership of an interface in the solicited-node multicast groups of addresses that the host does
not have itself.

In: interfaces and groups. Out: the interface receives the frames of the groups, and tells switches
that snoop on MLD. Without it, a network card or a switch discards neighbor solicitations for the
address.

The kernel holds the membership (an address of the interface with the flag IFA_F_MCAUTOJOIN, as `ip
address add GROUP dev DEVICE autojoin` adds it), so it outlives the process: a killed process stays
reachable. Where that is not possible, because IPv6 is off or the kernel's memory for memberships is
used up, the interface only receives the frames (SIOCADDMULTI, as `ip maddress add`).

Invariant: every operation may be repeated. Follows rtnetlink(7), netdevice(7), RFC 4861, 7.2.1."""

import errno
import fcntl
import socket
import struct
from contextlib import suppress

from fairlead.net.ndp import multicast_mac
from fairlead.net.netlink import ACK, CREATE, attribute
from fairlead.net.rtnetlink import RtnetlinkSocket

_NEW_ADDRESS, _DELETE_ADDRESS = 20, 21
_ADDRESS = struct.Struct("=4BI")
_IFA_ADDRESS, _IFA_FLAGS = 1, 8
_NO_DAD, _AUTOJOIN = 0x02, 0x400
_ADD_MULTICAST, _DELETE_MULTICAST = 0x8931, 0x8932
_IFREQ = struct.Struct("16sH6s16x")


def join(kernel: RtnetlinkSocket, index: int, name: str, group: str) -> bool:
    """Join the group. Return whether the kernel also reports the membership to switches. Raise
    OSError if the interface is gone."""
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
    """Leave the group. Do nothing if the interface is gone."""
    with suppress(OSError):
        kernel.exchange(_DELETE_ADDRESS, ACK, _request(index, group))
    with suppress(OSError):
        _set_filter(_DELETE_MULTICAST, name, group)


def _request(index: int, group: str) -> bytes:
    packed = socket.inet_pton(socket.AF_INET6, group)
    return (
        _ADDRESS.pack(socket.AF_INET6, 128, 0, 0, index)
        + attribute(_IFA_ADDRESS, packed)
        + attribute(_IFA_FLAGS, struct.pack("=I", _NO_DAD | _AUTOJOIN))
    )


def _set_filter(request: int, name: str, group: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(
            any_socket,
            request,
            _IFREQ.pack(name.encode(), socket.AF_UNSPEC, multicast_mac(group)),
        )
