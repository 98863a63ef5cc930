"""The callers of the benchmark of announcements notice what they are to measure. The measured times
prove nothing here."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bench.announce import KILLED, SILENT, Load, observe
from bench.announce_parts import first_answer_ms, idle, many, share
from bench.announced import EVENT_HEADINGS, Effect, Share, event_rows
from bench.announcers import (
    DIRECT_BGP,
    DIRECT_L2,
    Subject,
    answers,
    direct_lab,
    prepare,
    service,
)
from bench.caller import Called
from bench.paths import must
from bench.resilient import resilient

from fairlead.kube.objects import SERVICES
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.plan.classes import DIRECT

pytestmark = pytest.mark.root

LOAD = Load(open_connections=20, flows=4, calls_per_s=50)
VIP = "203.0.113.10"


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    """Yield a lab whose router sends the address of a Service to one gateway."""
    async with Site.create(f"ann{os.getpid()}", gateways=1) as site:
        await prepare(site)
        await site.apply([service("web", class_name=DIRECT.name, annotations={})])
        async with site.client() as client:
            while not (await client.list(SERVICES))[0].status.load_balancer.ingress:
                await asyncio.sleep(0.05)
        await answers(site, [VIP])
        yield Subject(site, {"routed": [VIP]}, ["gw1"])


async def test_a_silent_gateway_is_a_gap_of_every_caller_and_its_return_is_none(
    subject: Subject,
) -> None:
    found = await observe(subject, SILENT, 0, LOAD)
    during, after = (effects["routed"] for effects in found.values())
    assert during.called.longest_gap_ms > during.seconds * 900
    assert during.called.disturbed == LOAD.flows
    assert during.called.failed
    assert sum(during.broken.values()) == during.broken_elsewhere > 0
    assert (after.open, after.host) == (LOAD.open_connections, "gw1")
    assert not after.broken


async def test_every_part_is_measured_in_a_lab_whose_gateways_announce(kube_proxy: Path) -> None:
    async with direct_lab(f"ann{os.getpid()}") as subject:
        assert set(subject.addresses) == {DIRECT_L2, DIRECT_BGP}
        for way in subject.addresses:
            assert await first_answer_ms(subject, way, 0) > 0
            found = await share(subject, way, 500)
            assert (found.failed, len(found.by_pod)) == (0, found.pods)
            reached = await many(subject, way, 5, 0.1)
            assert reached.reached_s >= reached.created_s > 0
        assert (await idle(subject, 0.1)).processes > len(subject.site.topology.gateways)
        effects = await observe(subject, KILLED, 0, LOAD)
        assert [set(ways) for ways in effects.values()] == [{DIRECT_L2, DIRECT_BGP}] * 2
        assert not any(each.broken for ways in effects.values() for each in ways.values())
        (address,) = subject.addresses[DIRECT_BGP]
        before = await must(subject.site, ROUTER, f"ip route show {address}")
        async with resilient(subject.site, address):
            groups = await must(subject.site, ROUTER, "ip nexthop show id 2000")
            assert "type resilient" in groups
            assert len(re.findall(r"100\d", groups)) == len(subject.site.topology.gateways)
            assert await subject.hops(address) == len(subject.site.topology.gateways)
            await answers(subject.site, [address])
        assert await must(subject.site, ROUTER, f"ip route show {address}") == before


def test_a_row_shows_medians_and_the_worst_and_the_ratio_to_metallb() -> None:
    def effect(gap_ms: float, failed: int) -> Effect:
        called = Called(longest_gap_ms=gap_ms, failed=failed)
        return Effect(called, 10, {"node1": 1, "node2": 2}, 1.0, "node1")

    rounds = [
        {SILENT: {"fairlead l2": effect(gap_ms, 3), "metallb l2": effect(1000, 5)}}
        for gap_ms in (100, 200, 900)
    ]
    rows = [dict(zip(EVENT_HEADINGS, row, strict=True)) for row in event_rows(rounds)]
    assert [row["WAY"] for row in rows] == ["fairlead l2", "metallb l2"]
    assert rows[0] == {
        "EVENT": SILENT,
        "WAY": "fairlead l2",
        "HOST HAS": "no pods",
        "RUNS": "3",
        "LONGEST GAP, MEDIAN": "200 ms",
        "WORST": "900 ms",
        "OF METALLB'S": "0.200",
        "FAILED CALLS": "3, 3",
        "FOR": "0 ms, 0 ms",
        "BROKEN OF OPEN: ON THE HOST": "1, 1",
        "ELSEWHERE": "2, 2",
    }


def test_shares_are_relative_to_equal_shares_of_all_pods() -> None:
    share = Share(12, 0, {"a": 6, "b": 3, "c": 3}, 3)
    assert (share.busiest_over_fair, share.idlest_over_fair) == (1.5, 0.75)
    silent = Share(12, 0, {"a": 6, "b": 6}, 3)
    assert (silent.busiest_over_fair, silent.idlest_over_fair) == (1.5, 0)
