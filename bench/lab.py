"""`python -m bench.lab`: requests, connections and bulk transfers through a lab, by each path to a
server (see `paths`).

In: a number of rounds. Out: a table of ratios to the direct path, or JSON with every figure.
Client, router, gateway, nodes and server share the cores of one machine, so CPU that a load
balancer uses is missing elsewhere. Every round measures all paths in turn, and a ratio compares
figures of the same round; the result is the median over the rounds. CPU is that of the whole
machine (/proc/stat), so it includes everything that a request or a byte costs, in every process and
in the kernel.
"""

import json
import re
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from os import getpid
from pathlib import Path
from statistics import median

import msgspec
from bench.options import options, progress, run_benchmark
from bench.paths import ROUTED, WITHOUT_NODE_PORTS, Paths, must, paths
from bench.plot import Bar, bars
from bench.result import spread

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable

LOADS: Mapping[str, str] = {"saturated": "-t2 -c128", "unsaturated": "-t1 -c16"}
"""wrk's threads and connections. On two cores the first load leaves no idle time."""
UPLOAD, DOWNLOAD = "upload", "download"
CLOSE = ("-H", "Connection: close")
DIRECT, TC, HAPROXY = "direct", "tc", "haproxy"
SECONDS = 3
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60000.0}
_RATE = re.compile(r"Requests/sec:\s+([\d.]+)")


class Figure(msgspec.Struct, frozen=True):
    """One type of traffic in one round: the number per second, and CPU microseconds for each. For
    bulk transfers the unit is a byte. `p50_ms` and `p99_ms` are percentiles of the response time;
    for new connections they begin when the connection is established."""

    per_s: float
    cpu_us: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """The results. `rounds` holds one mapping per round, by path and type of traffic. `seen` is the
    client's address as the server saw it."""

    client: str
    seen: Mapping[str, str]
    rounds: tuple[Mapping[str, Mapping[str, Figure]], ...]

    def ratios(self, path: str, kind: str, base: str = DIRECT) -> list[float]:
        """Return the ratios of rates, one per round."""
        return [each[path][kind].per_s / each[base][kind].per_s for each in self.rounds]

    def cpu_ratios(self, path: str, kind: str, base: str = DIRECT) -> list[float]:
        return [each[path][kind].cpu_us / each[base][kind].cpu_us for each in self.rounds]


def busy_s() -> float:
    """Return the CPU time of the whole machine so far, without idle time."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / 100


class Bench:
    """A run in a lab that is up."""

    def __init__(
        self, built: Paths, path_names: Collection[str], loads: Mapping[str, str], *, seconds: int
    ) -> None:
        self._built = built
        self._path_names = path_names
        self._loads = loads
        self._seconds = seconds

    async def seen(self, path: str) -> str:
        """Return the client's address as the server reports it. Retry until the path works."""
        end = await self._built.take(path)
        command = (
            "curl -s --retry 10 --retry-all-errors --retry-delay 1 --max-time 2 "
            f"http://{end.address}:{end.port}/"
        )
        return await must(self._built.site, "client1", command)

    async def round(self, number: int) -> Mapping[str, Mapping[str, Figure]]:
        """Measure every type of traffic on every path in turn, so that compared figures are
        measured close together. Every second round uses the reverse order: a path finds a node's
        conntrack table as the previous path left it, and the cheapest path leaves most entries."""
        figures: dict[str, dict[str, Figure]] = {path: {} for path in self._path_names}
        for kind, measured in self._kinds().items():
            for path in list(self._path_names)[:: -1 if number % 2 else 1]:
                figures[path][kind] = await self._with_retry(measured, path)
        return figures

    async def _with_retry(self, measured: Callable[[str], Awaitable[Figure]], path: str) -> Figure:
        """Measure once. A failure is reported and the measurement repeated, because it would
        discard all previous rounds."""
        try:
            return await measured(path)
        except Unavailable as error:
            progress(f"{error}; trying again")
            return await measured(path)

    def _kinds(self) -> Mapping[str, Callable[[str], Awaitable[Figure]]]:
        kinds: dict[str, Callable[[str], Awaitable[Figure]]] = {}
        for name, load in self._loads.items():
            kinds[f"requests, {name}"] = partial(self._wrk, load=load)
            kinds[f"connections, {name}"] = partial(self._wrk, load=load, more=CLOSE)
        return {**kinds, UPLOAD: self._iperf, DOWNLOAD: partial(self._iperf, more=("--reverse",))}

    async def _wrk(self, path: str, load: str, more: Sequence[str] = ()) -> Figure:
        end = await self._built.take(path)
        argv = [
            "wrk",
            *load.split(),
            f"-d{self._seconds}s",
            "--latency",
            *more,
            f"http://{end.address}:{end.port}/",
        ]
        begun_s = busy_s()
        code, output, errors = await self._built.site.exec(
            "client1", argv, timeout_s=self._seconds + 30
        )
        used_s = busy_s() - begun_s
        if code:
            raise Unavailable(f"{path}: wrk ended with {code}: {errors or output}")
        per_s = rate_of(path, output)
        return Figure(
            per_s,
            used_s / (per_s * self._seconds) * 1e6,
            _within_ms(output, 50),
            _within_ms(output, 99),
        )

    async def _iperf(self, path: str, more: Sequence[str] = ()) -> Figure:
        end = await self._built.take(path)
        argv = [
            "iperf3",
            "--client",
            end.address,
            "--port",
            str(end.bulk),
            "--time",
            str(self._seconds),
            "--json",
            *more,
        ]
        begun_s = busy_s()
        code, output, errors = await self._built.site.exec(
            "client1", argv, timeout_s=self._seconds + 30
        )
        used_s = busy_s() - begun_s
        report = json.loads(output or "{}")
        received = report.get("end", {}).get("sum_received")
        if not received:  # iperf3 may exit with 0 in spite of an error
            raise Unavailable(
                f"{path}: iperf3 ended with {code}: {report.get('error') or errors or output}"
            )
        return Figure(received["bytes"] / received["seconds"], used_s / received["bytes"] * 1e6)


