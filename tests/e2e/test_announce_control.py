"""What decides whether a gateway announces an address: the tables that serve it, pools, the
annotation of its Service, and the Node of the gateway. In a lab whose nodes are gateways, with
layer 2."""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.announced import AnnouncedShop, arp_owners, await_one_owner
from tests.e2e.load import NAME, until
from tests.e2e.logs import lines_of

from fairlead.kube.crds import ADDRESS_POOLS, BGP_PEERS
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

HOSTS = ("node1", "node2")
ASKER = "host1"
BRIEF = ObjectKey("default", "brief")
Object = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop() -> AsyncIterator[AnnouncedShop]:
    lab = Site.create(
        f"control{os.getpid()}", nodes=2, gateways_on_nodes=True, announce="l2", lan_clients=1
    )
    async with lab as site:
        shop = AnnouncedShop(site)
        await shop.start(HOSTS)
        await shop.create()
        await await_one_owner(site, ASKER, ipv4(shop), HOSTS)
        yield shop


def ipv4(shop: AnnouncedShop) -> list[str]:
    return [address for address in shop.addresses if ":" not in address]


def applied(site: Site, host: str, driver: str) -> list[int]:
    """Return the number of each line in the log of a gateway that says that this driver has applied
    changes of the brief Service."""
    lines = lines_of(site.directory.log(f"{host}/gateway"))
    entries = [json.loads(line) if '"applied"' in line else {} for line in lines]
    return [
        number
        for number, each in enumerate(entries)
        if (each.get("driver"), each.get("first")) == (driver, str(BRIEF))
    ]


async def annotate(site: Site, name: str, **annotations: str | None) -> None:
    """Set annotations of Fairlead on a Service; None removes one."""
    given = {f"fairlead.io/{key.replace('_', '-')}": text for key, text in annotations.items()}
    async with site.client() as client:
        key = ObjectKey("default", name)
        await client.patch(SERVICES, key, {"metadata": {"annotations": given}})


async def await_no_owner(site: Site, address: str) -> None:
    async def silent() -> bool:
        return await arp_owners(site, ASKER, address) == set()

    await until(silent, f"no host answers for {address}", deadline_s=30)


async def test_an_address_is_announced_after_its_tables_and_withdrawn_before(
    shop: AnnouncedShop,
) -> None:
    site = shop.site
    spec: Object = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "none"},
        "ports": [{"port": 80}],
        "ipFamilyPolicy": "SingleStack",
        "ipFamilies": ["IPv4"],
    }
    created: dict[str, int] = {}
    announced: dict[str, list[int]] = {}
    async with site.client() as client:
        await client.create(
            SERVICES, {"metadata": {"name": "brief"}, "spec": spec}, namespace="default"
        )
        addresses: list[str] = []

        async def published() -> bool:
            made = await client.get(SERVICES, BRIEF)
            addresses[:] = [each.ip for each in made.status.load_balancer.ingress if each.ip]
            return bool(addresses)

        await until(published, "an address", deadline_s=30)
        await await_one_owner(site, ASKER, addresses, HOSTS)
        for host in HOSTS:
            (created[host],) = applied(site, host, "direct")
            announced[host] = applied(site, host, "l2")
            assert created[host] < announced[host][0]
        await client.delete(SERVICES, BRIEF)
    await await_no_owner(site, addresses[0])

    async def removed() -> bool:
        return all(len(applied(site, host, "direct")) > 1 for host in HOSTS)

    await until(removed, "the tables of the Service are removed", deadline_s=30)
    for host in HOSTS:
        withdrawn = applied(site, host, "l2")
        assert len(withdrawn) > len(announced[host])
        assert created[host] < withdrawn[-1] < applied(site, host, "direct")[1]


async def test_a_service_may_decline_to_be_announced(shop: AnnouncedShop) -> None:
    (address,) = ipv4(shop)
    await annotate(shop.site, NAME, announce="none")
    await await_no_owner(shop.site, address)
    await annotate(shop.site, NAME, announce=None)
    await await_one_owner(shop.site, ASKER, [address], HOSTS)


async def test_a_node_that_must_get_no_traffic_hands_over_and_takes_nothing_back(
    shop: AnnouncedShop,
) -> None:
    site, addresses = shop.site, ipv4(shop)
    before = await await_one_owner(site, ASKER, addresses, HOSTS)
    (owner,) = set(before.values())
    (other,) = set(HOSTS) - {owner}
    await shop.exclude(owner, excluded=True)
    await await_one_owner(site, ASKER, addresses, [other])
    await shop.exclude(owner, excluded=False)

    async def back() -> bool:
        announcers = (await shop.view(owner))["services"][f"default/{NAME}"]["plan"]
        return not any(each["leaving"] for each in announcers["announcements"])

    await until(back, "the node may announce again", deadline_s=30)
    assert set((await await_one_owner(site, ASKER, addresses, HOSTS)).values()) == {other}


async def test_mistakes_in_pools_and_peers_do_not_disturb_others(shop: AnnouncedShop) -> None:
    """A pool that is edited so that it overlaps another one keeps announcing; an invalid BGPPeer
    concerns no address."""
    site, (address,) = shop.site, ipv4(shop)
    before = await await_one_owner(site, ASKER, [address], HOSTS)
    pool = {
        "metadata": {"name": "edited"},
        "spec": {"addresses": ["198.51.100.0/28"], "announce": {"method": "l2"}},
    }
    peer = {"metadata": {"name": "nowhere"}, "spec": {"asn": 64512, "address": "203.0.113.77"}}
    async with site.client() as client:
        await client.create(ADDRESS_POOLS, pool)
        await client.create(BGP_PEERS, peer)
        try:
            for edit in (
                {"addresses": ["198.51.100.0/28", "192.0.2.230-192.0.2.250"]},
                {"announce": {"method": "l2", "communities": ["70000:1"]}},
                {"announce": {"method": "bgp", "peers": ["nobody"]}},
            ):
                await client.patch(ADDRESS_POOLS, ("", "edited"), {"spec": edit})
            await annotate(site, NAME, bgp_peers="nobody")

            async def followed() -> bool:
                async with site.client() as reader:
                    made = await reader.get(SERVICES, ObjectKey("default", NAME))
                accepted = [c for c in made.status.conditions if c.type == "fairlead.io/Accepted"]
                return any("fairlead.io/bgp-peers has no effect" in c.message for c in accepted)

            await until(followed, "the annotation without effect is reported", deadline_s=30)
            assert await await_one_owner(site, ASKER, [address], HOSTS) == before
        finally:
            await annotate(site, NAME, bgp_peers=None)
            await client.delete(BGP_PEERS, ("", "nowhere"))
            await client.delete(ADDRESS_POOLS, ("", "edited"))
