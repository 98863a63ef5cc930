"""`fairlead ovn gc`: the load balancers in OVN that deleted Services have left."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.cli.source import cluster_options, config_option
from fairlead.config import Config, load
from fairlead.errors import Refused
from fairlead.plan.classes import CLASSES, OVN
from fairlead.sections import OvnConfig

if TYPE_CHECKING:
    from fairlead.drivers.ovn.leftovers import Leftover
    from fairlead.kube.client import Client
    from fairlead.model import ServiceKey

TIMEOUT_S = 30.0


@click.group()
def ovn() -> None:
    """Manage load balancers of class fairlead.io/ovn.

    \b
    fairlead ovn gc              list the load balancers of deleted Services
    fairlead ovn gc --delete     delete them"""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leftover in the output. `drains_s`: for how many seconds its open connections would
    continue; None: the controller has not begun to remove it."""

    service: str
    address: str
    row: str
    uuid: str
    drains_s: int | None = None
    deleted: bool = False


class Answer(msgspec.Struct, frozen=True):
    leftovers: list[Line]


@ovn.command()
@click.option(
    "--delete", is_flag=True, help="Delete the listed load balancers. Default: nothing is changed."
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="The cluster no longer exists: all its load balancers are leftovers. The Kubernetes API "
    "is not used then, so --config is needed.",
)
@config_option
@cluster_options
@output_option
def gc(
    delete: bool,
    everything: bool,
    context: str | None,
    kubeconfig: Path | None,
    config_path: Path | None,
    output: Format,
) -> None:
    """List the load balancers in OVN whose Service is gone, and delete them with --delete.

    A row of table Load_Balancer is a leftover if it has the mark of this cluster (ovn.clusterId)
    and its Service does not exist, or neither is of class fairlead.io/ovn nor claimed for it. A
    running controller deletes such rows itself, after the drain time-out; they remain if the
    controller was stopped before the Services were deleted. Rows without the mark are never listed
    or changed. Open connections through a row end when it is deleted. So rows of which a controller
    has said until when their connections continue are left out until then, except with --all.

    \b
    fairlead ovn gc
    fairlead ovn gc --delete
    fairlead ovn gc --config fairlead.yaml --all --delete     a cluster that no longer exists"""
    config = load(config_path, CLASSES) if config_path else None
    answer = asyncio.run(_collect(config, kubeconfig, context, everything, delete))
    show(answer, output, lambda: _table(answer, delete))


async def _collect(
    config: Config | None,
    kubeconfig: Path | None,
    context: str | None,
    everything: bool,
    delete: bool,
) -> Answer:
    from fairlead.cli.cluster import read_configuration
    from fairlead.kube.auth import find_access
    from fairlead.kube.client import Client

    if everything:
        if config is None:
            raise Refused("--all does not read the cluster", fix="give --config with section ovn")
        return await _of_rows(_section_of(config), None, delete)
    async with Client(find_access(kubeconfig, context)) as client:
        known = config if config is not None else await read_configuration(client)
        services = partial(_services, client, known)
        return await _of_rows(_section_of(known), services, delete)


async def _services(client: "Client", config: Config) -> "Collection[ServiceKey]":
    """Return the Services that may have rows."""
    from fairlead.kube.objects import SERVICES
    from fairlead.plan.service import claimed_class, class_of

    return [
        service.key
        for service in await client.list(SERVICES)
        if OVN.name in (class_of(service, config.default_class), claimed_class(service))
    ]


async def _of_rows(
    section: OvnConfig,
    services: "Callable[[], Awaitable[Collection[ServiceKey]]] | None",
    delete: bool,
) -> Answer:
    """Return the leftovers, after deleting them with `delete`. `services`: returns the Services
    that may have rows; None: there are none, and no connection continues."""
    from fairlead.drivers.ovn.leftovers import find_leftovers
    from fairlead.drivers.ovn.stored_rows import StoredRows
    from fairlead.roles.ovn import site_of, tls_of

    async with StoredRows(
        site_of(section), section.northbound, tls_of(section.tls), TIMEOUT_S
    ) as stored:
        # The rows come first: a row that is created later may belong to a Service that the list
        # of Services does not have.
        rows = list(stored.rows())
        needed = await services() if services is not None else ()
        found = find_leftovers(rows, needed, time.time() if services is not None else math.inf)
        if delete and found:
            await stored.delete(found)
    return Answer([_line(each, delete) for each in found])


def _line(one: "Leftover", deleted: bool) -> Line:
    drains_s = None
    if one.draining_until is not None:
        drains_s = max(0, one.draining_until - int(time.time()))
    return Line(one.service, one.vip, one.name, one.uuid, drains_s, deleted)


def _section_of(config: Config) -> OvnConfig:
    if config.ovn is None:
        raise Refused("no OVN is configured", fix="give --config with a section ovn")
    return config.ovn


def _table(answer: Answer, delete: bool) -> None:
    if not answer.leftovers:
        click.echo("no leftovers")
        return
    draw(
        ("SERVICE", "ADDRESS", "ROW", "DRAINS", *(("DELETED",) if delete else ())),
        [
            (
                each.service,
                each.address,
                each.row,
                "-" if each.drains_s is None else f"{each.drains_s} s",
                *(("yes",) if delete else ()),
            )
            for each in answer.leftovers
        ],
    )
    if not delete:
        click.echo("nothing was deleted: see --delete")
