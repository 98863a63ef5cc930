"""Unusual endpoints and nodes, with packets: handwritten slices, endpoints without a node, no node
ports, nodes that are drained, ports that are not published.

In: objects as users and autoscalers write them. Out: which pod answers a client, and which address
it sees."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.changes import pod
from tests.e2e.kubectl import Kubectl, addresses_of
from tests.e2e.load import fetch
from tests.e2e.oracle import Answer, Observed, Source, Target
from tests.e2e.packets import LAST_ANSWER_S, call, read_cluster, sources_of
from tests.pauses import pauses

from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, PODS, SERVICES, ObjectKey
from fairlead.lab import manifests
from fairlead.lab.objects import PODS as LAB_PODS
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60.0
PACKETS = 32
"""The number of packets of one round. If two equally likely pods may answer, all packets of a round
reach the same pod once in two thousand million rounds."""
PAUSE_S = 0.05
"""The pause between two rounds. A gateway sends at most 1,000 refusals per second, and drops
further packets; these rounds stay below the limit, so that a refusal is never mistaken for silence.
"""


@pytest.fixture
def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def pods(site: Site, client: Client) -> None:
    await manifests.apply(
        client, [pod("w1", "web", "node1"), pod("w2", "web", "node2"), pod("u", "late", "node3")]
    )
    await site.await_pods()


@pytest_asyncio.fixture(loop_scope="module")
async def clean(kubectl: Kubectl) -> AsyncIterator[None]:
    yield
    await kubectl("delete", "services", "--all", "--timeout=10s")


@pytest_asyncio.fixture(loop_scope="module")
async def outside_client(site: Site, client: Client) -> Source:
    """A client outside the cluster."""
    return next(
        source
        for source in sources_of(site, await read_cluster(client))
        if source.name == "client1"
    )


async def assigned_address(kubectl: Kubectl, name: str = "web") -> str:
    async with asyncio.timeout(DEADLINE_S):
        waits = pauses()
        while not (found := addresses_of(await kubectl.service(name))):
            await asyncio.sleep(next(waits))
    return found[0]


async def await_results(
    site: Site,
    source: Source,
    address: str,
    port: int,
    wanted: str,
    holds: Callable[[set[Observed]], bool],
) -> set[Observed]:
    """Send rounds of packets until the condition holds for a whole round, and return the results of
    this round. Fail with the results of the last round if no round meets the condition in time."""
    found: Counter[Observed] = Counter()
    rounds = 0
    target = Target(address, port, "TCP")
    one_call = partial(call, site, source, target, timeout_s=LAST_ANSWER_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                calls = (one_call() for _ in range(PACKETS))
                found = Counter(await asyncio.gather(*calls))
                rounds += 1
                if holds(set(found)):
                    return set(found)
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        observed = ", ".join(f"{count} times {one}" for one, count in found.items())
        pytest.fail(
            f"{source.name} to {address} port {port}: expected {wanted} within {DEADLINE_S} s; "
            f"results of the last of {rounds} rounds: {observed or 'nothing yet'}"
        )


async def await_exact_results(
    site: Site,
    source: Source,
    address: str,
    expected: set[Observed],
    *,
    port: int = 80,
) -> None:
    """Wait until packets of the source have exactly these results."""
    await await_results(site, source, address, port, f"exactly {expected}", expected.__eq__)


async def pod_addresses(client: Client, *names: str) -> list[str]:
    found = [await client.get(PODS, ObjectKey("default", name)) for name in names]
    return [each.status.pod_ips[0].ip for each in found]


async def write_slice(client: Client, name: str, rows: Sequence[tuple[str, str | None]]) -> None:
    """Write endpoints (address, node or none) of Service web."""
    labels = {
        "kubernetes.io/service-name": "web",
        "endpointslice.kubernetes.io/managed-by": "a-test",
    }
    endpoints: list[dict[str, Any]] = [
        {"addresses": [address], "conditions": {"ready": True}} for address, _ in rows
    ]
    for endpoint, (_, node) in zip(endpoints, rows, strict=True):
        endpoint |= {"nodeName": node} if node else {}
    body = {
        "metadata": {"labels": labels},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "web", "port": 8080}],
    }
    await client.apply(
        ENDPOINT_SLICES, ObjectKey("default", name), body, field_manager="a-test", force=True
    )


async def test_handwritten_slices_are_served_with_and_without_node_names(
    site: Site, client: Client, kubectl: Kubectl, outside_client: Source, clean: None
) -> None:
    w1, w2 = await pod_addresses(client, "w1", "w2")
    await kubectl.apply("web", selector=None, externalTrafficPolicy="Cluster")
    await write_slice(client, "hand-1", [(w1, None)])
    await write_slice(client, "hand-2", [(w2, None)])
    address = await assigned_address(kubectl)
    nodes = {await client_address(client, name) for name in ("node1", "node2", "node3")}
    await answered_by(site, outside_client, address, {"default/w1", "default/w2"}, seen=nodes)
    # With policy Local an endpoint without a node counts for no node: packets are dropped, but the
    # address stays.
    await kubectl("patch", "service", "web", "-p", '{"spec":{"externalTrafficPolicy":"Local"}}')
    await await_exact_results(site, outside_client, address, {"silence"})
    assert await assigned_address(kubectl) == address
    await write_slice(client, "hand-1", [(w1, "node1")])
    me = outside_client.address(address)
    await await_exact_results(site, outside_client, address, {Answer("default/w1", me)})
    await write_slice(client, "hand-2", [(w2, "node2")])
    await await_exact_results(
        site, outside_client, address, {Answer("default/w1", me), Answer("default/w2", me)}
    )
    for name in ("hand-1", "hand-2"):
        await client.delete(ENDPOINT_SLICES, ObjectKey("default", name))


async def client_address(client: Client, node: str) -> str:
    return (await client.get(NODES, ObjectKey("", node))).status.addresses[0].address


async def answered_by(
    site: Site, source: Source, address: str, names: set[str], *, seen: set[str]
) -> None:
    """Check that all of these pods answer, and see one of these addresses, at whichever gateway a
    packet enters."""

    def holds(found: set[Observed]) -> bool:
        return {each.pod if isinstance(each, Answer) else each for each in found} == names

    found = await await_results(site, source, address, 80, f"answers of {names}", holds)
    assert {each.seen for each in found if isinstance(each, Answer)} <= seen


async def test_without_node_ports_members_are_confirmed_and_serve(
    site: Site, kubectl: Kubectl, outside_client: Source, clean: None
) -> None:
    await kubectl.apply("web", allocateLoadBalancerNodePorts=False)
    address = await assigned_address(kubectl)
    me = outside_client.address(address)
    await await_exact_results(
        site, outside_client, address, {Answer("default/w1", me), Answer("default/w2", me)}
    )
    spec = (await kubectl.service("web"))["spec"]
    assert "nodePort" not in spec["ports"][0]
    plan = (await fetch(site, "gw1", "/state"))["services"]["default/web"]["plan"]
    assert plan["health_monitor"]["port"] == spec["healthCheckNodePort"]
    (listener,) = plan["listeners"]
    assert {member["node"]: member["state"] for member in listener["members"]} == {
        "node1": "active",
        "node2": "active",
    }
    assert not plan.get("notes"), (
        "the health ports have answered, so every member must be confirmed"
    )


async def until_unready(client: Client, name: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get(LAB_PODS, ObjectKey("default", name))).ready:
            await asyncio.sleep(0.05)


async def test_pods_are_served_before_they_are_ready_with_publish_not_ready_addresses(
    site: Site, client: Client, kubectl: Kubectl, outside_client: Source, clean: None
) -> None:
    await kubectl("annotate", "pod", "u", "lab.fairlead.io/ready=false")
    await until_unready(client, "u")
    await kubectl.apply("web", selector={"app": "late"})
    address = await assigned_address(kubectl)
    # The Service has no endpoints on any node, so the gateway refuses connections.
    await await_exact_results(site, outside_client, address, {"refused"})
    await kubectl("patch", "service", "web", "-p", '{"spec":{"publishNotReadyAddresses":true}}')
    await await_exact_results(
        site, outside_client, address, {Answer("default/u", outside_client.address(address))}
    )
    await kubectl("annotate", "pod", "u", "lab.fairlead.io/ready-")


LABEL = "node.kubernetes.io/exclude-from-external-load-balancers"
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}


@pytest.mark.parametrize("how", ["label", "taint"])
async def test_a_node_that_leaves_keeps_its_connections(
    site: Site, client: Client, kubectl: Kubectl, outside_client: Source, clean: None, how: str
) -> None:
    await kubectl.apply("web")
    address = await assigned_address(kubectl)
    me = outside_client.address(address)
    both: set[Observed] = {Answer("default/w1", me), Answer("default/w2", me)}
    await await_exact_results(site, outside_client, address, both)
    talks = [await site.connect("client1", address, 80) for _ in range(PACKETS)]
    try:
        before = [await answering_pod(*talk) for talk in talks]
        assert set(before) == {"w1", "w2"}
        if how == "label":
            await kubectl("label", "node", "node1", f"{LABEL}=")
        else:
            await client.patch(NODES, ObjectKey("", "node1"), {"spec": {"taints": [TAINT]}})
        await await_exact_results(site, outside_client, address, {Answer("default/w2", me)})
        assert [await answering_pod(*talk) for talk in talks] == before, (
            "open connections stay where they are"
        )
    finally:
        for _, writer in talks:
            writer.close()
        await kubectl("label", "node", "node1", f"{LABEL}-")
        await client.patch(NODES, ObjectKey("", "node1"), {"spec": {"taints": None}})
    await await_exact_results(site, outside_client, address, both)


async def answering_pod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Return the pod that answers on an open connection."""
    writer.write(b"who\n")
    async with asyncio.timeout(DEADLINE_S):
        return str(json.loads(await reader.readline())["pod"])


