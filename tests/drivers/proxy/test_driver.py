"""The driver with a real HAProxy: changes without a new worker, the effects of a new worker, and
the effects of the death of HAProxy, of a worker or of the driver."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.drivers.proxy.site import (
    VIP,
    VIP6,
    WEB,
    ClientConnection,
    balancer,
    counted,
    new_answers,
    nodes,
    opened,
    reconcile,
    remaining,
    until,
)

from fairlead.drivers.proxy import ProxyDriver, runtime
from fairlead.drivers.proxy.process import Haproxy
from fairlead.drivers.proxy.render import render
from fairlead.drivers.proxy.spec import specs_of
from fairlead.drivers.proxy.workers import NO_BACKEND
from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace
from fairlead.model import LoadBalancer, MemberChecks, Outcome, ProxySettings, ServiceKey
from fairlead.net import localroutes
from fairlead.net.daemon import SEARCH
from fairlead.plan.proxying import ended, switched

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]


async def worker(driver: ProxyDriver) -> int:
    found, failed = await runtime.workers(driver.haproxy.master)
    [pid] = [each.pid for each in found if not each.old]
    assert failed == 0
    return pid


async def test_members_change_without_a_reload(folder: Path) -> None:
    async with nodes("node1", "node2", "node3"), opened(folder) as driver:
        assert await reconcile(driver, balancer({"node1": 3, "node2": 1})) == {}
        pid = await worker(driver)
        assert Counter(node for node, _, _ in await new_answers(40)) == {"node1": 30, "node2": 10}
        talk = await ClientConnection.start()
        first = (await talk.request())[0]

        changed = balancer({"node1": 1, "node2": 1, "node3": 2})
        assert await reconcile(driver, changed) == {}
        shares = Counter(node for node, _, _ in await new_answers(80))
        assert shares.keys() == {"node1", "node2", "node3"}
        assert shares["node3"] > max(shares["node1"], shares["node2"])
        assert await remaining(driver, changed) == ()

        draining = balancer({"node1": 0, "node2": 0, "node3": 1})
        await reconcile(driver, draining)
        assert {node for node, _, _ in await new_answers(8)} == {"node3"}
        assert (await talk.request())[0] == first  # the node keeps its connection

        # The first node is removed with its last connection.
        await reconcile(driver, balancer({"node3": 1}))
        assert (await talk.request())[0] == first
        back = balancer({first: 1})
        await reconcile(driver, back)
        assert {node for node, _, _ in await new_answers(4)} == {first}
        assert (await talk.request())[0] == first
        assert await remaining(driver, back) == ()
        assert await worker(driver) == pid
        talk.end()


async def test_bytes_are_counted_while_a_connection_is_open(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        talk = await ClientConnection.start()
        answer = await talk.request("12345")
        assert answer == ["node1", "-", "12345"]

        async def are_counted() -> bool:
            await driver.poll()
            traffic = driver.counters.services().get(WEB)
            return traffic is not None and (traffic.open, traffic.bytes_in, traffic.bytes_out) == (
                1,
                6,
                14,
            )

        await until(are_counted)
        talk.end()


async def test_connections_of_old_workers_are_open(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:

        async def are_open(count: int) -> bool:
            await driver.poll()
            return driver.counters.services()[WEB].open == count

        talks: list[ClientConnection] = []
        for limit in (0, 8, 9):  # each change replaces the worker
            await reconcile(
                driver, balancer({"node1": 1}, settings=ProxySettings(connection_limit=limit))
            )
            traffic = driver.counters.services().get(WEB)
            assert (traffic.open if traffic else 0) == len(talks)
            talks.append(await ClientConnection.start())
            await talks[-1].request()
            await until(lambda: are_open(len(talks)))
        for left in (2, 1, 0):
            talks[left].end()
            await until(partial(are_open, left))
        assert driver.counters.services()[WEB].connections == 3


async def test_answers_of_an_old_worker_are_ignored(folder: Path) -> None:
    """An old worker may answer on the socket that it shares with the new one until it closes it."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        assert len(await new_answers(3)) == 3
        await driver.poll()
        before = driver.counters.services()
        assert before[WEB].connections == 3
        other = Haproxy(folder.with_name("other"))
        await other.run(
            driver.haproxy.text()
            .replace(str(folder), str(other.folder))
            .replace(f"bind {VIP}:80", "bind 127.0.0.1:81")
        )
        driver.haproxy.worker = other.worker
        await driver.poll()
        assert driver.counters.services() == before
        await other.kill()


