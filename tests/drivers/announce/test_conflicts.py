"""Which claims of other stations are conflicts, and when an address is defended."""

import pytest

from fairlead.drivers.announce.conflicts import CLAIM_S, DEFEND_S, SETTLE_S, Conflicts
from fairlead.drivers.announce.maps import Claim

ADDRESS, STRANGER, GATEWAY = "192.0.2.224", "02:00:00:00:00:99", "02:00:00:00:00:02"
LONG = 1000.0


def look(made: Conflicts, mac: str, age_s: float, now_s: float, since_s: float = 0.0) -> bool:
    """Return whether one claim is a conflict."""
    claim = Claim(ADDRESS, mac, age_s)
    return made.look([claim], {ADDRESS: since_s}, {GATEWAY}, now_s) == [claim]


@pytest.mark.parametrize(
    ("mac", "age_s", "owned_s", "conflict"),
    [
        (STRANGER, 0.0, LONG, True),
        (STRANGER, CLAIM_S, LONG, True),
        (STRANGER, CLAIM_S + 1, LONG, False),
        (STRANGER, 0.0, SETTLE_S - 1, False),
        (STRANGER, 5.0, SETTLE_S + 1, False),
        (STRANGER, 1.0, SETTLE_S + 1, True),
        (GATEWAY, 0.0, LONG, False),
    ],
)
def test_old_claims_and_those_of_the_former_owner_are_no_conflict(
    mac: str, age_s: float, owned_s: float, conflict: bool
) -> None:
    assert look(Conflicts(), mac, age_s, LONG, LONG - owned_s) == conflict


def test_gateways_are_in_conflict_only_if_they_go_on() -> None:
    made = Conflicts()
    assert not look(made, GATEWAY, 0.0, LONG)
    assert not look(made, GATEWAY, 0.0, LONG + SETTLE_S)
    assert not look(made, GATEWAY, 5.0, LONG + SETTLE_S + 5), "it has not gone on"
    assert look(made, GATEWAY, 0.0, LONG + SETTLE_S + 5)


def test_a_claim_to_an_address_of_another_gateway_is_no_conflict() -> None:
    assert Conflicts().look([Claim(ADDRESS, STRANGER, 0.0)], {}, (), LONG) == []


def test_an_address_is_defended_once_for_each_new_claim_and_not_more_often_than_permitted() -> None:
    made = Conflicts()
    for now_s, age_s, defended in (
        (LONG, 0.0, True),
        (LONG + 1, 0.0, False),
        (LONG + DEFEND_S, 9.0, True),
        (LONG + 3 * DEFEND_S, 25.0, False),
        (LONG + 3 * DEFEND_S, 1.0, True),
    ):
        found = made.defend([Claim(ADDRESS, STRANGER, age_s)], now_s)
        assert (found == [ADDRESS]) == defended, (now_s, age_s)
