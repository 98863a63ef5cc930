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
from tests.openstack.packets import CLIENT_ADDRESS, NODE_PORT, Packets

from fairlead.model import OctaviaChecks

CONNECTIONS = 40
QUICK = OctaviaChecks(delay_s=4, timeout_s=3, fall=2)


def connections_by_node(packets: Packets, address: str) -> Counter[str]:
    """Return how many of several connections the pod of each node receives. A failed connection
    counts for node "", and no further one is made. Check that pods see the client's address."""
    found: Counter[str] = Counter()
    for _ in range(CONNECTIONS):
        answer = packets.call(address, 80) or {"node": "", "peer": CLIENT_ADDRESS}
        assert answer["peer"] == CLIENT_ADDRESS
        found[answer["node"]] += 1
        if not answer["node"]:
            break
    return found


def only_these_respond(packets: Packets, address: str, nodes: set[str]) -> bool:
    """Return whether exactly the pods of these nodes respond."""
    return connections_by_node(packets, address).keys() == nodes


async def test_packets_reach_only_live_pods_which_see_the_address_of_the_client(
    cloud_site: CloudSite, packets: Packets
) -> None:
    """This holds for the VIP and for the floating IP (Launchpad 1956035)."""
    site = cloud_site
    settings = msgspec.structs.replace(site.with_floating_ip(), checks=QUICK, secured=True)
    await site.reconcile(service(listener(80, *nodes("node1", "node2", "node3")), octavia=settings))
    tree = await site.tree()
    addresses = sorted(tree.shown)
    assert len(addresses) == 2
    for address in addresses:
        clients.wait_until(
            partial(only_these_respond, packets, address, {"node1", "node2", "node3"})
        )

    packets.kill_pod("node2")

    def offline() -> set[str]:
        rows = site.openstack.ovn.rows("Service_Monitor", database=SOUTH)
        return {
            row["ip"] for row in rows if row["port"] == NODE_PORT and row["status"] == "offline"
        }

    clients.wait_until(lambda: offline() == {"10.1.0.12"})
    for address in addresses:
        clients.wait_until(partial(only_these_respond, packets, address, {"node1", "node3"}))

    site.clear_calls()
    await site.reconcile(service(listener(80, *nodes("node1", "node2")), octavia=settings))
    assert (set(site.writes), site.neutron_writes) == ({"DELETE pools/_/members/_"}, [])
    for address in addresses:
        clients.wait_until(partial(only_these_respond, packets, address, {"node1"}))
    await site.reconcile()
    assert (site.balancer_ids(), site.floating) == ([], [])
