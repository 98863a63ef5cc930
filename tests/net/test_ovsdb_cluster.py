"""The client of OVSDB at a RAFT cluster of three servers over TLS."""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.net.ovsdb_servers import (
    TABLES,
    TIMEOUT_S,
    Cluster,
    Relay,
    certificates,
    connected,
    until,
)

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.net.ovsdb import (
    Changes,
    Database,
    Delete,
    Insert,
    Mutate,
    Update,
    Wait,
    by_uuid,
    new_uuid,
)

pytestmark = pytest.mark.usefixtures("ovsdb_programs")
ROUNDS = int(os.environ.get("FAIRLEAD_HISTORIES", "4"))
"""How often the leader is killed."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.end()


async def leader_of(cluster: Cluster) -> str:
    """Return the address of the leader."""
    async with connected(*cluster.remotes, tls=cluster.tls, leader_only=True) as database:
        return database.server


def has_written(database: Database, router: str, count: int) -> bool:
    """Return whether the copy has at least this many insertions."""
    row = database.rows("Router").get(router)
    return row is not None and row.integer("writes") >= count


async def test_a_transaction_at_any_member_is_in_the_copy_when_it_returns(cluster: Cluster) -> None:
    for remote in cluster.remotes:
        async with connected(remote, tls=cluster.tls) as database:
            for number in range(10):
                row = new_uuid()
                await database.transact([Insert("Balancer", {"name": str(number)}, row)])
                assert database.rows("Balancer")[row].string("name") == str(number)
                await database.transact([Update("Balancer", by_uuid(row), {"name": "second"})])
                assert database.rows("Balancer")[row].string("name") == "second"
                await database.transact([Delete("Balancer", by_uuid(row))])
                assert row not in database.rows("Balancer")


async def test_two_members_write_one_value_in_turns(cluster: Cluster) -> None:
    """Each client adds 1 by a Wait for the value in its copy. After a Conflict, the copy has the
    value of the other client."""
    row = new_uuid()
    async with (
        connected(cluster.remotes[0], tls=cluster.tls) as first,
        connected(cluster.remotes[1], tls=cluster.tls) as second,
    ):
        await first.transact([Insert("Router", {"name": "shared"}, row)])
        await until(lambda: row in second.rows("Router"))

        async def add(database: Database) -> None:
            done = 0
            while done < 20:
                value = database.rows("Router")[row].integer("writes")
                try:
                    await database.transact(
                        [
                            Wait("Router", by_uuid(row), ({"writes": value},)),
                            Update("Router", by_uuid(row), {"writes": value + 1}),
                        ],
                        timeout_s=TIMEOUT_S,
                    )
                    done += 1
                except Conflict:
                    assert database.rows("Router")[row].integer("writes") > value

        await asyncio.gather(add(first), add(second))
        await until(lambda: first.rows("Router")[row].integer("writes") == 40)


@pytest.mark.parametrize("has_history", [True, False])
async def test_only_the_differences_are_read_if_the_server_knows_the_last_transaction(
    cluster: Cluster, tmp_path: Path, has_history: bool
) -> None:
    """A server keeps about 100 transactions. Beyond that it sends all rows."""
    first = new_uuid()
    rows = [Insert("Balancer", {"name": "x" * 100}, new_uuid()) for _ in range(500)]
    reported: list[Changes] = []
    async with (
        connected(cluster.remotes[1], tls=cluster.tls) as other,
        Relay(tmp_path, cluster.port(0)) as relay,
    ):
        await other.transact(
            [Insert("Balancer", {"name": "first"}, first), *rows], timeout_s=TIMEOUT_S
        )
        async with connected(relay.remote, tls=cluster.tls, on_change=reported.append) as database:
            await until(lambda: len(database.rows("Balancer")) >= 501)
            await other.transact([Update("Balancer", by_uuid(first), {"name": "before"})])
            await until(lambda: database.rows("Balancer")[first].string("name") == "before")
            relay.refuses = True
            relay.cut()
            await until(lambda: database.problem is not None)
            for number in range(1 if has_history else 300):
                await other.transact([Update("Balancer", by_uuid(first), {"name": str(number)})])
            await other.transact([Update("Balancer", by_uuid(first), {"name": "after"})])
            reported.clear()
            relay.received_bytes = 0
            relay.refuses = False
            await database.wait_synced(TIMEOUT_S)
            await until(lambda: database.rows("Balancer")[first].string("name") == "after")
            assert (relay.received_bytes < 20_000) == has_history
            changed = {row for each in reported for row in each.get("Balancer", {})}
            assert changed == {first}
        await other.transact(
            [Delete("Balancer", by_uuid(each.uuid)) for each in rows], timeout_s=TIMEOUT_S
        )


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_leader_that_is_killed_while_it_writes_loses_and_doubles_nothing(
    cluster: Cluster, seed: int
) -> None:
    """Four clients at different members insert rows; each insertion also adds 1 to a counter."""
    dice = random.Random(seed)
    router = new_uuid()
    names = [f"{seed}, client {client}, row {row}" for client in range(4) for row in range(25)]
    leader = await leader_of(cluster)
    killed = asyncio.Event()

    async def write(database: Database, client: int) -> int:
        after = 0
        for name in names[25 * client : 25 * client + 25]:
            row = new_uuid()
            # A member repeats a transaction itself when the leader changes, and may then report a
            # conflict of the transaction with itself.
            with suppress(Conflict):
                await database.transact(
                    [
                        Insert("Balancer", {"name": name}, row),
                        Mutate(
                            "Router",
                            by_uuid(router),
                            (("balancers", "insert", frozenset({row})), ("writes", "+=", 1)),
                        ),
                    ],
                    timeout_s=TIMEOUT_S,
                )
            assert row in database.rows("Balancer")
            after += killed.is_set()
        return after

    async def kill(observer: Database) -> None:
        moment = dice.randrange(5, 60)
        await until(partial(has_written, observer, router, moment))
        await asyncio.sleep(dice.random() * 0.02)  # any point of a write
        cluster.member(leader).kill()
        killed.set()

    others = [each for each in cluster.remotes if each != leader]
    try:
        async with (
            connected(*cluster.remotes, tls=cluster.tls) as first,
            connected(leader, *others, tls=cluster.tls) as second,
            connected(*cluster.remotes, tls=cluster.tls) as third,
            connected(*others, tls=cluster.tls) as fourth,
        ):
            await fourth.transact([Insert("Router", {"name": str(seed)}, router)])
            writers = (first, second, third, fourth)
            for each in writers:
                await until(partial(has_written, each, router, 0))
            killing = asyncio.create_task(kill(fourth))
            after = await asyncio.gather(
                *(write(each, number) for number, each in enumerate(writers))
            )
            await killing
            assert sum(after) > 0
            for each in writers:
                await until(partial(has_written, each, router, len(names)))
                written = [row.string("name") for row in each.rows("Balancer").values()]
                mine = [name for name in written if name.startswith(f"{seed},")]
                assert sorted(mine) == sorted(names)
                row = each.rows("Router")[router]
                assert row.integer("writes") == len(row.strings("balancers")) == len(names)
    finally:
        cluster.member(leader).start()


async def test_a_write_that_a_stopped_member_executes_late_is_not_doubled(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The client leaves a member that does not respond, and repeats the write at another one. The
    first member has received the write, too, and executes it when it continues."""
    leader = await leader_of(cluster)
    stopped = next(each for each in cluster.remotes if each != leader)
    member = cluster.member(stopped)
    router, row = new_uuid(), new_uuid()
    async with Relay(tmp_path, cluster.port(cluster.remotes.index(leader))) as relay:
        relay.refuses = True
        async with connected(
            stopped, relay.remote, tls=cluster.tls, echo_after_s=1.0, echo_timeout_s=2.0
        ) as database:
            await database.transact([Insert("Router", {}, router)], timeout_s=TIMEOUT_S)
            relay.refuses = False
            member.pause()
            try:
                await database.transact(
                    [
                        Insert("Balancer", {"name": "late"}, row),
                        Mutate("Router", by_uuid(router), (("writes", "+=", 1),)),
                    ],
                    timeout_s=TIMEOUT_S,
                )
                assert database.server == relay.remote
            finally:
                member.resume()
            # This member answers requests of later connections after those of earlier ones.
            async with connected(stopped, tls=cluster.tls) as late:
                await late.transact([Insert("Balancer", {"name": "later"}, new_uuid())])
                assert late.rows("Router")[router].integer("writes") == 1
                assert late.rows("Balancer")[row].string("name") == "late"


