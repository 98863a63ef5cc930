"""Selection of the nodes that may be members, by their labels.

In: Nodes, and a selector such as `zone=a,disk` from a Service or the configuration. Each part is a
label that a node must have, with the given value if there is one. Out: the Nodes that have all
labels. Pure. The syntax is that of `node-selector` in cloud-provider-openstack 1.34."""

import re
from collections.abc import Mapping

from fairlead.kube.objects import Node
from fairlead.model import Family, Member
from fairlead.plan.members import excluded, node_address

ALLOWED = "labels with or without their values, as in zone=a,disk"

_PART = re.compile(r"[\w./-]+(=[\w.-]*)?", re.ASCII)


def read_selector(text: str) -> str | None:
    """Return the selector without spaces around its parts; None if the text is not a selector."""
    parts = [part.strip() for part in text.split(",")]
    return ",".join(parts) if all(_PART.fullmatch(part) for part in parts) else None


def selected(nodes: Mapping[str, Node], selector: str) -> Mapping[str, Node]:
    """Return the nodes that match the selector; all nodes if the selector is empty."""
    if not selector:
        return nodes
    wanted = [part.partition("=") for part in selector.split(",")]
    return {name: node for name, node in nodes.items() if all(_has(node, *each) for each in wanted)}


def all_members(nodes: Mapping[str, Node], family: Family) -> tuple[Member, ...]:
    """Return every admitted node with an address of the family as an active member of weight 1,
    with ready pods or without. A health monitor has to detect which nodes have ready pods."""
    reached = {
        name: node_address(node, family)
        for name, node in sorted(nodes.items())
        if not excluded(node)
    }
    return tuple(
        Member(name, address, 1, "active")
        for name, address in reached.items()
        if address is not None
    )


def _has(node: Node, label: str, sign: str, value: str) -> bool:
    labels = node.metadata.labels
    return labels.get(label) == value if sign else label in labels
