"""When nodes of class `fairlead.io/announce` begin to announce an address, and with which weights.

In: the nodes that serve the address now, each with its number of ready pods; what was settled
before; the time. Out: the nodes that announce the address and the weights that they tell routers,
and the time of the next decision. Pure: the time is an argument.

Each change of the announcing nodes or of their weights makes routers without resilient hashing move
15 to 50 % of the open connections to other nodes, which breaks them, and routers may suppress a
route that comes and goes (RFC 2439). So changes are collected:

- A node that cannot serve any more is withdrawn at once.
- A node that can serve joins after `COLLECT_S`, together with all others that wait. If no node
  announces the address, it joins at once. Two joins are at least `COLLECT_S` apart in each case, so
  that a pod that flaps does not flap the route.
- If all nodes that announce the address are replaced by others, as when its only pod moves, the
  former ones stay for `OVERLAP_S` after the others join, as long as their pods still serve while
  they terminate. Otherwise no node would announce the address until the service proxies of the
  others have confirmed it.
- Weights change together with a join. Otherwise they change after `COLLECT_S`, and only if the
  share of some pod differs by more than `TOLERANCE` from a fair one.

Invariant: the decision concerns all nodes of the address and depends on the objects of the cluster
alone. All nodes observe these at nearly the same time, so they settle together, and routers see one
change."""

import math
from collections.abc import Mapping

import msgspec

OVERLAP_S = 2.0
"""How long nodes that are all replaced still announce. The service proxies of the other nodes make
their rules meanwhile, and routers learn the new routes."""
COLLECT_S = 5.0
"""How long joins and changes of weights are collected."""
TOLERANCE = 0.2
"""The deviation of a pod's share from a fair one at which weights change."""


class Settled(msgspec.Struct, frozen=True):
    """The nodes that announce one address. `weights`: by node, the weight that it tells routers.
    `joined_s`: when a node joined last. `due_s`: when the changes that wait are made; infinity if
    there are none."""

    weights: Mapping[str, int]
    joined_s: float = -math.inf
    due_s: float = math.inf
    overlap_s: float = -math.inf
    """Until when nodes that were replaced still announce."""


_NONE: Mapping[str, int] = {}


def settle(
    before: Settled | None,
    wanted: Mapping[str, int],
    now_s: float,
    *,
    at_once: bool = False,
    retiring: Mapping[str, int] = _NONE,
) -> Settled:
    """Return which nodes announce the address now. `before`: None if nothing is known, as after a
    start: then the routes of an earlier process are in place, and nothing is collected. `wanted`:
    the nodes that serve the address, with their numbers of ready pods, which are all 0 if nodes
    have no weights. `at_once`: changes are not collected. `retiring`: nodes that are not wanted,
    but whose pods still serve, with the numbers of these pods."""
    after = _settle(before, wanted, now_s, at_once=at_once)
    former = before.weights if before is not None else _NONE
    staying = {name: pods for name, pods in retiring.items() if name in former}
    if before is None or not staying:
        return after
    if not after.weights:
        until_s = math.inf  # the others wait until they may join
    elif after.weights.keys().isdisjoint(former):
        until_s = now_s + OVERLAP_S
    else:
        until_s = before.overlap_s
    if now_s >= until_s:
        return after
    weights = dict(sorted({**after.weights, **staying}.items()))
    return Settled(weights, after.joined_s, min(after.due_s, until_s), until_s)


def _settle(
    before: Settled | None, wanted: Mapping[str, int], now_s: float, *, at_once: bool
) -> Settled:
    """Return which of the wanted nodes announce the address now."""
    if before is None or at_once:
        joins = bool(wanted.keys() - (before.weights.keys() if before is not None else ()))
        joined_s = now_s if joins else before.joined_s if before is not None else -math.inf
        return Settled(wanted, joined_s)
    kept = {name: weight for name, weight in before.weights.items() if name in wanted}
    if not (wanted.keys() - kept.keys()) and not unfair(kept, wanted):
        return Settled(kept, before.joined_s)
    wait_s = COLLECT_S if kept else 0.0
    due_s = max(min(before.due_s, now_s + wait_s), before.joined_s + COLLECT_S)
    if now_s < due_s:
        return Settled(kept, before.joined_s, due_s)
    return Settled(wanted, now_s if wanted.keys() - kept.keys() else before.joined_s)


def unfair(told: Mapping[str, int], pods: Mapping[str, int]) -> bool:
    """Return whether some pod gets a share that differs by more than TOLERANCE from a fair one.
    `told`: the weights by which routers divide connections among nodes. `pods`: the number of pods
    of these nodes, which is 0 if nodes have no weights."""
    if not told:
        return False
    told_total, total = sum(told.values()), sum(pods[name] for name in told)
    if not all(told.values()) or not all(pods[name] for name in told):
        # Routers divide equally, or are to do so, if not all nodes have weights.
        return bool(told_total) != bool(total)
    return any(
        abs(weight * total / (told_total * pods[name]) - 1) > TOLERANCE
        for name, weight in told.items()
    )