async def test_a_member_with_pending_connection_attempts_is_not_removed(folder: Path) -> None:
    """HAProxy retries a refused connection after a second. If the server were deleted meanwhile,
    HAProxy would use freed memory after the second."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node9": 1}))
        pid = await worker(driver)
        talks = [await ClientConnection.start() for _ in range(20)]

        async def all_are_tried() -> bool:
            taken = (await counted(driver, "stot"))["FRONTEND"] == "20"
            return taken and NO_BACKEND not in {node.upper() for _, node in await in_use(driver)}

        await until(all_are_tried)
        await reconcile(driver, balancer({"node1": 1}))
        await driver.poll()
        tried = await in_use(driver)
        assert {node for _, node in tried} <= {
            each.node for each in await runtime.servers(driver.haproxy.worker)
        }
        for talk in talks:
            with suppress(
                ConnectionResetError
                # There are at most three attempts, and a busy machine may be slow.
            ):
                assert (await talk.request())[:1] in ([], ["node1"])
        await driver.poll()
        assert {each.node for each in await runtime.servers(driver.haproxy.worker)} == {"node1"}
        assert await worker(driver) == pid


async def in_use(driver: ProxyDriver) -> set[tuple[str, str]]:
    """Return the servers in use, except those of the test's own command."""
    return {
        place for place in await runtime.in_use(driver.haproxy.worker) if place[0] != NO_BACKEND
    }


async def test_a_drain_ends_at_its_deadline_in_old_workers_too(folder: Path) -> None:
    def drained(
        weights: dict[str, int], limit_s: float, settings: ProxySettings | None = None
    ) -> LoadBalancer:
        settings = msgspec.structs.replace(settings or ProxySettings(), drain_timeout_s=limit_s)
        return balancer(weights, settings=settings)

    async with nodes("node1", "node2"), opened(folder) as driver:
        await reconcile(driver, drained({"node1": 1}, 3600))
        old = await ClientConnection.start()
        await old.request()
        await reconcile(
            driver, drained({"node1": 1}, 3600, ProxySettings(connection_limit=99))
        )  # starts a new worker
        new = await ClientConnection.start()
        await new.request()
        after = drained({"node2": 1}, 3600, ProxySettings(connection_limit=99))
        await reconcile(driver, after)
        await driver.poll()
        assert [(await talk.request())[0] for talk in (old, new)] == ["node1", "node1"]
        after = drained({"node2": 1}, 0.001, ProxySettings(connection_limit=99))
        await reconcile(driver, after)
        await asyncio.sleep(0.01)
        await driver.poll()
        for talk in (old, new):
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    while (
                        await talk.request()
                    ):  # the connection ends when the worker next handles it
                        await asyncio.sleep(0.01)
        assert await new_answers() == [["node2", "-", "x"]]
        assert await remaining(driver, after) == ()


async def test_a_reload_breaks_no_connection(folder: Path) -> None:
    other = ServiceKey("default", "other")
    async with nodes("node1"), opened(folder) as driver:
        assert await reconcile(driver, balancer({"node1": 1})) == {}
        pid, talk = await worker(driver), await ClientConnection.start()
        await talk.request()
        await reconcile(driver, balancer({"node1": 1}, key=other, addresses=(VIP6,), port=8080))
        assert await worker(driver) != pid
        assert await new_answers(1, VIP6, 8080) == [["node1", "-", "x"]]
        outcomes = await reconcile(
            driver, balancer({"node1": 1}, settings=ProxySettings(header="v2"))
        )
        assert await new_answers() == [["node1", "v2:127.0.0.1", "x"]]
        assert outcomes == {WEB: Outcome("done", notes=(switched("", "v2"),))}
        outcomes = await reconcile(
            driver, balancer({"node1": 1}, settings=ProxySettings(header="v1"))
        )
        assert await new_answers() == [["node1", "v1:127.0.0.1", "x"]]
        assert outcomes == {WEB: Outcome("done", notes=(switched("v2", "v1"),))}
        await reconcile(driver, gone=[other])
        with pytest.raises((OSError, TimeoutError)):
            await asyncio.wait_for(ClientConnection.start(VIP6, 8080), 0.3)
        assert await localroutes.present() == {VIP}
        assert await talk.request() == ["node1", "-", "x"]
        assert driver.counters.services()[WEB].connections >= 2
        talk.end()


