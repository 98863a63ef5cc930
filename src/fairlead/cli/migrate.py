"""`fairlead migrate`: what to do before Services come over from MetalLB or OpenStack's cloud controller. Changes nothing."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.config import Config, load

if TYPE_CHECKING:
    from fairlead.kube.access import Access
    from fairlead.kube.objects import Service
    from fairlead.kube.own import AddressPool

CommandT = TypeVar("CommandT", bound=Any)


class Found(msgspec.Struct, frozen=True):
    """What is there: Services, Fairlead's own pools, and MetalLB's as they are written."""

    services: "Sequence[Service]"
    address_pools: "Sequence[AddressPool]"
    metallb_pools: Sequence[Mapping[str, Any]]


def _source_options(command: CommandT) -> CommandT:
    decorated: CommandT = command
    for option in (
        click.option("--context", help="Context of the kubeconfig; without it, its current one."),
        click.option(
            "--kubeconfig", type=click.Path(path_type=Path), help="How to reach the cluster; without it as kubectl does."
        ),
        click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path),
            help="fairlead.yaml, for its pools and its defaultClass.",
        ),
        click.option("-f", "--filename", "paths", multiple=True, help="Manifests, instead of a cluster: file, folder, or - ."),
    ):
        decorated = option(decorated)
    return decorated


@click.group()
def migrate() -> None:
    """Prepare to take Services over from MetalLB or OpenStack's cloud controller, with their addresses. Changes nothing.

    \b
    fairlead migrate services                     what awaits each Service, and what to do
    fairlead migrate pools | kubectl apply -f -   AddressPools for the addresses that there are
    """


@migrate.command()
@_source_options
@output_option
def services(
    paths: tuple[str, ...], config_path: Path | None, kubeconfig: Path | None, context: str | None, output: Format
) -> None:
    """Show for each LoadBalancer Service who serves it now, which addresses it keeps, and what its owner should know."""
    from fairlead.plan.migration import prospects
    from fairlead.plan.pools import read_pools

    config = load(config_path) if config_path else Config()
    found = _find(paths, kubeconfig, context)
    awaited = prospects(found.services, read_pools(config.pools, found.address_pools), config.default_class)

    def table() -> None:
        if not awaited:
            click.echo("there is no Service of type LoadBalancer")
            return
        header = ("SERVICE", "SERVED BY", "KEEPS", "OF POOL", "READY")
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
            for remark in each.remarks:
                click.echo(f"{each.service}: {remark}")

    show(awaited, output, table)


@migrate.command()
@_source_options
def pools(paths: tuple[str, ...], config_path: Path | None, kubeconfig: Path | None, context: str | None) -> None:
    """Print AddressPools to apply: MetalLB's pools, and one for addresses that Services have from elsewhere."""
    import yaml

    from fairlead.kube.own import AddressPool
    from fairlead.plan.migration import homeless, translated
    from fairlead.plan.pools import read_pools

    config = load(config_path) if config_path else Config()
    found = _find(paths, kubeconfig, context)
    there = read_pools(config.pools, found.address_pools).by_name
    made = [pool for pool in map(translated, found.metallb_pools) if pool["metadata"]["name"] not in there]
    everything = read_pools(config.pools, [*found.address_pools, *(msgspec.convert(pool, AddressPool) for pool in made)])
    for name, problem in everything.problems.items():
        click.echo(f"{name}: {problem.message}", err=True)
    if (rest := homeless(found.services, everything)) is not None:
        made.append(rest)
    if not made:
        click.echo("every address is in a pool already: nothing to apply", err=True)
        return
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)


def _find(paths: tuple[str, ...], kubeconfig: Path | None, context: str | None) -> Found:
    if not paths:
        from fairlead.kube.auth import find_access

        return asyncio.run(_find_in_cluster(find_access(kubeconfig, context)))
    if kubeconfig or context:
        raise click.UsageError("-f names manifests, --kubeconfig and --context a cluster: give one or the other")
    from fairlead.kube.manifests import read_documents, typed
    from fairlead.kube.objects import SERVICES
    from fairlead.kube.own import ADDRESS_POOLS
    from fairlead.plan.migration import IP_ADDRESS_POOL

    documents = list(read_documents(paths))
    return Found(
        [typed(each, SERVICES) for each in documents if each.kind == (SERVICES.group_version, SERVICES.kind)],
        [typed(each, ADDRESS_POOLS) for each in documents if each.kind == (ADDRESS_POOLS.group_version, ADDRESS_POOLS.kind)],
        [each.object for each in documents if each.kind == IP_ADDRESS_POOL],
    )


async def _find_in_cluster(access: "Access") -> Found:
    from fairlead.kube.answers import NotFound
    from fairlead.kube.client import Client
    from fairlead.kube.objects import SERVICES
    from fairlead.kube.own import ADDRESS_POOLS
    from fairlead.plan.migration import IP_ADDRESS_POOL

    group_version, _ = IP_ADDRESS_POOL
    async with Client(access) as client:
        services = await client.list(SERVICES)
        ours: Sequence[AddressPool] = ()
        theirs: Sequence[Mapping[str, Any]] = ()
        with suppress(NotFound):  # the kind is not installed: there is none
            ours = await client.list(ADDRESS_POOLS)
        with suppress(NotFound):
            theirs = msgspec.json.decode(await client.request("GET", f"/apis/{group_version}/ipaddresspools"))["items"]
    return Found(services, ours, theirs)
