"""`fairlead migrate`: what to do before Services are taken over from MetalLB or OpenStack's cloud
controller. Changes nothing."""

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import click
import msgspec

from fairlead.cli.output import Format, Group, draw, output_option, show
from fairlead.cli.source import Source, report_left_out, scan_source, source_options
from fairlead.config import Config
from fairlead.plan.handback import Next

if TYPE_CHECKING:
    from fairlead.kube.manifests import Document, LeftOut
    from fairlead.plan.migrated_pools import Inventory, PoolsToApply
    from fairlead.plan.migration import Takeover


@click.group(cls=Group)
def migrate() -> None:
    """Prepare to take Services over from MetalLB or OpenStack's cloud controller, with their
    addresses. Changes nothing.

    \b
    fairlead migrate services                     what changes for each Service, and what to do
    fairlead migrate pools | kubectl apply -f -   AddressPools for the existing addresses
    fairlead migrate back --to metallb            requests for the way back

    With -f, a document that cannot be read, or a Service that the API server would refuse, is
    reported and left out, and the exit status is 1."""


@migrate.command()
@source_options
@output_option
def services(source: Source, output: Format) -> None:
    """Show for each Service of type LoadBalancer which controller serves it now, which addresses it
    keeps, and what its owner should know.

    READY is yes if no change of the Service is necessary: after the migration, `fairlead plan`
    accepts it with these addresses. The pools that `fairlead migrate pools` prints are assumed."""
    config, found = _read(source)
    awaited = examined(config, found)

    def table() -> None:
        if not awaited:
            click.echo("no Service of type LoadBalancer")
            return
        header = ("SERVICE", "SERVED BY", "KEEPS", "POOL", "READY")
        rows = [
            (
                each.service,
                each.system,
                ", ".join(each.addresses) or "-",
                ", ".join(filter(None, each.pools)) or "-",
                "yes" if each.ready else "no",
            )
            for each in awaited
        ]
        draw(header, rows)
        for each in awaited:
            for finding in each.findings:
                click.echo(f"{each.service}: {finding}")

    show(awaited, output, table)
    _report(found)


@migrate.command()
@source_options
def pools(source: Source) -> None:
    """Print AddressPools to apply: the pools of MetalLB, and one for addresses that Services have
    from elsewhere.

    A pool that cannot be translated or used is not printed but reported, and the exit status is
    1."""
    import yaml

    config, found = _read(source)
    made = pools_of(config, found)
    for text in (*map(str, made.refused), *made.remarks):
        click.echo(text, err=True)
    if made.bodies:
        yaml.safe_dump_all(made.bodies, sys.stdout, sort_keys=False)
    elif not made.refused:
        click.echo("no address needs another pool: nothing to apply", err=True)
    _report(found)
    if made.refused:
        raise SystemExit(1)


@migrate.command()
@click.option(
    "--to",
    type=click.Choice(get_args(Next)),
    required=True,
    help="The system that is to serve the Services again.",
)
@source_options
def back(source: Source, to: Next) -> None:
    """Print the requests by which another system gives Services the addresses that they have now.

    When Fairlead releases a Service, its addresses are removed from the status. Until the other
    system has started, kubectl shows <pending>, and the Service is not served. Apply the requests
    before the release:

    \b
    fairlead migrate back --to metallb |
        kubectl apply --server-side --field-manager=fairlead-migrate --force-conflicts -f -"""
    import yaml

    from fairlead.plan.handback import requests

    _, found = _read(source)
    bodies, remarks = requests(found.manifests.services, to, found.of_metallb)
    for text in remarks:
        click.echo(text, err=True)
    if bodies:
        yaml.safe_dump_all(bodies, sys.stdout, sort_keys=False)
    else:
        click.echo(f"no Service has to request its addresses from {to}", err=True)
    click.echo(
        "when Fairlead releases a Service, kubectl shows its EXTERNAL-IP as <pending>, and it is "
        f"not served, until {to} has started: have it ready to start before",
        err=True,
    )
    _report(found)


def examined(config: Config, found: "Inventory") -> "list[Takeover]":
    """Return what the migration means for each Service of type LoadBalancer. The plan that decides
    it is that of `fairlead plan` after the migration, with the pools of `fairlead migrate pools`
    and a default class."""
    from fairlead.cli.planning import plan_manifests, state_of
    from fairlead.plan.migrated_pools import assumed_class
    from fairlead.plan.migration import Planned, takeovers
    from fairlead.plan.pools import read_pools

    existing = found.manifests.address_pools
    exclusions = state_of(config, found.manifests).exclusions
    pools = pools_of(config, found).applied_to(existing)
    after = plan_manifests(
        msgspec.structs.replace(config, default_class=assumed_class(config)),
        msgspec.structs.replace(found.manifests, address_pools=pools),
    )
    return takeovers(
        found.manifests.services,
        read_pools(config.pools, existing, exclusions),
        Planned(config, after.balancers, after.ledger.not_sharing),
    )


def pools_of(config: Config, found: "Inventory") -> "PoolsToApply":
    """Return the AddressPools to apply before the migration."""
    from fairlead.cli.planning import state_of
    from fairlead.plan.migrated_pools import pools_to_apply

    return pools_to_apply(found, config, state_of(config, found.manifests).exclusions)


def _read(source: Source) -> tuple[Config, "Inventory"]:
    if (access := source.access()) is not None:
        from fairlead.cli.cluster import read_inventory
        from fairlead.kube.objects import CONFIGURATION

        config, found = asyncio.run(read_inventory(access, source.config))
        if config is None:
            click.echo(
                f"no --config, and no ConfigMap {CONFIGURATION}: pools of the configuration are "
                "unknown",
                err=True,
            )
    else:
        config, scanned = scan_source(source)
        found = _inventory_of(scanned, config.cluster.service_cidrs if config is not None else ())
    return config or Config(), found


def _inventory_of(
    scanned: "Sequence[Document | LeftOut]", service_cidrs: Sequence[str]
) -> "Inventory":
    from fairlead.kube.manifests import Document, manifests_of
    from fairlead.kube.rules.types import without_nulls
    from fairlead.plan.metallb import concerns_pools
    from fairlead.plan.migrated_pools import Inventory

    theirs = [
        without_nulls(each.object)
        for each in scanned
        if isinstance(each, Document) and concerns_pools(each.object)
    ]
    return Inventory(manifests_of(scanned, service_cidrs), tuple(theirs))


def _report(found: "Inventory") -> None:
    """Report which parts of the manifests were left out. Then the exit status is 1."""
    report_left_out(found.manifests)
    refused = [each for each in found.manifests.submissions.values() if each.refused]
    for each in refused:
        click.echo(
            f"left out: Service {each.key}: the API server would refuse it: {each.refused}",
            err=True,
        )
    if refused or found.manifests.left_out_errors:
        raise SystemExit(1)
