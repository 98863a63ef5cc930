"""The client of OVSDB at a real server: rows, transactions, errors, interruptions."""

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.net.ovsdb_servers import (
    BALANCERS,
    NAME,
    TABLES,
    TIMEOUT_S,
    Server,
    connected,
    schema,
    standalone,
    until,
)
from tests.openstack import places

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.net.ovsdb import (
    Changes,
    Database,
    Delete,
    Insert,
    Mutate,
    Operation,
    OutcomeUnknown,
    Select,
    Table,
    Update,
    Value,
    Wait,
    by_uuid,
    new_uuid,
)
from fairlead.net.ovsdb.remotes import read_remote

pytestmark = pytest.mark.usefixtures("ovsdb_programs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = standalone(tmp_path_factory.mktemp("ovsdb"))
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stop."""
    server = standalone(tmp_path)
    yield server
    server.kill()


async def test_rows_have_the_values_of_their_columns(server: Server) -> None:
    row, router = new_uuid(), new_uuid()
    values: dict[str, Value] = {
        "name": 'quotes " and \\ and é and \U0001f6a2',
        "vips": {"192.0.2.1:80": "198.51.100.1:8080", "": ""},
        "marks": {"{": "}"},
        "protocol": "udp",
        "fields": frozenset({"a", "b"}),
        "weights": {"a": -(1 << 62)},
        "share": 2.5,
        "enabled": True,
    }
    async with connected(server.remote) as database, connected(server.remote) as observer:
        results = await database.transact(
            [
                Insert("Balancer", values, row),
                Insert("Router", {"balancers": frozenset({row})}, router),
                Select("Balancer", by_uuid(row), tuple(values)),
            ],
            comment="a comment",
        )
        assert results[0].uuid == row
        assert results[2].rows == (values,)
        assert database.rows("Balancer")[row].columns == values
        assert database.rows("Router")[router].strings("balancers") == {row}
        await until(lambda: router in observer.rows("Router"))
        assert observer.rows("Balancer")[row].columns == values


async def test_columns_that_were_not_given_have_the_default_of_their_type(server: Server) -> None:
    row = new_uuid()
    async with connected(server.remote) as database:
        await database.transact([Insert("Balancer", {}, row)])
        written = database.rows("Balancer")[row]
        assert written.columns == {
            "name": "",
            "vips": {},
            "marks": {},
            "protocol": None,
            "fields": frozenset(),
            "weights": {},
            "share": 0.0,
            "enabled": False,
        }
        assert (written.string("protocol"), written.boolean("enabled")) == ("", False)


async def test_only_rows_that_satisfy_a_condition_are_monitored(server: Server) -> None:
    mine, foreign = new_uuid(), new_uuid()
    tables = {
        "Balancer": Table(
            BALANCERS.columns,
            (("marks", "includes", {"owner": "us"}), ("name", "==", "a second condition")),
        )
    }
    async with connected(server.remote, tables=tables) as database:
        await database.transact(
            [
                Insert("Balancer", {"marks": {"owner": "us", "other": "x"}}, mine),
                Insert("Balancer", {"marks": {"owner": "them"}}, foreign),
            ]
        )
        assert mine in database.rows("Balancer")
        assert foreign not in database.rows("Balancer")
        take_over = (
            ("marks", "delete", frozenset({"owner"})),
            ("marks", "insert", {"owner": "us"}),
        )
        await database.transact([Mutate("Balancer", by_uuid(foreign), take_over)])
        assert database.rows("Balancer")[foreign].map("marks") == {"owner": "us"}
        await database.transact([Update("Balancer", by_uuid(mine), {"marks": {}})])
        assert mine not in database.rows("Balancer")
        await database.transact([Update("Balancer", by_uuid(mine), {"name": "a second condition"})])
        assert mine in database.rows("Balancer")


def random_operation(dice: random.Random, rows: list[str]) -> Operation:
    """Return an operation on one of these rows, or on a new one, which is added to them."""

    def words() -> frozenset[str]:
        return frozenset(dice.sample("abcdef", dice.randrange(4)))

    def pairs() -> dict[str, str]:
        return {key: dice.choice("xy") for key in words()}

    if not rows or dice.random() < 0.2:
        rows.append(new_uuid())
        return Insert("Balancer", {"vips": pairs(), "fields": words()}, rows[-1])
    row = dice.choice(rows)
    if dice.random() < 0.1:
        rows.remove(row)
        return Delete("Balancer", by_uuid(row))
    if dice.random() < 0.5:
        return Update(
            "Balancer",
            by_uuid(row),
            {
                "vips": pairs(),
                "fields": words(),
                "weights": {key: dice.randrange(3) for key in words()},
                "protocol": dice.choice(["tcp", "udp", None]),
                "share": dice.choice([0.0, 1.5]),
            },
        )
    return Mutate(
        "Balancer",
        by_uuid(row),
        (
            ("vips", "delete", words()),
            ("vips", "insert", pairs()),
            ("fields", "delete", words()),
            ("fields", "insert", words()),
        ),
    )


async def test_the_copy_equals_the_rows_of_the_server_after_random_changes(server: Server) -> None:
    """Two clients write at the same time. The copy of the writer is compared at once, because a
    transaction is in the copy when it returns."""
    dice = random.Random(17)
    table = {"Balancer": BALANCERS}
    async with (
        connected(server.remote, tables=table) as first,
        connected(server.remote, tables=table) as second,
    ):

        async def write(database: Database, seed: int) -> None:
            dice, rows = random.Random(seed), list[str]()
            for _ in range(150):
                size = dice.randrange(1, 4)
                operations = [random_operation(dice, rows) for _ in range(size)]
                read = Select("Balancer", (), ("_uuid", *BALANCERS.columns))
                *_, result = await database.transact([*operations, read])
                # Another client may have written after this transaction, before its answer.
                mine = set(rows)
                expected = {
                    str(row["_uuid"]): {key: row[key] for key in BALANCERS.columns}
                    for row in result.rows
                }
                copied = {
                    uuid: dict(row.columns) for uuid, row in database.rows("Balancer").items()
                }
                assert {each: expected[each] for each in mine} == {
                    each: copied[each] for each in mine
                }

        await asyncio.gather(write(first, dice.randrange(99)), write(second, dice.randrange(99)))
        async with connected(server.remote, tables=table) as third:
            await until(lambda: first.rows("Balancer") == third.rows("Balancer"))
            await until(lambda: second.rows("Balancer") == third.rows("Balancer"))


async def test_changes_are_reported_with_the_present_rows(server: Server) -> None:
    reported: list[Changes] = []
    row = new_uuid()
    async with connected(server.remote, on_change=reported.append) as database:
        reported.clear()
        await database.transact([Insert("Balancer", {"name": "one"}, row)])
        before = database.rows("Balancer")[row]
        await database.transact([Update("Balancer", by_uuid(row), {"name": "two"})])
        await database.transact([Delete("Balancer", by_uuid(row))])
    names = [
        changed.string("name") if (changed := each["Balancer"][row]) is not None else None
        for each in reported
        if row in each.get("Balancer", {})
    ]
    assert names == ["one", "two", None]
    assert before.string("name") == "one"


async def test_a_wait_for_another_value_is_a_conflict_and_the_copy_has_that_value(
    server: Server,
) -> None:
    row = new_uuid()
    async with connected(server.remote) as first, connected(server.remote) as second:
        await first.transact([Insert("Balancer", {"vips": {"a": "1"}}, row)])
        await until(lambda: row in second.rows("Balancer"))
        for number in range(50):
            new = {"a": str(number)}
            await first.transact([Update("Balancer", by_uuid(row), {"vips": new})])
            old_value = Wait("Balancer", by_uuid(row), ({"vips": {"a": "-"}},))
            change = Update("Balancer", by_uuid(row), {"vips": {"a": "lost"}})
            with pytest.raises(Conflict, match=f"wait of Balancer where _uuid == {row}.*timed out"):
                await second.transact([old_value, change])
            assert second.rows("Balancer")[row].map("vips") == new
        await second.transact([Wait("Balancer", (("name", "==", "absent"),), ())])
        with pytest.raises(Conflict):
            await second.transact([Wait("Balancer", by_uuid(row), ())])


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Insert("Balancer", {"protocol": "sctp"}, new_uuid()), "constraint violation.*sctp"),
        (Insert("Balancer", {"name": 1}, new_uuid()), "'1' is not a string"),
        (Insert("Balancer", {"vips": "a"}, new_uuid()), "'a' is not a map from string to string"),
        (Insert("Balancer", {"fields": {"a": "b"}}, new_uuid()), "is not a set of string"),
        (Insert("Balancer", {"name": "x"}, "not a uuid"), "'not a uuid' is not a UUID"),
        (Insert("Balancer", {"colour": "x"}, new_uuid()), "does not have the column colour"),
        (Delete("Bridge", ()), "does not have the table Bridge"),
        (Update("Balancer", (("name", "~", "a"),), {}), "unknown function"),
    ],
)
async def test_an_operation_that_is_not_allowed_is_refused(
    server: Server, operation: Operation, message: str
) -> None:
    async with connected(server.remote) as database:
        with pytest.raises(Refused, match=message):
            await database.transact([operation])
        assert database.synced


async def test_a_second_row_with_the_same_uuid_is_a_conflict(server: Server) -> None:
    row = new_uuid()
    async with connected(server.remote) as database:
        await database.transact([Insert("Balancer", {"name": "a"}, row)])
        with pytest.raises(Conflict, match="duplicate uuid"):
            await database.transact([Insert("Balancer", {"name": "a"}, row)])


async def test_a_schema_without_a_column_is_refused_until_the_server_has_it(tmp_path: Path) -> None:
    older = standalone(tmp_path, without="enabled")
    try:
        async with connected(older.remote, synced=False) as database:
            # A server that has just started does not have the database yet.
            await until(lambda: isinstance(database.problem, Refused))
            with pytest.raises(Refused, match=r"version 1\.0\.0, does not have the column enabled"):
                await database.wait_synced(0.01)
            assert not database.complete
            file = tmp_path / "new.ovsschema"
            file.write_text(json.dumps(schema()))
            _ovsdb_client("convert", older.remote, file)
            await database.wait_synced(TIMEOUT_S)
            assert database.schema is not None
            assert database.schema.has("Balancer", "enabled")
    finally:
        older.kill()


async def test_a_conversion_of_the_schema_while_connected_is_followed(own_server: Server) -> None:
    async with connected(own_server.remote) as database:
        await database.transact([Insert("Balancer", {"enabled": True}, row := new_uuid())])
        file = own_server.file.with_name("older.ovsschema")
        file.write_text(json.dumps(schema(without="enabled")))
        _ovsdb_client("convert", own_server.remote, file)
        await until(lambda: isinstance(database.problem, Refused))
        assert database.rows("Balancer")[row].boolean("enabled")
        assert database.stale_since_s is not None


async def test_a_restart_is_reported_as_the_differences(own_server: Server) -> None:
    """A server alone does not know the transaction to continue from, and sends all rows."""
    reported: list[Changes] = []
    kept, changed, deleted, added = (new_uuid() for _ in range(4))
    async with connected(own_server.remote, on_change=reported.append) as database:
        for row in (kept, changed, deleted):
            await database.transact([Insert("Balancer", {"name": row}, row)])
        own_server.kill()
        await until(lambda: database.problem is not None)
        stale_since_s = database.stale_since_s
        assert stale_since_s is not None
        assert len(database.rows("Balancer")) == 3
        reported.clear()
        elsewhere = Server(own_server.file, socket=own_server.file.with_name("other.sock"))
        elsewhere.start()
        async with connected(elsewhere.remote) as other:
            await other.transact(
                [
                    Update("Balancer", by_uuid(changed), {"name": "new"}),
                    Delete("Balancer", by_uuid(deleted)),
                    Insert("Balancer", {"name": "added"}, added),
                ]
            )
        elsewhere.kill()
        own_server.start()
        await database.wait_synced(TIMEOUT_S)
        assert database.stale_since_s is None
        present = database.rows("Balancer")
        differences = [each for each in reported if each]
        assert differences == [
            {"Balancer": {deleted: None, changed: present[changed], added: present[added]}}
        ]
        assert set(present) == {kept, changed, added}


async def test_a_server_that_stands_still_is_noticed(own_server: Server) -> None:
    async with connected(own_server.remote, echo_after_s=0.2, echo_timeout_s=0.5) as database:
        own_server.pause()
        await until(lambda: database.problem is not None)
        assert "sent nothing for 0.7 s" in str(database.problem)
        with pytest.raises(Unavailable, match="not connected within"):
            await database.transact([Insert("Balancer", {}, new_uuid())], timeout_s=0.1)
        own_server.resume()
        await database.wait_synced(TIMEOUT_S)


async def test_a_transaction_that_is_not_answered_in_time_is_unknown(own_server: Server) -> None:
    row = new_uuid()
    async with connected(own_server.remote) as database:
        own_server.pause()
        with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.2 s; it may have been"):
            await database.transact([Insert("Balancer", {}, row)], timeout_s=0.2)
        own_server.resume()
        await until(lambda: row in database.rows("Balancer"))


async def test_a_server_that_has_not_answered_is_an_obstacle_until_it_answers(
    own_server: Server,
) -> None:
    changes: list[Changes] = []
    async with connected(own_server.remote, on_change=changes.append) as database:
        assert database.obstacle is None
        own_server.pause()
        with pytest.raises(OutcomeUnknown):
            await database.transact([Insert("Balancer", {}, new_uuid())], timeout_s=0.2)
        assert database.synced
        assert "does not answer" in str(database.obstacle)
        changes.clear()
        own_server.resume()
        await until(lambda: database.obstacle is None)
        assert {} in changes
        own_server.pause()
        with pytest.raises(OutcomeUnknown):
            await database.transact([Insert("Balancer", {}, new_uuid())], timeout_s=0.2)
        own_server.kill()
        await until(lambda: not database.synced)
        own_server.start()
        await database.wait_synced(TIMEOUT_S)
        assert database.obstacle is None


async def test_a_message_above_the_limit_is_refused(server: Server) -> None:
    async with connected(server.remote) as database:
        await database.transact([Insert("Balancer", {"name": "x" * 30_000}, new_uuid())])
    small = Database(NAME, [server.remote], TABLES, limit_bytes=20_000)
    running = asyncio.create_task(small.run())
    await until(lambda: small.problem is not None)
    running.cancel()
    assert isinstance(small.problem, Refused)
    assert "a message is larger than the limit of 20000 bytes" in str(small.problem)


async def test_a_database_that_the_server_does_not_have_is_named(server: Server) -> None:
    database = Database("OVN_Northbound", [server.remote], {})
    running = asyncio.create_task(database.run())
    await until(lambda: database.problem is not None)
    running.cancel()
    assert "the server does not have the database OVN_Northbound" in str(database.problem)


@pytest.mark.parametrize(
    "remote", ["", "unix:", "tcp:192.0.2.1", "ssl:host:0", "http://x:1", "6641"]
)
def test_a_malformed_address_is_refused(remote: str) -> None:
    with pytest.raises(Refused, match="is not the address of an OVSDB server"):
        Database(NAME, [remote], {})


@pytest.mark.parametrize(
    "text", ["unix:/run/ovn/ovnnb_db.sock", "tcp:192.0.2.1:6641", "ssl:[2001:db8::1]:6641"]
)
def test_an_address_is_shown_as_it_was_given(text: str) -> None:
    assert str(read_remote(text)) == text


def test_a_database_needs_a_server() -> None:
    with pytest.raises(Refused, match="no server of database Lab is given"):
        Database(NAME, [], {})


def _ovsdb_client(command: str, remote: str, *words: Any) -> None:
    program = places.program("ovsdb-client")
    subprocess.run([program, command, remote, *words], check=True, capture_output=True)
