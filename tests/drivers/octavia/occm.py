"""A load balancer as cloud-provider-openstack 1.34 makes one for the Service `default/web` of
cluster `kubernetes`.

Names, tags and descriptions of `pkg/openstack/loadbalancer.go`: `buildLoadBalancerCreateOpts`,
`buildListenerCreateOpt`, `buildPoolCreateOpt`, `buildMonitorCreateOpts` and
`buildBatchUpdateMemberOpts`; with Octavia's tags, so since API 2.5."""

from collections.abc import Iterable
from typing import Any

from openstack.connection import Connection
from tests.drivers.octavia.site import SUBNET
from tests.openstack import clients

from fairlead.drivers.octavia.balancers import BalancerState
from fairlead.model import Provider

NAME = "kube_service_kubernetes_default_web"
DESCRIPTION = "Kubernetes external service default/web from cluster kubernetes"
FLOATING_DESCRIPTION = f"Floating IP for {DESCRIPTION}"


def make(
    client: Connection,
    ports: Iterable[int] = (80, 443),
    nodes: Iterable[str] = ("10.1.0.1", "10.1.0.2"),
    *,
    provider: Provider = "amphora",
    subnet: str = SUBNET,
    address: str = "198.51.100.77",
) -> str:
    """Create the load balancer, wait until it is ACTIVE, and return its id. Its members have weight
    1 and no monitor port; its health monitors are of type TCP."""
    listeners = []
    for number, port in enumerate(ports):
        members = [
            {
                "name": f"node_{port}_{node}",
                "address": node,
                "protocol_port": 30000 + port,
                "weight": 1,
            }
            for node in nodes
        ]
        monitor = {
            "name": f"monitor_{number}_{NAME}",
            "type": "TCP",
            "delay": 5,
            "timeout": 3,
            "max_retries": 1,
            "max_retries_down": 3,
        }
        pool = {
            "name": f"pool_{number}_{NAME}",
            "protocol": "TCP",
            "lb_algorithm": "ROUND_ROBIN" if provider == "amphora" else "SOURCE_IP_PORT",
            "members": members,
            "healthmonitor": monitor,
        }
        times = {
            "timeout_client_data": 50000,
            "timeout_member_data": 50000,
            "timeout_member_connect": 5000,
            "timeout_tcp_inspect": 0,
        }
        listeners.append(
            {
                "name": f"listener_{number}_{NAME}",
                "protocol": "TCP",
                "protocol_port": port,
                "connection_limit": -1,
                "tags": [NAME],
                **(times if provider == "amphora" else {}),
                "default_pool": pool,
            }
        )
    made = client.load_balancer.create_load_balancer(
        name=NAME,
        description=DESCRIPTION,
        provider=provider,
        vip_subnet_id=subnet,
        vip_address=address,
        tags=[NAME],
        listeners=listeners,
    )
    assert clients.wait_settled(client, made.id) == "ACTIVE"
    return str(made.id)


def ids(tree: BalancerState) -> dict[str, Any]:
    """Return the ids that adoption must not change."""
    return {
        "load balancer": (tree.id, tree.address, tree.name),
        "listeners": sorted(each.id for each in tree.listeners),
        "pools": sorted(each.id for each in tree.pools),
        "members": sorted(each.id for pool in tree.pools for each in pool.members),
        "monitors": sorted(pool.monitor.id for pool in tree.pools if pool.monitor is not None),
    }
