"""The printed routes and configurations in real kernels and routing daemons: a router gets both
gateways as next hops, and packets arrive."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.routers.site import ADDRESSES, GATEWAYS, OUTSIDE, ROUTER, Site

from fairlead.config import PoolConfig
from fairlead.drivers.direct.host_network.blackhole import FIRST_TABLE
from fairlead.errors import FairleadError
from fairlead.net.bird import Bird
from fairlead.routers import bird as router_text
from fairlead.routers import speaker, static
from fairlead.routers.planning import reach_of, side_of_gateways

pytestmark = pytest.mark.root

POOLS = (PoolConfig("main", ("203.0.113.0/28", "2001:db8:f::/120")),)
KERNEL = """
protocol device {}
protocol kernel { ipv4 { export all; }; merge paths on; }
protocol kernel { ipv6 { export all; }; merge paths on; }
"""
"""What an operator's router has already."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site.running(tmp_path) as site:
        yield site


def next_hops(site: Site, destination: str) -> set[str]:
    """Return the next hops of the router's route to exactly this destination."""
    family = "-6" if ":" in destination else "-4"
    routes = json.loads(site.run("router", "ip", family, "-json", "route", "show", destination))
    return {
        hop["gateway"]
        for route in routes
        for hop in route.get("nexthops", [route])
        if "gateway" in hop
    }


def test_static_routes_lead_to_all_gateways_and_are_replaced(site: Site) -> None:
    site.run("router", "sh", "-e", given=static.render(reach_of(POOLS, GATEWAYS)))
    for address, prefix in zip(ADDRESSES, ("203.0.113.0/28", "2001:db8:f::/120"), strict=True):
        index = int(":" in address)
        assert next_hops(site, prefix) == {each.addresses[index] for each in GATEWAYS}
        used = set()
        for port in range(1024, 1088):
            ports = ("ipproto", "tcp", "sport", str(port), "dport", "80")
            client = "2001:db8:1::2" if index else "198.51.100.2"
            found = site.run(
                *("router", "ip", "route", "get", address, "from", client, "iif", "lan", *ports)
            )
            used |= set(re.findall(r"via (\S+)", found))
        assert used == {each.addresses[index] for each in GATEWAYS}, "by ports"
        assert site.calls(address)
    site.run("router", "sh", "-e", given=static.render(reach_of(POOLS, GATEWAYS[1:])))
    assert next_hops(site, "203.0.113.0/28") == {"192.0.2.12"}
    assert next_hops(site, "2001:db8:f::/120") == {"2001:db8:2::12"}
    assert all(map(site.calls, ADDRESSES))


def test_the_routes_of_a_gateway_are_in_the_table_that_its_bird_reads() -> None:
    assert speaker.TABLE == FIRST_TABLE + 100, "100 is the default priority of the tc filter"


async def test_a_router_learns_what_the_gateways_serve_and_loses_a_dead_gateway(
    bird: Path, site: Site
) -> None:
    """Only single addresses of pools are learned, also from a gateway that announces others."""
    gateways = speaker.render(side_of_gateways(POOLS, bfd=True), ROUTER)
    careless = re.sub(r"export filter \w+;", "export all;", gateways)
    routing = KERNEL + router_text.render(reach_of(POOLS, GATEWAYS, bfd=True))
    daemons = {}
    for host, text in (("router", routing), ("gw1", gateways), ("gw2", careless)):
        if host != "router":
            site.serve(host, (*ADDRESSES, OUTSIDE))
        daemons[host] = Bird(site.folder / f"{host}.ctl")
        file = site.folder / f"{host}.conf"
        file.write_text(text)
        site.start(host, bird, "-f", "-R", "-c", file, "-s", daemons[host].path)

    async def until_next_hops(*hosts: str) -> None:
        """Wait until the router's kernel has these gateways as the next hops of both addresses."""
        for index, address in enumerate(ADDRESSES):
            wanted = {each.addresses[index] for each in GATEWAYS if each.name in hosts}
            async with asyncio.timeout(60):
                while next_hops(site, address) != wanted:
                    await asyncio.sleep(0.05)

    await until_next_hops("gw1", "gw2")
    assert all(map(site.calls, ADDRESSES))
    assert await daemons["router"].version() == "2.0.12"
    learned = {each.prefix for each in await daemons["router"].routes()}
    assert learned == {"203.0.113.10/32", "2001:db8:f::10/128"}
    assert {each.prefix for each in await daemons["gw1"].exported("fairlead_to_router1")} == {
        "203.0.113.10/32"
    }
    assert OUTSIDE + "/32" in {
        each.prefix for each in await daemons["gw2"].exported("fairlead_to_router1")
    }
    sessions = {
        each.name: each for each in await daemons["router"].protocols() if each.kind == "BGP"
    }
    assert len(sessions) == 4
    assert all(each.established for each in sessions.values())
    assert [each.channels[0].exported for each in sessions.values()] == [0] * 4
    assert {each.state for each in await daemons["gw1"].bfd_sessions()} == {"Up"}
    with pytest.raises(FairleadError, match="syntax error"):
        await daemons["gw1"].exported("missing")

    site.serve("gw1", ADDRESSES, ends=True)
    await until_next_hops("gw2")
    site.serve("gw1", ADDRESSES)
    await until_next_hops("gw1", "gw2")
    await daemons["gw1"].configure()

    site.run("router", "ip", "link", "set", "port2", "nomaster")  # the cable of gw2
    await until_next_hops("gw1")
    assert all(map(site.calls, ADDRESSES))
