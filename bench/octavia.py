"""`python -m bench.octavia`: the cost of Services of class fairlead.io/octavia at a real Octavia,
in API calls and in time.

In: the number of Services, ports and nodes. Out: a `Report`, as a table or as JSON. The
controller's own loop and driver, with their default settings, use a real Keystone and Octavia's API
and worker (see `tests.openstack`) with provider amphora. Upstream's no-op drivers take the place of
virtual machines, so the times are those of Octavia's own work, on this machine. A proxy in between
counts the calls. The same is measured with OpenStack's own cloud controller if it was built
(`bench.occm`); each gets its own servers, in turn.

Measured: all Services are created; a node is added to all; a controller restarts and finds nothing
to do; a node is removed from all while the provider takes `--slow` seconds for each change, as
amphorae of a real cloud do.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

import msgspec
from bench.cost import Cost, Figures, Size
from bench.occm import Occm, empty_neutron, find
from bench.options import log_to_stderr, options, progress, run_benchmark
from tests.drivers.octavia.site import listener, service, settings
from tests.openstack import places
from tests.openstack.fault_proxy import FaultProxy
from tests.openstack.keystone import Keystone
from tests.openstack.octavia import Octavia

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.driver import OctaviaDriver
from fairlead.drivers.octavia.marks import Owner
from fairlead.errors import Unavailable
from fairlead.kube.events import Recorder
from fairlead.model import ExistingLoadBalancer, LoadBalancer, Member, Outcome, ServiceKey
from fairlead.plan.cloud import Claimant, with_existing
from fairlead.reconcile import Loop, Pace
from fairlead.roles.octavia import AT_ONCE, AUDIT_INTERVAL_S
from fairlead.sections import OctaviaConfig
from fairlead.state import Subscribers

FAIRLEAD, OCCM = "fairlead", "occm"
SLOW_S = 5.0
WITHIN_S = 3600.0


QUICK = Size(services=4, ports=2, nodes=5)


class Report(msgspec.Struct, frozen=True):
    """The costs in each round, by subject. `slow_s` is the provider's time for each change in the
    last measurement, or 0 if that was not measured."""

    size: Size
    slow_s: float
    rounds: tuple[dict[str, Figures], ...]


class _NullRecorder(Recorder):
    """A recorder that drops events, which are not measured."""

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        """Drop the event."""


class Services:
    """The Services that the loop reconciles, with members on as many nodes as `want` sets."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.has_synced = asyncio.Event()
        self.has_synced.set()
        self.subscribers = Subscribers[ServiceKey]()
        self.wanted: dict[ServiceKey, LoadBalancer] = {}
        self.done: dict[ServiceKey, LoadBalancer] = {}
        self.existing: dict[ServiceKey, ExistingLoadBalancer] = {}
        self._changed = asyncio.Event()

    @property
    def services(self) -> Collection[ServiceKey]:
        return self.wanted.keys()

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer]:
        return {
            key: with_existing(self.wanted[key], self.existing.get(key))
            for key in keys
            if key in self.wanted
        }

    def claimant_of(self, key: ServiceKey) -> Claimant | None:
        return Claimant(self.wanted[key].uid) if key in self.wanted else None

    def observe(self, key: ServiceKey, existing: ExistingLoadBalancer | None) -> None:
        if existing != self.existing.get(key):
            if existing is None:
                del self.existing[key]
            else:
                self.existing[key] = existing
            self.subscribers.mark((key,))

    def report(
        self, intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        self.done |= {
            key: intents[key]
            for key, each in outcomes.items()
            if each.state == "done" and key in intents
        }
        self._changed.set()

    def want(self, nodes: int) -> None:
        """Plan all Services, with members on this number of nodes."""
        members = [
            Member(f"node{each}", f"10.1.{each // 250}.{each % 250 + 1}", 1, "active")
            for each in range(nodes)
        ]
        ports = [listener(80 + port, *members) for port in range(self.size.ports)]
        for number in range(self.size.services):
            key = ServiceKey("bench", f"web-{number}")
            self.wanted[key] = service(*ports, uid=f"uid-{number}", octavia=settings(), service=key)
        self.subscribers.mark(self.wanted)

    async def are_done(self) -> None:
        """Return once all Services are as planned. Raise Unavailable after an hour."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while self.done != self.plan(self.wanted):
                    self._changed.clear()
                    await self._changed.wait()
                return
        raise Unavailable(f"after {WITHIN_S:.0f} s not every Service was done")


class Fairlead:
    """One measurement of Fairlead's controller."""

    def __init__(self, size: Size, keystone: Keystone, proxy: FaultProxy) -> None:
        self._keystone, self._proxy = keystone, proxy
        self._services = Services(size)

    async def measure(self, octavia: Octavia, slow_s: float) -> Figures:
        """Return all four costs; without the last if `slow_s` is 0."""
        services = self._services
        nodes = services.size.nodes
        async with self._controller():
            created = await self._cost("all are created", nodes)
            added = await self._cost("a node is added", nodes + 1)
        services.done.clear()
        services.existing.clear()
        async with self._controller():
            restarted = await self._cost("a controller restarts", 0)
            if not slow_s:
                return Figures(created, added, restarted)
            with octavia.slow("configure", slow_s):
                slowly = await self._cost("a node is removed, slowly", nodes)
        return Figures(created, added, restarted, slowly)

    async def _cost(self, what: str, nodes: int) -> Cost:
        """Plan this number of nodes (0: keep the plan), wait until it is done, and return the
        cost."""
        progress(what)
        calls = self._proxy.calls
        calls.clear()
        begun_s = time.monotonic()
        if nodes:
            self._services.want(nodes)
        await self._services.are_done()
        writes = len(self._proxy.writes)
        cost = Cost(time.monotonic() - begun_s, writes, len(calls) - writes)
        progress(f"{what}: {cost}")
        return cost

    @asynccontextmanager
    async def _controller(self) -> AsyncIterator[None]:
        cloud = Cloud(OctaviaConfig(cloud="member", clouds_file=str(self._keystone.clouds)))
        services = self._services
        driver = OctaviaDriver(
            cloud,
            Owner("bench", "bench"),
            _NullRecorder(),
            claimant_of=services.claimant_of,
            observe=services.observe,
            clock=time.monotonic,
        )
        loop = Loop(
            "octavia",
            self._services,
            self._services.plan,
            [driver],
            self._services.report,
            pace=Pace(parallel=AT_ONCE, audit_interval_s=AUDIT_INTERVAL_S),
        )
        task = asyncio.create_task(loop.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            cloud.close()


class Bench:
    """The whole benchmark. `occm` is the program to compare with, if it was built."""

    def __init__(
        self, folder: Path, size: Size, *, rounds: int, slow_s: float, occm: Path | None = None
    ) -> None:
        self.folder, self.size, self.rounds, self.slow_s, self.occm = (
            folder,
            size,
            rounds,
            slow_s,
            occm,
        )

    async def run(self) -> Report:
        places.require_all()
        found = []
        for number in range(self.rounds):
            subjects = [FAIRLEAD, OCCM] if self.occm else [FAIRLEAD]
            if number % 2:
                subjects.reverse()  # the first subject may have an advantage
            figures = {}
            for subject in subjects:
                progress(
                    f"round {number + 1} of {self.rounds}: starting Keystone and Octavia for "
                    f"{subject}"
                )
                folder = self.folder / f"{subject}-{number}"
                folder.mkdir()
                figures[subject] = await self._measure(subject, folder)
            found.append(figures)
        return Report(self.size, self.slow_s, tuple(found))

    async def _measure(self, subject: str, folder: Path) -> Figures:
        """Measure one subject with its own Keystone and Octavia."""
        keystone = Keystone(folder, balancers=self.size.services)
        with FaultProxy(keystone.octavia.url).listen() as proxy, empty_neutron() as neutron:
            keystone.catalogue |= {"load-balancer": proxy.url, "network": neutron}
            keystone.start()
            try:
                if subject == OCCM and self.occm is not None:
                    return await Occm(folder, self.occm, self.size, keystone, proxy).measure(
                        keystone.octavia, self.slow_s
                    )
                return await Fairlead(self.size, keystone, proxy).measure(
                    keystone.octavia, self.slow_s
                )
            finally:
                keystone.end()


HEADINGS = ("", "", "TIME", "WRITES", "READS")


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return the medians of the rounds."""
    size = report.size
    names = {
        "created": f"{size.services} Services of {size.ports} ports created, {size.nodes} nodes",
        "node_added": "a node added",
        "restarted": "a controller restarted",
        "node_removed_slowly": (
            f"a node removed, the provider taking {report.slow_s:g} s for each change"
        ),
    }
    found: list[tuple[str, ...]] = []
    for name, what in names.items():
        for subject in sorted(report.rounds[0]):
            costs: list[Cost] = [
                cost for each in report.rounds if (cost := getattr(each[subject], name)) is not None
            ]
            if not costs:
                continue
            seconds = median(each.seconds for each in costs)
            writes, reads = (
                round(median(getattr(each, kind) for each in costs)) for kind in ("writes", "reads")
            )
            found.append((what, subject, f"{seconds:.1f} s", str(writes), str(reads)))
    return found


def show(report: Report) -> None:
    """Print the report as a table, and the sequential time of the provider in the last
    measurement."""
    draw(HEADINGS, rows(report))
    one = report.size.ports * report.slow_s
    if one:
        print(
            f"the provider's own time: {one:g} s for one Service, {one * report.size.services:g} "
            "s in all"
        )


def main() -> None:
    size = f"{QUICK.services} Services of {QUICK.ports} ports, {QUICK.nodes} nodes"
    parser = options(
        "bench.octavia",
        __doc__,
        rounds=1,
        quick=f"{size}, the provider taking a second",
        plots=False,
    )
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--ports", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument(
        "--slow",
        type=float,
        default=SLOW_S,
        help="seconds that the provider takes per change in the last measurement; 0 skips it",
    )
    arguments = parser.parse_args()
    size_chosen = (
        QUICK if arguments.quick else Size(arguments.services, arguments.ports, arguments.nodes)
    )

    occm = find()
    if occm is None:
        progress(
            "cloud-provider-openstack is not measured: its program was not built; build it with sh "
            "tools/build.sh occm"
        )

    def measure() -> Report:
        with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
            bench = Bench(
                Path(folder),
                size_chosen,
                rounds=arguments.rounds,
                slow_s=1.0 if arguments.quick else arguments.slow,
                occm=occm,
            )
            return run(bench.run())

    log_to_stderr()
    run_benchmark(arguments, measure, show)


if __name__ == "__main__":
    main()
