"""`fairlead plan`: what Fairlead would do for manifests. Pure: no cluster, no root, nothing written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.config import Config, PoolConfig, load
from fairlead.errors import Refused
from fairlead.model import Listener, LoadBalancer, Note, Publication, ServiceKey

if TYPE_CHECKING:
    from fairlead.kube.manifests import Manifests

EXAMPLE = Config(
    default_class="fairlead.io/direct",
    pools=(PoolConfig("example", ("203.0.113.10-203.0.113.250", "2001:db8:f::10-2001:db8:f::ffff")),),
)


class Planned(msgspec.Struct, frozen=True, omit_defaults=True):
    """One Service's line of the plan: what it would get, or why it gets nothing."""

    service: str
    load_balancer: LoadBalancer | None = None
    notes: tuple[Note, ...] = ()
    refused: str = ""
    ours: bool = True
    """False: another controller's class."""


@click.command()
@click.option("-f", "--filename", "paths", multiple=True, required=True, help="Manifest file, folder, or - for standard input.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="fairlead.yaml; without it, example addresses.")
@output_option
def plan(paths: tuple[str, ...], config_path: Path | None, output: Format) -> None:
    """Show what Fairlead would do for the Services, EndpointSlices and Nodes of manifests.

    For each Service of type LoadBalancer: its addresses, its listeners, which nodes are members with which weight and
    state, and what cannot be done and why. Needs no cluster and no root, and changes nothing.

    \b
    fairlead plan -f examples/
    kubectl get services,endpointslices,nodes -A -o yaml | fairlead plan -f -
    """
    from fairlead.kube.manifests import read_manifests

    config = load(config_path) if config_path else EXAMPLE
    if config_path is None:
        click.echo("no --config: addresses are examples, Services without a class are planned as fairlead.io/direct", err=True)
    manifests = read_manifests(paths)
    planned = _plan(config, manifests)
    show(planned, output, lambda: _table(planned))


def _plan(config: Config, manifests: "Manifests") -> list[Planned]:
    from fairlead.intents import Publications
    from fairlead.kube.objects import ObjectKey
    from fairlead.plan.balancer import class_of, plan_load_balancer
    from fairlead.state import State

    state = State(())
    state.update_nodes({ObjectKey("", o.metadata.name): o for o in manifests.nodes})
    state.update_services({ObjectKey(*o.key): o for o in manifests.services})
    state.update_slices({ObjectKey(o.metadata.namespace, o.metadata.name): o for o in manifests.endpoint_slices})
    publications = Publications(state, config)
    published: Mapping[ServiceKey, Publication | Refused] = publications(state.services)
    result = []
    for key, service in sorted(state.services.items()):
        match published.get(key):
            case Refused() as error:
                result.append(Planned(str(key), refused=str(error)))
            case Publication() as publication:
                addresses = [entry.ip for entry in publication.ingress]
                slices = state.slices_of(key)
                balancer = plan_load_balancer(service, slices, state.nodes, addresses, publication.class_name)
                result.append(Planned(str(key), balancer, publications.notes_of(key)))
            case None if service.spec.type == "LoadBalancer":
                name = class_of(service, config.default_class) or "none"
                result.append(Planned(str(key), refused=f"left alone, its class is {name}", ours=False))
    return result


def _table(planned: list[Planned]) -> None:
    rows: list[tuple[str, ...]] = []
    for item in planned:
        if item.load_balancer is None:
            rows.append((item.service, "-", "-", "-", "-", "-", "refused" if item.ours else "not ours"))
            continue
        for at, cells in enumerate(cells for listener in item.load_balancer.listeners for cells in _rows(listener)):
            rows.append(("" if at else item.service, *cells))
    if rows:
        draw(("SERVICE", "LISTENER", "POLICY", "NODE", "WEIGHT", "SHARE", "STATE"), rows)
    else:
        click.echo("no Service of type LoadBalancer in these manifests")
    for item in planned:
        if item.refused:
            click.echo(f"{item.service}: {item.refused}")
        for note in item.notes:
            click.echo(f"{item.service}: {note.reason}: {note.message}")


def _rows(listener: Listener) -> list[tuple[str, ...]]:
    host = f"[{listener.address}]" if ":" in listener.address else listener.address
    first = f"{host}:{listener.port}/{listener.protocol}"
    active = sum(member.weight for member in listener.members if member.state == "active")
    rows: list[tuple[str, ...]] = []
    for member in listener.members:
        share = f"{100 * member.weight / active:.1f} %" if member.state == "active" and active else "-"
        rows.append((first, listener.policy, member.node, str(member.weight), share, member.state))
        first = ""
    return rows or [(first, listener.policy, "(no pod on any node)", "-", "-", "-")]
