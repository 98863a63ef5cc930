"""The health ports to probe for each Service, as values, and the steps between two such states.
Pure.

In: LoadBalancers with a health monitor, and the targets that are being probed. Out: the targets of
each Service; the probes to start and to stop."""

from collections.abc import Mapping, Sequence

from fairlead.drivers.liveness import Target
from fairlead.model import LoadBalancer, ServiceKey, Value


class Probes(Value, frozen=True):
    """The targets of one Service, sorted. `local`: the targets are healthCheckNodePorts."""

    targets: tuple[Target, ...]
    local: bool


class StartProbes(Value, frozen=True):
    """Start probing `targets` for this Service."""

    service: ServiceKey
    targets: tuple[Target, ...]
    local: bool

    def __str__(self) -> str:
        return f"probe {_named(self.targets)}"


class StopProbes(Value, frozen=True):
    """Stop probing `targets` for this Service."""

    service: ServiceKey
    targets: tuple[Target, ...]

    def __str__(self) -> str:
        return f"stop probing {_named(self.targets)}"


ProbeChange = StartProbes | StopProbes


def _named(targets: Sequence[Target]) -> str:
    others = len(targets) - 1
    return f"{targets[0]}" + (f" and {others} others" if others else "")


def probes_of(balancer: LoadBalancer) -> Probes:
    """Return the health ports of all members of one Service."""
    monitor = balancer.health_monitor
    if monitor is None:
        return Probes((), False)
    routed = balancer.terminates_connections
    addresses = {member.address for listener in balancer.listeners for member in listener.members}
    targets = tuple(
        [Target(address, monitor.port, monitor.path, routed) for address in sorted(addresses)]
    )
    return Probes(targets, any(listener.policy == "Local" for listener in balancer.listeners))


def render(intents: Mapping[ServiceKey, LoadBalancer]) -> dict[ServiceKey, Probes]:
    """Return the health ports of all members of each Service. A Service without a health monitor is
    left out."""
    rendered = ((key, probes_of(balancer)) for key, balancer in intents.items())
    return {key: probes for key, probes in rendered if probes.targets}


def after(before: Probes | None, change: ProbeChange) -> Probes:
    """Return the targets of a Service after the change."""
    held = before.targets if before else ()
    if isinstance(change, StartProbes):
        return Probes(
            tuple(sorted({*held, *change.targets})) if held else change.targets, change.local
        )
    left = tuple(sorted(set(held).difference(change.targets)))
    return Probes(left, before.local if before else False)


def diff(
    desired: Mapping[ServiceKey, Probes], actual: Mapping[ServiceKey, Probes]
) -> list[ProbeChange]:
    """Return the steps from `actual` to `desired`. Starts come before stops, so that a target that
    moves from one Service to another is probed without a break."""
    nothing = Probes((), False)
    starts: list[ProbeChange] = []
    stops: list[ProbeChange] = []
    for key in sorted(desired.keys() | actual.keys()):
        wanted, present = desired.get(key, nothing), actual.get(key, nothing)
        if wanted == present:
            continue
        if not present.targets:
            starts.append(StartProbes(key, wanted.targets, wanted.local))
            continue
        kept = set(present.targets) if wanted.local == present.local else set()
        if new := tuple(target for target in wanted.targets if target not in kept):
            starts.append(StartProbes(key, new, wanted.local))
        if over := tuple(sorted(set(present.targets).difference(wanted.targets))):
            stops.append(StopProbes(key, over))
    return starts + stops
