"""`fairlead doctor`: what is wrong with Services, and what to do about it, on any cluster."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, output_option, show
from fairlead.cli.parameters import NamedFile, Seconds, namespace_name
from fairlead.config import load
from fairlead.errors import FairleadError, Refused
from fairlead.mistakes import suggestion
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES

if TYPE_CHECKING:
    from fairlead.doctor.gather import Request
    from fairlead.doctor.report import Report
    from fairlead.kube.access import Access

FINDINGS, COULD_NOT_LOOK, INTERRUPTED = 1, 2, 128 + signal.SIGINT
EXPLAIN = "explain"


@click.command()
@click.argument("services", nargs=-1, metavar="[[NAMESPACE/]SERVICE]... | explain [CODE]...")
@click.option(
    "-n",
    "--namespace",
    callback=namespace_name,
    help="Namespace of the Services. Default: that of the context of the kubeconfig.",
)
@click.option("-A", "--all-namespaces", is_flag=True, help="Look at the Services everywhere.")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a pod or a Service may take to become ready.",
)
@click.option(
    "--observe",
    "observe_s",
    type=Seconds(min=0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to watch whether two controllers overwrite each other.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="The deadline of each source of facts.",
)
@click.option(
    "--config",
    "config_path",
    type=NamedFile(),
    help="fairlead.yaml. Default: ConfigMap fairlead-system/fairlead of the cluster.",
)
@click.option(
    "--kubeconfig",
    type=NamedFile(),
    help="Kubeconfig of the cluster. Default: as kubectl.",
)
@click.option("--context", help="Context of the kubeconfig. Default: the current context.")
@output_option
def doctor(
    services: tuple[str, ...],
    namespace: str | None,
    all_namespaces: bool,
    grace_s: float,
    observe_s: float,
    timeout_s: float,
    config_path: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    output: Format,
) -> None:
    """Find what is wrong with Services of type LoadBalancer, and print what to do about it.

    It reads the Kubernetes API with the caller's rights, and changes nothing. It works with any
    load balancer: Fairlead, MetalLB, kube-vip, Cilium, klipper, or that of a cloud. What it could
    not look at is listed, and never counts as healthy. A finding is confirmed by a second look.

    \b
    fairlead doctor -A
    kubectl fairlead doctor shop/web --context production
    fairlead doctor explain PodsNotReady

    Exit status: 0 nothing wrong, 1 findings, 2 it could not look."""
    if services[:1] == (EXPLAIN,):
        _explain(services[1:], output)
        return
    if all_namespaces and (namespace or services):
        raise click.UsageError("-A looks at all Services: give neither -n nor a SERVICE with it")
    from fairlead.doctor.gather import Request
    from fairlead.kube.auth import find_access

    try:
        access = find_access(kubeconfig, context)
        where = "" if all_namespaces else namespace or access.namespace
        request = Request(
            tuple(_key(each, where, namespace) for each in services),
            where,
            load(config_path, CLASSES) if config_path else None,
            grace_s,
            timeout_s,
            observe_s,
        )
        report = run(_examine(access, request))
    except FairleadError as error:
        click.echo(f"fairlead: {error}", err=True)
        raise SystemExit(COULD_NOT_LOOK) from error
    except click.Abort:
        # Status 1, which an aborted command usually has, means findings here.
        click.echo("fairlead: interrupted before the end", err=True)
        raise SystemExit(INTERRUPTED) from None
    _show(report, request, output)
    if report.findings:
        raise SystemExit(FINDINGS)


def _explain(codes: tuple[str, ...], output: Format) -> None:
    from fairlead.doctor.pages import PAGES

    # Capitals are easily forgotten.
    by_lower = {each.lower(): each for each in PAGES}
    unknown = [each for each in codes if each.lower() not in by_lower]
    if unknown:
        hint = suggestion(unknown[0], sorted(PAGES), "findings")
        problem = Refused(f"there is no finding {unknown[0]}", fix=hint)
        click.echo(f"fairlead: {problem}", err=True)
        raise SystemExit(COULD_NOT_LOOK)
    pages = [PAGES[by_lower[each.lower()]] for each in codes] or list(PAGES.values())
    show(pages, output, lambda: click.echo("\n".join(each.render() for each in pages).rstrip()))


def _key(text: str, where: str, namespace: str | None) -> ServiceKey:
    if text.count("/") > 1 or not all(text.split("/")):
        raise Refused(f"{text!r} is no name of a Service", fix="write NAMESPACE/NAME, or NAME")
    key = ServiceKey.parse(text) if "/" in text else ServiceKey(where, text)
    if namespace and key.namespace != namespace:
        raise Refused(
            f"Service {text} is not in namespace {namespace}", fix="give only one of the two"
        )
    return key


async def _examine(access: "Access", request: "Request") -> "Report":
    from fairlead.doctor.examine import examine
    from fairlead.kube.client import Client

    async with Client(access, timeout_s=request.deadline_s) as client:
        try:
            return await examine(client, request, _progress)
        finally:
            _progress("")


def _progress(text: str) -> None:
    """Replace the line that shows what the command waits for. Only a terminal has this line."""
    if sys.stderr.isatty():
        import shutil

        width = shutil.get_terminal_size((100, 24)).columns - 1
        click.echo(f"\r\x1b[K{text[:width]}", err=True, nl=False)


def _show(report: "Report", request: "Request", output: Format) -> None:
    from fairlead.doctor.report import lines, plain

    def table() -> None:
        import shutil

        width = max(40, shutil.get_terminal_size((100, 24)).columns)
        for line in lines(report, width):
            click.echo(line)
        if not report.services and request.namespace:
            click.echo(
                f"namespace {request.namespace} has no Service of type LoadBalancer; -A looks "
                "everywhere"
            )

    show(plain(report), output, table)
