"""When the owner of a Service is told that nodes send its packets back."""

from fairlead.model import ServiceKey
from fairlead.roles.returned import PATIENCE, REMIND, Returned

WEB, DNS = ServiceKey("default", "web"), ServiceKey("default", "dns")


def test_a_service_is_named_once_packets_have_come_back_for_a_while() -> None:
    returned = Returned({WEB: 7, DNS: 5}, {"node1": 12})
    for look in range(1, PATIENCE):
        assert returned.look({WEB: 7 + look, DNS: 5}, {"node1": 12 + look}) == ([], ["node1"])
    assert returned.look({WEB: 20, DNS: 6}, {"node1": 20, "node2": 1}) == ([WEB], ["node1", "node2"])
    assert returned.look({WEB: 21, DNS: 7}, {"node1": 22, "node2": 1}) == ([], ["node1"])


def test_what_is_over_in_a_moment_is_not_told() -> None:
    returned = Returned({}, {})
    for look in range(20):
        assert returned.look({WEB: look // 2}, {"node1": look // 2})[0] == []


def test_what_lasts_is_told_again() -> None:
    returned = Returned({}, {})
    told = [look for look in range(1, 2 * REMIND) if returned.look({WEB: look}, {"node1": look})[0]]
    assert told == [PATIENCE, REMIND + PATIENCE]
