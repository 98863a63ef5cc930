"""Changes carried out on tables in one go, without a loop and without turns."""

from collections.abc import Mapping, Sequence

from fairlead.drivers.direct.change_run import ChangeRun
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import NextHop
from fairlead.drivers.direct.spec import DirectChange, SetListener, SetNode
from fairlead.errors import FairleadError
from fairlead.model import Outcome, ServiceKey


def carry_out(
    tables: ListenerMaps,
    changes: Sequence[DirectChange],
    ways: Mapping[SetNode, NextHop | FairleadError],
) -> dict[ServiceKey, Outcome]:
    """All of the changes, with these ways to the nodes that they set."""
    run = ChangeRun(tables, ways, changes)
    run.apply(changes)
    return run.finish()


def set_listener(tables: ListenerMaps, change: SetListener) -> None:
    """One listener. Raises the error that `ListenerMaps.set_listeners` returns."""
    for error in tables.set_listeners((change,)).values():
        raise error
