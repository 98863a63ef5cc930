"""The real kubectl writes: each command that users and the documentation need, and its output."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from tests.lab.apiserver.api import Api, version_of
from tests.lab.apiserver.conftest import SERVICE
from tests.lab.apiserver.kubectl import DEADLINE_S, Kubectl

from fairlead.lab.apiserver.kinds import NODES, PODS, SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
NODE_TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
POD: Object = {
    "containers": [
        {"name": "web", "image": "example.com/web:1"},
        {"name": "log", "image": "example.com/log:1"},
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODE_TERM]},
        }
    },
}


async def test_client_side_apply(kubectl: Kubectl, manifest: str) -> None:
    assert (await kubectl("apply", "-f", manifest)).out == "service/web created\n"
    assert (await kubectl("apply", "-f", manifest)).out == "service/web unchanged\n"
    changed = SERVICE.replace("Local", "Cluster").replace(
        "  - {name: https, port: 443, targetPort: 8443}\n", ""
    )
    assert (await kubectl("apply", "-f", "-", stdin=changed)).out == "service/web configured\n"
    service = json.loads((await kubectl("get", "svc", "web", "-o", "json")).out)
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    assert service["spec"]["externalTrafficPolicy"] == "Cluster"
    assert "healthCheckNodePort" not in service["spec"]
    difference = await kubectl.run("diff", "-f", manifest)
    assert difference.code == 1
    assert "+  externalTrafficPolicy: Local" in difference.out


async def test_an_equal_apply_changes_no_kind(kubectl: Kubectl) -> None:
    name = f"{kubectl.api.namespace}-other"
    kubectl.api.remove_later(NODES, name)
    everything: list[Object] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name},
            "spec": {"podCIDRs": ["192.0.2.0/26"]},
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": POD},
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "l"},
            "spec": {"holderIdentity": "a"},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "web-a"},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.5"], "conditions": {"ready": True}}],
        },
    ]
    manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": everything})
    created = (await kubectl("apply", "-f", "-", stdin=manifests)).out
    assert created.count(" created\n") == len(everything)
    again = (await kubectl("apply", "-f", "-", stdin=manifests)).out
    assert again == created.replace("created", "unchanged")
    for document in everything:
        document["metadata"]["labels"] = {"tier": "front"}
    changed = json.dumps({"apiVersion": "v1", "kind": "List", "items": everything})
    assert (await kubectl("apply", "-f", "-", stdin=changed)).out == created.replace(
        "created", "configured"
    )


async def test_a_patch_changes_only_one_container(kubectl: Kubectl) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": POD}
    await kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    changed = json.dumps(pod).replace("web:1", "web:2")
    assert (await kubectl("apply", "-f", "-", stdin=changed)).out == "pod/web configured\n"
    images = await kubectl("get", "pod", "web", "-o", "jsonpath={.spec.containers[*].image}")
    assert images.out == "example.com/web:2 example.com/log:1"


async def test_a_change_of_fields_without_a_schema(kubectl: Kubectl) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": POD}
    await kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    refused = await kubectl.run(
        "apply", "-f", "-", stdin=json.dumps(pod).replace('"In"', '"NotIn"')
    )
    assert (
        'The Pod "web" is invalid: spec: Forbidden: pod updates may not change fields'
        in refused.err
    )
    assert "panic" not in refused.err


async def test_server_side_apply(kubectl: Kubectl, api: Api, manifest: str) -> None:
    assert (
        await kubectl("apply", "--server-side", "-f", manifest)
    ).out == "service/web serverside-applied\n"
    made = await api.get(SERVICES, "web")
    await kubectl("apply", "--server-side", "-f", manifest)
    assert version_of(await api.get(SERVICES, "web")) == version_of(made)
    other = SERVICE.replace("type: LoadBalancer", "type: NodePort")
    refused = await kubectl.run(
        "apply", "--server-side", "--field-manager=other", "-f", "-", stdin=other
    )
    assert refused.code == 1
    assert 'Apply failed with 1 conflict: conflict with "kubectl": .spec.type' in refused.err
    taken = await kubectl(
        "apply",
        "--server-side",
        "--field-manager=other",
        "--force-conflicts",
        "-f",
        "-",
        stdin=other,
    )
    assert taken.out == "service/web serverside-applied\n"
    shown = await kubectl(
        "get",
        "svc",
        "web",
        "-o",
        "yaml",
        *(["--show-managed-fields"] if kubectl.minor >= 21 else []),
    )
    assert "manager: other" in shown.out
    assert 'k:{"port":80,"protocol":"TCP"}:' in shown.out


async def test_migration_from_client_side_to_server_side_apply(
    kubectl: Kubectl, manifest: str
) -> None:
    await kubectl("apply", "-f", manifest)
    assert (
        await kubectl("apply", "--server-side", "-f", manifest)
    ).out == "service/web serverside-applied\n"


async def test_the_output_contains_the_full_error(kubectl: Kubectl) -> None:
    wrong = SERVICE.replace("name: web", "name: x").replace("type: LoadBalancer", "type: ClusterIP")
    for arguments in (
        ("create", "-f", "-"),
        ("apply", "-f", "-"),
        ("apply", "--server-side", "-f", "-"),
    ):
        refused = await kubectl.run(*arguments, stdin=wrong)
        assert refused.code == 1
        assert refused.err == (
            'The Service "x" is invalid: spec.externalTrafficPolicy: Invalid value: "Local": '
            "may only be set for externally-accessible services\n"
        )
    refused = await kubectl.run(
        "create", "-f", "-", stdin=SERVICE.replace("externalTrafficPolicy", "externalTraficPolicy")
    )
    if kubectl.minor >= 25:
        assert 'strict decoding error: unknown field "spec.externalTraficPolicy"' in refused.err
    else:  # this kubectl validates on the client side, by the OpenAPI document
        expected = (
            'ValidationError(Service.spec): unknown field "externalTraficPolicy" in '
            "io.k8s.api.core.v1.ServiceSpec"
        )
        assert expected in refused.err


async def test_patch_label_annotate(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    policy = '{"spec":{"externalTrafficPolicy":"Cluster"}}'
    assert (await kubectl("patch", "svc", "web", "-p", policy)).out == "service/web patched\n"
    assert (
        await kubectl("patch", "svc", "web", "--type=merge", "-p", policy)
    ).out == "service/web patched (no change)\n"
    operation = '[{"op":"replace","path":"/spec/ports/0/port","value":81}]'
    assert (
        await kubectl("patch", "svc", "web", "--type=json", "-p", operation)
    ).out == "service/web patched\n"
    assert (
        await kubectl("annotate", "svc", "web", "example.com/a=b")
    ).out == "service/web annotated\n"
    assert (await kubectl("label", "svc", "web", "tier=front")).out == "service/web labeled\n"
    assert (await kubectl("label", "svc", "web", "tier-")).out in (
        "service/web unlabeled\n",
        "service/web labeled\n",
    )
    service = json.loads((await kubectl("get", "svc", "web", "-o", "json")).out)
    assert service["metadata"]["annotations"] == {"example.com/a": "b"}
    assert service["metadata"]["labels"] == {"app": "web"}
    assert service["spec"]["ports"][0]["port"] == 81


async def test_write_the_status(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    status = {"loadBalancer": {"ingress": [{"hostname": "a.example"}]}}
    if kubectl.minor >= 24:
        patch = json.dumps({"status": status})
        await kubectl("patch", "svc", "web", "--subresource=status", "--type=merge", "-p", patch)
    else:
        path = kubectl.api.path(SERVICES, "web", "status")
        service = json.loads((await kubectl("get", "--raw", path)).out) | {"status": status}
        await kubectl("replace", "--raw", path, "-f", "-", stdin=json.dumps(service))
    shown = await kubectl(
        "get", "svc", "web", "-o", "jsonpath={.status.loadBalancer.ingress[*].hostname}"
    )
    assert shown.out == "a.example"


async def test_edit_and_replace(kubectl: Kubectl, manifest: str) -> None:
    await kubectl("create", "-f", manifest)
    editor = kubectl.home / "editor"
    editor.write_text(
        '#!/bin/sh\nsed -i "s/externalTrafficPolicy: Local/externalTrafficPolicy: Cluster/" "$1"\n'
    )
    editor.chmod(0o755)
    assert (
        await kubectl("edit", "svc", "web", KUBE_EDITOR=str(editor))
    ).out == "service/web edited\n"
    assert (
        await kubectl("get", "svc", "web", "-o", "jsonpath={.spec.externalTrafficPolicy}")
    ).out == "Cluster"
    whole = (await kubectl("get", "svc", "web", "-o", "yaml")).out
    assert (await kubectl("replace", "-f", "-", stdin=whole)).out == "service/web replaced\n"
    old = re.sub(r'resourceVersion: "\d+"', 'resourceVersion: "1"', whole)
    refused = await kubectl.run("replace", "-f", "-", stdin=old)
    assert (
        "the object has been modified; please apply your changes to the latest version and try "
        "again"
    ) in refused.err


async def test_delete_waits_until_it_is_gone(
    kubectl: Kubectl, api: Api, make_service: Make
) -> None:
    service = make_service()
    service["metadata"]["finalizers"] = ["service.kubernetes.io/load-balancer-cleanup"]
    await api.create(SERVICES, service)
    async with kubectl.start("delete", "svc", "web") as process, asyncio.timeout(DEADLINE_S):
        assert process.stdout is not None
        assert b'service "web" deleted' in await process.stdout.readline()
        assert process.returncode is None
        await api.patch(SERVICES, "web", {"metadata": {"finalizers": None}})
        assert await process.wait() == 0
    assert await api.find(SERVICES, "web") is None


async def test_delete_a_pod(kubectl: Kubectl, cluster: Api) -> None:
    assert 'pod "web-1" deleted' in (await kubectl("delete", "pod", "web-1", "--wait=false")).out
    assert (await kubectl("get", "pods")).rows[1][2] == "Terminating"
    forced = await kubectl.run("delete", "pod", "web-1", "--grace-period=0", "--force")
    assert forced.code == 0
    assert await cluster.find(PODS, "web-1") is None


async def test_cordon_and_taint(kubectl: Kubectl, cluster: Api) -> None:
    node = cluster.namespace
    assert (await kubectl("cordon", node)).out == f"node/{node} cordoned\n"
    assert (await kubectl("get", "node", node)).rows[1][1] == "Ready,SchedulingDisabled"
    assert (
        await kubectl("taint", "node", node, "example.com/a=b:NoSchedule")
    ).out == f"node/{node} tainted\n"
    taints = (await cluster.get(NODES, node))["spec"]["taints"]
    assert {"key": "example.com/a", "value": "b", "effect": "NoSchedule"} in taints


async def test_a_dry_run(kubectl: Kubectl, manifest: str) -> None:
    assert (
        await kubectl("apply", "--dry-run=server", "-f", manifest)
    ).out == "service/web created (server dry run)\n"
    assert await kubectl.api.find(SERVICES, "web") is None


async def test_commands_that_send_protobuf(kubectl: Kubectl, cluster: Api) -> None:
    made = await kubectl(
        "create", "service", "loadbalancer", "lb", "--tcp=80:8080", "--tcp=443:https"
    )
    assert made.out == "service/lb created\n"
    service = json.loads((await kubectl("get", "svc", "lb", "-o", "json")).out)
    assert service["metadata"]["labels"] == {"app": "lb"}
    assert [
        (port["name"], port["port"], port["targetPort"]) for port in service["spec"]["ports"]
    ] == [
        ("80-8080", 80, 8080),
        ("443-https", 443, "https"),
    ]
    drained = await kubectl.run(
        "drain", cluster.namespace, "--force", "--timeout=1s", "--grace-period=7"
    )
    assert f"{cluster.namespace}/web-1" in drained.err, (
        "the deletion waits for a kubelet, which does not exist"
    )
    assert (await cluster.get(PODS, "web-1"))["metadata"]["deletionGracePeriodSeconds"] == 7
