"""The records of the maps of bpf/neighbors.bpf.c, and the hello frames of announcers. Pure.

In: values. Out: bytes in the layout of bpf/neighbors.h, and the reverse. A test compares the sizes
through BTF. A hello frame has the local experimental EtherType 1 of IEEE Std 802."""

import hashlib
import struct
from typing import Literal, NamedTuple

from fairlead.net.address import pack_address, unpack_address

SILENT, OWNED = 0, 1
"""The states of an address in the map `entries`."""
ClaimKind = Literal["announced", "used", "probed"]
CLAIM_KINDS: tuple[ClaimKind, ...] = ("announced", "used", "probed")
"""How another station uses an address, in the order of `enum claim_kind`."""
EVENTS = (
    "arp_answered",
    "ndp_answered",
    "hello_answered",
    "silenced",
    "claimed",
    "yielded",
    "unreported",
    "invalid",
)
"""The names of the counters, in the order of `enum neighbor_event`."""
HostState = Literal["starting", "ready", "leaving", "returned"]
HOST_STATES: tuple[HostState, ...] = ("starting", "ready", "leaving", "returned")
"""How a host presents itself to other announcers. `returned`: it was cut off from all others a
moment ago, and is ready otherwise."""

ETHERTYPE = 0x88B5
NAME_BYTES = 256
MAX_NAME = 253
"""The longest name of a Node."""
_MAGIC, _VERSION, _REQUEST, _REPLY, _WITHDRAWAL = 0x464C484C, 1, 1, 2, 3

ENTRY_KEY = struct.Struct("=I16s")
ENTRY = struct.Struct("=I")
CLAIM = struct.Struct("=QQ6sBx")
REPORT = struct.Struct("=QI16s6sBB4x")
HOST = struct.Struct(f"=Q8s6sBB{NAME_BYTES}s")
COUNTER = struct.Struct("=Q")
INDEX = struct.Struct("=I")
_ETHERNET = struct.Struct("!6s6sH")
HELLO_HEAD = struct.Struct("!IBBBB8sQI4x16s")
HELLO_BYTES = _ETHERNET.size + HELLO_HEAD.size + NAME_BYTES


class Place(NamedTuple):
    """An address on an interface of this host, by the index of the interface."""

    interface: int
    address: str

    def key(self) -> bytes:
        """Return the key in the maps."""
        return ENTRY_KEY.pack(self.interface, pack_address(self.address))


def place_of(key: bytes) -> Place:
    """Return the place of a key in the maps."""
    interface, address = ENTRY_KEY.unpack(key)
    return Place(interface, unpack_address(address))


class Claim(NamedTuple):
    """Another station uses the address. `yielded`: the kernel has stopped to answer for the
    address, because the deadline of this host's process had passed."""

    place: Place
    mac: bytes
    kind: ClaimKind
    seen_ns: int
    yielded: bool = False


def claim_of(report: bytes) -> Claim:
    """Return the claim in a record of the ring buffer."""
    seen_ns, interface, address, mac, kind, yielded = REPORT.unpack(report)
    return Claim(
        Place(interface, unpack_address(address)), mac, CLAIM_KINDS[kind], seen_ns, bool(yielded)
    )


def recorded_claim(key: bytes, value: bytes) -> Claim:
    """Return the claim in an element of the map `claims`."""
    seen_ns, _, mac, kind = CLAIM.unpack(value)
    return Claim(place_of(key), mac, CLAIM_KINDS[kind], seen_ns)


class Presentation(NamedTuple):
    """How this host presents itself on an interface. `deadline_ns`: of the monotonic clock."""

    group: bytes
    mac: bytes
    name: str
    state: HostState
    deadline_ns: int

    def pack(self) -> bytes:
        """Return the value in the map `hosts`."""
        name = self.name.encode()
        return HOST.pack(
            self.deadline_ns,
            self.group,
            self.mac,
            HOST_STATES.index(self.state),
            min(len(name), NAME_BYTES - 1),
            name,
        )


