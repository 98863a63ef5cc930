"""`python -m bench.lab`: requests, connections and bulk through a lab, by each way to a server (see
`paths`).

In: a number of rounds. Out: a table of ratios to the direct way, or JSON with every figure. Client,
router, gateway, nodes and server share the cores of one machine, so what a balancer takes, the
others lack. Every round measures all ways in turn, and a ratio is of figures of the same round; the
median over the rounds counts. CPU is that of the whole machine (/proc/stat): of all that a request
or a byte takes, in every process and in the kernel."""

import json
import re
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from os import getpid
from pathlib import Path
from statistics import median

import msgspec
from bench.options import give_out, options, tell
from bench.paths import ROUTED, WITHOUT_NODE_PORTS, Paths, must, paths
from bench.plot import Bar, bars
from bench.result import spread

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable

LOADS: Mapping[str, str] = {"saturated": "-t2 -c128", "unsaturated": "-t1 -c16"}
"""wrk's threads and connections. With two cores the first leaves none idle."""
UPLOAD, DOWNLOAD = "upload", "download"
CLOSE = ("-H", "Connection: close")
DIRECT, TC, HAPROXY = "direct", "tc", "haproxy"
SECONDS = 3
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60000.0}
_RATE = re.compile(r"Requests/sec:\s+([\d.]+)")


class Figure(msgspec.Struct, frozen=True):
    """Of one kind, in one round: so many a second, and CPU microseconds for each. Of bulk: bytes.
    `p50_ms`, `p99_ms`: half of the requests, and 99 of 100, were answered within so long; of new
    connections, from their being open on."""

    per_s: float
    cpu_us: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """`rounds`: in each, by way and kind. `seen`: the client's address as the server saw it."""

    client: str
    seen: Mapping[str, str]
    rounds: tuple[Mapping[str, Mapping[str, Figure]], ...]

    def ratios(self, way: str, kind: str, base: str = DIRECT) -> list[float]:
        """Of rates, round by round."""
        return [each[way][kind].per_s / each[base][kind].per_s for each in self.rounds]

    def cpu_ratios(self, way: str, kind: str, base: str = DIRECT) -> list[float]:
        return [each[way][kind].cpu_us / each[base][kind].cpu_us for each in self.rounds]


def busy_s() -> float:
    """CPU time of the whole machine so far, but for what was idle."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / 100


class Bench:
    """One run in a lab that is up."""

    def __init__(
        self, built: Paths, ways: Collection[str], loads: Mapping[str, str], *, seconds: int
    ) -> None:
        self._built = built
        self._ways = ways
        self._loads = loads
        self._seconds = seconds

    async def seen(self, way: str) -> str:
        """The client's address, as the server tells it. Asked until the way is open."""
        end = await self._built.take(way)
        command = (
            "curl -s --retry 10 --retry-all-errors --retry-delay 1 --max-time 2 "
            f"http://{end.address}:{end.port}/"
        )
        return await must(self._built.site, "client1", command)

    async def round(self, number: int) -> Mapping[str, Mapping[str, Figure]]:
        """Every kind, of every way in turn: what is compared is measured close together. Each
        second round begins at the other end: a way finds a node's table of connections as the one
        before it has left it, and the cheapest leaves most."""
        figures: dict[str, dict[str, Figure]] = {way: {} for way in self._ways}
        for kind, measured in self._kinds().items():
            for way in list(self._ways)[:: -1 if number % 2 else 1]:
                figures[way][kind] = await self._patiently(measured, way)
        return figures

    async def _patiently(self, measured: Callable[[str], Awaitable[Figure]], way: str) -> Figure:
        """One that fails is said, and measured once more: it would take all rounds before it
        along."""
        try:
            return await measured(way)
        except Unavailable as error:
            tell(f"{error}; once more")
            return await measured(way)

    def _kinds(self) -> Mapping[str, Callable[[str], Awaitable[Figure]]]:
        kinds: dict[str, Callable[[str], Awaitable[Figure]]] = {}
        for name, load in self._loads.items():
            kinds[f"requests, {name}"] = partial(self._wrk, load=load)
            kinds[f"connections, {name}"] = partial(self._wrk, load=load, more=CLOSE)
        return {**kinds, UPLOAD: self._iperf, DOWNLOAD: partial(self._iperf, more=("--reverse",))}

    async def _wrk(self, way: str, load: str, more: Sequence[str] = ()) -> Figure:
        end = await self._built.take(way)
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
        rate = _RATE.search(output)
        if code or rate is None or "Non-2xx" in output or not float(rate[1]):
            raise Unavailable(f"{way}: wrk ended with {code}: {errors or output}")
        per_s = float(rate[1])
        return Figure(
            per_s,
            used_s / (per_s * self._seconds) * 1e6,
            _within_ms(output, 50),
            _within_ms(output, 99),
        )

    async def _iperf(self, way: str, more: Sequence[str] = ()) -> Figure:
        end = await self._built.take(way)
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
        told = json.loads(output or "{}")
        received = told.get("end", {}).get("sum_received")
        if not received:  # also where it ends with 0
            raise Unavailable(
                f"{way}: iperf3 ended with {code}: {told.get('error') or errors or output}"
            )
        return Figure(received["bytes"] / received["seconds"], used_s / received["bytes"] * 1e6)


