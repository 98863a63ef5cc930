"""The cluster to measure against: a real API server that holds the objects of `fixture`.

In: a size, a folder. Out: a running server, filled. The folder keeps etcd's data: a cluster is filled once (a few minutes
at full size) and started again from there.
Invariant: what is written is written through the API, by the field managers that write it in a cluster, so objects look
as they do there: managedFields and all. A cluster that was not filled to its end is begun anew.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from bench import fixture
from bench.fixture import Size

from fairlead.drivers import claim, publish
from fairlead.kube.client import Client
from fairlead.kube.objects import CLEANUP_FINALIZER, ENDPOINT_SLICES, NODES, SERVICES, ObjectKey
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.plan.balancer import CLASS_ANNOTATION, DIRECT

WRITERS = 24
HEALTH_PORTS = "20000-49999"
"""Each Service with policy Local needs a healthCheckNodePort; the default range has 2,768."""
FILLED = "filled"


@asynccontextmanager
async def cluster(folder: Path, size: Size, tell: Callable[[str], None]) -> AsyncIterator[KubeApiServer]:
    """A server with a cluster of this size, kept in `folder` from one time to the next."""
    place = folder / f"cluster-{size}"
    filled = place / FILLED
    if not filled.exists():
        shutil.rmtree(place, ignore_errors=True)
    async with KubeApiServer(place, lab=f"bench-{size}", node_ports=HEALTH_PORTS) as server:
        if not filled.exists():
            async with Client(server.access, timeout_s=60.0) as client:
                await fill(client, size, tell)
            filled.touch()
        yield server


async def fill(client: Client, size: Size, tell: Callable[[str], None]) -> None:
    """Write the whole cluster. The server must have none of it yet."""
    tell(f"writing {size.nodes} Nodes, and {size.services} Services with their slices")
    names = (fixture.place_of(number * fixture.SERVICES_IN_A_NAMESPACE)[0] for number in range(size.namespaces))
    await _in_parallel(client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}}) for name in names)
    await _in_parallel(_write_node(client, number) for number in range(size.nodes))
    await _in_parallel(_write_service(client, number, size) for number in range(size.services))


async def _write_node(client: Client, number: int) -> None:
    body = fixture.node(number)
    path = NODES.path()
    await client.request("POST", path, parameters={"fieldManager": "kubelet"}, body=body)
    # A kubelet's first heartbeat, which makes its status a part of managedFields of its own.
    heartbeat = {"status": {"phase": "Running"}}
    await client.patch(NODES, ("", body["metadata"]["name"]), heartbeat, subresource="status", field_manager="kubelet")


async def _write_service(client: Client, number: int, size: Size) -> None:
    """The Service, its slice, and what Fairlead's controller writes on it."""
    namespace, name = fixture.place_of(number)
    key = ObjectKey(namespace, name)
    manager = {"fieldManager": "kubectl-client-side-apply"}
    answer = await client.request("POST", SERVICES.path(namespace), parameters=manager, body=fixture.service(number))
    uid = msgspec.json.decode(answer)["metadata"]["uid"]
    manager = {"fieldManager": "kube-controller-manager"}
    body = fixture.endpoint_slice(number, size, uid)
    await client.request("POST", ENDPOINT_SLICES.path(namespace), parameters=manager, body=body)
    claimed = {"metadata": {"finalizers": [CLEANUP_FINALIZER], "annotations": {CLASS_ANNOTATION: DIRECT}}}
    await client.apply(SERVICES, key, claimed, field_manager=claim.FIELD_MANAGER, subresource="status")
    shown = {"status": {"loadBalancer": {"ingress": [{"ip": fixture.vip(number), "ipMode": "VIP"}]}}}
    await client.apply(SERVICES, key, shown, field_manager=publish.FIELD_MANAGER, subresource="status")


async def _in_parallel(calls: Iterable[Awaitable[object]]) -> None:
    """All of them, WRITERS at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call

    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(work())