async def test_a_reload_passes_on_the_sockets_of_both_families(folder: Path) -> None:
    """A reload keeps the same sockets: a connection that waits in a socket is lost when the socket
    is closed."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}, addresses=(VIP, VIP6)))
        before = listening()
        assert before.keys() == {f"{VIP}:80", f"[{VIP6}]:80"}
        await reconcile(
            driver,
            balancer({"node1": 1}, addresses=(VIP, VIP6), settings=ProxySettings(header="v1")),
        )
        assert listening() == before


def listening() -> dict[str, str]:
    """Return the inodes of the sockets with port 80, by address and port."""
    said = subprocess.run(
        ["ss", "-Hltne", "sport", "=", "80"], capture_output=True, text=True, check=True
    ).stdout
    return {
        line.split()[3]: next(word for word in line.split() if word.startswith("ino:"))
        for line in said.splitlines()
    }


async def test_the_oldest_of_too_many_old_workers_is_ended_and_reported(
    folder: Path,
) -> None:
    async with nodes("node1"), opened(folder, old_workers=2) as driver:
        talks = []
        for limit in range(1, 5):  # each change starts a worker
            last = balancer({"node1": 1}, settings=ProxySettings(connection_limit=limit))
            assert await reconcile(driver, last) == {}
            talks.append(await ClientConnection.start())
            assert await talks[-1].request()
            if limit == 3:
                await driver.poll()
                assert [await talk.request() for talk in talks] == [["node1", "-", "x"]] * 3
        assert await reconcile(driver, last) == {}
        pid = await worker(driver)
        await driver.poll()
        outcomes = await reconcile(driver, last)
        assert outcomes == {WEB: Outcome("done", notes=(ended(1, 2),))}
        assert await reconcile(driver, last) == {}, "the closed connections are reported once"
        with suppress(ConnectionError):
            assert not await talks[0].request()
        assert [await talk.request() for talk in talks[1:]] == [["node1", "-", "x"]] * 3
        for talk in talks:
            talk.end()
        assert await new_answers() == [["node1", "-", "x"]]
        await driver.poll()
        assert (await worker(driver), len(outcomes)) == (pid, 1)


@pytest.mark.parametrize("others", [0, 100, 1000], ids=["a line", "some lines", "a file"])
async def test_source_ranges_change_without_a_reload(folder: Path, others: int) -> None:
    """The ranges of each listener change, whether HAProxy read them from its configuration or from
    a file; after a reload HAProxy has the new ranges."""
    many = tuple(f"10.{i >> 8}.{i & 255}.0/24" for i in range(1000))

    def within(*cidrs: str, limit: int = 0) -> LoadBalancer:
        ranges = tuple(sorted(cidrs))
        return balancer(
            {"node1": 1},
            addresses=(VIP, VIP6),
            ranges=ranges,
            settings=ProxySettings(connection_limit=limit),
        )

    async def let_in() -> list[bool]:
        clients = [
            new_answers(1, source="127.0.0.1"),
            new_answers(1, source="127.0.0.2"),
            new_answers(1, VIP6),
        ]
        return [bool((await client)[0]) for client in clients]

    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, within("127.0.0.1/32", "::1/128", *many[:others]))
        pid = await worker(driver)
        assert await let_in() == [True, False, True]
        changed = within("127.0.0.2/32", *many[others:])
        assert await reconcile(driver, changed) == {}
        assert await let_in() == [False, True, False]
        assert await remaining(driver, changed) == ()
        assert await remaining(ProxyDriver(folder), changed) == ()
        assert await worker(driver) == pid
        changed = within("127.0.0.2/32", *many[others:], limit=1)
        await reconcile(driver, changed)
        assert await worker(driver) != pid
        assert await let_in() == [False, True, False]
        assert await remaining(driver, changed) == ()


async def test_the_first_changes_after_a_start_are_done_in_one_pass(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        both = [
            balancer({"node1": 1}),
            balancer({"node1": 1}, key=ServiceKey("default", "other"), port=81),
        ]
        outcomes = []
        for at in (1, 2):
            intents = {each.service: each for each in both[:at]}
            outcomes.append(
                await driver.apply(
                    driver.diff(driver.render(intents), await driver.read(list(intents)))
                )
            )
        assert outcomes == [{}, {}]
        assert await new_answers(1, port=81) == await new_answers() == [["node1", "-", "x"]]


@pytest.mark.parametrize("seed", range(2))
async def test_random_edits_of_one_service_do_not_affect_another(folder: Path, seed: int) -> None:
    """Random edits of a live Service: each is in force when the driver reports it as done, and
    another Service does not change."""
    draw = Random(seed)
    other = balancer(
        {"node1": 1, "node2": 1}, key=ServiceKey("default", "other"), addresses=(VIP6,), port=8080
    )

    def edited() -> LoadBalancer:
        settings = ProxySettings(
            header=draw.choice(("", "v1", "v2")),
            forwarded_for=False,
            method=draw.choice(("roundrobin", "leastconn", "source")),
            client_ms=draw.choice((0, 1, 50, 2_073_600_000)),
            member_ms=draw.choice((0, 1, 50, 2_073_600_000)),
            connect_ms=draw.choice((0, 1, 50)),
            inspect_ms=draw.choice((0, 1)),
            connection_limit=draw.choice((0, 1, 1_000_000)),
            checks=draw.choice((None, MemberChecks(1000, 1000, 1, 1))),
        )
        ranges = tuple(
            draw.sample(
                ("127.0.0.1/32", "10.0.0.0/8", "2001:db8::/32", "0.0.0.0/0"), draw.randrange(4)
            )
        )
        weights = {
            node: draw.randrange(4)
            for node in draw.sample(("node1", "node2", "node9"), draw.randrange(4))
        }
        return balancer(weights, port=draw.choice((80, 81)), settings=settings, ranges=ranges)

    async with nodes("node1", "node2"), opened(folder) as driver:
        assert await reconcile(driver, other) == {}
        talk = await ClientConnection.start(VIP6, 8080)
        first = await talk.request()
        for _ in range(8):
            wanted = edited()
            outcomes = await reconcile(driver, wanted, other)
            # A change of the header is reported, and no change remains.
            assert {each.state for each in outcomes.values()} <= {"done"}
            assert await remaining(driver, wanted, other) == ()
            assert {node for node, _, _ in await new_answers(4, VIP6, 8080)} == {"node1", "node2"}
            assert await talk.request() == first
        await reconcile(driver, other, gone=[WEB])
        assert await talk.request() == first
        talk.end()


async def test_the_next_process_adopts_the_running_haproxy(folder: Path) -> None:
    async with nodes("node1", "node2"), opened(folder) as driver:
        settings = ProxySettings(connection_limit=9)
        ours = balancer({"node1": 1}, settings=settings, ranges=("127.0.0.0/8",))
        await reconcile(driver, ours)
        ours = msgspec.structs.replace(
            balancer({"node1": 1, "node2": 2}),
            source_ranges=ours.source_ranges,
            settings=ours.settings,
        )
        await reconcile(driver, ours)
        pid = await worker(driver)
        successor = ProxyDriver(
            folder,
            reload_pause_s=0.1,
            # As after SIGKILL, the driver does not hand over anything.
        )
        assert await remaining(successor, ours) == ()
        assert (
            await reconcile(
                successor, balancer({"node2": 2}, settings=settings, ranges=ours.source_ranges)
            )
            == {}
        )
        assert {node for node, _, _ in await new_answers(4)} == {"node2"}
        assert await worker(successor) == pid


@pytest.mark.parametrize(
    ("who", "how"),
    [("master", signal.SIGKILL), ("worker", signal.SIGKILL), ("worker", signal.SIGSEGV)],
)
async def test_a_haproxy_that_dies_is_restarted(
    folder: Path, who: str, how: signal.Signals
) -> None:
    """HAProxy is killed, or crashes."""
    async with nodes("node1", "node2"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        both = balancer({"node1": 1, "node2": 1})
        await reconcile(driver, both)  # the configuration file does not contain this change
        follow = asyncio.ensure_future(driver.run())
        pid = driver.haproxy.master_pid() if who == "master" else await worker(driver)
        assert pid is not None
        await asyncio.sleep(0.1)
        os.kill(pid, how)
        async with asyncio.timeout(60):
            while driver.reloads == 1:
                await asyncio.sleep(0.02)
        assert driver.counters.unexpected_exits() == 1
        assert {node for node, _, _ in await new_answers(8)} == {"node1", "node2"}
        follow.cancel()
        with suppress(asyncio.CancelledError):
            await follow
        assert await remaining(driver, both) == ()


async def test_a_crash_of_an_old_worker_breaks_only_its_own_connections(folder: Path) -> None:
    """HAProxy 2.6.12 sometimes crashes when it exits, at a time when it has no connections."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        old, talk = await worker(driver), await ClientConnection.start()
        assert await talk.request()
        await reconcile(driver, balancer({"node1": 1}, settings=ProxySettings(header="v1")))
        current, newer = await worker(driver), await ClientConnection.start()
        assert await newer.request()
        os.kill(old, signal.SIGSEGV)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(talk.reader.read(), 60) == b""
        assert await worker(driver) == current != old
        assert await newer.request()
        assert await new_answers() == [["node1", "v1:127.0.0.1", "x"]]


