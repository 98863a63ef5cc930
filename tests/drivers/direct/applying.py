"""Functions that apply changes to the maps directly, without a driver or an event loop."""

from collections.abc import Mapping, Sequence

from fairlead.drivers.direct.change_run import ChangeRun
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import NextHop
from fairlead.drivers.direct.spec import DirectChange, SetListener, SetNode
from fairlead.errors import FairleadError
from fairlead.model import Outcome, ServiceKey


def apply_changes(
    tables: ListenerMaps,
    changes: Sequence[DirectChange],
    next_hops: Mapping[SetNode, NextHop | FairleadError],
) -> dict[ServiceKey, Outcome]:
    """Apply the changes, and return the outcomes. `next_hops`: the next hop for each SetNode among
    the changes."""
    run = ChangeRun(tables, next_hops, changes)
    run.apply(changes)
    return run.finish()


def set_listener(tables: ListenerMaps, change: SetListener) -> None:
    """Set one listener. Raise the error that `ListenerMaps.set_listeners` returns."""
    for error in tables.set_listeners((change,)).values():
        raise error
