"""Carry changes out on the tables, one Service's failure apart from another's.

In: changes, and for each node that is to be set the way to it, or why there is none. Out: the outcomes of the Services that did
not get all they should have, and of those that are to be looked at again when a node's time to keep connections is over.
Invariant: no node gets a share of a listener without a usable way of its family, unless no other has one either. So what
one node cannot take goes to the others, and `diff` asks again for as long as that is so.
"""

from collections.abc import Mapping, Sequence

from fairlead.drivers.direct.layout import Way
from fairlead.drivers.direct.spec import DirectChange, RemoveListener, SetListener, SetNode, SetRanges, from_these, without
from fairlead.drivers.direct.tables import Tables
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import Outcome, ServiceKey
from fairlead.net.transition import Slots

_Failures = dict[tuple[str, bool], FairleadError]
"""Why a node cannot be reached; over IPv6 if True."""


class Work:
    """Changes that are carried out in order, in as many parts as one likes. Nothing is raised: what goes wrong goes wrong for
    one Service."""

    def __init__(self, tables: Tables, ways: Mapping[SetNode, Way | FairleadError]) -> None:
        self._tables = tables
        self._ways = ways
        self._failures: _Failures = {}
        self._reasons: dict[ServiceKey, list[FairleadError]] = {}
        self._services: set[ServiceKey] = set()
        self._givers: set[ServiceKey] = set()
        """Those that listeners were taken from."""

    def do(self, changes: Sequence[DirectChange]) -> None:
        """All of these that can be done."""
        for change in changes:
            self._services.add(change.service)
            try:
                errors = self._one(change)
            except FairleadError as error:
                errors = [error]
            if errors:
                self._reasons.setdefault(change.service, []).extend(errors)

    def _one(self, change: DirectChange) -> list[FairleadError]:
        match change:
            case SetNode():
                return _set_node(self._tables, change, self._ways[change], self._failures)
            case SetRanges(service=service, cidrs=cidrs):
                self._tables.set_ranges(service, cidrs)
            case SetListener():
                if change.taken_from:
                    self._givers.add(change.taken_from)
                return _set_listener(self._tables, change, self._failures)
            case RemoveListener(service=service, key=key):
                self._tables.remove_listener(key, service)
        return []

    def end(self) -> dict[ServiceKey, Outcome]:
        """Free what is not needed any more; what came of it all."""
        for service in self._services | self._givers:
            self._tables.forget_ranges(service)
        self._tables.forget_unused_nodes()
        deadlines = ((service, self._tables.next_deadline_s(service)) for service in self._services)
        again = {service: Outcome("done", again_s=left_s) for service, left_s in deadlines if left_s}
        return again | {service: _outcome(errors) for service, errors in self._reasons.items()}


def carry_out(
    tables: Tables, changes: Sequence[DirectChange], ways: Mapping[SetNode, Way | FairleadError]
) -> dict[ServiceKey, Outcome]:
    """All of it at once."""
    work = Work(tables, ways)
    work.do(changes)
    return work.end()


def _set_node(tables: Tables, change: SetNode, way: Way | FairleadError, failures: _Failures) -> list[FairleadError]:
    ipv6 = ":" in change.address
    if isinstance(way, FairleadError):
        tables.nodes.doubt(change.node, ipv6=ipv6)
        failures[change.node, ipv6] = way
        return [way]
    tables.nodes.set_way(change.node, way, ipv6=ipv6)
    return []


def _set_listener(tables: Tables, change: SetListener, failures: _Failures) -> list[FairleadError]:
    """Why nodes had to be left out."""
    ipv6 = ":" in change.listener.key.address
    nodes = {node for node, _ in change.listener.weights}.intersection(change.slots.nodes)
    unreachable = tables.nodes.unreachable(nodes, ipv6=ipv6)
    old = tables.installed(change.listener.key)
    before = old.slots if old else Slots()
    if old and before != change.before and not change.afresh:
        # Another gateway has told of connections here since the plan was made: what they need is not to be undone.
        change = from_these(change, before)
    if unreachable:
        change = without(change, frozenset(unreachable), Slots() if change.afresh else before)
    tables.set_listener(change)
    if old and change.afresh and change.slots != before and tables.is_used(old):
        # Its first packets have come since the plan was made, and may have gone by the slots before.
        tables.set_listener(from_these(change, before))
    return [failures.get((node, ipv6)) or _unknown(node) for node in unreachable]


def _unknown(node: str) -> Unavailable:
    return Unavailable(f"no way to node {node} is known", fix="it is asked for again; check the gateway's routes")


def _outcome(errors: Sequence[FairleadError]) -> Outcome:
    """Trying again may help as long as one of them is not the user's to mend."""
    refused = all(isinstance(error, Refused) for error in errors)
    message = "; ".join(dict.fromkeys(str(error) for error in errors))
    retry_after_s = max(error.retry_after_s if isinstance(error, Unavailable) else 0.0 for error in errors)
    return Outcome("refused" if refused else "unavailable", message, again_s=retry_after_s)
