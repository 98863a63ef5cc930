"""Length-prefixed MessagePack values on a stream between two processes of one role.

In: values. Out: bytes, and the reverse. For asyncio's streams, and for processes without an asyncio
event loop."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:  # a process without an event loop does not load asyncio
    import asyncio

_LENGTH_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()

FrameT = TypeVar("FrameT", bound=msgspec.Struct)


def frame(value: msgspec.Struct) -> bytes:
    """Return the value with its length prefix, as it is sent."""
    data = _ENCODER.encode(value)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def write(stream: "asyncio.StreamWriter", value: msgspec.Struct) -> None:
    """Send the value as soon as the stream has room."""
    stream.write(frame(value))


async def read(
    stream: "asyncio.StreamReader", decoder: msgspec.msgpack.Decoder[FrameT]
) -> FrameT | None:
    """Return the next value; None if the other side has closed the stream."""
    try:
        length = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "little")
        return decoder.decode(await stream.readexactly(length))
    except (EOFError, ConnectionError):  # asyncio.IncompleteReadError is an EOFError
        return None


class Frames(Generic[FrameT]):
    """A decoder for values in chunks of a stream."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        self._decoder = decoder
        self._received = bytearray()

    def take(self, data: bytes) -> Iterator[FrameT]:
        """Yield the values that are complete with these bytes."""
        self._received += data
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "little")
            if len(self._received) < end:
                return
            yield self._decoder.decode(bytes(self._received[_LENGTH_BYTES:end]))
            del self._received[:end]
