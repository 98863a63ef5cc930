"""Clients inside the cluster reach a Service of class proxy through a gateway, and therefore with a
PROXY header. Clients are pods on nodes with and without an endpoint, the endpoint itself, nodes,
and pods in the host network. The nodes run `fairlead node`, and then the real kube-proxy. Switching
the header on and off for a Service in use breaks no connection, from any client, if the pods accept
both forms."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.changes import pod
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import OPEN_CONNECTIONS, Load, output
from tests.e2e.proxied import DEADLINE_S, PATIENCE_S, PROXY, await_described, call, ingress, until

from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, LoadBalancerIngress, ObjectKey
from fairlead.lab import kubeproxy, manifests
from fairlead.lab.site import Site
from fairlead.plan.addresses import shown_address
from fairlead.plan.classes import DIRECT

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PODS = {
    "own": ("web", "node1", False),
    "hosted": ("web", "node2", True),
    "beside": ("idle", "node1", False),
    "away": ("idle", "node3", False),
}
"""The pods: app, node, and whether the pod is in the host network. Packets of `hosted` are those of
node2."""
CALLERS = {
    "client1": "client1",
    "node1": "node1",
    "node2": "node2",
    "node3": "node3",
    "default/own": "node1",
    "default/beside": "node1",
    "default/away": "node3",
}
"""The client address that a pod should see: pods reach outside addresses with the node's address
(`lab.wiring`)."""
HEADER, SUFFIX = "fairlead.io/proxy-protocol", "fairlead.io/hostname-suffix"
PROXIED: Mapping[str, dict[str, Any]] = {
    "first": {"annotations": {HEADER: "v1"}},
    "second": {"annotations": {HEADER: "v2"}, "externalTrafficPolicy": "Cluster"},
    "named": {"annotations": {HEADER: "v2", SUFFIX: "nip.io"}},
}
CALLS = 8
"""The number of calls from each client to each address: enough to reach every pod through either
gateway."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown(
    site: Site, client: Client, kubectl: Kubectl
) -> AsyncIterator[Mapping[str, Sequence[LoadBalancerIngress]]]:
    """Return the addresses in the status of each Service, of both families."""
    made = {name: pod(name, app, node) for name, (app, node, _) in PODS.items()}
    for name, (_, _, hosted) in PODS.items():
        made[name]["spec"]["hostNetwork"] = hosted
    await manifests.apply(client, list(made.values()))
    families = {"ipFamilyPolicy": "RequireDualStack"}
    for name, fields in PROXIED.items():
        await kubectl.apply(name, loadBalancerClass=PROXY, **families, **fields)
    await kubectl.apply("direct", loadBalancerClass=DIRECT.name, **families)
    await site.await_pods()
    yield {name: await entries(client, name) for name in [*PROXIED, "direct"]}


async def entries(client: Client, name: str) -> Sequence[LoadBalancerIngress]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            service = await client.get(SERVICES, ObjectKey("default", name))
            if len(found := service.status.load_balancer.ingress) == 2:
                return found
            await asyncio.sleep(0.05)


async def check_all_are_identified(
    site: Site, shown: Mapping[str, Sequence[LoadBalancerIngress]]
) -> None:
    """Check that all clients are answered, and that the pods see the client's address. Clients
    resolve no names: for a hostname they call its address."""
    for name, fields in PROXIED.items():
        for address in filter(None, map(shown_address, shown[name])):
            # With policy Cluster a node may pass a connection to another node, with its own address
            # as the source.
            senders = (
                site.topology.of("gateway")
                if "externalTrafficPolicy" not in fields
                else site.topology.hosts
            )
            for caller, seen_as in CALLERS.items():
                answers = await await_both_pods(site, caller, address)
                family = ":" in address
                named = {(answer.get("proxy"), answer.get("proxy_peer")) for answer in answers}
                assert named == {
                    (fields["annotations"][HEADER], site.topology.host(seen_as).addresses[family])
                }, (caller, answers)
                assert {answer["peer"] for answer in answers} <= {
                    host.addresses[family] for host in senders
                }, (caller, answers)


