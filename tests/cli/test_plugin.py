"""`kubectl fairlead`: the real kubectl finds the plugin; `plan` shows the objects of a cluster."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer

CONFIGURATION = (
    "defaultClass: fairlead.io/direct\npools: [{name: main, addresses: "
    "[203.0.113.10-203.0.113.250]}]\n"
)


async def kubectl(*arguments: str, kubeconfig: Path | None = None, fails: bool = False) -> str:
    """Return the output of `kubectl fairlead ...`. Its environment contains no reference to a
    cluster."""
    environment = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HOME": "/nonexistent",
    }
    if kubeconfig is not None:
        environment["KUBECONFIG"] = str(kubeconfig)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        "kubectl", "fairlead", *arguments, stdout=pipe, stderr=pipe, env=environment
    )
    async with asyncio.timeout(60):
        output, errors = await child.communicate()
    assert (child.returncode != 0) == fails, errors.decode()
    return (errors if fails else output).decode()


async def test_the_usage_shows_the_name_of_the_plugin() -> None:
    assert (await kubectl("--help")).startswith("Usage: kubectl fairlead [OPTIONS]")
    assert "Usage: kubectl fairlead plan" in await kubectl("plan", "--help")
    assert "kubectl fairlead plan --help" in await kubectl("plan", "--nonsense", fails=True)


async def test_without_a_cluster_the_error_names_the_sources() -> None:
    assert "no API server is configured" in await kubectl("plan", fails=True)


async def test_manifests_and_a_cluster_are_not_both_planned() -> None:
    assert "one or the other" in await kubectl("plan", "-f", "-", "--context", "x", fails=True)


@pytest.fixture
async def kubeconfig(real_apiserver: KubeApiServer, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(settings.kubeconfig("real", real_apiserver.access))
    return path


async def test_plan_reads_the_cluster(
    real_apiserver: KubeApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    """The plan uses the configuration of the cluster unless another one is given; -n shows the
    Services of one namespace."""
    async with Client(real_apiserver.access) as client:
        for namespace in ("plan-one", "plan-two"):
            await client.request(
                "POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}}
            )
            spec = {
                "type": "LoadBalancer",
                "ports": [{"port": 80}],
                "loadBalancerClass": "fairlead.io/direct",
            }
            await client.create(
                SERVICES, {"metadata": {"name": "web", "namespace": namespace}, "spec": spec}
            )
    (tmp_path / "fairlead.yaml").write_text(CONFIGURATION)
    here = ("--config", str(tmp_path / "fairlead.yaml"), "--kubeconfig", str(kubeconfig))
    shown = await kubectl("plan", *here)
    assert "plan-one/web" in shown
    assert "plan-two/web" in shown
    assert "203.0.113.10:80/TCP" in shown
    shown = await kubectl("plan", *here, "-n", "plan-two", "--context", "fairlead-real")
    assert "plan-one/web" not in shown
    assert "203.0.113.11:80/TCP" in shown, "all Services are planned, also those that are not shown"
    assert "no context 'elsewhere'" in await kubectl(
        "plan", *here, "--context", "elsewhere", fails=True
    )
    async with Client(real_apiserver.access) as client:
        for namespace in ("plan-one", "plan-two"):
            await client.delete(SERVICES, (namespace, "web"))


async def test_plan_reads_the_configuration_where_the_chart_puts_it(
    real_apiserver: KubeApiServer, kubeconfig: Path
) -> None:
    namespace = "/api/v1/namespaces/fairlead-system"
    async with Client(real_apiserver.access) as client:
        existing = (await client.request("GET", "/api/v1/namespaces")).decode()
        if '"fairlead-system"' not in existing:
            await client.request(
                "POST", "/api/v1/namespaces", body={"metadata": {"name": "fairlead-system"}}
            )
        if '"name":"fairlead"' in (await client.request("GET", f"{namespace}/configmaps")).decode():
            await client.request("DELETE", f"{namespace}/configmaps/fairlead")
        output = await kubectl("plan", kubeconfig=kubeconfig, fails=True)
        assert "ConfigMap fairlead-system/fairlead" in output
        assert "--config" in output
        body = {"metadata": {"name": "fairlead"}, "data": {"fairlead.yaml": CONFIGURATION}}
        await client.request("POST", f"{namespace}/configmaps", body=body)
        spec = {"type": "LoadBalancer", "ports": [{"port": 80}]}
        await client.create(
            SERVICES, {"metadata": {"name": "classless", "namespace": "default"}, "spec": spec}
        )
        shown = await kubectl("plan", "-n", "default", kubeconfig=kubeconfig)
        assert "203.0.113.10:80/TCP" in shown
        await client.delete(SERVICES, ("default", "classless"))
        await client.request("DELETE", f"{namespace}/configmaps/fairlead")
