"""The node's loop with real drivers. A resource that another program holds is reported, and used as
soon as it is free. Rules follow changes of node addresses."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
import pytest

from fairlead.config import ApiServerConfig, Config, GatewayConfig, WebConfig
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import Node, ObjectKey, Service, ServiceStatus
from fairlead.lab.apiserver import ApiServer
from fairlead.model import NodeService, ServiceKey
from fairlead.plan.cluster import plan_node
from fairlead.reconcile import Loop
from fairlead.roles.health_check_server import command
from fairlead.roles.node import (
    SYNC_FAILED,
    HostAddresses,
    NodeAddresses,
    clean_up,
    notes_of,
    primary_addresses,
    run,
    service_precedence,
)
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.web import View

NODE = "node1"
DEADLINE_S = 60


def service(name: str, cluster_ip: str, **spec: object) -> Service:
    ports = [{"port": 80, "protocol": "TCP", "nodePort": spec.pop("nodePort", 0)}]
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "creationTimestamp": spec.pop("created", None),
    }
    fields = {
        "type": "NodePort",
        "clusterIP": cluster_ip,
        "clusterIPs": [cluster_ip],
        "ports": ports,
    } | spec
    return msgspec.convert({"metadata": metadata, "spec": fields}, Service)


def node(*addresses: str) -> Node:
    listed = [{"type": "ExternalIP", "address": "198.51.100.1"}]
    listed += [{"type": "InternalIP", "address": address} for address in addresses]
    return msgspec.convert({"metadata": {"name": NODE}, "status": {"addresses": listed}}, Node)


def key(name: str) -> ServiceKey:
    return ServiceKey("default", name)


class Role:
    """State, loop and reports as in `fairlead node`, without an API server."""

    def __init__(self) -> None:
        self.events: list[tuple[ServiceKey, str, str]] = []
        self.state = State(())
        self.state.mark_synced("")
        self.state.update_nodes({ObjectKey("", NODE): node("192.0.2.1")})
        self.report = Reporter[NodeService](
            View("node", NODE),
            self.state,
            self,
            reason=SYNC_FAILED,
            who=f"node {NODE}",
            notes=notes_of,
        )

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((key, reason, message))

    def set(self, *services: Service) -> None:
        self.state.update_services({ObjectKey(*each.key): each for each in services})

    def remove(self, name: str) -> None:
        self.state.update_services({ObjectKey("default", name): None})

    def loop(self, *drivers: NodeProxyDriver | HealthPortDriver) -> Loop[ServiceKey, NodeService]:
        return Loop("proxy", self.state, partial(plan_node, self.state, NODE), drivers, self.report)

    def proxy(self) -> NodeProxyDriver:
        return NodeProxyDriver(
            node_addresses=NodeAddresses(NODE, self.state.nodes, ()),
            pod_cidrs=("10.0.0.0/8",),
            precedence_of=partial(service_precedence, self.state.services),
            requeue=self.state.subscribers.mark,
        )


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_health_port_in_use_is_reported_like_kube_proxy_and_opened_once_it_is_free() -> (
    None
):
    """kube-proxy writes an Event with the same text."""
    role = Role()
    driver = HealthPortDriver(node_name=NODE, healthy=lambda: True, command=command(), proxy_port=0)
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        number = other.getsockname()[1]
        role.set(
            service(
                "web",
                "192.0.2.10",
                type="LoadBalancer",
                externalTrafficPolicy="Local",
                healthCheckNodePort=number,
                nodePort=30080,
            )
        )
        running = asyncio.create_task(role.loop(driver).run())
        await until(lambda: bool(role.events))
        assert role.events == [
            (
                key("web"),
                "FailedToStartServiceHealthcheck",
                f'node node1 failed to start healthcheck "default/web" on port {number}: Address '
                "already in use",
            )
        ]
        assert await driver.read(None) == {}
    # Nothing in the cluster has changed meanwhile.
    async with asyncio.timeout(DEADLINE_S):
        while key("web") not in await driver.read(None):
            await asyncio.sleep(0.01)
    assert len(role.events) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await driver.close()


@pytest.fixture
async def proxy(here: None) -> AsyncIterator[tuple[Role, NodeProxyDriver]]:
    role = Role()
    driver = role.proxy()
    await driver.open()
    running = asyncio.create_task(role.loop(driver).run())
    yield role, driver
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await driver.close(remove=True)


async def frontends(driver: NodeProxyDriver) -> dict[str, str]:
    """Return the Services by the frontends that serve them."""
    found = await driver.read(None)
    return {
        e.key.replace(" . 6 . ", ":"): each.name
        for each, spec in found.items()
        for e in spec
        if e.map == "services4"
    }


async def until_served(driver: NodeProxyDriver, expected: dict[str, str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (there := await frontends(driver)) != expected:
            await asyncio.sleep(0.01)
    assert there == expected


@pytest.mark.root
async def test_an_address_of_another_service_is_taken_over_once_that_service_is_deleted(
    proxy: tuple[Role, NodeProxyDriver],
) -> None:
    role, driver = proxy
    role.set(
        service("a", "192.0.2.10", externalIPs=["192.0.2.99"]),
        service("b", "192.0.2.11", externalIPs=["192.0.2.99"]),
    )
    await until(lambda: bool(role.events))
    about, reason, message = role.events[0]
    assert (about, reason) == (key("b"), SYNC_FAILED)
    assert "192.0.2.99 port 80" in message
    assert "Service default/a has this frontend" in message
    await until_served(driver, {"192.0.2.10:80": "a", "192.0.2.99:80": "a", "192.0.2.11:80": "b"})
    role.remove("a")
    await until_served(driver, {"192.0.2.11:80": "b", "192.0.2.99:80": "b"})


@pytest.mark.root
async def test_the_older_service_takes_an_address_and_has_it_after_a_flush_and_a_restart(
    proxy: tuple[Role, NodeProxyDriver],
) -> None:
    """The younger Service gets an Event before the next audit."""
    role, driver = proxy
    young = service("a", "192.0.2.10", externalIPs=["192.0.2.99"], created="2026-01-02T00:00:00Z")
    role.set(young)
    await until_served(driver, {"192.0.2.10:80": "a", "192.0.2.99:80": "a"})
    role.set(service("b", "192.0.2.11", externalIPs=["192.0.2.99"], created="2026-01-01T00:00:00Z"))
    there = {"192.0.2.10:80": "a", "192.0.2.11:80": "b", "192.0.2.99:80": "b"}
    await until_served(driver, there)
    async with asyncio.timeout(10):
        while not role.events:
            await asyncio.sleep(0.01)
    [(about, _, message)] = role.events
    assert about == key("a")
    assert "192.0.2.99 port 80" in message
    assert "Service default/b has this frontend" in message
    following = asyncio.create_task(driver.run())
    await nft("flush ruleset")
    async with asyncio.timeout(DEADLINE_S):
        while "goto services" not in await nft("list ruleset"):
            await asyncio.sleep(0.05)
    await until_served(driver, there)
    following.cancel()
    heir = role.proxy()
    await heir.open()
    looping = asyncio.create_task(role.loop(heir).run())
    await until_served(heir, there)
    looping.cancel()
    await asyncio.gather(following, looping, return_exceptions=True)
    await heir.close(remove=False)
    # How often is not counted: a transaction that the flush cuts short is reported as well, and the
    # conflict is then reported again.
    losers = {about for about, _, text in role.events if "has this frontend" in text}
    assert losers == {key("a")}, role.events


@pytest.mark.root
async def test_an_external_ip_that_is_the_cluster_ip_of_another_service_is_not_served(
    proxy: tuple[Role, NodeProxyDriver],
) -> None:
    role, driver = proxy
    role.set(service("a", "192.0.2.10", externalIPs=["192.0.2.11"], created="2026-01-01T00:00:00Z"))
    await until_served(driver, {"192.0.2.10:80": "a", "192.0.2.11:80": "a"})
    role.set(service("b", "192.0.2.11", created="2026-01-02T00:00:00Z"))
    await until_served(driver, {"192.0.2.10:80": "a", "192.0.2.11:80": "b"})
    await until(lambda: bool(role.events))
    assert {about for about, _, _ in role.events} == {key("a")}


@pytest.mark.root
async def test_an_assigned_address_has_precedence_over_an_external_ip(
    proxy: tuple[Role, NodeProxyDriver],
) -> None:
    """The age of the other Service does not matter, because a Service may list any address as an
    external IP."""
    role, driver = proxy
    made = service("b", "192.0.2.11", type="LoadBalancer", created="2026-01-02T00:00:00Z")
    shown = msgspec.convert({"loadBalancer": {"ingress": [{"ip": "192.0.2.99"}]}}, ServiceStatus)
    role.set(msgspec.structs.replace(made, status=shown))
    await until_served(driver, {"192.0.2.11:80": "b", "192.0.2.99:80": "b"})
    role.set(service("a", "192.0.2.10", externalIPs=["192.0.2.99"], created="2026-01-01T00:00:00Z"))
    await until(lambda: bool(role.events))
    assert {about for about, _, _ in role.events} == {key("a")}
    await until_served(driver, {"192.0.2.10:80": "a", "192.0.2.11:80": "b", "192.0.2.99:80": "b"})


@pytest.mark.root
async def test_the_health_port_of_a_service_that_lacks_an_address_is_opened(here: None) -> None:
    role, health = (
        Role(),
        HealthPortDriver(node_name=NODE, healthy=lambda: True, command=command(), proxy_port=0),
    )
    driver = role.proxy()
    await driver.open()
    balanced = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 30990,
    }
    shared = {"externalIPs": ["192.0.2.99"]}
    role.set(service("a", "192.0.2.10", **shared), service("b", "192.0.2.11", **shared, **balanced))
    running = asyncio.create_task(role.loop(driver, health).run())
    async with asyncio.timeout(DEADLINE_S):
        while key("b") not in await health.read(None):
            await asyncio.sleep(0.01)
    await until(lambda: bool(role.events))
    assert {about for about, _, _ in role.events} == {key("b")}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await health.close()
    await driver.close(remove=True)


@pytest.mark.root
async def test_node_ports_follow_the_node(proxy: tuple[Role, NodeProxyDriver]) -> None:
    role, driver = proxy
    role.set(service("web", "192.0.2.10", nodePort=30080))
    await until_served(driver, {"192.0.2.10:80": "web", "192.0.2.1:30080": "web"})
    role.state.update_nodes({ObjectKey("", NODE): node("192.0.2.2", "2001:db8::2", "192.0.2.3")})
    await until_served(driver, {"192.0.2.10:80": "web", "192.0.2.2:30080": "web"})
    # The Node is deleted, to be registered again: existing NodePorts keep working.
    role.state.update_nodes({ObjectKey("", NODE): None})
    role.set(service("more", "192.0.2.11", nodePort=30081))
    there = {
        "192.0.2.10:80": "web",
        "192.0.2.2:30080": "web",
        "192.0.2.11:80": "more",
        "192.0.2.2:30081": "more",
    }
    await until_served(driver, there)


@pytest.mark.root
@pytest.mark.parametrize("what", ["flush ruleset", "flush table inet fairlead"])
async def test_flushed_rules_are_restored_before_the_next_audit(
    proxy: tuple[Role, NodeProxyDriver], what: str
) -> None:
    """The rules of other programs stay."""
    role, driver = proxy
    role.set(service("web", "192.0.2.10", nodePort=30080))
    there = {"192.0.2.10:80": "web", "192.0.2.1:30080": "web"}
    await until_served(driver, there)
    following = asyncio.create_task(driver.run())
    await nft(f"{what}; add table inet theirs")
    async with asyncio.timeout(DEADLINE_S):
        while "goto services" not in await nft(
            "list ruleset"
            # This check bypasses the driver, because its `read` would repair the rules.
        ):
            await asyncio.sleep(0.05)
    await until_served(driver, there)
    assert "table inet theirs" in await nft("list tables")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def nft(command: str) -> str:
    """Return the output of nft."""
    done = await asyncio.to_thread(
        subprocess.run, ["nft", command], check=True, capture_output=True, text=True
    )
    return done.stdout


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.root
async def test_a_node_does_not_serve_external_ips_at_which_api_servers_are_reached(
    here: None,
) -> None:
    """The configuration of the process names these addresses, and no object does."""
    ip("link", "set", "lo", "up")
    ip("address", "add", "203.0.113.7/32", "dev", "lo")
    api_server = ApiServerConfig(("203.0.113.8",), ("203.0.113.7:6443",))
    config = Config(web=WebConfig(listen=""), gateway=GatewayConfig(api_server=api_server))
    ports = [{"port": 6443, "protocol": "TCP"}]
    external = ["203.0.113.7", "203.0.113.8", "203.0.113.9"]
    body = {"metadata": {"name": "theirs"}, "spec": {"ports": ports, "externalIPs": external}}
    async with ApiServer(listen=("203.0.113.7:0",)) as server, Client(Access(server.url)) as client:
        made = msgspec.to_builtins(node("192.0.2.1"))
        await client.request("POST", "/api/v1/nodes", body=made)
        await client.request("POST", "/api/v1/namespaces/default/services", body=body)
        running = asyncio.create_task(run(config, Access(server.url), NODE))
        async with asyncio.timeout(DEADLINE_S):
            while "203.0.113.9" not in (rules := await nft("list ruleset")):
                assert not running.done()
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await clean_up()
    assert "203.0.113.7" not in rules
    assert "203.0.113.8" not in rules


@pytest.mark.root
async def test_node_addresses_are_limited_to_the_configured_networks(here: None) -> None:
    found = HostAddresses(["192.0.2.0/25", "2001:db8::/64", "127.0.0.0/8", "fe80::/10"])
    assert not await found.refresh()
    for family, address in (
        ("-4", "192.0.2.7/24"),
        ("-4", "192.0.2.200/24"),
        ("-6", "2001:db8::7/64"),
    ):
        ip(family, "address", "add", address, "dev", "lo")
    assert await found.refresh()
    assert found() == ("192.0.2.7", "2001:db8::7")
    assert not await found.refresh()
    ip("address", "del", "192.0.2.7/24", "dev", "lo")
    assert await found.refresh()
    assert found() == ("2001:db8::7",)


def test_the_primary_address_is_the_first_internal_ip_of_each_family() -> None:
    assert primary_addresses(node("192.0.2.2", "2001:db8::2", "192.0.2.3", "2001:db8::3")) == (
        "192.0.2.2",
        "2001:db8::2",
    )
    assert primary_addresses(node()) == ()


@pytest.mark.root
async def test_cleanup_removes_the_table_and_may_be_repeated(
    proxy: tuple[Role, NodeProxyDriver], capsys: pytest.CaptureFixture[str]
) -> None:
    """The cleanup runs twice: the second run finds nothing, and does not create anything in order
    to remove it."""
    await clean_up()
    assert "the table inet fairlead: this node no longer serves Services" in "".join(
        capsys.readouterr()
    )
    await clean_up()
    assert "nothing to remove" in "".join(capsys.readouterr())
