"""Rows of others that are attached after an address is in use.

In: the UUIDs of rows that were newly attached to a configured router or switch. Out: a Finding for
each Service whose address and port such a row has, once for each row. An address is checked against
the rows of others before it is used (`foreign_rows`), but other programs do not check. A row is
read once, when it is attached or at the start, because monitoring all load balancers of a cloud
would take its memory. So a row that gets the address later, and a row that is attached by a
Load_Balancer_Group, are not found."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from fairlead.drivers.ovn.foreign import ForeignRow, conflict, holder
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.errors import FairleadError
from fairlead.model import Finding, ServiceKey


class NewForeignRows:
    """The rows of others that have an address in use. Run `run` in one task."""

    def __init__(self, rows: Northbound, requeue: Callable[[Collection[ServiceKey]], None]) -> None:
        """`requeue` is called with the Services of new Findings."""
        self._rows, self._requeue = rows, requeue
        self._unread: set[str] = set()
        self._wake = asyncio.Event()
        self._unreported: dict[ServiceKey, tuple[Finding, ...]] = {}

    def note(self, rows: Collection[str]) -> None:
        """Read these rows, and those that could not be read before."""
        self._unread |= set(rows)
        if self._unread:
            self._wake.set()

    @property
    def unreported(self) -> Mapping[ServiceKey, tuple[Finding, ...]]:
        """The Findings that were not reported yet."""
        return self._unreported

    def take(self, key: ServiceKey) -> tuple[Finding, ...]:
        """Return the Findings about a Service, which are reported now."""
        return self._unreported.pop(key, ())

    async def run(self) -> NoReturn:
        """Read rows until cancelled. Rows that cannot be read wait for the next call of `note`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            unread, self._unread = self._unread, set()
            try:
                found = await self._rows.others_among(unread)
            except FairleadError:
                self._unread |= unread
            else:
                self._compare(found)

    def _compare(self, others: Collection[ForeignRow]) -> None:
        new = set[ServiceKey]()
        for other in others:
            places = self._rows.places_of(other.uuid)
            for key, row in self._rows.serving(other):
                common = row.attached & places
                if common and holder((other,), row.frontend) is not None:
                    finding = conflict(row.frontend, other, min(common))
                    self._unreported[key] = (*self._unreported.get(key, ()), finding)
                    new.add(key)
        self._requeue(new)
