"""`fairlead migrate`: what to do before Services are taken over from MetalLB or OpenStack's cloud
controller. Changes nothing."""

import asyncio
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fairlead.cli.output import Format, Group, draw, output_option, show
from fairlead.cli.source import Source, source_options
from fairlead.config import Config
from fairlead.errors import Refused

if TYPE_CHECKING:
    from fairlead.plan.migration import Inventory


@click.group(cls=Group)
def migrate() -> None:
    """Prepare to take Services over from MetalLB or OpenStack's cloud controller, with their
    addresses. Changes nothing.

    \b
    fairlead migrate services                     what changes for each Service, and what to do
    fairlead migrate pools | kubectl apply -f -   AddressPools for the existing addresses
    """


@migrate.command()
@source_options
@output_option
def services(source: Source, output: Format) -> None:
    """Show for each Service of type LoadBalancer which controller serves it now, which addresses it
    keeps, and what its owner should know."""
    from fairlead.plan.migration import takeovers
    from fairlead.plan.pools import read_pools

    config, found = _read(source)
    awaited = takeovers(
        found.services, read_pools(config.pools, found.address_pools), config.default_class
    )

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


@migrate.command()
@source_options
def pools(source: Source) -> None:
    """Print AddressPools to apply: the pools of MetalLB, and one for addresses that Services have
    from elsewhere.

    A MetalLB pool with unsupported fields is not printed but reported, and the exit status is 1."""
    import yaml

    from fairlead.kube.crds import AddressPool
    from fairlead.plan.migration import TAKEN_OVER, pool_for_unpooled
    from fairlead.plan.pools import read_pools

    config, found = _read(source)
    present = read_pools(config.pools, found.address_pools).by_name
    translations, refused = _translated(found.metallb_pools)
    made = [pool for pool in translations if pool["metadata"]["name"] not in present]
    everything = read_pools(
        config.pools, [*found.address_pools, *(msgspec.convert(pool, AddressPool) for pool in made)]
    )
    for name, problem in everything.problems.items():
        click.echo(f"{name}: {problem}", err=True)
    rest = pool_for_unpooled(found.services, everything)
    if rest is not None and not refused:
        made.append(rest)
    for refusal in refused:
        click.echo(str(refusal), err=True)
    if rest is not None and refused:
        click.echo(
            f"pool {TAKEN_OVER} is not printed: its addresses may be in the pools that are not "
            "printed",
            err=True,
        )
    if made:
        yaml.safe_dump_all(made, sys.stdout, sort_keys=False)
    elif not refused:
        click.echo("every address is in a pool already: nothing to apply", err=True)
    if refused:
        raise SystemExit(1)


def _translated(pools: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Refused]]:
    from fairlead.plan.migration import translated

    made, refused = [], []
    for pool in pools:
        try:
            made.append(translated(pool))
        except Refused as problem:
            refused.append(problem)
    return made, refused


def _read(source: Source) -> tuple[Config, "Inventory"]:
    config = source.config
    if (access := source.access()) is not None:
        from fairlead.cli.cluster import read_inventory
        from fairlead.kube.objects import CONFIGURATION

        config, found = asyncio.run(read_inventory(access, config))
        if config is None:
            click.echo(
                f"no --config, and no ConfigMap {CONFIGURATION}: pools of the configuration are "
                "unknown",
                err=True,
            )
    else:
        found = _read_manifests(source.paths)
    return config or Config(), found


def _read_manifests(paths: Iterable[str]) -> "Inventory":
    from fairlead.kube.crds import ADDRESS_POOLS
    from fairlead.kube.manifests import read_documents, typed
    from fairlead.kube.objects import SERVICES
    from fairlead.plan.migration import IP_ADDRESS_POOL, Inventory

    documents = list(read_documents(paths))
    services, own = (
        tuple(
            typed(each, resource)
            for each in documents
            if each.kind == (resource.group_version, resource.kind)
        )
        for resource in (SERVICES, ADDRESS_POOLS)
    )
    return Inventory(
        services, own, tuple(each.object for each in documents if each.kind == IP_ADDRESS_POOL)
    )
