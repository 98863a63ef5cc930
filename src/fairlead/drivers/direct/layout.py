"""The records of bpf/structs.h as bytes, in the machine's byte order but for addresses and ports.

In: addresses, names, numbers. Out: keys and values for the maps, and back. A test compares each with the object's own types.
An IPv4 address stands as IPv4-mapped IPv6 in the key of a listener, and as itself in the record of a node.
"""

import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple, cast

from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Refused
from fairlead.model import ServiceKey

CHUNK_BYTES = 64
BY_SOURCE, PREVIOUS_BY_SOURCE = 1, 2
LINK, HERE = 0, 1

LISTENER_KEY = struct.Struct("=16s2sBx")
LISTENER = struct.Struct("=6I")
FLOW_KEY = struct.Struct("=16x16s2x2sB3x")
NODE = struct.Struct("=16s4sIII")
OWNER = struct.Struct("=64s64s40s")
NODE_NAME = struct.Struct("=256s")
SETTINGS = struct.Struct("=II")
TRAFFIC = struct.Struct("=3Q")
INDEX = struct.Struct("=I")
COUNTER = struct.Struct("=Q")

_PROTOCOLS: dict[str, int] = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}
_NAMES = {number: name for name, number in _PROTOCOLS.items()}


class ListenerRecord(NamedTuple):
    """Where a listener's tables are. Offsets in chunks of the arena, sizes in slots."""

    current_offset: int
    current_size: int
    previous_offset: int
    previous_size: int
    flags: int
    statistics: int


class NodeRecord(NamedTuple):
    """Where to send what a node gets; empty addresses and interfaces of 0 where it cannot be reached."""

    ipv4: str = ""
    ipv6: str = ""
    interface4: int = 0
    interface6: int = 0
    mode: int = LINK

    def address(self, *, ipv6: bool) -> str:
        """The address of the family, if it can be used."""
        if ipv6:
            return self.ipv6 if self.interface6 else ""
        return self.ipv4 if self.interface4 else ""


def pack_listener_key(key: ListenerKey) -> bytes:
    """The key of a listener."""
    address = ip_address(key.address)
    packed = address.packed if isinstance(address, IPv6Address) else bytes(10) + b"\xff\xff" + address.packed
    return LISTENER_KEY.pack(packed, key.port.to_bytes(2, "big"), _PROTOCOLS[key.protocol])


def unpack_listener_key(data: bytes) -> ListenerKey:
    """The listener that a key stands for."""
    packed, port, protocol = LISTENER_KEY.unpack(data)
    address = IPv6Address(packed)
    # The maps hold what pack_listener_key wrote: one of its protocols.
    name = cast(ListenerProtocol, _NAMES[protocol])
    return ListenerKey(str(address.ipv4_mapped or address), int.from_bytes(port, "big"), name)


def unpack_entry(key: bytes, value: bytes) -> tuple[bytes, int]:
    """Of a connection entry: the key of its listener as `pack_listener_key` makes it, and the number of its node."""
    return LISTENER_KEY.pack(*FLOW_KEY.unpack(key)), INDEX.unpack(value)[0]


def pack_node(record: NodeRecord) -> bytes:
    """The record of a node."""
    ipv6 = IPv6Address(record.ipv6).packed if record.ipv6 else bytes(16)
    ipv4 = IPv4Address(record.ipv4).packed if record.ipv4 else bytes(4)
    return NODE.pack(ipv6, ipv4, record.interface4, record.interface6, record.mode)


def unpack_node(data: bytes) -> NodeRecord:
    """The node that a record stands for."""
    ipv6, ipv4, interface4, interface6, mode = NODE.unpack(data)
    return NodeRecord(
        str(IPv4Address(ipv4)) if any(ipv4) else "",
        str(IPv6Address(ipv6)) if any(ipv6) else "",
        interface4,
        interface6,
        mode,
    )


def pack_text(text: str, size: int) -> bytes:
    """Text of at most `size` bytes, padded with zeros by whoever packs it. Raises Refused when it is longer."""
    data = text.encode()
    if len(data) > size:
        raise Refused(f"the name {text} is longer than {size} bytes", fix="choose a shorter one")
    return data


def unpack_text(data: bytes) -> str:
    """The text without the zeros after it."""
    return data.rstrip(b"\0").decode(errors="replace")


def pack_owner(service: ServiceKey, uid: str) -> bytes:
    """The mark that says whose a listener is."""
    return OWNER.pack(pack_text(service.namespace, 64), pack_text(service.name, 64), pack_text(uid, 40))


def unpack_owner(data: bytes) -> tuple[ServiceKey, str]:
    """Whose a listener is: the Service and its UID."""
    namespace, name, uid = (unpack_text(part) for part in OWNER.unpack(data))
    return ServiceKey(namespace, name), uid
