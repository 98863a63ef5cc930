"""A node whose health ports are flooded, from outside and by one of its own pods, stays a member at
all gateways."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.e2e.load import CLIENT, GATEWAY, Load, Web, fetch, until
from tests.e2e.logs import lines_of

from fairlead.drivers.healthport import PROXY_HEALTH_PORT
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

FLOODING = Path(__file__).parents[2] / "bench" / "flooding.py"
NODES = ("node1", "node2")
FLOODED_S = 8.0
"""The duration of the flood: eighty probes of the node."""
PROBE_TIMEOUT_S = 0.9
"""The time that a node has to answer a probe, instead of the default of 0.15 s. The machine of the
tests runs the flood, the node and other tests on the same processors, and may keep the health check
server waiting for 0.3 s, which the gateway would take for a failure. A lost packet is repeated only
after a second, so a flood that fills a queue of connections still counts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web() -> AsyncIterator[Web]:
    async with Site.create(f"health{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        path = site.directory.config_of(GATEWAY)
        config = msgspec.yaml.decode(path.read_text())
        config["gateway"]["probeTimeoutS"] = PROBE_TIMEOUT_S
        site.directory.write_config_of(GATEWAY, msgspec.yaml.encode(config).decode())
        await site.stop_role(GATEWAY)
        await site.start_role(GATEWAY)
        web = Web(site)
        await web.start(NODES)
        await web.create(ipFamilyPolicy="PreferDualStack")
        await web.await_weights(NODES)
        yield web


def verdicts(site: Site) -> Counter[tuple[str, str]]:
    """Return how often the gateway has found a health port unhealthy."""
    lines = lines_of(site.directory.log(f"{GATEWAY}/gateway"))
    probed = (json.loads(line) for line in lines if '"event": "probed"' in line)
    return Counter((each["target"], each["verdict"]) for each in probed)


async def test_a_node_with_flooded_health_ports_stays_a_member(web: Web) -> None:
    site = web.site
    node = site.topology.host("node1")
    plan = (await fetch(site, GATEWAY, "/state"))["services"]["default/web"]["plan"]
    ports = [str(PROXY_HEALTH_PORT), str(plan["health_monitor"]["port"])]
    (own_pod,) = [name for name, where in (await web.pods()).items() if where == "node1"]
    before = verdicts(site)
    floods = []
    async with Load(site, web.address) as load:
        for place in (CLIENT, f"default/{own_pod}"):
            log = site.directory.path / f"flood-{place.replace('/', '.')}"
            argv = [sys.executable, "-P", str(FLOODING), "all", "any", node.addresses[0], *ports]
            floods.append((site.spawn(place, argv, label=f"flood/{place}", log=log), log))
        try:
            for _, log in floods:
                await until(partial(_is_flooding, log), "the flood")
            period = await load.counts_during(web.await_weights(NODES), watch_s=FLOODED_S)
            assert await web.members() == dict.fromkeys(NODES, (1, "active"))
        finally:
            for flood, _ in floods:
                await flood.kill()
    assert verdicts(site) == before
    assert period.nodes.keys() == set(NODES)


async def _is_flooding(log: Path) -> bool:
    return "flooding" in await asyncio.to_thread(log.read_text)
