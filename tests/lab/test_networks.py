"""A lab with nodes on two networks, where the nodes are the gateways: reachability, roles, and
routes of VIPs."""

import json
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import yaml

from fairlead.lab.overview import overview
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    transport = Transport(tunnel="vxlan", forwarding="auto", attach="tc")
    name = f"far{os.getpid()}"
    async with Site.create(
        name, nodes=1, far_nodes=1, gateways_on_nodes=True, transport=transport
    ) as site:
        yield site


@pytest.mark.parametrize("family", [0, 1])
async def test_hosts_of_all_networks_reach_each_other(site: Site, family: int) -> None:
    hosts = {host.name: host.addresses[family] for host in site.topology.hosts}
    assert hosts["node2"] in ("198.18.0.22", "2001:db8:3::16")
    for called in hosts:
        with site.socket(called, 10 if family else 2) as listener:
            listener.bind((hosts[called], 8080))
            listener.listen()
            for caller in hosts:
                _, writer = await site.connect(caller, hosts[called], 8080)
                assert writer.get_extra_info("sockname")[0] == hosts[caller]
                writer.close()


async def test_every_node_runs_both_roles(site: Site) -> None:
    seen = {host.name: (host.state, host.processes) for host in (await overview(site)).hosts}
    for node in ("node1", "node2"):
        assert seen[node] == ("up", ("gateway", "node"))
    await site.kill_role("node2", "gateway")
    assert {host.name: host.state for host in (await overview(site)).hosts}["node2"] == "no role"
    await site.start_role("node2", "gateway")


async def test_packets_for_vips_are_routed_to_all_nodes(site: Site) -> None:
    for family, vips, hops in (
        ("-4", "203.0.113.0/24", [("192.0.2.21", "lan"), ("198.18.0.22", "far")]),
        ("-6", "2001:db8:f::/64", [("2001:db8:1::15", "lan"), ("2001:db8:3::16", "far")]),
    ):
        _, output, _ = await site.exec(
            "router", ["ip", family, "-json", "route", "show", "root", vips]
        )
        (route,) = json.loads(output)
        assert [(hop["gateway"], hop["dev"]) for hop in route["nexthops"]] == hops


async def test_the_configuration_has_a_tunnel_to_nodes_of_other_networks(site: Site) -> None:
    said = yaml.safe_load(site.directory.config.read_text())
    assert said["gateway"]["attach"] == "tc"
    assert said["tunnel"] == {
        "kind": "vxlan",
        "gateways": ["192.0.2.21/32", "2001:db8:1::15/128", "198.18.0.22/32", "2001:db8:3::16/128"],
    }
