"""`fairlead octavia gc`: the OpenStack resources that deleted Services and clusters have left."""

import asyncio
from collections.abc import Collection, Container
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from fairlead.cli.output import Format, Group, draw, output_option, show
from fairlead.cli.parameters import NamedFile
from fairlead.config import Config, load
from fairlead.errors import Refused
from fairlead.plan.classes import CLASSES
from fairlead.sections import OctaviaConfig

if TYPE_CHECKING:
    from fairlead.drivers.octavia.balancers import BalancerState
    from fairlead.drivers.octavia.cloud import Cloud
    from fairlead.drivers.octavia.leftovers import Leftover, OtherCluster
    from fairlead.drivers.octavia.marks import Owner
    from fairlead.drivers.octavia.network_leftovers import MarkedAtNeutron, NetworkLeftover
    from fairlead.model import ServiceKey

    Either = Leftover | NetworkLeftover


@click.group(cls=Group)
def octavia() -> None:
    """Manage load balancers of class fairlead.io/octavia.

    \b
    fairlead octavia gc              list the resources of deleted Services
    fairlead octavia gc --delete     delete them"""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leftover in the output. `load_balancer`, `address`: empty if the leftover has none.
    `deleted`: None if deletion was not requested. `problem`: why it could not be deleted."""

    cluster: str
    service: str
    uid: str
    load_balancer: str
    address: str
    resource: str
    reason: str
    deleted: bool | None = None
    problem: str = ""


class Answer(msgspec.Struct, frozen=True):
    leftovers: list[Line]
    other_clusters: "list[OtherCluster]"


@octavia.command()
@click.option(
    "--delete", is_flag=True, help="Delete the listed resources. Default: nothing is changed."
)
@click.option(
    "--kept",
    is_flag=True,
    help="Include floating IPs that are kept (keep-floatingip); --delete deletes them too.",
)
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    metavar="UID",
    help="A cluster that no longer exists: all its resources are leftovers. The Kubernetes API is "
    "not used then. May be repeated.",
)
@click.option(
    "--cloud",
    help="Name of the cloud in clouds.yaml, which is searched as by the openstack command. "
    "Default: the cloud of the configuration.",
)
@click.option("--context", help="Context of the kubeconfig. Default: the current context.")
@click.option(
    "--kubeconfig",
    type=NamedFile(),
    help="Kubeconfig of the cluster. Default: as kubectl.",
)
@click.option(
    "--config",
    "config_path",
    type=NamedFile(),
    help="fairlead.yaml. Default: ConfigMap fairlead-system/fairlead of the cluster.",
)
@output_option
def gc(
    delete: bool,
    kept: bool,
    clusters: tuple[str, ...],
    cloud: str | None,
    context: str | None,
    kubeconfig: Path | None,
    config_path: Path | None,
    output: Format,
) -> None:
    """List the resources of deleted Services in Octavia and Neutron, and delete them with --delete.

    Everything that Fairlead creates is marked with the cluster (the uid of its namespace
    kube-system) and the Service with its uid: load balancers by tags, floating IPs and rules of
    security groups by their description. A resource is a leftover if it has the mark of this
    cluster and its Service no longer exists. A running controller deletes such resources itself;
    they remain if the controller was stopped before the Services were deleted. A security group
    without rules of any Service is listed, too.

    Resources of other clusters in the same project are only counted, because the command cannot
    know whether a cluster still exists. If it does not, pass it with --cluster.

    Resources without a mark of Fairlead are never listed or changed. A load balancer on which
    others have listeners stays; only the Service's own listeners and pools are deleted. A floating
    IP that is kept (keep-floatingip) stays unless --kept is given. A floating IP that is attached
    to something else always stays.

    \b
    fairlead octavia gc                                   this cluster
    fairlead octavia gc --delete
    fairlead octavia gc --cloud mycloud --cluster UID     a cluster that no longer exists
    fairlead octavia gc -o json | jq -r '.leftovers[].load_balancer'

    The exit status is 1 if a resource could not be deleted."""
    config = load(config_path, CLASSES) if config_path else None
    answer = asyncio.run(_collect(config, kubeconfig, context, cloud, clusters, delete, kept))
    show(answer, output, lambda: _table(answer, delete))
    if any(line.problem for line in answer.leftovers):
        raise SystemExit(1)


async def _collect(
    config: Config | None,
    kubeconfig: Path | None,
    context: str | None,
    cloud_name: str | None,
    clusters: tuple[str, ...],
    delete: bool,
    kept: bool,
) -> Answer:
    from fairlead.cli.cluster import read_configuration
    from fairlead.drivers.octavia.cloud import Cloud
    from fairlead.drivers.octavia.leftovers import read_marked
    from fairlead.drivers.octavia.marks import Owner
    from fairlead.drivers.octavia.network_leftovers import read_marked_at_neutron
    from fairlead.kube.auth import find_access
    from fairlead.kube.client import Client
    from fairlead.kube.objects import NAMESPACES, SERVICES, ObjectKey
    from fairlead.model import ServiceKey
    from fairlead.roles.octavia import SYSTEM

    if clusters:
        cloud = Cloud(_cloud_of(config, cloud_name))
        try:
            found: list[Either] = []
            for uid in clusters:
                owner = Owner(uid, "")
                balancers, theirs = (
                    await read_marked(cloud, owner),
                    await read_marked_at_neutron(cloud, owner),
                )
                found += _leftovers(owner, balancers, theirs, None, kept)
            return await _answer(cloud, found, clusters, delete)
        finally:
            cloud.close()
    async with Client(find_access(kubeconfig, context)) as client:
        if config is None and cloud_name is None:
            config = await read_configuration(client)
        uid = (await client.get(NAMESPACES, ObjectKey("", SYSTEM))).metadata.uid
        cloud = Cloud(_cloud_of(config, cloud_name))
        try:
            owner = Owner(uid, "")
            balancers, theirs = (
                await read_marked(cloud, owner),
                await read_marked_at_neutron(cloud, owner),
            )
            services = await client.list(SERVICES)
            existing = {
                (ServiceKey(each.metadata.namespace, each.metadata.name), each.metadata.uid)
                for each in services
            }
            return await _answer(
                cloud, _leftovers(owner, balancers, theirs, existing, kept), (uid,), delete
            )
        finally:
            cloud.close()


def _leftovers(
    owner: "Owner",
    balancers: "list[BalancerState]",
    theirs: "MarkedAtNeutron",
    existing: "Collection[tuple[ServiceKey, str]] | None",
    kept: bool,
) -> "list[Either]":
    """Return the leftovers in the order of their deletion."""
    from fairlead.drivers.octavia.leftovers import find_leftovers
    from fairlead.drivers.octavia.network_leftovers import find_network_leftovers

    found = find_leftovers(balancers, owner, existing)
    keys = None if existing is None else {key for key, _ in existing}
    going = {each.balancer.port_id for each in found if each.whole}
    return [*found, *find_network_leftovers(theirs, owner, keys, going, kept=kept)]


async def _answer(
    cloud: "Cloud", found: "list[Either]", known: Container[str], delete: bool
) -> Answer:
    """Return the leftovers, after deleting them with `delete`. `known`: the clusters of the
    command."""
    from fairlead.drivers.octavia import leftovers, network_leftovers

    lines = []
    for each in found:
        line = _line(each)
        if delete:
            if isinstance(each, leftovers.Leftover):
                problem = await leftovers.delete(cloud, each)
            else:
                problem = await network_leftovers.delete(cloud, each)
            line = msgspec.structs.replace(line, deleted=not problem, problem=problem)
        lines.append(line)
    return Answer(lines, await leftovers.other_clusters(cloud, known))


def _line(one: "Either") -> Line:
    from fairlead.drivers.octavia.leftovers import Leftover

    if isinstance(one, Leftover):
        resource = "load balancer" if one.whole else "listeners and pools"
        return Line(
            one.cluster, one.service, one.uid, one.load_balancer, one.address, resource, one.why
        )
    if one.floating is not None:
        resource = "floating IP, kept" if one.floating.kept else "floating IP"
        return Line(one.cluster, one.service, "", "", one.floating.address, resource, one.why)
    resource = f"{len(one.rules)} security-group rules" if one.rules else "security group"
    return Line(one.cluster, one.service, "", "", "", resource, one.why)


def _cloud_of(config: Config | None, name: str | None) -> OctaviaConfig:
    """Return the section of the cloud. Raise Refused if no cloud is specified."""
    if name is not None:
        return OctaviaConfig(cloud=name)
    if config is None or config.octavia is None:
        raise Refused(
            "no cloud is specified", fix="give --cloud, or --config with a section octavia"
        )
    return config.octavia


def _table(answer: Answer, delete: bool) -> None:
    if not answer.leftovers:
        click.echo("no leftovers")
    else:
        header = (
            "SERVICE",
            "LOAD BALANCER",
            "ADDRESS",
            "RESOURCE",
            "REASON",
            *(("DELETED",) if delete else ()),
        )
        rows = [
            (
                each.service or "-",
                each.load_balancer or "-",
                each.address or "-",
                each.resource,
                each.reason,
                *(("yes" if each.deleted else "no",) if delete else ()),
            )
            for each in answer.leftovers
        ]
        draw(header, rows)
        for each in answer.leftovers:
            if each.problem:
                click.echo(
                    f"{each.load_balancer or each.address or each.resource}: {each.problem}",
                    err=True,
                )
        if not delete:
            click.echo("nothing was deleted: see --delete")
    for other in answer.other_clusters:
        names = ", ".join(other.names) + (
            ", ..." if other.load_balancers > len(other.names) else ""
        )
        has = f"{other.load_balancers} load balancers" + (f" ({names})" if names else "")
        has += f", {other.network} floating IPs and security groups" if other.network else ""
        click.echo(f"cluster {other.cluster} has {has}; if it no longer exists, see --cluster")
