"""Classes direct and proxy give new connections of a listener to the same nodes."""

from array import array

from hypothesis import example, given
from hypothesis import strategies as st

from fairlead.drivers.direct import spec as direct
from fairlead.drivers.direct.spec import ActualListener, DirectActual
from fairlead.drivers.proxy import spec as proxy
from fairlead.model import (
    DirectSettings,
    Listener,
    LoadBalancer,
    Member,
    MemberState,
    ProxySettings,
    ServiceKey,
    Settings,
)
from fairlead.net.transition import Slots, nodes_in
from fairlead.plan.classes import DIRECT, PROXY, ServiceClass

WEB, VIP = ServiceKey("default", "web"), "203.0.113.10"
States = dict[str, tuple[int, MemberState]]


def balancer(
    class_: ServiceClass, settings: Settings, members: States
) -> dict[ServiceKey, LoadBalancer]:
    rows = tuple(
        Member(node, f"192.0.2.{node[-1]}", weight, state)
        for node, (weight, state) in sorted(members.items())
    )
    listener = Listener("IPv4", 80, "TCP", "Local", 30080, rows)
    made = LoadBalancer(WEB, "uid", class_.name, (VIP,), (listener,), settings=settings)
    return {WEB: made}


def direct_serving(before: States, after: States) -> set[str]:
    """Return the nodes in the current table after the maps have followed both plans."""
    actual: dict[ServiceKey, DirectActual] = {}
    slots = Slots()
    for members in (before, after):
        specs = direct.render(balancer(DIRECT, DirectSettings(), members))
        for change in direct.diff(specs, actual):
            if isinstance(change, direct.SetListener):
                slots = change.slots
                found = ActualListener(change.listener.key, slots, change.listener)
                actual = {WEB: DirectActual("uid", (found,), ())}
    return {slots.nodes[each] for each in nodes_in(array("H", slots.current))}


def proxy_serving(before: States, after: States) -> set[str]:
    """Return the servers with a weight after HAProxy has followed both plans."""
    actual: dict[ServiceKey, proxy.ProxySpec] = {}
    for members in (before, after):
        specs = proxy.specs_of(balancer(PROXY, ProxySettings(), members))
        changes = proxy.diff(specs, actual)
        actual = proxy.after(actual, changes)
    [served] = actual[WEB].listeners
    return {each.node for each in served.servers if each.weight}


STATES = st.dictionaries(
    st.sampled_from(["node1", "node2", "node3", "node4"]),
    st.tuples(st.integers(0, 3), st.sampled_from(["active", "draining", "pending", "down"])),
)


@given(STATES, STATES)
@example(
    # The serving node is down and another one is pending, so a node with terminating pods serves.
    {"node1": (1, "active")},
    {"node1": (1, "down"), "node2": (1, "pending"), "node3": (1, "draining")},
)
@example(
    # The serving node is draining, without a serving pod.
    {"node1": (1, "active")},
    {"node1": (0, "draining"), "node2": (1, "pending"), "node3": (1, "draining")},
)
@example(
    # One serving node is pending, and the other one is no longer a member.
    {"node1": (1, "active"), "node4": (1, "active")},
    {"node1": (1, "pending"), "node3": (1, "draining")},
)
def test_both_classes_use_the_same_nodes(before: States, after: States) -> None:
    assert direct_serving(before, after) == proxy_serving(before, after)


def test_a_node_with_terminating_pods_replaces_a_node_that_is_down() -> None:
    before: States = {"node1": (1, "active")}
    after: States = {"node1": (1, "down"), "node2": (1, "pending"), "node3": (1, "draining")}
    assert direct_serving(before, after) == {"node3"}


def test_a_listener_is_unchanged_while_one_of_its_nodes_is_pending() -> None:
    before: States = {"node1": (1, "active"), "node4": (1, "active")}
    after: States = {"node1": (1, "pending"), "node3": (1, "draining")}
    assert direct_serving(before, after) == {"node1", "node4"}
