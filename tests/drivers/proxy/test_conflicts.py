"""Which stations count as ones that have an address of this gateway."""

from fairlead.drivers.proxy.conflicts import CHECKS, Conflicts
from fairlead.kube.presence import Claimed
from fairlead.net.stations import Station

GATEWAY, STRANGER = Station("eth0", "02:00:00:00:00:02"), Station("eth0", "02:00:00:00:00:99")
ADDRESSES = ("192.0.2.8", "192.0.2.9")
OF_GATEWAY = frozenset((each, GATEWAY) for each in ADDRESSES)


def test_a_station_that_another_gateway_outruns_counts_for_some_checks() -> None:
    """And comes first, because a Lease has no room for all addresses of other gateways."""
    conflicts = Conflicts(lambda: ADDRESSES)
    conflicts.take(OF_GATEWAY)
    of_gateway = [Claimed(each, *GATEWAY) for each in ADDRESSES]
    assert list(conflicts.claimed) == of_gateway
    conflicts.take(frozenset({("192.0.2.8", GATEWAY), ("192.0.2.9", STRANGER)}))
    for _ in range(CHECKS - 1):
        assert list(conflicts.claimed) == [Claimed("192.0.2.9", *STRANGER), *of_gateway]
        conflicts.take(OF_GATEWAY)
    conflicts.take(OF_GATEWAY)
    assert list(conflicts.claimed) == of_gateway
