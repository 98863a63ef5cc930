"""The addresses that the cluster itself uses, and that therefore no Service may have.

In: for each owner (a Node, a Service, the configuration, a gateway) its addresses and networks.
Out: which owner an address has, and the excluded parts of pools (`plan.pools`). Excluded are the
addresses of Nodes and API servers, the addresses and next hops of gateways, the networks of pods,
and ClusterIPs. Invariants: pure, except for its memory; networks are never expanded to addresses;
the cost of a change depends on the owner's networks, and the cost of a query on the number of
different prefix lengths."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from fairlead.config import Config
from fairlead.kube.networks import read_address
from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.model import ServiceKey
from fairlead.net.address import numeric_host, split_host_port
from fairlead.plan.members import node_address

API_SERVICE = ServiceKey("default", "kubernetes")
"""The Service whose endpoints are the API servers."""
API_SERVER = "an address of an API server"
"""The use of such an address in words."""
MAX_CHANGES = 1024
"""How many changes an observer may miss before it has to read everything again."""
MAX_NODE_ADDRESSES = 16
"""How many addresses of a Node count. A kubelet writes the status of its own Node: without a limit
one kubelet could withhold all addresses of a pool. A Node has one or two of each family."""
AFTER_ALL = "~"
"""Sorts after every timestamp: the host takes precedence over no Service that has the address."""
SHORTEST_POD_CIDRS = {4: 8, 6: 32}
"""The shortest prefix of a Node's podCIDR that counts, by IP version. A kubelet may create its own
Node with any podCIDR, and 0.0.0.0/0 would exclude all pools. The pods of a whole cluster rarely
have a larger network."""


class Span(NamedTuple):
    """The addresses of a network, by their numbers."""

    version: int
    first: int
    last: int

    def __str__(self) -> str:
        first = IPv4Address(self.first) if self.version == 4 else IPv6Address(self.first)
        prefix = first.max_prefixlen + 1 - self.size.bit_length()
        return str(first) if self.size == 1 else f"{first}/{prefix}"

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class Use(NamedTuple):
    """What the cluster uses a network for. `words`: such as `an address of Node node1`. `host`: a
    host has the address, so a gateway must not receive its packets, except for a Service that was
    created before `since` (RFC 3339) and has the address."""

    words: str
    host: bool = False
    since: str = ""

    def precedes(self, created: str) -> bool:
        """Return whether the host takes precedence over a Service that has the address and was
        created at that time."""
        return self.host and self.since <= created


class Exclusions:
    """All excluded networks. `version` increases with each change."""

    def __init__(self) -> None:
        self.version = 0
        self._of: dict[str, dict[Span, Use]] = {}
        self._uses: dict[Span, dict[str, Use]] = {}
        """The uses of each network, by owner."""
        self._sizes = Counter[tuple[int, int]]()
        """The number of networks by IP version and size. Networks have few different sizes."""
        self._changes: deque[Collection[Span]] = deque(maxlen=MAX_CHANGES)

    def update(self, owner: str, uses: Mapping[str, Use]) -> Collection[Span]:
        """Replace the networks of an owner, and return those that have changed. `uses`: the use of
        each address or CIDR; a text that is neither is ignored."""
        before = self._of.get(owner, {})
        after = {span: use for text, use in uses.items() if (span := span_of(text)) is not None}
        if before == after:
            return ()
        changed = {
            span for span in before.keys() | after.keys() if before.get(span) != after.get(span)
        }
        for span in changed:
            if span in after:
                self._add(owner, span, after[span])
            else:
                self._remove(owner, span)
        if after:
            self._of[owner] = after
        else:
            del self._of[owner]
        self.version += 1
        self._changes.append(changed)
        return changed

    def _add(self, owner: str, span: Span, use: Use) -> None:
        if span not in self._uses:
            self._sizes[span.version, span.size] += 1
        self._uses.setdefault(span, {})[owner] = use

    def _remove(self, owner: str, span: Span) -> None:
        del self._uses[span][owner]
        if not self._uses[span]:
            del self._uses[span]
            self._sizes[span.version, span.size] -= 1
            if not self._sizes[span.version, span.size]:
                del self._sizes[span.version, span.size]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._uses)

    def use_of(self, span: Span, created: str = AFTER_ALL) -> Use:
        """Return the use of this network. If there are several: that of a host, and first of all of
        one that takes precedence over a Service that was created at that time."""
        return min(
            self._uses[span].values(),
            key=lambda use: (not use.precedes(created), not use.host, use.words),
        )

    def find(self, address: str, created: str = AFTER_ALL) -> Use | None:
        """Return what the cluster uses the address for; None if it does not use it. The smallest
        network that contains the address counts. `created`: see `use_of`."""
        if not self._uses:
            return None
        value = ip_address(address)
        number = int(value)
        for version, size in sorted(self._sizes):
            first = number - number % size
            span = Span(version, first, first + size - 1)
            if version == value.version and span in self._uses:
                use = self.use_of(span, created)
                return use if size == 1 else use._replace(words=f"in {span}, {use.words}")
        return None

    def host_at(self, address: str, created: str = AFTER_ALL) -> Use | None:
        """Return the use of an address that a host of the cluster has; None if no host has it, or
        none that takes precedence over a Service that has the address and was created at that
        time."""
        use = self.find(address, created)
        return use if use is not None and use.precedes(created) else None

    def changes_since(self, version: int) -> Iterable[Span] | None:
        """Return the networks that have changed since this version; None if that is not known."""
        missed = self.version - version
        if missed > len(self._changes):
            return None
        return (span for at in range(-missed, 0) for span in self._changes[at])


def span_of(text: str) -> Span | None:
    """Return the addresses of an address or a CIDR; None if the text is neither."""
    host, slash, length = text.partition("/")
    if (address := read_address(host)) is None:
        return None
    value = ip_address(address)
    if slash and not (
        length.isascii() and length.isdecimal() and int(length) <= value.max_prefixlen
    ):
        return None
    size = 1 << (value.max_prefixlen - int(length)) if slash else 1
    first = int(value) - int(value) % size
    return Span(value.version, first, first + size - 1)


def of_hosts(addresses: Iterable[str], words: str, since: str = "") -> dict[str, Use]:
    """Return these addresses of hosts. `since`: see `Use`."""
    return dict.fromkeys(addresses, Use(words, host=True, since=since))


def of_node(node: Node) -> dict[str, Use]:
    """Return the addresses of a Node, and the networks of its pods, within the limits of what a
    kubelet may claim.

    No Service gets one of these addresses. If a Service has one already, the Node has claimed it
    later, and the Service keeps it: otherwise a kubelet could take the addresses of Services by
    writing them into the status of its Node. Only the addresses at which gateways reach a Node take
    precedence, and only over Services that are younger than the Node: such a Service got the
    address by mistake, and a gateway that received its packets would lose the node.
    """
    name, since = node.metadata.name, node.metadata.creation_timestamp or ""
    addresses = [
        each.address for each in node.status.addresses if each.type in ("InternalIP", "ExternalIP")
    ]
    reached = [node_address(node, "IPv4"), node_address(node, "IPv6")]
    networks = (each for each in node.spec.pod_cidrs if not _is_too_large(each))
    words = f"an address of Node {name}"
    return (
        dict.fromkeys(networks, Use(f"the pods of Node {name}"))
        | of_hosts(addresses[:MAX_NODE_ADDRESSES], words, AFTER_ALL)
        | of_hosts(filter(None, reached), words, since)
    )


def _is_too_large(cidr: str) -> bool:
    """Return whether the network is larger than that of a Node's pods can be."""
    if (span := span_of(cidr)) is None:
        return False
    bits = 32 if span.version == 4 else 128
    return span.size > 1 << (bits - SHORTEST_POD_CIDRS[span.version])


