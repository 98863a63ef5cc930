"""`fairlead status --cluster`: the running controllers, gateways and nodes, read from the
Kubernetes API."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from fairlead.cli.cluster import read_configuration
from fairlead.cli.interrupt import run
from fairlead.cli.output import Format, draw, show
from fairlead.config import Config, load
from fairlead.errors import Refused
from fairlead.kube.answers import RefusedByServer
from fairlead.kube.auth import find_access
from fairlead.kube.client import Client
from fairlead.kube.instances import Instance, observe
from fairlead.kube.networks import read_address
from fairlead.kube.objects import SERVICES, Service
from fairlead.net.address import pack_address
from fairlead.plan.addresses import held_by
from fairlead.plan.announce import claim_note
from fairlead.plan.classes import CLASSES
from fairlead.plan.gateways import Gateways, conflict_notes

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
        instances = await read(client, config.presence.namespace)
    if not instances:
        click.echo(
            f"no process of Fairlead has announced itself in namespace {config.presence.namespace}",
            err=True,
        )
    return instances


async def read(client: Client, namespace: str) -> list[Instance]:
    """Return the instances, with the Services of the addresses that they announce."""
    instances = await observe(client, namespace)
    if not any(each.announced for each in instances):
        return instances
    try:
        return named(instances, await client.list(SERVICES))
    except RefusedByServer as problem:
        click.echo(f"the Services of announced addresses are not shown: {problem}", err=True)
        return instances


def named(instances: Iterable[Instance], services: Iterable[Service]) -> list[Instance]:
    """Return the instances, each announced address with the Services whose status shows it."""
    users: Mapping[str, set[str]] = defaultdict(set)
    for service in services:
        for address in held_by(service):
            users[address].add(str(service.key))
    return [
        msgspec.structs.replace(
            instance,
            announced=tuple(
                msgspec.structs.replace(each, services=tuple(sorted(users.get(each.address, ()))))
                for each in instance.announced
            ),
        )
        for instance in instances
    ]


def _tables(instances: Sequence[Instance]) -> None:
    draw(HEADER, [_row(each) for each in instances])
    for role, wanted in (("controller", "leads"), ("gateway", "is alive")):
        alive = [each for each in instances if each.role == role and each.alive]
        if not any(each.state == "leads" for each in alive) if role == "controller" else not alive:
            click.echo(f"no {role} {wanted}")
    _announced([each for each in instances if each.alive])
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


def _announced(instances: Sequence[Instance]) -> None:
    """Print which gateway announces which address on which interface, and since when."""
    found = [(each, address) for each in instances for address in each.announced]
    found.sort(key=lambda pair: (_place(pair[1].address), pair[0].name))
    if found:
        click.echo()
        draw(
            ("ANNOUNCED", "SERVICE", "GATEWAY", "INTERFACE", "SINCE"),
            [
                (
                    address.address,
                    ", ".join(address.services) or "-",
                    each.name,
                    address.interface,
                    address.since,
                )
                for each, address in found
            ],
        )
    for each in instances:
        if each.announces:
            networks = ", ".join(f"{link.network} on {link.interface}" for link in each.announces)
            count = each.announced_count
            noun = "address" if count == 1 else "addresses"
            click.echo(f"gateway {each.name}: announces {count} {noun}, of {networks}")
        if (more := each.announced_count - len(each.announced)) > 0:
            click.echo(
                f"gateway {each.name}: and {more} more addresses: `fairlead status` on its host "
                "lists them"
            )
    _used_twice(instances)


def _used_twice(instances: Sequence[Instance]) -> None:
    """Print which addresses two gateways announce, and which another station uses too."""
    owners: Mapping[str, list[str]] = defaultdict(list)
    for each in instances:
        for announced in each.announced:
            owners[announced.address].append(each.name)
    for address in sorted(owners, key=_place):
        if len(names := owners[address]) > 1:
            click.echo(
                f"{address} is announced by gateways {', '.join(names)}: this is normal for a "
                "moment while the address moves"
            )
    gateways = Gateways(announcers={each.name: each.announces for each in instances})
    own = {mac for each in instances for mac in each.macs}
    for each in instances:
        for claim in each.claimed:
            if each.announces:
                click.echo(str(claim_note(claim, each.name, gateways)))
            elif claim.mac not in own:
                # As in the controller: the kernels of all gateways answer for what they accept.
                accepted = Gateways(claimed={claim.address: (each.name, claim)})
                for note in conflict_notes((claim.address,), accepted):
                    click.echo(str(note))


def _place(address: str) -> tuple[bool, bytes]:
    """Return the place of an address in a sorted list. A record may contain any text."""
    known = read_address(address)
    return (False, pack_address(known)) if known is not None else (True, address.encode())


def _row(each: Instance) -> tuple[str, ...]:
    if each.seen_s_ago is not None:
        seen = f"{each.seen_s_ago:.0f} s ago"
    else:
        silent_s = each.silent_s or each.watched_s
        seen = f"not for {silent_s:.0f} s; last renewed at {each.renewed} by its own clock"
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
