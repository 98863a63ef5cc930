"""`fairlead announce plan`: what the routers of a network need, so that packets for load-balancer
addresses reach the gateways. It writes nothing and does not need root."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
import msgspec

from fairlead.cli.output import Group, show
from fairlead.cli.source import Source, report_left_out, scan_source, source_options
from fairlead.config import RESERVED_ASNS, Config, PoolConfig, parse_range
from fairlead.errors import Refused
from fairlead.routers.planning import (
    ASN,
    ROUTER_ASN,
    check_apart,
    merged,
    next_hop_of,
    notes_of,
    reach_of,
    side_of_gateways,
    usable_address,
)
from fairlead.routers.values import FAMILIES, Hop, Reach

if TYPE_CHECKING:
    from fairlead.cli.cluster import Routing
    from fairlead.kube.crds import AddressPool
    from fairlead.kube.objects import Node
    from fairlead.sections import BgpConfig

Router = Literal["static", "frr", "bird"]
Format = Literal["text", "json", "yaml"]

GATEWAY_LABEL = "fairlead.io/gateway"
"""The label of the nodes on which the chart runs gateways, unless it announces on layer 2."""
ADDRESS_FIX = "give an address that the router reaches, such as 192.0.2.21 or gw1=192.0.2.21"


class Found(msgspec.Struct, frozen=True):
    """What a cluster or manifests say."""

    config: Config
    pools: tuple[PoolConfig, ...]
    gateways: tuple[Hop, ...]


class Planned(msgspec.Struct, frozen=True):
    """A plan, and its text in the language of one daemon."""

    target: str
    text: str
    plan: Reach
    notes: tuple[str, ...]


class AsNumber(click.IntRange):
    """An AS number that a router may have."""

    def __init__(self) -> None:
        super().__init__(1, (1 << 32) - 2)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raise BadParameter if no AS may have it."""
        number: int = super().convert(value, param, ctx)
        if number in RESERVED_ASNS:
            fix = "write another number, such as one from 64512 to 65534, for private use"
            self.fail(f"{RESERVED_ASNS[number]}; {fix}", param, ctx)
        return number


@click.group(cls=Group)
def announce() -> None:
    """Print what routers need, so that packets for load-balancer addresses reach the gateways.

    \b
    fairlead announce plan                            static routes, for a router that runs Linux
    fairlead announce plan --router frr --bfd         BGP sessions, for a router that runs FRR
    fairlead announce plan --gateway bird --bfd ...   the other side of these sessions

    With `announce.l2` in the configuration, gateways answer for addresses of their own network, and
    no router needs any of this."""


