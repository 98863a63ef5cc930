"""`python -m bench.scale`: Fairlead's roles with a large cluster, compared with the same work by
the official Python client.

In: sizes, a number of rounds, and a folder that is kept between runs. Out: a `Report`, as a table
with ratios or as JSON. Each round measures every subject, one after the other, so that other load
of the machine affects all alike: first the time to the first full plan, against a real API server;
then events of a recorded stream, at a pace, and as fast as they are accepted. Times are those of
this machine; only ratios are comparable with other machines.
"""

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.cluster import cluster
from bench.fixture import Size
from bench.options import add_cluster, options, progress, run_benchmark
from bench.result import (
    COMPARATOR,
    HEADINGS,
    Burst,
    Figures,
    First,
    Paced,
    Report,
    first_of,
    medians,
    paced_of,
    ratios,
    rows,
)
from bench.stream import Recording, Replay, delays_ms, recording
from bench.subject import ROOT, Subject, running

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Refused
from fairlead.kube.access import Access

ROLES = ("controller", "gateway", "node")
SETTLE_S = 1.0
QUICK = Size(services=500, endpoints=10, nodes=50)
Progress = Callable[[str], None]


class Bench:
    """One run. `folder` keeps the cluster and the recording; `official` is the Python interpreter
    of the environment with the official client."""

    def __init__(
        self,
        folder: Path,
        official: Path,
        size: Size,
        *,
        rounds: int,
        pace_per_s: float,
        progress: Progress,
    ) -> None:
        self.folder = folder
        self.official = official
        self.size = size
        self.rounds = rounds
        self.pace_per_s = pace_per_s
        self.progress = progress
        self._log = folder / "subjects.log"

    async def run(self) -> Report:
        """Measure everything. All processes have ended when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        subjects = {role: [sys.executable, "-m", "bench.reading", role] for role in ROLES}
        subjects[COMPARATOR] = [str(self.official), "-m", "bench.official"]
        firsts: dict[str, list[First]] = defaultdict(list)
        recorded = await recording(self.folder, self.size, self.progress)
        async with cluster(self.folder, self.size, self.progress) as server:
            for number in range(self.rounds):
                for name, argv in subjects.items():
                    self.progress(f"round {number + 1} of {self.rounds}: first plan, {name}")
                    firsts[name].append(await self._first(name, argv, server.access))
        streamed: dict[str, list[tuple[Paced, Burst]]] = defaultdict(list)
        for number in range(self.rounds):
            for name, argv in subjects.items():
                self.progress(f"round {number + 1} of {self.rounds}: events, {name}")
                streamed[name].append(await self._streamed(name, argv, recorded))
        return self._report(firsts, streamed)

    async def _first(self, name: str, argv: Sequence[str], access: Access) -> First:
        begun_s = time.monotonic()
        async with running(name, argv, access, self.size, self._log) as subject:
            return first_of(subject.stages, begun_s)

    async def _streamed(
        self, name: str, argv: Sequence[str], recorded: Recording
    ) -> tuple[Paced, Burst]:
        async with (
            Replay(recorded).listen() as replay,
            running(name, argv, replay.access, self.size, self._log) as subject,
        ):
            await asyncio.sleep(SETTLE_S)
            return await self._paced(subject, replay), await self._burst(subject, replay)

    async def _paced(self, subject: Subject, replay: Replay) -> Paced:
        before = (await subject.ask("begin")).usage
        sent = await replay.send(0, self.pace_per_s)
        await subject.has_seen(len(sent))
        report = await subject.ask("report")
        delays = delays_ms(sent, report.applied)
        lasted_s = max(report.applied.values()) - min(sent.values())
        return paced_of(self.pace_per_s, delays, report.cpu_s - before.cpu_s, lasted_s)

    async def _burst(self, subject: Subject, replay: Replay) -> Burst:
        before = (await subject.ask("begin")).usage
        sent = await replay.send(1, 0)
        await subject.has_seen(len(sent))
        report = await subject.ask("report")
        lasted_s = max(report.applied.values()) - min(sent.values())
        return Burst(len(sent) / lasted_s, (report.cpu_s - before.cpu_s) * 1000 / len(sent))

    def _report(
        self,
        firsts: Mapping[str, Sequence[First]],
        streamed: Mapping[str, Sequence[tuple[Paced, Burst]]],
    ) -> Report:
        subjects = {
            name: medians(
                [
                    Figures(first, *rest)
                    for first, rest in zip(firsts[name], streamed[name], strict=True)
                ]
            )
            for name in firsts
        }
        return Report(
            self.size.services, self.size.endpoints, self.size.nodes, self.rounds, subjects
        )


def official_client(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the Python interpreter of the environment with the official client, at the locked
    versions. Raise Refused if `make tools` has not created it."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place, lock = cache / "fairlead" / "official-client", ROOT / "bench" / "requirements.lock"
    stamp = place / ".requirements"
    if not stamp.is_file() or stamp.read_bytes() != lock.read_bytes():
        raise Refused(
            f"the official Python client is not in {place} at the versions of {lock.name}",
            fix="run `make tools`",
        )
    return place / "bin" / "python"


def show(report: Report) -> None:
    """Print the report as a table, and the ratios."""
    draw(HEADINGS, rows(report))
    print(*ratios(report), sep="\n")


def main() -> None:
    parser = options(
        "bench.scale",
        __doc__,
        rounds=3,
        quick=f"one round, {QUICK.services} Services, {QUICK.nodes} Nodes",
        plots=False,
    )
    add_cluster(parser)
    parser.add_argument("--pace", type=float, default=1_000.0, help="events a second")
    arguments = parser.parse_args()
    rounds, size = (
        (1, QUICK)
        if arguments.quick
        else (arguments.rounds, Size(arguments.services, arguments.endpoints, arguments.nodes))
    )

    def measure() -> Report:
        bench = Bench(
            arguments.folder,
            official_client(),
            size,
            rounds=rounds,
            pace_per_s=arguments.pace,
            progress=progress,
        )
        return run(bench.run())

    run_benchmark(arguments, measure, show)


if __name__ == "__main__":
    main()
