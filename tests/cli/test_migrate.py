"""`fairlead migrate`: the objects that it reads from a cluster, and its messages about unsupported
pools."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer

CONFIGURATION = "pools: [{name: main, addresses: [198.51.100.160/28]}]\n"
ADDRESS = "198.51.100.165"
HOME = "fairlead-system"
CONFIG_MAPS = f"/api/v1/namespaces/{HOME}/configmaps"
KEY = ObjectKey("default", "web-to-migrate")
POOL = {"apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool"}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": KEY.name},
    "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
}
SHOWN = {"loadBalancer": {"ingress": [{"ip": ADDRESS}]}}


async def migrate(*arguments: str, given: str = "") -> tuple[int, str, str]:
    """Run `fairlead migrate`. Return exit status, standard output and standard error."""
    pipe = asyncio.subprocess.PIPE
    program = str(Path(sys.executable).with_name("fairlead"))
    child = await asyncio.create_subprocess_exec(
        program, "migrate", *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(60):
        output, errors = await child.communicate(given.encode())
    assert child.returncode is not None
    return child.returncode, output.decode(), errors.decode()


@pytest.fixture
async def client(real_apiserver: KubeApiServer) -> AsyncIterator[Client]:
    """The client of a cluster without a configuration, in which a Service has an address. Other
    tests use the cluster too."""
    async with Client(real_apiserver.access) as client:
        existing = (await client.request("GET", "/api/v1/namespaces")).decode()
        if f'"{HOME}"' not in existing:
            await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": HOME}})
        await client.create(SERVICES, SERVICE, namespace="default")
        await client.patch(SERVICES, KEY, {"status": SHOWN}, subresource="status")
        yield client
        await client.delete(SERVICES, KEY)
        with suppress(NotFound):
            await client.request("DELETE", f"{CONFIG_MAPS}/fairlead")


async def test_pools_of_the_configuration_in_the_cluster_are_read(
    client: Client, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(settings.kubeconfig("here", client.access))
    code, output, errors = await migrate("pools", "--kubeconfig", str(kubeconfig))
    assert code == 0
    assert "no ConfigMap fairlead-system/fairlead" in errors
    assert ADDRESS in output
    body = {"metadata": {"name": "fairlead"}, "data": {"fairlead.yaml": CONFIGURATION}}
    await client.request("POST", CONFIG_MAPS, body=body)
    code, output, errors = await migrate("pools", "--kubeconfig", str(kubeconfig))
    assert code == 0
    assert "ConfigMap" not in errors
    assert ADDRESS not in output
    code, output, _ = await migrate("services", "--kubeconfig", str(kubeconfig), "-o", "json")
    assert [
        each["pools"] for each in json.loads(output) if each["service"] == "default/web-to-migrate"
    ] == [["main"]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"rack": "a"}, "IPAddressPool odd: spec.rack is not known"),
        (
            {"serviceAllocation": {"zones": ["a"]}},
            "there is no field zones - at $.spec.serviceAllocation",
        ),
        ({"autoAssign": "perhaps"}, "this is a text, not true or false - at $.spec.autoAssign"),
    ],
)
async def test_an_unsupported_pool_is_reported_and_the_others_are_printed(
    spec: dict[str, object], words: str
) -> None:
    odd = POOL | {"metadata": {"name": "odd"}, "spec": {"addresses": ["203.0.113.0/28"], **spec}}
    plain = POOL | {"metadata": {"name": "plain"}, "spec": {"addresses": ["198.51.100.0/28"]}}
    given = yaml.safe_dump_all([odd, plain, SERVICE | {"status": SHOWN}])
    code, output, errors = await migrate("pools", "-f", "-", given=given)
    assert code == 1
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(output)] == ["plain"]
    assert "IPAddressPool odd: " in errors
    assert words in errors
    assert "taken-over is not printed" in errors
    assert "Traceback" not in errors


async def test_manifests_that_cannot_be_read_are_reported_and_the_others_are_examined() -> None:
    """Manifests are read as kubectl reads them."""
    spec = {"addresses": ["203.0.113.16/28"], "autoAssign": None}
    pool = POOL | {"metadata": {"name": "good"}, "spec": spec}
    service = SERVICE | {"metadata": {"name": "web", "annotations": None}}
    headless = SERVICE | {"metadata": {"name": "headless"}, "spec": {"type": "LoadBalancer"}}
    documents = [yaml.safe_dump(each) for each in (pool, service, headless)]
    given = "---\n".join([*documents, "a: [\n", "kind: Other\napiVersion: v1\nmatchType: =\n"])
    line = given.splitlines().index("a: [") + 2
    left_out = [
        f"left out: standard input, document 4, line {line}: this is not valid YAML: while parsing "
        "a flow node, did not find expected node content",
        "left out: Service default/headless: the API server would refuse it: spec.ports: Required "
        "value",
    ]
    status, output, errors = await migrate("services", "-f", "-", given=given)
    assert (status, "default/web" in output) == (1, True)
    assert errors.splitlines() == left_out
    status, output, errors = await migrate("pools", "-f", "-", given=given)
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(output)] == ["good"]
    assert (status, errors.splitlines()) == (1, left_out)


async def test_manifests_and_a_cluster_are_not_both_read() -> None:
    code, _, errors = await migrate("pools", "-f", "-", "--context", "x")
    assert code == 2
    assert "one or the other" in errors
