"""The driver with a real kernel: adoption, repair, tables of other programs, sizes, session
affinity."""

import asyncio
import socket
import subprocess
from contextlib import suppress

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    NODE4,
    NODE6,
    POD_CIDRS,
    PODS4,
    REFUSED,
    SERVICE_CIDRS,
    VIP4,
    VIP6,
    Seen,
    Site,
    backends,
    callers,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.nodeproxy.elements import NO_SERVICE
from fairlead.errors import Unavailable
from fairlead.lab import namespace
from fairlead.model import Backend, NodeService, ServiceKey

pytestmark = pytest.mark.root


def nft(*words: str) -> str:
    return subprocess.run(["nft", *words], check=True, capture_output=True, text=True).stdout


def make_successor() -> NodeProxyDriver:
    return NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS
    )


def many(count: int, endpoints: int = 10) -> dict[ServiceKey, NodeService]:
    """Return ClusterIP Services, each with its own endpoints."""
    services = {}
    for i in range(count):
        address = f"172.30.{i // 250}.{i % 250 + 1}"
        pods = tuple(
            Backend(f"10.{2 + i // 250}.{i % 250}.{j}", 8080) for j in range(1, endpoints + 1)
        )
        served = port(pods, cluster_ip=address, node_port=0, balancers=())
        each = service(msgspec.structs.replace(served, external_ips=()), name=f"web-{i}")
        services[each.service] = each
    return services


EVERYTHING = (
    service(
        port(backends("local1", "remote1")),
        port(backends("local1", "remote1", family="IPv6"), family="IPv6"),
        port(backends("local1", "remote1", port=5353), number=53, protocol="UDP", node_port=0),
        port(backends("local2", port=5353), number=54, protocol="SCTP", node_port=30054),
        external="Local",
        affinity_timeout_s=10800,
        source_ranges=("192.168.0.0/16", "192.168.7.0/24", "203.0.113.7/32", "2001:db8::/64"),
        name="everything",
    ),
    service(port((), cluster_ip="172.30.0.50", node_port=30002, balancers=()), name="nothing"),
    service(
        port(backends("remote1"), cluster_ip="172.30.0.51", node_port=0, balancers=()),
        internal="Local",
        name="here",
    ),
)


def without_external_ips(*services: NodeService) -> list[NodeService]:
    """Return the Services without external addresses, except for the first one, because all have
    the same external addresses."""
    first, *rest = services
    bare = [
        msgspec.structs.replace(
            s, ports=tuple(msgspec.structs.replace(p, external_ips=()) for p in s.ports)
        )
        for s in rest
    ]
    return [first, *bare]


async def test_the_next_process_adopts_the_table_unchanged(driver: NodeProxyDriver) -> None:
    services = without_external_ips(*EVERYTHING)
    await install(driver, *services)
    before = nft("-a", "list", "table", "inet", "fairlead")
    desired = driver.render({each.service: each for each in services})
    assert len(desired) == 3
    successor = make_successor()
    await successor.open()
    actual = await successor.read(None)
    assert actual == desired
    assert successor.diff(successor.render({each.service: each for each in services}), actual) == ()
    await successor.apply(())
    await successor.close(remove=False)
    assert nft("-a", "list", "table", "inet", "fairlead") == before


async def test_foreign_tables_stay(driver: NodeProxyDriver) -> None:
    nft(
        "add table inet theirs; add chain inet theirs c; add rule inet theirs c counter; add "
        "table ip fairlead"
    )
    try:
        theirs = nft("-a", "list", "table", "inet", "theirs")
        await install(driver, *without_external_ips(*EVERYTHING))
        assert NO_SERVICE not in await driver.read(None)
        await driver.close(remove=True)
        assert nft("-a", "list", "table", "inet", "theirs") == theirs
        assert sorted(nft("list", "tables").split("\n")) == [
            "",
            "table inet theirs",
            "table ip fairlead",
        ]
    finally:
        nft("delete table inet theirs; delete table ip fairlead")


async def test_changes_by_other_programs_are_repaired(site: Site, driver: NodeProxyDriver) -> None:
    each = service(port(backends("local1")))
    desired = driver.render({each.service: each})
    await install(driver, each)
    nft(f"delete element inet fairlead services4 {{ {CLUSTER4} . 6 . 80 }}")
    nft("add element inet fairlead services4 { 172.30.0.99 . 6 . 80 : drop }")
    actual = await driver.read(None)
    assert set(actual) == {each.service, NO_SERVICE}
    await driver.apply(driver.diff(desired, actual))
    assert await driver.read(None) == desired
    assert site.call("caller", CLUSTER4, 80) == Seen("local1", PODS4["caller"])


