"""Reading the facts from an API server: what cannot be read is listed with the reason, and is never
taken for healthy."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec import structs

from fairlead.doctor.examine import examine
from fairlead.doctor.gather import Request, gather
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.model import ServiceKey

WRONG = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"type": "LoadBalancer", "selector": {"app": "wep"}, "ports": [{"port": 80}]},
}
WEB = ServiceKey("default", "web")
SHORT_S = 0.1
ONE = Request(grace_s=0, deadline_s=1, observe_s=SHORT_S)
IN_DEFAULT = Request((WEB,), "default", grace_s=0, observe_s=SHORT_S)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with Client(Access(server.url)) as client:
        yield client


async def test_a_missing_right_is_listed_and_no_rule_concludes_from_it(
    server: ApiServer, client: Client
) -> None:
    await client.create(SERVICES, WRONG)
    server.faults.add(Fault("status", "GET", "/pods", code=403, count=0))
    facts = await gather(client, ONE)
    assert facts.pods is None
    assert ("pods", "forbidden") in [(e.source, e.reason) for e in facts.not_looked_at]
    report = await examine(client, ONE)
    assert "SelectorMatchesNothing" not in [each.code for each in report.findings]


async def test_a_source_that_does_not_answer_is_listed(server: ApiServer, client: Client) -> None:
    server.faults.add(Fault("stall", "GET", "/nodes", count=0))
    facts = await gather(client, ONE)
    assert facts.nodes is None
    assert ("nodes", "no answer within 1 s") in [(e.source, e.reason) for e in facts.not_looked_at]
    assert facts.pods == ()


async def test_kinds_that_the_server_does_not_serve_have_no_objects(client: Client) -> None:
    facts = await gather(client, ONE)
    assert (facts.workloads, facts.pools, facts.policies, facts.refusals) == ((), (), (), ())
    assert facts.not_looked_at == ()


async def test_services_of_other_namespaces_may_be_forbidden(
    server: ApiServer, client: Client
) -> None:
    await client.create(SERVICES, WRONG)
    server.faults.add(Fault("status", "GET", "/api/v1/services", code=403, count=0))
    facts = await gather(client, IN_DEFAULT)
    assert [each.key for each in facts.services] == [WEB]
    assert ("services of other namespaces", "forbidden") in [
        (each.source, each.reason) for each in facts.not_looked_at
    ]


async def test_services_that_cannot_be_read_are_an_error(server: ApiServer, client: Client) -> None:
    server.faults.add(Fault("status", "GET", "/services", code=403))
    with pytest.raises(Refused, match="look at one namespace"):
        await gather(client, ONE)
    server.faults.add(Fault("stall", "GET", "/services"))
    with pytest.raises(Unavailable, match="not read within 1 s"):
        await gather(client, ONE)


async def test_a_service_that_does_not_exist_is_an_error(client: Client) -> None:
    with pytest.raises(Refused, match="Service shop/web does not exist"):
        await gather(client, Request((ServiceKey("shop", "web"),), "shop"))


async def test_findings_are_confirmed_by_a_second_look(client: Client) -> None:
    await client.create(SERVICES, WRONG)
    said: list[str] = []
    report = await examine(client, ONE, said.append)
    assert "SelectorMatchesNothing" in [each.code for each in report.findings]
    assert said[0] == "reading services"
    assert "looking again: reading services" in said
    assert [(each.service, each.owner) for each in report.services] == [("default/web", "none")]


async def test_writers_that_overwrite_each_other_are_observed(client: Client) -> None:
    await client.create(SERVICES, WRONG)

    async def write() -> None:
        number = 0
        while True:
            number += 1
            await client.patch(
                SERVICES,
                WEB,
                {"status": {"loadBalancer": {"ingress": [{"ip": f"192.0.2.{number % 2}"}]}}},
                subresource="status",
                field_manager=f"balancer-{number % 2}",
            )
            await asyncio.sleep(0.05)

    writing = asyncio.create_task(write())
    try:
        report = await examine(client, structs.replace(IN_DEFAULT, observe_s=1))
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    assert "TwoControllers" in [each.code for each in report.findings]
    assert "TwoControllers" not in [
        each.code for each in (await examine(client, IN_DEFAULT)).findings
    ]
