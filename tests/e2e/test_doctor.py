"""`fairlead doctor` in a lab: each fault is really made, the command names it and nothing else, and
after the remedy it names nothing. Remedies that are commands are executed as they are printed.

In: manifests, and commands of kubectl. Out: the output of the command, which runs on a node of the
lab with the lab's kubeconfig."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.doctor import DEADLINE_S, PROGRAM, Doctor, Fault, Manifest, apply, pod
from tests.e2e.kubectl import Kubectl, addresses_of, service

from fairlead.kube.client import Client
from fairlead.kube.objects import EXCLUDE_LABEL, SERVICES
from fairlead.lab.objects import READY_ANNOTATION
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

WEB = "Service default/web"
PORTS = 100
"""So many tables do not fit into a hundredth of 1 MiB."""


def pool(*addresses: str) -> Manifest:
    return {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": "tiny"},
        "spec": {"addresses": list(addresses), "autoAssign": False},
    }


def web(**fields: Any) -> Manifest:
    return service("web", **fields)


SOLO = pod("solo", "web", "node3")
TINY = {"fairlead.io/address-pool": "tiny"}
PROXY = {"loadBalancerClass": "fairlead.io/proxy"}
STATIC = {"loadBalancerClass": "example.com/static"}
MANY = [pod("m1", "web", "node1"), pod("m2", "web", "node1"), pod("m3", "web", "node2")]
RANGES = {"loadBalancerSourceRanges": ["198.51.100.0/24"]}
DUAL = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}
STATUS = '{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.99","ipMode":"VIP"}]}}}'
SHOW_STATIC = ["patch", "service", "web", "--subresource=status", "--type=merge", "-p", STATUS]
TARGET_8080 = '[{"op":"replace","path":"/spec/ports/0/targetPort","value":8080}]'
TWO_ADDRESSES = '{"spec":{"addresses":["203.0.114.8-203.0.114.9"]}}'
FAULTS = [
    Fault("selector-matches-nothing", [SOLO, web(selector={"app": "wep"})]),
    Fault(
        "target-port-name-unknown",
        [pod("solo", "web", "node3", port="http"), web()],
    ),
    Fault(
        "target-port-closed",
        [SOLO, web(ports=[{"name": "web", "port": 80, "targetPort": 8081}])],
        fix=[
            ["patch", "service", "web", "--type=json", "-p", TARGET_8080],
        ],
        options=["--connect"],
    ),
    Fault(
        "pods-not-ready",
        [SOLO, web()],
        make=[["annotate", "pod", "solo", f"{READY_ANNOTATION}=false"]],
        fix=[["annotate", "pod", "solo", f"{READY_ANNOTATION}-"]],
    ),
    Fault(
        "class-unserved",
        [SOLO, web(loadBalancerClass="example.com/none")],
        fix=[["delete", "service", "web"]],
    ),
    Fault(
        "class-unserved",
        [SOLO, web(loadBalancerClass="fairlead.io/driect")],
        fix=[["delete", "service", "web"]],
    ),
    Fault(
        "address-elsewhere",
        [SOLO, web(annotations={"fairlead.io/addresses": "192.0.2.77"})],
        fix=[["annotate", "service", "web", "fairlead.io/addresses-"]],
    ),
    Fault(
        "pool-exhausted",
        [pool("203.0.114.8-203.0.114.8"), SOLO]
        + [service(name, annotations=TINY) for name in ("first", "web")],
        fix=[
            ["patch", "addresspool", "tiny", "--type=merge", "-p", TWO_ADDRESSES],
        ],
        object="AddressPool tiny",
    ),
    Fault(
        "excluded-node",
        [SOLO, web()],
        make=[["label", "node", "node3", f"{EXCLUDE_LABEL}="]],
    ),
    Fault("source-range-lacks-pods", [SOLO, web(**RANGES)]),
    Fault(
        "source-range-lacks-family",
        [SOLO, web(**DUAL, loadBalancerSourceRanges=["0.0.0.0/0"])],
    ),
    Fault("affinity-behind-nat", [*MANY, web(**PROXY, sessionAffinity="ClientIP")]),
    Fault(
        "unfair-by-placement",
        [*MANY, web(**STATIC)],
        make=[SHOW_STATIC],
        fix=[["delete", "pod", "m2"]],
    ),
    Fault("nodeport-missing", [SOLO, web(**PROXY, allocateLoadBalancerNodePorts=False)]),
]


@pytest.fixture
def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


@pytest_asyncio.fixture(loop_scope="module")
async def doctor(site: Site, kubectl: Kubectl) -> AsyncIterator[Doctor]:
    """The command, in a lab without Services, pods and pools of earlier tests."""
    yield Doctor(site)
    await kubectl("delete", "services", "--all", "--timeout=60s")
    await kubectl("delete", "pods", "--all", "--timeout=60s")
    await kubectl("delete", "addresspools", "--all", "--timeout=60s")


async def addresses(kubectl: Kubectl, name: str = "web") -> list[str]:
    """Wait until a Service has an address, and return its addresses."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := addresses_of(await kubectl.service(name))):
            await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "fault", FAULTS, ids=[f"{number}-{each.id}" for number, each in enumerate(FAULTS)]
)
async def test_a_fault_is_named_until_its_remedy_is_carried_out(
    fault: Fault, doctor: Doctor, kubectl: Kubectl
) -> None:
    await fault.play(doctor, kubectl)


