"""`python -m bench.outages`: how an outage of a gateway is reported, second by second.

In: a lab with two gateways, to which the router sends connections in equal parts, whether they
forward or not, with the Lease durations of a default configuration; a Service of class direct, and
one of class proxy for the outages of HAProxy. Out: for each outage a table
with one row for each second in which something changed, and one for the end. A row has the number
of new connections that failed since the row before, the gateway's `fairlead status` and `/readyz`,
the condition Ready and the Events of a Service, and the metrics that changed. Each second is one
sample, taken at its end."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from bench.options import options, progress, run_benchmark
from tests.e2e.load import Load, Web, addresses_of, output
from tests.e2e.proxied import PROXY

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.drivers.proxy import runtime
from fairlead.kube.events import EVENTS
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab.site import ROLE_PORTS, Site

DOWN, UP, CONTROL = "gw1", "gw2", "control"
PROGRAM = str(Path(sys.executable).with_name("fairlead"))
QUICK_S = 15
LEASES_S = {"presence": 30, "controller": 15}
"""The default durations of Leases; those of labs are shorter."""
METRICS = re.compile(
    r"^(fairlead_ready|fairlead_interface_forwarding\S*|fairlead_programs_removed_total\S*"
    r"|fairlead_proxy_unexpected_exits_total"
    rf'|fairlead_gateway_alive\S*"{DOWN}"\S*) (\S+)$',
    re.MULTILINE,
)
PROXIED = "proxied"
"""The Service of class proxy."""
COLUMNS = ("second", "failed", "fairlead status", "/readyz", "Ready", "Events", "metrics")
Act = Callable[[Site], Awaitable[object]]


class Row(msgspec.Struct, frozen=True):
    """What one second showed. `second`: since the outage began, or ended. `failed`: new connections
    that failed, of all, since the row before; in the last row until the end."""

    second: int
    failed: str
    shown: tuple[str, ...]


class Outage(msgspec.Struct, frozen=True):
    """The rows of an outage, and those after its end."""

    name: str
    during: tuple[Row, ...]
    after: tuple[Row, ...]


class Report(msgspec.Struct, frozen=True):
    outages: tuple[Outage, ...]


class Case(msgspec.Struct, frozen=True):
    """An outage: how it begins and ends, for how many seconds each part is watched, and the Service
    that clients use."""

    name: str
    begin: Act
    end: Act | None
    during_s: int
    after_s: int
    service: str = "web"


async def _start(site: Site, host: str) -> None:
    if site.directory.is_off(host):
        await site.revive_node(host)
    else:
        await site.start_role(host)


def signal_worker(which: signal.Signals) -> Act:
    """Return the act that sends this signal to the HAProxy worker that accepts connections."""

    async def act(site: Site) -> None:
        folder = site.directory.proxy(DOWN)
        found, _ = await runtime.workers(folder / "master.sock")
        os.kill(next(each.pid for each in found if not each.old), which)

    return act


async def restore_link(site: Site) -> None:
    await output(site, DOWN, "ip", "link", "set", "eth0", "up")
    for route in ROUTES:
        await site.exec(DOWN, ["ip", "route", "replace", *route.split()])


ROUTES: list[str] = []
"""The routes of the gateway, which the kernel deletes with the link."""


CASES = (
    Case(
        "the program is removed: `tc qdisc del dev eth0 clsact`",
        lambda site: output(site, DOWN, "tc", "qdisc", "del", "dev", "eth0", "clsact"),
        None,
        15,
        0,
    ),
    Case(
        "the link is down: `ip link set eth0 down`",
        lambda site: output(site, DOWN, "ip", "link", "set", "eth0", "down"),
        restore_link,
        45,
        45,
    ),
    Case(
        "the process of the gateway is killed: SIGKILL",
        lambda site: site.kill_role(DOWN),
        lambda site: _start(site, DOWN),
        60,
        20,
    ),
    Case(
        "the machine of the gateway fails",
        lambda site: site.kill_node(DOWN),
        lambda site: _start(site, DOWN),
        60,
        20,
    ),
    Case(
        "the worker of HAProxy is killed: SIGKILL",
        signal_worker(signal.SIGKILL),
        None,
        15,
        0,
        PROXIED,
    ),
    Case(
        "the worker of HAProxy is stopped: SIGSTOP",
        signal_worker(signal.SIGSTOP),
        signal_worker(signal.SIGCONT),
        45,
        45,
        PROXIED,
    ),
    Case(
        "the rules of nftables are removed: `nft flush ruleset`",
        lambda site: output(site, DOWN, "nft", "flush", "ruleset"),
        None,
        15,
        0,
        PROXIED,
    ),
)


async def _text(site: Site, host: str, *argv: str) -> str:
    try:
        code, printed, errors = await site.exec(host, argv, timeout_s=5)
    except Exception as error:
        return f"({error})"
    return printed if code == 0 or printed else errors


async def _status(site: Site) -> str:
    """Return the beginnings of what `fairlead status` shows of the gateway: of its first line, and
    of the findings about its host."""
    lines = (await _text(site, DOWN, PROGRAM, "status")).splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("host: ")]
    shown = [re.split(r";|,| at 127", line)[0] for line in (*lines[:1], *found)]
    return "; ".join(shown) or "nothing"


async def _readyz(site: Site) -> str:
    where = f"http://127.0.0.1:{ROLE_PORTS['gateway']}/readyz"
    text = await _text(site, DOWN, "curl", "-s", "-m", "2", "-w", " %{http_code}", where)
    *words, code = text.split()
    return " ".join([code, *words]) if words else "no answer"


async def _metrics(site: Site) -> dict[str, str]:
    found: dict[str, str] = {}
    for host, role in ((DOWN, "gateway"), (CONTROL, "control")):
        where = f"http://127.0.0.1:{ROLE_PORTS[role]}/metrics"
        text = await _text(site, host, "curl", "-s", "-m", "2", where)
        found |= {
            name.removeprefix("fairlead_"): f"{float(value):g}"
            for name, value in METRICS.findall(text)
            if not (role == "control" and name == "fairlead_ready")
        }
    return found


async def _conditions(site: Site, name: str) -> str:
    async with site.client() as client:
        service = await client.get(SERVICES, ObjectKey("default", name))
    return next(
        (
            f"{each.status}/{each.reason}"
            for each in service.status.conditions
            if each.type == "fairlead.io/Ready"
        ),
        "none",
    )


async def _events(site: Site, name: str, before: set[tuple[str, int]]) -> str:
    """Return the Events of this Service that are new or have counted since `before`, which gets
    them."""
    async with site.client() as client:
        found = {
            (f"{each.reason}: {each.metadata.name}: {each.message}", each.count)
            for each in await client.list(EVENTS)
            if each.metadata.name.startswith(f"{name}.")
        }
    new = found - before
    before |= new
    return "; ".join(sorted({text.partition(":")[0] for text, _ in new}))


async def _watch(
    site: Site, name: str, load: Load, act: Act, seconds: int, past: Any
) -> tuple[Row, ...]:
    """Return the seconds in which something changed, from `act` on."""
    clock = asyncio.get_running_loop().time
    rows: list[Row] = []
    last: Sequence[str] = ()
    failed = tried = late_s = 0
    known = await _metrics(site)
    await load.take()
    begun_s = clock()
    acting = asyncio.ensure_future(act(site))
    for second in range(1, seconds + 1):
        await asyncio.sleep(max(0.0, begun_s + second - clock()))
        late_s = round(clock() - begun_s)
        status, readyz, ready, events, metrics = await asyncio.gather(
            _status(site),
            _readyz(site),
            _conditions(site, name),
            _events(site, name, past),
            _metrics(site),
        )
        period = await load.take()
        failed, tried = failed + period.failed, tried + period.requests
        changed = [
            f"{name} {metrics.get(name, 'absent')}"
            for name in known.keys() | metrics.keys()
            if known.get(name) != metrics.get(name)
        ]
        known = metrics
        shown = (status, readyz, ready, events, ", ".join(sorted(changed)))
        state = shown[:3]
        if state != last or events or changed:
            rows.append(Row(late_s, f"{failed} of {tried}", shown))
            failed = tried = 0
        last = state
    if tried:
        rows.append(Row(late_s, f"{failed} of {tried}", ("", "", "", "", "")))
    await acting
    return tuple(rows)


async def measure(quick: bool) -> Report:
    found: list[Outage] = []
    async with Site.create(f"outages{os.getpid()}", nodes=2, gateways=2, clients=1) as site:
        await _use_default_leases(site)
        web = Web(site)
        web.gateways = (DOWN, UP)
        await web.create()
        await web.place(("node1", "node2"))
        addresses = {"web": web.address, PROXIED: await _proxied(site)}
        routes = await output(site, DOWN, "ip", "route", "show")
        ROUTES[:] = [line for line in routes.splitlines() if " via " in line]
        past: set[tuple[str, int]] = set()
        for case in CASES:
            await _until_quiet(site, case.service)
            await _events(site, case.service, past)
            progress(case.name)
            async with Load(site, addresses[case.service]) as load:
                seconds = QUICK_S if quick else case.during_s
                during = await _watch(site, case.service, load, case.begin, seconds, past)
                seconds = QUICK_S if quick else case.after_s
                after = (
                    await _watch(site, case.service, load, case.end, seconds, past)
                    if case.end is not None
                    else ()
                )
            found.append(Outage(case.name, during, after))
    return Report(tuple(found))


async def _use_default_leases(site: Site) -> None:
    configuration = yaml.safe_load(site.directory.config.read_text())
    for section, duration_s in LEASES_S.items():
        configuration[section]["leaseDurationS"] = duration_s
    site.directory.config.write_text(yaml.safe_dump(configuration))
    for host in (CONTROL, DOWN, UP):
        await site.stop_role(host)
        await site.start_role(host)


async def _proxied(site: Site) -> str:
    """Create the Service of class proxy, for the pods of the other one. Return its address."""
    spec = {
        "type": "LoadBalancer",
        "loadBalancerClass": PROXY,
        "externalTrafficPolicy": "Local",
        "selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": "http"}],
    }
    metadata = {"name": PROXIED, "namespace": "default"}
    await site.apply([{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}])
    (address,) = await addresses_of(site, PROXIED)
    return address


async def _until_quiet(site: Site, name: str) -> None:
    """Wait until all gateways serve the Service and every client is answered."""
    for _ in range(120):
        if await _conditions(site, name) == "True/EndpointsReady":
            return
        await asyncio.sleep(1)


def show(report: Report) -> None:
    for outage in report.outages:
        print(f"\n{outage.name}\n")
        draw(COLUMNS, [_cells(row) for row in outage.during])
        if outage.after:
            print("\nits end\n")
            draw(COLUMNS, [_cells(row) for row in outage.after])


def _cells(row: Row) -> tuple[str, ...]:
    return (str(row.second), row.failed, *row.shown)


def main() -> None:
    parser = options(
        "bench.outages", __doc__, rounds=1, quick=f"watch each part for {QUICK_S} s", plots=False
    )
    arguments = parser.parse_args()
    run_benchmark(arguments, lambda: run(measure(arguments.quick)), show)


if __name__ == "__main__":
    main()
