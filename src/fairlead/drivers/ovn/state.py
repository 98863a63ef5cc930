"""The part of `/state` about class ovn.

In: the databases, the rows of this cluster. Out: OvnState. Called in a thread while the event loop
changes the rows, so dicts of the loop are copied before they are iterated."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from fairlead.drivers.ovn.marks import removed_of
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.spec import Row, Site, backends_of
from fairlead.model import ServiceKey
from fairlead.net.ovsdb import Database
from fairlead.role_state import OvnDatabaseState, OvnLoadBalancer, OvnState


def state_of(
    site: Site,
    databases: Iterable[Database],
    rows: Northbound,
    installed: Callable[[str], bool],
    behind: Collection[str],
) -> OvnState:
    """Return the state. `installed`: whether every chassis has the row with this UUID. `behind`:
    the chassis that have not confirmed the last change."""
    return OvnState(
        site.router,
        tuple(map(_database, databases)),
        tuple(_balancers(site, rows, installed)),
        tuple(behind),
    )


def _database(database: Database) -> OvnDatabaseState:
    since_s, obstacle = database.stale_since_s, database.obstacle
    stale_s = time.monotonic() - since_s if since_s is not None else 0.0
    return OvnDatabaseState(
        database.name, obstacle is None, stale_s, str(obstacle) if obstacle is not None else ""
    )


def _balancers(
    site: Site, rows: Northbound, installed: Callable[[str], bool]
) -> Iterator[OvnLoadBalancer]:
    for key in sorted(rows.services):
        for row in rows.rows_of(key, installed):
            yield _balancer(site, key, row)


def _balancer(site: Site, key: ServiceKey, row: Row) -> OvnLoadBalancer:
    vips, frontend = row.columns.vips, row.frontend
    return OvnLoadBalancer(
        str(key),
        row.uuid,
        frontend.vip,
        frontend.protocol,
        Counter(sorted(backends_of(vips.get(frontend.vip, "")))),
        backends_of(vips.get(frontend.drain_vip(site), "")),
        tuple(sorted(each.name for each in row.attached)),
        row.installed,
        removed_of(row.columns.external_ids) is not None,
        frontend.node,
    )
