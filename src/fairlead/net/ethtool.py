"""Information about a network device from the ethtool ioctl.

In: the name of an interface of this network namespace. Out: its driver, and whether it is a device
on a bus of the machine or a virtual device. Follows include/uapi/linux/ethtool.h, ETHTOOL_GDRVINFO.
pyroute2's ethtool reads more and needs netlink."""

import ctypes
import errno
import fcntl
import socket
import struct
from typing import NamedTuple

from fairlead.errors import Unavailable

_SIOCETHTOOL = 0x8946
_GET_DRIVER = 0x03
_DRIVER_INFO = struct.Struct("=I32s32s32s32s32s12x5I")


class Driver(NamedTuple):
    """`name`: empty if the driver is unknown. `bus`: the address of the device on the machine's
    buses; empty for a virtual device."""

    name: str
    bus: str


def driver_of(interface: str) -> Driver:
    """Return the driver of the interface. Raise Unavailable if there is no such interface."""
    answer = ctypes.create_string_buffer(struct.pack("=I", _GET_DRIVER), _DRIVER_INFO.size)
    try:
        _request(interface, answer)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise Unavailable(f"reading the driver of {interface}: {error.strerror}") from error
        return Driver("", "")  # EOPNOTSUPP: a virtual device without the ioctl
    _, name, _, _, bus, *_ = _DRIVER_INFO.unpack(answer.raw)
    texts = (each.split(b"\0", 1)[0].decode(errors="replace") for each in (name, bus))
    return Driver(*(text if text != "N/A" else "" for text in texts))


def _request(interface: str, command: "ctypes.Array[ctypes.c_char]") -> None:
    request = struct.pack("=16sQ16x", interface.encode()[:15], ctypes.addressof(command))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
