"""A lab in which a real routing daemon runs on the router, and gateways announce addresses to it by
BIRD, without any role of Fairlead: sessions, routes, a silent host, and the end of the lab."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fairlead.lab import namespace, process, routing
from fairlead.lab.overview import overview
from fairlead.lab.routers import (
    BIRD_SOCKET,
    HOLD_S,
    HOST_ASN,
    ROUTER_ADDRESSES,
    ROUTER_ASN,
    RouterKind,
    Routing,
)
from fairlead.lab.routing import Reach
from fairlead.lab.rundir import ROOT
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

VIPS = ("203.0.113.10", "2001:db8:f::10")
GATEWAYS = ("gw1", "gw2")
DEADLINE_S = 30
CRASH_LOGS = Path("/var/tmp/frr")
TOOLS: dict[RouterKind, list[str]] = {
    "bird": ["birdc", "show", "status"],
    "frr": ["vtysh", "-c", "show version"],
    "gobgp": ["gobgp", "global"],
}
with_bfd = pytest.mark.parametrize("site", ["bird", "frr"], indirect=True, scope="module")
INTERVALS_MS = {"bird": 100, "frr": 100, "gobgp": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TOOLS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    name = f"routing{os.getpid()}"
    lab = Site.create(
        name,
        nodes=0,
        gateways=2,
        roles=False,
        announce="bgp",
        routing=Routing(daemon=request.param, bfd_interval_ms=INTERVALS_MS[request.param]),
    )
    async with lab as site:
        for gateway in GATEWAYS:
            announce(site, gateway)
        yield site
        daemons = {each.pid for each in process.find(name, "router/")}
    assert daemons
    assert not process.find(name)
    assert not namespace.names(f"fl-{name}-")
    assert not (ROOT / name).exists()
    assert not crash_logs(daemons)


def crash_logs(daemons: set[int]) -> list[Path]:
    """Return the folders that these processes of FRR have left."""
    return [each for pid in daemons for each in CRASH_LOGS.glob(f"*.{pid}")]


def announce(site: Site, gateway: str) -> None:
    """Let BIRD announce the addresses from this gateway."""
    folder = site.directory.bird(gateway)
    folder.mkdir(exist_ok=True)
    addresses = site.topology.host(gateway).addresses
    config = f"router id {addresses[0]};\nprotocol device {{}}\n"
    bfd = site.size.routing.bfd_interval_ms
    if bfd:
        config += f'protocol bfd {{ interface "*" {{ interval {bfd} ms; multiplier 3; }}; }}\n'
    for family, vip, router in zip((4, 6), VIPS, ROUTER_ADDRESSES, strict=True):
        config += f"""\
protocol static vips{family} {{ ipv{family}; route {vip}/{"32" if family == 4 else "128"}
  unreachable; }}
protocol bgp router{family} {{
  local as {HOST_ASN}; neighbor {router} as {ROUTER_ASN}; connect delay time 1;
  {"bfd on;" if bfd else ""} hold time {HOLD_S};
  error wait time 1, 5; connect retry time 1;
  ipv{family} {{ import none; export where source = RTS_STATIC; next hop self; }};
}}
"""
    path = folder / "bird.conf"
    path.write_text(config)
    site.spawn(gateway, ["/usr/sbin/bird", "-f", "-c", str(path), "-s", str(folder / BIRD_SOCKET)])


async def reached(site: Site) -> list[set[str]]:
    """Return the hosts to which the router sends packets for each address."""
    view = await routing.view(site)
    found = {reach.destination: set(reach.via) for reach in view.reach}
    return [found.get(vip, set()) for vip in VIPS]


async def await_reach(site: Site, *gateways: str) -> None:
    """Wait until the router uses exactly these gateways for both addresses."""
    hosts = [site.topology.host(name) for name in gateways]
    four = {host.addresses[0] for host in hosts}
    async with asyncio.timeout(DEADLINE_S):
        while True:
            ipv4, ipv6 = await reached(site)
            if ipv4 == four and len(ipv6) == len(hosts):
                return
            await asyncio.sleep(0.05)


async def test_the_router_uses_the_routes_of_all_gateways_and_shows_its_sessions(
    site: Site,
) -> None:
    await await_reach(site, *GATEWAYS)
    bfd = "up" if site.size.routing.bfd_interval_ms else ""
    async with asyncio.timeout(DEADLINE_S):
        while any(each.bfd != bfd for each in (await routing.view(site)).sessions):
            await asyncio.sleep(0.05)
    seen = await overview(site)
    assert seen.router is not None
    hosts = [site.topology.host(name) for name in GATEWAYS]
    expected = sorted(address for host in hosts for address in host.addresses)
    assert [each.peer for each in seen.router.sessions] == expected
    assert {(each.state, each.routes, each.bfd) for each in seen.router.sessions} == {
        ("Established", 1, bfd)
    }
    assert Reach(VIPS[0], tuple(sorted(host.addresses[0] for host in hosts))) in seen.router.reach
    tables = [header for header, _ in seen.tables()]
    assert ("ROUTER REACHES", "THROUGH") in tables
    assert ("BGP SESSION OF THE ROUTER", "STATE", "BFD", "ROUTES") in tables


async def test_the_tools_of_the_daemons_reach_the_daemon_of_the_host(site: Site) -> None:
    code, output, errors = await site.exec("router", TOOLS[site.size.routing.daemon])
    assert code == 0, errors
    assert any(each in output for each in ("BIRD 2", "FRRouting", "AS:        64512"))
    code, output, errors = await site.exec("gw1", ["birdc", "show", "status"])
    assert code == 0, errors
    assert "Router ID is 192.0.2.11" in output


@with_bfd
async def test_a_silent_host_loses_its_routes_and_gets_them_back(site: Site) -> None:
    await await_reach(site, *GATEWAYS)
    await site.remove_port("gw2")
    await await_reach(site, "gw1")
    carrier = json.loads((await site.exec("gw2", ["ip", "-json", "link", "show", "eth0"]))[1])
    assert "LOWER_UP" in carrier[0]["flags"]
    await site.restore_port("gw2")
    await await_reach(site, *GATEWAYS)


@with_bfd
async def test_the_part_without_the_router_loses_its_routes_until_the_network_is_whole(
    site: Site,
) -> None:
    await await_reach(site, *GATEWAYS)
    await site.split(["gw1"])
    await await_reach(site, "gw2")
    await site.heal()
    await site.heal()
    await await_reach(site, *GATEWAYS)
