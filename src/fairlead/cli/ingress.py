"""`fairlead ingress`: the settings of an ingress controller behind a load balancer, and a check of
these settings with real connections."""

import asyncio
import functools
import re
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import quote

import click

from fairlead.cli.output import Format, Group, draw, output_option, show
from fairlead.cli.parameters import NamedFile, Seconds, namespace_name, object_name
from fairlead.ingress.settings import (
    CHARTS,
    CONTROLLERS,
    Class,
    Controller,
    Header,
    Options,
    Workload,
)

if TYPE_CHECKING:
    from fairlead.ingress.check import Plan, Report
    from fairlead.ingress.service import Tls

WRONG = 3
"""Exit status: a setting is wrong. (1: the check could not be made; 2: invalid usage.)"""
WEB_PORTS = (80, 443)
HIGHEST_PORT = 65535
IN_A_PATH = "/?:@!$&'()*+,;=%[]~"


@click.group(cls=Group)
def ingress() -> None:
    """Configure an ingress controller so that applications see the client's address, and check one.

    \b
    fairlead ingress nginx --class direct | kubectl apply --server-side -f -
    fairlead ingress haproxy --class proxy --trusted 192.0.2.0/28 -o helm > values.yaml
    fairlead ingress check ingress-nginx-controller -n ingress-nginx --echo /whoami"""


def _controller_command(controller: Controller) -> None:
    chart = CHARTS[controller]

    @click.option(
        "--class",
        "load_balancer_class",
        type=click.Choice(get_args(Class)),
        default="direct",
        show_default=True,
        help="Load balancer: fairlead.io/direct, fairlead.io/proxy, fairlead.io/octavia; or "
        "Octavia by OpenStack's own cloud controller (cloud-provider-openstack).",
    )
    @click.option(
        "-n",
        "--namespace",
        default=chart.namespace,
        show_default=True,
        callback=namespace_name,
        help="Namespace of the controller.",
    )
    @click.option(
        "--name",
        "release",
        default=chart.release,
        show_default=True,
        callback=object_name,
        help="Name of its Helm release.",
    )
    @click.option(
        "--ip",
        "addresses",
        multiple=True,
        metavar="ADDRESS",
        help="Address to request; at most one per family.",
    )
    @click.option(
        "--proxy-protocol",
        "header",
        type=click.Choice(get_args(Header)),
        help="PROXY header that the load balancer sends. Default: none for direct, otherwise v2. "
        "With class octavia, none selects provider ovn.",
    )
    @click.option(
        "--trusted",
        multiple=True,
        metavar="CIDR",
        help="Source of the load balancer's connections; may be repeated.",
    )
    @click.option(
        "--workload", type=click.Choice(get_args(Workload)), default="deployment", show_default=True
    )
    @click.option(
        "--replicas",
        type=click.IntRange(min=1),
        default=2,
        show_default=True,
        help="Replicas of a Deployment; for -o helm.",
    )
    @click.option(
        "-o",
        "--output",
        type=click.Choice(["yaml", "helm"]),
        default="yaml",
        show_default=True,
        help=f"Objects to apply, or values of the chart ({chart.name} {chart.version}).",
    )
    def command(*, output: Literal["yaml", "helm"], **options: Any) -> None:
        _print(Options(controller, **options), output)

    summary = f"Print a Service and the matching settings of {TITLES[controller]}."
    ingress.command(controller, help=summary)(command)


TITLES = {"nginx": "ingress-nginx", "haproxy": "HAProxy's kubernetes-ingress", "traefik": "Traefik"}

for _each in CONTROLLERS:
    _controller_command(_each)


def _print(options: Options, output: Literal["yaml", "helm"]) -> None:
    import yaml

    from fairlead.ingress.manifests import arguments, objects, values
    from fairlead.ingress.settings import settings

    made = settings(options)
    for remark in made.remarks:
        click.echo(f"# {remark}")
    if output == "helm":
        yaml.safe_dump(values(options, made), sys.stdout, sort_keys=False)
        return
    for argument in arguments(options, made):
        click.echo(f"# Add to the controller's arguments: {argument}")
    yaml.safe_dump_all(objects(options, made), sys.stdout, sort_keys=False)


