"""Existing tables, reads during passes, and interrupted reads: packets always encounter the
complete rules."""

import asyncio
import re
import subprocess
import threading
from collections import Counter

import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    NODE4,
    NODE6,
    NODE_PORT,
    POD_CIDRS,
    PODS4,
    REFUSED,
    VIP4,
    Seen,
    Site,
    backends,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver, remove_table
from fairlead.drivers.nodeproxy.elements import Spec
from fairlead.drivers.nodeproxy.table import Table
from fairlead.errors import Unavailable
from fairlead.model import NodeService, ServiceKey

pytestmark = pytest.mark.root

OTHER_CIDRS = (*POD_CIDRS, "10.128.0.0/9")


def nft(*words: str) -> str:
    return subprocess.run(["nft", *words], check=True, capture_output=True, text=True).stdout


def web(*pods: str) -> NodeService:
    return service(
        port(backends(*pods)),
        port(backends(*pods, family="IPv6"), family="IPv6"),
        port(backends(*pods, port=5353), number=53, protocol="UDP", node_port=0),
        affinity_timeout_s=60,
    )


def successor_with(pod_cidrs: tuple[str, ...], timeout_s: float = 60.0) -> NodeProxyDriver:
    return NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6), pod_cidrs=pod_cidrs, timeout_s=timeout_s
    )


async def test_another_layout_is_replaced_together_with_its_elements(
    site: Site, driver: NodeProxyDriver
) -> None:
    await install(driver, web("local1", "remote1"))
    successor = successor_with(OTHER_CIDRS)
    await successor.open()
    each = web("local1", "remote1")
    ((key, spec),) = driver.render({each.service: each}).items()
    reached_by_packets = frozenset(
        element for element in spec if not element.map.startswith("flows")
    )
    assert await successor.read(None) == {
        key: reached_by_packets
    }  # the flow records are created again
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)
    await successor.close(remove=False)


@pytest.mark.parametrize("others", [(), OTHER_CIDRS], ids=["the same layout", "another layout"])
async def test_no_call_fails_while_another_process_takes_over(
    site: Site, driver: NodeProxyDriver, others: tuple[str, ...]
) -> None:
    """New connections and datagrams are sent all the time, from a pod and from outside."""
    each = web("local1", "remote1")
    await install(driver, each)
    calls: list[Seen | str] = []
    over = threading.Event()

    def call_on() -> None:
        while not over.is_set():
            calls.append(site.call("caller", CLUSTER4, 80, timeout_s=60))
            calls.append(site.call("client", VIP4, 80, timeout_s=60))
            calls.append(site.call("client", VIP4, 53, protocol="UDP", timeout_s=60))

    calling = threading.Thread(target=call_on)
    calling.start()
    try:
        for turn in range(8):
            successor = successor_with(POD_CIDRS if turn % 2 else others or POD_CIDRS)
            await successor.open()
            await install(successor, each)
            await successor.close(remove=False)
            before = len(calls)
            async with asyncio.timeout(60):
                while len(calls) < before + 6:
                    await asyncio.sleep(0.01)
    finally:
        over.set()
        calling.join()
    assert all(isinstance(answer, Seen) for answer in calls), Counter(map(str, calls))


async def test_session_affinity_of_an_earlier_version_is_replaced_without_a_gap(
    site: Site, driver: NodeProxyDriver
) -> None:
    """The earlier version had other chains, and one map for the clients of all Services."""
    await driver.close(remove=True)
    frontend, table = f"{CLUSTER4} . 6 . 80", "inet fairlead"
    nft(
        f"add table {table};"
        f"add map {table} services4 {{ type ipv4_addr . inet_proto . inet_service : verdict; }};"
        f"add map {table} remember4 {{ type ipv4_addr . inet_proto . inet_service : verdict; }};"
        f"add map {table} endpoints4_1 {{ typeof ip daddr . meta l4proto . th dport . numgen "
        "random mod 2"
        " : ip daddr . th dport; };"
        f"add chain {table} layout_of_another_time; add chain {table} pick_1;"
        f"add chain {table} affine_1; add rule {table} affine_1 goto pick_1; add chain {table} "
        "remember4_60;"
        f'add element {table} services4 {{ {frontend} comment "{web().service}" : goto affine_1 }};'
        f"add element {table} remember4 {{ {frontend} : goto remember4_60 }};"
        f"add element {table} endpoints4_1 {{ {frontend} . 0 : {PODS4['local1']} . 8080 }}"
    )
    successor = successor_with(POD_CIDRS)
    await successor.open()
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen), "before anything is planned"
    await install(successor, web("local1"))
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)
    await successor.close(remove=True)


async def test_a_table_that_cannot_be_converted_stays_in_force(
    site: Site, driver: NodeProxyDriver
) -> None:
    """`outside4` has a different key here than today. The driver does not know the table's content
    and changes nothing, until the table is removed."""
    await install(driver, web("local1"))
    await driver.close(remove=True)
    nft(
        "add table inet fairlead;"
        "add map inet fairlead outside4 { type ipv4_addr : verdict; };"
        "add chain inet fairlead layout_of_another_time;"
        "add chain inet fairlead pre { type nat hook prerouting priority dstnat; };"
        f"add rule inet fairlead pre ip daddr {CLUSTER4} tcp dport 80 dnat ip to "
        f"{PODS4['local1']}:8080;"
        f"add element inet fairlead outside4 {{ {NODE4} : drop }}"
    )
    before = nft("-a", "list", "table", "inet", "fairlead")
    successor = successor_with(POD_CIDRS)
    await successor.open()
    for keys in (None, [web().service]):
        with pytest.raises(
            Unavailable, match=r"its rules stay in force; .*fairlead node --cleanup"
        ):
            await successor.read(keys)
    assert nft("-a", "list", "table", "inet", "fairlead") == before
    assert site.call("caller", CLUSTER4, 80) == Seen("local1", PODS4["caller"])
    assert await remove_table()
    await install(successor, web("local1"))
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)
    await successor.close(remove=True)


