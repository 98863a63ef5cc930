"""`fairlead doctor` in a cluster without Fairlead, whose load balancer is made by hand: it writes
addresses into the status of a Service."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.doctor import Doctor, Fault, Manifest, pod
from tests.e2e.kubectl import Kubectl, service

from fairlead.kube.objects import EXCLUDE_LABEL, SERVICES
from fairlead.lab.objects import READY_ANNOTATION
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SOLO = pod("solo", "web", "node3")
MANY = [pod("m1", "web", "node1"), pod("m2", "web", "node1"), pod("m3", "web", "node2")]
FINALIZER = '{"metadata":{"finalizers":["example.com/load-balancer"]}}'


def web(**fields: Any) -> Manifest:
    return service("web", **fields)


def publish(*addresses: str, mode: str = "VIP") -> Sequence[str]:
    """Return the command by which the load balancer publishes addresses."""
    ingress = ",".join(f'{{"ip":"{each}","ipMode":"{mode}"}}' for each in addresses)
    body = f'{{"status":{{"loadBalancer":{{"ingress":[{ingress}]}}}}}}'
    return ["patch", "service", "web", "--subresource=status", "--type=merge", "-p", body]


VIP = publish("192.0.2.99")
FAULTS = [
    Fault("selector-matches-nothing", [SOLO, web(selector={"app": "wep"})], [VIP]),
    Fault("target-port-name-unknown", [pod("solo", "web", "node3", port="http"), web()], [VIP]),
    Fault(
        "target-port-closed",
        [SOLO, web(ports=[{"name": "web", "port": 80, "targetPort": 8081}])],
        [VIP],
        fix=[["delete", "service", "web"]],
        options=["--connect"],
    ),
    Fault(
        "pods-not-ready",
        [SOLO, web()],
        [VIP, ["annotate", "pod", "solo", f"{READY_ANNOTATION}=false"]],
        fix=[["annotate", "pod", "solo", f"{READY_ANNOTATION}-"]],
    ),
    Fault("class-unserved", [SOLO, web()], fix=[VIP]),
    Fault("excluded-node", [SOLO, web()], [VIP, ["label", "node", "node3", f"{EXCLUDE_LABEL}="]]),
    Fault(
        "source-range-lacks-pods",
        [SOLO, web(loadBalancerSourceRanges=["198.51.100.0/24"])],
        [VIP],
    ),
    Fault(
        "source-range-lacks-family",
        [SOLO, web(ipFamilyPolicy="RequireDualStack", loadBalancerSourceRanges=["0.0.0.0/0"])],
        [publish("192.0.2.99", "2001:db8::99")],
    ),
    Fault(
        "affinity-behind-nat",
        [*MANY, pod("m4", "web", "node2"), web(sessionAffinity="ClientIP")],
        [publish("192.0.2.99", mode="Proxy")],
    ),
    Fault("unfair-by-placement", [*MANY, web()], [VIP], fix=[["delete", "pod", "m2"]]),
    Fault(
        "finalizer-orphaned",
        [SOLO, web()],
        [
            VIP,
            ["patch", "service", "web", "--type=merge", "-p", FINALIZER],
            ["delete", "service", "web", "--wait=false"],
        ],
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"doco{os.getpid()}", nodes=3, gateways=0, roles=False) as site:
        yield site


@pytest.fixture
def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


@pytest_asyncio.fixture(loop_scope="module")
async def doctor(site: Site, kubectl: Kubectl) -> AsyncIterator[Doctor]:
    yield Doctor(site)
    await kubectl("delete", "services", "--all", "--timeout=60s")
    await kubectl("delete", "pods", "--all", "--timeout=60s")


@pytest.mark.parametrize("fault", FAULTS, ids=[each.id for each in FAULTS])
async def test_a_fault_is_named_until_its_remedy_is_carried_out(
    fault: Fault, doctor: Doctor, kubectl: Kubectl
) -> None:
    await fault.play(doctor, kubectl)


async def test_two_controllers_write_the_same_status(
    site: Site, doctor: Doctor, kubectl: Kubectl
) -> None:
    async def write() -> None:
        async with site.client() as client:
            number = 0
            while True:
                number += 1
                body = {"status": {"loadBalancer": {"ingress": [{"ip": f"192.0.2.{number % 2}"}]}}}
                await client.patch(
                    SERVICES,
                    ("default", "web"),
                    body,
                    subresource="status",
                    field_manager=f"balancer-{number % 2}",
                )
                await asyncio.sleep(0.2)

    await kubectl.apply("web")
    await site.apply([SOLO])
    await site.await_pods()
    writing = asyncio.create_task(write())
    try:
        await doctor.finds([("two-controllers", "Service default/web")])
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    await doctor.finds([])
