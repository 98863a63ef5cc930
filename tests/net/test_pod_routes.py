"""Which addresses of pods a host has a route to, in a network namespace with real routes."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from tests.drivers.inside import run_inside

from fairlead.lab import namespace
from fairlead.net.pod_routes import without_route

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-podroutes"


def ip(*words: str) -> None:
    subprocess.run(["ip", "-n", NAME, *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def host() -> Iterator[None]:
    """A host with an uplink, which has default routes in both families."""
    namespace.create(NAME)
    try:
        ip("link", "set", "lo", "up")
        ip("link", "add", "eth0", "type", "veth", "peer", "name", "router")
        for each in ("eth0", "router"):
            ip("link", "set", each, "up")
        ip("address", "add", "192.0.2.21/24", "dev", "eth0")
        ip("address", "add", "2001:db8:1::21/64", "dev", "eth0", "nodad")
        ip("route", "add", "default", "via", "192.0.2.1")
        ip("-6", "route", "add", "default", "via", "2001:db8:1::1")
        yield
    finally:
        namespace.delete(NAME)


def test_only_a_route_of_its_own_shows_that_a_pod_may_be_there(host: None) -> None:
    pods = {"10.244.1.2", "10.244.1.3", "2001:db8:244::2", "2001:db8:244::3"}

    async def scenario() -> None:
        assert without_route(pods) == pods, "only default routes"
        ip("route", "add", "10.244.1.2/32", "dev", "eth0")
        ip("-6", "route", "add", "2001:db8:244::2/128", "dev", "eth0")
        assert without_route(pods) == {"10.244.1.3", "2001:db8:244::3"}, "a route for each pod"
        ip("route", "add", "blackhole", "10.244.1.0/26")
        ip("-6", "route", "add", "blackhole", "2001:db8:244::/122")
        assert without_route(pods) == {"10.244.1.3", "2001:db8:244::3"}, "the node's block"
        ip("route", "replace", "10.244.1.0/26", "dev", "eth0")
        ip("-6", "route", "del", "blackhole", "2001:db8:244::/122")
        ip("-6", "route", "add", "2001:db8:244::/122", "dev", "eth0")
        assert without_route(pods) == set(), "a bridge has a route to all pods"
        assert without_route({"192.0.2.21", "2001:db8:1::21"}) == set(), (
            "pods of the host's network"
        )
        ip("route", "del", "default")
        assert without_route({"10.244.9.9"}) == {"10.244.9.9"}, "no route at all"

    run_inside(NAME, scenario, deadline_s=60)