def of_service(service: Service) -> dict[str, Use]:
    """Return the ClusterIPs of a Service."""
    use = Use(f"the ClusterIP of Service {service.key}")
    return dict.fromkeys(service.spec.cluster_ips or (service.spec.cluster_ip,), use)


def of_api_servers(slices: Iterable[EndpointSlice]) -> dict[str, Use]:
    """Return the addresses of the API servers, which are the endpoints of Service `kubernetes`.

    The API servers write one EndpointSlice, with the name of the Service
    (`pkg/controlplane/reconcilers`). Another one with its label may be of a tenant, who could name
    the addresses of other tenants' Services as API servers."""
    endpoints = (
        endpoint
        for slice_ in slices
        if slice_.metadata.name == API_SERVICE.name
        for endpoint in slice_.endpoints or ()
    )
    return of_hosts((each.addresses[0] for each in endpoints if each.addresses), API_SERVER)


def of_config(config: Config) -> dict[str, Use]:
    """Return the addresses and networks that the configuration contains."""
    cluster, section = config.cluster, config.gateway
    uses = dict.fromkeys(cluster.pod_cidrs, Use("the pods (cluster.podCIDRs)"))
    uses |= dict.fromkeys(cluster.service_cidrs, Use("the ClusterIPs (cluster.serviceCIDRs)"))
    peers = filter(None, map(numeric_host, section.listed_peers))
    uses |= of_hosts(peers, "an address of a gateway (gateway.peers)")
    if (api := section.api_server) is not None:
        uses |= of_hosts(api.addresses, "an address of the API server's load balancer")
        uses |= of_hosts((split_host_port(each)[0] for each in api.servers), API_SERVER)
    return uses
