"""The records of bpf/structs.h as bytes, in host byte order except for addresses and ports.

In: addresses, names, numbers. Out: keys and values of the maps, and back. A test compares each
record with the types in the object file. IPv4 addresses are stored as IPv4-mapped IPv6 addresses
(RFC 4291, 2.5.5.2).
"""

import socket
import struct
from typing import NamedTuple, cast

from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.net.address import pack_address, unpack_address

CHUNK_BYTES = 64
BY_SOURCE, PREVIOUS_BY_SOURCE, RANGES, CONVERGING, REFUSES = 1, 2, 4, 8, 16
IS_NODE, REPORT_ENTRIES = 1, 2
CLOSING = 0x10000
"""Added to the node number of a reported flow entry whose connection is closing."""
UNREACHABLE, LINK, LOCAL, IPIP, VXLAN = range(5)
FRACTION = 1 << 16
"""The unit of `namespace_share` in `struct settings`: the program has no fractions."""
HOPS_LEFT = 16
"""The hop limit of packets that the gateway sends to nodes. A packet that arrives with this hop
limit or less has passed a gateway already (bpf/hops.h)."""
DROPS = (
    "no_member",
    "no_next_hop",
    "hop_limit",
    "fragment",
    "forbidden",
    "too_big",
    "not_sent",
    "returned",
    "no_endpoints",
    "upgrading",
    "stray",
)
"""The reasons for drops, in the order of `enum event`."""

LISTENER_KEY = struct.Struct("=16s2sB5x")
LISTENER = struct.Struct("=8I")
FLOW_KEY = struct.Struct("=16x16s2x2sB3x")
FLOW = struct.Struct("=4s4x")
NEXT_HOP = struct.Struct("=III2sH6s6sI16s16s16s")
OWNER = struct.Struct("=64s64s40s")
NODE_NAME = struct.Struct("=256s")
SETTINGS = struct.Struct("=4I2s2x5I")
TRAFFIC = struct.Struct(f"={3 + len(DROPS)}Q")
NODE_TRAFFIC = struct.Struct("=4Q")
RANGE_KEY = struct.Struct("=II16s")
SHARE = struct.Struct("=32s32s")
RETAINED_NODE = struct.Struct("=II")
TAG_KEY = struct.Struct("=II")
MAC = struct.Struct("=6s2x")
INDEX = struct.Struct("=I")
COUNTER = struct.Struct("=Q")
CHALLENGED = INDEX.pack(1)
"""The last field (`challenged`) of a connection's entry, if a SYN with the same ports arrived after
the entry was created."""
DATAGRAM_LIFETIME = 280
"""How long the entry of a silent UDP flow is valid, in ticks (bpf/choose.h)."""

_PROTOCOLS: dict[str, int] = {
    "TCP": socket.IPPROTO_TCP,
    "UDP": socket.IPPROTO_UDP,
    "SCTP": socket.IPPROTO_SCTP,
}
_NAMES = {number: name for name, number in _PROTOCOLS.items()}


def tick(monotonic_s: float) -> int:
    """Return the coarse clock of the programs (bpf/choose.h) at this time of `time.monotonic`."""
    return int(monotonic_s * 1e9) // (1 << 30) + 1


class ListenerRecord(NamedTuple):
    """The locations of a listener's tables: offsets in chunks of the arena, sizes in slots.

    `share`: the number of its namespace, see `flow_shares`.
    """

    current_offset: int
    current_size: int
    previous_offset: int
    previous_size: int
    flags: int
    statistics: int
    ranges: int = 0
    share: int = 0

    @property
    def converging(self) -> bool:
        """Whether all its connections are tracked."""
        return bool(self.flags & CONVERGING)

    @property
    def range_sets(self) -> int | None:
        """The number of the Service's range sets; None if every source may connect."""
        return self.ranges >> 1 if self.flags & RANGES else None

    def with_range_sets(self, range_sets: int | None, *, ipv6: bool) -> "ListenerRecord":
        """Return the record with these range sets. The record names the set of its own address
        family."""
        if range_sets is None:
            if not self.flags & RANGES and not self.ranges:
                return self  # the common case
            return self._replace(flags=self.flags & ~RANGES, ranges=0)
        return self._replace(flags=self.flags | RANGES, ranges=2 * range_sets + ipv6)