async def test_the_table_is_listed_again_only_after_writes_of_other_programs(
    driver: NodeProxyDriver,
) -> None:
    each = service(port(backends("local1")), affinity_timeout_s=60)
    await install(driver, each)
    first = (await driver.read(None))[each.service]
    assert (await driver.read(None))[each.service] is first
    nft("add table inet theirs")
    try:
        again = (await driver.read(None))[each.service]
        assert again == first
        assert again is not first
        assert (await driver.read(None))[each.service] is again
    finally:
        nft("delete table inet theirs")


async def test_a_flushed_ruleset_is_restored(site: Site, driver: NodeProxyDriver) -> None:
    each = service(port(backends("local1")))
    await install(driver, each)
    nft("flush ruleset")
    more = service(port(backends("local1", "remote1")))
    desired = driver.render({more.service: more})
    with pytest.raises(Unavailable, match="another program has changed"):
        await driver.apply(driver.diff(desired, await driver.read([more.service])))
    assert not await driver.read([more.service])
    await install(driver, more)
    assert await driver.read(None) == desired
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)


@pytest.mark.parametrize(
    "what",
    [
        "flush ruleset",
        "delete table inet fairlead",
        "flush table inet fairlead",
        "flush chain inet fairlead postrouting",
        "flush chain inet fairlead pick_1",
        "flush chain inet fairlead remember6_60_0",
        "insert rule inet fairlead services drop",
    ],
)
async def test_rules_that_other_programs_removed_or_added_are_repaired(
    site: Site, driver: NodeProxyDriver, what: str
) -> None:
    """The same process repairs the rules, or a process that starts later."""
    each = service(
        port(backends("local1")),
        port(backends("local1", family="IPv6"), family="IPv6"),
        affinity_timeout_s=60,
    )
    desired = driver.render({each.service: each})
    await install(driver, each)
    rules = lines_of(nft("list", "table", "inet", "fairlead"))
    nft("add table inet theirs; delete table inet theirs")
    assert not await driver.disturbed()
    nft(what)
    assert await driver.disturbed()
    await driver.apply(driver.diff(desired, await driver.read([each.service])))
    assert lines_of(nft("list", "table", "inet", "fairlead")) == rules
    assert not await driver.disturbed()
    assert await driver.read(None) == desired
    nft(what)
    successor = make_successor()
    await successor.open()
    await install(successor, each)
    assert lines_of(nft("list", "table", "inet", "fairlead")) == rules
    await successor.close(remove=False)
    assert site.call("caller", CLUSTER4, 80) == Seen("local1", PODS4["caller"])


async def test_a_service_whose_frontends_were_removed_keeps_its_other_elements(
    site: Site, driver: NodeProxyDriver
) -> None:
    """The remaining elements of the Service seem to have no owner, and so are to be deleted; but
    before that, the Service gets them again."""
    each = service(port(backends("local1")))
    desired = driver.render({each.service: each})
    await install(driver, each)
    nft("flush map inet fairlead services4")
    nobodys = {key: spec for key, spec in (await driver.read(None)).items() if key not in desired}
    assert nobodys
    await driver.apply(driver.diff(desired, await driver.read([each.service])))
    await driver.apply(driver.diff({}, await driver.read(list(nobodys))))
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)
    assert await driver.read(None) == desired
    successor = make_successor()
    await successor.open()
    assert await successor.read(None) == desired
    await successor.close(remove=False)


def lines_of(listing: str) -> list[str]:
    """Return the lines of a listing, sorted: maps are listed in the order of their creation."""
    return sorted(listing.splitlines())


async def test_changes_may_be_repeated(driver: NodeProxyDriver) -> None:
    each = service(port(backends("local1")))
    desired = driver.render({each.service: each})
    changes = driver.diff(desired, {})
    await driver.apply(changes)
    await driver.apply(changes)
    assert await driver.read(None) == desired
    back = driver.diff({}, desired)
    await driver.apply(back)
    await driver.apply(back)
    assert await driver.read(None) == {}


async def test_one_change_is_small_among_ten_thousand_services(driver: NodeProxyDriver) -> None:
    services = many(10_000)
    desired = dict(driver.render(services))
    assert sum(map(len, desired.values())) == 10_000 * (1 + 1 + 1 + 10)
    await driver.apply(driver.diff(desired, {}))
    assert await driver.read(None) == desired
    chains = nft("list", "chains", "inet").count("chain ")
    one = many(4, endpoints=9)[ServiceKey("default", "web-3")]
    desired[one.service] = driver.render({one.service: one})[one.service]
    changes = driver.diff(desired, await driver.read(list(services)))
    # Delete from one endpoint map, add to another, and replace the frontend's verdict: four
    # commands for any number of Services.
    assert [(change.verb, change.map, len(change.elements)) for change in changes] == [
        ("delete", "endpoints4_10", 10),
        ("delete", "services4", 1),
        ("add", "endpoints4_9", 9),
        ("add", "services4", 1),
    ]
    await driver.apply(changes)
    assert await driver.read([one.service]) == {one.service: desired[one.service]}
    assert nft("list", "chains", "inet").count("chain ") == chains + 1


