"""`fairlead status` with the data plane of a gateway: Services, nodes, draining members,
interfaces."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from tests.drivers.direct.conftest import NAME, NODE1, PINS, Run, driver, load_balancer, run  # noqa: F401

from fairlead.config import ApiServerConfig
from fairlead.drivers import Component
from fairlead.drivers.direct.maps import pins
from fairlead.drivers.direct.maps.records import COUNTER, INDEX
from fairlead.drivers.host import HarmfulSetting
from fairlead.drivers.proxy import ApiServerBalancer, ProxyDriver
from fairlead.drivers.proxy.counters import ProxyTraffic
from fairlead.drivers.proxy.runtime import Info
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.model import DONE, DirectSettings, Listener, LoadBalancer, Member, ServiceKey
from fairlead.net.bpf import Map, possible_cpus
from fairlead.net.elf import read_object
from fairlead.role_state import (
    ApiServersState,
    ApiServerState,
    GatewayState,
    ListenerTraffic,
    Part,
    RoleState,
    TrafficState,
    TunnelState,
)
from fairlead.web import View, serve

pytestmark = pytest.mark.root

PROGRAM = Path(sys.executable).with_name("fairlead")
NODE2 = Member("node2", "192.0.2.22", 1)


async def status(*options: str) -> str:
    words = ("netns", "exec", NAME, str(PROGRAM), "status", "--address", "127.0.0.1:9441", *options)
    process = await asyncio.create_subprocess_exec("ip", *words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


def count_event(event: str, times: int) -> None:
    """Write counters as if the eBPF program had counted packets."""
    number = read_object(pins.OBJECT).types.enumerators("event")[event]
    (layout,) = PINS.glob("layout-*")
    with Map.open(layout / "events") as events:
        events.update(
            INDEX.pack(number), COUNTER.pack(times) + bytes(COUNTER.size * (possible_cpus() - 1))
        )


def test_status_of_a_gateway(run: Run) -> None:  # noqa: F811
    async def scenario() -> None:
        made = driver()
        await made.open()
        key = ServiceKey("default", "web")
        both = load_balancer(NODE1, NODE2)
        await made.apply(made.diff(made.render(both), await made.read(None)))
        drains = msgspec.structs.replace(
            load_balancer(NODE1, Member("node2", "192.0.2.22", 0, "draining"))[key],
            settings=DirectSettings(300.0),
        )
        outcomes = await made.apply(made.diff(made.render({key: drains}), await made.read([key])))
        assert outcomes[key].state == "done"
        assert outcomes[key].again_s > 299
        count_event("TRACK_REFUSED", 7)
        view = View("gateway", "gw1")
        proxy = ProxyDriver(Path("nowhere"))
        proxy.counters.take(
            {ServiceKey("default", "shop"): ProxyTraffic(9, 2, 30, 40, 1, 0, 5)},
            Info(1, 2, 9980),
            {ServiceKey("default", "shop"): 3},
        )
        balancer = ApiServerBalancer(
            ApiServerConfig(
                addresses=("203.0.113.5", "2001:DB8::5"), servers=("[2001:db8::1]:6443",)
            ),
            Path("nowhere"),
        )
        balancer.servers = {"[2001:db8::1]:6443": ApiServerState("not ready", 3, 8)}
        view.record(
            {key: msgspec.structs.replace(drains, addresses=("203.0.113.10", "203.0.113.11"))},
            {key: DONE},
        )
        with view.showing(made), view.showing(proxy), view.showing(balancer):
            async with serve(view, "127.0.0.1:9441"):
                shown = await status()
                states = msgspec.json.decode(await status("-o", "json"), type=list[RoleState])
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        assert "default/web 203.0.113.10 80/TCP node1=1 active, node2=0 draining 0 0 0" in lines
        assert "default/web 203.0.113.11 80/TCP node1=1 active, node2=0 draining - - -" in lines, (
            "the data plane has no such listener"
        )
        assert "NODE FORWARDING NEXT HOP FLOWS PACKETS BYTES" in lines
        assert "node1 l2 192.0.2.21 0 0 0" in lines
        assert any(line.startswith("default/web 203.0.113.10:80/TCP node2 ") for line in lines), (
            "who drains"
        )
        assert "default/shop 9 5 30 40 1 0 5" in lines
        connections = (
            "HAProxy has 5 open connections: 2, of at most 9980, in its newest worker, and 3 in "
            "older workers"
        )
        assert connections in lines
        assert "API servers behind 203.0.113.5:6443, [2001:db8::5]:6443:" in lines
        assert "[2001:db8::1]:6443 not ready 3 8" in lines
        assert any(line.startswith("eth0 tc ") for line in lines)
        assert {"drops: none", "messages: none"} <= set(lines)
        assert "new flows without an entry, over the limit: 7" in lines
        used = (
            "used: table memory 0.0 of 1 MiB, listeners 1 of 1024, retained nodes 0 of "
            "32768, source ranges 0 of 1048576"
        )
        assert used in lines
        assert not any(line.startswith("new entries not sent to peers") for line in lines), (
            "a count of zero is not shown"
        )
        (gateway,) = states
        assert isinstance(gateway, GatewayState)
        assert gateway.traffic is not None
        assert gateway.proxy is not None
        assert gateway.traffic.draining[0].node == "node2"
        assert gateway.traffic.nodes["node1"].forwarding == ("l2",)
        assert gateway.proxy.services["default/shop"].open == 5
        assert gateway.api_servers == ApiServersState(
            ("203.0.113.5:6443", "[2001:db8::5]:6443"),
            {"[2001:db8::1]:6443": ApiServerState("not ready", 3, 8)},
        )
        await made.close(remove=True)

    run(scenario)


class ComponentWithStatus(Component):
    """A component with this status."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def status(self) -> Part:
        return self._part


