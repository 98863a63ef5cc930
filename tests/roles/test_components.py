"""The lifecycle of a role: components are opened in order, run concurrently, show their status, and
are always closed in the opposite order."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.drivers import Component
from fairlead.drivers.host import Host
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import Refused, Unavailable
from fairlead.role_state import GatewayState, PeersState
from fairlead.roles.components import Task, Until, remove_components, run_components
from fairlead.roles.host import HostSettings
from fairlead.web import View


class Flows(Collector):
    def collect(self) -> Sequence[GaugeMetricFamily]:
        return [GaugeMetricFamily("part_flows", "Flows", 7)]


class Part(Component):
    """A component that records its steps in a diary. `failing`: the step that raises this error."""

    def __init__(
        self,
        name: str,
        diary: list[str],
        failing: str = "",
        error: type[Exception] = Unavailable,
        opens: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self._diary = diary
        self._failing = failing
        self._error = error
        self._opens = opens

    def _step(self, step: str) -> None:
        self._diary.append(f"{step} {self.name}")
        if step == self._failing:
            raise self._error(f"{self.name} failed")

    async def open(self) -> None:
        # Earlier components run meanwhile.
        await asyncio.sleep(0.001)
        self._opens()
        self._step("open")

    async def run(self) -> None:
        self._step("run")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.001)
            self._diary.append(f"end {self.name}")

    async def close(self) -> None:
        self._step("close")

    async def remove(self) -> Sequence[str]:
        self._step("remove")
        return (f"the {self.name}",)

    def status(self) -> PeersState:
        return PeersState(followers=3)

    def collectors(self) -> Sequence[Collector]:
        return (Flows(),) if self.name == "second" else ()


async def test_each_runs_before_the_next_opens_and_all_close_in_the_opposite_order() -> None:
    diary: list[str] = []
    role = asyncio.ensure_future(
        run_components(
            [Part("first", diary), Part("second", diary), Part("third", diary)],
            View("gateway", "gw1"),
        )
    )
    async with asyncio.timeout(60):
        while "run third" not in diary:
            await asyncio.sleep(0.001)
    role.cancel()
    with pytest.raises(asyncio.CancelledError):
        await role
    started = [
        f"{step} {name}" for name in ("first", "second", "third") for step in ("open", "run")
    ]
    assert diary[:6] == started
    assert sorted(diary[6:9]) == ["end first", "end second", "end third"], (
        "all end before any closes"
    )
    assert diary[9:] == ["close third", "close second", "close first"]


@pytest.mark.parametrize("step", ["open", "run"])
async def test_an_error_closes_all_that_began_to_open_and_is_raised_itself(step: str) -> None:
    diary: list[str] = []
    parts = [Part("first", diary), Part("second", diary, failing=step), Part("third", diary)]
    with pytest.raises(Unavailable, match="second failed"):
        await run_components(parts, View("gateway", "gw1"))
    closed = [each for each in diary if each.startswith("close")]
    cut_short = ["close third"] if step == "run" else []
    assert closed == [*cut_short, "close second", "close first"]
    assert "end first" in diary[: diary.index(closed[0])]


async def test_a_signal_during_the_start_closes_every_component_that_began_to_open() -> None:
    diary: list[str] = []

    def leave() -> None:
        role.cancel()

    role = asyncio.ensure_future(
        run_components(
            [
                Part("first", diary),
                Part("second", diary, opens=leave),
                Until("never", asyncio.Event().wait),
                Part("third", diary),
            ],
            View("gateway", "gw1"),
        )
    )
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await role
    assert [each for each in diary if each.startswith("close")] == ["close second", "close first"]
    assert "end first" in diary


async def test_a_bug_is_raised_in_its_group() -> None:
    """The bug is raised in its group, with its full traceback."""
    with pytest.raises(ExceptionGroup):
        await run_components(
            [Part("only", [], failing="run", error=RuntimeError)], View("gateway", "gw1")
        )


async def test_a_failure_of_a_group_within_is_raised_itself() -> None:
    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(Part("only", [], failing="run", error=Refused).run())

    with pytest.raises(Refused, match="only failed"):
        await run_components([Task("grouped", grouped)], View("gateway", "gw1"))


def shown_peers(view: View) -> PeersState | None:
    state = view.state()
    assert isinstance(state, GatewayState)
    return state.peers


async def test_status_metrics_and_requirements_are_those_of_the_open_components() -> None:
    diary: list[str] = []
    view, release = View("gateway", "gw1"), asyncio.Event()

    class PartWithRequirement(Part):
        async def requirements(self) -> Sequence[SysctlRequirement]:
            return [
                SysctlRequirement("net/ipv4/ip_forward", lambda _: True, "1", "packets stay here")
            ]

    parts = [
        PartWithRequirement("first", diary),
        HostSettings(Host("gateway", adjust=False), view),
        Part("second", diary),
        Until("released", release.wait),
        Part("third", diary),
    ]
    # A second term shows the same metrics again.
    for _ in range(2):
        release.clear()
        role = asyncio.ensure_future(run_components(parts, view))
        async with asyncio.timeout(60):
            while not view.host() or "run second" not in diary:
                await asyncio.sleep(0.001)
            assert shown_peers(view) == PeersState(followers=3)
            assert view.registry.get_sample_value("part_flows") == 7
            assert {each.name for each in view.components} == {
                "first",
                "host settings",
                "second",
            }
            release.set()
            while "run third" not in diary:
                await asyncio.sleep(0.001)
        (found,) = view.host()
        assert found.subject == "sysctl net/ipv4/ip_forward"
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)
        assert view.components == []
        assert shown_peers(view) is None
        assert view.registry.get_sample_value("part_flows") is None
        diary.clear()


async def test_remove_runs_in_the_opposite_order_without_opening() -> None:
    diary: list[str] = []
    await remove_components([Part("first", diary), Component(), Part("second", diary)])
    assert diary == ["remove second", "remove first"]
