"""Applies changes to the maps. An error affects only the Service of the change.

In: changes, and for each SetNode the next hop of the node, or the error that says why there is
none. Out: outcomes of the Services that did not get everything, and of the Services to reconcile
again when a node's time to keep connections ends. Invariant: a node gets new connections of a
listener only if it has a usable next hop of the listener's family, unless no other node has one
either. Its share goes to the other nodes, and `diff` plans the listener again until the node can be
reached."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.maps.records import NextHop
from fairlead.drivers.direct.spec import (
    DirectChange,
    ListenerKey,
    RemoveListener,
    SetListener,
    SetNode,
    SetRanges,
    based_on,
    without_nodes,
)
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import Outcome, ServiceKey
from fairlead.net.address import is_ipv6
from fairlead.net.transition import Slots

_NextHopErrors = dict[tuple[str, bool], FairleadError]
"""Why a node cannot be reached, by node and address family (True: IPv6)."""


class ChangeRun:
    """Applies changes in order, in one or more parts: call `apply` for each part, then `finish`.

    `changes`: the changes of all parts. A new listener may use the memory of a listener that a
    later change of the same Service removes."""

    def __init__(
        self,
        tables: ListenerMaps,
        next_hops: Mapping[SetNode, NextHop | FairleadError],
        changes: Iterable[DirectChange],
    ) -> None:
        self._tables = tables
        self._next_hops = next_hops
        self._next_hop_errors: _NextHopErrors = {}
        self._errors: dict[ServiceKey, list[FairleadError]] = {}
        self.missing: dict[ServiceKey, set[ListenerKey]] = {}
        """Listeners that could not be created, or that belong to another Service."""
        self._services: set[ServiceKey] = set()
        self._previous_owners: set[ServiceKey] = set()
        """Services that have lost a listener to another Service."""
        self._to_remove: dict[ServiceKey, list[ListenerKey]] = {}
        for change in changes:
            if isinstance(change, RemoveListener):
                self._to_remove.setdefault(change.service, []).append(change.key)
        self._batch: dict[ListenerKey, SetListener] = {}
        """Listeners to set together, before any other change is applied."""

    def apply(self, changes: Sequence[DirectChange]) -> None:
        """Apply these changes. Errors are collected for `finish`, never raised.

        Consecutive SetListener changes are applied together, because each map is then written only
        once for all of them."""
        self._services.update([change.service for change in changes])
        for change in changes:
            if isinstance(change, SetListener):
                if change.listener.key in self._batch:
                    self._flush()
                self._batch[change.listener.key] = change
                continue
            self._flush()
            try:
                self._apply_one(change)
            except FairleadError as error:
                self._fail(change.service, error)
        self._flush()

    def _apply_one(self, change: SetNode | SetRanges | RemoveListener) -> None:
        match change:
            case SetNode():
                self._set_node(change, self._next_hops[change])
            case SetRanges(service=service, cidrs=cidrs):
                self._tables.set_ranges(service, cidrs)
            case RemoveListener(service=service, key=key):
                self._tables.remove_listener(key, service)

    def _fail(self, service: ServiceKey, *errors: FairleadError) -> None:
        self._errors.setdefault(service, []).extend(errors)

    def _set_node(self, change: SetNode, next_hop: NextHop | FairleadError) -> None:
        ipv6 = is_ipv6(change.address)
        if isinstance(next_hop, FairleadError):
            self._tables.nodes.mark_unreachable(change.node, ipv6=ipv6)
            self._next_hop_errors[change.node, ipv6] = next_hop
            raise next_hop
        self._tables.nodes.set_next_hop(change.node, next_hop, ipv6=ipv6)

    def _flush(self) -> None:
        """Set the listeners of the batch."""
        if not self._batch:
            return
        batch, self._batch = self._batch, {}
        old_listeners = {key: self._tables.installed(key) for key in batch}
        unreachable = {key: self._unreachable(change) for key, change in batch.items()}
        feasible = {
            key: _feasible(change, old_listeners[key], unreachable[key])
            for key, change in batch.items()
        }
        failures = self._tables.set_listeners(feasible.values(), self._to_remove)
        for key, change in feasible.items():
            old = old_listeners[key]
            if (
                key not in failures
                and old
                and change.from_scratch
                and change.slots != old.slots
                and self._tables.is_used(old)
            ):
                # The first packets of the listener arrived after the change was planned, and may
                # have been forwarded by the old slots. Their connections must not move.
                failures |= self._tables.set_listeners((based_on(change, old.slots),))
            if change.taken_from:
                self._previous_owners.add(change.taken_from)
            if key in failures:
                self._fail(change.service, failures[key])
                installed = self._tables.installed(key)
                if installed is None or installed.service != change.service:
                    self.missing.setdefault(change.service, set()).add(key)
            elif unreachable[key]:
                ipv6 = is_ipv6(key.address)
                why = (
                    self._next_hop_errors.get((node, ipv6)) or _unknown_next_hop(node)
                    for node in unreachable[key]
                )
                self._fail(change.service, *why)

    def _unreachable(self, change: SetListener) -> Collection[str]:
        """Return the nodes that should get new connections but cannot be reached, sorted."""
        ipv6, nodes = is_ipv6(change.listener.key.address), self._tables.nodes
        if nodes.all_reachable(change.slots.nodes, ipv6=ipv6):
            return ()  # the common case, without building a set
        return nodes.unreachable(
            {node for node, _ in change.listener.weights}.intersection(change.slots.nodes),
            ipv6=ipv6,
        )

    def finish(self) -> dict[ServiceKey, Outcome]:
        """Release what no listener needs any more, and return the outcomes.

        A Service without an outcome is done. A Service whose outcome is done with `again_s` is
        reconciled again after this time, when a node's time to keep connections ends."""
        for service in self._services | self._previous_owners:
            self._tables.forget_ranges(service)
        self._tables.forget_unused_nodes()
        deadlines = ((service, self._tables.next_deadline_s(service)) for service in self._services)
        again = {
            service: Outcome("done", again_s=left_s) for service, left_s in deadlines if left_s
        }
        incomplete = {
            service: shortfalls
            for service in self._services
            if (shortfalls := self._tables.shortfalls(service))
        }
        return again | {
            service: self._outcome(service, incomplete.get(service, ()))
            for service in self._errors.keys() | incomplete.keys()
        }

    def _outcome(self, service: ServiceKey, shortfalls: Collection[str]) -> Outcome:
        """Return the outcome of a Service that did not get everything.

        The outcome is `unavailable`, so the Service is retried, unless only the user can solve all
        of the errors. `shortfalls`: what individual listeners of the Service lack."""
        errors, missing = self._errors.get(service, ()), sorted(self.missing.get(service, ()))
        refused = bool(errors) and all(isinstance(error, Refused) for error in errors)
        texts = list(dict.fromkeys(str(error) for error in errors))
        have = self._tables.count_of(service)
        if missing:
            texts.insert(0, f"{len(missing)} of {have + len(missing)} listeners are not served")
        texts += [
            f"{count} of {have} listeners have {shortfall}"
            for shortfall, count in Counter(shortfalls).items()
        ]
        return Outcome(
            "refused" if refused else "unavailable",
            "; ".join(texts),
            again_s=max(
                (each.retry_after_s for each in errors if isinstance(each, Unavailable)),
                default=0.0,
            ),
            in_part=self._tables.serves(service),
            missing=tuple(map(str, missing)),
            coarse=not errors,
        )


def _feasible(
    change: SetListener, old: InstalledListener | None, unreachable: Collection[str]
) -> SetListener:
    """Return the change adapted to the listener as it is installed now, and to unreachable
    nodes."""
    old_slots = old.slots if old else Slots()
    if old and old_slots != change.old_slots and not change.from_scratch:
        # After the change was planned, a peer reported connections of this listener, and the slots
        # were changed for them (`ListenerMaps.set_peer_slots`). This change must not undo that.
        change = based_on(change, old_slots)
    if unreachable:
        change = without_nodes(
            change, frozenset(unreachable), Slots() if change.from_scratch else old_slots
        )
    return change


def _unknown_next_hop(node: str) -> Unavailable:
    return Unavailable(
        f"the next hop to node {node} is unknown",
        fix="the gateway looks for it again; check the gateway's routes",
    )