@announce.command("plan")
@source_options
@click.option(
    "--router",
    type=click.Choice(get_args(Router)),
    help="What to print for the router: static routes (commands of iproute2), or BGP sessions with "
    "the gateways in the language of FRR or BIRD. Default: static.",
)
@click.option(
    "--gateway",
    type=click.Choice(["bird"]),
    help="Print the configuration of a BIRD on the gateways instead, which announces the addresses "
    "that the gateway serves to the routers in --router-address.",
)
@click.option(
    "--router-address",
    "routers",
    multiple=True,
    metavar="ADDRESS",
    help="The address of a router, for --gateway; may be repeated.",
)
@click.option(
    "--next-hop",
    "next_hops",
    multiple=True,
    metavar="[NAME=]ADDRESS",
    help="The address of a gateway, instead of the gateways that are found; may be repeated. One "
    "gateway with addresses of both families has one name.",
)
@click.option(
    "--asn",
    type=AsNumber(),
    help=f"AS number of the gateways. Default: {ASN}, which is for private use.",
)
@click.option(
    "--router-asn",
    type=AsNumber(),
    help=f"AS number of the router; the same number as --asn makes sessions of iBGP. Default: "
    f"{ROUTER_ASN}.",
)
@click.option(
    "--bfd",
    is_flag=True,
    help="Notice a dead gateway in 0.3 s by BFD, instead of in 9 s by the hold time of BGP. Both "
    "sides need it.",
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
    router: Router | None,
    gateway: str | None,
    routers: tuple[str, ...],
    next_hops: tuple[str, ...],
    asn: int | None,
    router_asn: int | None,
    bfd: bool,
    output: Format,
) -> None:
    """Print the routes, or the configuration of a routing daemon, that make the pools reachable.

    The text goes to standard output, and what has to be checked to standard error. Nothing is
    changed: read the text, and put it into the router.

    Static routes send every packet for the pools to the gateways, also to a gateway that has died.
    With BGP a router has the routes of the gateways that are alive: a BIRD on each gateway
    announces the addresses that the gateway serves. With `announce.bgp` in the configuration, the
    gateway manages it: the AS numbers are those of the configuration then, and all sessions have
    BFD if one router has it there. The text always has timers of 9 s and 3 s, and of 100 ms for
    BFD. Without `announce.bgp`, give BIRD the configuration that --gateway bird prints. The router
    accepts single addresses of the pools and nothing else, and sends nothing. Sessions are between
    neighbors on one link, one for each address family.

    The next hops are the gateways that renew their Leases (the command waits until each has done
    so, 10 s with the default), with the InternalIPs of their Nodes. With -f they are the Nodes with
    the label fairlead.io/gateway, or all Nodes if none has it. Gateways outside of the cluster have
    no Node: give all gateways with --next-hop.

    \b
    kubectl fairlead announce plan >routes.sh
    kubectl fairlead announce plan --router frr --asn 64513 --router-asn 64512 --bfd >frr.conf
    kubectl fairlead announce plan --gateway bird --router-address 192.0.2.1 --bfd >bird.conf
    fairlead announce plan -f examples/plan --config fairlead.yaml --next-hop gw1=192.0.2.11"""
    if gateway is not None and router is not None:
        raise click.UsageError("--router and --gateway are two sides: give one or the other")
    if (gateway is None) == bool(routers):
        raise click.UsageError("--gateway needs --router-address, and only --gateway does")
    if gateway is not None and next_hops:
        raise click.UsageError("--next-hop is for the router; all gateways get the same text")
    if gateway is None and router in (None, "static") and (bfd or asn or router_asn):
        raise click.UsageError(
            "--asn, --router-asn and --bfd are for BGP: add --router frr or bird"
        )
    given = _given(next_hops)
    others = [_address(each) for each in routers]
    found = _read(source, given, gateways=gateway is None)
    section = found.config.announce.bgp
    if gateway is not None and section is not None:
        raise Refused(
            f"announce.bgp is configured, so each gateway itself writes {section.directory}/"
            "bird.conf for its BIRD",
            fix="use --router for the other side",
        )
    numbers = _numbers(section, asn, router_asn)
    bfd = bfd or (section is not None and any(each.bfd is not None for each in section.routers))
    if gateway is None:
        reach = reach_of(found.pools, found.gateways, **numbers, bfd=bfd)
    else:
        reach = side_of_gateways(found.pools, **numbers, bfd=bfd)
        for address in others:
            check_apart(reach, address, "the router")
    target = "gateway bird" if gateway is not None else f"router {router or 'static'}"
    text = _text(reach, router or "static", others)
    notes = (*notes_of(reach), *_notes(found.config, target, bfd))
    if output != "text":
        show(Planned(target, text, reach, notes), output, lambda: None)
    else:
        click.echo(text, nl=False)
    for note in notes:
        click.echo(f"check: {note}", err=True)


def _numbers(
    section: "BgpConfig | None", asn: int | None, router_asn: int | None
) -> dict[str, int]:
    """Return the AS numbers of the gateways and of the router: those that the user gives, or those
    of the configuration, or the defaults."""
    configured = {each.asn for each in section.routers} if section is not None else {ROUTER_ASN}
    if router_asn is None and len(configured) > 1:
        numbers = ", ".join(map(str, sorted(configured)))
        raise Refused(
            f"the routers in announce.bgp have several AS numbers: {numbers}",
            fix="give that of this router with --router-asn",
        )
    return {
        "asn": asn or (section.asn if section is not None else ASN),
        "router_asn": router_asn or min(configured),
    }


def _text(reach: Reach, router: Router, routers: Sequence[str]) -> str:
    from fairlead.routers import bird, frr, speaker, static

    if routers:
        return speaker.render(reach, routers)
    return {"static": static.render, "frr": frr.render, "bird": bird.render}[router](reach)


def _notes(config: Config, target: str, bfd: bool) -> Iterator[str]:
    """Yield what the operator has to know about this target."""
    if config.announce.l2 is not None:
        yield (
            "announce.l2 is configured: routers and clients on the links of the gateways find the "
            "addresses without a route"
        )
    if target == "router static":
        yield (
            "a router goes on sending packets to a dead gateway by a static route, unless its own "
            "link to the gateway goes down"
        )
        return
    if not bfd:
        yield "without --bfd a router notices a dead gateway after 9 s"
    if target == "gateway bird":
        yield (
            "addresses of class fairlead.io/proxy are not announced: the gateways keep them in the "
            "table local, whose routes BIRD does not read"
        )
    elif (section := config.announce.bgp) is not None:
        if protected := [each.name for each in section.routers if each.password_file]:
            yield (
                f"sessions have a password on the side of the gateways: {', '.join(protected)}; "
                "configure the same one in the router"
            )
        if bfd and (without := [each.name for each in section.routers if each.bfd is None]):
            yield (
                f"the gateways use no BFD with {', '.join(without)}: remove it from the text for "
                "such a router"
            )
    else:
        yield (
            "announce.bgp is not configured: each gateway needs a BIRD with the configuration that "
            "--gateway bird prints, with the same AS numbers"
        )


