"""`fairlead doctor` in a lab whose roles and pods are real processes: a lab that works has no
finding, whatever it does, and a role that is gone is named.

The faults of objects are injected in tests/doctor."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.kubectl import Kubectl, addresses_of, service

from fairlead.lab.site import Site

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PROGRAM = Path(sys.executable).with_name("fairlead")
DEADLINE_S = 90.0
Manifest = dict[str, Any]


def pod(name: str, on: str) -> Manifest:
    ports = [{"name": "web", "containerPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "web"}},
        "spec": {
            "nodeName": on,
            "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "echo", "image": "echo", "ports": ports}],
        },
    }


@pytest.fixture
def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


async def apply(kubectl: Kubectl, *objects: Manifest) -> None:
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


async def addresses(kubectl: Kubectl) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not addresses_of(await kubectl.service("web")):
            await asyncio.sleep(0.05)


async def found(site: Site, *options: str) -> list[tuple[str, str]]:
    """Run the command on a node. Return the codes and subjects of its findings."""
    kubeconfig = str(site.directory.kubeconfig_inside)
    command = [str(PROGRAM), "doctor", "--kubeconfig", kubeconfig, "-A", "-o", "json", *options]
    status, output, errors = await site.exec("node1", command, timeout_s=120)
    assert errors == ""
    findings = json.loads(output)["findings"]
    assert status == bool(findings)
    return [(each["code"], each["subject"]) for each in findings]


async def finds(site: Site, *wanted: tuple[str, str]) -> None:
    """Wait until the command finds exactly this."""
    async with asyncio.timeout(DEADLINE_S):
        while await found(site, "--grace", "1") != list(wanted):
            pass


@pytest_asyncio.fixture(loop_scope="module")
async def clean(kubectl: Kubectl) -> AsyncIterator[None]:
    yield
    await kubectl("delete", "services", "--all", "--timeout=60s")
    await kubectl("delete", "pods", "--all", "--timeout=60s")


async def test_a_lab_that_works_has_no_finding_whatever_it_does(
    site: Site, kubectl: Kubectl, clean: None
) -> None:
    async def during(*steps: Callable[[], Awaitable[Any]]) -> None:
        """Run the command while the steps are taken, and after them."""

        async def take() -> None:
            for step in steps:
                await step()

        taking = asyncio.create_task(take())
        while not taking.done():
            assert await found(site) == []
        await taking
        assert await found(site) == []

    assert await found(site) == []
    await during(
        lambda: apply(kubectl, pod("a1", "node1"), pod("a2", "node2"), service("web")),
        site.await_pods,
        lambda: addresses(kubectl),
    )
    assert await found(site, "--grace", "1") == []
    await during(  # a rollout
        lambda: apply(kubectl, pod("b1", "node1")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "a1"),
        lambda: apply(kubectl, pod("b2", "node3")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "a2"),
    )
    await during(  # scaling
        lambda: apply(kubectl, pod("b3", "node3"), pod("b4", "node2")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "b3"),
    )
    await during(  # a drain
        lambda: kubectl("cordon", "node2"),
        lambda: kubectl("delete", "pod", "b4"),
        lambda: kubectl("uncordon", "node2"),
    )
    assert await found(site, "--grace", "1") == []


async def test_a_gateway_that_is_gone_is_named(site: Site) -> None:
    await site.kill_role("gw2")
    try:
        await finds(site, ("GatewayStale", "gateway gw2"))
    finally:
        await site.start_role("gw2")
    await finds(site)


async def test_the_finalizer_of_a_controller_that_is_gone_is_named(
    site: Site, kubectl: Kubectl, clean: None
) -> None:
    await apply(kubectl, pod("a1", "node1"), service("web"))
    await site.await_pods()
    await addresses(kubectl)
    control = site.topology.of("control")[0].name
    await site.kill_role(control)
    try:
        await kubectl("delete", "service", "web", "--wait=false")
        await finds(site, ("FinalizerOrphaned", "Service default/web"))
    finally:
        await site.start_role(control)
    await finds(site)
