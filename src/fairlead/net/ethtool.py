"""What a network device says of itself through the ethtool ioctl.

In: the name of an interface of this network namespace. Out: its driver, and whether it is a device
on a bus of the machine or made by software. Follows include/uapi/linux/ethtool.h, ETHTOOL_GDRVINFO.
pyroute2's ethtool asks more and needs netlink."""

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
    """`name`: empty if there is none to tell. `bus`: where on the machine's buses the device is;
    empty for one that is made by software."""

    name: str
    bus: str


def driver_of(interface: str) -> Driver:
    """The driver of the interface. Raises Unavailable where there is no such interface."""
    answer = ctypes.create_string_buffer(struct.pack("=I", _GET_DRIVER), _DRIVER_INFO.size)
    try:
        _ask(interface, answer)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise Unavailable(f"asking for the driver of {interface}: {error.strerror}") from error
        return Driver("", "")  # EOPNOTSUPP: made by software, and silent
    _, name, _, _, bus, *_ = _DRIVER_INFO.unpack(answer.raw)
    texts = (each.split(b"\0", 1)[0].decode(errors="replace") for each in (name, bus))
    return Driver(*(text if text != "N/A" else "" for text in texts))


def _ask(interface: str, command: "ctypes.Array[ctypes.c_char]") -> None:
    request = struct.pack("=16sQ16x", interface.encode()[:15], ctypes.addressof(command))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
