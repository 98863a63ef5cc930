"""One address for two Services with policy Local and different selectors. Each port reaches only
the pods of its own Service, on their nodes, and these pods see the client's address."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.changes import pod
from tests.e2e.kubectl import Kubectl, addresses_of
from tests.e2e.oracle import Answer, Observed, Source, Target
from tests.e2e.packets import call, read_cluster, sources_of

from fairlead.kube.client import Client
from fairlead.lab import manifests
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60.0
ANSWER_S = 1.0
CALLS = 6
SHARED = {"fairlead.io/sharing-key": "front"}


def port(number: int) -> dict[str, object]:
    return {"name": f"p{number}", "port": number, "targetPort": "web"}


@pytest_asyncio.fixture(loop_scope="module")
async def kubectl(site: Site, client: Client) -> AsyncIterator[Kubectl]:
    await manifests.apply(
        client, [pod("r1", "red", "node1"), pod("r2", "red", "node2"), pod("b1", "blue", "node2")]
    )
    await site.await_pods()
    made = Kubectl(site.directory.kubeconfig, site.name)
    yield made
    await made("delete", "service", "red", "blue", "--ignore-not-found", "--timeout=10s")


async def shown(kubectl: Kubectl, name: str) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while not (found := addresses_of(await kubectl.service(name))):
            await asyncio.sleep(0.05)
    return found[0]


async def answered(site: Site, source: Source, target: Target) -> set[Observed]:
    return {await call(site, source, target, timeout_s=ANSWER_S) for _ in range(CALLS)}


async def until_answered(site: Site, source: Source, target: Target, *pods: str) -> None:
    """Wait until exactly these pods answer, each with the client's own address."""
    wanted = {Answer(f"default/{name}", source.addresses[0]) for name in pods}
    found: set[Observed] = set()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (found := await answered(site, source, target)) != wanted:
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{target}: expected {wanted}, observed {found}")


async def test_each_port_reaches_its_own_service(
    site: Site, client: Client, kubectl: Kubectl
) -> None:
    source = next(
        one for one in sources_of(site, await read_cluster(client)) if one.name == "client1"
    )
    await kubectl.apply("red", annotations=SHARED, selector={"app": "red"}, ports=[port(80)])
    address = await shown(kubectl, "red")
    await kubectl.apply("blue", annotations=SHARED, selector={"app": "blue"}, ports=[port(8000)])
    assert await shown(kubectl, "blue") == address
    await until_answered(site, source, Target(address, 80, "TCP"), "r1", "r2")
    await until_answered(site, source, Target(address, 8000, "TCP"), "b1")

    # A port of the other Service is refused, and the other ports stay.
    await kubectl.apply(
        "blue", annotations=SHARED, selector={"app": "blue"}, ports=[port(8000), port(80)]
    )
    async with asyncio.timeout(DEADLINE_S):
        while (
            "TCP/80" not in (text := await kubectl("describe", "service", "blue"))
            or "default/red" not in text
        ):
            await asyncio.sleep(0.1)
    await until_answered(site, source, Target(address, 80, "TCP"), "r1", "r2")
    await until_answered(site, source, Target(address, 8000, "TCP"), "b1")

    # The Service gets the port as soon as the other Service is deleted.
    await kubectl("delete", "service", "red", "--timeout=10s")
    await until_answered(site, source, Target(address, 80, "TCP"), "b1")
    assert await shown(kubectl, "blue") == address
