"""Class ovn in a whole lab: a real OVN in front of the nodes, in the place that gateways have
otherwise, and the roles as on a real site.

The lab's router sends packets for Services to OVN's router, whose port is on one of three chassis.
OVN's router sends them to pods by their nodes, or to node ports, and replies return through it."""

import os
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from tests.drivers.ovn.traffic import ask, connect
from tests.e2e.announced import traces
from tests.e2e.load import CLIENT, PATIENCE_S, Load, output, until
from tests.e2e.ovn_web import OvnWeb, check_shares

from fairlead.errors import Refused
from fairlead.lab import process
from fairlead.lab.overview import find_log, overview
from fairlead.lab.ovn import edge
from fairlead.lab.ovn.view import OvnView, view
from fairlead.lab.rundir import Ovn, OvnBackends
from fairlead.lab.site import Site
from fairlead.lab.topology import CONTROL, ROUTER

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACES = ("node1", "node1", "node1", "node2")
OPEN = 30
FIRST_PORT = 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(ovn_programs: None) -> AsyncIterator[OvnWeb]:
    name = f"ovn{os.getpid()}"
    site = Site.create(name, nodes=3, gateways=0, default_class="ovn", ovn=Ovn())
    async with site:
        web = OvnWeb(site)
        await web.start(PLACES)
        await web.create(ipFamilyPolicy="RequireDualStack", ipFamilies=["IPv4", "IPv6"])
        yield web
    assert traces(name) == []


@pytest_asyncio.fixture(loop_scope="module")
async def web(lab: OvnWeb) -> OvnWeb:
    """Return the Service with its pods in a known state, whatever the previous test left."""
    await lab.place(PLACES)
    return lab


async def test_pods_see_the_client_and_have_equal_shares_on_any_node(web: OvnWeb) -> None:
    for address in web.addresses:
        check_shares(await web.calls(address), await web.pods())


async def test_no_call_fails_while_pods_move_to_another_node(web: OvnWeb) -> None:
    load = Load(web.site, web.address, timeout_s=PATIENCE_S, first_port=FIRST_PORT)
    async with load:
        period = await load.counts_during(web.place(("node2", "node3", "node3", "node3")))
    assert period.requests > 0
    assert (period.failed, period.broken) == (0, []), period
    assert set(period.nodes) == {"node1", "node2", "node3"}, period
    assert set(period.clients) == {web.own(web.address)}
    check_shares(await web.calls(web.address), await web.pods())


async def test_without_pods_new_connections_are_refused(web: OvnWeb) -> None:
    await web.place(())
    for address in web.addresses:
        with pytest.raises(ConnectionRefusedError):
            await web.call(address)
    assert {row.state for row in await web.rows()} == {"refusing"}


async def test_node_ports_are_shared_by_the_pods_of_the_nodes(web: OvnWeb) -> None:
    await use_backends(web, "nodePorts")
    try:
        nodes = web.site.topology.of("node")[:2]

        async def at_nodes() -> bool:
            found = {each.rpartition(":")[0].strip("[]") for each in await web.backends()}
            return found == {address for node in nodes for address in node.addresses}

        await until(at_nodes, "the node ports in OVN")
        await edge.central(web.site.topology).synchronize()
        for address in web.addresses:
            check_shares(await web.calls(address), await web.pods())
    finally:
        await use_backends(web, "pods")


async def use_backends(web: OvnWeb, backends: OvnBackends) -> None:
    """Restart the controller with other backends."""
    directory = web.site.directory
    config = msgspec.yaml.decode(directory.config.read_text())
    config["ovn"]["backends"] = backends
    directory.write_config_of(CONTROL, msgspec.yaml.encode(config).decode())
    await web.site.stop_role(CONTROL)
    await web.site.start_role(CONTROL)


async def test_the_lab_shows_chassis_and_load_balancers(web: OvnWeb) -> None:
    site = web.site
    seen = await overview(site)
    hosts = {host.name: (host.state, host.processes) for host in seen.hosts}
    assert hosts["chassis2"] == ("up", ("ovn-controller", "ovs-vswitchd", "ovsdb-server"))
    assert seen.ovn is not None
    assert [each.name for each in seen.ovn.chassis if each.router] == ["chassis1"]
    serving = {row.address: row for row in seen.ovn.balancers if row.state == "serving"}
    assert set(serving) == {f"{web.addresses[0]}:80", f"[{web.addresses[1]}]:80"}
    assert all(set(row.backends.values()) == {16} for row in serving.values())
    assert "LOAD BALANCER IN OVN" in [header[0] for header, _ in seen.tables()]
    assert "(edge)" in await output(site, ROUTER, "ovn-nbctl", "lr-list")
    assert "chassis3" in await output(site, CONTROL, "ovn-sbctl", "show")
    assert "br-int" in await output(site, "chassis3", "ovs-vsctl", "list-br")
    assert find_log(site, "northd").name == "ovn-northd.log"
    assert find_log(site, "chassis1/ovn-controller").name == "chassis1-ovn-controller.log"
    with pytest.raises(Refused, match="chassis1 of lab"):
        await site.revive_node("chassis1")


async def test_open_connections_continue_when_the_programs_of_a_chassis_are_killed(
    web: OvnWeb,
) -> None:
    """The other chassis are told nothing. Afterwards the router returns, because this chassis has
    the highest priority."""
    site = web.site
    inside = site.namespace(CLIENT)
    held = [await connect(inside, web.addresses[number % 2]) for number in range(OPEN)]
    before = [await ask(each) for each in held]
    for name in ("ovn-controller", "ovs-vswitchd"):
        await process.one(site.name, f"chassis1/{name}").kill()
    await until(lambda: port_is_on(site, "chassis2"), "the move to chassis2")
    assert [await ask(each) for each in held] == before
    for address in web.addresses:
        assert (await web.call(address)).peer == web.own(address)
    (dead,) = (each for each in (await overview(site)).hosts if each.name == "chassis1")
    assert dead.state == "no OVN"
    await site.revive_node("chassis1")
    await until(lambda: port_is_on(site, "chassis1"), "the return to chassis1")
    assert [await ask(each) for each in held] == before
    for each in held:
        each.close()


async def test_a_chassis_that_is_off_is_replaced_and_boots_again(web: OvnWeb) -> None:
    site = web.site
    await site.kill_node("chassis1")
    await until(lambda: port_is_on(site, "chassis2"), "the move to chassis2")
    assert (await web.call(web.address)).peer == web.own(web.address)
    await site.revive_node("chassis1")
    await until(lambda: port_is_on(site, "chassis1"), "the return to chassis1")
    assert (await web.call(web.address)).peer == web.own(web.address)


async def port_is_on(site: Site, name: str) -> bool:
    found: OvnView = await view(site.topology)
    return [each.name for each in found.chassis if each.router] == [name]
