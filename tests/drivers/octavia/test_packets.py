"""Packets through a load balancer of provider ovn and a real OVN: which pod receives them, and
which client address pods see."""

from collections import Counter
from functools import partial

import msgspec
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service
from tests.drivers.octavia.test_ovn import nodes
from tests.openstack import clients
from tests.openstack.ovn import SOUTH
from tests.openstack.packets import CALLER, NODE_PORT, Packets

from fairlead.model import OctaviaChecks

CALLS = 40
QUICK = OctaviaChecks(delay_s=4, timeout_s=3, fall=2)


def counted(packets: Packets, address: str) -> Counter[str]:
    """Return how many of several connections each node's pod has received. A failed connection is
    counted under `` and ends the run. Pods see the client's address."""
    found: Counter[str] = Counter()
    for _ in range(CALLS):
        answer = packets.call(address, 80) or {"node": "", "peer": CALLER}
        assert answer["peer"] == CALLER
        found[answer["node"]] += 1
        if not answer["node"]:
            break
    return found


def counts_only(packets: Packets, address: str, nodes: set[str]) -> bool:
    """Report whether exactly the pods of these nodes answer."""
    return counted(packets, address).keys() == nodes


async def test_packets_reach_pods_that_live_and_see_who_calls(
    cloud_site: CloudSite, packets: Packets
) -> None:
    """By VIP and by floating IP (Launchpad 1956035)."""
    site = cloud_site
    settings = msgspec.structs.replace(site.outside(), checks=QUICK, secured=True)
    await site.bring(service(listener(80, *nodes("node1", "node2", "node3")), octavia=settings))
    tree = await site.tree()
    addresses = sorted(tree.shown)
    assert len(addresses) == 2
    for address in addresses:
        clients.until(partial(counts_only, packets, address, {"node1", "node2", "node3"}))

    packets.kill_pod("node2")

    def dead() -> set[str]:
        rows = site.at.ovn.rows("Service_Monitor", database=SOUTH)
        return {
            row["ip"] for row in rows if row["port"] == NODE_PORT and row["status"] == "offline"
        }

    clients.until(lambda: dead() == {"10.1.0.12"})
    for address in addresses:
        clients.until(partial(counts_only, packets, address, {"node1", "node3"}))

    site.forget()
    await site.bring(service(listener(80, *nodes("node1", "node2")), octavia=settings))
    assert (set(site.writes), site.neutron_writes) == ({"DELETE pools/_/members/_"}, [])
    for address in addresses:
        clients.until(partial(counts_only, packets, address, {"node1"}))
    await site.bring()
    assert (site.everything(), site.floating) == ([], [])
