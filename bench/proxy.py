"""`python -m bench.proxy`: the cost of class fairlead.io/proxy, compared with class direct and with
a HAProxy configured by hand.

In: a number of rounds. Out: tables of ratios, or JSON with every figure. In a lab (see `paths`) a
client reaches the same pod through a Service of class direct, through a Service of class proxy, and
through a HAProxy that is not managed by Fairlead: on the same gateway, and on a host that does
nothing else. All use the same node port. Each round measures all paths in turn (see `lab`). After
that, a gateway gets a thousand Services (see `many`).
"""

from collections.abc import Sequence
from statistics import median

import msgspec
from bench.fixture import Size
from bench.lab import DOWNLOAD, UPLOAD, Figure
from bench.many import Many
from bench.options import options, progress, run_benchmark
from bench.paths import THROUGH_HAPROXY
from bench.plot import Bar, bars
from bench.result import spread

from bench import lab, many
from fairlead.cli.interrupt import run
from fairlead.cli.output import draw

DIRECT, PROXY, SAME_HOST, BY_HAND = THROUGH_HAPROXY
SIZE = Size(services=1000, endpoints=3, nodes=100)
REPEATS = 3
"""Repetitions of each event in each round."""
NAMES = {
    DIRECT: "class direct (tc)",
    PROXY: "class proxy",
    SAME_HOST: "HAProxy by hand on the gateway",
    BY_HAND: "HAProxy by hand elsewhere",
}


class Report(msgspec.Struct, frozen=True):
    """The results. `many` holds one value per round."""

    paths: lab.Report
    services: int
    nodes: int
    many: tuple[Many, ...]

    @property
    def kinds(self) -> Sequence[str]:
        return list(self.paths.rounds[0][PROXY])

    @property
    def with_latency(self) -> Sequence[str]:
        """The types of traffic that have a latency."""
        return [kind for kind in self.kinds if kind not in (UPLOAD, DOWNLOAD)]

    def of(self, path: str, kind: str) -> list[Figure]:
        """Return the figures of each round."""
        return [each[path][kind] for each in self.paths.rounds]


async def measure(
    rounds: int, seconds: int, size: Size, repeats: int, *, alone: bool = False
) -> Report:
    """Measure both parts. With `alone`, only compare class proxy and HAProxy on the same
    gateway."""
    paths = await lab.measure(rounds, seconds, (PROXY, SAME_HOST) if alone else THROUGH_HAPROXY)
    found = []
    for number in range(0 if alone else rounds):
        progress(f"{size.services} Services, round {number + 1} of {rounds}")
        found.append(await many.measure(size, repeats))
    return Report(paths, size.services, size.nodes, tuple(found))


def ratio_rows(report: Report) -> list[tuple[str, ...]]:
    """Return class proxy over the others, by round: rates, median and 99th percentile of the
    latency, CPU."""
    rows = []
    for base in (each for each in (SAME_HOST, BY_HAND, DIRECT) if each in report.paths.rounds[0]):
        over = f"class proxy over {NAMES[base]}"
        rates = (spread(report.paths.ratios(PROXY, kind, base), ".2f") for kind in report.kinds)
        rows.append((f"{over}, a second", *rates))
        for percent, name in ((50, "p50_ms"), (99, "p99_ms")):
            latencies = (
                spread(
                    [
                        ours / theirs
                        for ours, theirs in zip(*_both(report, kind, base, name), strict=True)
                    ],
                    ".2f",
                )
                if kind in report.with_latency
                else "-"
                for kind in report.kinds
            )
            rows.append((f"{over}, p{percent}", *latencies))
        rows.append(
            (
                f"{over}, CPU",
                *(
                    spread(report.paths.cpu_ratios(PROXY, kind, base), ".2f")
                    for kind in report.kinds
                ),
            )
        )
    return rows


def _both(report: Report, kind: str, base: str, name: str) -> tuple[list[float], list[float]]:
    ours, theirs = (
        [getattr(each, name) for each in report.of(path, kind)] for path in (PROXY, base)
    )
    return ours, theirs


