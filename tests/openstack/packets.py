"""The cloud with packets: nodes on the tenant's network, each with a pod behind its node port, and
a client outside the cloud.

In: a running Cloud. Out: which client address a pod has seen. The client is one router hop away
from the external network, so its address is not one of the cloud's; the nodes translate to their
pod as kube-proxy does for externalTrafficPolicy: Local."""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.openstack.chassis import NAME, Chassis
from tests.openstack.cloud import EXTERNAL, NODES, TENANT, Cloud
from tests.openstack.ovn import NORTH
from tests.openstack.processes import Processes, run

from fairlead.lab import echo, namespace
from fairlead.net.link import Nexthop, Rtnetlink

CLIENT_ADDRESS = "192.0.2.10"
NODE_PORT, POD_PORT = 30080, 8080
EXTERNAL_GATEWAY, TENANT_GATEWAY = (
    network.replace(".0/24", ".1") for network in (EXTERNAL, TENANT)
)
"""Neutron assigns the first address to the router. On the external network, the first address
belongs to the client's router instead."""
TIMEOUT_S = 5.0
SYSCTLS: dict[str, object] = {
    "net/ipv4/ip_forward": 1,
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/default/rp_filter": 0,
}
TRANSLATE = """
table ip node {{
  chain prerouting {{
    type nat hook prerouting priority dstnat
    tcp dport {port} dnat to {pod}
  }}
}}
"""


class Packets:
    """Packets through the cloud. Call `start` and `end` once each."""

    def __init__(self, cloud: Cloud, directory: Path) -> None:
        self.cloud = cloud
        self.chassis = Chassis(cloud.ovn, directory)
        self._networks = {node: f"10.244.{number}" for number, node in enumerate(NODES, 1)}
        self._pods = {node: Processes(directory) for node in NODES}
        self._outside = f"flt-ovn{os.getpid()}-outside"

    async def start(self) -> None:
        """Start, and return when the client can connect."""
        try:
            self.chassis.start()
            await self._make_outside()
            for node in NODES:
                await self._make_node(node)
            self.chassis.synchronize()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for pod in self._pods.values():
            pod.end()
        self.chassis.end()
        for name in namespace.names(f"flt-ovn{os.getpid()}-"):
            namespace.delete(name)

    def call(self, address: str, port: int) -> dict[str, Any] | None:
        """Return the response of the pod that a connection reaches; None if it reaches no pod."""
        with namespace.make_socket(self._outside) as connection, suppress(OSError):
            connection.settimeout(TIMEOUT_S)
            connection.bind((CLIENT_ADDRESS, 0))
            connection.connect((address, port))
            connection.sendall(b"who\n")
            connection.shutdown(socket.SHUT_WR)
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
            return answer
        return None

    def kill_pod(self, node: str) -> None:
        """Stop the pod; its node refuses connections to it."""
        self._pods[node].end()

    async def _make_outside(self) -> None:
        network = self.cloud.client().network
        (gateway,) = network.ports(
            device_id=self.cloud.router, device_owner="network:router_gateway"
        )
        # Neutron would choose according to agents on hypervisors.
        self.cloud.ovn.control(NORTH, "lrp-set-gateway-chassis", f"lrp-{gateway.id}", NAME)
        namespace.create(self._outside)
        await self.chassis.plug(self._outside, "02:00:00:00:00:01")
        async with _links(self._outside) as links:
            for device, address in (
                ("lo", f"{CLIENT_ADDRESS}/32"),
                ("eth0", f"{EXTERNAL_GATEWAY}/24"),
            ):
                await links.set_state(device, up=True)
                await links.set_address(device, address)
            await links.set_route(TENANT, Nexthop(gateway.fixed_ips[0]["ip_address"]))

    async def _make_node(self, node: str) -> None:
        name, pod = f"{self._outside}-{node}", f"{self._outside}-{node}-pod"
        for each in (name, pod):
            namespace.create(each)
            namespace.set_sysctls(each, SYSCTLS)
        port = self.cloud.client().network.get_port(self.cloud.nodes[node])
        await self.chassis.plug(name, port.mac_address, port.id)
        router, address = f"{self._networks[node]}.1", f"{self._networks[node]}.2"
        async with _links(name) as links:
            await links.add_veth(
                "pod", "02:00:00:00:01:01", "eth0", "02:00:00:00:01:02", namespace.path(pod)
            )
            for device, own in (("eth0", f"{NODES[node]}/24"), ("pod", f"{router}/24")):
                await links.set_state(device, up=True)
                await links.set_address(device, own)
            await links.set_route("0.0.0.0/0", Nexthop(TENANT_GATEWAY))
        async with _links(pod) as links:
            await links.set_state("eth0", up=True)
            await links.set_address("eth0", f"{address}/24")
            await links.set_route("0.0.0.0/0", Nexthop(router))
        rules = TRANSLATE.format(port=NODE_PORT, pod=f"{address}:{POD_PORT}")
        run(
            ("ip", "netns", "exec", name, "nft", "-f", "-"),
            self.chassis.directory,
            input_text=rules,
        )
        server = (
            sys.executable,
            "-I",
            "-S",
            echo.__file__,
            "--pod",
            address,
            "--node",
            node,
            "--tcp",
            str(POD_PORT),
        )
        self._pods[node].start(f"pod-{node}", ("ip", "netns", "exec", pod, *server))


def _links(name: str) -> Rtnetlink:
    with namespace.inside(name):
        return Rtnetlink()
