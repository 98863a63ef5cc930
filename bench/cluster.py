"""The cluster to measure against: a real API server that holds the objects of `fixture`.

In: a size and a folder. Out: a running server with these objects. The folder keeps etcd's data, so
a cluster is filled once (a few minutes at full size) and started from there afterwards.

Invariants: all objects are written through the API, by the field managers that write them in a
cluster, so they look as in a cluster, managedFields included. Fairlead's controller writes its own
part. A cluster that was not filled completely is created again. Only one process uses a folder.
"""

import asyncio
import fcntl
import shutil
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from bench.fixture import Size

from bench import fixture
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, Service
from fairlead.lab import crds, process
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.lab.settings import kubeconfig as kubeconfig_of

Progress = Callable[[str], None]

WRITERS = 24
CONTROLLER = "controller"
SERVED_WITHIN_S = 1800.0
POLL_S = 2.0
HEALTH_PORTS = "20000-49999"
"""Each Service with policy Local needs a healthCheckNodePort; the default range has 2,768 ports."""
FILLED = "filled"


@asynccontextmanager
async def cluster(folder: Path, size: Size, progress: Progress) -> AsyncIterator[KubeApiServer]:
    """Run a server with a cluster of this size, which `folder` keeps between runs. Raise Refused if
    another process uses the folder."""
    place, lab = folder / f"cluster-{size}", lab_of(folder)
    filled = place / FILLED
    with locked(folder):
        await process.kill_all(process.find(lab))  # left by a run that was killed
        if not filled.exists():
            shutil.rmtree(place, ignore_errors=True)
        async with KubeApiServer(place, lab=lab, node_ports=HEALTH_PORTS) as server:
            if not filled.exists():
                async with Client(server.access, timeout_s=60.0) as client:
                    await crds.install(client)
                    await fill(client, size, progress)
                await serve(server.access, place, lab, size, progress)
                filled.touch()
            yield server


def lab_of(folder: Path) -> str:
    """Return the lab name that marks the processes of this folder's clusters."""
    return f"bench-{zlib.crc32(str(folder.resolve()).encode()):08x}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of the folder. Raise Refused if another process holds it."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"another benchmark uses {folder}",
                fix="wait until it ends, or use another --folder",
            ) from None
        yield


async def fill(client: Client, size: Size, progress: Progress) -> None:
    """Create all objects of the cluster. The server must be empty."""
    progress(f"writing {size.nodes} Nodes, and {size.services} Services with their slices")
    names = (
        fixture.place_of(number * fixture.SERVICES_IN_A_NAMESPACE)[0]
        for number in range(size.namespaces)
    )
    await _in_parallel(
        client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
        for name in names
    )
    await _in_parallel(_write_node(client, number) for number in range(size.nodes))
    await _in_parallel(_write_service(client, number, size) for number in range(size.services))


async def _write_node(client: Client, number: int) -> None:
    body = fixture.node(number)
    path = NODES.path()
    await client.request("POST", path, parameters={"fieldManager": "kubelet"}, body=body)
    # The kubelet's first heartbeat, which gives its status an entry of its own in managedFields.
    heartbeat = {"status": {"phase": "Running"}}
    await client.patch(
        NODES,
        ("", body["metadata"]["name"]),
        heartbeat,
        subresource="status",
        field_manager="kubelet",
    )


async def _write_service(client: Client, number: int, size: Size) -> None:
    """Create the Service and its EndpointSlice."""
    namespace, _ = fixture.place_of(number)
    manager = {"fieldManager": "kubectl-client-side-apply"}
    answer = await client.request(
        "POST", SERVICES.path(namespace), parameters=manager, body=fixture.service(number)
    )
    uid = msgspec.json.decode(answer)["metadata"]["uid"]
    manager = {"fieldManager": "kube-controller-manager"}
    body = fixture.endpoint_slice(number, size, uid)
    await client.request("POST", ENDPOINT_SLICES.path(namespace), parameters=manager, body=body)


async def serve(access: Access, place: Path, lab: str, size: Size, progress: Progress) -> None:
    """Run a controller until it has published an address for every Service, and stop it."""
    settings = place / "fairlead.yaml"
    settings.write_text(
        f"pools: [{{name: main, addresses: [{fixture.VIP_POOL}]}}]\nweb: {{listen: ''}}\n"
    )
    kubeconfig = place / "kubeconfig"
    kubeconfig.write_text(kubeconfig_of("bench", access))
    argv = process.python(
        "fairlead", "controller", "--config", str(settings), "--kubeconfig", str(kubeconfig)
    )
    begun_s = time.monotonic()
    controller = process.spawn(lab, CONTROLLER, argv, log=place / "controller.log")
    try:
        async with asyncio.timeout(SERVED_WITHIN_S), Client(access, timeout_s=60.0) as client:
            while (served := sum(map(_is_served, await client.list(SERVICES)))) < size.services:
                if not controller.running:
                    raise Unavailable(
                        f"the controller exited when {served} Services were served; see "
                        f"{place / 'controller.log'}"
                    )
                await asyncio.sleep(POLL_S)
        progress(
            f"its controller served {size.services} new Services within "
            f"{time.monotonic() - begun_s:.0f} s"
        )
    finally:
        await controller.stop(10.0)


def _is_served(service: Service) -> bool:
    return bool(service.status.load_balancer.ingress and service.status.conditions)


async def _in_parallel(calls: Iterable[Awaitable[object]]) -> None:
    """Await all calls, WRITERS at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call

    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(work())
