"""Changes of routes that the kernel reports."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from tests.drivers.inside import run_inside

from fairlead.lab import namespace
from fairlead.net.routing import Routing

pytestmark = pytest.mark.root

OURS, MANY = 171, 5000
"""The number of changes, more than the socket's buffer can store."""


@pytest.fixture
def place() -> Iterator[str]:
    name = f"flt-{os.getpid()}-routing"
    namespace.create(name)
    yield name
    namespace.delete(name)


def routes(do: str, protocol: int, addresses: range) -> None:
    lines = "\n".join(
        f"route {do} blackhole 198.{18 + (n >> 16)}.{n >> 8 & 255}.{n & 255} proto {protocol}"
        for n in addresses
    )
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)


def test_own_routes_take_no_buffer_space_from_other_changes(place: str) -> None:
    async def scenario() -> None:
        routing = Routing(ignored_protocol=OURS)
        hearing = routing._subscription
        for do in ("add", "delete"):
            routes(do, OURS, range(MANY))
            routes(do, 4, range(MANY, MANY + 1))
            heard = await hearing.next()
            assert not heard.lost
            assert [body[5] for _, body in heard.events] == [4]
        routes("add", 4, range(MANY, MANY + 2))
        assert (await routing.changes()).others
        routing.close()

    run_inside(place, scenario, deadline_s=20)


def test_lost_events_count_as_a_change(place: str) -> None:
    async def scenario() -> None:
        routing = Routing(ignored_protocol=OURS)
        routes("add", 4, range(MANY))
        heard = await routing._subscription.next()
        assert heard.lost
        routing.close()

    run_inside(place, scenario, deadline_s=20)
