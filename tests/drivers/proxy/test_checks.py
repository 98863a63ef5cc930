"""HAProxy's own checks, as a Service configures them: each setting takes effect at once on a live
Service."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.drivers.proxy.site import (
    ClientConnection,
    address_of,
    balancer,
    counted,
    nodes,
    opened,
    reconcile,
    until,
)

from fairlead.drivers.proxy import ProxyDriver
from fairlead.model import HealthMonitor, LoadBalancer, MemberChecks, ProxySettings
from fairlead.plan.proxying import settings_of

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

HEALTH_PORT = 32000
NEVER_MS = 3_600_000


class HealthPort:
    """The health port of a node.

    - `answers`: the status codes by path, in order; 200 after the last one. - `requested`: the
    requested paths, in order. - `silent`: requests are accepted but not answered."""

    def __init__(self) -> None:
        self.answers: dict[str, list[int]] = {}
        self.requested: list[str] = []
        self.silent = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requested.append(path := head.split()[1].decode())
        left = self.answers.get(path)
        if self.silent:
            await reader.read()
        else:
            writer.write(b"HTTP/1.0 %d Said\r\n\r\n" % (left.pop(0) if left else 200))
        writer.close()


@asynccontextmanager
async def health_port(node: str) -> AsyncIterator[HealthPort]:
    made = HealthPort()
    async with await asyncio.start_server(made.answer, address_of(node), HEALTH_PORT):
        yield made


def checked(
    checks: MemberChecks | None, members: Iterable[str] = ("node1",), path: str = "/healthz"
) -> LoadBalancer:
    made = balancer(dict.fromkeys(members, 1), settings=ProxySettings(checks=checks))
    return msgspec.structs.replace(made, health_monitor=HealthMonitor(HEALTH_PORT, path))


def answers(rise: int, fall: int) -> list[int]:
    """Return status codes: good, then bad until the node is down; then good but one fewer than
    `rise`, and bad; then good."""
    return [200, *[503] * fall, *[200] * (rise - 1), 503, *[200] * rise]


async def test_rise_and_fall_set_the_number_of_successive_answers(folder: Path) -> None:
    async with nodes("node1"), health_port("node1") as port, opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        talk = await ClientConnection.start()
        assert await talk.request() == ["node1", "-", "x"]
        assert port.requested == []
        for rise, fall in ((2, 3), (3, 2)):
            # Each round has its own path, because the old worker sends checks until it is replaced.
            path = f"/{rise}"
            port.answers[path] = answers(rise, fall)
            await reconcile(driver, checked(MemberChecks(20, 1000, rise, fall), path=path))
            await until(partial(back, driver, port.answers[path]))
            # HAProxy counts the failures that change the node's state: each until the node is down,
            # and the one while the node is coming up.
            assert await counted(driver, "chkfail") == {"FRONTEND": "", "node1": str(fall + 1)}
            # The node was down only once, so one good answer fewer than `rise` did not bring it up.
            assert await counted(driver, "chkdown") == {"FRONTEND": "", "node1": "1"}
            assert await talk.request() == ["node1", "-", "x"]
        talk.end()


async def test_the_timeout_limits_the_time_of_an_answer(folder: Path) -> None:
    async with nodes("node1"), health_port("node1") as port, opened(folder) as driver:
        port.silent = True
        await reconcile(driver, checked(MemberChecks(20, NEVER_MS, 1, 1)))
        await until(lambda: requested(port, 1))
        assert (await status(driver))["node1"] == "UP"
        talk = await ClientConnection.start()
        assert await talk.request() == ["node1", "-", "x"]
        await reconcile(driver, checked(MemberChecks(20, 50, 1, 1)))

        async def out() -> bool:
            return (await status(driver))["node1"] == "DOWN"

        await until(out)
        assert (await counted(driver, "check_status"))["node1"].split()[-1] == "L7TOUT"
        assert await talk.request() == ["node1", "-", "x"]
        talk.end()


async def test_a_failed_node_gets_no_connections_after_a_reload_until_it_serves(
    folder: Path,
) -> None:
    """No node answers the checks of the new worker, so it knows the states from the old one."""
    async with (
        nodes("node1", "node2"),
        health_port("node1") as port,
        health_port("node2") as other,
        opened(folder) as driver,
    ):
        other.answers["/first"] = [503] * 1000
        await reconcile(
            driver, checked(MemberChecks(20, NEVER_MS, 1, 1), ("node1", "node2"), path="/first")
        )

        async def node2_is(state: str) -> bool:
            return await status(driver) == {"FRONTEND": "OPEN", "node1": "UP", "node2": state}

        await until(partial(node2_is, "DOWN"))
        port.silent = other.silent = True
        await reconcile(
            driver, checked(MemberChecks(20, NEVER_MS, 2, 2), ("node1", "node2"), path="/second")
        )

        async def both_asked() -> bool:
            return all("/second" in each.requested for each in (port, other))

        await until(both_asked)
        assert await node2_is("DOWN")
        for _ in range(4):
            talk = await ClientConnection.start()
            assert await talk.request() == ["node1", "-", "x"]
            talk.end()
        port.silent = other.silent = False
        await reconcile(
            driver, checked(MemberChecks(20, NEVER_MS, 1, 1), ("node1", "node2"), path="/third")
        )
        await until(partial(node2_is, "UP"))


async def test_nodes_are_checked_at_the_delay_and_not_at_all_if_disabled(folder: Path) -> None:
    async with nodes("node1"), health_port("node1") as port, opened(folder) as driver:
        await reconcile(driver, checked(MemberChecks(NEVER_MS, 1000, 1, 1)))
        await until(lambda: requested(port, 1))
        await asyncio.sleep(0.2)
        assert len(port.requested) == 1
        await reconcile(driver, checked(MemberChecks(10, 1000, 1, 1)))
        await until(lambda: requested(port, 10))
        await reconcile(driver, checked(None))
        before = len(port.requested)
        await asyncio.sleep(0.2)
        assert len(port.requested) == before
        assert (await status(driver))["node1"] == "no check"


async def test_a_later_member_is_checked_with_the_same_settings(folder: Path) -> None:
    async with nodes("node1", "node2"), health_port("node1"), opened(folder) as driver:
        await reconcile(driver, checked(MemberChecks(20, 1000, 4, 5)))
        await reconcile(driver, checked(MemberChecks(20, 1000, 4, 5), ("node1", "node2")))
        assert await counted(driver, "check_rise") == {"FRONTEND": "", "node1": "4", "node2": "4"}
        assert await counted(driver, "check_fall") == {"FRONTEND": "", "node1": "5", "node2": "5"}


@pytest.mark.parametrize("wrong", ["delay", "timeout", "max-retries", "max-retries-down"])
async def test_an_invalid_number_does_not_affect_the_other_settings(
    folder: Path, wrong: str
) -> None:
    wishes = {"delay": "60", "timeout": "59", "max-retries": "4", "max-retries-down": "5"} | {
        wrong: "0"
    }
    annotations = {
        f"loadbalancer.openstack.org/health-monitor-{name}": value for name, value in wishes.items()
    }
    settings, [note] = settings_of(annotations, affinity=False)
    assert note.message.startswith(
        f"loadbalancer.openstack.org/health-monitor-{wrong} is '0'; allowed: a whole number from "
        "1 to "
    )
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, msgspec.structs.replace(checked(None), settings=settings))
        text = driver.haproxy.text()
        default = MemberChecks()
        assert settings.checks is not None
        wanted = {
            "delay": " inter 60000 ",
            "timeout": "timeout check 59000\n",
            "max-retries": " rise 4 ",
            "max-retries-down": " fall 5 ",
        }
        instead = {
            "delay": f" inter {default.interval_ms} ",
            "timeout": f"timeout check {default.timeout_ms}\n",
            "max-retries": f" rise {default.rise} ",
            "max-retries-down": f" fall {default.fall} ",
        }
        assert [
            part for part in (wanted | {wrong: instead[wrong]}).values() if part not in text
        ] == []


async def status(driver: ProxyDriver) -> dict[str, str]:
    """Return HAProxy's state of each node. `UP 1/3`, the state of a node that is going down or
    coming up, counts as UP."""
    found = await counted(driver, "status")
    return {
        node: state if state == "no check" else state.split()[0] for node, state in found.items()
    }


async def back(driver: ProxyDriver, left: Collection[int]) -> bool:
    """Return whether all prepared answers were given and node1 serves."""
    return not left and (await status(driver))["node1"] == "UP"


async def requested(port: HealthPort, times: int) -> bool:
    return len(port.requested) >= times
