"""With the text of a plan, a router reaches the addresses of the pools: iproute2, FRR and BIRD as
routers, with real packets. The hosts of BGP sessions run BIRD, as Fairlead's hosts do."""

import time
from collections.abc import Callable
from functools import partial

import pytest
from tests.routers import site as sites
from tests.routers.sample import planned
from tests.routers.site import ADDRESS, ADDRESS6, FRR, OUTSIDE, UNASSIGNED, RouterSite

from fairlead.routers import text
from fairlead.routers.values import Router

site = sites.site
DEADLINE_S = 60.0
HOST = f"""
router id 192.0.2.1{{number}};
protocol device {{{{ }}}}
protocol bfd {{{{ interface "*" {{{{ interval 100 ms; multiplier 3; }}}}; }}}}
protocol static {{{{ ipv4; route {ADDRESS}/32 unreachable; route {OUTSIDE}/32 unreachable; }}}}
protocol static {{{{ ipv6; route {ADDRESS6}/128 unreachable; }}}}
protocol bgp uplink {{{{
    local 192.0.2.1{{number}} as 64513;
    neighbor 192.0.2.1 as 64512;
    bfd on;
    connect delay time 1;
    error wait time 1,5;
    ipv4 {{{{ import none; export all; next hop self; }}}};
    ipv6 {{{{ import none; export all; next hop address 2001:db8:2::1{{number}}; }}}};
}}}}
"""


def until(what: str, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s without success until {what}"
        time.sleep(0.2)


def test_iproute2(site: RouterSite) -> None:
    script = text.render(planned("static"), "linux")
    assert not site.reaches(ADDRESS)
    for _ in range(2):  # the script can be repeated
        site.run("router", "sh", "-eu", given=script)
    assert site.reaches(ADDRESS)
    until("the client reaches the IPv6 address", lambda: site.reaches(ADDRESS6))
    assert site.connect(UNASSIGNED) == "looped"
    rules = "\n".join(
        line.removeprefix("#").strip() for line in script.splitlines() if " rule add " in line
    )
    for host in site.hosts:
        site.run(host, "sh", "-eu", given=rules)
    assert site.connect(UNASSIGNED) == "no answer"
    assert site.reaches(ADDRESS)
    until("the client reaches the IPv6 address", lambda: site.reaches(ADDRESS6))


def start_frr(site: RouterSite, configuration: str) -> None:
    """Start FRR on the router, and enter the configuration."""
    folder = site.frr_folder()
    common = ("-z", folder / "zserv", "--vty_socket", folder)
    for daemon in ("zebra", "staticd", "bfdd", "bgpd"):
        own = ("-A", "127.0.0.1", "-i", folder / f"{daemon}.pid", "-f", "/dev/null")
        control = ("--bfdctl", folder / "bfdd.sock") if daemon == "bfdd" else ()
        site.start("router", FRR / daemon, *common, *own, *control)
        until(f"{daemon} answers", (folder / f"{daemon}.vty").exists)
    file = site.folder / "frr.conf"
    file.write_text(configuration)
    site.run("router", "vtysh", "--vty_socket", folder, "-f", file)


def start_bird(site: RouterSite, configuration: str) -> None:
    """Start BIRD on the router, with a kernel protocol as its operator has it."""
    kernel = "".join(
        f"protocol kernel {{ {family} {{ import none; export all; }}; merge paths on; }}\n"
        for family in ("ipv4", "ipv6")
    )
    file = site.folder / "router.conf"
    file.write_text("router id 192.0.2.1;\nprotocol device { }\n" + kernel + configuration)
    site.start("router", "bird", "-f", "-c", file, "-s", site.folder / "router.ctl")


@pytest.mark.parametrize("router", ["frr", "bird"])
def test_static_routes_of_a_daemon(site: RouterSite, router: Router) -> None:
    {"frr": start_frr, "bird": start_bird}[router](site, text.render(planned("static"), router))
    until("the client reaches the IPv4 address", lambda: site.reaches(ADDRESS))
    until("the client reaches the IPv6 address", lambda: site.reaches(ADDRESS6))
    shown = site.run("router", "ip", "route", "show", "203.0.113.0/28")
    assert "192.0.2.11" in shown
    assert "192.0.2.12" in shown


@pytest.mark.parametrize("router", ["frr", "bird"])
def test_sessions_with_the_hosts(site: RouterSite, router: Router) -> None:
    """Both hosts become next hops of the address. A prefix outside of the pools is refused, and an
    address of the pool without a route is discarded."""
    {"frr": start_frr, "bird": start_bird}[router](site, text.render(planned("bgp"), router))
    for number, host in enumerate(site.hosts, 1):
        file = site.folder / f"{host}.conf"
        file.write_text(HOST.format(number=number))
        site.start(host, "bird", "-f", "-c", file, "-s", site.folder / f"{host}.ctl")

    until("both hosts are next hops", lambda: routed(site, ADDRESS))
    until("the same for IPv6", lambda: routed(site, ADDRESS6))
    assert site.reaches(ADDRESS)
    until("the client reaches the IPv6 address", lambda: site.reaches(ADDRESS6))
    assert OUTSIDE not in site.run("router", "ip", "route")
    assert "blackhole 203.0.113.0/28" in site.run("router", "ip", "route")
    assert site.connect(UNASSIGNED) == "no answer"
    until("BFD is up", lambda: all(map(partial(bfd_is_up, site), site.hosts)))


def routed(site: RouterSite, address: str) -> bool:
    """Return whether the router's route to this address has both hosts as next hops."""
    shown = site.run("router", "ip", "-6" if ":" in address else "-4", "route", "show", address)
    return shown.count("nexthop via") == len(site.hosts)


def bfd_is_up(site: RouterSite, host: str) -> bool:
    control = site.folder / f"{host}.ctl"
    return " Up " in site.run(host, "birdc", "-s", control, "show", "bfd", "sessions")
