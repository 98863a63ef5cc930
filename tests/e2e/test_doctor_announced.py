"""`fairlead doctor` and announcement: a foreign host with an address on layer 2, and
a BGP session whose router is gone."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.doctor import Doctor, pod
from tests.e2e.kubectl import service

from fairlead.lab import process
from fairlead.lab.routers import Routing
from fairlead.lab.site import Site
from fairlead.lab.topology import LAN_POOL, ROUTER

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link() -> AsyncIterator[Site]:
    """A lab whose gateway announces addresses on layer 2."""
    async with Site.create(
        f"docl{os.getpid()}", nodes=1, gateways=1, announce="l2", lan_clients=1
    ) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routed() -> AsyncIterator[Site]:
    """A lab whose gateway announces addresses by BGP."""
    routing = Routing(daemon="bird", bfd_interval_ms=100)
    async with Site.create(
        f"docb{os.getpid()}", nodes=1, gateways=1, announce="bgp", routing=routing
    ) as site:
        yield site


async def test_a_foreign_host_with_the_address_of_a_service(link: Site) -> None:
    address = LAN_POOL[0].split("-")[0]
    change = ["ip", "address", "add", f"{address}/24", "dev", "eth0"]
    assert (await link.exec("host1", change))[0] == 0
    request = {"fairlead.io/addresses": address}
    await link.apply([pod("solo", "web", "node1"), service("web", annotations=request)])
    await link.await_pods()
    doctor = Doctor(link)
    await doctor.finds([("address-conflict", f"address {address}")])
    change[2] = "del"
    assert (await link.exec("host1", change))[0] == 0
    await doctor.finds([])


async def test_a_session_whose_router_is_gone(routed: Site) -> None:
    await routed.apply([pod("solo", "web", "node1"), service("web")])
    await routed.await_pods()
    doctor = Doctor(routed)
    await doctor.finds([])
    await process.kill_all(process.find(routed.name, f"{ROUTER}/bird"))
    found = await doctor.findings("--grace", "1")
    while not found or found[0]["id"] != "bgp-down":
        found = await doctor.findings("--grace", "1")
    assert {(each["id"], each["object"]) for each in found} == {("bgp-down", "gateway gw1")}
