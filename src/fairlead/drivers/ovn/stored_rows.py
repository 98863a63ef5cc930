"""The rows of a cluster in the northbound database, for a command that runs once.

In: the configuration of the driver, the servers. Out: the rows; deletion of some of them."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from fairlead.drivers.ovn import northbound
from fairlead.drivers.ovn.changes import DeleteRow
from fairlead.drivers.ovn.leftovers import Leftover
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.spec import Row, Site
from fairlead.model import ServiceKey
from fairlead.net.ovsdb import Changes, Database, Tls


class StoredRows:
    """The rows, while the block of `async with` runs."""

    def __init__(
        self, site: Site, remotes: Sequence[str], tls: Tls | None, timeout_s: float
    ) -> None:
        self._rows = Northbound(site, lambda _: None)
        self._database = Database(
            northbound.NAME, remotes, northbound.tables(site), tls=tls, on_change=self._follow
        )
        self._rows.database = self._database
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Read the rows. Raise Unavailable or Refused."""
        self._task = asyncio.ensure_future(self._database.run())
        try:
            await self._database.wait_synced(self._timeout_s)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    def rows(self) -> Iterator[tuple[ServiceKey, Row]]:
        """Yield each row with its Service."""
        for key in sorted(self._rows.services):
            for row in self._rows.rows_of(key, lambda _: True):
                yield key, row

    async def delete(self, leftovers: Iterable[Leftover]) -> None:
        """Delete these rows in one transaction. Raise Unavailable or Refused."""
        steps = [DeleteRow(ServiceKey.parse(each.service), each.uuid) for each in leftovers]
        operations = [each for step in steps for each in self._rows.operations(step)]
        await self._database.transact(operations, comment="fairlead ovn gc")

    def _follow(self, changes: Changes) -> None:
        self._rows.follow(changes)

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
