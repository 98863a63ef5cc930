"""Whom a gateway takes for lost, and to whom it leaves addresses."""

from collections.abc import Sequence

import msgspec
import pytest

from fairlead.drivers.announce.succession import Succession
from fairlead.drivers.neighbors.protocol import WatchRequest
from fairlead.kube.presence import OnLink
from fairlead.model import Announcement
from fairlead.plan.gateways import Gateways

ADDRESS = "192.0.2.9"
MACS = {"gw1": "02:00:00:00:00:01", "gw2": "02:00:00:00:00:02"}
GATEWAYS = Gateways(
    frozenset(MACS),
    announcers={name: (OnLink("eth0", "192.0.2.0/24", mac),) for name, mac in MACS.items()},
)


async def nothing() -> None:
    pass


def succession(gateways: Gateways, planned: Announcement) -> Succession:
    made = Succession(
        "gw1",
        lambda: gateways,
        command=("true",),
        observe_silent=lambda _: None,
        announce=lambda *_: None,
        changed=nothing,
    )
    made.planned = {ADDRESS: planned}
    return made


@pytest.mark.parametrize(
    ("inherited", "trusted"),
    [((ADDRESS,), [("eth0", MACS["gw2"])]), (("192.0.2.8",), []), ((), [])],
)
def test_an_owner_whose_addresses_a_previous_process_answered_counts_as_one_that_has_answered(
    inherited: Sequence[str], trusted: Sequence[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be silent since then. Otherwise a restarted heir could not find it lost."""
    made = succession(GATEWAYS, Announcement(ADDRESS, "gw2", "eth0", "gw1"))
    made.inherited = frozenset(inherited)
    sent: list[WatchRequest] = []
    monkeypatch.setattr(made._watch, "set", sent.append)
    made.follow()
    made.follow()
    assert [list(each.trusted) for each in sent] == [trusted, []]
    assert [len(each.watches) for each in sent] == [1, 1]


@pytest.mark.parametrize("leaves", [False, True])
def test_an_address_is_left_to_no_gateway_that_leaves(leaves: bool) -> None:
    gateways = msgspec.structs.replace(GATEWAYS, leaving={"gw2": "now"} if leaves else {})
    made = succession(gateways, Announcement(ADDRESS, "gw1", "eth0", "gw2"))
    made.leave(ADDRESS, MACS["gw2"])
    assert (ADDRESS in made.left) == (not leaves)
