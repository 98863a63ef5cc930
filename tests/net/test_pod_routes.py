"""Which addresses of pods a host has a route to, in a network namespace with real routes."""

import os
from collections.abc import Iterator

import pytest
from tests.drivers.inside import run_inside
from tests.net.uplink import Host, host_with_uplink

from fairlead.net.pod_routes import without_route

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-podroutes"


@pytest.fixture
def host() -> Iterator[Host]:
    with host_with_uplink(NAME) as made:
        yield made


def test_only_a_route_of_its_own_shows_that_a_pod_may_be_there(host: Host) -> None:
    pods = {"10.244.1.2", "10.244.1.3", "2001:db8:244::2", "2001:db8:244::3"}

    async def scenario() -> None:
        assert without_route(pods) == pods, "only default routes"
        host.ip("route", "add", "10.244.1.2/32", "dev", "eth0")
        host.ip("-6", "route", "add", "2001:db8:244::2/128", "dev", "eth0")
        assert without_route(pods) == {"10.244.1.3", "2001:db8:244::3"}, "a route for each pod"
        host.ip("route", "add", "blackhole", "10.244.1.0/26")
        host.ip("-6", "route", "add", "blackhole", "2001:db8:244::/122")
        assert without_route(pods) == {"10.244.1.3", "2001:db8:244::3"}, "the node's block"
        host.ip("route", "replace", "10.244.1.0/26", "dev", "eth0")
        host.ip("-6", "route", "del", "blackhole", "2001:db8:244::/122")
        host.ip("-6", "route", "add", "2001:db8:244::/122", "dev", "eth0")
        assert without_route(pods) == set(), "a bridge has a route to all pods"
        assert without_route({"192.0.2.21", "2001:db8:1::21"}) == set(), (
            "pods of the host's network"
        )
        host.ip("route", "del", "default")
        assert without_route({"10.244.9.9"}) == {"10.244.9.9"}, "no route at all"

    run_inside(NAME, scenario, deadline_s=60)
