"""docs/doctor.md shows what the command prints: each `$ kubectl fairlead doctor` in it is run, in a
cluster that its text describes."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

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
DEADLINE_S = 60
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


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig("doctor", Access(server.url)))
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
        yield cluster


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


async def output_of(cluster: Cluster, options: str) -> str:
    short = "--grace", "0", "--observe", "0.1"
    child = await asyncio.create_subprocess_exec(
        *("kubectl", "fairlead", "doctor", *short, *options.split()),
        stdout=asyncio.subprocess.PIPE,
        env={
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "HOME": str(cluster.path.parent),
            "KUBECONFIG": str(cluster.path),
            "COLUMNS": "120",
        },
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await child.communicate()
    return output.decode()


@pytest.mark.parametrize("options", ["shop/web", "-n blog", "ingress-controller"])
async def test_the_documentation_shows_what_the_command_prints(
    options: str, cluster: Cluster
) -> None:
    if options == "-n blog":
        for path in FORBIDDEN:
            cluster.server.faults.add(Fault("status", "GET", rf"{path}(\?|$)", code=403, count=0))
    assert BLOCKS[options] == await output_of(cluster, options)


def test_every_output_is_compared() -> None:
    assert BLOCKS.keys() == {"shop/web", "-n blog", "ingress-controller"}
