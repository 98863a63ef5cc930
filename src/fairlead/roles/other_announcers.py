"""The periodic check whether another program of this host announces the same addresses, or has the
BGP sessions.

In: the intents that were applied last, the facts about the host. Out: Findings about the host, in
the log, at /state and in `fairlead status`."""

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from fairlead.announce_sections import AnnounceConfig
from fairlead.drivers import Component
from fairlead.drivers.host_announcers import read
from fairlead.errors import FairleadError
from fairlead.model import Finding
from fairlead.plan.other_announcers import HostAnnouncers, address_conflicts, daemon_conflicts
from fairlead.web import View

log = structlog.get_logger()

CHECK_INTERVAL_S = 15.0


class OtherAnnouncers(Component):
    """The component that checks. `arrivals`: returns the interfaces at which packets for the
    addresses arrive."""

    name = "other announcers"

    def __init__(
        self, section: AnnounceConfig, view: View, arrivals: Callable[[], Collection[str]]
    ) -> None:
        self._section = section
        self._view = view
        self._arrivals = arrivals
        self._found: Sequence[Finding] = ()

    async def run(self) -> None:
        self._view.conflicts = lambda: self._found
        while True:
            try:
                found = self.findings(read())
            except FairleadError as problem:
                log.warning("cannot check for other announcers", problem=str(problem))
            else:
                for each in found:
                    if each not in self._found:
                        log.warning("conflict", problem=each.message, fix=each.remedy)
                self._found = found
            await asyncio.sleep(CHECK_INTERVAL_S)

    def findings(self, host: HostAnnouncers) -> Sequence[Finding]:
        """Return the conflicts of the present announcements with other programs."""
        announcements = [
            each for intent in self._view.intents.values() for each in intent.announcements
        ]
        addresses = {address for each in announcements for address in each.addresses}
        found = list(address_conflicts(addresses, host, self._arrivals()))
        if any(each.method == "bgp" for each in announcements):
            bgp = self._section.bgp
            found += daemon_conflicts(host, bgp.speaker, bgp.route_table)
        return found
