"""Which nodes get the connections of a listener, even while probes have confirmed no node.

In: a planned listener with the states of its members, and the nodes that serve it now. Out: the
nodes that get new connections with their weights, and the nodes that keep the connections they
have. A driver reports which nodes serve now and carries the result out; it decides nothing.

The states of the members determine the result, with one exception. While no member is `active` and
at least one is `pending` (its first probe is outstanding), the plan cannot know which nodes serve:
a process that has just started has no probe results yet, and an edit may have changed the health
port of every node. For this time, which lasts milliseconds, these rules apply:
  1. If a pending node serves now, the listener stays as it is. A change would move new connections
     from a node that is about to be confirmed to another one, and then back again.
  2. Otherwise the draining members with a weight get new connections by that weight: their pods
     terminate and still serve (KEP-1669). Any other node that serves now gets none, because it
     failed a probe or is no longer a member.
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
    # A UDP flow loses nothing when it moves. On a dead node it would not recover: UDP itself has no
    # retransmission.
    "UDP": frozenset({"active", "draining", "pending"}),
    "SCTP": frozenset({"active", "draining", "pending", "down"}),
}
"""The states in which a member keeps the connections that it has."""


class Shares(Value, frozen=True):
    """What each node does for a listener. Names are sorted.

    `weights`: the nodes that get new connections, unless `stays_as_it_is` returns True.
    `undecided`: the pending nodes while no member is active; empty at any other time.
    `retained_nodes`: the members that keep the connections they have. `retain_departed`: a node
    that is no longer a member keeps its connections too."""

    weights: tuple[tuple[str, int], ...]
    undecided: tuple[str, ...]
    retained_nodes: tuple[str, ...]
    retain_departed: bool


def shares_of(listener: Listener) -> Shares:
    """Return the shares by the states of the listener's members alone.

    With policy Cluster a node that is no longer a member retains its connections, because it
    forwards them to pods of other nodes even if it has no pods. With policy Local it drops them."""
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
    """Return the nodes whose members are active, with their weights."""
    return _weights(listener, "active")


def stays_as_it_is(
    weights: Collection[tuple[str, int]], undecided: Collection[str], serving: Collection[str]
) -> bool:
    """Return whether the nodes that serve now keep serving, and no other node gets new connections.
    `weights` and `undecided` are fields of the Shares. `serving` are the nodes that get new
    connections of this listener now, at their planned addresses and ports."""
    if not undecided or not serving:
        return False
    return not weights or any(node in undecided for node in serving)


def drain_limit_s(settings: DirectSettings | ProxySettings, default_s: float) -> float:
    """Return for how many seconds a node keeps connections of the Service after it stopped getting
    new ones; 0 means no limit. `default_s` applies to Services that set no limit themselves."""
    return default_s if settings.drain_timeout_s is None else settings.drain_timeout_s


def is_drained(idle_s: float, limit_s: float) -> bool:
    """Return whether the drain limit of a node has passed, `idle_s` seconds after the node stopped
    getting new connections."""
    return limit_s > 0 and idle_s >= limit_s


def _weights(listener: Listener, state: MemberState) -> tuple[tuple[str, int], ...]:
    return tuple(
        sorted(
            (member.node, member.weight)
            for member in listener.members
            if member.state == state and member.weight > 0
        )
    )