def figure_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the medians of each path: rate, and p50 / p99."""
    paths = [path for path in THROUGH_HAPROXY if path in report.paths.rounds[0]]
    return [
        (NAMES[path], *(_figure(report.of(path, kind), kind) for kind in report.kinds))
        for path in paths
    ]


def _figure(figures: Sequence[Figure], kind: str) -> str:
    per_s = median(each.per_s for each in figures)
    if kind in (UPLOAD, DOWNLOAD):
        return f"{per_s * 8 / 1e9:.1f} Gbit/s"
    p50_ms, p99_ms = (
        median(getattr(each, name) for each in figures) for name in ("p50_ms", "p99_ms")
    )
    return f"{per_s / 1000:.1f} k/s, {p50_ms:.1f} / {p99_ms:.1f} ms"


def headings(report: Report, first: str) -> tuple[str, ...]:
    return (first, *(kind.upper() for kind in report.kinds))


EFFECTS = {
    "add_s": "Service added, until it answers",
    "remove_s": "Service removed, until it does not answer",
    "member_s": "member removed, until HAProxy sends it no new connections",
    "first_ranges_s": "1,000 source ranges added",
    "ranges_s": "1,000 source ranges replaced",
}
MANY_HEADINGS = ("EVENT", "DELAY")


def effect_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the delays over all repetitions in all rounds."""
    return [(what, f"{spread(effects_ms(report, name))} ms") for name, what in EFFECTS.items()]


def effects_ms(report: Report, name: str) -> list[float]:
    return [seconds * 1000 for each in report.many for seconds in getattr(each, name)]


def memory(report: Report) -> str:
    """Return memory, and the time of a start, as text."""
    ready, gateway, haproxy, alone = (
        spread([getattr(each, name) for each in report.many], form)
        for name, form in (
            ("ready_s", ".1f"),
            ("gateway_mib", ".0f"),
            ("haproxy_mib", ".0f"),
            ("haproxy_alone_mib", ".0f"),
        )
    )
    sizes = f"the gateway {gateway} MiB, HAProxy {haproxy} MiB (with one Service {alone} MiB)"
    return f"a start from nothing {ready} s; memory: {sizes}"


def show(report: Report) -> None:
    """Print the report as tables."""
    draw(headings(report, "RATIO"), ratio_rows(report))
    print()
    draw(headings(report, "PATH"), figure_rows(report))
    if not report.many:
        return
    print(f"\n{report.services} Services of class proxy, {report.nodes} nodes:")
    draw(MANY_HEADINGS, effect_rows(report))
    print(memory(report))


def plots(report: Report) -> dict[str, str]:
    """Return the plot of class proxy over HAProxy by hand on the same host."""
    groups = {
        "a second": [
            Bar(kind, report.paths.ratios(PROXY, kind, SAME_HOST), 0) for kind in report.kinds
        ],
        "CPU": [
            Bar(kind, report.paths.cpu_ratios(PROXY, kind, SAME_HOST), 1) for kind in report.kinds
        ],
    }
    for percent, name in ((50, "p50_ms"), (99, "p99_ms")):
        groups[f"p{percent}"] = [
            Bar(
                kind,
                [
                    ours / theirs
                    for ours, theirs in zip(*_both(report, kind, SAME_HOST, name), strict=True)
                ],
                2,
            )
            for kind in report.with_latency
        ]
    return {
        "proxy": bars(
            "Class proxy over HAProxy configured by hand on the same gateway (1: the same)",
            "",
            groups,
            form=".2f",
            mark=1.0,
        )
    }


def main() -> None:
    parser = options(
        "bench.proxy", __doc__, rounds=6, quick="one round of a second each, a hundred Services"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="only compare class proxy with HAProxy by hand on the same gateway",
    )
    arguments = parser.parse_args()
    quick = (1, 1, Size(services=100, endpoints=3, nodes=20), 1)
    sizes = quick if arguments.quick else (arguments.rounds, lab.SECONDS, SIZE, REPEATS)
    run_benchmark(arguments, lambda: run(measure(*sizes, alone=arguments.alone)), show, plots)


if __name__ == "__main__":
    main()