async def test_a_member_that_has_lost_its_cluster_is_left(cluster: Cluster) -> None:
    """It would answer from old data. The rows that were read remain."""
    alone, *others = cluster.remotes
    row = new_uuid()
    async with connected(alone, tls=cluster.tls) as database:
        await database.transact([Insert("Balancer", {"name": "before"}, row)], timeout_s=TIMEOUT_S)
        try:
            for each in others:
                cluster.member(each).pause()
            await until(lambda: database.problem is not None)
            assert "has lost the cluster of database Lab" in str(database.problem)
            assert database.stale_since_s is not None
            assert database.rows("Balancer")[row].string("name") == "before"
        finally:
            for each in others:
                cluster.member(each).resume()
        await database.wait_synced(TIMEOUT_S)


async def test_only_the_leader_is_used_if_that_is_required(cluster: Cluster) -> None:
    leader = await leader_of(cluster)
    others = [each for each in cluster.remotes if each != leader]
    database = Database("Lab", others, TABLES, tls=cluster.tls, leader_only=True)
    running = asyncio.create_task(database.run())
    await until(lambda: database.problem is not None)
    running.cancel()
    assert "is not the leader of the cluster" in str(database.problem)


async def test_a_server_with_the_certificate_of_another_ca_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = certificates(tmp_path, "other")
    wrong_ca = msgspec.structs.replace(cluster.tls, ca=other.ca)
    async with connected(cluster.remotes[0], tls=wrong_ca, synced=False) as database:
        await until(lambda: database.problem is not None)
        with pytest.raises(Refused, match="the certificate of the server was not accepted"):
            await database.wait_synced(0.01)