async def test_a_haproxy_that_died_without_the_driver_is_restarted_by_the_next_read(
    folder: Path,
) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        pid = driver.haproxy.master_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while driver.haproxy.alive():
                await asyncio.sleep(0.02)
        successor = ProxyDriver(folder, reload_pause_s=0.1)
        assert len(await remaining(successor, balancer({"node1": 1}))) == 1
        await reconcile(successor, balancer({"node1": 1}))
        assert await new_answers() == [["node1", "-", "x"]]


async def test_a_member_that_refuses_fails_no_connection(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1, "node9": 3}))
        assert {node for node, _, _ in await new_answers(8)} == {"node1"}


async def test_session_affinity_keeps_a_client_address_on_one_member(folder: Path) -> None:
    async with nodes("node1", "node2", "node3"), opened(folder) as driver:
        settings = ProxySettings(method="source")
        await reconcile(driver, balancer({"node1": 1, "node2": 1, "node3": 1}, settings=settings))
        clients = [f"127.0.2.{i}" for i in range(1, 40)]
        before = {client: (await new_answers(1, source=client))[0][0] for client in clients}
        assert set(before.values()) == {"node1", "node2", "node3"}
        await reconcile(driver, balancer({"node1": 1, "node2": 1}, settings=settings))
        after = {client: (await new_answers(1, source=client))[0][0] for client in clients}
        assert {client for client in clients if before[client] != after[client]} <= {
            client for client in clients if before[client] == "node3"
        }


