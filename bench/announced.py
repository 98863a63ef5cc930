"""The results of `bench.announce`, and the tables that show them. Pure.

In: what each event did to the callers of each way to announce an address, round by round. Out: a
`Report`, and rows of tables. A way is a system and a method, such as "fairlead l2".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import msgspec
from bench.caller import Called
from bench.result import spread

BASES = {"l2": "metallb l2", "bgp": "metallb bgp"}
"""The way to which figures are compared, by the last word of the name of a way."""


class Effect(msgspec.Struct, frozen=True):
    """The effect of an event on the callers of one address. `broken` counts open connections by the
    node of their pod. `host` is the host that the event affected. A host with pods takes these pods
    along when it is silent, so callers also notice how long its pods count as alive."""

    called: Called
    open: int
    broken: Mapping[str, int]
    seconds: float
    host: str = ""
    pods: int = 0
    """The number of pods on that host."""

    @property
    def broken_elsewhere(self) -> int:
        """The broken connections whose pods were on other hosts."""
        return sum(number for node, number in self.broken.items() if node != self.host)

    @property
    def lost_requests(self) -> int:
        """Calls that failed, and datagrams without an answer."""
        return self.called.failed + self.called.unanswered


class Share(msgspec.Struct, frozen=True):
    """The connections of a burst, by pod that answered at least one. `pods` is the number of all
    pods."""

    answered: int
    failed: int
    by_pod: Mapping[str, int]
    pods: int

    @property
    def busiest_over_fair(self) -> float:
        return max(self.by_pod.values()) * self.pods / self.answered

    @property
    def idlest_over_fair(self) -> float:
        idlest = min(self.by_pod.values()) if len(self.by_pod) == self.pods else 0
        return idlest * self.pods / self.answered


class Idle(msgspec.Struct, frozen=True):
    """CPU of all processes of a system while nothing happens, as a share of one core, and the sum
    of their resident memory in MiB."""

    processes: int
    cpu_share: float
    resident_mib: float


class Many(msgspec.Struct, frozen=True):
    """Many addresses: from the creation of the first Service to that of the last, and until all
    addresses are reached (`announce_parts.many`). `idle`: the cost of the system afterwards."""

    addresses: int
    created_s: float
    reached_s: float
    idle: Idle


class Report(msgspec.Struct, frozen=True):
    """All results. Parts that were not measured are empty."""

    events: tuple[Mapping[str, Mapping[str, Effect]], ...] = ()
    """One mapping per round, by event and way."""
    changes: tuple[Mapping[str, Mapping[str, Effect]], ...] = ()
    """Changes of the ECMP routes, like `events`. The key is the change and the router's groups."""
    created_ms: Mapping[str, Sequence[float]] = {}
    """From the creation of a Service to its first answer, by way."""
    shares: Mapping[str, Share] = {}
    rates: tuple[Mapping[str, Mapping[str, float]], ...] = ()
    """Requests or connections per second, one mapping per round, by type and path."""
    many: Mapping[str, Many] = {}
    idle: Mapping[str, Idle] = {}


EVENT_HEADINGS = (
    "EVENT",
    "WAY",
    "HOST HAS",
    "RUNS",
    "LONGEST GAP, MEDIAN",
    "WORST",
    "OF METALLB'S",
    "FAILED CALLS",
    "FOR",
    "BROKEN OF OPEN: ON THE HOST",
    "ELSEWHERE",
)


def event_rows(
    rounds: Sequence[Mapping[str, Mapping[str, Effect]]],
) -> list[tuple[str, ...]]:
    """Return a row for each event and way. Numbers are median and worst."""
    rows = []
    for event in dict.fromkeys(name for each in rounds for name in each):
        effects: dict[str, list[Effect]] = {}
        for each in rounds:
            for way, effect in each.get(event, {}).items():
                effects.setdefault(way, []).append(effect)
        for way, every in effects.items():
            base = effects.get(BASES[way.split()[-1]], [])
            for name in ("pods", "no pods"):
                found = [each for each in every if (each.pods > 0) == (name == "pods")]
                if found:
                    row = event, way, name, str(len(found)), *_figures(found, base)
                    rows.append(row)
    return rows


def _figures(found: Sequence[Effect], base: Sequence[Effect]) -> tuple[str, ...]:
    def gap(effects: Sequence[Effect]) -> float:
        return median(each.called.longest_gap_ms for each in effects)

    return (
        f"{gap(found):.0f} ms",
        f"{max(each.called.longest_gap_ms for each in found):.0f} ms",
        f"{gap(found) / gap(base):.3f}" if base else "-",
        _median_and_worst(found, lambda each: each.called.failed),
        _median_and_worst(found, lambda each: each.called.window_ms, " ms"),
        _median_and_worst(found, lambda each: each.broken.get(each.host, 0)),
        _median_and_worst(found, lambda each: each.broken_elsewhere),
    )


def _median_and_worst(
    found: Iterable[Effect], of: Callable[[Effect], float], unit: str = ""
) -> str:
    values = [of(each) for each in found]
    return f"{median(values):.0f}{unit}, {max(values):.0f}{unit}"


SHARE_HEADINGS = ("WAY", "CONNECTIONS", "FAILED", "BUSIEST POD OVER FAIR", "IDLEST OVER FAIR")


def share_rows(shares: Mapping[str, Share]) -> list[tuple[str, ...]]:
    return [
        (
            way,
            str(each.answered),
            str(each.failed),
            f"{each.busiest_over_fair:.3f}",
            f"{each.idlest_over_fair:.3f}",
        )
        for way, each in shares.items()
    ]


RATE_HEADINGS = ("TYPE", "POD", "ANNOUNCE OVER POD", "DIRECT OVER POD", "ANNOUNCE OVER DIRECT")


def rate_rows(
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
) -> list[tuple[str, ...]]:
    """Return a row for each type. Ratios compare figures of the same round."""

    def ratios(kind: str, path: str, base: str) -> str:
        return spread([each[kind][path] / each[kind][base] for each in rounds], ".2f")

    return [
        (
            kind,
            f"{median(each[kind]['pod'] for each in rounds) / 1000:.1f} k/s",
            ratios(kind, "announce", "pod"),
            ratios(kind, "direct", "pod"),
            ratios(kind, "announce", "direct"),
        )
        for kind in (rounds[0] if rounds else ())
    ]


COST_HEADINGS = (
    "WAY",
    "FIRST ANSWER AFTER CREATION",
    "MANY ADDRESSES: ALL CREATED",
    "ALL REACHED",
    "IDLE CPU WITH THEM",
    "IDLE CPU, OF A CORE",
    "RSS",
)


def cost_rows(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each way with the time to a first answer, the time for many addresses, and
    the cost of an idle system."""
    ways = dict.fromkeys((*report.created_ms, *report.many, *report.idle))
    return [(way, *_costs(report, way)) for way in ways]


def _costs(report: Report, way: str) -> tuple[str, ...]:
    created, many, idle = (
        report.created_ms.get(way),
        report.many.get(way),
        report.idle.get(way),
    )
    return (
        f"{median(created):.0f} ms, worst {max(created):.0f} ms" if created else "-",
        f"{many.created_s:.1f} s" if many else "-",
        f"{many.reached_s:.1f} s" if many else "-",
        f"{many.idle.cpu_share:.1%}" if many else "-",
        f"{idle.cpu_share:.1%}" if idle else "-",
        f"{idle.resident_mib:.0f} MiB in {idle.processes}" if idle else "-",
    )