def presentation_of(value: bytes) -> Presentation:
    """Return the presentation in a value of the map `hosts`."""
    deadline_ns, group, mac, state, length, name = HOST.unpack(value)
    return Presentation(
        group, mac, name[:length].decode(errors="replace"), HOST_STATES[state], deadline_ns
    )


class Hello(NamedTuple):
    """The answer of an announcer. `token`: of the request. `remaining_ms`: the time until its
    kernel yields to other announcers unless its process confirms that it runs; 0: it has passed.
    `address`: the announcer owns this address, as the request asked; empty: the request asked for
    no address."""

    mac: bytes
    name: str
    state: HostState
    remaining_ms: int
    token: int
    address: str = ""


class Withdrawal(NamedTuple):
    """A member has ceased to answer for an address, and stays a member."""

    mac: bytes
    address: str


def group_of(cluster: str, role: str) -> bytes:
    """Return the group of the announcers of this role in this cluster. Announcers of other groups
    on the same link are not members, and their addresses are those of strangers."""
    return hashlib.sha256(f"{cluster}|{role}".encode()).digest()[:8]


def hello_request(
    mac: bytes, group: bytes, token: int, *, to: bytes = b"\xff" * 6, owner_of: str = ""
) -> bytes:
    """Return a request to one member by its MAC address, or to all members. `owner_of`: only the
    owner of this address answers. An ARP probe does not show the owner, because the stack of a
    member answers it too, if the address is assigned to that host."""
    address = pack_address(owner_of) if owner_of else bytes(16)
    return (
        _ETHERNET.pack(to, mac, ETHERTYPE)
        + HELLO_HEAD.pack(_MAGIC, _VERSION, _REQUEST, 0, 0, group, token, 0, address)
        + bytes(NAME_BYTES)
    )


def withdrawal(mac: bytes, group: bytes, address: str) -> bytes:
    """Return the frame that tells all members of a withdrawal. Earlier versions ignore it."""
    return (
        _ETHERNET.pack(b"\xff" * 6, mac, ETHERTYPE)
        + HELLO_HEAD.pack(_MAGIC, _VERSION, _WITHDRAWAL, 0, 0, group, 0, 0, pack_address(address))
        + bytes(NAME_BYTES)
    )


def parse_withdrawal(frame: bytes, group: bytes) -> Withdrawal | None:
    """Return the withdrawal in a frame; None if it is not a valid one of this group."""
    if len(frame) < HELLO_BYTES:
        return None
    _, source, ethertype = _ETHERNET.unpack_from(frame)
    magic, version, kind, _, _, theirs, _, _, address = HELLO_HEAD.unpack_from(
        frame, _ETHERNET.size
    )
    expected = (ETHERTYPE, _MAGIC, _VERSION, _WITHDRAWAL, group)
    if (ethertype, magic, version, kind, theirs) != expected or not any(address):
        return None
    return Withdrawal(source, unpack_address(address))


def parse_hello(frame: bytes, group: bytes) -> Hello | None:
    """Return the answer in a frame; None if it is not a valid answer of this group."""
    if len(frame) < HELLO_BYTES:
        return None
    _, source, ethertype = _ETHERNET.unpack_from(frame)
    magic, version, kind, state, length, theirs, token, remaining_ms, address = (
        HELLO_HEAD.unpack_from(frame, _ETHERNET.size)
    )
    if (ethertype, magic, version, kind, theirs) != (ETHERTYPE, _MAGIC, _VERSION, _REPLY, group):
        return None
    begin = _ETHERNET.size + HELLO_HEAD.size
    try:
        name = frame[begin : begin + length].decode()
    except UnicodeDecodeError:
        return None
    if state >= len(HOST_STATES) or not name or len(name) != length:
        return None
    owned = unpack_address(address) if any(address) else ""
    return Hello(source, name, HOST_STATES[state], remaining_ms, token, owned)
