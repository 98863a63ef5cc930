"""A cluster in which some CRDs of Fairlead are missing: the controller does the rest of its work
and reports what it cannot do."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.roles.cluster import Cluster

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.manifests import read_documents
from fairlead.lab import crds, manifests
from fairlead.lab.apiserver import ApiServer


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster without the CRDs of Fairlead and without a controller."""
    async with (
        ApiServer(service_cidrs=("10.96.0.0/16",)) as server,
        Client(access := Access(server.url)) as client,
    ):
        cluster = Cluster(access, client, tmp_path)
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": cluster.namespace}}
        )
        yield cluster
        await cluster.stop()


async def install(cluster: Cluster, plural: str) -> None:
    definitions = [
        document.object for document in read_documents([crds.folder() / f"{plural}.yaml"])
    ]
    await manifests.apply(cluster.client, definitions)


async def test_without_the_addresspool_crd_the_pools_of_the_configuration_work(
    cluster: Cluster,
) -> None:
    await install(cluster, "addressgrants")
    with capture_logs() as logs:
        await cluster.start_controller()
        await cluster.apply("web")
        assert await cluster.addresses("web") == ["203.0.113.20"]
    logged = [each["event"] for each in logs if "does not serve" in each["event"]]
    assert logged == [
        "the API server does not serve AddressPool: until it does, addresses are assigned only "
        "from the pools of the configuration"
    ]


async def test_without_the_addressgrant_crd_no_address_is_assigned(cluster: Cluster) -> None:
    await install(cluster, "addresspools")
    with capture_logs() as logs:
        await cluster.start_controller()
        await cluster.apply("web")
        await cluster.described(
            "web",
            "CRD AddressGrant, the lock on addresses, is not installed",
            "kubectl apply --server-side -f deploy/crds",
        )
    assert [each["event"] for each in logs if "does not serve A" in each["event"]] == [
        "the API server does not serve AddressGrant: no address is assigned until it does"
    ]
    await install(cluster, "addressgrants")
    assert await cluster.addresses("web") == ["203.0.113.20"]


async def test_a_reinstalled_addressgrant_crd_works_again(
    cluster: Cluster,
) -> None:
    await install(cluster, "addresspools")
    await install(cluster, "addressgrants")
    await cluster.start_controller()
    await cluster.apply("first")
    assert await cluster.addresses("first") == ["203.0.113.20"]
    await cluster.kubectl("delete", "crd", "addressgrants.fairlead.io")
    await cluster.apply("second")
    await cluster.described("second", "CRD AddressGrant, the lock on addresses, is not installed")
    await install(cluster, "addressgrants")
    assert await cluster.addresses("second") == ["203.0.113.21"]
    assert await cluster.addresses("first") == ["203.0.113.20"]
