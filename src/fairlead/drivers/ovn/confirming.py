"""Whether every chassis has installed the rows of a Service, so that its address may be published.

In: the rows, the sequence numbers in the northbound database, the chassis in the southbound one.
Out: Outcomes. Every row that appears in the copy of the database is waited for, also if the answer
to its transaction was lost. Only the rows that exist at the start and whose address is published
are not: a previous process has waited for them."""

import math
import time
from collections.abc import Callable, Collection, Sequence

from fairlead.drivers.ovn import checks, northbound
from fairlead.drivers.ovn.flows import PATIENCE_S, Flows
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.southbound import Southbound
from fairlead.model import Finding, Outcome, ServiceKey
from fairlead.net.ovsdb import Changes

FOR_NORTHD = "waiting until ovn-northd has processed the load balancer"
FOR_CHASSIS = "waiting until every chassis of OVN has installed the load balancer"


class Confirming:
    """The rows that some chassis may lack."""

    def __init__(
        self,
        rows: Northbound,
        south: Southbound | None,
        published: Callable[[ServiceKey], Collection[str]],
    ) -> None:
        """`published` returns the addresses in the status of a Service."""
        self._rows, self._south, self._published = rows, south, published
        self._flows = Flows(time.monotonic)
        self._lagging: Finding | None = None
        """What was reported about chassis last."""

    def follow(
        self, changes: Changes, appeared: Collection[str], *, at_start: bool
    ) -> Collection[str]:
        """Take over changes of the database. `appeared`: the rows that are new or newly attached.
        `at_start`: these are the rows that exist at the start. Return the rows that every chassis
        has installed by now."""
        for row, columns in changes.get(northbound.BALANCERS, {}).items():
            if columns is None:
                self._flows.forget(row)
        if at_start:
            appeared = [row for row in appeared if not self._is_published(row)]
        self._flows.written(appeared, self._rows.number("nb_cfg"))
        if northbound.GLOBAL not in changes:
            return ()
        return self._flows.follow(self._rows.number("sb_cfg"), self._rows.number("hv_cfg"))

    @property
    def count(self) -> int:
        """The number of rows that are waited for."""
        return self._flows.count

    def installed(self, row: str) -> bool:
        """Return whether every chassis has the row, as far as it is waited for."""
        return self._flows.installed(row)

    def outcome(self, key: ServiceKey, again_s: float = math.inf) -> Outcome:
        """Return the Outcome of a Service for which nothing else is to do at present. `again_s`:
        the time until it has to be processed again in any case."""
        waiting = [
            row
            for row in self._rows.uuids_of(key)
            if not self._flows.installed(row) and not self._rows.is_removed(row)
        ]
        left_s = max(map(self._flows.left_s, waiting), default=0.0)
        if left_s:
            processed = all(map(self._flows.is_processed, waiting))
            message = FOR_CHASSIS if processed else FOR_NORTHD
            return Outcome("waiting", message, again_s=min(left_s, again_s))
        notes = tuple(self._give_up(waiting)) if waiting else ()
        return Outcome("done", again_s=again_s if again_s < math.inf else 0.0, notes=notes)

    def _give_up(self, rows: Collection[str]) -> Sequence[Finding]:
        """Cease to wait for these rows. Return the Finding about it if it is new: the same chassis
        delay every Service."""
        is_new = self._flows.is_patient
        number = max(map(self._flows.give_up, rows))
        names = self._south.behind(number) if self._south is not None else ()
        found = checks.lagging(names, PATIENCE_S)
        is_new |= found != self._lagging
        self._lagging = found
        return (found,) if is_new else ()

    def _is_published(self, row: str) -> bool:
        key = self._rows.key_of(row)
        return key is not None and self._rows.address_of(row) in self._published(key)
