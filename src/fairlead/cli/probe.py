"""`fairlead probe`: call load balancers continuously, and show what callers notice."""

import asyncio
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fairlead.cli.interrupt import run
from fairlead.cli.parameters import NamedFile, Seconds, namespace_name
from fairlead.errors import FairleadError, Refused

if TYPE_CHECKING:
    from fairlead.kube.access import Access
    from fairlead.reach.monitor import Monitor
    from fairlead.reach.record import Event
    from fairlead.reach.targets import Target

FAULT, COULD_NOT_PROBE = 1, 2
REDRAW_S = 1.0


@click.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "--services", is_flag=True, help="Call the Services of type LoadBalancer of a cluster."
)
@click.option(
    "-n",
    "--namespace",
    callback=namespace_name,
    help="With --services: those of one namespace.",
)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(min=0.01),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between two calls of a target. A gap is measured to one interval.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0.01),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="A call that takes longer has failed. Linux sends a lost SYN again after 1 s.",
)
@click.option(
    "--held",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="Connections to keep open to each target, to see whether they break.",
)
@click.option(
    "--duration",
    "duration_s",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="End after this time. Default: at Ctrl-C.",
)
@click.option(
    "--listen",
    metavar="[ADDRESS]:PORT",
    help="Serve /metrics for Prometheus here, for example :9450. Default: no server.",
)
@click.option(
    "--kubeconfig",
    type=NamedFile(),
    help="With --services: kubeconfig of the cluster. Default: as kubectl.",
)
@click.option("--context", help="Context of the kubeconfig. Default: the current context.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="json: a line for each event, and a line for each target at the end.",
)
def probe(
    targets: tuple[str, ...],
    services: bool,
    namespace: str | None,
    interval_s: float,
    timeout_s: float,
    held: int,
    duration_s: float | None,
    listen: str | None,
    kubeconfig: Path | None,
    context: str | None,
    output: str,
) -> None:
    """Call load balancers continuously, as their clients do, and show what clients notice: answers,
    gaps with their start and length, latency, which client address the server saw, the share of
    each pod, and open connections that broke. It works with any load balancer.

    A TARGET is ADDRESS:PORT, tcp://ADDRESS:PORT or http[s]://HOST[:PORT][/PATH]. Without a scheme,
    ports 80 and 8080 are HTTP, 443 and 8443 HTTPS, and others TCP, of which only the connection is
    tested. An answer with status 500 or above counts as a failure.

    Run it where clients are, outside of the cluster: on its nodes and in its pods, the service
    proxy answers for load-balancer addresses without the load balancer.

    \b
    fairlead probe 203.0.113.10:80 --interval 0.1
    fairlead probe --services --listen :9450
    fairlead probe https://shop.example.com/ --duration 60 -o json

    Exit status: 0 every call was answered, 1 something failed, 2 it could not probe."""
    if not targets and not services:
        raise click.UsageError("give at least one TARGET, or --services")
    if (namespace or kubeconfig or context) and not services:
        raise click.UsageError("-n, --kubeconfig and --context belong to --services")
    from fairlead.kube.auth import find_access
    from fairlead.reach.monitor import Monitor
    from fairlead.reach.targets import parse

    _use_all_descriptors()
    monitor = Monitor(interval_s=interval_s, timeout_s=timeout_s, held=held)
    display = _Display(monitor, output)
    try:
        given = [parse(each) for each in targets]
        monitor.replace(given)
        follow = None
        if services:
            access = find_access(kubeconfig, context)
            follow = partial(_follow, access, namespace or "", given, monitor, display.note)
        with suppress(click.Abort):
            run(_probe(monitor, display, follow, duration_s, listen))
    except FairleadError as error:
        click.echo(f"fairlead: {error}", err=True)
        raise SystemExit(COULD_NOT_PROBE) from error
    if display.finish():
        raise SystemExit(FAULT)
    if display.knows_nothing():
        click.echo("fairlead: no call has a result; let the probe run for longer", err=True)
        raise SystemExit(COULD_NOT_PROBE)


