"""Counters never decrease when workers are replaced or die; metrics show them."""

from prometheus_client import CollectorRegistry, generate_latest
from tests.drivers.proxy.site import WEB

from fairlead.drivers.proxy.counters import ProxyCounters, ProxyTraffic, traffic_of
from fairlead.drivers.proxy.metrics import ProxyCollector
from fairlead.drivers.proxy.runtime import Info, joined, read_servers

ROWS = [
    {
        "pxname": "a",
        "svname": "FRONTEND",
        "stot": "5",
        "scur": "2",
        "bin": "10",
        "bout": "20",
        "dcon": "1",
        "econ": "",
    },
    {
        "pxname": "a",
        "svname": "node1",
        "stot": "5",
        "scur": "2",
        "bin": "10",
        "bout": "20",
        "econ": "1",
    },
    {
        "pxname": "a",
        "svname": "BACKEND",
        "stot": "5",
        "scur": "2",
        "bin": "10",
        "bout": "20",
        "econ": "1",
        "wredis": "2",
    },
    {"pxname": "another", "svname": "FRONTEND", "stot": "7"},
]


def test_counters_do_not_decrease_when_a_worker_is_replaced() -> None:
    counters = ProxyCounters()
    traffic = traffic_of(ROWS, {"a": WEB})
    assert traffic == {WEB: ProxyTraffic(5, 2, 10, 20, 1, 3)}
    counters.take(traffic, Info(1, 2, 9980), {})
    counters.end_worker()
    assert counters.services() == {WEB: ProxyTraffic(5, 2, 10, 20, 1, 3)}
    counters.take(traffic, Info(1, 2, 9980), {WEB: 1})
    assert counters.services() == {WEB: ProxyTraffic(10, 3, 20, 40, 2, 6)}
    registry = CollectorRegistry()
    registry.register(ProxyCollector(counters))
    text = generate_latest(registry).decode()
    assert 'fairlead_proxy_connections_total{service="default/web"} 10.0' in text
    assert 'fairlead_proxy_bytes_total{direction="out",service="default/web"} 40.0' in text
    assert "fairlead_proxy_unexpected_exits_total 0.0" in text
    assert "fairlead_proxy_worker_connections 2.0" in text
    assert "fairlead_proxy_worker_connections_limit 9980.0" in text
    counters.record_unexpected_exit()
    assert counters.services() == {WEB: ProxyTraffic(10, 0, 20, 40, 2, 6)}
    counters.keep([])
    assert counters.services() == {}


def test_commands_are_combined_into_few_lines() -> None:
    lines = list(joined("x" * 1000 for _ in range(20)))
    assert [len(line) for line in lines] == [8007, 8007, 4003]
    assert list(joined([])) == []


def test_an_error_message_contains_no_servers() -> None:
    assert list(read_servers("No such backend.\n")) == []