async def test_only_terminating_pods_serve(site: Site, doctor: Doctor, kubectl: Kubectl) -> None:
    await apply(kubectl, pod("solo", "web", "node3", grace_s=60), web())
    await site.await_pods()
    (address,) = await addresses(kubectl)
    async with AsyncExitStack() as stack:
        _, writer = await site.connect("client1", address, 80)
        stack.callback(writer.close)
        await kubectl("delete", "pod", "solo", "--wait=false")
        await doctor.finds([("all-terminating", WEB)])
        await apply(kubectl, pod("next", "web", "node2"))
        await doctor.finds([])


async def test_two_controllers_write_the_same_status(
    site: Site, client: Client, doctor: Doctor, kubectl: Kubectl
) -> None:
    await apply(kubectl, SOLO, web())
    await site.await_pods()
    await addresses(kubectl)

    async def other() -> None:
        body = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.99"}]}}}
        while True:
            await client.patch(
                SERVICES, ("default", "web"), body, subresource="status", field_manager="other-lb"
            )
            await asyncio.sleep(0.2)

    writer = asyncio.create_task(other())
    try:
        await doctor.finds([("two-controllers", WEB)])
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
    await doctor.finds([])


async def test_the_finalizer_of_a_controller_that_is_gone(
    site: Site, doctor: Doctor, kubectl: Kubectl
) -> None:
    await apply(kubectl, SOLO, web())
    await site.await_pods()
    await addresses(kubectl)
    control = site.topology.of("control")[0].name
    await site.kill_role(control)
    try:
        await kubectl("delete", "service", "web", "--wait=false")
        (found,) = await doctor.finds([("finalizer-orphaned", WEB)])
        await doctor.carry_out(found)
        await doctor.finds([])
    finally:
        await site.start_role(control)


async def test_a_gateway_that_is_gone(site: Site, doctor: Doctor) -> None:
    await site.kill_role("gw2")
    try:
        await doctor.finds([("gateway-stale", "gateway gw2")])
    finally:
        await site.start_role("gw2")
    await doctor.finds([])


async def test_a_gateway_with_another_configuration(
    site: Site, doctor: Doctor, kubectl: Kubectl
) -> None:
    await site.stop_role("gw2")
    own = yaml.safe_load(site.directory.config_of("gw2").read_text())
    own["gateway"] |= {"tableMemoryMiB": 1, "namespaceShare": 0.01}
    path = site.directory.path / "fairlead-gw2.yaml"
    path.write_text(yaml.safe_dump(own))
    try:
        await site.start_role("gw2")
        ports = [{"name": f"p{n}", "port": 1000 + n, "targetPort": "web"} for n in range(PORTS)]
        await apply(kubectl, *MANY, web(ports=ports))
        await doctor.finds([("gateways-differ", "gateway gw2")])
        await site.stop_role("gw2")
    finally:
        path.unlink()
    await site.start_role("gw2")
    await doctor.finds([])


async def test_a_fault_of_a_service_of_another_load_balancer(
    site: Site, doctor: Doctor, kubectl: Kubectl
) -> None:
    await apply(kubectl, SOLO, web(**STATIC, selector={"app": "wep"}))
    await site.await_pods()
    await kubectl(*SHOW_STATIC)
    (found,) = await doctor.finds([("selector-matches-nothing", WEB)])
    await doctor.carry_out(found)
    await doctor.finds([])


async def test_a_healthy_lab_has_no_finding_whatever_it_does(
    site: Site, doctor: Doctor, kubectl: Kubectl
) -> None:
    async def during(*steps: Callable[[], Awaitable[Any]]) -> None:
        """Run the command with the default options while the steps are taken, and after them."""

        async def take() -> None:
            for step in steps:
                await step()

        taking = asyncio.create_task(take())
        while not taking.done():
            assert await doctor.findings() == []
        await taking
        assert await doctor.findings() == []

    assert await doctor.findings() == []
    await during(
        lambda: apply(kubectl, pod("a1", "web", "node1"), pod("a2", "web", "node2"), web()),
        site.await_pods,
        lambda: addresses(kubectl),
    )
    await during(  # a rollout
        lambda: apply(kubectl, pod("b1", "web", "node1")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "a1"),
        lambda: apply(kubectl, pod("b2", "web", "node3")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "a2"),
    )
    await during(  # scaling
        lambda: apply(kubectl, pod("b3", "web", "node3"), pod("b4", "web", "node2")),
        site.await_pods,
        lambda: kubectl("delete", "pod", "b3"),
    )
    await during(  # a drain
        lambda: kubectl("cordon", "node2"),
        lambda: kubectl("delete", "pod", "b4"),
        lambda: kubectl("uncordon", "node2"),
    )


async def test_what_was_not_examined_is_listed(doctor: Doctor) -> None:
    status, output = await doctor()
    assert status == 0
    assert output.startswith("no findings, 0 Services examined")
    assert "not examined: ports of pods: no connection is made without --connect" in output


async def test_without_an_api_server_the_status_is_2(site: Site, tmp_path: Path) -> None:
    command = [str(PROGRAM), "doctor", "--kubeconfig", str(tmp_path / "absent")]
    status, output, errors = await site.exec("node1", command)
    assert (status, output) == (2, "")
    assert str(tmp_path / "absent") in errors


async def test_an_unknown_service_is_no_healthy_service(doctor: Doctor) -> None:
    assert await doctor("unknown") == (2, "")
