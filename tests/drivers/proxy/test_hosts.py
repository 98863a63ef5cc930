"""A gateway leaves the addresses of hosts to them, also if an earlier process made them local."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from tests.drivers.proxy.site import VIP, VIP6, balancer, new_answers, nodes, reconcile, until

from fairlead.config import Config, GatewayConfig
from fairlead.drivers.proxy import ProxyDriver, conflicts, shield
from fairlead.kube.access import Access
from fairlead.lab import namespace
from fairlead.model import ProxySettings, ServiceKey
from fairlead.net import localroutes
from fairlead.roles.gateway import data_plane, leave_hosts
from fairlead.roles.process import KnownHosts
from fairlead.state import State

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

API_SERVER, ROUTER, OWN = "192.0.2.31", "192.0.2.1", "192.0.2.11"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def nft(command: str) -> None:
    subprocess.run(["nft", *command.split()], check=True)


async def test_the_address_of_a_host_is_not_local_even_while_haproxy_has_a_listener_there(
    folder: Path,
) -> None:
    async with nodes("node1"):
        earlier = ProxyDriver(folder)
        await earlier.read(None)
        await reconcile(earlier, balancer({"node1": 1}, addresses=(VIP, VIP6)))
        assert await localroutes.present() == {VIP, VIP6}
        driver = ProxyDriver(folder, belongs_to_host={VIP}.__contains__)
        try:
            await driver.leave_hosts()
            assert await localroutes.present() == {VIP6}
            assert VIP not in shield.listing()
            assert VIP6 in shield.listing()
            await driver.read(None)
            await driver.read(None)
            assert await localroutes.present() == {VIP6}
            await reconcile(driver, balancer({"node1": 1}, addresses=(VIP6,)))
            assert await new_answers(1, VIP6) == [["node1", "-", "x"]]
            await reconcile(driver, balancer({"node1": 1}, addresses=(VIP, VIP6)))
            assert await localroutes.present() == {VIP6}
            assert VIP not in shield.listing()
        finally:
            await driver.remove()


async def test_the_shield_has_no_rules_for_removed_listeners_after_leaving_hosts(
    folder: Path,
) -> None:
    removed = "203.0.113.8"
    other = ServiceKey("default", "other")
    async with nodes("node1"):
        earlier = ProxyDriver(folder)
        await earlier.read(None)
        first = balancer({"node1": 1}, addresses=(VIP, VIP6))
        await reconcile(earlier, first, balancer({"node1": 1}, key=other, addresses=(removed,)))
        await reconcile(earlier, first, gone=[other])
        driver = ProxyDriver(folder, belongs_to_host={VIP}.__contains__)
        try:
            await driver.leave_hosts()
            assert VIP6 in shield.listing()
            assert VIP not in shield.listing()
            assert removed not in shield.listing()
        finally:
            await driver.remove()


async def test_an_address_that_a_host_takes_is_left_to_it_with_the_next_change(
    folder: Path,
) -> None:
    hosts: set[str] = set()
    async with nodes("node1"):
        driver = ProxyDriver(folder, belongs_to_host=hosts.__contains__)
        await driver.read(None)
        try:
            both = balancer({"node1": 1}, addresses=(VIP, VIP6))
            await reconcile(driver, both)
            assert await localroutes.present() == {VIP, VIP6}
            hosts.add(VIP)
            changed = msgspec.structs.replace(both, settings=ProxySettings(client_ms=9))
            await reconcile(driver, changed)
            assert await localroutes.present() == {VIP6}
        finally:
            await driver.remove()


@pytest.fixture
def network(inside: None) -> Iterator[str]:
    """A link to a host with the addresses of an API server and of the router. Yield its
    namespace."""
    name = f"flt-{os.getpid()}-api"
    namespace.create(name)
    try:
        ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{OWN}/24", "dev", "eth0")
        ip("link", "set", "eth0", "up")
        for each in (API_SERVER, ROUTER):
            ip("-n", name, "address", "add", f"{each}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("route", "add", "default", "via", ROUTER)
        yield name
    finally:
        namespace.delete(name)


def reached(address: str, listener: socket.socket) -> bool:
    with socket.socket() as client:
        client.settimeout(2)
        with suppress(OSError):
            client.connect((address, listener.getsockname()[1]))
            return True
    return False


async def test_a_gateway_that_has_cut_itself_off_reaches_its_api_server_after_the_next_start(
    network: str, folder: Path
) -> None:
    listener = namespace.make_socket(network, socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        assert reached(API_SERVER, listener)
        await localroutes.add({API_SERVER, ROUTER, VIP})
        assert not reached(API_SERVER, listener)
        section = msgspec.structs.replace(GatewayConfig(), proxy_path=str(folder))
        config = Config(gateway=section)
        state = State(())
        plane = data_plane(config, ("eth0",), state)
        hosts = KnownHosts(state, config, Access(f"https://{API_SERVER}:6443"))
        own = await leave_hosts(hosts, state, plane)
        assert reached(API_SERVER, listener)
        assert await localroutes.present() == {VIP}
    assert {OWN, ROUTER} <= set(own.addresses)
    for address in (API_SERVER, ROUTER, OWN):
        assert state.exclusions.host_at(address) is not None
    assert state.exclusions.host_at(VIP) is None


async def test_a_station_that_has_the_address_of_a_service_is_noticed_if_none_is_announced(
    network: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "INTERVAL_S", 0.1)
    ip("-n", network, "address", "add", "192.0.2.50/24", "dev", "eth0")
    section = msgspec.structs.replace(GatewayConfig(), proxy_path=str(folder))
    driver = data_plane(Config(gateway=section), ("eth0",), State(())).proxy
    async with nodes("node1"):
        await driver.read(None)
        addresses = ("192.0.2.50", "2001:db8:f::7")
        await reconcile(driver, balancer({"node1": 1}, addresses=addresses))
        task = asyncio.create_task(driver.run())
        try:

            async def is_noticed() -> bool:
                return bool(driver.conflicts.claimed)

            await until(is_noticed)
            ((address, interface, _),) = map(msgspec.structs.astuple, driver.conflicts.claimed)
            assert (address, interface) == ("192.0.2.50", "eth0")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.remove()


async def test_routes_that_another_program_removes_are_added_again_at_once(folder: Path) -> None:
    """As systemd-networkd does with routes of others when it is restarted: without them the gateway
    accepts no packet for the addresses."""
    async with nodes("node1"):
        driver = ProxyDriver(folder)
        await driver.read(None)
        await reconcile(driver, balancer({"node1": 1}, addresses=(VIP, VIP6)))
        task = asyncio.create_task(driver.run())
        try:
            for version in ("-4", "-6"):
                ip(version, "route", "flush", "table", "local", "proto", str(localroutes.PROTOCOL))

                async def is_restored() -> bool:
                    return await localroutes.present() == {VIP, VIP6}

                await until(is_restored)
            assert await new_answers() == [["node1", "-", "x"]]
            assert await new_answers(1, VIP6) == [["node1", "-", "x"]]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.remove()


@pytest.mark.parametrize("command", ["flush ruleset", f"flush table {shield.TABLE}"])
async def test_the_shield_is_restored_soon_after_another_program_removes_it(
    folder: Path, command: str
) -> None:
    """As a firewall does when it is reloaded. Without the shield, other ports of the address lead
    to all servers of the gateway that listen on every address."""
    async with nodes("node1"):
        driver = ProxyDriver(folder)
        await driver.read(None)
        await reconcile(driver, balancer({"node1": 1}))
        before = shield.listing()
        task = asyncio.create_task(driver.run())
        try:
            await asyncio.sleep(0.1)
            nft(command)
            assert shield.listing() != before

            async def is_restored() -> bool:
                return shield.listing() == before

            await until(is_restored)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.remove()
