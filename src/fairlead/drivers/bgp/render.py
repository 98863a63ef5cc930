"""The configuration of a BIRD 2 or 3 on the host of a gateway. Pure.

In: the section `announce.bgp`, the passwords of its routers, and the kernel table with the routes
of the addresses that are announced. Out: `bird.conf`. It
changes only with the configuration: addresses that come and go change the kernel table. Invariant:
BIRD accepts no route of a router, and writes none into the kernel. Follows RFC 4724 (graceful
restart), RFC 5880 (BFD) and RFC 8212 (no eBGP without a policy)."""

from collections.abc import Iterator, Mapping, Sequence

from fairlead.model import Family
from fairlead.net.address import family_of
from fairlead.sections import BgpConfig, BgpPeerConfig

SCAN_TIME_S = 10
RX_BUFFER_BYTES = 8 << 20
"""With the default, the kernel drops messages when a thousand routes change at once, and BIRD finds
the rest at its next scan."""
RESTART_TIME_S, RESTART_WAIT_S = 20, 5
BITS: Mapping[Family, int] = {"IPv4": 32, "IPv6": 128}
PREFIX = "fairlead_to_"
"""The beginning of the names of all sessions, and of no other symbol of the configuration."""
HEADER = "# Written by Fairlead, which replaces it when its configuration changes."


def configuration(
    section: BgpConfig,
    passwords: Mapping[str, str],
    *,
    table: int,
    permitted: Mapping[Family, Sequence[str]] | None = None,
    header: str = HEADER,
) -> str:
    """Return the text of bird.conf. `passwords`: by the name of the router. `permitted`: elements
    of a set of prefixes, in BIRD's language; by default, single addresses of `section.networks`."""
    if permitted is None:
        permitted = {family: _permitted(section, family) for family in BITS}
    lines = [header, "log stderr all;"]
    if section.router_id:
        lines.append(f"router id {section.router_id};")
    if any(each.restarts_gracefully for each in section.routers):
        lines.append(f"graceful restart wait {RESTART_WAIT_S};")
    lines.append(f"protocol device {{ scan time {SCAN_TIME_S}; }}")
    if any(each.bfd is not None for each in section.routers):
        lines.append("protocol bfd fairlead_bfd {}")
    for family in BITS:
        if own := [each for each in section.routers if family_of(each.address) == family]:
            lines += _routes(family, table, permitted.get(family, ()))
            for router in own:
                lines += _session(section, router, passwords.get(router.name, ""))
    return "\n".join(lines) + "\n"


def symbol(router: BgpPeerConfig) -> str:
    """Return the name of the protocol that is the session with this router."""
    return f"{PREFIX}{router.name.replace('-', '_')}"


def _permitted(section: BgpConfig, family: Family) -> list[str]:
    """Return what may be announced, as elements of a set of prefixes in BIRD's language."""
    bits = BITS[family]
    networks = section.networks or ("0.0.0.0/0", "::/0")
    return [
        f"{each}{{{bits},{bits}}}"
        for each in networks
        if family_of(each.partition("/")[0]) == family
    ]


def _routes(family: Family, table: int, permitted: Sequence[str]) -> Iterator[str]:
    number, kind = family[-1], family.lower()
    yield f"{kind} table fairlead_routes{number};"
    yield f"protocol kernel fairlead_kernel{number} {{"
    yield f"    kernel table {table};"
    yield "    learn;"
    yield f"    scan time {SCAN_TIME_S};"
    yield f"    netlink rx buffer {RX_BUFFER_BYTES};"
    yield f"    {kind} {{ table fairlead_routes{number}; import all; export none; }};"
    yield "}"
    yield f"filter fairlead_out{number} {{"
    if permitted:
        yield f"    if net ~ [ {', '.join(permitted)} ] then accept;"
    yield "    reject;"
    yield "}"


def _session(section: BgpConfig, router: BgpPeerConfig, password: str) -> Iterator[str]:
    number, kind = family_of(router.address)[-1], family_of(router.address).lower()
    yield f"protocol bgp {symbol(router)} {{"
    yield f"    local as {section.asn};"
    yield f"    neighbor {router.address} as {router.asn};"
    yield "    direct;"
    if password:
        yield f'    password "{password}";'
    yield f"    hold time {router.hold_time_s};"
    yield f"    keepalive time {router.keepalive_time_s};"
    yield "    connect delay time 1;"
    yield "    connect retry time 1;"
    # By default, BIRD refuses a router for a minute after one error at the start.
    yield "    error wait time 1, 5;"
    if (bfd := router.bfd) is not None:
        yield f"    bfd {{ interval {bfd.interval_ms} ms; multiplier {bfd.multiplier}; }};"
    if router.restarts_gracefully:
        yield "    graceful restart on;"
        yield f"    graceful restart time {RESTART_TIME_S};"
    else:
        yield "    graceful restart off;"
    yield f"    {kind} {{"
    yield f"        table fairlead_routes{number};"
    yield "        import none;"
    yield f"        export filter fairlead_out{number};"
    yield "        next hop self;"
    yield "    };"
    yield "}"
