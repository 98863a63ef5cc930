"""The commands of docs/install.md uninstall Fairlead: nothing hangs and nothing is left, with or
without a controller.

The controller runs in this process, with a real API server; the cluster has no other controller.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.deploy.documented import Reader, commands_of
from tests.roles.cluster import FINALIZER, Cluster, until

from fairlead.kube.client import Client
from fairlead.kube.crds import POOL_FINALIZER
from fairlead.lab import crds
from fairlead.lab.kubeapiserver import KubeApiServer

FIND, RELEASE, REMOVE_KINDS, BY_HAND = commands_of("Uninstall")
POOL = {
    "apiVersion": "fairlead.io/v1alpha1",
    "kind": "AddressPool",
    "metadata": {"name": "spare"},
    "spec": {"addresses": ["203.0.113.40-203.0.113.45"], "autoAssign": False},
}
FROM_POOL = {"fairlead.io/address-pool": "spare"}
TO_CLUSTER_IP = '{"spec":{"type":"ClusterIP"}}'


@pytest.fixture
async def cluster(server: KubeApiServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A controller, a pool in use, and three Services: one without a class, one of a Fairlead
    class, and one that keeps its address."""
    async with Client(server.access) as client:
        await crds.install(client)
        cluster = Cluster(server.access, client, tmp_path)
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": cluster.namespace}}
        )
        await cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(POOL))
        await cluster.start_controller()
        await cluster.apply("plain")
        await cluster.apply(
            "classed", loadBalancerClass="fairlead.io/direct", annotations=FROM_POOL
        )
        await cluster.apply("kept", annotations=FROM_POOL | {"fairlead.io/keep-address": "true"})
        for name in ("plain", "classed", "kept"):
            await cluster.addresses(name)

        async def is_held() -> bool:
            return POOL_FINALIZER in await cluster.kubectl(
                "get", "addresspool", "spare", "-o", "json"
            )

        await until(is_held, "the pool in use is held")
        yield cluster
        await cluster.stop()


@pytest.fixture
def reader(server: KubeApiServer, tmp_path: Path) -> Reader:
    return Reader(tmp_path, server.access)


async def kinds(cluster: Cluster) -> str:
    return await cluster.kubectl("get", "customresourcedefinitions", "-o", "name")


async def test_uninstalling_in_the_documented_order_leaves_nothing(
    cluster: Cluster, reader: Reader
) -> None:
    names = sorted((await reader.run(FIND)).split())
    assert names == [f"{cluster.namespace}/{name}" for name in ("classed", "kept", "plain")]
    await cluster.kubectl("delete", "service", "kept", "--timeout=60s")
    await cluster.kubectl("patch", "service", "classed", "-p", TO_CLUSTER_IP)
    await cluster.stop_controller()
    cluster.default_class = None
    await cluster.start_controller()
    await cluster.released("plain")
    await cluster.released("classed")
    assert await reader.run(FIND) == ""
    output = await reader.run(RELEASE)
    assert 'addressgrant.fairlead.io "203.0.113.4' in output, "the kept address"
    assert 'addresspool.fairlead.io "spare" deleted' in output
    await cluster.stop_controller()
    await reader.run(REMOVE_KINDS)
    assert "fairlead.io" not in await kinds(cluster)


async def test_uninstalling_after_the_controller_is_gone_leaves_nothing(
    cluster: Cluster, reader: Reader
) -> None:
    await cluster.stop_controller()
    await cluster.kubectl("delete", "addresspool", "spare", "--wait=false")
    await cluster.kubectl("delete", "service", "classed", "--wait=false")
    assert "spare" in await cluster.kubectl("get", "addresspools", "-o", "name"), (
        "its finalizer prevents its deletion"
    )
    await reader.run(BY_HAND)
    assert await cluster.kubectl("get", "addresspools", "-o", "name") == ""
    assert "classed" not in await cluster.kubectl("get", "services", "-o", "name")
    assert FINALIZER not in await cluster.kubectl("get", "services", "-o", "json")
    await reader.run(REMOVE_KINDS)

    async def are_gone() -> bool:
        return "fairlead.io" not in await kinds(cluster)

    await until(are_gone, "the removal of the CRDs")
