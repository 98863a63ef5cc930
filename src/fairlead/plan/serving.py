"""Which nodes get the connections of a listener, also while probes have confirmed no node.

In: a planned listener with the states of its members, and the nodes that serve it now. Out: the
nodes that get new connections with their weights, and the nodes that keep the connections they
have. A driver reports which nodes serve now and carries the result out; it decides nothing.

The states of members say it all, with one exception. While no member is `active` and at least one
is `pending` (its first probe is outstanding), the plan cannot know which nodes serve: a process
that has just started has no answers yet, and an edit may have changed the health port of every
node. This lasts for milliseconds, and then:
  1. If a pending node serves now, the listener stays as it is. Whatever changed would move new
     connections away from a node that is about to be confirmed, and back again at once.
  2. Otherwise the draining members with a weight get new connections by that weight: their pods
     terminate and still serve (KEP-1669). Any other node that serves now has been disproved by a
     probe or is no member any more.
  3. If there is no such member either, the listener stays as it is.
Invariant: pure; equal listeners and equal serving nodes give equal results in every driver."""

from collections.abc import Collection, Mapping

from fairlead.model import (
    DirectSettings,
    Listener,
    MemberState,
    Protocol,
    ProxySettings,
    Value,
)

RETAINING: Mapping[Protocol, frozenset[MemberState]] = {
    # A pending member may have connections from before this process began.
    "TCP": frozenset({"active", "draining", "pending", "down"}),
    # A flow of datagrams loses nothing by moving, and would not come back from a dead node: it has
    # nothing to retry by.
    "UDP": frozenset({"active", "draining", "pending"}),
    "SCTP": frozenset({"active", "draining", "pending", "down"}),
}
"""The states in which a member keeps the connections that it has."""


class Shares(Value, frozen=True):
    """The part of each node in a listener. Names are sorted.

    `weights`: the nodes that get new connections, unless `stays_as_it_is`. `undecided`: the pending
    nodes while no member is active; empty at any other time. `retained_nodes`: the members that
    keep the connections they have. `retain_departed`: a node that is no member any more keeps its
    connections too."""

    weights: tuple[tuple[str, int], ...]
    undecided: tuple[str, ...]
    retained_nodes: tuple[str, ...]
    retain_departed: bool


def shares_of(listener: Listener) -> Shares:
    """The shares by the states of the listener's members alone.

    With policy Cluster a departed node retains its connections, because the node passes them on to
    pods elsewhere, whether it has pods itself or not; with policy Local it drops them."""
    weights = _weights(listener, "active")
    pending = tuple(sorted(each.node for each in listener.members if each.state == "pending"))
    states = RETAINING[listener.protocol]
    return Shares(
        weights if weights or not pending else _weights(listener, "draining"),
        () if weights else pending,
        tuple(sorted(each.node for each in listener.members if each.state in states)),
        listener.policy == "Cluster" and listener.protocol != "UDP",
    )


def active_weights(listener: Listener) -> tuple[tuple[str, int], ...]:
    """The nodes that get new connections once they are confirmed, with their weights."""
    return _weights(listener, "active")


def stays_as_it_is(
    weights: Collection[tuple[str, int]], undecided: Collection[str], serving: Collection[str]
) -> bool:
    """Whether the nodes that serve now go on, and no other node gets new connections. `weights` and
    `undecided` are those of the Shares; `serving` are the nodes that get new connections of this
    Service's listener now, at the addresses and ports that are planned for them."""
    if not undecided or not serving:
        return False
    return not weights or any(node in undecided for node in serving)


def drain_limit_s(settings: DirectSettings | ProxySettings, default_s: float) -> float:
    """How long a node keeps connections of the Service after it has ceased to get new ones; 0 means
    that there is no limit. `default_s` holds for Services that do not say it themselves."""
    return default_s if settings.drain_timeout_s is None else settings.drain_timeout_s


def is_drained(idle_s: float, limit_s: float) -> bool:
    """Whether a node that has had no new connections for `idle_s` has used up its time to keep the
    connections that are left."""
    return limit_s > 0 and idle_s >= limit_s


def _weights(listener: Listener, state: MemberState) -> tuple[tuple[str, int], ...]:
    return tuple(
        sorted(
            (member.node, member.weight)
            for member in listener.members
            if member.state == state and member.weight > 0
        )
    )