@pytest.mark.parametrize("timeout_s", [0.0005, 0.002, 0.008, 0.03])
async def test_a_replacement_that_runs_out_of_time_leaves_no_gap(
    site: Site, driver: NodeProxyDriver, timeout_s: float
) -> None:
    """Wherever the deadline ends the replacement, all elements are in the table, in the old or the
    new layout."""
    await install(driver, web("local1"))
    frontends = nft("list", "map", "inet", "fairlead", "services4").count("default/web")
    hurried = successor_with(OTHER_CIDRS, timeout_s)
    await hurried.open()
    assert nft("list", "map", "inet", "fairlead", "services4").count("default/web") == frontends
    successor = successor_with(OTHER_CIDRS)
    await successor.open()
    await install(successor, web("local1"))
    assert nft("list", "map", "inet", "fairlead", "services4").count("default/web") == frontends
    assert isinstance(site.call("caller", CLUSTER4, 80), Seen)
    await successor.close(remove=False)


async def test_an_interrupted_read_is_repeated(driver: NodeProxyDriver) -> None:
    """If a read is interrupted at any step, the next one detects the changes of other programs."""
    each = web("local1")
    desired = driver.render({each.service: each})
    await install(driver, each)
    for steps in range(12):
        nft(f"delete element inet fairlead services4 {{ {CLUSTER4} . 6 . 80 }}")
        reading = asyncio.create_task(driver.read(None))
        for _ in range(steps):
            await asyncio.sleep(0.002)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        actual = await driver.read(None)
        assert actual != desired
        await driver.apply(driver.diff(desired, actual))
        assert await driver.read(None) == desired


async def test_audits_during_passes_lose_no_change(driver: NodeProxyDriver) -> None:
    """While other programs write, a pass finds a Service as the last pass left it, and no applied
    change is lost."""
    versions = [web("local1"), web("local1", "local2"), web("remote1")]
    specs = [driver.render({each.service: each}) for each in versions]
    key = versions[0].service
    await install(driver, versions[0])
    done = asyncio.Event()
    audits = 0

    async def audit() -> None:
        nonlocal audits
        while not done.is_set():
            nft("add table inet theirs; delete table inet theirs")
            assert await driver.read(None) in specs
            audits += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(audit())
        for turn in range(60):
            actual = await driver.read([key])
            assert actual in specs
            desired = specs[turn % 3]
            assert await driver.apply(driver.diff(desired, actual)) == {}
            assert await driver.read([key]) == desired
        done.set()
    assert audits
    assert await driver.read(None) == desired


async def test_node_ports_follow_the_addresses_of_the_node(site: Site, at_node: None) -> None:
    addresses = [NODE4]
    driver = NodeProxyDriver(node_addresses=lambda: tuple(addresses), pod_cidrs=POD_CIDRS)
    await driver.open()
    try:
        await install(driver, service(port(backends("local1"))))
        assert site.call("caller", NODE4, NODE_PORT) == Seen("local1", NODE4)
        assert site.call("caller", "192.168.1.2", NODE_PORT) == REFUSED
        addresses[:] = ["192.168.1.2"]
        await install(driver, service(port(backends("local1"))))
        assert isinstance(site.call("caller", "192.168.1.2", NODE_PORT), Seen)
        assert site.call("caller", NODE4, NODE_PORT) == REFUSED
    finally:
        await driver.close(remove=True)


async def test_cleanup_removes_only_our_table(driver: NodeProxyDriver) -> None:
    await install(driver, web("local1"))
    nft("add table ip fairlead")
    try:
        assert await remove_table()
        assert nft("list", "tables") == "table ip fairlead\n"
        assert not await remove_table()
    finally:
        nft("delete table ip fairlead")


async def test_an_element_that_one_reading_leaves_out_is_no_difference(
    site: Site, driver: NodeProxyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kernel grows the hash table of a set, elements may be missing in a listing. Here an
    element is really missing, until it was listed once."""
    wanted = web("local1", "remote1")
    await install(driver, wanted)
    (element,) = re.findall(
        rf'{CLUSTER4} comment "[^"]*"', nft("list", "set", "inet", "fairlead", "cluster_ips4")
    )
    adopt, readings = Table.adopt, 0

    async def incomplete(table: Table) -> dict[ServiceKey, Spec]:
        nonlocal readings
        readings += 1
        if readings > 1:
            return await adopt(table)
        nft("delete", "element", "inet", "fairlead", "cluster_ips4", f"{{ {CLUSTER4} }}")
        found = await adopt(table)
        nft("add", "element", "inet", "fairlead", "cluster_ips4", f"{{ {element} }}")
        return found

    monkeypatch.setattr(Table, "adopt", incomplete)
    nft("add", "table", "inet", "other")  # otherwise the table is not read again
    desired = driver.render({wanted.service: wanted})
    assert not driver.diff(desired, await driver.read(None))
    assert readings == 3
