"""A role's eye on the settings of its host, again and again: interfaces and nodes come and go.

In: the requirements of the components that are open. Out: what does harm is shown, and put right
where the configuration allows that."""

import asyncio
from collections.abc import Sequence

import structlog

from fairlead.drivers import Component
from fairlead.drivers.host import Host
from fairlead.errors import FairleadError
from fairlead.web import View

log = structlog.get_logger()

LOOK_S = 60.0
"""The settings are looked at once in this time."""


class HostSettings(Component):
    """Stands behind the components that require something of the host. `remove` puts settings
    back."""

    name = "host settings"

    def __init__(self, host: Host, view: View) -> None:
        self._host = host
        self._view = view

    async def run(self) -> None:
        self._view.host = lambda: self._host.findings
        while True:
            try:
                needs = [
                    need
                    for component in self._view.components
                    for need in await component.requirements()
                ]
                self._host.check(needs)
            except FairleadError as problem:
                log.warning("the host's settings cannot be seen to", problem=str(problem))
            await asyncio.sleep(LOOK_S)

    async def remove(self) -> Sequence[str]:
        return [f"our value of the setting {each}" for each in self._host.restore()]
