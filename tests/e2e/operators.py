"""What operators do to the nodes of a cluster whose nodes announce addresses.

In: a running lab of class announce, beside kube-proxy. Out: functions that drain nodes, change
their service proxies, report their shutdown, and edit pools and other Services."""

import asyncio
import itertools
from collections.abc import Collection, Mapping, Sequence

import msgspec
from tests.e2e.announced import services
from tests.e2e.kubectl import Kubectl
from tests.e2e.load import CLIENT, Load, Web, addresses_of

from fairlead.kube.crds import ADDRESS_POOLS
from fairlead.kube.objects import NODES, SERVICES, ObjectKey
from fairlead.lab import kubeproxy, process
from fairlead.lab.site import Site
from fairlead.probe.steady import Period

STOP_S = 10.0
PORTS_OF_A_LOAD = 4_000
_first_ports = itertools.cycle(range(2_000, 64_000 - PORTS_OF_A_LOAD, PORTS_OF_A_LOAD))
POOL = ObjectKey("", "extra")
SHUTTING_DOWN = {"type": "Ready", "status": "False", "message": "node is shutting down"}


def load(web: Web, *, address: str = "", host: str = CLIENT) -> Load:
    """Return a load whose connections have source ports that no earlier one had. A node to which a
    connection led before routes changed does not learn of its end. A later connection with the same
    port would be translated like that one, maybe to a pod that is gone."""
    first = next(_first_ports)
    return Load(web.site, address or web.address, host=host, first_port=first)


def check_unharmed(period: Period) -> None:
    """Check that no connection failed or broke, and that there were connections."""
    assert period.requests > 0
    assert (period.failed, period.broken) == (0, []), period


async def serve_by_fairlead(site: Site, node: str) -> None:
    """Replace the kube-proxy of a node by `fairlead node`."""
    path = site.directory.config_of(node)
    config = msgspec.yaml.decode(path.read_text())
    config["node"]["serviceProxy"] = True
    site.directory.write_config_of(node, msgspec.yaml.encode(config).decode())
    await site.stop_role(node)
    await _remove_kube_proxy(site, node)
    await site.start_role(node)


async def serve_by_iptables(site: Site, node: str) -> None:
    """Replace the kube-proxy of a node by one in mode iptables."""
    await _remove_kube_proxy(site, node)
    await kubeproxy.start(site, node, {"mode": "iptables"})


async def _remove_kube_proxy(site: Site, node: str) -> None:
    await process.one(site.name, f"{node}/kube-proxy").stop(STOP_S)
    await site.exec(node, ["nft", "flush", "ruleset"])


def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


async def drain(site: Site, node: str) -> None:
    """Evict or delete the pods of a node, and wait until they are gone."""
    await kubectl(site)("drain", node, "--force", "--ignore-daemonsets", "--timeout=50s")


async def drain_to(web: Web, node: str, *others: str) -> None:
    """Drain a node, while new pods are created on the others, as by a ReplicaSet."""
    async with asyncio.TaskGroup() as group:
        group.create_task(drain(web.site, node))
        group.create_task(web.start(others))


async def end_pods(web: Web, node: str) -> None:
    """Delete the pods of a node."""
    await web.end([name for name, on in (await web.pods()).items() if on == node])


async def roll_out(web: Web) -> None:
    """Replace each pod by a new one on its node."""
    for name, node in (await web.pods()).items():
        await web.start([node])
        await web.end([name])


async def set_policy(site: Site, policy: str, name: str = "web") -> None:
    """Set the external traffic policy of a Service."""
    async with site.client() as client:
        body = {"spec": {"externalTrafficPolicy": policy}}
        await client.patch(SERVICES, ObjectKey("default", name), body)


async def report(site: Site, node: str, *conditions: Mapping[str, str]) -> None:
    """Report the conditions of a node as its kubelet does."""
    async with site.client() as client:
        body = {"status": {"conditions": conditions}}
        await client.patch(NODES, ObjectKey("", node), body, subresource="status")


async def edit_pool(site: Site, *addresses: str) -> None:
    """Give the pool POOL these ranges, and create it if it does not exist."""
    kind = {"apiVersion": "fairlead.io/v1alpha1", "kind": "AddressPool"}
    spec = {"addresses": addresses}
    await site.apply([{**kind, "metadata": {"name": POOL.name}, "spec": spec}])


async def delete_pool(site: Site) -> None:
    async with site.client() as client:
        await client.delete(ADDRESS_POOLS, POOL)


async def add_service(site: Site, **annotations: str) -> tuple[str, Sequence[str]]:
    """Create a Service for the pods of the lab. Return its name and its addresses."""
    [made] = services(1, **annotations)
    await site.apply([made])
    name = made["metadata"]["name"]
    return name, await addresses_of(site, name)


async def delete_services(site: Site, *names: str) -> None:
    async with site.client() as client:
        for name in names:
            await client.delete(SERVICES, ObjectKey("default", name))


def without(nodes: Collection[str], *gone: str) -> list[str]:
    """Return these nodes without some, sorted."""
    return sorted(set(nodes) - set(gone))
