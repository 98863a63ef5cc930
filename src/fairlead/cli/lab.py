"""`fairlead lab`: a complete site of network namespaces on this machine - up, apply, status, exec,
kubeconfig, logs, down."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, get_args

import click

from fairlead.announce_sections import AnnounceMethod
from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, draw, output_option, show
from fairlead.config import AttachKind, ForwardingMethod, TunnelKind
from fairlead.errors import Refused

if TYPE_CHECKING:
    from fairlead.lab.routers import RouterKind
    from fairlead.lab.rundir import (
        ApiServerKind,
        DefaultClass,
        NodeProxy,
        OvnBackends,
        OvnTopology,
    )

CommandT = TypeVar("CommandT", bound=Any)
ResultT = TypeVar("ResultT")

CLEAR_LINE = "\r\x1b[K"
"""The terminal sequence that returns to the beginning of the line and clears it (ECMA-48, EL)."""
BFD_INTERVAL_MS = 100
CHASSIS = 3


class _Hosts(TypedDict):
    nodes: int
    clients: int
    far_nodes: int
    gateways_on_nodes: bool
    apiserver: "ApiServerKind"
    second_lan: bool
    node_proxy: "NodeProxy"
    announce: AnnounceMethod


def _name_option(command: CommandT) -> CommandT:
    decorated: CommandT = click.option(
        "--name", "-n", default="default", show_default=True, help="Name of the lab."
    )(command)
    return decorated


@click.group()
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
    type=int,
    help="Gateways; several share the addresses by ECMP. Default: 1, with --ovn 0.",
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
    help="gateway.attach",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Gateways send each other their new flow entries, as gateways on nodes with --announce "
    "always do.",
)
@click.option(
    "--node-proxy",
    type=click.Choice(["fairlead", "kube-proxy"]),
    default="fairlead",
    show_default=True,
    help="The service proxy of the nodes: `fairlead node`, or kube-proxy (`make tools` builds it).",
)
@click.option(
    "--announce",
    type=click.Choice(get_args(AnnounceMethod)),
    default="none",
    show_default=True,
    help="How the router learns where addresses are. none: by static routes. l2: the addresses are "
    "in the network of the nodes, and one host answers ARP and neighbor discovery for each. bgp: "
    "the hosts announce routes to a routing daemon on the router.",
)
@click.option(
    "--class",
    "default_class",
    type=click.Choice(["direct", "announce", "ovn"]),
    help="The class of Services that name none. announce: nodes with ready pods announce addresses "
    "themselves (with --announce), and no gateway is needed (--gateways 0). Default: direct, with "
    "--ovn ovn.",
)
@click.option(
    "--ovn",
    type=click.Choice(["router", "gateways"]),
    help="A real OVN in the place of the gateways, on hypervisors with the userspace datapath of "
    "Open vSwitch. router: one distributed router in front of all nodes. gateways: a gateway "
    "router for each node, on a hypervisor of its own; the router of the lab has a route for each "
    "address.",
)
@click.option(
    "--chassis",
    type=click.IntRange(1, 9),
    help="With --ovn router: its hypervisors. If one fails, the router moves to another one if "
    f"there are at least 3. Default: {CHASSIS}.",
)
@click.option(
    "--ovn-backends",
    type=click.Choice(["pods", "nodePorts"]),
    help="With --ovn router: ovn.backends. Default: pods.",
)
@click.option(
    "--lan-clients",
    type=int,
    help="Hosts in the network of the nodes that are not part of the cluster (host1, ...). "
    "Default: 1 with --announce l2, else 0.",
)
@click.option(
    "--second-lan",
    is_flag=True,
    help="With --announce l2: a second network in which each gateway has an interface (eth1), with "
    "hosts and a pool (lan2) of its own.",
)
@click.option(
    "--router",
    type=click.Choice(["bird", "frr", "gobgp"]),
    help="With --announce bgp: the routing daemon of the router. Default: bird. gobgp has no BFD, "
    "and its routes are in the kernel only half a second later.",
)
@click.option("--bfd", is_flag=True, help="With --announce bgp: detect dead hosts by BFD.")
@click.option(
    "--bfd-interval-ms",
    type=click.IntRange(10, 60_000),
    help=f"The interval of BFD; a host is dead after 3 intervals. Default: {BFD_INTERVAL_MS}.",
)
def up(
    name: str,
    no_roles: bool,
    tunnel: TunnelKind,
    forwarding: ForwardingMethod,
    attach: AttachKind,
    peers: bool,
    lan_clients: int | None,
    router: "RouterKind | None",
    bfd: bool,
    bfd_interval_ms: int | None,
    gateways: int | None,
    default_class: "DefaultClass | None",
    ovn: "OvnTopology | None",
    chassis: int | None,
    ovn_backends: "OvnBackends | None",
    **size: Unpack[_Hosts],
) -> None:
    """Create a lab. Ctrl-C during the creation deletes it again.

    \b
    fairlead lab up                           addresses have static routes to the gateways
    fairlead lab up --announce l2 --gateways-on-nodes --node-proxy kube-proxy
                                              as on a plain cluster: no routes, no router settings
    fairlead lab up --announce bgp --gateways 3 --bfd
                                              the gateways announce routes to BIRD on the router
    fairlead lab up --ovn router              a router of OVN in front of the nodes, no gateway
    fairlead lab up --ovn gateways            a gateway router of OVN for each node
    fairlead lab status                       also shows what the router knows
    fairlead lab exec router -- birdc show route      (--router frr: vtysh -c "show ip route")
    fairlead lab exec router -- ovn-nbctl list load_balancer
    """
    from fairlead.invocation import called
    from fairlead.lab.routers import Routing
    from fairlead.lab.rundir import Ovn, Transport
    from fairlead.lab.site import Site

    if size["far_nodes"] > 0 and tunnel == "none":
        raise Refused(
            f"gateways can reach the {size['far_nodes']} far nodes behind the router only "
            "through a tunnel",
            fix="give --tunnel ipip or --tunnel vxlan",
        )
    announce = size["announce"]
    _check_announcement(announce, second_lan=size["second_lan"], bgp=(router, bfd, bfd_interval_ms))
    if announce == "none" and default_class == "announce":
        raise Refused(
            "with --class announce nodes announce addresses", fix="add --announce l2 or bgp"
        )
    if announce == "bgp" and size["far_nodes"] > 0 and size["gateways_on_nodes"]:
        raise Refused(
            "far nodes cannot be gateways that announce addresses by BGP: the router accepts "
            "sessions only from the network lan",
            fix="leave out --far-nodes or --gateways-on-nodes",
        )
    if ovn != "router" and (chassis or ovn_backends):
        raise Refused(
            "--chassis and --ovn-backends are for one router of OVN in front of all nodes",
            fix="add --ovn router, or leave them out",
        )
    front = (
        Ovn(topology=ovn, chassis=chassis or CHASSIS, backends=ovn_backends or "pods")
        if ovn
        else None
    )
    interval_ms = (bfd_interval_ms or BFD_INTERVAL_MS) if bfd or bfd_interval_ms else 0
    routing = Routing(daemon=router or "bird", bfd_interval_ms=interval_ms)
    hosts = lan_clients if lan_clients is not None else int(announce == "l2")
    transport = Transport(tunnel=tunnel, forwarding=forwarding, attach=attach, peers=peers)
    site = Site.create(
        name,
        roles=not no_roles,
        transport=transport,
        routing=routing,
        lan_clients=hosts,
        gateways=gateways if gateways is not None else int(ovn is None),
        default_class=default_class or ("direct" if ovn is None else "ovn"),
        ovn=front,
        **size,
    )
    with _progress(f"lab {name}") as show_progress:
        run(site.up(show_progress))
    option = "" if name == "default" else f" --name {name}"
    click.echo(f"Lab {name} is running. Next:")
    click.echo(f"  export KUBECONFIG={site.directory.kubeconfig}")
    click.echo(f"  {called(f'lab status{option}')}")
    click.echo(f"  {called(f'lab down{option}')}")


def _check_announcement(
    announce: AnnounceMethod, *, second_lan: bool, bgp: tuple[object, ...]
) -> None:
    """Raise Refused if options for another method of announcement are given."""
    if announce != "bgp" and any(bgp):
        raise Refused(
            "--router, --bfd and --bfd-interval-ms are for a router that has BGP sessions",
            fix="add --announce bgp, or leave them out",
        )
    if announce != "l2" and second_lan:
        raise Refused(
            "--second-lan is for addresses that hosts answer for on both networks",
            fix="add --announce l2, or leave it out",
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
    """Show hosts, processes, pods and Services, and what the router knows of their addresses: its
    routes and BGP sessions, or its neighbor entries. With --ovn: where OVN's routers are, whether
    the chassis are up to date, and the load balancers in its database."""
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
    """Run a command on HOST (client1, router, gw1, node1, control, chassis1) or in a pod
    (NAMESPACE/NAME).

    Put -- before the command if it has options. The command uses the network of the host, and the
    files of this machine. birdc and vtysh reach the routing daemon of the host, ovn-nbctl and
    ovn-sbctl on router and control the databases of OVN, ovs-vsctl the one of a chassis."""
    from fairlead.lab import namespace, process
    from fairlead.lab.site import Site

    site = Site.open(name)
    namespace.enter(site.namespace(host))
    tools = site.directory.tools(host) if "/" not in host else None
    try:
        os.execvpe(argv[0], argv, process.environment(name, f"exec/{host}", tools))
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
    """Show the log of WHICH: a host (node1), a role (node1/node, controller), apiserver, cluster, a
    program of OVN (chassis1/ovn-controller, northd) or a pod (NAMESPACE/NAME)."""
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
    pods, or of OVN. On a running host, only roles and programs of OVN that have ended are started.
    """
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
