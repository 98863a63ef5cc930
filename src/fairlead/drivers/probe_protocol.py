"""The messages between a gateway and its prober process, sent in frames (`net/frames`). `prober` is
the gateway's side, `roles/prober_process` the process."""

import msgspec

from fairlead.drivers.health_targets import StartProbes, StopProbes
from fairlead.model import ServiceKey, Verdict


class ProbeRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Request to the prober: begin to probe `starts`, then stop `stops`."""

    starts: tuple[StartProbes, ...]
    stops: tuple[StopProbes, ...]


class VerdictChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The arguments of one call of `observe`: a verdict that changed, and the Services for which
    the port is probed."""

    address: str
    port: int
    verdict: Verdict | None
    services: tuple[ServiceKey, ...]
    routed: bool


class ProbeReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Report of the prober. `requests`: the number of requests that it has carried out. `settled`:
    every target has a verdict."""

    requests: int
    settled: bool
    changes: tuple[VerdictChange, ...]
