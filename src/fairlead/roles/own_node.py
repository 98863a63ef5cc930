"""Whether this host is the Node whose name the role has.

In: the Nodes, the name of the role (`--node-name`), the addresses of the interfaces of this host.
Out: a finding if the name may be wrong. A `fairlead node` with the name of another Node serves the
pods of that Node as its own, and a gateway shares the Lease of the gateway there, so both announce
the same addresses.

What can be known:
- An interface has an address of the Node, or one in the network of its pods: the name is right.
- Otherwise, an interface has the InternalIP of another Node: the name is wrong. The role is not
  ready, and the health ports of a node answer 503.
- Otherwise nothing is known: the InternalIP may be translated by NAT, or be assigned later. The
  finding says so, and the role goes on."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import structlog

from fairlead.drivers import Component
from fairlead.errors import Unavailable
from fairlead.kube.networks import read_address, read_network
from fairlead.kube.objects import Node
from fairlead.model import Finding
from fairlead.net.localroutes import assigned_addresses
from fairlead.plan.members import listed
from fairlead.state import State

log = structlog.get_logger()

OTHER_NODE = "NameOfAnotherNode"
NOT_HERE = "NodeAddressNotHere"
"""Codes of Findings: the name is wrong; nothing shows that the name is right."""
INTERVAL_S = 5.0
"""The interval at which the addresses of the host are read."""

Address = IPv4Address | IPv6Address


def judge(
    role: str, name: str, nodes: Mapping[str, Node], assigned: Collection[Address]
) -> Finding | None:
    """Return what is wrong with the name of the role; None if it is right, or if there is no Node
    of this name. `assigned`: the addresses of this host."""
    if (node := nodes.get(name)) is None or _is_here(node, assigned):
        return None
    known = {each for each in assigned if not each.is_loopback and not each.is_link_local}
    for other in sorted(nodes):
        if here := _internal(nodes[other]) & known:
            return Finding(
                OTHER_NODE,
                f"this host has the address {min(map(str, here))} of Node {other} and no address "
                f"of Node {name}, whose name this {role} has",
                severity="error",
                subject=f"Node {name}",
                remedy=f"give --node-name {other}",
                blocks="Ready",
            )
    addresses = listed(sorted(map(str, _internal(node)))) or "it has no InternalIP"
    return Finding(
        NOT_HERE,
        f"no interface of this host has an address of Node {name} ({addresses}), whose name this "
        f"{role} has",
        subject=f"Node {name}",
        remedy="give the name of this host's Node as --node-name, unless the address is translated "
        "by NAT or assigned later",
    )


def _is_here(node: Node, assigned: Collection[Address]) -> bool:
    """Return whether an interface has an address of the Node, or of the network of its pods, as
    the bridge of a network plugin has."""
    named = _read([each.address for each in node.status.addresses])
    networks = [ip_network(each) for each in map(read_network, node.spec.pod_cidrs) if each]
    return any(each in named or any(each in network for network in networks) for each in assigned)


def _internal(node: Node) -> set[Address]:
    return _read([each.address for each in node.status.addresses if each.type == "InternalIP"])


def _read(texts: Collection[str]) -> set[Address]:
    return {ip_address(each) for each in map(read_address, texts) if each is not None}


class OwnNode(Component):
    """The component that compares the host with the Node of its name. `role`: the role of this
    process, for messages."""

    name = "own node"

    def __init__(self, role: str, node_name: str, state: State) -> None:
        self._role = role
        self._node_name = node_name
        self._state = state
        self._found: Finding | None = None

    @property
    def is_other(self) -> bool:
        """Whether this host is another Node."""
        return self._found is not None and self._found.code == OTHER_NODE

    def findings(self) -> Sequence[Finding]:
        return (self._found,) if self._found is not None else ()

    async def run(self) -> None:
        await self._state.has_synced.wait()
        while True:
            await self._refresh()
            await asyncio.sleep(INTERVAL_S)

    async def _refresh(self) -> None:
        """Read the addresses of the host. If that fails, the last finding stays."""
        try:
            assigned = await asyncio.to_thread(assigned_addresses)
        except Unavailable as problem:
            log.warning("cannot read the addresses of this host", problem=str(problem))
            return
        found = judge(self._role, self._node_name, self._state.nodes, assigned)
        if found == self._found:
            return
        if found is None:
            log.info("this host has an address of its Node", node=self._node_name)
        else:
            level = log.error if found.blocks else log.warning
            level(found.message, fix=found.remedy)
        self._found = found
