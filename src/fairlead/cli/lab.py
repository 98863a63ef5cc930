"""`fairlead lab`: a complete site of network namespaces on this machine - up, apply, status, exec,
kubeconfig, logs, down."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, get_args

import click

from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, Group, draw, output_option, show
from fairlead.config import AttachKind, ForwardingMethod, TunnelKind
from fairlead.errors import Refused

if TYPE_CHECKING:
    from fairlead.lab.rundir import ApiServerKind, Transport
    from fairlead.lab.topology import Announcement

CommandT = TypeVar("CommandT", bound=Any)
ResultT = TypeVar("ResultT")

CLEAR_LINE = "\r\x1b[K"
"""The terminal sequence that returns to the beginning of the line and clears it (ECMA-48, EL)."""


class _Hosts(TypedDict):
    nodes: int
    gateways: int
    clients: int
    far_nodes: int
    gateways_on_nodes: bool
    announce: "Announcement"
    apiserver: "ApiServerKind"


def _name_option(command: CommandT) -> CommandT:
    decorated: CommandT = click.option(
        "--name", "-n", default="default", show_default=True, help="Name of the lab."
    )(command)
    return decorated


@click.group(cls=Group)
def lab() -> None:
    """Create a complete cluster of network namespaces on this machine.

    \b
    fairlead lab up                        4 nodes, a gateway, a client, a router, an API server
    export KUBECONFIG=$(fairlead lab kubeconfig)
    kubectl apply -f examples/lab             Pods run as real servers, Services get real addresses
    fairlead lab exec client1 -- curl -s 203.0.113.10
    fairlead lab down

    Needs root. The lab does not change the network of this machine, and no packet leaves the
    namespaces.
    """
    from fairlead.lab.requirements import check_root

    check_root()


@lab.command()
@_name_option
@click.option("--nodes", default=4, show_default=True, help="Kubernetes nodes.")
@click.option(
    "--gateways",
    default=1,
    show_default=True,
    help="Gateways; several share the addresses by ECMP, or by --announce l2.",
)
@click.option("--clients", default=1, show_default=True, help="Clients on the outside network.")
@click.option(
    "--apiserver",
    type=click.Choice(["embedded", "real"]),
    default="embedded",
    show_default=True,
    help="embedded: in memory, ready at once. real: kube-apiserver and etcd, with RBAC (`make "
    "tools` provides them).",
)
@click.option(
    "--no-roles",
    is_flag=True,
    help="Start only network, API server and kubelets, without controller, gateways and nodes.",
)
@click.option(
    "--far-nodes",
    default=0,
    show_default=True,
    help="Additional nodes, on a network behind the router; needs a tunnel.",
)
@click.option(
    "--gateways-on-nodes",
    is_flag=True,
    help="Run a gateway on every node instead of on separate hosts.",
)
@click.option(
    "--announce",
    type=click.Choice(["none", "l2"]),
    default="none",
    show_default=True,
    help="none: the router has routes to the addresses. l2: gateways announce them on layer 2 (by "
    "ARP and neighbor discovery), and the router needs no route.",
)
@click.option(
    "--tunnel",
    type=click.Choice(get_args(TunnelKind)),
    default="none",
    show_default=True,
    help="tunnel.kind",
)
@click.option(
    "--forwarding",
    type=click.Choice(get_args(ForwardingMethod)),
    default="auto",
    show_default=True,
    help="gateway.forwarding",
)
@click.option(
    "--attach",
    type=click.Choice(get_args(AttachKind)),
    default="auto",
    show_default=True,
    help="gateway.attach; xdp does not work in a lab, whose interfaces are veth pairs: use "
    "xdp-generic.",
)
@click.option("--peers", is_flag=True, help="Gateways send each other their new flow entries.")
@click.pass_context
def up(
    context: click.Context,
    name: str,
    no_roles: bool,
    tunnel: TunnelKind,
    forwarding: ForwardingMethod,
    attach: AttachKind,
    peers: bool,
    **size: Unpack[_Hosts],
) -> None:
    """Create a lab. Ctrl-C during the creation deletes it again."""
    from fairlead.invocation import called
    from fairlead.lab.rundir import Transport
    from fairlead.lab.site import Site

    given = context.get_parameter_source("gateways") is not click.core.ParameterSource.DEFAULT
    if size["gateways_on_nodes"] and given:
        raise click.UsageError(
            "with --gateways-on-nodes every node is a gateway, so --gateways has no effect: give "
            "one or the other"
        )
    transport = Transport(tunnel=tunnel, forwarding=forwarding, attach=attach, peers=peers)
    _check_transport(transport, size["far_nodes"])
    site = Site.create(name, roles=not no_roles, transport=transport, **size)
    with _progress(f"lab {name}") as show_progress:
        run(site.up(show_progress))
    option = "" if name == "default" else f" --name {name}"
    click.echo(f"Lab {name} is running. Next:")
    click.echo(f"  export KUBECONFIG={site.directory.kubeconfig}")
    click.echo(f"  {called(f'lab status{option}')}")
    click.echo(f"  {called(f'lab down{option}')}")


def _check_transport(transport: "Transport", far_nodes: int) -> None:
    """Raise Refused for a lab in which no packet, or none to some nodes, would arrive."""
    if far_nodes > 0 and (transport.tunnel == "none" or transport.forwarding == "l2"):
        raise Refused(
            f"gateways can reach the {far_nodes} far nodes behind the router only through a tunnel",
            fix="give --tunnel ipip or --tunnel vxlan, and --forwarding auto",
        )
    if transport.forwarding in ("ipip", "vxlan") and transport.forwarding != transport.tunnel:
        raise Refused(
            f"--forwarding {transport.forwarding} needs a tunnel of this kind, and --tunnel is "
            f"{transport.tunnel}",
            fix=f"give --tunnel {transport.forwarding}",
        )
    if transport.attach == "xdp":
        raise Refused(
            "the interfaces of a lab are veth pairs, whose driver loses the packets that a native "
            "XDP program sends",
            fix="give --attach xdp-generic to use XDP, or --attach tc",
        )


@lab.command()
@_name_option
@click.option(
    "-f",
    "--filename",
    "paths",
    multiple=True,
    required=True,
    help="File, directory, or - for standard input.",
)
def apply(name: str, paths: tuple[str, ...]) -> None:
    """Apply manifests, without kubectl."""
    from fairlead.kube.manifests import read_documents
    from fairlead.lab.site import Site

    objects = [document.object for document in read_documents(paths)]
    for applied in run(Site.open(name).apply(objects)):
        click.echo(f"{applied} applied")


@lab.command()
@_name_option
@output_option
def status(name: str, output: Format) -> None:
    """Show hosts, processes, pods and Services."""
    from fairlead.lab.overview import Overview, overview
    from fairlead.lab.site import Site

    seen: Overview = run(overview(Site.open(name)))

    def table() -> None:
        click.echo(
            f"lab {seen.name}   API server {seen.server or '(none)'}   processes "
            f"{', '.join(seen.processes) or '(none)'}"
        )
        for header, rows in seen.tables():
            click.echo()
            draw(header, rows)
        if seen.problem:
            click.echo(f"\npods and Services cannot be read: {seen.problem}")

    show(seen, output, table)


@lab.command(context_settings={"ignore_unknown_options": True})
@_name_option
@click.argument("host")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(name: str, host: str, argv: tuple[str, ...]) -> None:  # noqa: A001
    """Run a command on HOST (client1, router, gw1, node1, control) or in a pod (NAMESPACE/NAME).

    Put -- before the command if it has options. The command uses the network of the host, and the
    files of this machine."""
    from fairlead.lab import namespace, process
    from fairlead.lab.site import Site

    inside = Site.open(name).namespace(host)
    namespace.enter(inside)
    try:
        os.execvpe(argv[0], argv, process.environment(name, f"exec/{host}"))
    except OSError as error:
        raise Refused(
            f"tried to run {argv[0]}: {error.strerror}", fix="is it installed?"
        ) from error


@lab.command()
@_name_option
@click.option("--inside", is_flag=True, help="The kubeconfig for programs inside the lab.")
def kubeconfig(name: str, inside: bool) -> None:
    """Print the path of the lab's kubeconfig."""
    from fairlead.lab.site import Site

    directory = Site.open(name).directory
    click.echo(directory.kubeconfig_inside if inside else directory.kubeconfig)