def rate_of(path: str, output: str) -> float:
    """Return the requests per second that wrk reports. Raise Unavailable if any failed."""
    rate = _RATE.search(output)
    if rate is None or "Non-2xx" in output or not float(rate[1]):
        raise Unavailable(f"{path}: wrk reports: {output}")
    return float(rate[1])


def _within_ms(output: str, percent: int) -> float:
    """Return the percentile of the response time that wrk reports."""
    found = re.search(rf"^\s*{percent}%\s+([\d.]+)(us|ms|s|m)$", output, re.MULTILINE)
    if found is None:
        raise Unavailable(f"wrk did not report the {percent}th percentile: {output}")
    return float(found[1]) * _UNITS_MS[found[2]]


async def measure(
    rounds: int,
    seconds: int,
    path_names: Collection[str] = WITHOUT_NODE_PORTS,
    loads: Mapping[str, str] = LOADS,
) -> Report:
    """Build the lab, measure these paths, and remove the lab."""
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        async with paths(f"bench{getpid()}", Path(folder)) as built:
            bench = Bench(built, path_names, loads, seconds=seconds)
            seen = {path: await bench.seen(path) for path in path_names}
            done = []
            for number in range(rounds):
                progress(f"round {number + 1} of {rounds}")
                done.append(await bench.round(number))
            return Report(built.site.topology.host("client1").addresses[0], seen, tuple(done))


def headings(report: Report) -> tuple[str, ...]:
    kinds = report.rounds[0][DIRECT]
    return ("PATH", *(name.upper() for name in kinds), "CLIENT'S ADDRESS")


def rate_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rates over the direct path's, and the direct path's own rates."""
    return [
        (
            path,
            *(_rate(report, path, kind) for kind in figures),
            "kept" if report.seen[path] == report.client else "lost",
        )
        for path, figures in report.rounds[0].items()
    ]


def _rate(report: Report, path: str, kind: str) -> str:
    if path != DIRECT:
        return spread(report.ratios(path, kind), ".2f")
    per_s = median(each[DIRECT][kind].per_s for each in report.rounds)
    return (
        f"1 ({per_s * 8 / 1e9:.1f} Gbit/s)"
        if kind in (UPLOAD, DOWNLOAD)
        else f"1 ({per_s / 1000:.1f} k/s)"
    )


def cpu_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the CPU over the direct path's, and the direct path's own."""
    return [
        (path, *(_cpu(report, path, kind) for kind in figures), "")
        for path, figures in report.rounds[0].items()
    ]


def _cpu(report: Report, path: str, kind: str) -> str:
    if path != DIRECT:
        return spread(report.cpu_ratios(path, kind), ".2f")
    cpu_us = median(each[DIRECT][kind].cpu_us for each in report.rounds)
    return f"1 ({cpu_us * 1e6:.0f} ps/B)" if kind in (UPLOAD, DOWNLOAD) else f"1 ({cpu_us:.0f} us)"


def summary(report: Report) -> str:
    """Return the ratios that are not over the direct path: Fairlead at tc over HAProxy, and over a
    plain router in the gateway's place."""
    kinds = [kind for kind in report.rounds[0][DIRECT] if kind not in (UPLOAD, DOWNLOAD)]
    lines = []
    for base in (each for each in (HAPROXY, ROUTED) if {TC, each} <= report.rounds[0].keys()):
        for what, ratios in (("a second", report.ratios), ("CPU", report.cpu_ratios)):
            figures = (f"{kind} {spread(ratios(TC, kind, base), '.2f')} x" for kind in kinds)
            lines.append(f"{TC} over {base}, {what}: {'; '.join(figures)}")
    return "\n".join(lines)


def show(report: Report) -> None:
    """Print the report as tables."""
    draw(headings(report), rate_rows(report))
    print("\nCPU of the machine for each request, connection and byte:")
    draw(headings(report), cpu_rows(report))
    print(f"\n{summary(report)}")


def plots(report: Report) -> dict[str, str]:
    """Return plots of the rates and the CPU of each path over the direct one's."""
    path_names = [path for path in report.rounds[0] if path != DIRECT]
    kinds = list(report.rounds[0][DIRECT])
    rates = {
        kind: [Bar(path, report.ratios(path, kind), at) for at, path in enumerate(path_names)]
        for kind in kinds
    }
    cpu = {
        kind: [Bar(path, report.cpu_ratios(path, kind), at) for at, path in enumerate(path_names)]
        for kind in kinds
    }
    return {
        "rates": bars("Rate over the direct path's", "", rates, form=".2f", mark=1.0),
        "cpu": bars(
            "CPU of the whole machine for each, over the direct path's",
            "x",
            cpu,
            form=".2f",
            mark=1.0,
        ),
    }


def main() -> None:
    parser = options("bench.lab", __doc__, rounds=5, quick="one round of a second each")
    path_names = WITHOUT_NODE_PORTS[1:]
    parser.add_argument(
        "--paths",
        nargs="+",
        choices=path_names,
        default=path_names,
        help="paths to compare with the direct one",
    )
    arguments = parser.parse_args()
    rounds, seconds = (1, 1) if arguments.quick else (arguments.rounds, SECONDS)
    run_benchmark(
        arguments, lambda: run(measure(rounds, seconds, (DIRECT, *arguments.paths))), show, plots
    )


if __name__ == "__main__":
    main()
