"""The objects and the configuration that `fairlead plan`, `fairlead migrate` and `fairlead
announce` read from a cluster.

In: an Access. Out: a `Manifests`, as if the objects had been read from files, and the Config in the
ConfigMap that the Helm chart and the manifests create. Read-only: it lists resources and gets the
ConfigMap. If the CRDs of Fairlead are not installed, their lists are empty."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import click
import msgspec

from fairlead.config import Config, parse
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS, AddressPool
from fairlead.kube.instances import Instance, observe
from fairlead.kube.manifests import Manifests
from fairlead.kube.objects import (
    CONFIG_MAPS,
    CONFIGURATION,
    CONFIGURATION_FILE,
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    SERVICES,
    Node,
    ObjectT,
    Resource,
)
from fairlead.plan.classes import CLASSES
from fairlead.plan.metallb import CONFIG_MAP, GROUP, RESOURCES, concerns_pools
from fairlead.plan.migrated_pools import Inventory

GIVE_ONE = "give --config with the roles' fairlead.yaml"


class Routing(NamedTuple):
    """What routes to the gateways of a cluster depend on."""

    config: Config
    address_pools: tuple[AddressPool, ...]
    nodes: tuple[Node, ...]
    gateways: tuple[Instance, ...]


async def read_cluster(access: Access, config: Config | None) -> tuple[Config, Manifests]:
    """Return the configuration (`config`, unless it is None) and all objects that the plan reads.
    Raise Refused or Unavailable."""
    async with Client(access) as client:
        config = config if config is not None else await read_configuration(client)
        return config, await _list_objects(client)


async def read_inventory(access: Access, config: Config | None) -> tuple[Config | None, Inventory]:
    """Return the objects that `fairlead migrate` examines, and the configuration. It is None if
    none is given and the cluster has none, because Fairlead need not be installed yet. Raise
    Refused or Unavailable."""
    async with Client(access) as client:
        if config is None:
            with suppress(NotFound):
                config = await _configuration(client)
        return config, Inventory(
            await _list_objects(client), tuple(await _read_objects_of_metallb(client))
        )


async def read_routing(access: Access, config: Config | None, *, gateways: bool) -> Routing:
    """Return the pools and, if `gateways` are wanted, the Nodes and the gateways that have a Lease.
    Raise Refused or Unavailable."""
    async with Client(access) as client:
        config = config if config is not None else await read_configuration(client)
        pools = await _list_own(client, ADDRESS_POOLS)
        if not gateways:
            return Routing(config, pools, (), ())
        nodes = tuple(await client.list(NODES))
        click.echo("waiting until each process has renewed its Lease ...", err=True)
        instances = await observe(client, config.presence.namespace)
        return Routing(
            config, pools, nodes, tuple(each for each in instances if each.role == "gateway")
        )


async def _list_objects(client: Client) -> Manifests:
    return Manifests(
        services=tuple(await client.list(SERVICES)),
        endpoint_slices=tuple(await client.list(ENDPOINT_SLICES)),
        nodes=tuple(await client.list(NODES)),
        namespaces=tuple(await client.list(NAMESPACES)),
        address_pools=await _list_own(client, ADDRESS_POOLS),
        address_grants=await _list_own(client, ADDRESS_GRANTS),
    )


async def _read_objects_of_metallb(client: Client) -> list[Mapping[str, Any]]:
    """Return all objects of MetalLB that the cluster has, as decoded JSON."""
    found: list[Mapping[str, Any]] = []
    for version, plural, kind in RESOURCES:
        with suppress(NotFound):
            answer = await client.request("GET", f"/apis/{GROUP}{version}/{plural}")
            # The items of a list have no kind.
            found += [{**each, "kind": kind} for each in msgspec.json.decode(answer)["items"]]
    with suppress(NotFound):
        config_map = await client.get(CONFIG_MAPS, CONFIG_MAP)
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": CONFIG_MAP.name, "namespace": CONFIG_MAP.namespace},
            "data": config_map.data,
        }
        found += [body] * concerns_pools(body)
    return found


async def _list_own(client: Client, resource: Resource[ObjectT]) -> tuple[ObjectT, ...]:
    """Return the objects of a CRD of Fairlead; none if the CRD is not installed."""
    try:
        return tuple(await client.list(resource))
    except NotFound:
        return ()


async def read_configuration(client: Client) -> Config:
    """Return the configuration of the roles in the cluster. Raise Refused if it is not in the
    ConfigMap of the chart."""
    try:
        return await _configuration(client)
    except NotFound as problem:
        raise Refused(
            f"the configuration is not in ConfigMap {CONFIGURATION}: {problem.message}",
            fix=GIVE_ONE,
        ) from None


async def _configuration(client: Client) -> Config:
    found = await client.get(CONFIG_MAPS, CONFIGURATION)
    source = f"ConfigMap {CONFIGURATION}"
    if CONFIGURATION_FILE not in found.data:
        raise Refused(f"{source} has no {CONFIGURATION_FILE}", fix=GIVE_ONE)
    return parse(found.data[CONFIGURATION_FILE], source, CLASSES)
