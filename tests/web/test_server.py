"""The HTTP side of a role: who is shown what, and metrics that follow Prometheus' conventions."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fairlead.kube.freshness import Freshness
from fairlead.lab.ports import free_port
from fairlead.model import Outcome, ServiceKey
from fairlead.telemetry import TrafficCollector
from fairlead.web import View, serve
from fairlead.web.server import is_local

WRONG_UNITS = re.compile(r"_(milliseconds|ms|minutes|hours|kilobytes|kb|kib|megabytes|mib|percent)(_|$)")


class Counted:
    packets, bytes, flows = 3, 180, 1
    drops: Mapping[str, int] = {"forbidden": 2}
    returned = 5


class Filled:
    used, most = 1, 100


class Traffic:
    """A data plane that has forwarded three packets."""

    def services(self) -> Mapping[ServiceKey, Counted]:
        return {ServiceKey("default", "web"): Counted()}

    def nodes(self) -> Mapping[str, Counted]:
        return {"node1": Counted()}

    def messages(self) -> Mapping[str, int]:
        return {"echo_reply": 4}

    def drops(self) -> Mapping[str, int]:
        return {"fragment": 2}

    def untracked(self) -> int:
        return 0

    def untold(self) -> int:
        return 0

    def entries(self) -> Mapping[str, Filled]:
        return {"connections": Filled()}

    def resources(self) -> Mapping[str, Filled]:
        return {"listeners": Filled()}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where a gateway's view is served, on all addresses of this machine."""
    view = View("gateway", "gw1")
    view.registry.register(TrafficCollector(Traffic))
    view.record({}, {ServiceKey("default", "web"): Outcome("refused", "No", "no")})
    port = free_port()
    async with serve(view, f"*:{port}"):
        yield port


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(5), session.get(url) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_all_addresses_of_both_families_are_listened_on(port: int, host: str) -> None:
    assert await get(f"http://{host}:{port}/healthz") == (200, "ok\n")
    assert (await get(f"http://{host}:{port}/readyz"))[0] == 503
    assert (await get(f"http://{host}:{port}/state"))[0] == 200


class Watch:
    """A watch that was heard some seconds ago."""

    def __init__(self, heard_s: float, *, following: bool = True) -> None:
        self.heard_s = heard_s
        self.following = following


async def test_staleness_is_a_check_of_its_own(port: int) -> None:
    """A gateway that has lost the API server forwards as before: it stays ready."""
    now_s = 1000.0
    answered_s = now_s - 3
    view = View("gateway", "gw1")
    view.standing_by = lambda: True
    freshness = Freshness(lambda: answered_s, clock=lambda: now_s)
    freshness.add("services", Watch(now_s - 100))
    freshness.add("nodes", Watch(now_s - 43, following=False))
    view.watch(freshness)
    other = free_port()
    async with serve(view, f"127.0.0.1:{other}"):
        assert await get(f"http://127.0.0.1:{other}/readyz") == (200, "ok\n")
        assert await get(f"http://127.0.0.1:{other}/readyz/synced") == (200, "ok\n")
        assert await get(f"http://127.0.0.1:{other}/readyz/current") == (503, "stale: nodes 43 s\n")
        assert (await get(f"http://127.0.0.1:{other}/readyz/nonsense"))[0] == 404
        status, text = await get(f"http://127.0.0.1:{other}/readyz?verbose")
        assert (status, text.splitlines()[:2]) == (200, ["[+]synced ok", "[-]current failed: stale: nodes 43 s"])
        state = json.loads((await get(f"http://127.0.0.1:{other}/state"))[1])
        assert state["watches"] == {"services": {"age_s": 3.0, "stale": False}, "nodes": {"age_s": 43.0, "stale": True}}
        assert (state["current"], state["api_server"]) == (False, {"answered_s_ago": 3.0})
        _, metrics = await get(f"http://127.0.0.1:{other}/metrics")
        assert 'fairlead_watch_age_seconds{watch="nodes"} 43.0' in metrics
        assert "fairlead_api_reachable 1.0" in metrics
        answered_s = now_s - 21
        _, metrics = await get(f"http://127.0.0.1:{other}/metrics")
        assert "fairlead_api_reachable 0.0" in metrics
        assert "services 21 s" in (await get(f"http://127.0.0.1:{other}/readyz/current"))[1]


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("fe80::1%eth0", False),
        (None, False),
    ],
)
def test_who_is_on_this_host(peer: str | None, local: bool) -> None:
    assert is_local(peer) == local


async def test_metrics_follow_the_conventions(port: int) -> None:
    """What `promtool check metrics` looks at: counters end in _total and nothing else does, all have a help text and a type,
    units are base units, names are prefixed."""
    status, text = await get(f"http://127.0.0.1:{port}/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(text))
    assert len(families) > 12
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge"), family.name
        assert re.fullmatch("(fairlead|process)_[a-z0-9_]+", family.name)
        assert not WRONG_UNITS.search(family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert not set(sample.labels) & {"job", "instance", "pod", "namespace"}, "Prometheus gives these to a target itself"
    names = {family.name for family in families}
    assert {"fairlead_ready", "fairlead_working", "fairlead_build_info", "fairlead_services"} <= names
    assert {"process_cpu_seconds", "process_resident_memory_bytes"} <= names


async def test_metrics_tell_what_became_of_services(port: int) -> None:
    _, text = await get(f"http://127.0.0.1:{port}/metrics")
    assert 'fairlead_services{outcome="refused"} 1.0' in text
    assert 'fairlead_bytes_total{service="default/web"} 180.0' in text
    assert 'fairlead_drops_total{reason="fragment"} 2.0' in text
    assert 'fairlead_service_drops_total{reason="forbidden",service="default/web"} 2.0' in text
    assert 'fairlead_node_packets_total{node="node1"} 3.0' in text
    assert 'fairlead_messages_total{kind="echo_reply"} 4.0' in text
    assert 'fairlead_node_returned_packets_total{node="node1"} 5.0' in text
    assert 'role="gateway"' in text
