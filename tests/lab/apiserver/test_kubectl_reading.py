"""The real kubectl reads: lists, tables, watches, descriptions, and discovery."""

import asyncio
import json
import re
from pathlib import Path

from tests.lab.apiserver.api import Api
from tests.lab.apiserver.conftest import SERVICE, now
from tests.lab.apiserver.kubectl import DEADLINE_S, Kubectl, Program

from fairlead.lab.apiserver.kinds import EVENTS, NAMESPACES, PODS, SERVICES


async def publish(api: Api, address: str = "192.0.2.10") -> None:
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Ready",
        "message": "",
        "lastTransitionTime": now(),
    }
    await api.publish("web", {"ip": address}, conditions=[ready])


async def test_get_services(kubectl: Kubectl, api: Api, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    pending = await kubectl("get", "svc")
    assert pending.rows[0] == ["NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "AGE"]
    spec = (await api.get(SERVICES, "web"))["spec"]
    ports = ",".join(f"{port['port']}:{port['nodePort']}/TCP" for port in spec["ports"])
    assert pending.rows[1][:5] == ["web", "LoadBalancer", spec["clusterIP"], "<pending>", ports]
    assert re.fullmatch(r"\d+s", pending.rows[1][5])
    await publish(api)
    wide = await kubectl("get", "services", "-o", "wide")
    assert wide.rows[0][-1] == "SELECTOR"
    assert (wide.rows[1][3], wide.rows[1][-1]) == ("192.0.2.10", "app=web")
    assert (await kubectl("get", "svc", "-o", "name")).out == "service/web\n"
    service = json.loads((await kubectl("get", "svc/web", "-o", "json")).out)
    assert service["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.10", "ipMode": "VIP"}]
    assert "externalTrafficPolicy: Local" in (await kubectl("get", "svc", "web", "-o", "yaml")).out
    shown = await kubectl("get", "svc", "web", "-o", "jsonpath={.spec.healthCheckNodePort}")
    assert shown.out == str(spec["healthCheckNodePort"])
    assert "service/web" in (await kubectl("get", "all", "-A")).out
    assert (await kubectl("get", "svc", "-l", "app=web", "--no-headers")).out.startswith("web ")
    chunked = await kubectl("get", "svc", "--chunk-size=1", "-A")
    assert [row[1] for row in chunked.rows if row[0] == api.namespace] == ["web"]


async def test_missing_objects_and_empty_lists(kubectl: Kubectl) -> None:
    ran = await kubectl.run("get", "svc")
    assert (ran.code, ran.err) == (0, f"No resources found in {kubectl.api.namespace} namespace.\n")
    ran = await kubectl.run("get", "svc", "none")
    assert (ran.code, ran.err) == (1, 'Error from server (NotFound): services "none" not found\n')
    ran = await kubectl.run("create", "-n", "nowhere", "-f", "-", stdin=SERVICE)
    assert ran.code == 1
    assert 'namespaces "nowhere" not found' in ran.err


async def test_get_and_watch(kubectl: Kubectl, api: Api, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    async with kubectl.start("get", "svc", "-w") as process, asyncio.timeout(DEADLINE_S):
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"NAME")
        assert b"<pending>" in await process.stdout.readline()
        await publish(api)
        assert b"192.0.2.10" in await process.stdout.readline()


async def test_wait_for_the_address(kubectl: Kubectl, api: Api, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    # An old kubectl can wait only for conditions.
    condition = (
        "jsonpath={.status.loadBalancer.ingress[0].ip}=192.0.2.10"
        if kubectl.minor >= 23
        else "condition=Ready"
    )
    async with (
        kubectl.start("wait", f"--for={condition}", "svc/web", "--timeout=20s") as process,
        asyncio.timeout(DEADLINE_S),
    ):
        await publish(api)
        out, _ = await process.communicate()
    assert out == b"service/web condition met\n"


async def test_get_other_kinds(kubectl: Kubectl, cluster: Api) -> None:
    pods = (await kubectl("get", "po")).rows
    assert pods[0] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert pods[1][:4] == ["web-1", "1/1", "Running", "2"]
    wide = (await kubectl("get", "pods", "-o", "wide")).rows
    assert wide[0][5:] == ["IP", "NODE", "NOMINATED NODE", "READINESS GATES"]
    assert wide[1][5:] == ["192.0.2.130", cluster.namespace, "<none>", "<none>"]
    node = cluster.namespace
    nodes = (await kubectl("get", "no", node)).rows
    assert nodes[0] == ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]
    assert (nodes[1][:3], nodes[1][4]) == ([node, "Ready", "worker"], "v1.32.0")
    assert (await kubectl("get", "node", node, "-o", "wide")).rows[1][5:] == [
        "192.0.2.1",
        "<none>",
        "Debian 12",
        "6.1.0",
        "none://1",
    ]
    requested = await kubectl.run("get", "ep")
    assert "Endpoints is deprecated in v1.33+" in requested.err
    endpoints = requested.rows
    assert endpoints[0] == ["NAME", "ENDPOINTS", "AGE"]
    assert [row[:2] for row in endpoints[1:]] == [
        ["nobody", "<none>"],
        ["web", "192.0.2.130:8080,[2001:db8::1]:8080"],
    ]
    slices = (await kubectl("get", "endpointslices")).rows
    assert slices[0] == ["NAME", "ADDRESSTYPE", "PORTS", "ENDPOINTS", "AGE"]
    assert slices[1][:4] == ["web-abcde", "IPv4", "8080", "192.0.2.130"]
    events = (await kubectl("get", "events")).rows
    assert events[0] == ["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert events[1][1:] == [
        "Normal",
        "EnsuredLoadBalancer",
        "service/web",
        "Ensured load balancer",
    ]
    assert (await kubectl("get", "lease", node, "-n", "kube-node-lease")).rows[1][:2] == [
        node,
        node,
    ]
    namespaces = [row[:2] for row in (await kubectl("get", "ns")).rows[1:]]
    assert all(
        [name, "Active"] in namespaces
        for name in ("default", "kube-node-lease", "kube-public", "kube-system")
    )
    together = await kubectl("get", "pods,nodes,endpointslices,events")
    for name in (
        "pod/web-1",
        f"node/{node}",
        "endpointslice.discovery.k8s.io/web-abcde",
        "EnsuredLoadBalancer",
    ):
        assert name in together.out


async def test_describe(kubectl: Kubectl, cluster: Api) -> None:
    service = (await kubectl("describe", "svc", "web")).out
    expected = (
        "External Traffic Policy:  Local",
        "HealthCheck NodePort:     3",
        "EnsuredLoadBalancer",
        "(x3 over",
    )
    for text in (*expected, "192.0.2.130:8080"):
        assert text in service
    node = (await kubectl("describe", "node", cluster.namespace)).out
    for text in (
        "Roles:              worker",
        "InternalIP:  192.0.2.1",
        "KubeletReady",
        "web-1",
        f"HolderIdentity:  {cluster.namespace}",
    ):
        assert text in node
    pod = (await kubectl("describe", "pod", "web-1")).out
    for text in (
        f"{cluster.namespace}/192.0.2.1",
        "Running",
        "IP:           192.0.2.130",
        "8080/TCP",
    ):
        assert text in pod


async def test_namespaces_and_discovery(kubectl: Kubectl) -> None:
    shop = f"{kubectl.api.namespace}-shop"
    kubectl.api.remove_later(NAMESPACES, shop)
    assert (await kubectl("create", "namespace", shop)).out == f"namespace/{shop} created\n"
    assert (
        await kubectl("-n", shop, "create", "-f", "-", stdin=SERVICE)
    ).out == "service/web created\n"
    deleted = (await kubectl("delete", "namespace", shop, "--wait=false")).out
    assert deleted == f'namespace "{shop}" deleted\n'
    resources = (await kubectl("api-resources", "--no-headers")).out
    for name in ("services", "endpointslices", "leases"):
        assert name in resources
    versions = json.loads((await kubectl.run("version", "-o", "json")).out)
    assert versions["serverVersion"]["gitVersion"].startswith("v1.36")


async def test_kinds_and_subresources_that_are_not_served_are_reported(
    program: Program, client: Api, tmp_path: Path
) -> None:
    """The embedded server lacks some subresources and reports that."""
    kubectl = Kubectl(program, client, tmp_path)
    containers = [{"name": "web", "image": "example.com/web:1"}]
    await client.create(
        PODS, {"metadata": {"name": "web-1"}, "spec": {"nodeName": "n1", "containers": containers}}
    )
    for arguments, told in {
        ("get", "deploy"): 'the server doesn\'t have a resource type "deploy"',
        (
            "logs",
            "web-1",
        ): "the server does not have pods/log: it stores objects, and runs no containers",
        (
            "exec",
            "web-1",
            "--",
            "ls",
        ): "the server does not have pods/exec: it stores objects, and runs no containers",
    }.items():
        ran = await kubectl.run(*arguments)
        assert ran.code == 1
        assert told in ran.err
    deployment = '{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}'
    made = await kubectl.run("create", "-f", "-", stdin=deployment)
    assert 'no matches for kind "Deployment" in version "apps/v1"' in made.err
    # The embedded server does the work of the namespace controller, so that kubectl does not wait
    # forever.
    await kubectl("create", "namespace", "shop")
    await kubectl("-n", "shop", "create", "-f", "-", stdin=SERVICE)
    assert (await kubectl("delete", "namespace", "shop")).out == 'namespace "shop" deleted\n'
    assert (await kubectl("get", "svc", "-A", "--ignore-not-found")).out == ""


async def test_explain(kubectl: Kubectl) -> None:
    ports = (await kubectl("explain", "svc.spec.ports")).out
    assert re.search(r"nodePort\s+<integer>", ports)
    for kind in ("ns", "node", "pod", "svc", "endpoints", "endpointslices", "leases"):
        assert "metadata" in (await kubectl("explain", kind, "--recursive")).out


async def test_events_are_printed_in_order(kubectl: Kubectl, api: Api) -> None:
    for name, stamp in {"late": "2026-01-02T00:00:00Z", "early": "2026-01-01T00:00:00Z"}.items():
        event = {
            "metadata": {"name": name},
            "reason": name,
            "lastTimestamp": stamp,
            "type": "Normal",
        }
        about = {"kind": "Service", "name": "web", "namespace": api.namespace}
        await api.create(EVENTS, event | {"involvedObject": about})
    rows = (await kubectl("get", "events", "--sort-by=.lastTimestamp")).rows
    assert [row[2] for row in rows] == ["REASON", "early", "late"]
