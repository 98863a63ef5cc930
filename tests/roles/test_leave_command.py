"""`fairlead gateway --leave` asks a gateway by its Lease, and reads in all Leases what moves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.roles.test_gateway_watch import until

from fairlead.config import PresenceConfig
from fairlead.errors import Refused, Unavailable
from fairlead.kube import leaving as leaving_module
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.lease_object import LEASES
from fairlead.kube.leaving import HandOver, leave, stay
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import LEAVE_ANNOTATION, OnLink, lease_name
from fairlead.lab.apiserver import ApiServer
from fairlead.roles.gateways import GatewayWatch
from fairlead.roles.leaving import Leaving
from fairlead.roles.presence import Announcer
from fairlead.state import State
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
LINK = OnLink("eth0", "192.0.2.0/24")
VIPS = [f"192.0.2.{number}" for number in range(1, 4)]


class Gateway:
    """The presence of a gateway. `announced`: returns what it announces; called with whether it
    leaves. `notices`: it reads the request in its Lease. `links`: it announces on layer 2."""

    def __init__(
        self,
        client: Client,
        name: str,
        announced: Callable[[bool], list[str]],
        *,
        notices: bool = True,
        links: bool = True,
    ) -> None:
        view, self.state = View("gateway", name), State(())
        view.standing_by = lambda: True
        self.state.has_synced.set()
        freshness = Freshness(lambda: client.answered_s)
        self.watch = GatewayWatch(client, self.state, SECTION, freshness, own=name)
        self.leaving = Leaving(
            self.state, name, lambda: self.watch.asked_to_leave == self.announcer.identity
        )
        self.announcer = Announcer(
            client,
            SECTION,
            view,
            name,
            announces=lambda: [LINK] if links else [],
            announced=lambda: dict.fromkeys(announced(bool(self.leaving.since())), "eth0"),
            leaving=self.leaving.since if notices else str,
            waited_for=lambda: True,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watch.run())
            group.create_task(self.announcer.run())


class Site:
    def __init__(self, client: Client, stack: AsyncExitStack) -> None:
        self.client, self._stack = client, stack

    async def start(
        self,
        name: str,
        announced: Callable[[bool], list[str]],
        *,
        notices: bool = True,
        links: bool = True,
    ) -> Gateway:
        """Run the presence of a gateway until the end, and wait for its Lease."""
        made = Gateway(self.client, name, announced, notices=notices, links=links)
        task = asyncio.ensure_future(made.run())

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(end)
        await until(lambda: bool(made.state.gateways and name in made.state.gateways.alive))
        return made

    async def leave(self, name: str) -> HandOver:
        return await leave(self.client, SECTION.namespace, name)

    async def request(self, name: str) -> str:
        """Return the request in the Lease of a gateway."""
        key = ObjectKey(SECTION.namespace, lease_name("gateway", name))
        return (await self.client.get(LEASES, key)).metadata.annotations.get(LEAVE_ANNOTATION, "")


@asynccontextmanager
async def made_site() -> AsyncIterator[Site]:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        AsyncExitStack() as stack,
    ):
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        yield Site(client, stack)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in (("ANSWER_S", 5.0), ("QUIET_S", 1.5), ("AGAIN_S", 0.0), ("LOOK_S", 0.05)):
        monkeypatch.setattr(leaving_module, name, value_s)


async def test_it_returns_when_other_gateways_announce_the_addresses() -> None:
    async with made_site() as site:
        first = await site.start("gw1", lambda leaves: [] if leaves else VIPS)
        await site.start("gw2", lambda _: VIPS[:2] if first.leaving.since() else [])
        await site.start("gw3", lambda _: VIPS[2:] if first.leaving.since() else [])
        owners = dict(zip(VIPS, ("gw2", "gw2", "gw3"), strict=True))
        assert await site.leave("gw1") == HandOver(3, owners, 0, ())
        await stay(site.client, SECTION.namespace, "gw1")
        assert first.leaving.since() == await site.request("gw1") == ""


async def test_it_names_what_no_other_gateway_can_announce() -> None:
    async with made_site() as site:
        await site.start("gw1", lambda leaves: VIPS[1:] if leaves else VIPS)
        assert await site.leave("gw1") == HandOver(1, {}, 2, tuple(VIPS[1:]))


async def test_a_request_ends_with_the_process_that_it_asks() -> None:
    async with made_site() as site:
        first = await site.start("gw1", lambda leaves: [] if leaves else VIPS)
        await site.leave("gw1")
        second = await site.start("gw1", lambda _: [])
        assert await site.request("gw1") == first.announcer.identity
        assert second.leaving.since() == ""


async def test_a_gateway_that_does_not_answer_is_not_asked_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving_module, "ANSWER_S", 0.2)
    async with made_site() as site:
        await site.start("gw1", lambda _: VIPS, notices=False)
        with pytest.raises(Unavailable, match="gateway gw1 has not noticed within"):
            await site.leave("gw1")
        assert await site.request("gw1") == ""


async def test_a_gateway_that_is_not_known_is_refused() -> None:
    async with made_site() as site:
        with pytest.raises(Refused, match=r"no gateway gw1 is known: Lease .* does not exist"):
            await site.leave("gw1")
        with pytest.raises(Refused, match="no gateway gw1 is known"):
            await stay(site.client, SECTION.namespace, "gw1")


async def test_a_gateway_without_announcements_on_layer_2_has_nothing_to_give_away() -> None:
    async with made_site() as site:
        await site.start("gw1", lambda _: [], links=False)
        with pytest.raises(Refused, match=r"no addresses on layer 2, .* stop its BIRD"):
            await site.leave("gw1")
