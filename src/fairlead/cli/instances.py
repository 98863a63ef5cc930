"""`fairlead status --cluster`: the running controllers, gateways and nodes, read from the
Kubernetes API."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from fairlead.cli.cluster import read_configuration
from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, draw, show
from fairlead.config import Config, load
from fairlead.errors import Refused
from fairlead.kube.announcers import announcer_name
from fairlead.kube.auth import find_access
from fairlead.kube.client import Client
from fairlead.kube.instances import Instance, observe
from fairlead.plan.classes import CLASSES

HEADER = (
    "ROLE",
    "INSTANCE",
    "STATE",
    "VERSION",
    "STARTED",
    "LAST SEEN",
    "INTERFACES",
    "SERVES",
    "CANNOT SERVE",
)


def show_cluster(
    kubeconfig: Path | None, context: str | None, config_path: Path | None, output: Format
) -> None:
    """Print all instances that have announced themselves."""
    instances = run(_observe(kubeconfig, context, config_path))
    show(instances, output, lambda: _tables(instances))


async def _observe(
    kubeconfig: Path | None, context: str | None, config_path: Path | None
) -> list[Instance]:
    config = load(config_path, CLASSES) if config_path else None
    async with Client(find_access(kubeconfig, context)) as client:
        if config is None:
            config = Config()
            # The ConfigMap may be missing or not readable; then the default is used.
            with suppress(Refused):
                config = await read_configuration(client)
        click.echo("waiting until each process has renewed its Lease ...", err=True)
        instances = await observe(client, config.presence.namespace)
    if not instances:
        click.echo(
            f"no process of Fairlead has announced itself in namespace {config.presence.namespace}",
            err=True,
        )
    return instances


def _tables(instances: Sequence[Instance]) -> None:
    draw(HEADER, [_row(each) for each in instances])
    for role, wanted in (("controller", "leads"), ("gateway", "is alive")):
        alive = [each for each in instances if each.role == role and each.alive]
        if not any(each.state == "leads" for each in alive) if role == "controller" else not alive:
            click.echo(f"no {role} {wanted}")
    for each in instances:
        instance = f"{each.role} {each.name}"
        if each.stale:
            ages = ", ".join(f"{name} {age_s} s" for name, age_s in each.stale.items())
            click.echo(f"{instance}: its state of the cluster is stale: {ages}")
        explained = [refusal for refusal in each.not_served if refusal.message]
        for refusal in explained:
            click.echo(f"{instance}: cannot serve {refusal.service}: {refusal.message}")
        if (more := each.not_served_count - len(explained)) > 0:
            click.echo(
                f"{instance}: cannot serve {more} more Services: `fairlead status` on its host "
                "lists them"
            )
    _announcers(instances)


def _announcers(instances: Sequence[Instance]) -> None:
    """Print which instance announces which address, and the BGP sessions."""
    announcing = [(each, each.announcer) for each in instances if each.announcer is not None]
    rows = [
        (
            address.address,
            ", ".join(address.services) or "-",
            _named(instance),
            address.method,
            ", ".join(address.interfaces or address.peers) or ("-" if address.told else "no peer"),
            address.since or "-",
        )
        for instance, status in announcing
        for address in status.addresses
    ]
    if rows:
        click.echo()
        header = "ADDRESS", "SERVICES", "ANNOUNCED BY", "METHOD", "ON / TO", "SINCE"
        draw(header, sorted(rows))
    for instance, status in announcing:
        if (more := status.address_count - len(status.addresses)) > 0:
            click.echo(
                f"{_named(instance)}: {more} more addresses: `kubectl get announcer "
                f"{announcer_name(status.role, status.host)} -o yaml` lists them"
            )
    sessions = [
        (
            _named(instance),
            each.peer,
            each.address,
            each.state,
            each.since or "-",
            each.bfd or "-",
            each.last_error or "-",
        )
        for instance, status in announcing
        for each in status.sessions
    ]
    if sessions:
        click.echo()
        header_of_sessions = (
            "BGP SESSION OF",
            "PEER",
            "ADDRESS",
            "STATE",
            "SINCE",
            "BFD",
            "LAST ERROR",
        )
        draw(header_of_sessions, sessions)
    for instance, status in announcing:
        for conflict in status.conflicts:
            click.echo(
                f"{_named(instance)}: conflict: {conflict.address} is also at "
                f"{conflict.mac} on {conflict.interface} since {conflict.since or '-'}"
            )
        for problem in status.problems:
            click.echo(f"{_named(instance)}: {problem}")


def _named(each: Instance) -> str:
    """Return the role and name of an instance, and since when it has been silent."""
    if each.alive:
        return f"{each.role} {each.name}"
    last = f", last renewed at {each.renewed}" if each.renewed else ""
    return f"{each.role} {each.name} (gone: not seen for {each.watched_s:.0f} s{last})"


def _row(each: Instance) -> tuple[str, ...]:
    if each.seen_s_ago is not None:
        seen = f"{each.seen_s_ago:.0f} s ago"
    else:
        seen = f"not for {each.watched_s:.0f} s; last renewed at {each.renewed} by its own clock"
    state = f"{each.state}, stale" if each.stale else each.state
    interfaces = ", ".join(each.interfaces) or "-"
    return (
        each.role,
        each.name,
        state,
        each.version,
        each.since,
        seen,
        interfaces,
        str(each.served),
        str(each.not_served_count),
    )