def _cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a Service."""

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        command(**options)

    for option in (
        click.option("--context", help="Context of the kubeconfig. Default: the current context."),
        click.option(
            "--kubeconfig",
            type=NamedFile(),
            help="Kubeconfig of the cluster. Default: as kubectl.",
        ),
        click.option(
            "--configmap",
            default="",
            metavar="NAME",
            help="ConfigMap of the controller. Default: the name of the Service.",
        ),
        click.option(
            "-n",
            "--namespace",
            default="default",
            show_default=True,
            callback=namespace_name,
            help="Namespace of the Service.",
        ),
    ):
        with_options = option(with_options)
    return with_options


@ingress.command()
@click.argument("target", metavar="SERVICE|ADDRESS[:PORT]")
@click.option(
    "--host", default="", help="Host name in SNI and in the request. Default: the address."
)
@click.option(
    "--echo",
    metavar="PATH",
    help="Path whose answer contains the client's address: shows which headers are trusted.",
)
@click.option("--path", default="/", show_default=True, help="Path to request without --echo.")
@click.option(
    "--client",
    default="",
    metavar="ADDRESS",
    help="Address of this host as servers see it, if a NAT on the path changes it.",
)
@click.option(
    "--behind",
    multiple=True,
    metavar="ADDRESS:PORT",
    help="For an ADDRESS: a pod or node port behind the load balancer; may be repeated.",
)
@click.option(
    "--proxy-protocol",
    "header",
    type=click.Choice(get_args(Header)),
    help="For an ADDRESS: the header that the load balancer is configured to send.",
)
@click.option(
    "--tls",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="auto: ports 443 and 8443, and ports named https or websecure, or with this appProtocol.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0.1),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
)
@_cluster_options
@output_option
def check(target: str, output: Format, **options: Any) -> None:
    """Check the settings between a load balancer and an ingress, with real connections.

    Connects to each TCP port that may speak HTTP: as a client does, then with a PROXY header of
    version 1 and 2 that claims an unused address, and with an X-Forwarded-For header that claims
    it. For a Service, it also connects to one pod and one node port directly, where a forged header
    must not be trusted. Run the check outside the cluster and in a pod, because each reaches entry
    points that the other does not.

    Findings NotTested name the ports and entry points that were not tested: ports of other
    protocols, ports whose answers are not HTTP, and entry points that answer no request.

    Exit status: 0 no problem found, 3 a problem found, 1 the check could not be made."""
    from fairlead.ingress.check import check as make

    report = asyncio.run(make(_plan(target, **options)))
    show(report, output, lambda: _table(report))
    if report.has_problems:
        raise SystemExit(WRONG)
    if not report.tested:
        raise SystemExit(1)


def _plan(
    target: str,
    *,
    host: str,
    echo: str | None,
    path: str,
    client: str,
    behind: tuple[str, ...],
    header: Header | None,
    tls: "Tls",
    timeout_s: float,
    namespace: str,
    configmap: str,
    kubeconfig: Path | None,
    context: str | None,
) -> "Plan":
    from fairlead.ingress import service
    from fairlead.ingress.check import Plan
    from fairlead.ingress.entrypoint import EntryPoint

    host, path, client = _host(host), _path(echo or path), _client(client)
    end = _address(target)
    if end is None:
        if behind or header:
            raise click.UsageError(
                "--behind and --proxy-protocol are for an ADDRESS: for a Service the API has "
                "these values"
            )
        found = asyncio.run(_read(target, namespace, configmap, kubeconfig, context))
        targets = service.targets(found, host, path, tls)
        known = (*service.findings(found), *service.not_tested(found.service))
        return Plan(
            tuple(targets),
            service.sends(found.service),
            echo is not None,
            client,
            timeout_s,
            known,
        )

    def entry_point(address: str, port: int) -> EntryPoint:
        return EntryPoint(
            address,
            port,
            service.speaks_tls(port) if tls == "auto" else tls == "always",
            host,
            path,
        )

    beyond = [_address(text) for text in behind]
    for text, each in zip(behind, beyond, strict=True):
        if each is None or not each[1]:
            raise click.UsageError(
                f"--behind {text}: write an address and a port: 10.244.1.2:80, [2001:db8::2]:80"
            )
    address, port = end
    fronts = [entry_point(address, each) for each in ((port,) if port else WEB_PORTS)]
    if beyond and len(fronts) > 1:
        raise click.UsageError("--behind requires a port in the ADDRESS")
    # Entry points behind the load balancer use TLS if the front does, whatever their port.
    entry_points = [
        ("behind", EntryPoint(each[0], each[1], fronts[0].tls, host, path))
        for each in beyond
        if each
    ]
    return Plan(
        tuple(service.Target(front, tuple(entry_points)) for front in fronts),
        header,
        echo is not None,
        client,
        timeout_s,
    )


async def _read(
    name: str, namespace: str, configmap: str, kubeconfig: Path | None, context: str | None
) -> Any:
    from fairlead.ingress.service import read
    from fairlead.kube.auth import find_access
    from fairlead.kube.client import Client
    from fairlead.kube.objects import ObjectKey

    if "/" in name:
        namespace, name = name.split("/", 1)
    async with Client(find_access(kubeconfig, context)) as client:
        return await read(client, ObjectKey(namespace, name), configmap)


def _address(text: str) -> tuple[str, int] | None:
    """Return (address, port or 0) of ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT; None if the text is
    the name of a Service. Raise UsageError if it is neither."""
    address, _, port = text.rpartition(":")
    for candidate, number in ((text, ""), (address, port)):
        try:
            found = str(ip_address(candidate.removeprefix("[").removesuffix("]")))
        except ValueError:
            continue
        if candidate != text and not (
            re.fullmatch(r"\d{1,5}", number, re.ASCII) and 0 < int(number) <= HIGHEST_PORT
        ):
            raise click.UsageError(
                f"{text}: {number!r} is not a port: write a number from 1 to {HIGHEST_PORT}"
            )
        return found, int(number or 0)
    if not re.fullmatch(r"([a-z0-9-]+/)?[a-z0-9-]+", text):
        raise click.UsageError(
            f"{text} is neither an address nor the name of a Service: write 192.0.2.10, "
            "192.0.2.10:443 or [2001:db8::1]:443"
        )
    return None


def _client(text: str) -> str:
    try:
        return str(ip_address(text)) if text else ""
    except ValueError:
        raise click.UsageError(f"--client {text} is not an address") from None


def _host(text: str) -> str:
    """Return the host name as it is sent in SNI and in a request. Raise UsageError if it is
    invalid; Python's codec alone also accepts texts that are not names."""
    try:
        name = text.encode("idna").decode()
    except UnicodeError:
        name = ""
    if text and not re.fullmatch(r"\w[\w.:-]*", name, re.ASCII):
        raise click.UsageError(f"--host {text!r} is not a host name")
    return name


def _path(text: str) -> str:
    """Return the path as it is sent in a request: absolute, and with the characters escaped that
    browsers escape."""
    return quote(
        text if text.startswith("/") else f"/{text}", safe=IN_A_PATH, errors="surrogateescape"
    )


def _table(report: "Report") -> None:
    if report.sends is None:
        click.echo("it is unknown whether the load balancer sends a PROXY header")
    else:
        click.echo(
            "the load balancer sends no PROXY header"
            if report.sends == "none"
            else f"the load balancer sends PROXY {report.sends}"
        )
    rows = [
        (
            row.place + (" TLS" if row.tls else ""),
            row.variant,
            row.answer.how,
            ", ".join(row.answer.addresses) or "-",
        )
        for row in report.calls
    ]
    draw(("ENTRY POINT", "WITH", "ANSWER", "SHOWS"), rows)
    click.echo()
    for finding in report.findings:
        where = f"{finding.subject}: " if finding.subject else ""
        click.echo(f"{finding.severity}: {finding.code}: {where}{finding}")