async def test_the_text_of_a_change_is_its_command(driver: NodeProxyDriver) -> None:
    """The printed changes, when nft runs them, produce the same table."""
    services = without_external_ips(*EVERYTHING)
    await install(driver, *services)
    there = await driver.read(None)
    gone = driver.diff({}, there)
    nft("; ".join(map(str, gone)))
    assert await driver.read(None) == {}
    nft("; ".join(map(str, driver.diff(there, {}))))
    assert await driver.read(None) == there


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
async def test_a_client_keeps_its_endpoint(
    site: Site, driver: NodeProxyDriver, policy: str, family: str
) -> None:
    """When an endpoint is removed, its clients get another; other clients keep theirs."""

    def served(*pods: str) -> NodeService:
        chosen = port(backends(*pods, family=family), family=family)
        return service(chosen, external=policy, affinity_timeout_s=3600)

    address = VIP4 if family == "IPv4" else VIP6
    await install(driver, served("local1", "local2"))
    kept = {
        place: site.call(place, address, 80) for place in ("client", "blocked", "caller", "node")
    }
    for _ in range(8):
        assert {place: site.call(place, address, 80) for place in kept} == kept
    assert isinstance(kept["client"], Seen)
    successor = make_successor()
    await successor.open()
    await install(successor, served("local1" if kept["client"].pod == "local2" else "local2"))
    seen = site.call("client", address, 80)
    assert isinstance(seen, Seen)
    assert seen.pod != kept["client"].pod
    await successor.close(remove=False)


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_retransmissions_do_not_record_a_removed_endpoint_again(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    """For conntrack, every retransmission of a SYN without an answer is a new connection, also long
    after the endpoint is removed."""
    silent, address = ("10.2.0.99", VIP4) if family == "IPv4" else ("2001:db8:2::99", VIP6)
    gone = port((Backend(silent, 8080, False),), family=family)
    site.ip("other", f"route replace blackhole {silent}")
    await install(driver, service(gone, affinity_timeout_s=3600))
    kind = socket.AF_INET if family == "IPv4" else socket.AF_INET6
    with namespace.make_socket(site.name("client"), kind, socket.SOCK_STREAM) as caller:
        caller.bind((callers(family)("client"), 0))
        caller.setblocking(False)
        with suppress(BlockingIOError):
            caller.connect((address, 80))
        await install(
            driver,
            service(
                port(backends("local1", family=family), family=family), affinity_timeout_s=3600
            ),
        )
        async with asyncio.timeout(10):
            while not caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[
                2
            ]:  # tcpi_retransmits
                await asyncio.sleep(0.05)
        seen = site.call("client", address, 80)
    assert isinstance(seen, Seen)
    assert seen.pod == "local1"


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_a_client_keeps_its_endpoint_in_the_host_network(
    site: Site, driver: NodeProxyDriver, family: str
) -> None:
    """Packets that are delivered on the node itself do not pass the hook postrouting."""
    node, address = (NODE4, VIP4) if family == "IPv4" else (NODE6, VIP6)
    here = Backend(node, 9, True)
    await install(driver, service(port((here,), family=family), affinity_timeout_s=3600))
    assert site.call("client", address, 80) == REFUSED
    listing = msgspec.json.decode(
        nft(
            "-j",
            "list",
            "map",
            "inet",
            "fairlead",
            "affinity4_0" if family == "IPv4" else "affinity6_0",
        )
    )
    [(_, endpoint)] = listing["nftables"][1]["map"]["elem"]
    assert endpoint == {"concat": [node, 9]}


async def test_affinity_lasts_for_its_timeout(site: Site, driver: NodeProxyDriver) -> None:
    await install(driver, service(port(backends("local1", "local2")), affinity_timeout_s=1234))
    site.call("client", VIP4, 80)
    site.call("caller", CLUSTER4, 80)
    listing = msgspec.json.decode(nft("-j", "list", "map", "inet", "fairlead", "affinity4_0"))
    elements = listing["nftables"][1]["map"]["elem"]
    assert [element[0]["elem"]["timeout"] for element in elements] == [1234, 1234]


async def test_a_client_gets_any_endpoint_after_the_timeout(
    site: Site, driver: NodeProxyDriver
) -> None:
    await install(driver, service(port(backends("local1", "local2")), affinity_timeout_s=1))
    seen = set()
    for _ in range(40):  # one endpoint is missed once in 2^39 runs
        seen.add(site.call("client", VIP4, 80))
        if len(seen) == 2:
            break
        async with asyncio.timeout(60):
            while "expires" in nft("list", "map", "inet", "fairlead", "affinity4_0"):
                await asyncio.sleep(0.1)
    assert seen == {Seen("local1", NODE4), Seen("local2", NODE4)}
