"""The configuration of a BIRD 2 or 3 on the gateways, which announces what they serve. Pure.

In: a Reach, and the addresses of the routers. Out: a whole configuration file, the same for all
gateways. BIRD reads the routes that a gateway keeps for the addresses that it serves
(docs/gateway.md#routes), so it needs no list of Services: an address is announced as long as the
gateway serves it, also while the process of the gateway is replaced. Invariant: only single
addresses of the pools are announced, and no route of the router is accepted."""

from collections.abc import Iterator, Sequence

from fairlead.errors import Refused
from fairlead.model import Family
from fairlead.net.address import family_of
from fairlead.routers.bird import bfd, pool_filter, session
from fairlead.routers.values import FAMILIES, Reach

TABLE = 7471100
"""The routing table of a gateway's blackhole routes."""
SCAN_TIME_S = 10
RX_BUFFER_BYTES = 8 << 20
"""With the default, the kernel drops messages when a thousand routes change at once."""
RESTART_TIME_S, RESTART_WAIT_S = 20, 5


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
    lines = [*_header(reach)]
    for family in families:
        lines += [*pool_filter(reach, family), *_routes(family)]
    lines += [*bfd(reach), "template bgp fairlead_router {", *session(reach.asn, reach.bfd)]
    lines += ["    connect delay time 1;", "    connect retry time 1;"]
    if reach.bfd:
        lines += ["    graceful restart on;", f"    graceful restart time {RESTART_TIME_S};"]
    else:
        # Without BFD, a router would keep the routes of a dead host for the time of a restart.
        lines.append("    graceful restart off;")
    lines.append("}")
    for family in families:
        own = [each for each in routers if family_of(each) == family]
        for number, address in enumerate(own, 1):
            lines += [
                f"protocol bgp fairlead{family[-1]}_{number} from fairlead_router {{",
                f"    neighbor {address} as {reach.router_asn};",
                f"    {family.lower()} {{",
                f"        table fairlead_routes{family[-1]};",
                "        import none;",
                f"        export filter fairlead{family[-1]};",
                "        next hop self;",
                "    };",
                "}",
            ]
    return "\n".join(lines) + "\n"


def _header(reach: Reach) -> Iterator[str]:
    yield "# bird.conf of a gateway: announces the addresses that the gateway serves by class"
    yield "# fairlead.io/direct."
    if reach.bfd:
        yield "# Start BIRD with -R, so that routers keep its routes while it restarts."
    yield "log stderr all;"
    yield "# A host without an IPv4 address needs a number of its own: router id 192.0.2.1;"
    if reach.bfd:
        yield f"graceful restart wait {RESTART_WAIT_S};"
    yield f"protocol device {{ scan time {SCAN_TIME_S}; }}"


def _routes(family: Family) -> Iterator[str]:
    table = f"fairlead_routes{family[-1]}"
    yield f"{family.lower()} table {table};"
    yield f"protocol kernel fairlead_kernel{family[-1]} {{"
    yield f"    kernel table {TABLE};"
    yield "    learn;"
    yield f"    scan time {SCAN_TIME_S};"
    yield f"    netlink rx buffer {RX_BUFFER_BYTES};"
    yield f"    {family.lower()} {{ table {table}; import all; export none; }};"
    yield "}"
