"""Helm takes over an installation with plain manifests, and the cluster of a lab. No pods are
started, because there is no controller manager."""

import json
import os
from pathlib import Path

import pytest
from tests.deploy.documented import Reader, commands_of

from fairlead.kube.client import Client
from fairlead.lab import crds, rights
from fairlead.lab.kubeapiserver import KubeApiServer

VALUES = """
image: {repository: registry.example.com/fairlead}
config: {gateway: {interfaces: [eth0]}}
gateway: {enabled: true}
"""
BY_HELM = "app.kubernetes.io/managed-by"


@pytest.fixture
def reader(
    helm: Path, server: KubeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Reader:
    monkeypatch.setenv("PATH", f"{helm.parent}:{os.environ['PATH']}")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"HELM_{name}_HOME", str(tmp_path / "helm"))
    (tmp_path / "values.yaml").write_text(VALUES)
    return Reader(tmp_path, server.access)


@pytest.mark.parametrize("installed", ["manifests", "lab"])
async def test_helm_takes_over_what_plain_manifests_created(
    reader: Reader, server: KubeApiServer, installed: str
) -> None:
    (apply,) = commands_of("With plain manifests")
    if installed == "lab":
        async with Client(server.access) as client:
            await crds.install(client)
            await rights.install(client)
        apply = apply.replace(" --server-side ", " --server-side --force-conflicts ")
    await reader.run(apply)
    (command,) = commands_of("From plain manifests to Helm")
    with pytest.raises(AssertionError, match="cannot be imported into the current release"):
        await reader.run(command.replace(" --take-ownership", ""))
    said = await reader.run(command)
    assert "STATUS: deployed" in said
    assert "kubectl label nodes NODE... fairlead.io/gateway=\n" in said
    assert "There is no pool of addresses" in said
    found = await reader.run(
        "kubectl get -o json namespace/fairlead-presence clusterrole/fairlead-gateway "
        "clusterrolebinding/fairlead-gateway"
    )
    assert [each["metadata"]["labels"][BY_HELM] for each in json.loads(found)["items"]] == [
        "Helm"
    ] * 3
    gateway = json.loads(
        await reader.run("kubectl get daemonset fairlead-gateway -n fairlead-system -o json")
    )
    image = gateway["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("registry.example.com/fairlead:")
    upgraded = await reader.run(
        "helm upgrade fairlead deploy/chart/fairlead -n fairlead-system -f values.yaml"
    )
    assert "has been upgraded" in upgraded