class NextHop(NamedTuple):
    """How packets of one address family get to a node; see `struct next_hop`.

    `kind`: UNREACHABLE if they cannot. MAC addresses are 6 bytes, all zero if they are unknown.
    `lower`: the parent of a VLAN interface; 0 for other interfaces.
    """

    kind: int = UNREACHABLE
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
        """The address at which the node is reached; empty if there is none."""
        return self.outer_destination or self.next_hop


def pack_listener_key(key: ListenerKey) -> bytes:
    """Return the key of a listener as bytes."""
    return LISTENER_KEY.pack(
        pack_address(key.address), key.port.to_bytes(2, "big"), _PROTOCOLS[key.protocol]
    )


def unpack_listener_key(data: bytes) -> ListenerKey:
    """Return the listener of a key."""
    address, port, protocol = LISTENER_KEY.unpack(data)
    # The maps contain only keys of `pack_listener_key`, so the protocol is one of its protocols.
    name = cast(ListenerProtocol, _NAMES[protocol])
    return ListenerKey(unpack_address(address), int.from_bytes(port, "big"), name)


def listener_of(flow: bytes) -> bytes:
    """Return the packed key of a flow's listener, as `pack_listener_key` returns it."""
    return LISTENER_KEY.pack(*FLOW_KEY.unpack(flow))


def unpack_entry(key: bytes, value: bytes) -> tuple[bytes, int]:
    """Return the packed key of a flow entry's listener, as `pack_listener_key` returns it, and the
    number of the entry's node."""
    return listener_of(key), INDEX.unpack_from(value)[0]


def pack_next_hop(hop: NextHop) -> bytes:
    """Return the record of a next hop."""
    addresses = (
        pack_address(each) if each else bytes(16)
        for each in (hop.next_hop, hop.outer_source, hop.outer_destination)
    )
    link = (
        hop.interface,
        hop.lower or hop.interface,
        hop.tag.to_bytes(2, "big"),
        hop.mtu,
        hop.mac,
        hop.own_mac,
    )
    return NEXT_HOP.pack(hop.kind, *link, hop.vni, *addresses)


def unpack_next_hop(data: bytes) -> NextHop:
    """Return the next hop of a record."""
    kind, interface, lower, tag, mtu, mac, own_mac, vni, *addresses = NEXT_HOP.unpack(data)
    next_hop, source, destination = (
        unpack_address(each) if any(each) else "" for each in addresses
    )
    below = 0 if lower == interface else lower
    return NextHop(
        kind,
        interface,
        next_hop,
        source,
        destination,
        mac,
        own_mac,
        mtu,
        int.from_bytes(tag, "big"),
        vni,
        below,
    )


def pack_text(text: str, size: int) -> bytes:
    """Return the text as bytes. Padding with zeros is left to the caller. Raise Refused if the text
    is longer than `size` bytes."""
    data = text.encode()
    if len(data) > size:
        raise Refused(f"the name {text} is longer than {size} bytes", fix="choose a shorter name")
    return data


def unpack_text(data: bytes) -> str:
    """Return the text without the zeros after it."""
    return data.rstrip(b"\0").decode(errors="replace")


def pack_owner(service: ServiceKey, uid: str) -> bytes:
    """Return the record of a listener's owner."""
    return OWNER.pack(
        pack_text(service.namespace, 64), pack_text(service.name, 64), pack_text(uid, 40)
    )


def unpack_owner(data: bytes) -> tuple[ServiceKey, str]:
    """Return the owner of a listener: the Service and its UID."""
    namespace, name, uid = (unpack_text(part) for part in OWNER.unpack(data))
    return ServiceKey(namespace, name), uid
