"""Announcement on layer 2: every node is a gateway, the router has no route to the addresses, and
the nodes answer its ARP requests. kube-proxy serves one node, and `fairlead node` the others."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.deploy.life import POD
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import addresses_of, output, until

from fairlead.drivers.announce.responder import directory_of
from fairlead.kube import objects
from fairlead.lab import kubeproxy, namespace
from fairlead.lab.site import Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net import arp
from fairlead.net.packet_socket import PacketSocket

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NODES = ("node1", "node2", "node3")
SERVICES = 12
REQUESTS = 20
CALLS = 200
"""The number of calls while the owner's gateway is dead."""
AT_ONCE = 10
"""How many of them run at the same time."""
DEADLINE_S = 5.0
"""How long the last answer to many ARP requests may take."""
OUTSIDE = "203.0.113.10"
FOREIGN_MAC = bytes.fromhex("020000009999")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(kube_proxy: Path) -> AsyncIterator[Site]:
    assert kube_proxy.name == "kube-proxy"
    lab = Site.create(f"l2{os.getpid()}", nodes=3, gateways_on_nodes=True, announce="l2")
    async with lab as made:
        await made.stop_role("node1", "node")
        await output(
            made, "node1", "fairlead", "node", "--config", str(made.directory.config), "--cleanup"
        )
        await kubeproxy.start(made, "node1")
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(site: Site) -> Mapping[str, str]:
    """The address of each Service. Each node has a pod of all Services."""
    await site.apply([pod(node) for node in NODES])
    await site.await_pods()
    await site.apply([service(f"web{number}") for number in range(SERVICES)])
    return {
        f"web{number}": (await addresses_of(site, f"web{number}"))[0] for number in range(SERVICES)
    }


def pod(node: str) -> dict[str, Any]:
    spec: Any = POD["spec"]
    metadata = {"name": f"web-{node}", "labels": {"app": "web"}}
    return {**POD, "metadata": metadata, "spec": {**spec, "nodeName": node}}


def service(name: str, **annotations: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {f"fairlead.io/{key}": value for key, value in annotations.items()},
        },
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "selector": {"app": "web"},
            "ports": [{"port": 80, "targetPort": "web"}],
        },
    }


def ask(site: Site, addresses: Sequence[str], number: int) -> Mapping[str, Counter[str]]:
    """Send this number of ARP requests for each address from the router. Return how many answers
    came from each MAC address."""
    found: dict[str, Counter[str]] = {each: Counter() for each in addresses}
    control = site.topology.host("control").addresses[0]
    router = str(LAN[0][1])
    with namespace.inside(site.namespace(ROUTER)):
        made = PacketSocket("lan", arp.ETHERTYPE)
    with made:
        for each in addresses:
            for _ in range(number):
                made.send(arp.request(made.mac, router, each))
        # A host without gateways answers last: then all other answers have arrived.
        made.send(arp.request(made.mac, router, control))
        while (frame := made.receive(DEADLINE_S)) is not None:
            answer = arp.parse(frame)
            if answer is None or answer.operation != arp.REPLY or answer.announces:
                continue
            if answer.sender == control:
                return found
            if answer.sender in found:
                found[answer.sender][answer.sender_mac.hex(":")] += 1
    raise AssertionError("the control host does not answer")


def owners(site: Site, addresses: Mapping[str, str]) -> Mapping[str, str]:
    """Return the node that answers for each Service's address. Fail if two do."""
    nodes = {host.mac: host.name for host in site.topology.of("node")}
    answers = ask(site, list(addresses.values()), 1)
    found = {}
    for name, address in addresses.items():
        (mac,) = answers[address]
        found[name] = nodes[mac]
    return found


async def call(site: Site, address: str) -> str:
    """Return the client's address that the pod sees."""
    reader, writer = await site.connect("client1", address, 80)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            return str(answer["peer"])
    finally:
        writer.close()


async def events(site: Site, name: str) -> str:
    """Return the Events of a Service as kubectl prints them."""
    kubectl = Kubectl(site.directory.kubeconfig, f"fairlead-{site.name}")
    return await kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")


