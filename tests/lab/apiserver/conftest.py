"""An API server for each test: the embedded and the real one in turn, or only the embedded one;
Services and a small cluster to write to it, and kubectl."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.lab.apiserver.api import Api
from tests.lab.apiserver.kubectl import MISSING, Kubectl, Program, installed

from fairlead.kube.access import Access
from fairlead.kube.rules.allocation import Allocator
from fairlead.lab.apiserver import ApiServer, Registry, Store
from fairlead.lab.apiserver.kinds import (
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    SERVICES,
)

Object = dict[str, Any]
Make = Callable[..., Object]
CIDRS = ("10.96.0.0/16", "2001:db8:96::/112")


@pytest.fixture
def registry() -> Registry:
    """The verbs without HTTP, in a dual-stack cluster."""
    return Registry(Store(), Allocator(CIDRS))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """The embedded server."""
    async with ApiServer(service_cidrs=CIDRS, bookmark_interval_s=0.2) as started:
        yield started


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Api]:
    """The embedded server over HTTP, for its special functions: faults, its store, its request
    log."""
    async with Api(Access(server.url), "embedded") as api:
        yield api


@pytest.fixture(params=["embedded", "real"])
def real_access(request: pytest.FixtureRequest) -> Access | None:
    """The access to the real server, if it is its turn. This fixture is separate from `api`,
    because the server starts in its own event loop."""
    return request.getfixturevalue("real_apiserver").access if request.param == "real" else None


@pytest.fixture
async def api(real_access: Access | None) -> AsyncIterator[Api]:
    """Each server in turn, with a separate namespace for the test."""
    if real_access is not None:
        async with Api(real_access, "real") as api:
            yield api
        return
    async with (
        ApiServer(service_cidrs=CIDRS, bookmark_interval_s=0.2) as server,
        Api(Access(server.url), "embedded") as api,
    ):
        yield api


@pytest.fixture
def make_service() -> Callable[..., Object]:
    """Return a Service of type LoadBalancer with one port. Keyword arguments replace fields of its
    spec; None omits a field."""

    def make(name: str = "web", **spec: Any) -> Object:
        fields = {
            "type": "LoadBalancer",
            "selector": {"app": "web"},
            "ports": [{"name": "http", "port": 80}],
        } | spec
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
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
    """Run a test that takes `program` with every kubectl of the machine."""
    if "program" in metafunc.fixturenames:
        programs = installed() or [MISSING]
        metafunc.parametrize("program", programs, ids=[program.version for program in programs])


@pytest.fixture
def kubectl(program: Program, api: Api, tmp_path: Path) -> Kubectl:
    """A kubectl that uses the test's namespace."""
    return Kubectl(program, api, tmp_path)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return str(path)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
async def cluster(api: Api, make_service: Make) -> Api:
    """One object of each kind, as a small cluster has them. The Node has the name of the
    namespace."""
    node = api.namespace
    conditions = [
        {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "ready",
            "lastTransitionTime": now(),
        }
    ]
    info = {
        "kubeletVersion": "v1.32.0",
        "osImage": "Debian 12",
        "kernelVersion": "6.1.0",
        "containerRuntimeVersion": "none://1",
    }
    capacity = {"cpu": "2", "memory": "4Gi", "pods": "110"}
    status: Object = {
        "conditions": conditions,
        "nodeInfo": info,
        "capacity": capacity,
        "allocatable": capacity,
    }
    status["addresses"] = [{"type": "InternalIP", "address": "192.0.2.1"}]
    labels = {"node-role.kubernetes.io/worker": ""}
    spec = {"podCIDRs": ["192.0.2.128/26"], "podCIDR": "192.0.2.128/26"}
    await api.create(
        NODES, {"metadata": {"name": node, "labels": labels}, "spec": spec, "status": status}
    )
    containers = [{"name": "web", "image": "example.com/web:1", "ports": [{"containerPort": 8080}]}]
    pod = {
        "metadata": {"name": "web-1", "labels": {"app": "web"}},
        "spec": {"nodeName": node, "containers": containers},
    }
    await api.create(PODS, pod)
    running = {"name": "web", "ready": True, "restartCount": 2, "image": "x", "imageID": ""}
    status = {
        "phase": "Running",
        "podIP": "192.0.2.130",
        "podIPs": [{"ip": "192.0.2.130"}],
        "hostIP": "192.0.2.1",
        "hostIPs": [{"ip": "192.0.2.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [running | {"state": {"running": {"startedAt": now()}}}],
    }
    await api.patch(PODS, "web-1", {"status": status}, subresource="status")
    service = await api.create(SERVICES, make_service(externalTrafficPolicy="Local"))
    await _create_endpoints(api, node)
    about = {"kind": "Service", "namespace": api.namespace, "name": "web", "apiVersion": "v1"}
    event = {
        "metadata": {"generateName": "web."},
        "involvedObject": about | {"uid": service["metadata"]["uid"]},
        "type": "Normal",
        "reason": "EnsuredLoadBalancer",
        "message": "Ensured load balancer",
        "source": {"component": "fairlead"},
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 3,
    }
    await api.create(EVENTS, event)
    lease = {
        "metadata": {"name": node},
        "spec": {"holderIdentity": node, "renewTime": "2026-01-01T00:00:00.000000Z"},
    }
    await api.create(LEASES, lease, namespace="kube-node-lease")
    return api


async def _create_endpoints(api: Api, node: str) -> None:
    """Create endpoints of the Service `web`, as an EndpointSlice and as Endpoints, and an
    EndpointSlice without ready endpoints."""
    endpoint = {"addresses": ["192.0.2.130"], "conditions": {"ready": True}, "nodeName": node}
    slice_ = {
        "metadata": {"name": "web-abcde", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [endpoint],
        "ports": [{"name": "http", "port": 8080}],
    }
    await api.create(ENDPOINT_SLICES, slice_)
    ready = [{"ip": "192.0.2.130", "nodeName": node}, {"ip": "2001:db8::1"}]
    subset = {
        "addresses": ready,
        "notReadyAddresses": [{"ip": "192.0.2.131"}],
        "ports": [{"name": "http", "port": 8080}],
    }
    await api.create(ENDPOINTS, {"metadata": {"name": "web"}, "subsets": [subset]})
    await api.create(ENDPOINTS, {"metadata": {"name": "nobody"}})
