"""Reading the facts from an API server: what cannot be read is listed with the reason, and is never
taken for healthy."""

import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fairlead.doctor.examine import examine
from fairlead.doctor.facts import Target
from fairlead.doctor.gather import Request, gather
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.answers import RefusedByServer
from fairlead.kube.client import Client
from fairlead.kube.objects import PODS, SERVICES
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.model import ServiceKey

pytestmark = pytest.mark.asyncio

WRONG = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"type": "LoadBalancer", "selector": {"app": "wep"}, "ports": [{"port": 80}]},
}
LABELS = {"app": "web"}
CLOSED = 1
ONE = Request(grace_s=0, deadline_s=2)


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
    assert ("pods", "no right to read pods") in [(e.source, e.reason) for e in facts.not_examined]
    report = await examine(client, ONE)
    assert "selector-matches-nothing" not in [each.id for each in report.findings]


async def test_a_source_that_does_not_answer_is_listed(server: ApiServer, client: Client) -> None:
    server.faults.add(Fault("stall", "GET", "/nodes", count=0))
    facts = await gather(client, ONE)
    assert facts.nodes is None
    assert ("nodes", "no answer within 2 s") in [(e.source, e.reason) for e in facts.not_examined]
    assert facts.pods == ()


async def test_kinds_that_the_server_does_not_serve_have_no_objects(client: Client) -> None:
    facts = await gather(client, ONE)
    assert (facts.announcers, facts.workloads, facts.pools) == ((), (), ())
    assert [each.source for each in facts.not_examined] == ["ports of pods"]


async def test_services_that_cannot_be_read_are_an_error(server: ApiServer, client: Client) -> None:
    server.faults.add(Fault("status", "GET", "/services", code=403))
    with pytest.raises(RefusedByServer):
        await gather(client, ONE)
    server.faults.add(Fault("stall", "GET", "/services"))
    with pytest.raises(Unavailable, match="not read within 2 s"):
        await gather(client, ONE)


async def test_a_service_that_does_not_exist_is_an_error(client: Client) -> None:
    with pytest.raises(Refused, match="Service shop/web does not exist"):
        await gather(client, Request((ServiceKey("shop", "web"),)))


async def test_findings_are_confirmed_by_a_second_look(client: Client) -> None:
    await client.create(SERVICES, WRONG)
    said: list[str] = []
    report = await examine(client, ONE, said.append)
    assert "selector-matches-nothing" in [each.id for each in report.findings]
    assert len(said) == 2
    assert report.services == ("default/web",)


async def test_a_port_where_nobody_listens_refuses_and_another_one_is_open(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        spec = {"containers": [{"name": "web", "image": "web"}], "nodeName": "node1"}
        metadata = {"name": "w", "namespace": "default", "labels": LABELS}
        await client.create(PODS, {"metadata": metadata, "spec": spec})
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await client.patch(PODS, ("default", "w"), {"status": status}, subresource="status")
        ports = [
            {"name": "open", "port": 80, "targetPort": port},
            {"name": "closed", "port": 81, "targetPort": CLOSED},
        ]
        service = WRONG | {"spec": {"type": "LoadBalancer", "selector": LABELS, "ports": ports}}
        await client.create(SERVICES, service)
        facts = await gather(client, Request(connect=True))
    assert facts.answers == {
        Target("127.0.0.1", port): "open",
        Target("127.0.0.1", CLOSED): "refused",
    }
