"""The records of bpf/structs.h as bytes, in the machine's byte order but for addresses and ports.

In: addresses, names, numbers. Out: keys and values for the maps, and back. A test compares each with the object's own types.
An IPv4 address stands as IPv4-mapped IPv6 (RFC 4291, 2.5.5.2).
"""

import socket
import struct
from functools import lru_cache
from ipaddress import IPv6Address
from typing import NamedTuple, cast

from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Refused
from fairlead.model import ServiceKey

CHUNK_BYTES = 64
BY_SOURCE, PREVIOUS_BY_SOURCE, RANGES, YOUNG, REFUSES = 1, 2, 4, 8, 16
AMONG_NODES, TELL = 1, 2
CLOSING = 0x10000
"""With the node of an entry that is told: its connection ends."""
NOWHERE, LINK, HERE, IPIP, VXLAN = range(5)
HOPS_LEFT = 16
"""The hop limit with which packets are sent on to nodes; one that arrives with no more has passed a gateway (bpf/hops.h)."""
DROPS = (
    "no_member",
    "no_way",
    "hop_limit",
    "fragment",
    "forbidden",
    "too_big",
    "not_sent",
    "returned",
    "no_endpoints",
    "upgrading",
)
"""Why packets of a listener are dropped, in the order of `enum event`."""

LISTENER_KEY = struct.Struct("=16s2sB5x")
LISTENER = struct.Struct("=7I4x")
FLOW_KEY = struct.Struct("=16x16s2x2sB3x")
FLOW = struct.Struct("=4s4x")
WAY = struct.Struct("=III2sH6s6sI16s16s16s")
OWNER = struct.Struct("=64s64s40s")
NODE_NAME = struct.Struct("=256s")
SETTINGS = struct.Struct("=4I2s2xI")
TRAFFIC = struct.Struct(f"={3 + len(DROPS)}Q")
NODE_TRAFFIC = struct.Struct("=4Q")
RANGE_KEY = struct.Struct("=II16s")
KEEPER = struct.Struct("=II")
TAG_KEY = struct.Struct("=II")
MAC = struct.Struct("=6s2x")
INDEX = struct.Struct("=I")
COUNTER = struct.Struct("=Q")

_MAPPED = bytes(10) + b"\xff\xff"

_PROTOCOLS: dict[str, int] = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}
_NAMES = {number: name for name, number in _PROTOCOLS.items()}


def tick(monotonic_s: float) -> int:
    """The coarse clock of the programs (bpf/choose.h) at this time of `time.monotonic`."""
    return int(monotonic_s * 1e9) // (1 << 30) + 1


class ListenerRecord(NamedTuple):
    """Where a listener's tables are. Offsets in chunks of the arena, sizes in slots."""

    current_offset: int
    current_size: int
    previous_offset: int
    previous_size: int
    flags: int
    statistics: int
    ranges: int = 0

    @property
    def young(self) -> bool:
        """Whether all its connections get entries."""
        return bool(self.flags & YOUNG)

    @property
    def sets(self) -> int | None:
        """The number of the Service's sets of source ranges; None if everybody is let in."""
        return self.ranges >> 1 if self.flags & RANGES else None

    def following(self, sets: int | None, *, ipv6: bool) -> "ListenerRecord":
        """The record with these sets of source ranges, of which its family's is the one that counts."""
        if sets is None:
            if not self.flags & RANGES and not self.ranges:
                return self  # as mostly
            return self._replace(flags=self.flags & ~RANGES, ranges=0)
        return self._replace(flags=self.flags | RANGES, ranges=2 * sets + ipv6)


class Way(NamedTuple):
    """How packets of one family get to a node. `kind`: NOWHERE where they cannot. Hardware addresses are 6 bytes, zeros where
    they are not known. `lower`: the parent of a VLAN's interface, 0 for others. See `struct way`."""

    kind: int = NOWHERE
    interface: int = 0
    next_hop: str = ""
    outer_source: str = ""
    outer_destination: str = ""
    mac: bytes = bytes(6)
    own_mac: bytes = bytes(6)
    mtu: int = 0
    tag: int = 0
    vni: int = 0
    lower: int = 0

    @property
    def address(self) -> str:
        """The node's address, if it can be reached there."""
        return self.outer_destination or self.next_hop


@lru_cache(maxsize=65536)
def pack_address(text: str) -> bytes:
    """An address in 16 bytes."""
    return IPv6Address(text).packed if ":" in text else _MAPPED + socket.inet_pton(socket.AF_INET, text)


def unpack_address(data: bytes) -> str:
    """The address as text."""
    return socket.inet_ntop(socket.AF_INET, data[12:]) if data.startswith(_MAPPED) else str(IPv6Address(data))


def pack_listener_key(key: ListenerKey) -> bytes:
    """The key of a listener."""
    return LISTENER_KEY.pack(pack_address(key.address), key.port.to_bytes(2, "big"), _PROTOCOLS[key.protocol])


def unpack_listener_key(data: bytes) -> ListenerKey:
    """The listener that a key stands for."""
    address, port, protocol = LISTENER_KEY.unpack(data)
    # The maps hold what pack_listener_key wrote: one of its protocols.
    name = cast(ListenerProtocol, _NAMES[protocol])
    return ListenerKey(unpack_address(address), int.from_bytes(port, "big"), name)


def unpack_entry(key: bytes, value: bytes) -> tuple[bytes, int]:
    """Of a connection entry: the key of its listener as `pack_listener_key` makes it, and the number of its node."""
    return LISTENER_KEY.pack(*FLOW_KEY.unpack(key)), INDEX.unpack_from(value)[0]


def pack_way(way: Way) -> bytes:
    """The record of a way."""
    addresses = (pack_address(each) if each else bytes(16) for each in (way.next_hop, way.outer_source, way.outer_destination))
    link = (way.interface, way.lower or way.interface, way.tag.to_bytes(2, "big"), way.mtu, way.mac, way.own_mac)
    return WAY.pack(way.kind, *link, way.vni, *addresses)


def unpack_way(data: bytes) -> Way:
    """The way that a record stands for."""
    kind, interface, lower, tag, mtu, mac, own_mac, vni, *addresses = WAY.unpack(data)
    next_hop, source, destination = (unpack_address(each) if any(each) else "" for each in addresses)
    below = 0 if lower == interface else lower
    return Way(kind, interface, next_hop, source, destination, mac, own_mac, mtu, int.from_bytes(tag, "big"), vni, below)


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