@lab.command()
@_name_option
@click.option("--follow", "-f", is_flag=True, help="Follow the log as it grows.")
@click.argument("which")
def logs(name: str, which: str, follow: bool) -> None:
    """Show the log of WHICH: a host (node1), a role (node1/node, controller), apiserver, cluster or
    a pod (NAMESPACE/NAME)."""
    from fairlead.lab.overview import find_log
    from fairlead.lab.site import Site

    log = find_log(Site.open(name), which)
    if follow:
        os.execvp("tail", ["tail", "-n", "+1", "-F", str(log)])
    click.echo(log.read_text(errors="replace"), nl=False)


@lab.command()
@_name_option
@click.argument("host")
def kill(name: str, host: str) -> None:
    """Make a host fail: disconnect its network and kill all its processes. Kubernetes is not
    notified.

    With `control`, the API server keeps its objects, but the lab cannot reach it until the host is
    revived."""
    from fairlead.lab.site import Site

    run(Site.open(name).kill_node(host))
    click.echo(f"{host} is dead")


@lab.command()
@_name_option
@click.argument("host")
def revive(name: str, host: str) -> None:
    """Boot a killed host: empty kernel state, same addresses, new processes of its role and its
    pods. On a running host, only roles that have ended are started."""
    from fairlead.lab.site import Site

    run(Site.open(name).revive_node(host))
    click.echo(f"{host} runs")


@lab.command()
@_name_option
@click.option("--all", "everything", is_flag=True, help="Every lab on this machine.")
def down(name: str, everything: bool) -> None:
    """Delete a lab completely, in any state. If the lab does not exist, nothing is done."""
    from fairlead.lab.rundir import all_labs
    from fairlead.lab.site import tear_down

    for each in all_labs() if everything else (name,):
        present = each in all_labs()
        run(tear_down(each))
        click.echo(
            f"Lab {each} is down."
            if present
            else f"Lab {each} does not exist. Labs: {', '.join(all_labs()) or 'none'}."
        )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the present step: in one changing line on a terminal, elsewhere
    in a line for each step."""
    if not sys.stderr.isatty():
        yield lambda step: click.echo(f"{title}: {step}", err=True)
        return
    try:
        yield lambda step: click.echo(f"{CLEAR_LINE}{title}: {step}", nl=False, err=True)
    finally:
        click.echo(CLEAR_LINE, nl=False, err=True)
