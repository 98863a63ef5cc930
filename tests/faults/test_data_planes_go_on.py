"""While the API server fails, the data planes of gateways and nodes continue: no client is
affected, and no role sends too many requests.

One lab is under steady load. Each failure lasts for some seconds; then pods move, and packets
follow them. The failures of tests/e2e/test_no_request_fails.py (closed and expired watches, a
server that hangs or refuses for a moment) are not repeated here."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.load import Load, Web, until

from fairlead.lab.site import Site
from fairlead.probe.steady import Period

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACES = (("node1", "node1", "node2"), ("node1", "node2", "node2"))
FAILS_S = 3.0
AWAY_S = 8.0
CLIENTS = 4
"""The clients of the API server: controller, gateway, two nodes, and the lab's control plane, which
has watches, too."""
A_CLIENT = 60
"""The number of requests of one client in FAILS_S below which there is no busy loop: six watches,
each with a back-off that begins at 0.2 s, and the Lease, which is renewed twice a second."""

FAILURES: dict[str, list[dict[str, Any]]] = {
    "429": [
        {"action": "status", "path": "^/api", "code": 429, "retry_after_s": 1, "count": 0},
        {"action": "reset", "count": 22},
    ],
    "500": [
        {"action": "status", "path": "^/api", "code": 500, "count": 0},
        {"action": "end", "count": 22},
    ],
    "409": [
        {"action": "status", "method": method, "path": "^/api", "code": 409, "count": 0}
        for method in ("PATCH", "PUT", "POST")
    ],
    "410": [
        {"action": "status", "path": "watch=|limit=", "code": 410, "count": 0},
        {"action": "expire", "count": 22},
    ],
    "watches stall": [{"action": "stall", "path": "watch=", "count": 0, "stall_s": FAILS_S}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web() -> AsyncIterator[Web]:
    async with Site.create(f"goon{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        web = Web(site)
        await web.create()
        await web.place(PLACES[0])
        yield web


def check_unharmed(period: Period) -> None:
    assert period.requests > 50
    assert (period.failed, period.broken) == (0, []), period


async def test_clients_are_not_affected_by_failures_of_the_api_server(web: Web) -> None:
    async def fail() -> None:
        for number, (name, faults) in enumerate(FAILURES.items()):
            async with web.site.client() as client:
                await client.request("DELETE", "/_requests")
                await client.request("POST", "/_faults", body=list(faults))
                await asyncio.sleep(FAILS_S)
                requests = json.loads(await client.request("GET", "/_requests"))
                await client.request("DELETE", "/_faults")
            assert len(requests) <= A_CLIENT * (CLIENTS + 1), (
                f"{name}: {len(requests)} requests, the last {requests[-20:]}"
            )
            print(f"{name}: {len(requests)} requests")
            await web.place(PLACES[(number + 1) % len(PLACES)])

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(fail()))


async def test_clients_are_not_affected_while_the_api_server_is_stopped(web: Web) -> None:
    async def away() -> None:
        async with web.site.client() as client:
            await client.request(
                "POST", "/_faults", body=[{"action": "refuse", "refuse_s": AWAY_S}]
            )
        await asyncio.sleep(AWAY_S / 2)
        await until(web.api_server_answers, "answers of the API server")
        for place in PLACES:
            await web.place(place)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(away()))