async def count_failures(calls: int, once: Callable[[], Awaitable[object]]) -> int:
    """Call this often, and return how many calls fail."""
    failed = 0
    for _ in range(calls // AT_ONCE):
        done = await asyncio.gather(*(once() for _ in range(AT_ONCE)), return_exceptions=True)
        failed += sum(isinstance(each, BaseException) for each in done)
    return failed


async def test_pods_see_the_client_and_the_router_needs_no_route(
    site: Site, addresses: Mapping[str, str]
) -> None:
    client = site.topology.host("client1").addresses[0]
    for address in addresses.values():
        assert await call(site, address) == client
    routes = await output(site, ROUTER, "ip", "route", "show", "table", "all")
    assert not any(address in routes for address in addresses.values())
    assert "203.0.113" not in routes


async def test_each_address_is_answered_by_exactly_one_node(
    site: Site, addresses: Mapping[str, str]
) -> None:
    answers = ask(site, list(addresses.values()), REQUESTS)
    assert [list(each.values()) for each in answers.values()] == [[REQUESTS]] * SERVICES
    assert len(set(owners(site, addresses).values())) > 1


async def test_killing_the_gateway_of_the_owner_fails_no_call_and_moves_no_address(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    owner = before["web0"]
    await site.kill_role(owner, "gateway")
    assert await count_failures(CALLS, lambda: call(site, addresses["web0"])) == 0
    assert owners(site, addresses) == before
    await site.start_role(owner, "gateway")
    assert owners(site, addresses) == before


async def test_an_address_outside_of_the_segment_is_refused_in_words(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    await site.apply(
        [
            {
                "apiVersion": "fairlead.io/v1alpha1",
                "kind": "AddressPool",
                "metadata": {"name": "outside"},
                "spec": {"addresses": [OUTSIDE]},
            },
            service("outside", addresses=OUTSIDE),
        ]
    )

    async def named() -> bool:
        said = await events(site, "outside")
        return "AddressNotOnSegment" in said and OUTSIDE in said

    await until(named, f"an Event that names {OUTSIDE}")
    assert owners(site, addresses) == before


async def test_another_station_with_the_address_is_named(
    site: Site, addresses: Mapping[str, str]
) -> None:
    """The gateway sees it on the link, and the controller shows it on the Service."""
    with namespace.inside(site.namespace(ROUTER)):
        made = PacketSocket("lan", arp.ETHERTYPE)

    async def named(name: str = "web0") -> bool:
        for frame in arp.announcement(FOREIGN_MAC, addresses["web0"]):
            made.send(frame)
        async with site.client() as client:
            found = await client.get(objects.SERVICES, objects.ObjectKey("default", name))
        return any(
            (each.type, each.status, each.reason)
            == ("fairlead.io/Ready", "True", "AddressConflict")
            and FOREIGN_MAC.hex(":") in each.message
            for each in found.status.conditions
        )

    with made:
        await until(named, "the condition Ready with the reason AddressConflict")
        assert not await named("web1")


async def test_only_the_addresses_of_a_dead_host_move(
    site: Site, addresses: Mapping[str, str]
) -> None:
    before = owners(site, addresses)
    owner = before["web0"]
    lost = {name for name, node in before.items() if node == owner}
    await site.kill_node(owner)

    async def taken_over() -> bool:
        return all(ask(site, list(addresses.values()), 1).values())

    await until(taken_over, "answers for all addresses")
    for name in lost:
        said = await events(site, name)
        assert "AddressAnnounced" in said
    after = owners(site, addresses)
    assert {name for name in after if after[name] != before[name]} == lost
    answers = ask(site, list(addresses.values()), REQUESTS)
    assert [list(each.values()) for each in answers.values()] == [[REQUESTS]] * SERVICES
    client = site.topology.host("client1").addresses[0]
    for address in addresses.values():
        assert await call(site, address) == client


async def test_cleanup_leaves_nothing_and_others_take_over(
    site: Site, addresses: Mapping[str, str]
) -> None:
    leaving = min(set(owners(site, addresses).values()))
    await site.stop_role(leaving, "gateway")
    files = {"config": site.directory.config, "kubeconfig": site.directory.kubeconfig_inside}
    files |= {"pin-path": site.directory.pins(leaving), "proxy-path": site.directory.proxy(leaving)}
    options = [f"--{name}={path}" for name, path in files.items()] + ["--node-name", leaving]
    await output(site, leaving, "fairlead", "gateway", *options, "--cleanup")
    assert "fairlead" not in await output(
        site, leaving, "tc", "filter", "show", "dev", "eth0", "ingress"
    )
    assert not directory_of(site.directory.pins(leaving)).exists()

    async def taken_over() -> bool:
        answers = ask(site, list(addresses.values()), 1)
        return all(answers.values()) and leaving not in owners(site, addresses).values()

    await until(taken_over, "answers of another node for all addresses")
