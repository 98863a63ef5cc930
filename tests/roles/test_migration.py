"""Fairlead takes over Services of MetalLB and of OpenStack's cloud controller without changing
their addresses.

In: the objects of `examples/migrate`, written as these systems leave them, on both API servers. The
steps are those of docs/migration.md: examine the Services, create pools, start the controller,
remove foreign finalizers; and the way back."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.roles.cluster import Cluster, until

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.kube.reflector import Reflector

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
POOLS_OF_METALLB = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "ipaddresspools.metallb.io"},
    "spec": {
        "group": "metallb.io",
        "scope": "Namespaced",
        "names": {
            "kind": "IPAddressPool",
            "plural": "ipaddresspools",
            "singular": "ipaddresspool",
            "listKind": "IPAddressPoolList",
        },
        "versions": [
            {
                "name": "v1beta1",
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


def foreign_objects() -> list[dict[str, Any]]:
    return [
        each for path in sorted(EXAMPLES.iterdir()) for each in yaml.safe_load_all(path.read_text())
    ]


@pytest.fixture
async def foreign_services(cluster: Cluster) -> AsyncIterator[dict[str, str]]:
    """Write the objects of the other systems while Fairlead's controller does not run. Return the
    address of each Service."""
    await cluster.stop_controller()
    client = cluster.client
    with suppress(NotFound):
        await client.delete(ADDRESS_POOLS, ObjectKey("", "taken-over"))
    await cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(POOLS_OF_METALLB))
    await cluster.kubectl("wait", "--for=condition=Established", "crd/ipaddresspools.metallb.io")
    addresses = {}
    for each in foreign_objects():
        each["metadata"]["namespace"] = cluster.namespace
        if each["kind"] != "Service":
            await client.request(
                "POST",
                f"/apis/metallb.io/v1beta1/namespaces/{cluster.namespace}/ipaddresspools",
                body=each,
            )
            continue
        name, status = each["metadata"]["name"], each.pop("status")
        await client.create(SERVICES, each)
        await client.patch(
            SERVICES, ObjectKey(cluster.namespace, name), {"status": status}, subresource="status"
        )
        addresses[name] = status["loadBalancer"]["ingress"][0]["ip"]
    yield addresses
    for name in ("public", "shop", "taken-over"):
        with suppress(NotFound):
            await client.patch(ADDRESS_POOLS, ObjectKey("", name), {"metadata": {"finalizers": []}})
            await client.delete(ADDRESS_POOLS, ObjectKey("", name))
    await cluster.kubectl("delete", "crd", "ipaddresspools.metallb.io")


async def migrate(cluster: Cluster, *command: str) -> str:
    program = str(Path(sys.executable).with_name("fairlead"))
    child = await asyncio.create_subprocess_exec(
        *(program, "migrate", *command, "--kubeconfig", str(cluster.kubeconfig)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return output.decode()


class ServiceVersions:
    """A watch that records every version of the Services of a namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.shown: dict[str, set[tuple[str, ...]]] = {}
        self._reflector = Reflector(client, SERVICES, namespace=namespace)

    async def run(self) -> None:
        async for changes in self._reflector.changes():
            for key, service in changes.items():
                if service is not None and service.metadata.deletion_timestamp is None:
                    self.shown.setdefault(key.name, set()).add(_ips(service))


def _ips(service: Service) -> tuple[str, ...]:
    return tuple(entry.ip for entry in service.status.load_balancer.ingress)


