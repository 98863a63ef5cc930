"""An API server for each test, by HTTP and without, Services and a small cluster to write to it, and kubectl."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.lab.apiserver.kubectl import MISSING, Kubectl, Program, installed

from fairlead.lab.apiserver import ApiServer, Registry, Store, Write
from fairlead.lab.apiserver.allocation import Allocator
from fairlead.lab.apiserver.kinds import ENDPOINT_SLICES, ENDPOINTS, EVENTS, LEASES, NODES, PODS, SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")
CIDRS = ("10.96.0.0/16", "2001:db8:96::/112")


class Client:
    """Sends requests to one server and gives back the status code and the decoded body."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def call(self, method: str, path: str, body: object = None, media_type: str = "application/json") -> tuple[int, Any]:
        headers = {"Content-Type": media_type, "User-Agent": "test/1"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture
def registry() -> Registry:
    """The verbs without HTTP, in a dual-stack cluster."""
    return Registry(Store(), Allocator(CIDRS))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(service_cidrs=CIDRS, bookmark_interval_s=0.2) as started:
        yield started


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield Client(session, server.url)


@pytest.fixture
def make_service() -> Callable[..., Object]:
    """A Service of type LoadBalancer with one port; keyword arguments replace fields of its spec, None leaves one out."""

    def make(name: str = "web", **spec: Any) -> Object:
        fields = {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"name": "http", "port": 80}]} | spec
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {field: value for field, value in fields.items() if value is not None},
        }

    return make


SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: web
  labels: {app: web}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: https, port: 443, targetPort: 8443}
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `program` runs with every kubectl of the machine."""
    if "program" in metafunc.fixturenames:
        programs = installed() or [MISSING]
        metafunc.parametrize("program", programs, ids=[program.version for program in programs])


@pytest.fixture
def kubectl(program: Program, server: ApiServer, tmp_path: Path) -> Kubectl:
    return Kubectl(program, server.url, tmp_path)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return str(path)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def cluster(server: ApiServer, make_service: Make) -> ApiServer:
    """One object of each kind, as a small cluster has them."""
    registry = server.registry
    conditions = [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready", "lastTransitionTime": now()}
    ]
    info = {
        "kubeletVersion": "v1.32.0",
        "osImage": "Debian 12",
        "kernelVersion": "6.1.0",
        "containerRuntimeVersion": "none://1",
    }
    node = {
        "metadata": {"name": "n1", "labels": {"node-role.kubernetes.io/worker": ""}},
        "spec": {"podCIDRs": ["192.0.2.128/26"], "podCIDR": "192.0.2.128/26"},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
            "conditions": conditions,
            "nodeInfo": info,
            "capacity": {"cpu": "2", "memory": "4Gi", "pods": "110"},
            "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "110"},
        },
    }
    registry.create(NODES, "", node, WRITE)
    containers = [{"name": "web", "image": "example.com/web:1", "ports": [{"containerPort": 8080}]}]
    pod = {"metadata": {"name": "web-1", "labels": {"app": "web"}}, "spec": {"nodeName": "n1", "containers": containers}}
    registry.create(PODS, "default", pod, WRITE)
    state = {
        "name": "web",
        "ready": True,
        "restartCount": 2,
        "image": "x",
        "imageID": "",
        "state": {"running": {"startedAt": now()}},
    }
    status = {
        "phase": "Running",
        "podIP": "192.0.2.130",
        "podIPs": [{"ip": "192.0.2.130"}],
        "hostIP": "192.0.2.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [state],
    }
    registry.patch(PODS, "default", "web-1", "application/merge-patch+json", {"status": status}, Write("kubelet", "status"))
    service = registry.create(SERVICES, "default", make_service(externalTrafficPolicy="Local"), WRITE).object
    endpoint = {"addresses": ["192.0.2.130"], "conditions": {"ready": True}, "nodeName": "n1"}
    slice_ = {
        "metadata": {"name": "web-abcde", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [endpoint],
        "ports": [{"name": "http", "port": 8080}],
    }
    registry.create(ENDPOINT_SLICES, "default", slice_, WRITE)
    ready = [{"ip": "192.0.2.130", "nodeName": "n1"}, {"ip": "2001:db8::1"}]
    subset = {"addresses": ready, "notReadyAddresses": [{"ip": "192.0.2.131"}], "ports": [{"name": "http", "port": 8080}]}
    registry.create(ENDPOINTS, "default", {"metadata": {"name": "web"}, "subsets": [subset]}, WRITE)
    registry.create(ENDPOINTS, "default", {"metadata": {"name": "nobody"}}, WRITE)
    event = {
        "metadata": {"generateName": "web."},
        "involvedObject": {
            "kind": "Service",
            "namespace": "default",
            "name": "web",
            "uid": service["metadata"]["uid"],
            "apiVersion": "v1",
        },
        "type": "Normal",
        "reason": "EnsuredLoadBalancer",
        "message": "Ensured load balancer",
        "source": {"component": "fairlead"},
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 3,
    }
    registry.create(EVENTS, "default", event, WRITE)
    lease = {"metadata": {"name": "n1"}, "spec": {"holderIdentity": "n1", "renewTime": "2026-01-01T00:00:00.000000Z"}}
    registry.create(LEASES, "kube-node-lease", lease, WRITE)
    return server
