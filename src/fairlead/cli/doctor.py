"""`fairlead doctor`: what is wrong with Services, and what to do about it, on any cluster."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, output_option, show
from fairlead.cli.source import cluster_options, config_option
from fairlead.config import load
from fairlead.errors import FairleadError, Refused
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES

if TYPE_CHECKING:
    from fairlead.doctor.examine import Progress
    from fairlead.doctor.finding import Report, RootCause
    from fairlead.doctor.gather import Request
    from fairlead.kube.access import Access

FINDINGS, BLIND = 1, 2
EXPLAIN = "explain"


@click.command()
@click.argument("services", nargs=-1, metavar="[SERVICE...] | explain ID")
@click.option(
    "-n",
    "--namespace",
    default="",
    help="Read only this namespace, also for a SERVICE without one. Default: all namespaces, and "
    "namespace default for a SERVICE without one.",
)
@click.option(
    "--connect",
    is_flag=True,
    help="Also connect to each target port of ready pods, from this host.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="The time that a pod, a Service or a session may need to become ready.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="The deadline of each source of facts.",
)
@click.option("--watch", is_flag=True, help="Examine again and again, and print what changes.")
@cluster_options
@config_option
@output_option
def doctor(
    services: tuple[str, ...],
    namespace: str,
    connect: bool,
    grace_s: float,
    timeout_s: float,
    watch: bool,
    kubeconfig: Path | None,
    context: str | None,
    config_path: Path | None,
    output: Format,
) -> None:
    """Find what is wrong with Services of type LoadBalancer, and print what to do about it.

    It reads the Kubernetes API with the caller's rights, and changes nothing. It works with any
    load balancer: Fairlead, MetalLB, kube-vip, Cilium, or that of a cloud. What it was not able to
    look at is listed, and never counts as healthy. A finding is confirmed by a second look.

    \b
    fairlead doctor
    kubectl fairlead doctor shop/web --context production
    fairlead doctor explain pods-not-ready

    Exit status: 0 no finding, 1 findings, 2 the Services could not be read."""
    if services[:1] == (EXPLAIN,):
        _explain(services[1:])
        return
    from fairlead.doctor.gather import Request
    from fairlead.kube.auth import find_access

    try:
        request = Request(
            tuple(_key(each, namespace) for each in services),
            namespace,
            load(config_path, CLASSES) if config_path else None,
            grace_s,
            timeout_s,
            connect,
        )
        access = find_access(kubeconfig, context)
        if watch:
            run(_watch(access, request, output))
        report = run(_examine(access, request, _progress))
    except FairleadError as error:
        click.echo(f"fairlead: {error}", err=True)
        raise SystemExit(BLIND) from error
    show(report, output, lambda: _table(report))
    if report.findings:
        raise SystemExit(FINDINGS)


def _explain(ids: tuple[str, ...]) -> None:
    from fairlead.doctor.pages import PAGES

    unknown = [each for each in ids if each not in PAGES]
    if unknown or not ids:
        given = f"there is no finding {unknown[0]}" if unknown else "no finding is named"
        raise Refused(given, fix=f"name one of {', '.join(sorted(PAGES))}")
    click.echo("\n".join(PAGES[each].render() for each in ids).rstrip())


def _key(text: str, namespace: str) -> ServiceKey:
    key = ServiceKey.parse(text) if "/" in text else ServiceKey(namespace or "default", text)
    if namespace and key.namespace != namespace:
        raise Refused(
            f"Service {text} is not in namespace {namespace}", fix="name one of them only"
        )
    return key


def _progress(text: str) -> None:
    click.echo(text, err=True)


async def _examine(access: "Access", request: "Request", progress: "Progress") -> "Report":
    from fairlead.doctor.examine import examine
    from fairlead.kube.client import Client

    async with Client(access, timeout_s=request.deadline_s) as client:
        return await examine(client, request, progress)


async def _watch(access: "Access", request: "Request", output: Format) -> None:
    """Print findings that appear and disappear, until the command is interrupted."""
    from fairlead.doctor.examine import examine
    from fairlead.kube.client import Client

    known: dict[tuple[str, str], RootCause] | None = None
    async with Client(access, timeout_s=request.deadline_s) as client:
        while True:
            report = await examine(client, request)
            found = {each.key: each for each in report.findings}
            if known is None or found.keys() != known.keys():
                if output != "table":
                    show(report, output, lambda report=report: None)  # type: ignore[misc]
                elif known is None:
                    _table(report)
                else:
                    _changes(known, found)
            known = found
            await asyncio.sleep(1)


def _changes(
    before: "dict[tuple[str, str], RootCause]", now: "dict[tuple[str, str], RootCause]"
) -> None:
    at = time.strftime("%H:%M:%S")
    for key in before.keys() - now.keys():
        click.echo(f"{at} solved: {key[0]}: {key[1]}")
    for key in now.keys() - before.keys():
        click.echo(f"{at} new:")
        _finding(now[key])


def _table(report: "Report") -> None:
    for each in report.findings:
        _finding(each)
        click.echo()
    count, services = len(report.findings), len(report.services)
    examined = f"{services} Service{'' if services == 1 else 's'} examined"
    click.echo(f"{count or 'no'} finding{'' if count == 1 else 's'}, {examined}")
    for not_examined in report.not_examined:
        _wrapped(f"not examined: {not_examined.source}: {not_examined.reason}", "", "  ")


def _finding(each: "RootCause") -> None:
    click.echo(f"{each.severity.upper()}  {each.id}  {each.object}")
    _wrapped(each.message, "  ", "  ")
    for one in each.evidence:
        _wrapped(f"{one.fact}: {one.value}  [{one.origin}]", "  known by  ", "            ")
    for text in each.consequences:
        _wrapped(text, "  follows   ", "            ")
    # A command is never wrapped, so that it can be copied.
    click.echo(f"  remedy    {each.remedy}")
    click.echo(f"  to do by  {each.actor}")


def _wrapped(text: str, first: str, rest: str) -> None:
    import shutil
    import textwrap

    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo("\n".join(lines))