async def test_a_client_with_the_certificate_of_another_ca_is_told_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = certificates(tmp_path, "other")
    wrong = msgspec.structs.replace(cluster.tls, certificate=other.certificate, key=other.key)
    async with connected(cluster.remotes[0], tls=wrong, synced=False) as database:
        await until(lambda: database.problem is not None)
        with pytest.raises(Unavailable, match=cluster.remotes[0]):
            await database.wait_synced(0.01)


async def test_names_are_checked_if_that_is_required(cluster: Cluster) -> None:
    checked = msgspec.structs.replace(cluster.tls, check_names=True)
    async with connected(cluster.remotes[0], tls=checked, synced=False) as database:
        await until(lambda: database.problem is not None)
        with pytest.raises(Refused, match=r"127\.0\.0\.1"):
            await database.wait_synced(0.01)


async def test_a_missing_certificate_is_named(cluster: Cluster, tmp_path: Path) -> None:
    missing = msgspec.structs.replace(cluster.tls, key=tmp_path / "absent")
    async with connected(cluster.remotes[0], tls=missing, synced=False) as database:
        await until(lambda: database.problem is not None)
        with pytest.raises(Refused, match=f"there is no file {tmp_path / 'absent'}"):
            await database.wait_synced(0.01)


async def test_ssl_without_certificates_is_refused(cluster: Cluster) -> None:
    async with connected(cluster.remotes[0], synced=False) as database:
        await until(lambda: database.problem is not None)
        with pytest.raises(Refused, match="ssl needs certificates"):
            await database.wait_synced(0.01)
