"""What a gateway and its prober say to each other, and how. See `prober` and `roles/probing`.

In: values. Out: frames on a stream, each its length and its value as MessagePack.
"""

import asyncio
from typing import TypeVar

import msgspec

from fairlead.drivers.health_targets import StartProbes, StopProbes
from fairlead.model import ServiceKey, Verdict

_LENGTH_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()


class Asked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To the prober: begin these, then end those."""

    starts: tuple[StartProbes, ...]
    stops: tuple[StopProbes, ...]


class Shown(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What `observe` is told: a verdict that has changed, and for whom the port is asked."""

    address: str
    port: int
    verdict: Verdict | None
    services: tuple[ServiceKey, ...]
    routed: bool


class Told(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From the prober. `heard`: how many frames it has carried out so far. `settled`: something is known then of every
    target."""

    heard: int
    settled: bool
    shown: tuple[Shown, ...]


FrameT = TypeVar("FrameT", Asked, Told)


def write(stream: asyncio.StreamWriter, frame: Asked | Told) -> None:
    """Send it as soon as there is room."""
    data = _ENCODER.encode(frame)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


async def read(stream: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[FrameT]) -> FrameT | None:
    """The next one. None: the other side has ended."""
    try:
        length = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "little")
        return decoder.decode(await stream.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
