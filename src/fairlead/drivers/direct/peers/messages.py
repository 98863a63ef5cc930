"""The messages between gateways, as values and as bytes.

In: messages. Out: frames (4 bytes of length, big-endian, then MessagePack), and back.

A follower sends nothing. The gateway that it follows sends HelloMessage, then a TablesMessage and
FlowsMessages for everything that it has, then CompleteMessage. From then on it sends a
TablesMessage or FlowsMessage for every change, and AliveMessage when there is no change.

Invariant: what `read_message` returns is well-formed, whatever was received. Node numbers are valid
only together with the node names of the same message.
"""

import asyncio
import struct

import msgspec

from fairlead.drivers.direct.maps.records import FLOW_KEY
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Unavailable, plain
from fairlead.kube.networks import read_address
from fairlead.net.maglev import DOUBLINGS, MIN_SIZE
from fairlead.net.transition import NONE, TRACKED, Slots

VERSION = 1
MAX_BYTES = 1 << 22
"""Bytes of one message at most."""
ENTRY = struct.Struct(f"={FLOW_KEY.size}sI")
"""`struct entry`: the key of a flow and the number of its node, with CLOSING if the connection is
closing. NONE instead of a number: the flow has no entry any more."""
MAX_ENTRIES = 4096
"""Entries in one message at most."""
_LENGTH = struct.Struct("!I")
_SIZES = {2 * (MIN_SIZE << doubling) for doubling in range(DOUBLINGS + 1)} | {0}


class HelloMessage(msgspec.Struct, frozen=True, tag="hello"):
    """The first message. `instance` identifies the process. `age_s`: for how many seconds the
    tables have followed the cluster without a gap; they may be the sender's own, or inherited at
    its start."""

    instance: str
    age_s: float
    version: int = VERSION


class TablesMessage(msgspec.Struct, frozen=True, tag="tables"):
    """The slots of a listener, and its Service.

    `nodes_with_connections`: nodes that may have connections of it. `restricted`: only source
    ranges may connect. `used`: packets have been forwarded by the slots. `converging`: all its
    connections are tracked, because other gateways may not have the same tables yet.
    """

    address: str
    port: int
    protocol: ListenerProtocol
    service: tuple[str, str]
    uid: str
    nodes: tuple[str, ...]
    current: bytes
    previous: bytes
    by_source: bool
    previous_by_source: bool
    nodes_with_connections: tuple[str, ...] = msgspec.field(name="keeping")
    restricted: bool
    used: bool
    converging: bool = False

    @property
    def key(self) -> ListenerKey:
        return ListenerKey(self.address, self.port, self.protocol)

    @property
    def slots(self) -> Slots:
        return Slots(
            self.nodes, self.current, self.previous, self.by_source, self.previous_by_source
        )


class FlowsMessage(msgspec.Struct, frozen=True, tag="entries"):
    """Flow entries. `records`: a sequence of `struct entry`; `names`: the names of the nodes in
    them.

    `ages_s`: for how many seconds each entry has been unchanged. It is empty in messages with new
    entries, and in messages with all entries of a gateway.
    """

    names: dict[int, str]
    records: bytes
    ages_s: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        return len(self.records) // ENTRY.size


class CompleteMessage(msgspec.Struct, frozen=True, tag="whole"):
    """The whole state has been sent."""


class AliveMessage(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing has changed."""


Message = HelloMessage | TablesMessage | FlowsMessage | CompleteMessage | AliveMessage

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> bytes:
    """Return the message as it is sent."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader, *, within_s: float) -> Message:
    """Return the next message. Raise Unavailable if none arrives in time, the connection ends, or
    the received bytes are not a valid message."""
    try:
        async with asyncio.timeout(within_s):
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > MAX_BYTES:
                raise Unavailable(f"it sent {length} bytes in one message, more than {MAX_BYTES}")
            return decode(await reader.readexactly(length))
    except TimeoutError:
        raise Unavailable(f"it sent nothing for {within_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise Unavailable("it closed the connection") from None
    except OSError as error:
        raise Unavailable(f"the connection broke: {plain(error)}") from error


def decode(body: bytes) -> Message:
    """Return the message in these bytes. Raise Unavailable if they are not a valid message."""
    try:
        message: Message = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise Unavailable(f"it sent an invalid message: {plain(error)}") from error
    match message:
        case HelloMessage(version=version) if version != VERSION:
            raise Unavailable(
                f"it uses version {version} of the protocol, not {VERSION}",
                fix="run the same version on all gateways",
            )
        case TablesMessage() if not _tables_are_valid(message):
            raise Unavailable(f"it sent invalid tables of {message.key}")
        case FlowsMessage() if not _flows_are_valid(message):
            raise Unavailable("it sent invalid entries")
    return message


def _flows_are_valid(message: FlowsMessage) -> bool:
    """Return whether the records are complete, and the numbers are possible node numbers."""
    records = len(message.records)
    if (
        records % ENTRY.size
        or records > MAX_ENTRIES * ENTRY.size
        or len(message.ages_s) not in (0, message.count)
    ):
        return False
    return all(0 <= each < NONE for each in message.names)


def _tables_are_valid(message: TablesMessage) -> bool:
    """Return whether the listener is possible, and every slot names a node of the message."""
    count = len(message.nodes)
    if read_address(message.address) != message.address or not 0 < message.port <= 0xFFFF:
        return False
    if not all(message.nodes) or not {len(message.current), len(message.previous)} <= _SIZES:
        return False
    values = {*memoryview(message.current).cast("H"), *memoryview(message.previous).cast("H")}
    return all(
        each < count or each == NONE for each in values - {TRACKED}
    ) and TRACKED not in memoryview(message.current).cast("H")
