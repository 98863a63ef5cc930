"""Tests of the API server balancer that need no API server. See
tests/e2e/test_apiserver_balanced.py for the others."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.drivers.proxy.test_render import accepted

from fairlead.config import ApiServerConfig
from fairlead.drivers.proxy import ApiServerBalancer
from fairlead.drivers.proxy.apiserver import render
from fairlead.drivers.proxy.render import Paths
from fairlead.net import localroutes

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

VIP = "203.0.113.5"
CONFIG = ApiServerConfig(addresses=(VIP,), servers=("127.0.0.1:7443", "[::1]:7443"))


async def answers(address: str, port: int = 6443) -> bool:
    """Return whether a connection is accepted."""
    try:
        async with asyncio.timeout(0.3):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_haproxy_accepts_an_api_server_balancer_with_thousands_of_ranges(folder: Path) -> None:
    ranges = tuple(f"10.{at >> 8}.{at & 255}.0/24" for at in range(2000)) + tuple(
        f"2001:db8:{at:x}::/48" for at in range(2000)
    )
    config = ApiServerConfig(
        addresses=("2001:DB8::5", VIP),
        servers=("192.0.2.1:6443", "[2001:db8::1]:6443"),
        source_ranges=ranges,
    )
    folder.mkdir()
    text = render(config, Paths(str(folder)))
    assert accepted(text, folder) == ""
    assert "bind [2001:db8::5]:6443" in text
    assert f"bind {VIP}:6443" in text
    assert all(f" {each}" in text for each in ranges)


async def test_the_balancer_starts_outlives_its_process_changes_and_is_removed(
    folder: Path,
) -> None:
    other = await asyncio.start_server(lambda _reader, writer: writer.close(), "0.0.0.0", 2222)
    async with other:
        balancer = ApiServerBalancer(CONFIG, folder)
        await balancer.ensure()
        assert await answers(VIP)
        assert not await answers(VIP, 2222)
        # The routes of Services have another protocol number.
        assert await localroutes.present() == set()
        pid = balancer.haproxy.master_pid()
        assert pid is not None

        moved = ApiServerConfig(addresses=("203.0.113.6", "2001:db8:f::6"), servers=CONFIG.servers)
        successor = ApiServerBalancer(moved, folder)
        await successor.ensure()
        assert [await answers(each) for each in (*moved.addresses, VIP)] == [True, True, False]
        assert successor.haproxy.master_pid() == pid
        assert successor.servers.keys() == set(CONFIG.servers)
        assert successor.status().addresses == ("203.0.113.6:6443", "[2001:db8:f::6]:6443")

        following = asyncio.ensure_future(successor.run())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not (successor.haproxy.master_pid() != pid and await answers("203.0.113.6")):
                await asyncio.sleep(0.05)
        following.cancel()
        await asyncio.wait([following])

        await ApiServerBalancer(None, folder).ensure()
        assert not await answers("203.0.113.6")
        assert "fairlead" not in command("nft", "list", "ruleset")
        assert await localroutes.present(localroutes.API_PROTOCOL) == set()
        assert not await balancer.remove()


@pytest.mark.parametrize("address", [VIP, "2001:db8::5"])
async def test_only_the_port_is_used_of_an_address_that_the_host_has(
    folder: Path, address: str
) -> None:
    command("ip", "address", "add", address, "dev", "lo", "nodad")
    other = await asyncio.start_server(lambda _reader, writer: writer.close(), address, 2222)
    async with other:
        balancer = ApiServerBalancer(
            ApiServerConfig(addresses=(address,), servers=CONFIG.servers), folder
        )
        await balancer.ensure()
        assert await answers(address)
        assert await answers(address, 2222)
        assert await localroutes.present(localroutes.API_PROTOCOL) == set()
        await balancer.remove()
        assert (await answers(address), await answers(address, 2222)) == (False, True)


async def test_removed_rules_routes_and_addresses_are_restored(folder: Path) -> None:
    """Another program removes all rules of the host, our table, our route, or the address of the
    interface, which the balancer then replaces by a route."""
    other = await asyncio.start_server(lambda _reader, writer: writer.close(), "0.0.0.0", 2222)
    balancer = ApiServerBalancer(CONFIG, folder)
    async with other:
        for harm in (
            "nft flush ruleset",
            "nft flush table inet fairlead_apiserver",
            f"ip route delete {VIP} table local",
        ):
            await balancer.ensure()
            assert (await answers(VIP), await answers(VIP, 2222)) == (True, False)
            command(*harm.split())
            await balancer.ensure()
            assert (await answers(VIP), await answers(VIP, 2222)) == (True, False)
        await balancer.remove()

        command("ip", "address", "add", VIP, "dev", "lo")
        balancer = ApiServerBalancer(CONFIG, folder)
        await balancer.ensure()
        assert (await answers(VIP), await answers(VIP, 2222)) == (True, True)
        command("ip", "address", "delete", VIP, "dev", "lo")
        await balancer.ensure()
        assert (await answers(VIP), await answers(VIP, 2222)) == (True, False)
        command(
            "ip",
            "address",
            "add",
            VIP,
            "dev",
            "lo",
            # This corresponds to a new configuration of the host's network.
        )
        await balancer.ensure()
        assert (await answers(VIP), await answers(VIP, 2222)) == (True, True)
        await balancer.remove()


async def test_correct_rules_are_not_written_again(folder: Path) -> None:
    """Unneeded changes would make every program that lists the kernel's rules start over."""
    balancer = ApiServerBalancer(CONFIG, folder)
    await balancer.ensure()
    before = command("nft", "-a", "list", "ruleset")
    await balancer.ensure()
    assert command("nft", "-a", "list", "ruleset") == before
    await balancer.remove()


async def test_a_failed_start_is_repeated(folder: Path) -> None:
    balancer = ApiServerBalancer(CONFIG, folder)
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "0.0.0.0", 6443):
        await balancer.ensure()
        assert not balancer.haproxy.alive()
    await balancer.ensure()
    assert await answers(VIP)
    await balancer.remove()
