"""Determines what to clean up after a transaction: flows and remembered clients that lead to an
endpoint that is gone.

In: the Specs before and after, and the clients that the kernel remembers. Out: the flows and
clients to delete. Pure. Invariant: nothing that leads to a present endpoint is deleted.

- UDP flows are judged by the *serving* endpoints, as in kube-proxy: a flow to a terminating pod
  continues until that pod stops.
- SCTP flows are judged in the same way. Their peers send heartbeats and so keep a flow to a gone
  endpoint alive. After the flow is deleted, it leads to another pod, which aborts an association
  that it does not know (RFC 9260, 8.4), and the peer starts a new one at once.
- TCP flows are left alone: they end by themselves (with a reset or a time-out), and flows to a
  terminating pod must continue."""

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import NamedTuple

from fairlead.drivers.nodeproxy.elements import Element, Spec, frontend_of

Endpoint = tuple[str, int]
"""Address and port."""

FLOWS = "flows"
"""Prefix of the names of the sets that record to which endpoints flows of UDP and SCTP may lead. An
element stays there until the flows to its endpoint are deleted. So a clean-up that failed, or that
was interrupted by the end of the process, appears as a difference to the plan."""


def flow_endpoints(before: Spec, after: Spec) -> dict[int, dict[Endpoint, frozenset[Endpoint]]]:
    """Return the frontends that lost a serving endpoint or got their first one between `before` and
    `after`, with the endpoints to which their flows may lead now, by IP protocol.

    The first endpoint matters too: a packet that arrived while there was no endpoint may have
    created a flow that bypasses the rules. Frontends without any serving endpoint are left alone,
    as in kube-proxy: no other endpoint could take over their flows."""
    found: dict[int, dict[Endpoint, frozenset[Endpoint]]] = {}
    old, new = _endpoints_of_flows(before), _endpoints_of_flows(after)
    for frontend, has in new.items():
        had = old.get(frontend, set())
        if had - has or not had:
            address, protocol, port = frontend.split(" . ")
            found.setdefault(int(protocol), {})[address, int(port)] = frozenset(has)
    return found


def stale_clients(
    clients: Iterable[Element],
    specs: Iterable[Spec],
    pods: Sequence[IPv4Network | IPv6Network],
    node_addresses: Collection[str] = (),
) -> list[Element]:
    """Return the remembered clients (elements of `affinity4_17`) whose endpoint they could no
    longer get, and all clients of frontends without affinity: if affinity were enabled again, they
    would be sent to former endpoints.

    A client that is not a pod counts as external. So does every client of a NodePort
    (`node_addresses`), which may be a pod of another node. Therefore the node itself and its own
    pods may lose their remembered endpoint of a Service with policy Local when that Service
    changes; they get another endpoint, and no connection fails."""
    everywhere: dict[str, set[str]] = {}
    from_outside: dict[str, set[str]] = {}
    for spec in specs:
        for frontend, endpoints in _endpoints_with_affinity(spec).items():
            everywhere[frontend] = endpoints.everywhere
            if endpoints.from_outside is not None:
                from_outside[frontend] = endpoints.from_outside
    return [
        client
        for client in clients
        if client.value
        not in _allowed_endpoints(client, everywhere, from_outside, pods, node_addresses)
    ]


def losing_endpoints(before: Spec, after: Spec) -> frozenset[str]:
    """Return the frontends with session affinity that may have a remembered client whose endpoint
    is no longer allowed."""
    old, new = _endpoints_with_affinity(before), _endpoints_with_affinity(after)
    return frozenset(
        frontend
        for frontend, had in old.items()
        if frontend not in new or not had.within(new[frontend])
    )


class _Endpoints(NamedTuple):
    """The endpoints of a frontend: for all clients, and for external clients where the policy
    distinguishes them (otherwise None)."""

    everywhere: set[str]
    from_outside: set[str] | None

    def within(self, other: "_Endpoints") -> bool:
        """Whether `other` allows every endpoint with which a client may be remembered here."""
        if not self.everywhere <= other.everywhere:
            return False
        had = self.everywhere if self.from_outside is None else self.from_outside
        return had <= (other.everywhere if other.from_outside is None else other.from_outside)


def _endpoints_with_affinity(spec: Spec) -> dict[str, _Endpoints]:
    """Return the endpoints of each frontend with session affinity."""
    found = {
        element.key: _Endpoints(set(), None)
        for element in spec
        if element.map.startswith("remember")
    }
    if not found:
        return found
    for frontend in (element.key for element in spec if element.map.startswith("outside")):
        if frontend in found:
            found[frontend] = found[frontend]._replace(from_outside=set())
    for element in spec:
        if element.map.startswith("endpoints") and (
            endpoints := found.get(frontend_of(element.key))
        ):
            endpoints.everywhere.add(element.value)
        elif element.map.startswith("local_endpoints"):
            endpoints = found.get(frontend_of(element.key))
            if endpoints is not None and endpoints.from_outside is not None:
                endpoints.from_outside.add(element.value)
    return found


def _allowed_endpoints(
    client: Element,
    everywhere: dict[str, set[str]],
    from_outside: dict[str, set[str]],
    pods: Sequence[IPv4Network | IPv6Network],
    node_addresses: Collection[str],
) -> set[str]:
    """Return the endpoints that the client could get."""
    frontend = frontend_of(client.key)
    if frontend in from_outside:
        called, address = frontend.partition(" . ")[0], ip_address(client.key.rpartition(" . ")[2])
        if called in node_addresses or not any(address in network for network in pods):
            return from_outside[frontend]
    return everywhere.get(frontend, set())


def _endpoints_of_flows(spec: Spec) -> dict[str, set[Endpoint]]:
    """Return the endpoints to which the flows of each frontend may lead."""
    found: dict[str, set[Endpoint]] = {}
    for element in spec:
        if element.map.startswith(FLOWS):
            address, port = element.key.split(" . ")[3:]
            found.setdefault(frontend_of(element.key), set()).add((address, int(port)))
    return found
