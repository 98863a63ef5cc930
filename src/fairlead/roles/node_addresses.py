"""The addresses at which a node serves NodePorts and health ports.

In: the Node in the API, the addresses of the host. Out: addresses. Invariant: addresses that were
known stay in use while newer ones are not known."""

import asyncio
from collections.abc import Mapping, Sequence
from ipaddress import ip_network

import structlog

from fairlead.backoff import Backoff
from fairlead.errors import Refused, Unavailable
from fairlead.kube.answers import NotFound, RefusedByServer, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, Node, ObjectKey
from fairlead.model import Family
from fairlead.net.address import family_of
from fairlead.net.localroutes import assigned_addresses

log = structlog.get_logger()

API_RETRY_S = (0.2, 5.0)
"""The first and the longest delay before the next request to an API server that does not answer at
the start."""


class HostAddresses:
    """The addresses of the host that are in one of these networks, at the time of the last
    `refresh`. Like kube-proxy, it excludes loopback addresses. Unlike kube-proxy, it excludes
    link-local addresses too."""

    def __init__(self, cidrs: Sequence[str]) -> None:
        self._networks = [ip_network(cidr) for cidr in cidrs]
        self._found: tuple[str, ...] = ()

    def __call__(self) -> Sequence[str]:
        return self._found

    async def refresh(self) -> bool:
        """Read the addresses again. Return whether they have changed. Raise Unavailable if they
        cannot be read."""
        assigned = await asyncio.to_thread(assigned_addresses)
        usable = {each for each in assigned if not each.is_loopback and not each.is_link_local}
        found = tuple(
            sorted(
                str(each) for each in usable if any(each in network for network in self._networks)
            )
        )
        before, self._found = self._found, found
        return found != before


class NodeAddresses:
    """The addresses of this node's NodePorts, as the API shows them now. While the API shows none
    (the Node may be deleted and registered again), the last addresses that the API showed stay in
    use, so that NodePorts keep answering."""

    def __init__(self, node_name: str, nodes: Mapping[str, Node], last: Sequence[str]) -> None:
        self._node_name = node_name
        self._nodes = nodes
        self._last = last

    def __call__(self) -> Sequence[str]:
        if (node := self._nodes.get(self._node_name)) is not None:
            self._last = primary_addresses(node) or self._last
        return self._last


def primary_addresses(node: Node) -> Sequence[str]:
    """Return the first InternalIP of each family, where kube-proxy too answers for NodePorts."""
    first: dict[Family, str] = {}
    for entry in node.status.addresses:
        if entry.type == "InternalIP":
            first.setdefault(family_of(entry.address), entry.address)
    return tuple(first.values())


async def first_addresses(client: Client, node_name: str) -> Sequence[str]:
    """Return the addresses of this node at the start. Wait while the API server does not answer or
    denies access, because a process that ended instead would be restarted with growing delays, and
    the node would stay unserved long after the problem is solved. Raise Refused if the Node has no
    InternalIP, and NotFound if the Node does not exist."""
    retry = Backoff(*API_RETRY_S)
    logged: type[Exception] | None = None
    while True:
        try:
            node = await client.get(NODES, ObjectKey("", node_name))
            break
        except NotFound:
            raise
        except (Unavailable, RefusedByServer) as problem:
            # Invalid credentials are logged by the connection.
            if not isinstance(problem, Unauthenticated) and type(problem) is not logged:
                logged = type(problem)
                level = log.error if isinstance(problem, RefusedByServer) else log.warning
                level("waiting for the API server", problem=str(problem))
            await asyncio.sleep(retry.next_s())
    if not (addresses := primary_addresses(node)):
        raise Refused(
            f"Node {node_name} has no InternalIP",
            fix="is the kubelet, or the cloud's node controller, running?",
        )
    return addresses
