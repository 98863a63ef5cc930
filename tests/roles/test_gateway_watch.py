"""The watch with which a controller detects gateways, and a watch that hangs while other requests
are answered."""

import asyncio
from collections.abc import Callable

from fairlead.config import PresenceConfig
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.role_state import Role
from fairlead.roles.gateways import GatewayWatch
from fairlead.roles.presence import Announcer
from fairlead.state import State
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
RENEWALS = 12
"""The number of renewals to wait for: the gateway would be gone long before, if they had not been
observed."""


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def announcer(client: Client, role: Role, name: str) -> Announcer:
    view = View(role, name)
    view.standing_by = lambda: True
    return Announcer(client, SECTION, view, name)


async def test_a_hanging_watch_declares_no_gateway_gone() -> None:
    """Several API servers share one address. The API server of the watch hangs, and the others
    answer all other requests."""
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        asyncio.TaskGroup() as group,
    ):
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        state = State(())
        watch = GatewayWatch(client, state, SECTION, Freshness(lambda: client.answered_s))
        tasks = [
            group.create_task(watch.run()),
            group.create_task(announcer(client, "controller", "c1").run()),
            group.create_task(announcer(client, "gateway", "gw1").run()),
        ]

        def alive() -> set[str]:
            return set(state.gateways.alive) if state.gateways is not None else set()

        def renewals() -> int:
            return sum(
                each.method == "PATCH" and "gateway-gw1" in each.path for each in server.requests
            )

        await until(lambda: alive() == {"gw1"})
        assert watch.silent_s < SECTION.lease_duration_s
        server.faults.add(Fault("stall", method="GET", path="/leases.*watch=", count=0))
        enough = renewals() + RENEWALS
        await until(lambda: renewals() >= enough)
        assert alive() == {"gw1"}
        assert watch.silent_s > SECTION.lease_duration_s, "others may know more"
        for task in tasks:
            task.cancel()


async def test_it_is_known_whether_the_gateways_may_be_known() -> None:
    """A gateway that announces addresses must not be chosen as an owner if it may not know the
    others. When it once knew them, it keeps this knowledge."""
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        asyncio.TaskGroup() as group,
    ):
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        server.faults.add(Fault("status", "GET", path="/leases", code=403, count=0))
        state = State(())
        watch = GatewayWatch(client, state, SECTION, Freshness(lambda: client.answered_s))
        tasks = [
            group.create_task(watch.run()),
            group.create_task(announcer(client, "gateway", "gw1").run()),
        ]
        await until(lambda: state.gateways_forbidden)
        assert watch.decided.is_set()
        assert state.gateways is None
        server.faults.clear()
        await until(lambda: state.gateways is not None and "gw1" in state.gateways.alive)
        assert not state.gateways_forbidden
        watch._forbidden()
        assert not state.gateways_forbidden
        for task in tasks:
            task.cancel()
