"""Whether this gateway gives its addresses away, before its host is shut down for example.

In: the request in its Lease (`fairlead gateway --leave`), the label of its Node, the record of the
previous process. Out: since when it leaves, which its Lease passes on (`kube.presence`). All
gateways choose the owners of addresses by these records, this one included: so the others announce
the addresses, and this gateway goes on answering until it has heard them (`drivers.announce`).
Invariants: a process that starts on a Node with the label never announces an address in between.
Of gateways that leave, one that knows of the others has the latest time, whatever its clock says:
the last one that leaves keeps the addresses that no other gateway can announce."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import structlog

from fairlead.kube.events import STAMP, stamp
from fairlead.kube.objects import ANNOUNCE_LABEL
from fairlead.state import State

log = structlog.get_logger()

LEAVE = "leave"
"""The value of the label."""


class Leaving:
    """`own`: the name of the gateway, and of its Node if it has one. `asked`: returns whether the
    Lease asks this process to leave."""

    def __init__(self, state: State, own: str, asked: Callable[[], bool]) -> None:
        self._state = state
        self._own = own
        self._asked = asked
        self._since = ""

    def inherit(self, since: str) -> None:
        """Continue what the previous process did, until the Nodes are known."""
        self._since = since

    def since(self) -> str:
        """Since when the gateway leaves, in RFC 3339; empty: it does not."""
        if not self._state.has_synced.is_set():
            return self._since
        leaves = self._asked() or self._is_labelled()
        if leaves != bool(self._since):
            self._since = stamp(self._latest()) if leaves else ""
            log.info(
                "giving the announced addresses to other gateways"
                if leaves
                else "announcing addresses again"
            )
        return self._since

    def _latest(self) -> datetime:
        """Return the present time; if the clock of another gateway that leaves is ahead, a second
        more than its time."""
        gateways, found = self._state.gateways, datetime.now(UTC)
        for each in gateways.leaving.values() if gateways is not None else ():
            with suppress(ValueError, OverflowError):  # any text may be in a Lease
                after = datetime.strptime(each, STAMP).replace(tzinfo=UTC) + timedelta(seconds=1)
                found = max(found, after)
        return found

    def _is_labelled(self) -> bool:
        node = self._state.nodes.get(self._own)
        return node is not None and node.metadata.labels.get(ANNOUNCE_LABEL) == LEAVE
