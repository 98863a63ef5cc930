"""Load balancers as other controllers configure them, for the demo to compare with: every node is a
member, and all members have equal weight.

In: Services of a lab, an address for each, and whether a health monitor checks the members. Out:
the Services' status, and forwarding by Fairlead's own data plane, so that the load balancers differ
only in what they *know*, not in how well they forward. Runs as `python -m fairlead.lab.plain` in
the namespace of a gateway until SIGTERM.

The monitor is the one that OCCM requests from Octavia when monitors are enabled: HTTP GET /healthz
on the healthCheckNodePort, interval 5 s, timeout 3 s, down after 3 failures, up after 1 success. As
in HAProxy, the first failure of a new member takes it down at once.
"""

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from fairlead.drivers.direct import DirectDriver
from fairlead.errors import Unavailable
from fairlead.kube.auth import find_access
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, SERVICES, Node, ObjectKey, Service
from fairlead.model import Listener, LoadBalancer, Member, ServiceKey
from fairlead.net.address import family_of
from fairlead.net.httpprobe import probe
from fairlead.plan.classes import DIRECT
from fairlead.plan.members import node_address
from fairlead.roles.process import run_until_signalled

DELAY_S = 5.0
TIMEOUT_S = 3.0
RETRIES_DOWN = 3
FILTER_PRIORITY = 200
"""Priority of this tc filter, after Fairlead's own filter on the same interface. Each filter passes
packets of other addresses on."""


class BalancedService(msgspec.Struct, frozen=True):
    """A Service to balance, its address, and whether a health monitor checks its members."""

    service: ServiceKey
    address: str
    monitored: bool

    @classmethod
    def parse(cls, text: str) -> "BalancedService":
        """Parse NAMESPACE/NAME=ADDRESS, with an optional `,monitored` suffix."""
        name, _, rest = text.partition("=")
        address, _, flag = rest.partition(",")
        return cls(ServiceKey.parse(name), address, flag == "monitored")


class Monitor:
    """A health monitor of one Service. `out` holds the addresses of the nodes that are down."""

    def __init__(self, service: Service, addresses: Sequence[str]) -> None:
        self.out: frozenset[str] = frozenset()
        self._port = service.spec.health_check_node_port
        self._failures_left = dict.fromkeys(addresses, 1)

    async def probe_all(self) -> None:
        """Probe every member once."""
        addresses = list(self._failures_left)
        answers = await asyncio.gather(*(self._probe(address) for address in addresses))
        for address, good in zip(addresses, answers, strict=True):
            self._failures_left[address] = (
                RETRIES_DOWN if good else max(0, self._failures_left[address] - 1)
            )
        self.out = frozenset(address for address, left in self._failures_left.items() if not left)

    async def _probe(self, address: str) -> bool:
        try:
            answer = await probe(address, self._port, "/healthz", timeout_s=TIMEOUT_S)
        except Unavailable:
            return False
        return answer.status == 200


def balancer_of(
    service: Service, nodes: Iterable[Node], address: str, out: frozenset[str]
) -> LoadBalancer:
    """Return a load balancer with every node as a member. The nodes in `out` are draining: they get
    no new connections and keep the open ones."""
    members = [
        Member(node.metadata.name, to, 1, "draining" if to in out else "active")
        for node in sorted(nodes, key=lambda node: node.metadata.name)
        if (to := node_address(node, family_of(address)))
    ]
    policy = service.spec.external_traffic_policy or "Cluster"
    listeners = tuple(
        Listener(
            family_of(address), port.port, port.protocol, policy, port.node_port, tuple(members)
        )
        for port in service.spec.ports
    )
    return LoadBalancer(service.key, service.metadata.uid, DIRECT.name, (address,), listeners)


async def publish(client: Client, balanced: BalancedService) -> None:
    """Write the address into the Service's status, as a cloud controller does."""
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": balanced.service.namespace, "name": balanced.service.name},
        "status": {"loadBalancer": {"ingress": [{"ip": balanced.address, "ipMode": "VIP"}]}},
    }
    await client.apply(
        SERVICES,
        ObjectKey(*balanced.service),
        body,
        field_manager="plain-balancer",
        subresource="status",
    )


async def reconcile(driver: DirectDriver, wanted: Mapping[ServiceKey, LoadBalancer]) -> None:
    changes = driver.diff(driver.render(wanted), await driver.read(wanted.keys()))
    if changes:
        outcomes = await driver.apply(changes)
        for key, outcome in outcomes.items():
            print(f"{key}: {outcome.message}", flush=True)


async def run(balanced: Sequence[BalancedService], client: Client, driver: DirectDriver) -> None:
    """Serve the Services until cancelled."""
    nodes = await client.list(NODES)
    services = {
        each.service: await client.get(SERVICES, ObjectKey(*each.service)) for each in balanced
    }
    monitors = {
        each.service: Monitor(
            services[each.service],
            [a for node in nodes if (a := node_address(node, family_of(each.address)))],
        )
        for each in balanced
        if each.monitored
    }

    def wanted() -> dict[ServiceKey, LoadBalancer]:
        out = {key: monitor.out for key, monitor in monitors.items()}
        return {
            each.service: balancer_of(
                services[each.service], nodes, each.address, out.get(each.service, frozenset())
            )
            for each in balanced
        }

    await reconcile(driver, wanted())
    for each in balanced:
        await publish(client, each)
    print("ready", flush=True)
    round_at = asyncio.get_running_loop().time()
    while True:
        round_at += DELAY_S
        await asyncio.sleep(round_at - asyncio.get_running_loop().time())
        for monitor in monitors.values():
            await monitor.probe_all()
        await reconcile(driver, wanted())


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fairlead.lab.plain", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--pin-path", type=Path, required=True)
    parser.add_argument("--interface", default="eth0")
    parser.add_argument("services", nargs="+", metavar="NAMESPACE/NAME=ADDRESS[,monitored]")
    arguments = parser.parse_args()
    driver = DirectDriver(
        [arguments.interface], pin_path=arguments.pin_path, priority=FILTER_PRIORITY
    )
    await driver.open()
    try:
        async with Client(find_access(arguments.kubeconfig, None)) as client:
            await run([BalancedService.parse(text) for text in arguments.services], client, driver)
    finally:
        await driver.close(remove=True)


if __name__ == "__main__":
    run_until_signalled(_main())
