"""A real API server accepts all objects of the chart, with the Pod Security levels of its
namespace.

No pods are started, because there is no controller manager. Each pod template is therefore also
created as a Pod: Pod Security admission rejects only Pods; a Deployment gets a warning at most.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import DEPLOY, EVERYTHING, VALUES, Manifest, pod_spec, render

from fairlead.config import Config
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer

POD_MONITORS: Manifest = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PodMonitor", "plural": "podmonitors"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


class Kubectl:
    """kubectl as the administrator of the server."""

    def __init__(self, server: KubeApiServer, folder: Path) -> None:
        self._kubeconfig = folder / "kubeconfig"
        self._kubeconfig.write_text(settings.kubeconfig("real", server.access))

    async def __call__(self, *arguments: str, objects: object = None, fails: bool = False) -> str:
        """Run a command and return its output and warnings. `objects`: a manifest, or a list of
        manifests, for its standard input."""
        pipe = asyncio.subprocess.PIPE
        command = ("kubectl", "--kubeconfig", str(self._kubeconfig), *arguments)
        child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        text = yaml.safe_dump_all(objects) if isinstance(objects, list) else yaml.safe_dump(objects)
        async with asyncio.timeout(60):
            output, _ = await child.communicate(text.encode())
        assert (child.returncode != 0) == fails, output.decode()
        return output.decode()


@pytest.fixture
async def kubectl(real_apiserver: KubeApiServer, tmp_path: Path) -> AsyncIterator[Kubectl]:
    kubectl = Kubectl(real_apiserver, tmp_path)
    yield kubectl
    await kubectl(
        "delete", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/name=fairlead"
    )
    await kubectl(
        "delete", "customresourcedefinition", POD_MONITORS["metadata"]["name"], "--ignore-not-found"
    )


def moved(objects: list[Manifest], namespace: str) -> list[Manifest]:
    """Return the objects in another namespace. Without a controller manager a deleted namespace
    never disappears, and other tests use this server, too."""
    text = yaml.safe_dump_all(objects).replace("fairlead-system", namespace)
    return list(
        yaml.safe_load_all(text.replace(Config().presence.namespace, f"{namespace}-presence"))
    )


def pod(objects: list[Manifest], role: str, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": pod_spec(objects, role),
    }


@pytest.mark.parametrize("values", VALUES, ids=lambda each: each.stem)
async def test_the_api_server_accepts_all_objects_of_the_chart(
    helm: Path, kubectl: Kubectl, values: Path
) -> None:
    namespace = f"accepts-{values.stem}"
    options = ("--values", values, "--set", "namespace.create=true")
    objects = moved(render(helm, *options), namespace)
    if any(each["kind"] == "PodMonitor" for each in objects):
        await kubectl("apply", "-f", "-", objects=POD_MONITORS)
        await kubectl(
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd/podmonitors.monitoring.coreos.com",
        )
    output = await kubectl("apply", "--server-side", "-f", "-", objects=objects)
    assert output.count("serverside-applied") == len(objects)
    assert "Warning" not in output
    stored = json.loads(
        await kubectl("get", "deployment", "fairlead-controller", "-n", namespace, "-o", "json")
    )
    (container,) = stored["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "controller"


@pytest.mark.parametrize("name", ["controller", "gateways", "no-kube-proxy", "tunnels"])
async def test_the_api_server_accepts_the_plain_manifests(kubectl: Kubectl, name: str) -> None:
    objects = moved(
        list(yaml.safe_load_all((DEPLOY / "manifests" / f"{name}.yaml").read_text())),
        f"plain-{name}",
    )
    output = await kubectl("apply", "-f", "-", objects=objects)
    assert "Warning" not in output
    assert f"namespace/plain-{name} created" in output


@pytest.mark.parametrize(
    ("level", "role", "accepted"),
    [
        ("restricted", "controller", True),
        ("baseline", "gateway", False),
        ("privileged", "gateway", True),
        ("baseline", "node", False),
        ("privileged", "node", True),
    ],
)
async def test_pods_need_the_pod_security_level_of_their_namespace(
    helm: Path, kubectl: Kubectl, level: str, role: str, accepted: bool
) -> None:
    """The level of the chart's namespace is the strictest level with which its pods can run."""
    objects = render(helm, "--values", EVERYTHING)
    namespace = f"security-{level}-{role}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    await kubectl(
        "apply",
        "-f",
        "-",
        objects={
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": labels},
        },
    )
    output = await kubectl(
        "create", "-n", namespace, "-f", "-", objects=pod(objects, role, "one"), fails=not accepted
    )
    assert accepted or f'violates PodSecurity "{level}:latest": ' in output
    assert "Warning" not in output


@pytest.mark.parametrize(
    ("values", "level"), [("controller", "restricted"), ("gateways", "privileged")]
)
async def test_the_namespace_has_the_strictest_possible_pod_security_level(
    helm: Path, values: str, level: str
) -> None:
    (namespace,) = (
        each
        for each in render(
            helm, "--values", next(path for path in VALUES if path.stem == f"{values}-values")
        )
        if each["kind"] == "Namespace" and each["metadata"]["name"] != Config().presence.namespace
    )
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == level
