"""docs/doctor.md shows what the command prints: each `$ kubectl fairlead doctor` in it is run, in a
cluster that its text describes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.inprocess import DEADLINE_S, SHORT, Background, run_doctor

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import CLEANUP_FINALIZER, NODES, PODS, SERVICES
from fairlead.lab import manifests
from fairlead.lab import objects as lab_objects
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.settings import kubeconfig
from fairlead.lab.slices import plan_slices

DOCUMENT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
BLOCKS = dict(
    re.findall(r"^```\n\$ kubectl fairlead doctor (.*)\n((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE)
)
OCTAVIA = "loadbalancer.openstack.org/load-balancer-id"
METALLB = "metallb.io/ip-allocated-from-pool"
FORBIDDEN = ("/api/v1/services", "/api/v1/nodes", "addresspools", "addressgrants", "leases")
Manifest = dict[str, Any]


class Cluster:
    def __init__(self, server: ApiServer, client: Client, path: Path) -> None:
        self.server = server
        self.client = client
        self.path = path

    async def pod(self, namespace: str, name: str, on: str, app: str, port: str) -> None:
        metadata = {"name": name, "namespace": namespace, "labels": {"app": app}}
        ports = [{"name": port, "containerPort": 8080}]
        spec = {"nodeName": on, "containers": [{"name": "c", "image": "c", "ports": ports}]}
        await self.client.create(PODS, {"metadata": metadata, "spec": spec})
        address = f"10.244.1.{sum(map(ord, name)) % 200}"
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.client.patch(PODS, (namespace, name), {"status": status}, subresource="status")

    async def service(
        self, namespace: str, name: str, address: str, manager: str, meta: Manifest, **spec: Any
    ) -> None:
        fields = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"} | spec
        metadata = {"name": name, "namespace": namespace} | meta
        await self.client.create(SERVICES, {"metadata": metadata, "spec": fields})
        status = {"loadBalancer": {"ingress": [{"ip": address, "ipMode": "VIP"}]}}
        await self.client.patch(
            SERVICES,
            (namespace, name),
            {"status": status},
            subresource="status",
            field_manager=manager,
        )

    async def slices(self) -> None:
        pods = await self.client.list(lab_objects.PODS)
        for service in await self.client.list(SERVICES):
            own = [each for each in pods if each.metadata.namespace == service.key.namespace]
            for slice_ in plan_slices(service, own).values():
                await self.client.create(lab_objects.SLICES, slice_)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Background() as background:
        stack = AsyncExitStack()
        cluster = background.run(build(stack, tmp_path / "kubeconfig"))
        cluster.path.write_text(kubeconfig("doctor", Access(cluster.server.url)))
        yield cluster
        background.run(stack.aclose())


async def build(stack: AsyncExitStack, path: Path) -> Cluster:
    """Start an API server with the Services of the document, until the stack is closed."""
    server = await stack.enter_async_context(ApiServer())
    client = await stack.enter_async_context(Client(Access(server.url)))
    for name in ("shop", "blog"):
        await manifests.apply(
            client, [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}]
        )
    for number in (1, 2, 3):
        cidr = f"10.244.{number}.0/24"
        metadata = {"name": f"worker-{number}"}
        await client.create(NODES, {"metadata": metadata, "spec": {"podCIDRs": [cidr]}})
    cluster = Cluster(server, client, path)
    await cluster.pod("shop", "web-1", "worker-1", "web", "web")
    port = {"port": 80, "targetPort": "web"}
    await cluster.service(
        *("shop", "web", "203.0.113.7", "controller", {"annotations": {METALLB: "lan"}}),
        selector={"app": "wep"},
        ports=[port],
    )
    await cluster.pod("blog", "blog-1", "worker-1", "blog", "web")
    await cluster.service(
        *("blog", "blog", "203.0.113.8", "controller", {"annotations": {METALLB: "lan"}}),
        selector={"app": "blog"},
        ports=[port],
    )
    await seed(cluster)
    await cluster.slices()
    return cluster


async def seed(cluster: Cluster) -> None:
    """Make the Service of MetaKube's documentation, with the problems that its checklist has."""
    app = "ingress-controller"
    for number, name in enumerate(("worker-1", "worker-1", "worker-1", "worker-2"), 1):
        await cluster.pod("default", f"{app}-{number}", name, app, "web")
    meta = {"annotations": {OCTAVIA: "6c1d"}, "finalizers": [CLEANUP_FINALIZER]}
    await cluster.service(
        *("default", app, "203.0.113.20", "openstack-cloud-controller-manager", meta),
        selector={"app": app},
        ports=[{"port": 80, "targetPort": "http"}],
        loadBalancerSourceRanges=["198.51.100.0/24"],
    )


def environment(cluster: Cluster) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HOME": str(cluster.path.parent),
        "KUBECONFIG": str(cluster.path),
        "COLUMNS": "120",
    }


@pytest.mark.parametrize("options", ["-n blog", "ingress-controller"])
def test_the_documentation_shows_what_the_command_prints(options: str, cluster: Cluster) -> None:
    if options == "-n blog":
        for path in FORBIDDEN:
            cluster.server.faults.add(Fault("status", "GET", rf"{path}(\?|$)", code=403, count=0))
    _, output, _ = run_doctor(*options.split(), environment=environment(cluster))
    assert BLOCKS[options] == output


def test_the_documentation_shows_what_the_plugin_of_kubectl_prints(cluster: Cluster) -> None:
    words = "kubectl", "fairlead", "doctor", *SHORT, "shop/web"
    answer = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(cluster),
        timeout=DEADLINE_S,
        check=False,
    )
    assert BLOCKS["shop/web"] == answer.stdout


def test_every_output_is_compared() -> None:
    assert BLOCKS.keys() == {"shop/web", "-n blog", "ingress-controller"}