async def test_a_port_with_an_error_in_the_status_is_not_served(
    site: Site, client: Client, kubectl: Kubectl, outside_client: Source, clean: None
) -> None:
    """The controller is stopped, so that the status written by the test stays unchanged."""
    ports = [
        {"name": "a", "port": 80, "targetPort": "web"},
        {"name": "b", "port": 81, "targetPort": "web"},
    ]
    await kubectl.apply("web", ports=ports)
    address = await assigned_address(kubectl)
    me = outside_client.address(address)
    both: set[Observed] = {Answer("default/w1", me), Answer("default/w2", me)}
    await await_exact_results(site, outside_client, address, both, port=81)
    await site.stop_role("control")
    try:
        shown = [
            {"port": 80, "protocol": "TCP"},
            {"port": 81, "protocol": "TCP", "error": "fairlead.io/PortConflict"},
        ]
        status = {
            "status": {
                "loadBalancer": {"ingress": [{"ip": address, "ipMode": "VIP", "ports": shown}]}
            }
        }
        await client.patch(SERVICES, ObjectKey("default", "web"), status, subresource="status")
        await await_no_answer(site, outside_client, address, 81)
        await await_exact_results(site, outside_client, address, both)
    finally:
        await site.start_role("control")
    await await_exact_results(site, outside_client, address, both, port=81)


async def await_no_answer(site: Site, source: Source, address: str, port: int) -> None:
    """Wait until no pod answers. The reaction of a router to such packets is not tested."""

    def holds(found: set[Observed]) -> bool:
        return not any(isinstance(each, Answer) for each in found)

    await await_results(site, source, address, port, "no answer of any pod", holds)
