"""A cluster of the embedded API server whose controller serves class ovn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from tests.drivers.ovn.traffic import Answer, call
from tests.roles.cluster import Cluster, until

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.ovn.site import OvnSite
from fairlead.sections import OvnConfig

OVN = "fairlead.io/ovn"


@asynccontextmanager
async def serving(
    site: OvnSite, folder: Path, section: OvnConfig, *nodes: str
) -> AsyncIterator[Cluster]:
    """Run a cluster with these nodes and a controller during the block. `section`: the mark of the
    cluster and the databases are replaced."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        made = Cluster(Access(server.url), client, folder)
        made.ovn = msgspec.structs.replace(
            section,
            northbound=(site.central.remote("nb"),),
            southbound=(site.central.remote("sb"),),
            cluster_id=made.namespace,
        )
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": made.namespace}}
        )
        for number, node in enumerate(nodes, 1):
            await made.add_node(node, number)
        await made.start_controller()
        yield made
        await made.stop()
        for row in await site.central.rows("Load_Balancer"):
            await site.central.control("nb", "lb-del", row["_uuid"])


async def first_answer(inside: str, address: str) -> Answer:
    """Return the first answer. On a busy machine, a chassis may need longer than the driver waits
    for it."""

    async def answered() -> Answer | None:
        with suppress(OSError):
            return await call(inside, address)
        return None

    found = await until(answered, f"an answer of {address}")
    assert isinstance(found, Answer)
    return found
