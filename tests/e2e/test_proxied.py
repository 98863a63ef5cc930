"""A Service of class proxy in a lab: all clients are answered, and pods see the client's address.
Edits take effect in place, HAProxy outlives the gateway's process, connections follow the pods, and
the removal of an object does not affect the connections of others."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.changes import pod
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import OPEN_CONNECTIONS, Load, Web, addresses_of
from tests.e2e.load import until as awaited
from tests.e2e.packets import read_cluster, sources_of
from tests.e2e.proxied import (
    PATIENCE_S,
    PROXY,
    EchoConnection,
    await_described,
    call,
    ingress,
    until,
)

from fairlead.kube.client import Client
from fairlead.lab import manifests, process
from fairlead.lab.objects import PODS
from fairlead.lab.site import Site
from fairlead.lab.topology import CONTROL
from fairlead.probe.steady import Period

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

OPENSTACK_HEADER = "loadbalancer.openstack.org/proxy-protocol"


class Proxied(Web):
    """A Service of class proxy whose pods expect a header."""

    gateways = ("gw1", "gw2")


@pytest_asyncio.fixture(loop_scope="module")
async def kubectl(site: Site, client: Client) -> AsyncIterator[Kubectl]:
    await manifests.apply(client, [pod("p1", "web", "node1"), pod("p2", "web", "node2")])
    await site.await_pods()
    made = Kubectl(site.directory.kubeconfig, site.name)
    yield made
    await made("delete", "service", "web", "names", "--ignore-not-found", "--timeout=10s")


@pytest_asyncio.fixture(loop_scope="module")
async def web(site: Site, kubectl: Kubectl) -> Proxied:
    header = {"fairlead.io/proxy-protocol": "v2"}
    await kubectl.apply(
        "web", loadBalancerClass=PROXY, annotations=header, ports=[{"port": 80, "targetPort": 8080}]
    )
    made = Proxied(site, await addresses_of(site, "web"))
    await until(site, "client1", made.address, lambda answer: answer.get("proxy") == "v2")
    return made


def check_unharmed(site: Site, period: Period) -> None:
    """Check that no connection failed, and that every answer was for its client."""
    assert period.requests > 20
    assert (period.failed, period.broken, period.open_connections) == (0, [], OPEN_CONNECTIONS), (
        period
    )
    named(site, period)


def named(site: Site, period: Period) -> None:
    (client1, _) = site.topology.host("client1").addresses
    assert period.clients.keys() == period.open_clients.keys() == {client1}, period


async def test_every_client_is_identified_in_the_header_and_edits_break_no_connection(
    site: Site, client: Client, kubectl: Kubectl
) -> None:
    header = {OPENSTACK_HEADER: "v2"}
    await kubectl.apply("web", loadBalancerClass=PROXY, annotations=header)
    address = (await ingress(kubectl, "web", lambda entry: entry["ipMode"] == "Proxy"))["ip"]
    await until(site, "client1", address, lambda answer: answer.get("proxy") == "v2")
    # A value that is not understood changes nothing. Of a new Service it would be refused.
    header |= {"fairlead.io/timeout-client-data": "soon", OPENSTACK_HEADER: "v22"}
    await kubectl.apply("web", loadBalancerClass=PROXY, annotations=header)
    await await_described(
        kubectl, "web", "fairlead.io/timeout-client-data is 'soon'; allowed: milliseconds"
    )

    # Clients outside; a node and pods with and without an endpoint; a pod that is itself an
    # endpoint.
    own = {source.name: source for source in sources_of(site, await read_cluster(client))}
    for name, source in own.items():
        answer = await call(site, name, address)
        node = own.get(source.node, source)
        assert answer.get("proxy_peer") in (source.addresses[0], node.addresses[0]), (name, answer)
        assert answer["peer"] in {host.addresses[0] for host in site.topology.of("gateway")}

    connection = await EchoConnection.open(site, "client1", address)
    first = await connection.request()
    await kubectl.apply(
        "web",
        loadBalancerClass=PROXY,
        annotations={OPENSTACK_HEADER: "v2", "fairlead.io/proxy-protocol": "v1"},
    )
    await until(site, "client1", address, lambda answer: answer.get("proxy") == "v1")
    client1 = site.topology.host("client1").addresses[0]
    within: dict[str, Any] = {
        "loadBalancerSourceRanges": [f"{client1}/32"],
        "loadBalancerClass": PROXY,
    }
    await kubectl.apply("web", annotations={}, **within)
    await until(site, "client1", address, lambda answer: bool(answer) and "proxy" not in answer)
    await until(site, "client2", address, lambda answer: not answer)
    within["loadBalancerSourceRanges"] = [f"{site.topology.host('client2').addresses[0]}/32"]
    await kubectl.apply("web", annotations={}, **within)
    await until(site, "client2", address, bool)
    await until(site, "client1", address, lambda answer: not answer)
    assert await connection.request() == first

    # The last pod of a node is deleted: new connections go to the other node only.
    within["loadBalancerSourceRanges"] = None
    await kubectl.apply("web", annotations={}, **within)
    away = "p1" if first["pod"] == "p2" else "p2"
    await until(site, "client1", address, bool)
    await kubectl("delete", "pod", away, "--wait=false")
    await until(site, "client1", address, lambda answer: answer.get("pod") == first["pod"])

    # At every reload the counters of the previous HAProxy worker are added.
    for gateway in site.topology.gateways:
        _, shown, _ = await site.exec(gateway.name, ["fairlead", "status"])
        proxied = shown.partition("PROXIED SERVICE")[2].splitlines()
        assert any(
            connection.startswith("default/web ") and connection.split()[1] != "0"
            for connection in proxied
        ), shown
        _, metrics, _ = await site.exec(
            gateway.name, ["curl", "-sf", "http://127.0.0.1:9441/metrics"]
        )
        assert re.search(
            r'^fairlead_proxy_connections_total\{service="default/web"\} [1-9]',
            metrics,
            re.MULTILINE,
        ), metrics

    # HAProxy continues after every kill of the gateway's process, and every new process uses the
    # running HAProxy.
    for gateway in site.topology.gateways:
        await site.kill_role(gateway.name)
    assert all([await call(site, "client1", address) for _ in range(8)])
    assert await connection.request() == first
    for gateway in site.topology.gateways:
        await site.start_role(gateway.name)
    await kubectl.apply(
        "web", loadBalancerClass=PROXY, annotations={"fairlead.io/proxy-protocol": "true"}
    )
    await until(site, "client1", address, lambda answer: answer.get("proxy") == "v1")
    assert await connection.request() == first
    connection.close()


async def test_nodes_get_connections_in_proportion_to_their_ready_pods(
    site: Site, web: Proxied
) -> None:
    """At first three pods are on one node, one is on another, and none on the third. Then two of
    the three become unready."""
    await web.place(("node1",) * 3 + ("node2",))
    async with Load(site, web.address, timeout_s=PATIENCE_S) as load:
        uneven = await load.counts_during(asyncio.sleep(2))
        check_unharmed(site, uneven)
        some = [name for name, node in (await web.pods()).items() if node == "node1"][:2]
        for name in some:
            await web.set_ready(name, ready=False)
        check_unharmed(site, await load.counts_during(web.await_weights(("node1", "node2"))))
        even = await load.counts_during(asyncio.sleep(2))
        check_unharmed(site, even)
    for name in some:
        await web.set_ready(name, ready=True)
    for period, share in ((uneven, 3 / 4), (even, 1 / 2)):
        assert period.nodes.keys() == {"node1", "node2"}, period
        assert period.nodes["node1"] / sum(period.nodes.values()) == pytest.approx(
            share, abs=0.06
        ), period


@pytest.mark.soak
async def test_a_terminating_pod_closes_its_own_connections(site: Site, web: Proxied) -> None:
    """The pod is the only one of its node. It ends its connections itself, so none breaks, and no
    new one fails."""
    await web.place(("node1", "node2"))
    (leaving,) = [name for name, node in (await web.pods()).items() if node == "node1"]

    async def is_gone() -> bool:
        async with site.client() as client:
            return leaving not in {each.metadata.name for each in await client.list(PODS)}

    async def end() -> None:
        await web.end([leaving])
        await web.await_weights(("node2",))
        await awaited(is_gone, "the removal of the pod")

    async with Load(site, web.address, timeout_s=PATIENCE_S) as load:
        before = await load.counts_during(asyncio.sleep(0))
        assert before.nodes.keys() == {"node1", "node2"}
        check_unharmed(site, await load.counts_during(end()))
        after = await load.counts_during(asyncio.sleep(0))
        check_unharmed(site, after)
        assert after.nodes.keys() == {"node2"}


@pytest.mark.soak
async def test_a_node_that_does_not_answer_gets_no_new_connections(
    site: Site, web: Proxied
) -> None:
    """First only the health port is silent, without effect on clients. Then the node dies: only its
    own connections are lost, and clients reach the other node."""
    await web.place(("node1", "node2"))
    role = process.one(site.name, "node1/node")
    async with Load(site, web.address, timeout_s=PATIENCE_S) as load:
        role.send(signal.SIGSTOP)
        try:
            check_unharmed(site, await load.counts_during(web.await_weights(("node2",))))
            silent = await load.counts_during(asyncio.sleep(0))
        finally:
            role.send(signal.SIGCONT)
        check_unharmed(site, silent)
        assert silent.nodes.keys() == {"node2"}
        check_unharmed(site, await load.counts_during(web.await_weights(("node1", "node2"))))

    async with Load(site, web.address, timeout_s=0.2, patience_s=0.2) as load:
        dead = await load.counts_during(site.kill_node("node1"), watch_s=5)
        named(site, dead)
        assert {each.node for each in dead.broken} == {"node1"}, dead
    async with Load(site, web.address, timeout_s=PATIENCE_S) as load:
        after = await load.counts_during(asyncio.sleep(0))
        check_unharmed(site, after)
        assert after.nodes.keys() == {"node2"}
        await site.revive_node("node1")
        await web.await_weights(("node1", "node2"))
        check_unharmed(site, await load.take())


async def test_a_service_with_a_hostname_is_served_and_its_udp_port_is_rejected(
    site: Site, kubectl: Kubectl
) -> None:
    ports = [
        {"name": "web", "port": 80, "targetPort": "web"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]
    named = {"fairlead.io/hostname-suffix": "nip.io", "fairlead.io/proxy-protocol": "v2"}
    await kubectl.apply("names", loadBalancerClass=PROXY, annotations=named, ports=ports)
    shown = await ingress(kubectl, "names", lambda entry: "hostname" in entry)
    address = shown["hostname"].removesuffix(".nip.io")
    assert "ip" not in shown
    served = {(port["port"], port["protocol"]): port.get("error") for port in shown["ports"]}
    assert served == {(80, "TCP"): None, (53, "UDP"): "fairlead.io/ProtocolNotSupported"}
    await until(site, "client1", address, lambda answer: answer.get("proxy") == "v2")
    answer = await call(site, "node3", address)
    assert answer["proxy_peer"] == site.topology.host("node3").addresses[0]
    await await_described(kubectl, "names", "not served: 53/UDP", "fairlead.io/direct")

    await kubectl.apply(
        "names",
        loadBalancerClass=PROXY,
        annotations={"fairlead.io/hostname-suffix": "none"},
        ports=ports,
    )
    assert (await ingress(kubectl, "names", lambda entry: "ip" in entry))["ip"] == address
    await until(site, "client1", address, lambda answer: bool(answer) and "proxy" not in answer)


async def test_the_default_hostname_suffix_applies_to_services_with_a_header(
    site: Site, kubectl: Kubectl
) -> None:
    """The suffix is for clusters whose nodes would answer for an address in the status."""
    config = yaml.safe_load(site.directory.config.read_text())
    site.directory.config.write_text(
        yaml.safe_dump({**config, "proxy": {"hostnameSuffix": "nip.io"}})
    )
    await site.stop_role(CONTROL)
    await site.start_role(CONTROL)
    await kubectl.apply(
        "names", loadBalancerClass=PROXY, annotations={"fairlead.io/proxy-protocol": "v1"}
    )
    shown = await ingress(kubectl, "names", lambda entry: "hostname" in entry)
    assert "ip" not in shown
    address = shown["hostname"].removesuffix(".nip.io")
    for caller in ("client1", "node3"):
        await until(site, caller, address, lambda answer: answer.get("proxy") == "v1")
    await kubectl.apply("names", loadBalancerClass=PROXY, annotations={})
    assert (await ingress(kubectl, "names", lambda entry: "ip" in entry))["ip"] == address


async def test_connections_broken_by_too_many_reloads_are_reported(
    site: Site, kubectl: Kubectl
) -> None:
    config = yaml.safe_load(site.directory.config.read_text())
    few = {**config.get("gateway", {}), "proxyOldWorkers": 1}
    site.directory.config.write_text(yaml.safe_dump({**config, "gateway": few}))
    for gateway in site.topology.gateways:
        await site.stop_role(gateway.name)
        await site.start_role(gateway.name)
    await kubectl.apply("web", loadBalancerClass=PROXY)
    address = (await ingress(kubectl, "web", lambda entry: "ip" in entry))["ip"]
    await until(site, "client1", address, bool)
    connections: list[list[EchoConnection]] = []
    # Each change reloads HAProxy on both gateways.
    for header in ("v2", "v1", "v2"):
        await kubectl.apply(
            "web", loadBalancerClass=PROXY, annotations={"fairlead.io/proxy-protocol": header}
        )
        await until(site, "client1", address, partial(begins_with, header))
        connections.append([await EchoConnection.open(site, "client1", address) for _ in range(8)])
        assert all([await connection.request() for connection in connections[-1]])
    await await_described(
        kubectl,
        "web",
        "OldConnectionsEnded",
        "HAProxy keeps at most 1 of its old workers after reloads (gateway.proxyOldWorkers)",
    )
    assert all([await connection.request() for made in connections[1:] for connection in made])
    for connection in (connection for made in connections for connection in made):
        connection.close()


def begins_with(header: str, answer: dict[str, Any]) -> bool:
    return answer.get("proxy") == header
