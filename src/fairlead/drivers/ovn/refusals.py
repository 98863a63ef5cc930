"""Which rows cannot be created at present.

In: the writes of Services, the rows of this cluster, the rows of others. Out: the Outcome of each
Service that would get a row at an address and port that another row has. Its other rows are not
concerned."""

from collections.abc import Callable, Mapping, Sequence

from fairlead.drivers.ovn.changes import CreateRow, Write
from fairlead.drivers.ovn.foreign_rows import ForeignRows, refusal_of
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.spec import Row
from fairlead.errors import Unavailable
from fairlead.model import Outcome, ServiceKey

Writes = Mapping[ServiceKey, Sequence[Write]]


async def refusals(
    writes: Writes,
    rows: Northbound,
    installed: Callable[[str], bool],
    foreign_rows: ForeignRows,
) -> Mapping[ServiceKey, Outcome]:
    """Return the Services among these that would get a row where they cannot have one. `installed`:
    whether every chassis has the row with this UUID."""
    created = {
        key: [write for write in some if isinstance(write, CreateRow)]
        for key, some in writes.items()
    }
    created = {key: some for key, some in created.items() if some}
    if not created:
        return {}
    try:
        others = await foreign_rows.update()
    except Unavailable as error:
        return dict.fromkeys(created, Outcome("unavailable", str(error)))
    waiting = {
        key: Outcome(
            "waiting",
            f"Service {other} has not released {write.frontend.vip} yet",
            in_part=_is_served(rows.rows_of(key, installed), some),
        )
        for key, some in created.items()
        for write in some
        for row, other in rows.rows_of_others(key, write.frontend).items()
        if not rows.is_removed(row)
    }
    return waiting | {
        key: Outcome(
            "refused", str(refusal), in_part=_is_served(rows.rows_of(key, installed), some)
        )
        for key, some in created.items()
        for write in some
        if (refusal := refusal_of(write.frontend, write.attachments, others)) is not None
    }


def _is_served(rows: Sequence[Row], created: Sequence[CreateRow]) -> bool:
    """Return whether a Service with these rows is already served at all addresses of new rows."""
    present = {row.frontend.address for row in rows if row.installed}
    return present.issuperset(each.frontend.address for each in created)
