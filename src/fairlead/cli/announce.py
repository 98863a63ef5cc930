"""`fairlead announce plan`: what routers need, so that load-balancer addresses are reachable, where
the operator routes them. It writes nothing and does not need root."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import click
import msgspec

from fairlead.announce_sections import AnnounceConfig, BgpPeerConfig, PoolAnnounce
from fairlead.cli.source import Source, source_options
from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.net.address import canonical
from fairlead.routers.values import Hop, Method, Reach, Router

if TYPE_CHECKING:
    from fairlead.kube.manifests import Manifests
    from fairlead.kube.objects import Node
    from fairlead.model import LoadBalancer

Targets = Literal["gateways", "nodes"]
Format = Literal["text", "json", "yaml"]


class Planned(msgspec.Struct, frozen=True):
    """A plan, and its text for one router."""

    router: Router
    plan: Reach
    text: str


@click.group()
def announce() -> None:
    """Make load-balancer addresses reachable.

    Fairlead announces addresses itself if `announce` is configured. This command is for operators
    who write the routes or the configuration of their routers.

    \b
    fairlead announce plan --router linux                  static routes to all gateways
    fairlead announce plan --router frr --asn 64512        BGP sessions with all gateways
    """


@announce.command("plan")
@source_options
@click.option(
    "--router",
    type=click.Choice(get_args(Router)),
    default="linux",
    show_default=True,
    help="The language of the router. `ios`: IOS, IOS XE and IOS XR.",
)
@click.option(
    "--method",
    type=click.Choice(get_args(Method)),
    help="Static routes, or BGP sessions. Default: static routes for `linux`. For other routers, "
    "BGP if --asn or --peer is given, if peers are configured, or if a pool is announced by BGP; "
    "otherwise static routes.",
)
@click.option("--asn", type=click.IntRange(1, 4294967294), help="AS number of the router.")
@click.option(
    "--peer",
    help="The name of the BGP peer that describes this router. Required if several peers fit.",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    help="Accept sessions from every host in this network, instead of one neighbor for each host.",
)
@click.option(
    "--to",
    "targets",
    type=click.Choice(get_args(Targets)),
    default="gateways",
    show_default=True,
    help="`nodes`: without gateways, a route for each address to the nodes with ready pods. For "
    "class fairlead.io/ovn only with topology `gateways`.",
)
@click.option(
    "--next-hop",
    "next_hops",
    multiple=True,
    help="Address of a gateway, or NODE=ADDRESS with `--to nodes`, instead of the addresses that "
    "are found; may be repeated.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    help="Plan this pool; may be repeated. Default: all pools that are not announced by layer 2.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(get_args(Format)),
    default="text",
    show_default=True,
    help="Output format.",
)
def plan_command(
    source: Source,
    router: Router,
    method: Method | None,
    asn: int | None,
    peer: str | None,
    ranges: tuple[str, ...],
    targets: Targets,
    next_hops: tuple[str, ...],
    pools: tuple[str, ...],
    output: Format,
) -> None:
    """Print the routes or the configuration that a router needs, so that the pools are reachable.

    From a cluster, the next hops are the gateways that renew their Leases (the command waits for
    that, 10 s with the default configuration), with the addresses of their Nodes. With -f every
    Node of the manifests counts as a gateway. The text goes to standard output, and what has to be
    checked on the network to standard error. Nothing is changed.

    \b
    kubectl fairlead announce plan --router frr --asn 64512 >frr.conf
    fairlead announce plan -f examples/plan --config fairlead.yaml --router linux"""
    from fairlead.routers import reach, text

    config, manifests, alive = _read(source, targets == "gateways" and not next_hops)
    hops = _given_hops(next_hops, targets) or _hops(manifests.nodes, alive, targets)
    request = reach.Request(
        method=method or ("static" if router == "linux" else None),
        asn=asn,
        peer=peer,
        ranges=ranges,
        pools=pools,
        weights=router in text.TAKES_WEIGHTS,
    )
    services = _balancers(config, manifests) if targets == "nodes" else None
    try:
        found = reach.plan(
            _pools(config, manifests),
            hops,
            _announce(config, manifests),
            request,
            services,
            host_routes=config.node.announce,
        )
    except ValueError as error:
        raise Refused(
            f"--range: {error}", fix="give a network, as in --range 192.0.2.0/24"
        ) from error
    _show(Planned(router, found, text.render(found, router)), output)


def _read(source: Source, gateways: bool) -> "tuple[Config, Manifests, dict[str, Hop] | None]":
    """Return the configuration, the objects, and the live gateways. `gateways`: whether these are
    needed; None: they are not needed, or manifests do not tell which gateways run."""
    config = source.config
    if (access := source.access()) is None:
        from fairlead.kube.manifests import read_manifests

        return config or Config(), read_manifests(source.paths), None

    from fairlead.cli.cluster import read_cluster, read_peers
    from fairlead.kube.client import Client
    from fairlead.kube.instances import observe

    async def read() -> "tuple[Config, Manifests, dict[str, Hop] | None]":
        found, manifests = await read_cluster(access, config)
        async with Client(access) as client:
            peers = await read_peers(client)
            manifests = msgspec.structs.replace(manifests, bgp_peers=peers)
            if not gateways:
                return found, manifests, None
            click.echo("waiting until each process has renewed its Lease ...", err=True)
            instances = await observe(client, found.presence.namespace)
        return (
            found,
            manifests,
            {
                each.name: Hop(each.name, (), each.interfaces)
                for each in instances
                if each.role == "gateway" and each.alive
            },
        )

    return asyncio.run(read())


def _given_hops(texts: Sequence[str], targets: Targets) -> list[Hop]:
    """Return the hosts of the option. Several addresses of one node are one host. Raise Refused for
    a text that is no address, or if a node is missing or not expected."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        node, equals, address = text.rpartition("=")
        if bool(equals) != (targets == "nodes"):
            needs = "NODE=ADDRESS" if targets == "nodes" else "the address of a gateway"
            raise Refused(f"--next-hop {text}: --to {targets} needs {needs}")
        try:
            found[node or text] = (*found.get(node or text, ()), canonical(address))
        except (OSError, ValueError) as error:
            raise Refused(
                f"--next-hop {text}: {error}", fix="give an IPv4 or IPv6 address"
            ) from error
    return [Hop(name, addresses) for name, addresses in found.items()]


