"""The real kubectl against the server: each command that users and the documentation need, and what it prints."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairlead.lab.apiserver import ApiServer, Write
from fairlead.lab.apiserver.kinds import ENDPOINT_SLICES, EVENTS, LEASES, NODES, PODS, SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")
DEADLINE_S = 30

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


class Ran(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        return [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines() if line.strip()]


class Kubectl:
    """Runs kubectl against one server, with a home and a cache of its own."""

    def __init__(self, url: str, home: Path) -> None:
        self.home = home
        self._command = ["kubectl", f"--server={url}", f"--cache-dir={home}/cache"]
        self._environment = os.environ | {"HOME": str(home), "KUBECONFIG": os.devnull}

    @asynccontextmanager
    async def start(self, *arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            env=self._environment | environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def run(self, *arguments: str, stdin: str = "", **environment: str) -> Ran:
        async with self.start(*arguments, **environment) as process, asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())

    async def __call__(self, *arguments: str, stdin: str = "", **environment: str) -> Ran:
        """Run a command that must succeed, without a word on the error stream."""
        ran = await self.run(*arguments, stdin=stdin, **environment)
        assert (ran.code, ran.err) == (0, ""), f"kubectl {' '.join(arguments)}: {ran.err}{ran.out}"
        return ran


@pytest.fixture
def kubectl(server: ApiServer, tmp_path: Path) -> Kubectl:
    assert shutil.which("kubectl"), "kubectl is needed: apt-get install kubernetes-client, or from dl.k8s.io"
    return Kubectl(server.url, tmp_path)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return str(path)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def publish(server: ApiServer, address: str = "192.0.2.10") -> None:
    patch = {"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}
    server.registry.patch(SERVICES, "default", "web", "application/merge-patch+json", patch, Write("ctl", "status"))


async def test_apply_on_the_clients_side(kubectl: Kubectl, manifest: str) -> None:
    assert (await kubectl("apply", "-f", manifest)).out == "service/web created\n"
    assert (await kubectl("apply", "-f", manifest)).out == "service/web unchanged\n"
    changed = SERVICE.replace("Local", "Cluster").replace("  - {name: https, port: 443, targetPort: 8443}\n", "")
    assert (await kubectl("apply", "-f", "-", stdin=changed)).out == "service/web configured\n"
    service = json.loads((await kubectl("get", "svc", "web", "-o", "json")).out)
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    assert service["spec"]["externalTrafficPolicy"] == "Cluster"
    assert "healthCheckNodePort" not in service["spec"]
    difference = await kubectl.run("diff", "-f", manifest)
    assert difference.code == 1
    assert "+  externalTrafficPolicy: Local" in difference.out


async def test_apply_on_the_servers_side(kubectl: Kubectl, server: ApiServer, manifest: str) -> None:
    assert (await kubectl("apply", "--server-side", "-f", manifest)).out == "service/web serverside-applied\n"
    version = server.store.version
    await kubectl("apply", "--server-side", "-f", manifest)
    assert server.store.version == version
    other = SERVICE.replace("type: LoadBalancer", "type: NodePort")
    refused = await kubectl.run("apply", "--server-side", "--field-manager=other", "-f", "-", stdin=other)
    assert refused.code == 1
    assert 'Apply failed with 1 conflict: conflict with "kubectl": .spec.type' in refused.err
    taken = await kubectl("apply", "--server-side", "--field-manager=other", "--force-conflicts", "-f", "-", stdin=other)
    assert taken.out == "service/web serverside-applied\n"
    shown = await kubectl("get", "svc", "web", "-o", "yaml", "--show-managed-fields")
    assert "manager: other" in shown.out
    assert 'k:{"port":80,"protocol":"TCP"}:' in shown.out


async def test_from_client_side_to_server_side(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("apply", "-f", manifest)
    assert (await kubectl("apply", "--server-side", "-f", manifest)).out == "service/web serverside-applied\n"


async def test_get_services(kubectl: Kubectl, server: ApiServer, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    pending = await kubectl("get", "svc")
    assert pending.rows[0] == ["NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "AGE"]
    assert pending.rows[1][:5] == ["web", "LoadBalancer", "10.96.0.2", "<pending>", "80:30000/TCP,443:30001/TCP"]
    assert re.fullmatch(r"\d+s", pending.rows[1][5])
    publish(server)
    wide = await kubectl("get", "services", "-o", "wide")
    assert wide.rows[0][-1] == "SELECTOR"
    assert (wide.rows[1][3], wide.rows[1][-1]) == ("192.0.2.10", "app=web")
    assert (await kubectl("get", "svc", "-o", "name")).out == "service/web\n"
    service = json.loads((await kubectl("get", "svc/web", "-o", "json")).out)
    assert service["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.10", "ipMode": "VIP"}]
    assert "externalTrafficPolicy: Local" in (await kubectl("get", "svc", "web", "-o", "yaml")).out
    assert (await kubectl("get", "svc", "web", "-o", "jsonpath={.spec.healthCheckNodePort}")).out == "30002"
    assert "service/web" in (await kubectl("get", "all", "-A")).out
    assert (await kubectl("get", "svc", "-l", "app=web", "--no-headers")).out.startswith("web ")
    chunked = await kubectl("get", "svc", "--chunk-size=1", "-A")
    assert len(chunked.rows) == 2


async def test_nothing_there(kubectl: Kubectl) -> None:
    ran = await kubectl.run("get", "svc")
    assert (ran.code, ran.err) == (0, "No resources found in default namespace.\n")
    ran = await kubectl.run("get", "svc", "none")
    assert (ran.code, ran.err) == (1, 'Error from server (NotFound): services "none" not found\n')
    ran = await kubectl.run("create", "-n", "nowhere", "-f", "-", stdin=SERVICE)
    assert ran.code == 1
    assert 'namespaces "nowhere" not found' in ran.err


async def test_get_and_watch(kubectl: Kubectl, server: ApiServer, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    async with kubectl.start("get", "svc", "-w") as process, asyncio.timeout(DEADLINE_S):
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"NAME")
        assert b"<pending>" in await process.stdout.readline()
        publish(server)
        assert b"192.0.2.10" in await process.stdout.readline()


async def test_what_is_invalid_is_told_in_full(kubectl: Kubectl) -> None:
    wrong = SERVICE.replace("name: web", "name: x").replace("type: LoadBalancer", "type: ClusterIP")
    for arguments in (("create", "-f", "-"), ("apply", "-f", "-"), ("apply", "--server-side", "-f", "-")):
        refused = await kubectl.run(*arguments, stdin=wrong)
        assert refused.code == 1
        assert refused.err == (
            'The Service "x" is invalid: spec.externalTrafficPolicy: Invalid value: "Local": '
            "may only be set for externally-accessible services\n"
        )
    refused = await kubectl.run("create", "-f", "-", stdin=SERVICE.replace("externalTrafficPolicy", "externalTraficPolicy"))
    assert 'strict decoding error: unknown field "spec.externalTraficPolicy"' in refused.err


async def test_patch_label_annotate(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    policy = '{"spec":{"externalTrafficPolicy":"Cluster"}}'
    assert (await kubectl("patch", "svc", "web", "-p", policy)).out == "service/web patched\n"
    assert (await kubectl("patch", "svc", "web", "--type=merge", "-p", policy)).out == "service/web patched (no change)\n"
    operation = '[{"op":"replace","path":"/spec/ports/0/port","value":81}]'
    assert (await kubectl("patch", "svc", "web", "--type=json", "-p", operation)).out == "service/web patched\n"
    status = '{"status":{"loadBalancer":{"ingress":[{"hostname":"a.example"}]}}}'
    patched = await kubectl("patch", "svc", "web", "--subresource=status", "--type=merge", "-p", status)
    assert patched.out == "service/web patched\n"
    assert (await kubectl("annotate", "svc", "web", "example.com/a=b")).out == "service/web annotated\n"
    assert (await kubectl("label", "svc", "web", "tier=front")).out == "service/web labeled\n"
    assert (await kubectl("label", "svc", "web", "tier-")).out == "service/web unlabeled\n"
    service = json.loads((await kubectl("get", "svc", "web", "-o", "json")).out)
    assert service["metadata"]["annotations"] == {"example.com/a": "b"}
    assert service["metadata"]["labels"] == {"app": "web"}
    assert service["spec"]["ports"][0]["port"] == 81
    assert service["status"]["loadBalancer"]["ingress"] == [{"hostname": "a.example"}]


async def test_edit_and_replace(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    editor = kubectl.home / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/externalTrafficPolicy: Local/externalTrafficPolicy: Cluster/" "$1"\n')
    editor.chmod(0o755)
    assert (await kubectl("edit", "svc", "web", KUBE_EDITOR=str(editor))).out == "service/web edited\n"
    assert (await kubectl("get", "svc", "web", "-o", "jsonpath={.spec.externalTrafficPolicy}")).out == "Cluster"
    whole = (await kubectl("get", "svc", "web", "-o", "yaml")).out
    assert (await kubectl("replace", "-f", "-", stdin=whole)).out == "service/web replaced\n"
    old = re.sub(r'resourceVersion: "\d+"', 'resourceVersion: "1"', whole)
    refused = await kubectl.run("replace", "-f", "-", stdin=old)
    assert "the object has been modified; please apply your changes to the latest version and try again" in refused.err


async def test_delete_waits_until_it_is_gone(kubectl: Kubectl, server: ApiServer, make_service: Make) -> None:
    service = make_service()
    service["metadata"]["finalizers"] = ["service.kubernetes.io/load-balancer-cleanup"]
    server.registry.create(SERVICES, "default", service, WRITE)
    async with kubectl.start("delete", "svc", "web") as process, asyncio.timeout(DEADLINE_S):
        assert process.stdout is not None
        assert b'service "web" deleted' in await process.stdout.readline()
        while server.requests.count("GET", "services.*watch=true") == 0:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        patch = {"metadata": {"finalizers": None}}
        server.registry.patch(SERVICES, "default", "web", "application/merge-patch+json", patch, WRITE)
        assert await process.wait() == 0
    assert server.store.get(SERVICES, "default", "web") is None


async def test_wait_for_the_address(kubectl: Kubectl, server: ApiServer, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    condition = "--for=jsonpath={.status.loadBalancer.ingress[0].ip}=192.0.2.10"
    async with kubectl.start("wait", condition, "svc/web", "--timeout=20s") as process, asyncio.timeout(DEADLINE_S):
        while server.requests.count("GET", "services.*watch=true") == 0:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        publish(server)
        out, _ = await process.communicate()
    assert out == b"service/web condition met\n"


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


async def test_get_the_other_kinds(kubectl: Kubectl, cluster: ApiServer) -> None:
    pods = (await kubectl("get", "po")).rows
    assert pods[0] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert pods[1][:4] == ["web-1", "1/1", "Running", "2"]
    wide = (await kubectl("get", "pods", "-o", "wide")).rows
    assert wide[0][5:] == ["IP", "NODE", "NOMINATED NODE", "READINESS GATES"]
    assert wide[1][5:] == ["192.0.2.130", "n1", "<none>", "<none>"]
    nodes = (await kubectl("get", "no")).rows
    assert nodes[0] == ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]
    assert (nodes[1][:3], nodes[1][4]) == (["n1", "Ready", "worker"], "v1.32.0")
    assert (await kubectl("get", "nodes", "-o", "wide")).rows[1][5:] == [
        "192.0.2.1",
        "<none>",
        "Debian 12",
        "6.1.0",
        "none://1",
    ]
    slices = (await kubectl("get", "endpointslices")).rows
    assert slices[0] == ["NAME", "ADDRESSTYPE", "PORTS", "ENDPOINTS", "AGE"]
    assert slices[1][:4] == ["web-abcde", "IPv4", "8080", "192.0.2.130"]
    events = (await kubectl("get", "ev")).rows
    assert events[0] == ["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert events[1][1:] == ["Normal", "EnsuredLoadBalancer", "service/web", "Ensured load balancer"]
    assert (await kubectl("get", "leases", "-n", "kube-node-lease")).rows[1][:2] == ["n1", "n1"]
    assert [row[:2] for row in (await kubectl("get", "ns")).rows[1:]] == [
        ["default", "Active"],
        ["kube-node-lease", "Active"],
        ["kube-system", "Active"],
    ]
    together = await kubectl("get", "pods,nodes,endpointslices,events")
    for name in ("pod/web-1", "node/n1", "endpointslice.discovery.k8s.io/web-abcde", "EnsuredLoadBalancer"):
        assert name in together.out


async def test_describe(kubectl: Kubectl, cluster: ApiServer) -> None:
    service = (await kubectl("describe", "svc", "web")).out
    for text in ("External Traffic Policy:  Local", "HealthCheck NodePort:     3000", "EnsuredLoadBalancer", "(x3 over"):
        assert text in service
    node = (await kubectl("describe", "node", "n1")).out
    for text in ("Roles:              worker", "InternalIP:  192.0.2.1", "KubeletReady", "web-1", "HolderIdentity:  n1"):
        assert text in node
    pod = (await kubectl("describe", "pod", "web-1")).out
    for text in ("n1/192.0.2.1", "Running", "IP:           192.0.2.130", "8080/TCP"):
        assert text in pod


async def test_delete_a_pod(kubectl: Kubectl, cluster: ApiServer) -> None:
    assert 'pod "web-1" deleted' in (await kubectl("delete", "pod", "web-1", "--wait=false")).out
    assert (await kubectl("get", "pods")).rows[1][2] == "Terminating"
    forced = await kubectl.run("delete", "pod", "web-1", "--grace-period=0", "--force")
    assert forced.code == 0
    assert cluster.store.get(PODS, "default", "web-1") is None


async def test_cordon_and_taint(kubectl: Kubectl, cluster: ApiServer) -> None:
    assert (await kubectl("cordon", "n1")).out == "node/n1 cordoned\n"
    assert (await kubectl("get", "nodes")).rows[1][1] == "Ready,SchedulingDisabled"
    assert (await kubectl("taint", "node", "n1", "example.com/a=b:NoSchedule")).out == "node/n1 tainted\n"
    stored = cluster.store.get(NODES, "", "n1")
    assert stored is not None
    assert {"key": "example.com/a", "value": "b", "effect": "NoSchedule"} in stored.object["spec"]["taints"]


async def test_namespaces_and_discovery(kubectl: Kubectl) -> None:
    assert (await kubectl("create", "namespace", "shop")).out == "namespace/shop created\n"
    assert (await kubectl("-n", "shop", "create", "-f", "-", stdin=SERVICE)).out == "service/web created\n"
    assert (await kubectl("delete", "namespace", "shop")).out == 'namespace "shop" deleted\n'
    assert (await kubectl("get", "svc", "-A", "--ignore-not-found")).out == ""
    resources = (await kubectl("api-resources", "--no-headers")).out
    for name in ("services", "endpointslices", "leases"):
        assert name in resources
    assert "Server Version: v1.32" in (await kubectl("version")).out


async def test_a_dry_run(kubectl: Kubectl, server: ApiServer, manifest: str) -> None:
    version = server.store.version
    assert (await kubectl("apply", "--dry-run=server", "-f", manifest)).out == "service/web created (server dry run)\n"
    assert server.store.version == version


async def test_commands_that_send_protobuf(kubectl: Kubectl, cluster: ApiServer) -> None:
    made = await kubectl("create", "service", "loadbalancer", "lb", "--tcp=80:8080", "--tcp=443:https")
    assert made.out == "service/lb created\n"
    service = json.loads((await kubectl("get", "svc", "lb", "-o", "json")).out)
    assert service["metadata"]["labels"] == {"app": "lb"}
    assert [(port["name"], port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [
        ("80-8080", 80, 8080),
        ("443-https", 443, "https"),
    ]
    drained = await kubectl.run("drain", "n1", "--force", "--timeout=1s", "--grace-period=7")
    assert "default/web-1" in drained.err, "it waits for the kubelet, which is not there"
    stored = cluster.store.get(PODS, "default", "web-1")
    assert stored is not None
    assert stored.object["metadata"]["deletionGracePeriodSeconds"] == 7