def _within_ms(output: str, percent: int) -> float:
    """What wrk says that so many of the answers took at most."""
    found = re.search(rf"^\s*{percent}%\s+([\d.]+)(us|ms|s|m)$", output, re.MULTILINE)
    if found is None:
        raise Unavailable(f"wrk does not say how long {percent} % of the answers took: {output}")
    return float(found[1]) * _UNITS_MS[found[2]]


async def measure(
    rounds: int,
    seconds: int,
    ways: Collection[str] = WITHOUT_NODE_PORTS,
    loads: Mapping[str, str] = LOADS,
) -> Report:
    """Build the lab, measure these ways, take it away."""
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        async with paths(f"bench{getpid()}", Path(folder)) as built:
            bench = Bench(built, ways, loads, seconds=seconds)
            seen = {way: await bench.seen(way) for way in ways}
            done = []
            for number in range(rounds):
                tell(f"round {number + 1} of {rounds}")
                done.append(await bench.round(number))
            return Report(built.site.topology.host("client1").addresses[0], seen, tuple(done))


def headings(report: Report) -> tuple[str, ...]:
    kinds = report.rounds[0][DIRECT]
    return ("WAY", *(name.upper() for name in kinds), "CLIENT'S ADDRESS")


def rate_rows(report: Report) -> list[tuple[str, ...]]:
    """How many a second, over the direct way's; the direct way's own number."""
    return [
        (
            way,
            *(_rate(report, way, kind) for kind in figures),
            "kept" if report.seen[way] == report.client else "lost",
        )
        for way, figures in report.rounds[0].items()
    ]


def _rate(report: Report, way: str, kind: str) -> str:
    if way != DIRECT:
        return spread(report.ratios(way, kind), ".2f")
    per_s = median(each[DIRECT][kind].per_s for each in report.rounds)
    return (
        f"1 ({per_s * 8 / 1e9:.1f} Gbit/s)"
        if kind in (UPLOAD, DOWNLOAD)
        else f"1 ({per_s / 1000:.1f} k/s)"
    )


def cpu_rows(report: Report) -> list[tuple[str, ...]]:
    """CPU for each, over the direct way's; the direct way's own."""
    return [
        (way, *(_cpu(report, way, kind) for kind in figures), "")
        for way, figures in report.rounds[0].items()
    ]


def _cpu(report: Report, way: str, kind: str) -> str:
    if way != DIRECT:
        return spread(report.cpu_ratios(way, kind), ".2f")
    cpu_us = median(each[DIRECT][kind].cpu_us for each in report.rounds)
    return f"1 ({cpu_us * 1e6:.0f} ps/B)" if kind in (UPLOAD, DOWNLOAD) else f"1 ({cpu_us:.0f} us)"


def summary(report: Report) -> str:
    """Fairlead at tc over HAProxy, and over a mere router in the gateway's place: ratios that are
    not over the direct way."""
    kinds = [kind for kind in report.rounds[0][DIRECT] if kind not in (UPLOAD, DOWNLOAD)]
    lines = []
    for base in (each for each in (HAPROXY, ROUTED) if {TC, each} <= report.rounds[0].keys()):
        for what, ratios in (("a second", report.ratios), ("CPU", report.cpu_ratios)):
            figures = (f"{kind} {spread(ratios(TC, kind, base), '.2f')} x" for kind in kinds)
            lines.append(f"{TC} over {base}, {what}: {'; '.join(figures)}")
    return "\n".join(lines)


def show(report: Report) -> None:
    """As tables."""
    draw(headings(report), rate_rows(report))
    print("\nCPU of the machine for each request, connection and byte:")
    draw(headings(report), cpu_rows(report))
    print(f"\n{summary(report)}")


def plots(report: Report) -> dict[str, str]:
    """Rates and CPU of each way over the direct one's."""
    ways = [way for way in report.rounds[0] if way != DIRECT]
    kinds = list(report.rounds[0][DIRECT])
    rates = {
        kind: [Bar(way, report.ratios(way, kind), at) for at, way in enumerate(ways)]
        for kind in kinds
    }
    cpu = {
        kind: [Bar(way, report.cpu_ratios(way, kind), at) for at, way in enumerate(ways)]
        for kind in kinds
    }
    return {
        "rates": bars(
            "A second, over the direct way (1: as many)", "", rates, form=".2f", mark=1.0
        ),
        "cpu": bars(
            "CPU of the whole machine for each, over the direct way", "x", cpu, form=".2f", mark=1.0
        ),
    }


def main() -> None:
    parser = options("bench.lab", __doc__, rounds=5, quick="one round of a second each")
    ways = WITHOUT_NODE_PORTS[1:]
    parser.add_argument(
        "--ways", nargs="+", choices=ways, default=ways, help="which to compare with the direct one"
    )
    asked = parser.parse_args()
    rounds, seconds = (1, 1) if asked.quick else (asked.rounds, SECONDS)
    give_out(asked, lambda: run(measure(rounds, seconds, (DIRECT, *asked.ways))), show, plots)


if __name__ == "__main__":
    main()