def test_counters_are_in_the_row_of_their_listener(run: Run) -> None:  # noqa: F811
    async def scenario() -> None:
        key = ServiceKey("default", "dns")
        listeners = [
            Listener("IPv4", 53, "UDP", "Local", 0, (NODE1,)),
            Listener("IPv4", 80, "TCP", "Local", 0, (NODE1,)),
            Listener("IPv6", 80, "TCP", "Local", 0, ()),
        ]
        addresses = ("203.0.113.10", "2001:db8:f::10")
        balancer = LoadBalancer(key, "uid", "fairlead.io/direct", addresses, tuple(listeners))
        counted = {
            "203.0.113.10:53/UDP": ListenerTraffic(0, 0, 0),
            "203.0.113.10:80/TCP": ListenerTraffic(1311, 102348, 114),
            "[2001:db8:f::10]:80/TCP": ListenerTraffic(2, 120, 1),
        }
        view = View("gateway", "gw1")
        view.record({key: balancer}, {key: DONE})
        with view.showing(ComponentWithStatus(TrafficState(listeners=counted))):
            async with serve(view, "127.0.0.1:9441"):
                lines = [" ".join(line.split()) for line in (await status()).splitlines()]
        assert lines[2:5] == [
            "default/dns 203.0.113.10 53/UDP node1=1 active 0 0 0",
            "default/dns 203.0.113.10 80/TCP node1=1 active 114 1311 102348",
            "default/dns 2001:db8:f::10 80/TCP none 1 2 120",
        ]

    run(scenario)


def test_status_of_a_node_shows_its_tunnel_and_its_host(run: Run) -> None:  # noqa: F811
    async def scenario() -> None:
        view = View("node", "node1")
        packets = {"taken": 5, "strangers": 0, "broken": 2}
        requirement = SysctlRequirement(
            "net/ipv4/conf/eth0/rp_filter",
            lambda value: value == "1",
            "2",
            "clients are not answered through it",
        )
        found = (HarmfulSetting(requirement, "1"), HarmfulSetting(requirement, "1", adjusted=True))
        view.host = lambda: [each.finding for each in found]
        with view.showing(ComponentWithStatus(TunnelState("ipip", packets))):
            async with serve(view, "127.0.0.1:9441"):
                lines = (await status()).splitlines()
        assert "tunnel: ipip, packets: taken 5, broken 2" in lines
        where = "host: net/ipv4/conf/eth0/rp_filter"
        why = "clients are not answered through it"
        assert (
            f"{where} is 1, should be 2: {why}; sysctl -w net/ipv4/conf/eth0/rp_filter=2" in lines
        )
        assert f"{where} was 1, set to 2: {why}" in lines

    run(scenario)
