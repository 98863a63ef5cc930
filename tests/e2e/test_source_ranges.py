"""spec.loadBalancerSourceRanges, changed under traffic: permitted clients are admitted, connections
of other clients end, and other Services are not affected. The gateway checks each packet: removing
a range ends its open connections. The test uses both families."""

import asyncio
import itertools
import math
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Period, Shop, check_unharmed
from tests.e2e.load import NAME, addresses_of, drops, until

from fairlead.kube.objects import SERVICES
from fairlead.lab.site import Site
from fairlead.probe.crowd import SILENCE_S

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SIZE: dict[str, Any] = {"tcp": 50, "udp": 20, "quic": 10, "new_per_s": 50}
MANY = 5_000
INTERVAL_S = 0.5
SILENT = math.ceil((SILENCE_S + 2) / INTERVAL_S)
"""The number of request intervals without an answer after which a flow counts as broken."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop() -> AsyncIterator[Shop]:
    async with Site.create(f"ranges{os.getpid()}", nodes=2, gateways=1, clients=2) as site:
        shop = Shop(site, interval_s=INTERVAL_S)
        await shop.start(["node1", "node2"])
        await shop.create()
        await shop.await_weights(["node1", "node2"])
        yield shop


async def allow(shop: Shop, ranges: Sequence[str] | None) -> None:
    """Set the ranges; None admits every client."""
    async with shop.site.client() as client:
        await client.patch(
            SERVICES, ("default", NAME), {"spec": {"loadBalancerSourceRanges": ranges}}
        )


def own(shop: Shop, client: str) -> list[str]:
    four, six = shop.site.topology.host(client).addresses
    return [f"{four}/32", f"{six}/128"]


def others(count: int) -> list[str]:
    """Return ranges that contain no client of the lab, of each family."""
    networks = (
        IPv4Network("10.0.0.0/8").subnets(new_prefix=24),
        IPv6Network("2001:db8:aaa::/48").subnets(new_prefix=64),
    )
    return [str(network) for family in networks for network in itertools.islice(family, count)]


def cut_off(*periods: Period) -> bool:
    """Return whether all open flows have broken in these periods, or were unanswered for UDP."""
    return all(
        sum(sum(why.values()) for period in periods for why in period[name].broken.values())
        >= SIZE["tcp"]
        if name.startswith("tcp")
        else any(period[name].lost for period in periods)
        for name in periods[0]
    )


def answers(period: Period) -> bool:
    """Return whether a new flow was answered."""
    return any(count.answered for count in period.values())


async def test_only_clients_within_the_source_ranges_are_admitted(shop: Shop) -> None:
    """First the ranges contain client1 and not client2; then they do so among thousands of other
    ranges; then they contain neither client; then every client is admitted. Another Service with
    the same pods has no ranges, and client2 can always use it."""
    other = Shop(shop.site, interval_s=shop.interval_s)
    ports = [{"port": 80, "targetPort": "http"}]
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": NAME},
        "ports": ports,
    }
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "other", "namespace": "default"},
        "spec": spec,
    }
    await shop.site.apply([manifest])
    other.addresses = await addresses_of(shop.site, "other")
    async with (
        Crowd(shop, **SIZE) as first,
        Crowd(shop, host="client2", **SIZE) as second,
        Crowd(other, host="client2", tcp=20, udp=0, quic=0, new_per_s=20) as elsewhere,
    ):
        since = shop.down_verdicts()
        await second.take()
        await elsewhere.take()
        check_unharmed(
            await first.counts_during(allow(shop, own(shop, "client1"))),
            await shop.pods_of_down_nodes(since),
        )
        rejected: list[Period] = []

        async def is_rejected() -> bool:
            await asyncio.sleep(shop.interval_s)
            rejected.append(await second.take())
            return not answers(rejected[-1])

        await until(is_rejected, "the rejection of client2")
        period = await first.counts_during(
            allow(shop, [*own(shop, "client1"), *others(MANY // 2)]), intervals=6
        )
        check_unharmed(period, await shop.pods_of_down_nodes(since))
        assert (await drops(shop.site))["forbidden"] > 0
        rejected.append(await second.take())
        assert not answers(rejected[-1]), rejected[-1]
        assert cut_off(await first.counts_during(allow(shop, others(MANY // 2)), intervals=SILENT))
        assert cut_off(*rejected, await second.take())
        check_unharmed(await elsewhere.take())
        await allow(shop, None)
        for each in (first, second):
            await until(partial(is_admitted, each), "the admission of every client")


async def is_admitted(crowd: Crowd) -> bool:
    """Return whether all flows of the crowd are open and answered, and new ones succeed."""
    period = await crowd.counts_during(asyncio.sleep(0))
    return all(
        count.answered and not (count.failed or count.broken or count.lost or count.late)
        for count in period.values()
    )
