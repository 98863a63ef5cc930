"""The steps from the rows that exist to the rows that Services should have.

In: desired and actual state, the time. Out: Changes in order. Pure. A row is created complete and
attached. It is changed in place and never detached, because OVN forgets the open connections of a
row that leaves a router. A row that no Service needs first refuses new connections, and is deleted
when the time for its open connections is over. Equal states give no change, except that a Service
whose nodes lack their router is reported."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from fairlead.drivers.ovn.changes import (
    AttachRow,
    AwaitFlows,
    Blocked,
    Change,
    CreateRow,
    DeleteRow,
    Report,
    UpdateRow,
    Write,
    is_appearance,
)
from fairlead.drivers.ovn.checks import no_gateway_routers
from fairlead.drivers.ovn.marks import removed_of
from fairlead.drivers.ovn.render import columns_of, emptied
from fairlead.drivers.ovn.spec import (
    Frontend,
    Row,
    RowSpec,
    ServiceRows,
    ServiceSpec,
    Site,
    row_name,
)
from fairlead.model import ServiceKey

NOTHING = ServiceRows()


def diff(
    site: Site,
    desired: Mapping[ServiceKey, ServiceSpec],
    actual: Mapping[ServiceKey, ServiceRows],
    drain_timeout_s: float,
    now_s: float,
) -> Sequence[Change]:
    """Return the steps. `drain_timeout_s`: for rows of Services that are not desired any more.
    `now_s`: Unix time."""
    changes: list[Change] = []
    for key, spec in desired.items():
        changes += _of_service(site, key, spec, actual.get(key, NOTHING), now_s)
    for key, found in actual.items():
        if key in desired or not found.known:
            continue
        if found.blocked is not None and found.blocked.state == "unavailable":
            changes.append(Blocked(key, found.blocked))
            continue
        for row in found.rows:
            changes += _away(site, key, row, drain_timeout_s, now_s)
    return changes


def _of_service(
    site: Site, key: ServiceKey, spec: ServiceSpec, found: ServiceRows, now_s: float
) -> Iterator[Change]:
    blocked = found.blocked
    if blocked is not None and blocked.state == "unavailable":
        yield Blocked(key, blocked)
        return
    present = {wanted.frontend: _row_at(site, found, wanted.frontend) for wanted in spec.rows}
    kept = {row.uuid for row in present.values() if row is not None}
    writes: list[Write] = []
    for row in found.rows:
        if row.uuid in kept:
            continue
        if row.frontend in present or not _is_in_place(site, row):
            # It may be beside another row for the address, and both would get traffic.
            writes.append(DeleteRow(key, row.uuid))
        else:
            writes += _away(site, key, row, spec.drain_timeout_s, now_s)
    for wanted in spec.rows:
        before = present[wanted.frontend]
        writes += _of_row(site, key, wanted, spec.drain_timeout_s, before, now_s)
    if blocked is not None and not any(map(is_appearance, writes)):
        blocked = None
    if blocked is None and (nodes := _without_router(site, spec.rows)):
        blocked = no_gateway_routers([(each, site.router_of(each)) for each in nodes])
    if blocked is not None:
        # Existing rows must still follow the pods.
        served = {
            row.frontend.address for row in present.values() if row is not None and row.installed
        }
        in_part = served == {each.frontend.address for each in spec.rows}
        yield Blocked(key, msgspec.structs.replace(blocked, in_part=in_part))
    if found.blocked is not None:
        writes = [each for each in writes if not is_appearance(each)]
    yield from writes
    if not writes and not all(row.installed for row in found.rows if row.uuid in kept):
        yield AwaitFlows(key)
    if found.unreported:
        yield Report(key)


def _without_router(site: Site, rows: Sequence[RowSpec]) -> Collection[str]:
    """Return the nodes among these rows that have active pods, and no gateway router."""
    nodes = {each.frontend.node for each in rows if each.frontend.node and each.weights}
    return sorted(each for each in nodes if not site.attachments(each))


def _row_at(site: Site, found: ServiceRows, frontend: Frontend) -> Row | None:
    """Return the row of this frontend; the first one if a failure has left several."""
    for row in found.rows:
        if row.frontend == frontend and _is_in_place(site, row):
            return row
    return None


def _is_in_place(site: Site, row: Row) -> bool:
    """Return whether a row is on no router or switch but its own. It may be on another one if it is
    from another topology, or if another program has changed its marks."""
    return all(site.is_place(each, row.frontend.node) for each in row.attached)


def _of_row(
    site: Site,
    key: ServiceKey,
    wanted: RowSpec,
    drain_timeout_s: float,
    row: Row | None,
    now_s: float,
) -> Iterator[Write]:
    columns = columns_of(site, key, wanted, drain_timeout_s, row, now_s)
    attachments = site.attachments(wanted.frontend.node)
    if row is None:
        if attachments:
            yield CreateRow(key, wanted.frontend, columns, tuple(sorted(attachments)))
        return
    if row.columns != columns:
        yield UpdateRow(key, row.uuid, row.columns, columns)
    for attachment in sorted(attachments - row.attached):
        yield AttachRow(key, row.uuid, attachment)


def _away(
    site: Site, key: ServiceKey, row: Row, drain_timeout_s: float, now_s: float
) -> Iterator[Write]:
    """Yield the next step of a row that no Service needs."""
    if not row.frontend.is_readable:
        yield DeleteRow(key, row.uuid)
        return
    until = removed_of(row.columns.external_ids)
    if until is not None and now_s < until <= math.ceil(now_s + drain_timeout_s):
        name = row_name(site.cluster, key, row.frontend)
        if row.columns.name != name:
            # Another program has changed the marks. The name would prevent the creation of the row
            # that should have it.
            columns = msgspec.structs.replace(row.columns, name=name)
            yield UpdateRow(key, row.uuid, row.columns, columns)
        return
    if until is None or until > now_s:  # a later time is from before the clock was set back
        columns = emptied(site, key, row, drain_timeout_s, now_s)
        if (removed_of(columns.external_ids) or 0) > now_s:
            yield UpdateRow(key, row.uuid, row.columns, columns)
            return
    yield DeleteRow(key, row.uuid)
