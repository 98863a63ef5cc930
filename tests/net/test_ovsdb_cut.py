"""A connection that is cut at any byte of a transaction or of its answer: the transaction is
executed once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.net.ovsdb_servers import TIMEOUT_S, Relay, Server, connected, standalone

from fairlead.errors import Conflict
from fairlead.net.ovsdb import Insert, Mutate, OutcomeUnknown, Wait, by_uuid, new_uuid

pytestmark = pytest.mark.usefixtures("ovsdb_programs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = standalone(tmp_path_factory.mktemp("ovsdb"))
    yield server
    server.kill()


NEVER = 1 << 40
OFFSETS = range(0, 650, 5)
"""Numbers of bytes after which the connection is cut. A request has about 350 bytes, and the
notification and the answer together about 600, so the last offsets cut nothing."""
DIRECTIONS = pytest.mark.parametrize("direction", [Relay.TO_SERVER, Relay.TO_CLIENT])


@DIRECTIONS
async def test_a_transaction_with_an_insertion_is_executed_once(
    server: Server, tmp_path: Path, direction: str
) -> None:
    """The counter proves that no part of the transaction was executed twice."""
    router = new_uuid()
    names = [f"{direction}, cut after {offset}" for offset in OFFSETS]
    async with Relay(tmp_path, server.socket) as relay:
        for name, offset in zip(names, OFFSETS, strict=True):
            async with connected(relay.remote, relay.remote) as database:
                if offset == 0:
                    await database.transact([Insert("Router", {"name": direction}, router)])
                row = new_uuid()
                relay.cut_after(direction, offset)
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
                assert database.rows("Balancer")[row].string("name") == name
                relay.cut_after(direction, NEVER)
        assert relay.cuts > len(OFFSETS) / 4
    async with connected(server.remote) as database:
        written = [each.string("name") for each in database.rows("Balancer").values()]
        assert sorted(each for each in written if each.startswith(direction)) == sorted(names)
        assert database.rows("Router")[router].integer("writes") == len(OFFSETS)
        assert len(database.rows("Router")[router].strings("balancers")) == len(OFFSETS)


@DIRECTIONS
async def test_an_update_that_waits_for_the_old_value_is_executed_once(
    server: Server, tmp_path: Path, direction: str
) -> None:
    """If its answer was lost, it may raise Conflict, because the value has changed; then the copy
    has the new value."""
    row = new_uuid()
    conflicts = 0
    async with Relay(tmp_path, server.socket) as relay:
        for number, offset in enumerate(OFFSETS):
            async with connected(relay.remote, relay.remote) as database:
                if number == 0:
                    await database.transact([Insert("Router", {"name": "waits"}, row)])
                relay.cut_after(direction, offset)
                try:
                    await database.transact(
                        [
                            Wait("Router", by_uuid(row), ({"writes": number},)),
                            Mutate("Router", by_uuid(row), (("writes", "+=", 1),)),
                        ],
                        timeout_s=TIMEOUT_S,
                    )
                except Conflict:
                    conflicts += 1
                assert database.rows("Router")[row].integer("writes") == number + 1
                relay.cut_after(direction, NEVER)
        assert relay.cuts > len(OFFSETS) / 4
    assert conflicts > 0 or direction == Relay.TO_SERVER


@DIRECTIONS
async def test_an_addition_that_cannot_be_repeated_is_reported_as_unknown(
    server: Server, tmp_path: Path, direction: str
) -> None:
    row = new_uuid()
    unknown = executed = 0
    async with Relay(tmp_path, server.socket) as relay:
        for offset in OFFSETS:
            async with connected(relay.remote, relay.remote) as database:
                if offset == 0:
                    await database.transact([Insert("Router", {"name": "adds"}, row)])
                relay.cut_after(direction, offset)
                try:
                    await database.transact(
                        [Mutate("Router", by_uuid(row), (("writes", "+=", 1),))],
                        timeout_s=TIMEOUT_S,
                    )
                    executed += 1
                except OutcomeUnknown:
                    unknown += 1
                relay.cut_after(direction, NEVER)
    assert unknown > 0
    async with connected(server.remote) as database:
        written = database.rows("Router")[row].integer("writes")
    assert executed <= written <= executed + unknown
    assert written > executed or direction == Relay.TO_SERVER
