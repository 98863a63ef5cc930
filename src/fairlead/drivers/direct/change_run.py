"""Carry changes out on the tables, one Service's failure apart from another's.

In: changes, and for each node that is to be set the way to it, or why there is none. Out: the
outcomes of the Services that did not get all they should have, and of those that are to be looked
at again when a node's time to keep connections is over. Invariant: no node gets a share of a
listener without a usable way of its family, unless no other has one either. So what one node cannot
take goes to the others, and `diff` asks again for as long as that is so."""

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
"""Why a node cannot be reached; over IPv6 if True."""


class ChangeRun:
    """Changes that are carried out in order, in any number of parts. Nothing is raised: an error
    affects only one Service. `changes`: all of them, to know what they will release."""

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
        """Listeners that do not exist, or belong to another Service."""
        self._services: set[ServiceKey] = set()
        self._previous_owners: set[ServiceKey] = set()
        """Those that listeners were taken from."""
        self._to_remove: dict[ServiceKey, list[ListenerKey]] = {}
        for change in changes:
            if isinstance(change, RemoveListener):
                self._to_remove.setdefault(change.service, []).append(change.key)
        self._batch: dict[ListenerKey, SetListener] = {}
        """Listeners that are to be set before anything else is done."""

    def apply(self, changes: Sequence[DirectChange]) -> None:
        """All of these that can be done. Listeners that follow each other are set together."""
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
            self._tables.nodes.doubt(change.node, ipv6=ipv6)
            self._next_hop_errors[change.node, ipv6] = next_hop
            raise next_hop
        self._tables.nodes.set_way(change.node, next_hop, ipv6=ipv6)

    def _flush(self) -> None:
        """Those that have been gathered."""
        if not self._batch:
            return
        gathered, self._batch = self._batch, {}
        before = {key: self._tables.installed(key) for key in gathered}
        unreachable = {key: self._unreachable(change) for key, change in gathered.items()}
        possible = {
            key: _feasible(change, before[key], unreachable[key])
            for key, change in gathered.items()
        }
        failures = self._tables.set_listeners(possible.values(), self._to_remove)
        for key, change in possible.items():
            old = before[key]
            if (
                key not in failures
                and old
                and change.from_scratch
                and change.slots != old.slots
                and self._tables.is_used(old)
            ):
                # Its first packets have come since the plan was made, and may have gone by the
                # slots before.
                failures |= self._tables.set_listeners((based_on(change, old.slots),))
            if change.taken_from:
                self._previous_owners.add(change.taken_from)
            if key in failures:
                self._fail(change.service, failures[key])
                there = self._tables.installed(key)
                if there is None or there.service != change.service:
                    self.missing.setdefault(change.service, set()).add(key)
            elif unreachable[key]:
                ipv6 = is_ipv6(key.address)
                why = (
                    self._next_hop_errors.get((node, ipv6)) or _unknown_next_hop(node)
                    for node in unreachable[key]
                )
                self._fail(change.service, *why)

    def _unreachable(self, change: SetListener) -> Collection[str]:
        """Those that are to get a share and cannot get packets, sorted."""
        ipv6, nodes = is_ipv6(change.listener.key.address), self._tables.nodes
        if nodes.within_reach(change.slots.nodes, ipv6=ipv6):
            return ()  # as mostly
        return nodes.unreachable(
            {node for node, _ in change.listener.weights}.intersection(change.slots.nodes),
            ipv6=ipv6,
        )

    def finish(self) -> dict[ServiceKey, Outcome]:
        """Free what is not needed any more; what came of it all."""
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
            if (shortfalls := self._tables.short(service))
        }
        return again | {
            service: self._outcome(service, incomplete.get(service, ()))
            for service in self._errors.keys() | incomplete.keys()
        }

    def _outcome(self, service: ServiceKey, shortfalls: Collection[str]) -> Outcome:
        """The outcome is `unavailable`, so that it is retried, unless only the user can solve all
        of the errors."""
        errors, missing = self._errors.get(service, ()), sorted(self.missing.get(service, ()))
        refused = bool(errors) and all(isinstance(error, Refused) for error in errors)
        words = list(dict.fromkeys(str(error) for error in errors))
        have = self._tables.count_of(service)
        if missing:
            words.insert(0, f"{len(missing)} of {have + len(missing)} listeners are not served")
        words += [
            f"{count} of {have} listeners have {shortfall}"
            for shortfall, count in Counter(shortfalls).items()
        ]
        return Outcome(
            "refused" if refused else "unavailable",
            "; ".join(words),
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
    """The change as it can be made where `old` is and these nodes are out of reach."""
    before = old.slots if old else Slots()
    if old and before != change.old_slots and not change.from_scratch:
        # Another gateway has told of connections here since the plan was made: what they need is
        # not to be undone.
        change = based_on(change, before)
    if unreachable:
        change = without_nodes(
            change, frozenset(unreachable), Slots() if change.from_scratch else before
        )
    return change


def _unknown_next_hop(node: str) -> Unavailable:
    return Unavailable(
        f"no way to node {node} is known", fix="it is asked for again; check the gateway's routes"
    )