def _hops(nodes: "Sequence[Node]", alive: dict[str, Hop] | None, targets: Targets) -> list[Hop]:
    """Return the hosts with the addresses of their Nodes. `alive`: the live gateways; None: every
    Node counts. Raise Refused if a gateway is no Node, because its address is unknown then."""
    from fairlead.plan.members import excluded, node_address

    by_name: dict[str, Hop] = {}
    for node in nodes:
        found = (node_address(node, "IPv4"), node_address(node, "IPv6"))
        addresses = tuple(each for each in found if each is not None)
        if addresses and (alive is not None or not excluded(node)):
            by_name[node.metadata.name] = Hop(node.metadata.name, addresses)
    if alive is None:
        return list(by_name.values())
    if unknown := sorted(alive.keys() - by_name.keys()):
        raise Refused(
            f"no Node has the name of gateway {unknown[0]}, so its address is not known",
            fix="give the addresses of all gateways with --next-hop",
        )
    return [
        msgspec.structs.replace(by_name[name], interfaces=each.interfaces)
        for name, each in alive.items()
    ]


def _pools(config: Config, manifests: "Manifests") -> list[PoolConfig]:
    """Return the pools of the configuration and the AddressPools. An AddressPool that is not used
    is reported; one that is being deleted still has addresses of Services."""
    from fairlead.announce_checks import read_pool_section
    from fairlead.plan.pools import DELETED, read_pools

    problems = read_pools(config.pools, manifests.address_pools).problems
    found = list(config.pools)
    for each in manifests.address_pools:
        name = each.metadata.name
        problem = problems.get(name)
        if problem is None or problem.code == DELETED:
            section, _ = read_pool_section(each.spec.announce)
            announce = section or PoolAnnounce(method="none")
            found.append(PoolConfig(name, each.spec.addresses, announce=announce))
        else:
            click.echo(f"left out: {problem}", err=True)
    return found


def _announce(config: Config, manifests: "Manifests") -> AnnounceConfig:
    """Return the section `announce` with the peers of the BGPPeer objects; without a section, the
    routes are the operator's. A BGPPeer that cannot be read is reported."""
    if (section := config.announce) is None:
        return AnnounceConfig()
    peers = list(section.bgp.peers)
    configured = {each.name for each in section.bgp.peers}
    for each in manifests.bgp_peers:
        name = each.metadata.name
        if name in configured:
            problem = "a peer of this name is in the configuration file, which takes precedence"
            click.echo(f"left out: BGPPeer {name}: {problem}", err=True)
            continue
        try:
            peers.append(msgspec.convert({**each.spec, "name": name}, BgpPeerConfig))
        except msgspec.ValidationError as error:
            click.echo(f"left out: BGPPeer {name}: {error}", err=True)
    bgp = msgspec.structs.replace(section.bgp, peers=tuple(peers))
    return msgspec.structs.replace(section, bgp=bgp)


def _balancers(config: Config, manifests: "Manifests") -> "dict[str, LoadBalancer]":
    """Return the plans of the Services whose packets go to nodes, by name. A Service that one
    router of OVN serves is reported."""
    from fairlead.cli.plan import plan_manifests
    from fairlead.plan.ovn import OVN

    planned = {
        each.service: each.load_balancer
        for each in plan_manifests(config, manifests)
        if each.load_balancer is not None
    }
    if config.ovn is not None and config.ovn.topology == "router":
        for name in [each for each, plan in planned.items() if plan.class_name == OVN]:
            click.echo(f"left out: {name}: router {config.ovn.router} serves it, no node", err=True)
            del planned[name]
    return planned


def _show(planned: Planned, output: Format) -> None:
    if output != "text":
        from fairlead.cli.output import show

        show(planned, output, lambda: None)
        return
    click.echo(planned.text, nl=False)
    for note in planned.plan.notes:
        click.echo(f"check: {note}", err=True)
