"""Read from a cluster what `fairlead plan` and `fairlead migrate` need: objects, and the
configuration that the roles run with.

In: an Access. Out: a `Manifests`, as if the objects had been read from files; the Config in the
ConfigMap that the Helm chart and the manifests make. Read-only: `list` of the kinds, `get` of the
ConfigMap. Of our own kinds there is none where they are not installed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from fairlead.config import Config, parse
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.manifests import Manifests
from fairlead.kube.objects import (
    CONFIG_MAPS,
    CONFIGURATION,
    CONFIGURATION_FILE,
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    SERVICES,
    ObjectT,
    Resource,
)
from fairlead.plan.classes import CLASSES
from fairlead.plan.migration import IP_ADDRESS_POOL, Inventory

GIVE_ONE = "give --config with the roles' fairlead.yaml"


async def read_cluster(access: Access, config: Config | None) -> tuple[Config, Manifests]:
    """The configuration (`config`, if there is one already) and all that is planned from. Raises
    Refused or Unavailable."""
    async with Client(access) as client:
        config = config if config is not None else await read_configuration(client)
        manifests = Manifests(
            services=tuple(await client.list(SERVICES)),
            endpoint_slices=tuple(await client.list(ENDPOINT_SLICES)),
            nodes=tuple(await client.list(NODES)),
            namespaces=tuple(await client.list(NAMESPACES)),
            address_pools=await _list_own(client, ADDRESS_POOLS),
            address_grants=await _list_own(client, ADDRESS_GRANTS),
        )
    return config, manifests


async def read_inventory(access: Access, config: Config | None) -> tuple[Config | None, Inventory]:
    """What `fairlead migrate` looks at. No configuration if none is given and there is none in the
    cluster: Fairlead may not be installed yet. Raises Refused or Unavailable."""
    group_version, _ = IP_ADDRESS_POOL
    async with Client(access) as client:
        if config is None:
            with suppress(NotFound):
                config = await _configuration(client)
        theirs: Sequence[Mapping[str, Any]] = ()
        with suppress(NotFound):
            theirs = msgspec.json.decode(
                await client.request("GET", f"/apis/{group_version}/ipaddresspools")
            )["items"]
        return config, Inventory(
            tuple(await client.list(SERVICES)),
            await _list_own(client, ADDRESS_POOLS),
            tuple(theirs),
        )


async def _list_own(client: Client, resource: Resource[ObjectT]) -> tuple[ObjectT, ...]:
    """None, if deploy/crds is not applied."""
    try:
        return tuple(await client.list(resource))
    except NotFound:
        return ()


async def read_configuration(client: Client) -> Config:
    """What the roles of the cluster run with. Raises Refused if it is not where the chart puts
    it."""
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
