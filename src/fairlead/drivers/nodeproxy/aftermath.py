"""What is left to clean up once a transaction is in force: flows and remembered clients that lead
to a gone endpoint.

In: the Specs before and after, the clients that the kernel remembers. Out: what to forget. Pure.
Invariant: nothing that leads to a present endpoint is forgotten. UDP flows are judged as kube-proxy
judges them, by who *serves*: a flow to a pod that is on its way out goes on until that pod stops.
So are those of SCTP, whose peers look for each other with heartbeats and thereby keep a flow to
nobody alive: forgotten, it leads to a pod that aborts what it does not know (RFC 9260, 8.4), and
the peer begins anew at once. TCP needs none of this: its flows end by themselves (a reset or a
time-out), and those to a terminating pod are to go on."""

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import NamedTuple

from fairlead.drivers.nodeproxy.elements import Element, Spec, frontend_of

Endpoint = tuple[str, int]
"""Address and port."""

FLOWS = "flows"
"""How the names of the sets begin that hold to whom flows of UDP and SCTP may lead. An element
stays there until the flows to it are forgotten: a clean-up that failed, or that a process did not
live to see, shows itself as a difference to the plan."""


def flow_answers(before: Spec, after: Spec) -> dict[int, dict[Endpoint, frozenset[Endpoint]]]:
    """By IP protocol: the frontends from which, between before and after, a serving endpoint went
    or whose first one came; and to whom their flows may lead now.

    The first one matters too: a client that called while nobody answered may have a flow that
    passes the rules by. Frontends without any serving endpoint are left alone, as kube-proxy does:
    nobody could answer in place of who answers now."""
    found: dict[int, dict[Endpoint, frozenset[Endpoint]]] = {}
    old, new = _flow_endpoints(before), _flow_endpoints(after)
    for frontend, has in new.items():
        had = old.get(frontend, set())
        if had - has or not had:
            address, protocol, port = frontend.split(" . ")
            found.setdefault(int(protocol), {})[address, int(port)] = frozenset(has)
    return found


def forgettable(
    clients: Iterable[Element],
    specs: Iterable[Spec],
    pods: Sequence[IPv4Network | IPv6Network],
    node_addresses: Collection[str] = (),
) -> list[Element]:
    """The remembered clients (elements of `affinity4_17`) whose endpoint is no longer one that they
    could get, and all clients of frontends without affinity: if affinity were switched on again,
    these clients would be sent to former endpoints.

    A client that is no pod is taken for one from outside, and so is who called a NodePort
    (`node_addresses`), for it may be a pod of another node. The node itself and its own pods may
    thereby lose their endpoint of a Service with policy Local when that Service changes, which is a
    new choice and no failure."""
    everywhere: dict[str, set[str]] = {}
    from_outside: dict[str, set[str]] = {}
    for spec in specs:
        for frontend, answering in _answering(spec).items():
            everywhere[frontend] = answering.everywhere
            if answering.from_outside is not None:
                from_outside[frontend] = answering.from_outside
    return [
        client
        for client in clients
        if client.value not in _choice(client, everywhere, from_outside, pods, node_addresses)
    ]


def losing(before: Spec, after: Spec) -> frozenset[str]:
    """The frontends with session affinity for which a client may be remembered with an endpoint
    that is no longer allowed."""
    old, new = _answering(before), _answering(after)
    return frozenset(
        frontend
        for frontend, had in old.items()
        if frontend not in new or not had.within(new[frontend])
    )


class _Answering(NamedTuple):
    """The endpoints that answer at a frontend: for all clients, and for clients from outside where
    they are distinguished."""

    everywhere: set[str]
    from_outside: set[str] | None

    def within(self, other: "_Answering") -> bool:
        """Whether every endpoint that a client may be remembered with here is allowed by `other` as
        well."""
        if not self.everywhere <= other.everywhere:
            return False
        had = self.everywhere if self.from_outside is None else self.from_outside
        return had <= (other.everywhere if other.from_outside is None else other.from_outside)


def _answering(spec: Spec) -> dict[str, _Answering]:
    """The frontends with session affinity."""
    found = {
        element.key: _Answering(set(), None)
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
            answering := found.get(frontend_of(element.key))
        ):
            answering.everywhere.add(element.value)
        elif element.map.startswith("local_endpoints"):
            answering = found.get(frontend_of(element.key))
            if answering is not None and answering.from_outside is not None:
                answering.from_outside.add(element.value)
    return found


def _choice(
    client: Element,
    everywhere: dict[str, set[str]],
    from_outside: dict[str, set[str]],
    pods: Sequence[IPv4Network | IPv6Network],
    node_addresses: Collection[str],
) -> set[str]:
    frontend = frontend_of(client.key)
    if frontend in from_outside:
        called, address = frontend.partition(" . ")[0], ip_address(client.key.rpartition(" . ")[2])
        if called in node_addresses or not any(address in network for network in pods):
            return from_outside[frontend]
    return everywhere.get(frontend, set())


def _flow_endpoints(spec: Spec) -> dict[str, set[Endpoint]]:
    """To whom the flows of each frontend may lead."""
    found: dict[str, set[Endpoint]] = {}
    for element in spec:
        if element.map.startswith(FLOWS):
            address, port = element.key.split(" . ")[3:]
            found.setdefault(frontend_of(element.key), set()).add((address, int(port)))
    return found
