"""The commands of the README install Fairlead, with announcement on layer 2, in a cluster that has
nothing of it. No pods are started, because there is no controller manager."""

import json
import os
from pathlib import Path

import pytest
from tests.deploy.documented import README, Reader, commands_of

from fairlead.config import parse
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.plan.classes import CLASSES


async def test_the_commands_of_the_readme_install_gateways_on_all_nodes(
    helm: Path, server: KubeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{helm.parent}:{os.environ['PATH']}")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"HELM_{name}_HOME", str(tmp_path / "helm"))
    reader = Reader(tmp_path, server.access)
    (commands,) = commands_of("Install", README)
    said = await reader.run(commands)
    assert "STATUS: deployed" in said
    assert "Warning" not in said, "the labels of the namespace permit what the pods need"
    looked = await reader.run(
        "kubectl get daemonset,deployment,configmap -n fairlead-system -o json"
    )
    found = {(each["kind"], each["metadata"]["name"]): each for each in json.loads(looked)["items"]}
    gateway = found["DaemonSet", "fairlead-gateway"]["spec"]["template"]["spec"]
    assert "nodeSelector" not in gateway
    assert ("Deployment", "fairlead-controller") in found
    text = found["ConfigMap", "fairlead"]["data"]["fairlead.yaml"]
    config = parse(text, "the cluster", CLASSES)
    assert config.announce.l2 is not None
    assert [pool.addresses for pool in config.pools] == [("192.0.2.224-192.0.2.250",)]
    kinds = await reader.run("kubectl get customresourcedefinitions -o name")
    assert "addresspools.fairlead.io" in kinds