async def await_both_pods(site: Site, caller: str, address: str) -> list[dict[str, Any]]:
    """Wait for a sequence of calls that both pods, and no other, answer. Each gateway confirms the
    nodes separately, and with policy Cluster a node chooses a pod for each call."""
    answers: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while {answer.get("pod") for answer in answers} != {"own", "hosted"}:
                answers = [await call(site, caller, address) for _ in range(CALLS)]
    except TimeoutError:
        pytest.fail(f"{caller} to {address}: last answers {answers}")
    return answers


async def check_nodes_answer_only_for_direct(
    site: Site, shown: Mapping[str, Sequence[LoadBalancerIngress]]
) -> None:
    """Check that without any gateway a client inside the cluster reaches a Service of class direct
    through its own node, and no Service of another class."""
    await site.route_vips([])
    try:
        for entry in shown["direct"]:
            assert (await call(site, "default/away", entry.ip)).get("pod") in ("own", "hosted")
        for name in PROXIED:
            assert await call(site, "default/away", shown_address(shown[name][0]) or "") == {}
    finally:
        await site.route_vips([gateway.name for gateway in site.topology.gateways])


async def test_pods_see_clients_inside_the_cluster_with_fairlead_node(
    site: Site, shown: Mapping[str, Sequence[LoadBalancerIngress]]
) -> None:
    assert [entry.ip_mode for entry in shown["direct"]] == ["VIP", "VIP"]
    assert [entry.ip_mode for name in ("first", "second") for entry in shown[name]] == ["Proxy"] * 4
    assert [entry.ip for entry in shown["named"]] == ["", ""]
    await check_all_are_identified(site, shown)
    await check_nodes_answer_only_for_direct(site, shown)


async def test_switching_the_proxy_header_breaks_no_connection(
    site: Site, kubectl: Kubectl, shown: Mapping[str, Sequence[LoadBalancerIngress]]
) -> None:
    """Pods accept connections with and without a header. Clients inside the cluster use the
    gateways all the time."""
    await kubectl.apply("live", loadBalancerClass=PROXY)
    published = await ingress(kubectl, "live", lambda entry: entry["ipMode"] == "Proxy")
    address = published["ip"]
    await await_both_pods(site, "client1", address)
    outside, within = (
        Load(site, address, host=host, timeout_s=PATIENCE_S) for host in ("client1", "default/away")
    )
    async with outside, within:
        for header, suffix in (("v2", "none"), ("v1", "nip.io"), ("false", "none")):
            await kubectl.apply(
                "live", loadBalancerClass=PROXY, annotations={HEADER: header, SUFFIX: suffix}
            )
            for caller in ("client1", "default/away"):
                await until(site, caller, address, begins_with(header))
            if suffix == "none":
                assert await ingress(kubectl, "live", lambda entry: "ip" in entry) == published
            else:
                named = await ingress(kubectl, "live", lambda entry: "ip" not in entry)
                assert named["hostname"] == f"{address}.nip.io"
        for load in (outside, within):
            period = await load.take()
            assert (period.failed, period.broken, period.open_connections) == (
                0,
                [],
                OPEN_CONNECTIONS,
            ), period
    await await_described(
        kubectl,
        "live",
        "ProxyHeaderSwitched",
        "a PROXY header v2, open connections keep no",
        "keep a PROXY header v1:",
    )


def begins_with(header: str) -> Callable[[dict[str, Any]], bool]:
    """Return whether the answer reports a connection with this header; `false`: without one."""
    return lambda answer: bool(answer) and answer.get("proxy", "false") == header


async def test_pods_see_clients_inside_the_cluster_with_kube_proxy(
    site: Site, shown: Mapping[str, Sequence[LoadBalancerIngress]], kube_proxy: Path
) -> None:
    async def replace(node: str) -> None:
        await site.stop_role(node)
        code, answer, errors = await site.exec(
            node, ["fairlead", "node", "--config", str(site.directory.config), "--cleanup"]
        )
        assert code == 0, answer + errors
        await kubeproxy.start(site, node)
        tables = await output(site, node, "nft", "list", "tables")
        assert "kube-proxy" in tables
        assert "fairlead" not in tables

    await asyncio.gather(*(replace(node.name) for node in site.topology.of("node")))
    await check_all_are_identified(site, shown)
    await check_nodes_answer_only_for_direct(site, shown)
