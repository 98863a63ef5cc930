"""Read from a cluster what `fairlead plan` needs: the objects that the roles watch, and the configuration that they run with.

In: an Access. Out: a `Manifests`, as if the objects had been read from files; the Config in the ConfigMap that the Helm chart
and the manifests make. Read-only: `list` of Services, EndpointSlices, Nodes, Namespaces, AddressPools and
AddressGrants, `get` of the ConfigMap.
"""

from collections.abc import Mapping

import msgspec

from fairlead.config import Config, parse
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.manifests import Manifests
from fairlead.kube.objects import ENDPOINT_SLICES, NAMESPACES, NODES, SERVICES, Fields, ObjectKey, ObjectMeta, Resource
from fairlead.kube.own import ADDRESS_GRANTS, ADDRESS_POOLS

CONFIGURATION = ObjectKey("fairlead-system", "fairlead")
CONFIGURATION_FILE = "fairlead.yaml"


class ConfigMap(Fields, frozen=True):
    metadata: ObjectMeta
    data: Mapping[str, str] = msgspec.field(default_factory=dict)


CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps", True, ConfigMap)


async def read_cluster(access: Access, config: Config | None) -> tuple[Config, Manifests]:
    """The configuration (`config`, if there is one already) and the objects. Raises Refused or Unavailable."""
    async with Client(access) as client:
        config = config if config is not None else await read_configuration(client)
        services = await client.list(SERVICES)
        slices = await client.list(ENDPOINT_SLICES)
        nodes = await client.list(NODES)
        namespaces = await client.list(NAMESPACES)
        try:
            pools, grants = await client.list(ADDRESS_POOLS), await client.list(ADDRESS_GRANTS)
        except NotFound:
            pools, grants = [], []  # deploy/crds is not applied
    return config, Manifests(
        services=tuple(services),
        endpoint_slices=tuple(slices),
        nodes=tuple(nodes),
        namespaces=tuple(namespaces),
        address_pools=tuple(pools),
        address_grants=tuple(grants),
    )


async def read_configuration(client: Client) -> Config:
    """What the roles of the cluster run with. Raises Refused if it is not where the chart puts it."""
    fix = "give --config with the roles' fairlead.yaml"
    try:
        found = await client.get(CONFIG_MAPS, CONFIGURATION)
    except NotFound as problem:
        raise Refused(f"the configuration is not in ConfigMap {CONFIGURATION}: {problem.message}", fix=fix) from None
    source = f"ConfigMap {CONFIGURATION}"
    if CONFIGURATION_FILE not in found.data:
        raise Refused(f"{source} has no {CONFIGURATION_FILE}", fix=fix)
    return parse(found.data[CONFIGURATION_FILE], source)
