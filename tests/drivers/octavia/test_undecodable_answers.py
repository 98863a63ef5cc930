"""Answers that Octavia and Neutron do not promise are Unavailable, which hurts one Service; any
other exception would end the role.

The answers come over HTTP, as from a proxy between Fairlead and the cloud that responds itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.site import QUICK, WEB, clouds_file
from tests.openstack.fault_proxy import FaultProxy, Response

from fairlead.drivers.octavia import answers, neutron
from fairlead.drivers.octavia.apply import PollSchedule, carry_out
from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.read import settled
from fairlead.errors import Unavailable
from fairlead.sections import OctaviaConfig

BODIES = (
    b"",
    b"<html><body>Please log in</body></html>",
    b"null",
    b"{}",
    b"[]",
    b"7",
    b'{"loadbalancer": null}',
    b'{"loadbalancer": {}}',
    b'{"loadbalancer": {"id": null}}',
    b'{"statuses": {}}',
    b'{"statuses": {"loadbalancer": {}}}',
    b'{"statuses": {"loadbalancer": {"provisioning_status": null}}}',
    b'{"statuses": "PENDING_UPDATE"}',
    b'{"floatingip": {"floating_ip_address": "192.0.2.1"}}',
    b'{"loadbalancer": {"id": "\xff"}}',
    b'{"a": ' + b"[" * 5000,
)
"""Answers with status 200, none of which has the form of the API."""
CREATE = Call(WEB, "POST", "loadbalancers", {"loadbalancer": {}}, "a load balancer")
NO_API = "does not have the form of the API"


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy("http://127.0.0.1:9").listen() as listening:
        yield listening


@pytest.fixture
def cloud(proxy: FaultProxy, tmp_path: Path) -> Iterator[Cloud]:
    file = clouds_file(tmp_path, proxy.url, proxy.url)
    connected = Cloud(OctaviaConfig(cloud="test", clouds_file=str(file), calls_per_s=1000.0))
    yield connected
    connected.close()


def answer(proxy: FaultProxy, body: bytes, status: int = 200) -> None:
    """Answer every call like this, except that for the versions of the API."""
    versions = {
        "versions": [
            {
                "id": "v2.0",
                "status": "CURRENT",
                "links": [{"rel": "self", "href": f"{proxy.url}/v2.0"}],
            }
        ]
    }
    found, other = Response(versions), Response(body, status)
    proxy.fault = lambda call: found if call.path.strip("/") in ("", "v2.0") else other


async def test_an_unreadable_status_is_not_that_of_a_deleted_load_balancer(
    proxy: FaultProxy, cloud: Cloud
) -> None:
    for body in BODIES:
        answer(proxy, body)
        with pytest.raises(Unavailable, match=f"GET /lbaas/loadbalancers/one/status.*{NO_API}"):
            await settled(cloud, "one")


async def test_a_write_whose_answer_is_unreadable_is_not_taken_for_made(
    proxy: FaultProxy, cloud: Cloud
) -> None:
    """The next pass reads whether the load balancer exists."""
    for body in BODIES:
        answer(proxy, body)
        with pytest.raises(Unavailable, match=f"POST /lbaas/loadbalancers: .*{NO_API}"):
            await carry_out(cloud, [CREATE], PollSchedule(QUICK), lambda: None)
    assert len(proxy.writes) == len(BODIES)


async def test_an_unreadable_object_is_not_one_that_is_gone(
    proxy: FaultProxy, cloud: Cloud
) -> None:
    for body in BODIES:
        answer(proxy, body)
        with pytest.raises(Unavailable, match=NO_API):
            await answers.get_one(cloud, "loadbalancers/one", answers.Balancer)
        with pytest.raises(Unavailable, match=NO_API):
            await answers.get_list(cloud, "loadbalancers", answers.Balancer)


def test_an_unreadable_floating_ip_was_perhaps_created() -> None:
    for body in BODIES:
        with pytest.raises(Unavailable, match=f"POST /floatingips.*{NO_API}"):
            neutron.made(body, Owner("cluster", "test"))


async def test_an_unreadable_error_is_an_error(proxy: FaultProxy, cloud: Cloud) -> None:
    for body in BODIES:
        answer(proxy, body, 502)
        for path in ("loadbalancers/one", "network/floatingips"):
            with pytest.raises(Unavailable, match="answered 502"):
                await cloud.get(path)