async def test_no_address_changes_during_the_migration(
    cluster: Cluster, foreign_services: dict[str, str]
) -> None:
    coming = {name: address for name, address in foreign_services.items() if name != "classed"}
    output = await migrate(cluster, "services")
    assert all(address in output for address in foreign_services.values())
    await cluster.kubectl("apply", "-f", "-", stdin=await migrate(cluster, "pools"))
    witness = ServiceVersions(cluster.client, cluster.namespace)
    watching = asyncio.ensure_future(witness.run())
    cluster.pool = ("198.51.100.128/28",)
    await cluster.start_controller()

    for name in coming:
        await cluster.has(name, Accepted="True/Accepted", Programmed="True/Programmed")
    assert witness.shown == {name: {(address,)} for name, address in foreign_services.items()}, (
        "an address was missing for a moment"
    )
    granted = {
        each.spec.address: {holder.name for holder in each.spec.holders}
        for each in await cluster.client.list(ADDRESS_GRANTS)
    }
    assert granted["203.0.113.21"] == {"dns-tcp", "dns-udp"}
    assert {address for address in granted if granted[address] & set(coming)} == set(
        coming.values()
    )
    shown = await cluster.kubectl.service("classed")
    assert "fairlead.io/class" not in shown["metadata"]["annotations"], (
        "its class does not belong to Fairlead"
    )
    await cluster.described("ingress", "proxy-protocol has no effect", "must not expect a header")

    # As `migrate services` instructs, the foreign finalizer is removed, and Fairlead's finalizer is
    # added. After that a Service can be deleted, and its address is kept.
    patch = next(
        line.split(" -p '")[1].rstrip("'")
        for line in output.splitlines()
        if "kubectl patch service" in line
    )
    await cluster.kubectl("patch", "service", "ingress", "--type=merge", "-p", patch)

    async def has_only_our_finalizer() -> bool:
        shown = await cluster.kubectl.service("ingress")
        return bool(shown["metadata"].get("finalizers"))

    await until(has_only_our_finalizer, "Fairlead as the only finalizer on ingress")
    await cluster.kubectl("delete", "service", "ingress", "--wait=false")
    await cluster.gone("ingress")
    kept = {each.spec.address: each.spec for each in await cluster.client.list(ADDRESS_GRANTS)}[
        "203.0.113.99"
    ]
    assert kept.keep, "keep-floatingip keeps the address"

    # A class cannot be changed. The documented remedy works, and the address stays.
    await cluster.kubectl(
        "patch",
        "service",
        "classed",
        "--type=merge",
        "-p",
        '{"spec":{"type":"NodePort","loadBalancerClass":null}}',
    )
    await cluster.kubectl("annotate", "service", "classed", "fairlead.io/addresses=203.0.113.22")
    back = '{"spec":{"type":"LoadBalancer","loadBalancerClass":"fairlead.io/direct"}}'
    await cluster.kubectl("patch", "service", "classed", "--type=merge", "-p", back)
    assert await cluster.addresses("classed") == ["203.0.113.22"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await cluster.client.delete(ADDRESS_GRANTS, ObjectKey("", "203.0.113.99"))


async def test_the_way_back_keeps_every_address(
    cluster: Cluster, foreign_services: dict[str, str]
) -> None:
    """The Services are released, and a controller that reads the requests of MetalLB serves them
    next: here another controller of Fairlead. Without the requests it would choose other
    addresses."""
    taken = {name: address for name, address in foreign_services.items() if name != "classed"}
    await cluster.kubectl(
        "annotate", "service", "ingress", "loadbalancer.openstack.org/keep-floatingip-"
    )
    await cluster.kubectl("apply", "-f", "-", stdin=await migrate(cluster, "pools"))
    cluster.pool = ("198.51.100.128/28",)
    await cluster.start_controller()
    for name in taken:
        await cluster.has(name, Accepted="True/Accepted", Programmed="True/Programmed")

    requests = await migrate(cluster, "back", "--to", "metallb")
    assert {each["metadata"]["name"] for each in yaml.safe_load_all(requests)} == {
        "web",
        "ingress",
    }, "the others request their addresses already"
    command = "apply --server-side --field-manager=fairlead-migrate --force-conflicts -f -"
    await cluster.kubectl(*command.split(), stdin=requests)
    await cluster.stop_controller()
    cluster.default_class = None
    await cluster.start_controller()

    async def are_released() -> bool:
        shown = [await cluster.kubectl.service(name) for name in taken]
        return not any(
            "fairlead.io/class" in each["metadata"]["annotations"]
            or each["status"]["loadBalancer"].get("ingress")
            for each in shown
        )

    await until(are_released, "the release of all Services")
    await cluster.stop_controller()
    cluster.default_class = "fairlead.io/direct"
    await cluster.start_controller()
    assert {name: (await cluster.addresses(name))[0] for name in taken} == taken
