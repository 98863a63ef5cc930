"""Gateways announce addresses by BGP, each through the BIRD of its host, to a router whose BIRD has
the configuration that `fairlead announce plan` prints. The router has both gateways as next hops,
whatever happens to the processes of Fairlead, and only the other one soon after a gateway's host
has died. In the second lab, `announce.bgp` is not configured, and the BIRDs of the gateways have
printed configurations too."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.load import Load, Web, output, until

from fairlead.lab.process import Process
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net.address import is_ipv6
from fairlead.net.bird import Bird
from fairlead.probe.steady import Period
from fairlead.routers.planning import ASN, ROUTER_ASN

pytestmark = [
    pytest.mark.soak,
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
]

PROGRAM = Path(sys.executable).with_name("fairlead")
GATEWAYS = ("gw1", "gw2")
OPEN = 200
BROKEN = 2
"""How many open connections may break with the host of a gateway."""
PATIENCE_S = 3.0
PLACE = "/DIRECTORY"
"""Stands for the directory of one gateway in the configuration of the lab."""
KERNEL = """
protocol device {}
protocol kernel { ipv4 { export all; }; merge paths on; }
protocol kernel { ipv6 { export all; }; merge paths on; }
"""


class Fabric:
    """A lab whose router and gateways each run a BIRD, and its Service. `managed`: whether the
    gateways configure their BIRDs."""

    def __init__(self, site: Site, bird: Path, *, managed: bool) -> None:
        self.site = site
        self.managed = managed
        self.web = Web(site)
        self.web.gateways = GATEWAYS
        self._bird = bird
        self._daemons: dict[str, Process] = {}

    async def up(self) -> None:
        """Replace the static routes of the router by sessions."""
        hops = [
            f"--next-hop={name}={address}"
            for name in GATEWAYS
            for address in self.site.topology.host(name).addresses
        ]
        await self.site.route_vips([])
        for name in GATEWAYS:
            self.directory(name).mkdir()
        if self.managed:
            self._configure()
        router = await self._plan("--router", "bird", *hops)
        self.directory(ROUTER).mkdir()
        (self.directory(ROUTER) / "bird.conf").write_text(KERNEL + router)
        self.start(ROUTER)
        for name in GATEWAYS:
            if self.managed:
                await self.site.stop_role(name)
                await self.begin(name, self.site.start_role(name))
            else:
                routers = [f"--router-address={network[1]}" for network in LAN]
                text = await self._plan("--gateway", "bird", *routers)
                (self.directory(name) / "bird.conf").write_text(text)
                self.start(name)

    def _configure(self) -> None:
        """Add `announce.bgp` to the configuration of the lab."""
        addresses = [str(network[1]) for network in LAN]
        routers = [
            {"name": f"router-{at}", "address": address, "asn": ROUTER_ASN, "bfd": {}}
            for at, address in enumerate(addresses)
        ]
        section = {"asn": ASN, "routers": routers, "directory": PLACE}
        config = yaml.safe_load(self.site.directory.config.read_text())
        config["announce"] = {"bgp": section}
        self.site.directory.config.write_text(yaml.safe_dump(config))

    async def begin(self, name: str, starting: Coroutine[Any, Any, object]) -> None:
        """Carry out what starts a gateway, and start its BIRD, without which it is not ready. All
        hosts of a lab share the files of this machine, so each gateway gets its own directory."""
        if not self.managed:
            await starting
            self.start(name)
            return
        config = self.site.directory.config
        common = config.read_text()
        config.write_text(common.replace(PLACE, str(self.directory(name))))
        (self.directory(name) / "bird.conf").unlink(missing_ok=True)
        try:
            task = asyncio.create_task(starting)
            await until(self._has_configuration(name), "the configuration of BIRD")
            self.start(name)
            await task
        finally:
            config.write_text(common)

    def _has_configuration(self, name: str) -> Callable[[], Awaitable[bool]]:
        async def exists() -> bool:
            return (self.directory(name) / "bird.conf").exists()

        return exists

    def directory(self, host: str) -> Path:
        """Return the directory of the BIRD of a host."""
        return self.site.directory.path / f"bird-{host}"

    def start(self, host: str) -> None:
        """Start the BIRD of a host."""
        files = ("-c", str(self.directory(host) / "bird.conf"), "-s", str(self.client(host).path))
        self._daemons[host] = self.site.spawn(host, (str(self._bird), "-f", "-R", *files))

    async def kill(self, host: str) -> None:
        """Kill the BIRD of a host."""
        await self._daemons[host].kill()

    def client(self, host: str) -> Bird:
        return Bird(self.directory(host) / "bird.ctl")

    async def next_hops(self, address: str) -> set[str]:
        """Return the gateways to which the router sends packets for the address."""
        family = "-6" if is_ipv6(address) else "-4"
        shown = await output(self.site, ROUTER, "ip", family, "-json", "route", "show", address)
        found = {
            hop["gateway"]
            for route in json.loads(shown)
            for hop in route.get("nexthops", [route])
            if "gateway" in hop
        }
        hosts = {one: each.name for each in self.site.topology.hosts for one in each.addresses}
        return {hosts[each] for each in found}

    async def await_next_hops(self, *gateways: str) -> None:
        """Wait until these gateways are the next hops of both addresses of the Service."""

        async def as_wanted() -> bool:
            found = [await self.next_hops(each) for each in self.web.addresses]
            return found == [set(gateways)] * 2

        await until(as_wanted, f"{' and '.join(gateways) or 'no gateway'} as next hops")

    async def counts_during(self, event: Awaitable[object]) -> Period:
        """Return what clients notice during the event and for some seconds after it."""
        loaded = Load(self.site, self.web.address, timeout_s=PATIENCE_S, open_connections=OPEN)
        async with loaded as load:
            return await load.counts_during(event, watch_s=PATIENCE_S)

    async def _plan(self, *options: str) -> str:
        directory = self.site.directory
        source = (f"--kubeconfig={directory.kubeconfig}", f"--config={directory.config}")
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "announce", "plan", *source, "--bfd", *options, stdout=-1, stderr=-1
        )
        text, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return text.decode()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[True, False], ids=["configured", "by hand"]
)
async def fabric(bird: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fabric]:
    name = f"bgp{os.getpid()}"
    async with Site.create(name, nodes=2, gateways=2, transport=Transport(peers=True)) as site:
        fabric = Fabric(site, bird, managed=request.param)
        await fabric.web.start(["node1", "node2"])
        await fabric.web.create(ipFamilyPolicy="RequireDualStack")
        await fabric.web.await_weights(["node1", "node2"])
        await fabric.up()
        await fabric.await_next_hops(*GATEWAYS)
        yield fabric


def prefixes(addresses: Sequence[str]) -> set[str]:
    return {f"{each}/{128 if is_ipv6(each) else 32}" for each in addresses}


async def test_the_router_learns_the_addresses_of_services_and_nothing_else(fabric: Fabric) -> None:
    found = await fabric.client(ROUTER).routes()
    assert {each.prefix for each in found} == prefixes(fabric.web.addresses)
    sessions = await fabric.client(ROUTER).bfd_sessions()
    assert [each.state for each in sessions] == ["Up"] * 4


async def test_no_call_fails_while_the_processes_of_a_gateway_are_killed_and_started(
    fabric: Fabric,
) -> None:
    async def restart() -> None:
        await fabric.site.kill_role("gw1")
        await asyncio.sleep(1)
        assert [await fabric.next_hops(each) for each in fabric.web.addresses] == [
            set(GATEWAYS)
        ] * 2
        await fabric.kill("gw1")
        await fabric.begin("gw1", fabric.site.start_role("gw1"))

    period = await fabric.counts_during(restart())
    assert (period.failed, period.broken) == (0, [])
    assert period.requests >= OPEN
    await fabric.await_next_hops(*GATEWAYS)


async def test_no_call_fails_while_a_bird_is_killed_and_started(fabric: Fabric) -> None:
    async def restart() -> None:
        await fabric.kill("gw1")
        await asyncio.sleep(1)
        fabric.start("gw1")
        await fabric.await_next_hops(*GATEWAYS)

    period = await fabric.counts_during(restart())
    assert (period.failed, period.broken) == (0, [])
    assert period.requests >= OPEN


async def test_the_addresses_of_a_service_that_is_deleted_are_withdrawn(fabric: Fabric) -> None:
    spec = {"type": "LoadBalancer", "selector": {"app": "none"}, "ports": [{"port": 80}]}
    metadata = {"name": "other", "namespace": "default"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
    await fabric.site.apply([service])

    async def announced() -> bool:
        found = {each.prefix for each in await fabric.client(ROUTER).routes()}
        return len(found - prefixes(fabric.web.addresses)) == 1

    async def withdrawn() -> bool:
        return not await announced()

    await until(announced, "the address of the new Service")
    async with fabric.site.client() as client:
        await client.request("DELETE", "/api/v1/namespaces/default/services/other")
    await until(withdrawn, "the withdrawal of the address")


async def test_open_connections_survive_the_death_of_a_gateways_host(fabric: Fabric) -> None:
    async def die() -> None:
        await fabric.site.kill_node("gw1")
        await fabric.await_next_hops("gw2")

    period = await fabric.counts_during(die())
    assert len(period.broken) <= BROKEN, period
    assert period.failed == 0, period
    await fabric.begin("gw1", fabric.site.revive_node("gw1"))
    await fabric.await_next_hops(*GATEWAYS)
