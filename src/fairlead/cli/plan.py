"""`fairlead plan`: what Fairlead would do for a cluster or for manifests. It writes nothing and
does not need root."""

import asyncio
from typing import TYPE_CHECKING

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.cli.source import Source, source_options
from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.model import Listener, LoadBalancer, ServiceKey
from fairlead.net.address import join_host_port

if TYPE_CHECKING:
    from fairlead.kube.manifests import Manifests

EXAMPLE = Config(
    default_class="fairlead.io/direct",
    pools=(
        PoolConfig("example", ("203.0.113.10-203.0.113.250", "2001:db8:f::10-2001:db8:f::ffff")),
    ),
)


class Planned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The plan of one Service: its load balancer, or the reason why it gets none."""

    service: str
    load_balancer: LoadBalancer | None = None
    known_later: str = ""
    """Facts that are unknown before the load balancer is created; empty: none."""
    refused: str = ""
    ours: bool = True
    """False: another controller serves the class."""


@click.command()
@source_options
@click.option(
    "-n", "--namespace", help="Show only the Services of this namespace; all are planned."
)
@output_option
def plan(source: Source, namespace: str | None, output: Format) -> None:
    """Show what Fairlead would do for the Services, EndpointSlices and Nodes of a cluster or of
    manifests.

    For each Service of type LoadBalancer it shows the addresses, the listeners, the members with
    their weights and states, and which parts are not possible and why. The command changes nothing
    and only reads from the cluster. It calls no cloud; for Services whose addresses come from a
    cloud it reports which facts only the cloud knows. With -f it needs no cluster; without --config
    it shows example addresses.

    \b
    fairlead plan -f examples/plan
    kubectl fairlead plan -n shop --context production"""
    config, manifests = _read(source)
    planned = [
        each
        for each in _plan(config, manifests)
        if namespace in (None, ServiceKey.parse(each.service).namespace)
    ]
    show(planned, output, lambda: _table(planned))


def _read(source: Source) -> tuple[Config, "Manifests"]:
    config = source.config
    if (access := source.access()) is not None:
        from fairlead.cli.cluster import read_cluster

        return asyncio.run(read_cluster(access, config))
    from fairlead.kube.manifests import read_manifests

    manifests = read_manifests(source.paths)
    if config is None:
        config = msgspec.structs.replace(EXAMPLE, pools=()) if manifests.address_pools else EXAMPLE
        whose = "addresses are examples, " if config.pools else ""
        click.echo(
            f"no --config: {whose}Services without a class are planned as fairlead.io/direct",
            err=True,
        )
    return config, manifests


def _plan(config: Config, manifests: "Manifests") -> list[Planned]:
    from fairlead.cli.planning import plan_manifests
    from fairlead.plan.classes import CLASSES
    from fairlead.plan.service import class_of

    state, _, balancers = plan_manifests(config, manifests)
    planned = []
    for key, service in sorted(state.services.items()):
        match balancers.get(key):
            case Refused() as error:
                planned.append(Planned(str(key), refused=str(error)))
            case LoadBalancer() as balancer:
                later = CLASSES[balancer.class_name].known_later(balancer)
                planned.append(Planned(str(key), balancer, later))
            case None if service.spec.type == "LoadBalancer":
                name = class_of(service, config.default_class) or "none"
                planned.append(
                    Planned(str(key), refused=f"ignored, its class is {name}", ours=False)
                )
    return planned


def _table(planned: list[Planned]) -> None:
    rows: list[tuple[str, ...]] = []
    for item in planned:
        if item.load_balancer is None:
            rows.append(
                (item.service, "-", "-", "-", "-", "-", "refused" if item.ours else "not ours")
            )
            continue
        if not item.load_balancer.listeners:
            rows.append((item.service, "(no port)", "-", "-", "-", "-", "-"))
            continue
        listeners = [
            (at, each)
            for each in item.load_balancer.listeners
            for at in item.load_balancer.listening(each) or _unknown(item, each)
        ]
        for number, cells in enumerate(
            cells for at, listener in listeners for cells in _rows(at, listener)
        ):
            rows.append(("" if number else item.service, *cells))
    if rows:
        draw(("SERVICE", "LISTENER", "POLICY", "NODE", "WEIGHT", "SHARE", "STATE"), rows)
    else:
        click.echo("no Service of type LoadBalancer")
    for item in planned:
        if item.refused:
            click.echo(f"{item.service}: {item.refused}")
        if item.known_later:
            click.echo(f"{item.service}: known later: {item.known_later}")
        for note in item.load_balancer.notes if item.load_balancer else ():
            click.echo(f"{item.service}: {note.code}: {note}")


def _unknown(item: Planned, listener: Listener) -> tuple[str, ...]:
    """Return the placeholder of the address of a listener that gets one later."""
    return (f"({listener.family} later)",) if item.known_later else ()


def _rows(address: str, listener: Listener) -> list[tuple[str, ...]]:
    first = f"{join_host_port(address, listener.port)}/{listener.protocol}"
    active = sum(member.weight for member in listener.members if member.state == "active")
    rows: list[tuple[str, ...]] = []
    for member in listener.members:
        share = (
            f"{100 * member.weight / active:.1f} %" if member.state == "active" and active else "-"
        )
        rows.append((first, listener.policy, member.node, str(member.weight), share, member.state))
        first = ""
    return rows or [(first, listener.policy, "(no pod on any node)", "-", "-", "-")]
