"""The periodic check of the settings of the host. It is repeated because interfaces and nodes come
and go.

In: the requirements of the open components. Out: findings about harmful settings; the settings are
corrected if the configuration permits it."""

import asyncio
from collections.abc import Sequence

import structlog

from fairlead.drivers import Component
from fairlead.drivers.host import Host
from fairlead.errors import FairleadError
from fairlead.web import View

log = structlog.get_logger()

CHECK_INTERVAL_S = 60.0
"""The interval of the check."""


class HostSettings(Component):
    """The component that checks the settings. In the order of the start, it comes after the
    components that require something of the host. `remove` restores the original settings."""

    name = "host settings"

    def __init__(self, host: Host, view: View) -> None:
        self._host = host
        self._view = view

    async def run(self) -> None:
        self._view.host = lambda: self._host.findings
        while True:
            try:
                requirements = [
                    requirement
                    for component in self._view.components
                    for requirement in await component.requirements()
                ]
                self._host.check(requirements)
            except FairleadError as problem:
                log.warning("cannot check the settings of the host", problem=str(problem))
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def remove(self) -> Sequence[str]:
        return [f"Fairlead's value of the setting {each}" for each in self._host.restore()]
