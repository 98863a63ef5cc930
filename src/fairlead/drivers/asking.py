"""The messages between a gateway and its prober, in frames (`net/frames`). See `prober` and
`roles/probing`."""

import msgspec

from fairlead.drivers.health_targets import StartProbes, StopProbes
from fairlead.model import ServiceKey, Verdict


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
    """From the prober. `heard`: how many frames it has carried out so far. `settled`: something is
    known then of every target."""

    heard: int
    settled: bool
    shown: tuple[Shown, ...]
