"""What the driver remembers between passes. Pure."""

from tests.drivers.octavia.site import WEB

from fairlead.drivers.octavia.balancers import ACTIVE, BalancerState, Found
from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.state_cache import StateCache, WriteHistory
from fairlead.model import ServiceKey

MAIL = ServiceKey("default", "mail")


def found(id_: str) -> Found:
    return Found((BalancerState(id_, WEB, "uid", ACTIVE, "ovn", "10.0.0.7"),))


def write(path: str) -> Call:
    return Call(WEB, "DELETE", path, None, "a part")


def test_a_look_at_everything_does_not_undo_what_was_written_meanwhile() -> None:
    """The result for that Service may be from before the write."""
    memory = StateCache(lambda: 0.0)
    memory.store(WEB, found("before"))
    memory.begin()
    memory.invalidate(WEB)
    memory.store(WEB, found("after"))
    assert set(memory.store_all({WEB: found("before"), MAIL: found("mail")})) == {MAIL}
    assert memory.known == {WEB: found("after"), MAIL: found("mail")}
    memory.begin()
    memory.store_all({})
    assert memory.known == {}


def test_a_doubt_that_is_older_than_a_look_at_everything_outlives_it() -> None:
    memory = StateCache(lambda: 0.0)
    memory.invalidate(WEB)
    memory.begin()
    memory.store_all({WEB: found("a")})
    assert memory.is_invalid(WEB)
    memory.store(WEB, None)
    assert not memory.is_invalid(WEB)


def test_before_everything_was_listed_an_unknown_service_is_doubted() -> None:
    memory = StateCache(lambda: 0.0)
    assert memory.is_invalid(WEB)
    memory.begin()
    memory.store_all({})
    assert not memory.is_invalid(WEB)


def test_writes_count_until_a_pass_writes_nothing() -> None:
    rounds = WriteHistory()
    assert rounds.read(WEB) == ()
    rounds.add(WEB, (write("listeners/a"),))
    assert rounds.read(WEB) == (write("listeners/a"),)
    rounds.add(WEB, (write("pools/a"),))
    assert rounds.read(WEB) == (write("listeners/a"), write("pools/a"))
    assert rounds.read(WEB) == ()
    rounds.add(WEB, (write("pools/b"),))
    rounds.end(WEB)
    assert rounds.read(WEB) == ()