def _given(texts: Sequence[str]) -> tuple[Hop, ...]:
    try:
        return tuple(merged([next_hop_of(each) for each in texts]))
    except ValueError as error:
        raise Refused(f"--next-hop: {error}", fix=ADDRESS_FIX) from error


def _address(text: str) -> str:
    try:
        return usable_address(text)
    except ValueError as error:
        fix = "give an address such as 192.0.2.1"
        raise Refused(f"--router-address: {error}", fix=fix) from error


def _read(source: Source, given: tuple[Hop, ...], *, gateways: bool) -> Found:
    """Return what the cluster or the manifests say. `gateways`: whether the gateways are needed;
    `given`: those that the user has listed."""
    wanted = gateways and not given
    if (access := source.access()) is not None:
        from fairlead.cli.cluster import read_routing
        from fairlead.cli.interrupt import run

        routing = run(read_routing(access, source.config, gateways=wanted))
        pools = _pools(routing.config, routing.address_pools)
        return Found(routing.config, pools, _alive(routing) if wanted else given)
    from fairlead.kube.manifests import manifests_of

    config, scanned = scan_source(source)
    manifests = manifests_of(scanned, config.cluster.service_cidrs if config is not None else ())
    report_left_out(manifests)
    if config is None:
        config = Config()
        if not manifests.address_pools:
            from fairlead.cli.plan import EXAMPLE

            config = EXAMPLE
            click.echo("no --config: the pools are examples", err=True)
    pools = _pools(config, manifests.address_pools)
    return Found(config, pools, _in_manifests(manifests.nodes, config) if wanted else given)


def _pools(config: Config, objects: "Sequence[AddressPool]") -> tuple[PoolConfig, ...]:
    """Return the pools that are in use. An AddressPool that is being deleted still has addresses of
    Services; any other that is not used is reported."""
    from fairlead.plan.pools import DELETED, read_pools

    problems = read_pools(config.pools, objects).problems
    found = list(config.pools)
    for each in objects:
        problem = problems.get(each.metadata.name)
        if problem is None or (problem.code == DELETED and not _invalid(each.spec.addresses)):
            found.append(PoolConfig(each.metadata.name, each.spec.addresses))
        else:
            click.echo(f"left out: {problem.subject} is not used: {problem}", err=True)
    return tuple(found)


def _invalid(ranges: Sequence[str]) -> bool:
    try:
        return not [parse_range(each) for each in ranges]
    except ValueError:
        return True


def _alive(routing: "Routing") -> tuple[Hop, ...]:
    """Return the gateways that renew their Leases, with the addresses of their Nodes; the others
    are reported. Raise Refused if a gateway is no Node, because its address is unknown then."""
    nodes = {each.metadata.name: each for each in routing.nodes}
    found = []
    for each in routing.gateways:
        if not each.alive:
            reason = "does not renew its Lease: it is no next hop until you run the command again"
            click.echo(f"left out: gateway {each.name} {reason}", err=True)
        elif (node := nodes.get(each.name)) is None:
            raise Refused(
                f"no Node is called {each.name} like this gateway, so its address is not known",
                fix="give the addresses of all gateways with --next-hop",
            )
        else:
            if each.state != "ready":
                click.echo(f"check: gateway {each.name} is {each.state} now", err=True)
            found.append(_hop(node))
    return tuple(found)


def _in_manifests(nodes: "Sequence[Node]", config: Config) -> tuple[Hop, ...]:
    """Return the Nodes on which gateways run, as far as manifests tell."""
    from fairlead.plan.members import excluded

    labelled = [each for each in nodes if GATEWAY_LABEL in each.metadata.labels]
    if labelled or not nodes:
        return tuple(map(_hop, labelled))
    click.echo(f"no Node has the label {GATEWAY_LABEL}: every Node counts as a gateway", err=True)
    ignored = config.announce.ignore_exclude_label
    return tuple(_hop(each) for each in nodes if ignored or not excluded(each))


def _hop(node: "Node") -> Hop:
    """Return the gateway on a Node, with the addresses that a router can use."""
    from fairlead.plan.members import node_address

    found = []
    for family in FAMILIES:
        if (text := node_address(node, family)) is not None:
            try:
                found.append(usable_address(text))
            except ValueError as error:
                click.echo(f"left out: an InternalIP of {node.metadata.name}: {error}", err=True)
    return Hop(node.metadata.name, tuple(found))
