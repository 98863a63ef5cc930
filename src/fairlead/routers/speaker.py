"""The configuration of a BIRD 2 or 3 on the gateways, which announces what they serve, for
operators who run BIRD by themselves. Pure.

In: a Reach, and the addresses of the routers. Out: a whole configuration file, the same for all
gateways. BIRD reads the blackhole routes that a gateway keeps for the addresses that it serves
(docs/gateway.md#routes), so it needs no list of Services: an address is announced as long as the
gateway serves it, also while the process of the gateway is replaced. Invariant: only single
addresses of the pools are announced, and no route of the router is accepted."""

from collections.abc import Sequence

from fairlead.drivers.bgp.render import configuration
from fairlead.errors import Refused
from fairlead.net.address import family_of
from fairlead.routers.values import (
    BFD_INTERVAL_MS,
    BFD_MULTIPLIER,
    FAMILIES,
    HOLD_TIME_S,
    KEEPALIVE_TIME_S,
    Reach,
    element,
)
from fairlead.sections import BfdConfig, BgpConfig, BgpPeerConfig

TABLE = 7471100
"""The routing table of a gateway's blackhole routes."""
HEADER = """\
# bird.conf of a gateway: announces the addresses that the gateway serves by class
# fairlead.io/direct. A host without an IPv4 address needs a number of its own:
# router id 192.0.2.1;"""
RESTART = "\n# Start BIRD with -R, so that routers keep its routes while it restarts."


def render(reach: Reach, routers: Sequence[str]) -> str:
    """Return the configuration file. Raise Refused if no router has an address in the family of a
    pool: a session carries the routes of its own family."""
    families = [each for each in FAMILIES if reach.of(each)]
    if without := [each for each in families if each not in {family_of(one) for one in routers}]:
        raise Refused(
            f"the pools have {' and '.join(without)} addresses, and no address of a router of that "
            "family is given",
            fix="give one for each family with --router-address",
        )
    bfd = BfdConfig(BFD_INTERVAL_MS, BFD_MULTIPLIER) if reach.bfd else None
    peers = tuple(
        BgpPeerConfig(
            f"router{number}",
            address,
            reach.router_asn,
            bfd=bfd,
            hold_time_s=HOLD_TIME_S,
            keepalive_time_s=KEEPALIVE_TIME_S,
        )
        for number, address in enumerate(dict.fromkeys(routers), 1)
        if family_of(address) in families
    )
    return configuration(
        BgpConfig(reach.asn, peers),
        {},
        table=TABLE,
        permitted={each: tuple(map(element, reach.of(each))) for each in families},
        header=HEADER + (RESTART if reach.bfd else ""),
    )