async def test_http_mode_adds_the_client_address(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        talk = await ClientConnection.start()
        await reconcile(driver, balancer({"node1": 1}, settings=ProxySettings(forwarded_for=True)))
        reader, writer = await asyncio.open_connection(VIP, 80, local_addr=("127.0.0.3", 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len("node1 127.0.0.3")) == b"node1 127.0.0.3"
        writer.close()
        assert await talk.request() == ["node1", "-", "x"]
        talk.end()


async def test_failed_checks_of_haproxy_remove_a_member_from_service_also_a_new_one(
    folder: Path,
) -> None:
    settings = ProxySettings(checks=MemberChecks(100, 100, 1, 2))
    async with nodes("node1", "node3"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1, "node2": 1}, settings=settings))
        await reconcile(
            driver, balancer({"node1": 1, "node2": 1, "node3": 1, "node4": 1}, settings=settings)
        )
        async with asyncio.timeout(10):
            while True:
                rows = {
                    row["svname"]: row["status"]
                    for row in await runtime.statistics(driver.haproxy.worker)
                }
                if [rows[f"node{i}"].split()[0] for i in range(1, 5)] == [
                    "UP",
                    "DOWN",
                    "UP",
                    "DOWN",
                ]:
                    break
                await asyncio.sleep(0.05)


