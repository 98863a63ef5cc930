"""A million flows over uneven placements: every pod gets its share, within two per cent.

The packets are real, each the first of another flow: a quarter each of SYNs and datagrams over IPv4
and IPv6, from spoofed sources at a client through router, gateways and nodes into the pods. A rule
in the pods counts and drops them, so no packet is answered, and the counts show only how gateways
distribute flows over nodes, and nodes over pods."""

import json
import os
import sys
from collections.abc import AsyncIterator
from ipaddress import ip_address

import pytest
import pytest_asyncio
from tests.e2e.crowd import PORTS, Shop
from tests.e2e.load import CLIENT, output, until

from fairlead.config import TunnelKind
from fairlead.lab import namespace
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACEMENTS: dict[TunnelKind, tuple[str, ...]] = {
    "none": ("node1",) * 7 + ("node2",) * 3 + ("node3", "node4"),
    "ipip": ("node1", *("node2",) * 5, *("node4",) * 9, "node5", "node5"),
    "vxlan": ("node3", *("node4",) * 2, *("node5",) * 10),
}
"""The tunnel to the nodes behind a router, node4 and node5. Without one, all five nodes are on the
gateways' link."""
ROWS = [pytest.param(kind, marks=() if kind == "none" else pytest.mark.soak) for kind in PLACEMENTS]
FLOWS = 250_000
"""The number of flows for each protocol and family."""
PER_SECOND = 40_000
"""The number of packets per second. At a higher rate a busy machine would lose some packets."""
SOURCES = {4: "198.19.0.1", 6: "2001:db8:bad::1"}
TOLERANCE = 0.02
TIMEOUTS = ("udp_timeout", "tcp_timeout_syn_sent", "tcp_timeout_syn_recv")
SINK = """
table inet sink {
  counter met {}
  chain first {
    type filter hook prerouting priority raw
    ip saddr 198.19.0.0/16 counter name met drop
    ip6 saddr 2001:db8:bad::/64 counter name met drop
  }
}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS)
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    tunnel: TunnelKind = request.param
    near, far = (5, 0) if tunnel == "none" else (3, 2)
    transport = Transport(tunnel=tunnel)
    async with Site.create(
        f"shares{os.getpid()}",
        nodes=near,
        far_nodes=far,
        gateways=2,
        clients=1,
        transport=transport,
    ) as site:
        for host in site.topology.of("node"):
            # Each flow has one packet. The node's conntrack entries must not fill its table.
            namespace.set_sysctls(
                site.namespace(host.name),
                {f"net/netfilter/nf_conntrack_{name}": 1 for name in TIMEOUTS},
            )
        shop = Shop(site)
        await shop.start(PLACEMENTS[tunnel])
        await shop.create()
        await shop.await_weights(PLACEMENTS[tunnel])
        yield shop


async def received(site: Site, pod: str) -> int:
    listed = json.loads(
        await output(site, f"default/{pod}", "nft", "-j", "list", "counter", "inet", "sink", "met")
    )
    count: int = listed["nftables"][1]["counter"]["packets"]
    return count


async def test_each_pod_gets_its_share_of_a_million_flows(shop: Shop) -> None:
    site = shop.site
    pods = await shop.pods()
    for pod in pods:
        await output(site, f"default/{pod}", "nft", SINK)

    async def flood(kind: str, address: str, port: int) -> None:
        source = SOURCES[ip_address(address).version]
        argv = [sys.executable, "-m", "fairlead.probe", "flood", kind, source, address, str(port)]
        argv += ["--count", str(FLOWS), "--per-second", str(PER_SECOND)]
        code, sent, errors = await site.exec(CLIENT, argv, timeout_s=120)
        assert (code, sent.strip()) == (0, str(FLOWS)), errors

    for kind, port, _ in PORTS[:2]:
        for address in shop.addresses:
            await flood(kind, address, port)
    counts: dict[str, int] = {}

    async def all_received() -> bool:
        counts.update({pod: await received(site, pod) for pod in pods})
        return sum(counts.values()) == 4 * FLOWS

    try:
        await until(all_received, "the arrival of all flows at pods")
    except AssertionError as late:
        raise AssertionError(
            f"of {4 * FLOWS} flows {sum(counts.values())} reached a pod: {counts}"
        ) from late
    fair = 4 * FLOWS / len(pods)
    shown = {
        f"{pod} on {node}": f"{counts[pod]} ({counts[pod] / fair - 1:+.2%})"
        for pod, node in sorted(pods.items())
    }
    print(json.dumps(shown, indent=2))
    assert max(abs(count / fair - 1) for count in counts.values()) <= TOLERANCE, shown
