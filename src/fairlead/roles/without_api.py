"""Withdrawal of what a host announces while the API server does not answer, and when the role is
stopped, as the section `announce` says (`withdrawWithoutApiS`, `withdrawAtStop`).

In: the time since the last answer of the API server; the signal that stops the role. Out: drivers
that withdraw, and announce again when the API server answers. By default everything stays
announced, because the kernel and HAProxy serve without the API server and without the process. A
host that is alone with an old state of the cluster can serve worse than others, or than another
site that announces the same addresses. A process that starts while the API server does not answer
changes nothing before the first answer."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.errors import FairleadError
from fairlead.kube.freshness import Freshness
from fairlead.roles.components import remove_components

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.5
"""The interval at which the age of the last answer is read."""


class Withdrawing(Protocol):
    """A driver that announces addresses."""

    async def withdraw(self) -> None:
        """Hand over or withdraw everything, and announce nothing more."""

    async def stay(self) -> None:
        """Undo `withdraw`."""


class WithoutApi(Component):
    """The component that withdraws what these open drivers announce, while the API server has not
    answered for `limit_s`."""

    name = "announcements without the API server"

    def __init__(
        self, freshness: Freshness, limit_s: float, drivers: Sequence[Withdrawing]
    ) -> None:
        self._freshness = freshness
        self._limit_s = limit_s
        self._drivers = drivers

    async def run(self) -> None:
        withdrawn = False
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            away = self._freshness.answer_age_s > self._limit_s
            if away == withdrawn:
                continue
            log.warning(
                "withdrawing all addresses, because the API server does not answer"
                if away
                else "announcing addresses again: the API server answers",
                answered=f"{self._freshness.answer_age_s:.0f} s ago",
            )
            done = [await self._switch(driver, away) for driver in self._drivers]
            if all(done):
                withdrawn = away

    async def _switch(self, driver: Withdrawing, away: bool) -> bool:
        try:
            await (driver.withdraw() if away else driver.stay())
        except FairleadError as problem:  # it is repeated
            log.warning("the announcements could not be changed", problem=str(problem))
            return False
        return True


async def withdraw_at_stop(config: Config, leftovers: Sequence[Component]) -> None:
    """Withdraw what the role announces, if the configuration says so. Call it after a signal has
    stopped the role. `leftovers`: the components that remove it."""
    if config.announce is not None and config.announce.withdraw_at_stop:
        await remove_components(leftovers)