async def test_an_address_in_use_does_not_affect_other_services(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        occupied = await asyncio.start_server(lambda _reader, writer: writer.close(), "0.0.0.0", 81)
        other = balancer(
            {"node1": 1}, key=ServiceKey("default", "other"), addresses=("203.0.113.8",), port=81
        )
        await asyncio.sleep(0.15)
        with pytest.raises(Refused, match="listens on the address"):
            await reconcile(driver, other)
        assert await new_answers() == [["node1", "-", "x"]]
        assert await remaining(driver, balancer({"node1": 1})) == ()
        occupied.close()
        await reconcile(driver, other)
        assert await new_answers(1, "203.0.113.8", 81) == [["node1", "-", "x"]]


async def test_no_other_port_of_the_host_is_reached_at_an_address_of_a_service(
    folder: Path,
) -> None:
    other = ServiceKey("default", "other")
    own = await asyncio.start_server(lambda _reader, writer: writer.close(), "0.0.0.0", 2222)
    async with nodes("node1"), opened(folder) as driver, own:
        both = balancer({"node1": 1}, addresses=(VIP, VIP6))
        await reconcile(driver, both, balancer({"node1": 1}, key=other, port=8080))
        assert await new_answers(1, VIP6) == [["node1", "-", "x"]]
        assert await new_answers(1, source=VIP) == [
            ["node1", "-", "x"]
        ]  # the host connects to its own address
        (await ClientConnection.start("127.0.0.1", 2222)).end()
        for address, port in ((VIP, 2222), (VIP6, 8080), (VIP6, 2222)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ClientConnection.start(address, port), 0.3)
        assert await new_answers(1, VIP, 8080) == [["node1", "-", "x"]]
        assert (
            await remaining(ProxyDriver(folder), both, balancer({"node1": 1}, key=other, port=8080))
            == ()
        )
        assert await new_answers(1, VIP6) == [["node1", "-", "x"]]


async def test_packets_for_node_ports_are_not_redirected_at_an_address_of_a_service(
    folder: Path,
) -> None:
    """A service proxy answers NodePorts at every local address by rewriting the destination; the
    shield prevents that. At an address that Services share, the service proxy may answer ports of
    other Services."""
    command("ip link add eth0 type veth peer name eth1")
    with other_host() as client:
        for word in (
            "address add 192.0.2.1/24 dev eth0",
            "address add 2001:db8::1/64 dev eth0 nodad",
            "link set eth0 up",
        ):
            command(f"ip {word}")
        command("nft -f -", NODE_PORTS)

        async def reaches(address: str, port: int) -> bool:
            return await asyncio.to_thread(client, address, port)

        own = await asyncio.start_server(
            lambda _reader, writer: writer.close(), ("192.0.2.1", "2001:db8::1"), 2222
        )
        async with nodes("node1"), opened(folder) as driver, own:
            addresses = (VIP, VIP6)
            await reconcile(driver, balancer({"node1": 1}, addresses=addresses))
            assert [await reaches(each, 80) for each in addresses] == [True, True]
            assert [await reaches(each, 30555) for each in ("192.0.2.1", "2001:db8::1")] == [
                True,
                True,
            ]
            assert [await reaches(each, 30555) for each in addresses] == [False, False]
            assert [await reaches(each, 2222) for each in addresses] == [False, False]
            shared = ProxySettings(shared=True)
            await reconcile(driver, balancer({"node1": 1}, addresses=addresses, settings=shared))
            assert [await reaches(each, 80) for each in addresses] == [True, True]
            assert [await reaches(each, 30555) for each in addresses] == [True, True]
            assert [await reaches(each, 2222) for each in addresses] == [False, False]


NODE_PORTS = """
table inet others {
  chain prerouting {
    type nat hook prerouting priority dstnat;
    fib daddr type local tcp dport 30555 dnat ip to 192.0.2.1:2222
    fib daddr type local tcp dport 30555 dnat ip6 to [2001:db8::1]:2222
  }
}
"""


def command(words: str, given: str = "") -> None:
    subprocess.run(words.split(), input=given, text=True, check=True)


@contextmanager
def other_host() -> Iterator[Callable[[str, int], bool]]:
    """Set up the other end of the link. The result tells whether a connection to an address and
    port succeeds."""
    name = f"flt-{os.getpid()}-client"
    namespace.create(name)

    def connects(address: str, port: int) -> bool:
        with (
            namespace.inside(name),
            suppress(OSError),
            socket.create_connection((address, port), timeout=0.5),
        ):
            return True
        return False

    try:
        command(f"ip link set eth1 netns {name}")
        for word in (
            "address add 192.0.2.2/24 dev eth1",
            "address add 2001:db8::2/64 dev eth1 nodad",
            "link set eth1 up",
            "route add 203.0.113.0/24 via 192.0.2.1",
            "route add 2001:db8:f::/48 via 2001:db8::1",
        ):
            command(f"ip -n {name} {word}")
        yield connects
    finally:
        namespace.delete(name)


async def test_connections_outlive_their_port(folder: Path) -> None:
    """The port is removed and the address stays: open connections continue, new ones fail."""
    other = ServiceKey("default", "other")
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(
            driver, balancer({"node1": 1}), balancer({"node1": 1}, key=other, port=8080)
        )
        talk = await ClientConnection.start(VIP, 8080)
        await talk.request()
        await reconcile(driver, balancer({"node1": 1}), gone=[other])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ClientConnection.start(VIP, 8080), 0.3)
        assert await talk.request() == ["node1", "-", "x"]
        talk.end()


