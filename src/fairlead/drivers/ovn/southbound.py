"""What the southbound database shows about chassis: their names, and how far each has got.

In: addresses of the servers. Out: names of chassis. Nothing is written. The driver works without
this database; only messages then do not name a chassis."""

from collections.abc import Sequence
from typing import NoReturn

from fairlead.net.ovsdb import Database, Table, Tls

NAME = "OVN_Southbound"
CHASSIS = "Chassis_Private"


class Southbound:
    """The chassis of OVN. Run `run` in one task."""

    def __init__(self, remotes: Sequence[str], tls: Tls | None) -> None:
        self.database = Database(NAME, remotes, {CHASSIS: Table(("name", "nb_cfg"))}, tls=tls)

    async def run(self) -> NoReturn:
        """Keep the copy up to date until cancelled."""
        await self.database.run()

    @property
    def chassis(self) -> Sequence[str]:
        """The names of all chassis, sorted; empty while they are unknown."""
        if not self.database.synced:
            return ()
        return sorted(row.string("name") for row in list(self.database.rows(CHASSIS).values()))

    def behind(self, number: int) -> Sequence[str]:
        """Return the names of the chassis that have not reached this number of `nb_cfg`, sorted;
        empty while they are unknown."""
        if not self.database.synced:
            return ()
        return sorted(
            row.string("name")
            for row in list(self.database.rows(CHASSIS).values())
            if row.integer("nb_cfg") < number
        )