def _use_all_descriptors() -> None:
    """Each call and each open connection takes a file descriptor, and shells permit 1,024 although
    the process may have more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _probe(
    monitor: "Monitor",
    display: "_Display",
    follow: Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, None]]] | None,
    duration_s: float | None,
    listen: str | None,
) -> None:
    async with AsyncExitStack() as opened:
        if listen is not None:
            opened.enter_context(_metrics(listen, monitor))
        # It fails without an API server, so nothing else is made before.
        following = [] if follow is None else [await opened.enter_async_context(follow())]
        work = [monitor.run(), display.run(), *following]
        opened.callback(display.clear)
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s), asyncio.TaskGroup() as group:
                for each in work:
                    group.create_task(each)


@contextmanager
def _metrics(listen: str, monitor: "Monitor") -> Iterator[None]:
    from prometheus_client import CollectorRegistry, start_http_server

    from fairlead.net.address import split_host_port
    from fairlead.reach.metrics import ProbeCollector

    registry = CollectorRegistry()
    registry.register(ProbeCollector(monitor))
    fix = "give --listen another [ADDRESS]:PORT"
    try:
        host, port = split_host_port(f"::{listen}" if listen.startswith(":") else listen)
        server, thread = start_http_server(port, host, registry)
    except ValueError:
        raise Refused(f"--listen {listen}: not [ADDRESS]:PORT", fix=fix) from None
    except OSError as problem:
        raise Refused(f"cannot listen on {listen}: {problem.strerror}", fix=fix) from problem
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@asynccontextmanager
async def _follow(
    access: "Access",
    namespace: str,
    given: "Sequence[Target]",
    monitor: "Monitor",
    note: Callable[[str], None],
) -> AsyncIterator[Coroutine[Any, Any, None]]:
    """Yield the work that calls the Services of the cluster, beside the given targets. Raise
    Refused or Unavailable: without rights, or without a server, the command ends."""
    from fairlead.kube.client import Client
    from fairlead.kube.objects import SERVICES
    from fairlead.kube.reflector import Reflector
    from fairlead.reach.targets import of_services, unprobed

    async with Client(access) as client:
        await client.list(SERVICES, namespace=namespace)
        reflector = Reflector(client, SERVICES, namespace=namespace)
        known: set[str] = set()

        async def follow() -> None:
            async for _ in reflector.changes():
                present = list(reflector.objects.values())
                monitor.replace([*given, *of_services(present)])
                for sentence in unprobed(present):
                    if sentence not in known:
                        known.add(sentence)
                        note(sentence)

        yield follow()


class _Display:
    """Events as they happen; a table that a terminal shows all the time, and everything at the
    end."""

    def __init__(self, monitor: "Monitor", output: str) -> None:
        self._monitor = monitor
        monitor.tell = self.tell
        # They are imported now, because later there may be no file descriptor left.
        import fairlead.cli.output
        import fairlead.reach.report  # noqa: F401

        self._json = output == "json"
        self._ended = False
        self._live = not self._json and sys.stdout.isatty()
        self._drawn = 0
        self._offset_s = time.time() - time.monotonic()

    def at(self, monotonic_s: float) -> float:
        return monotonic_s + self._offset_s

    def tell(self, target: "Target", event: "Event") -> None:
        from fairlead.reach.report import event_report

        told = event_report(target, event, self.at)
        self._print(
            msgspec.json.encode(told).decode()
            if self._json
            else f"{told.time} {told.target}: {told.message}"
        )

    def note(self, sentence: str) -> None:
        """Say something that is not a result."""
        self.clear()
        click.echo(f"fairlead: {sentence}", err=True)

    async def run(self) -> None:
        """Redraw the table on a terminal."""
        while True:
            await asyncio.sleep(REDRAW_S)
            if self._live:
                size = shutil.get_terminal_size((100, 24))
                lines = [each[: size.columns - 1] for each in self._table(size.lines - 2)]
                self.clear()
                self._say("\n".join(lines))
                self._drawn = len(lines)

    def clear(self) -> None:
        """Remove the table from the terminal."""
        if self._drawn:
            self._say(f"\x1b[{self._drawn}F\x1b[J", nl=False)
            self._drawn = 0

    def finish(self) -> bool:
        """Show the results. Return whether something failed."""
        from fairlead.reach.report import is_fault, report

        self._ended = True
        monitor = self._monitor
        monitor.stretch()
        everything = monitor.records | monitor.left
        if self._json:
            for target, record in sorted(everything.items()):
                self._say(msgspec.json.encode(report(target, record, self.at)).decode())
        else:
            self._say("\n".join(self._table(None)))
            for line in self._gaps():
                self._say(line)
        lacks = Counter[str]()
        for record in everything.values():
            lacks.update(record.lacks)
        for lack, count in lacks.most_common():
            click.echo(
                f"fairlead: {count} calls are unknown, because this host has no resources for them "
                f"({lack}); raise its limits, or probe fewer targets",
                err=True,
            )
        unknown = sum(record.unknown for record in everything.values()) - lacks.total()
        if unknown:
            click.echo(
                f"fairlead: {unknown} calls are unknown, because this process did not run for up "
                f"to {monitor.stalled_s:.2f} s; run it on a machine with less load",
                err=True,
            )
        return any(is_fault(record) for record in everything.values())

    def _print(self, line: str) -> None:
        self.clear()
        self._say(line)

    def _say(self, text: str, *, nl: bool = True) -> None:
        """Write to the standard output. If nobody reads it any more, the probe ends."""
        try:
            click.echo(text, nl=nl)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not self._ended:
                signal.raise_signal(signal.SIGINT)

    def knows_nothing(self) -> bool:
        """Return whether there were targets, and no call of them has a result."""
        everything = (self._monitor.records | self._monitor.left).values()
        return bool(everything) and not any(each.answered or each.failed for each in everything)

    def _table(self, limit: int | None) -> list[str]:
        """Return the lines of the table, at most `limit`: targets that are silent first, then those
        that failed most."""
        from fairlead.cli.output import columns
        from fairlead.reach.report import HEADER, row

        self._monitor.stretch()
        everything = self._monitor.records | self._monitor.left
        if not everything:
            return ["no target yet"]
        ordered = sorted(
            everything.items(),
            key=lambda each: (each[1].gap is None, -each[1].failed, each[0]) if limit else each[0],
        )
        shown = ordered if limit is None else ordered[: max(1, limit - 2)]
        lines = columns(HEADER, [row(*each) for each in shown])
        if rest := len(ordered) - len(shown):
            lines.append(f"and {rest} more")
        return lines

    def _gaps(self) -> list[str]:
        from fairlead.reach.report import timestamp

        everything = self._monitor.records | self._monitor.left
        return [
            f"gap of {target.name}: from {timestamp(self.at(gap.begun_s))}, {gap.length_s:.2f} s"
            f"{'' if gap.over else ' and not over'}, {gap.calls} failed: {gap.problem}"
            for target, record in sorted(everything.items())
            for gap in record.gaps
        ]