async def test_two_services_never_share_a_listener(folder: Path) -> None:
    other = ServiceKey("a-first", "other")
    async with nodes("node1", "node2"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        outcomes = await reconcile(driver, balancer({"node2": 1}, key=other))
        assert outcomes[other].state == "unavailable"
        assert {node for node, _, _ in await new_answers(4)} == {"node1"}


async def test_a_missing_haproxy_is_reported(folder: Path) -> None:
    with pytest.raises(Refused, match="not installed"):
        await Haproxy(folder, search=str(folder)).run("")


async def test_too_few_file_descriptors_for_haproxy_are_reported(folder: Path) -> None:
    folder.parent.joinpath("haproxy").write_text(
        '#!/bin/sh\nexec prlimit --nofile=200 /usr/sbin/haproxy "$@"\n'
    )
    folder.parent.joinpath("haproxy").chmod(0o755)
    haproxy = Haproxy(folder, search=f"{folder.parent}:{SEARCH}")
    text = render(specs_of({WEB: balancer({"node1": 1})}), haproxy.paths)
    with pytest.raises(
        Refused,
        match=r"Cannot raise FD limit to \d+, limit is 200.; raise the limit of open files",
    ):
        await haproxy.run(text)


async def test_the_maximum_number_of_connections_is_shown(folder: Path) -> None:
    """Each connection takes two file descriptors."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        talk = await ClientConnection.start()
        await talk.request()
        await driver.poll()
        worker = driver.counters.worker
        descriptors = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 262144)
        assert worker.connections == 1
        assert descriptors / 2 - 100 < worker.limit < descriptors / 2
        talk.end()


async def test_a_socket_without_a_listener_is_unavailable(folder: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await runtime.query(folder / "worker.sock", "show info")
