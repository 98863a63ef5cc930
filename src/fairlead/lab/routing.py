"""Run the router's routing daemon, and show how the router reaches the VIPs.

In: a lab that is being created or is up. Out: processes in the router's namespace with their files
in the lab's run directory; a `RouterView`. Invariant: labs on one machine do not share any file of
their daemons, so they can run side by side.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fairlead.config import parse_range
from fairlead.errors import Refused, Unavailable
from fairlead.lab import process
from fairlead.lab.process import Process
from fairlead.lab.routers import RouterKind, Session, router_files, sessions, show_commands
from fairlead.lab.rundir import RunDirectory, Size
from fairlead.lab.topology import ROUTER, VIPS, Topology

if TYPE_CHECKING:
    from fairlead.lab.site import Site

_MORE_PATH = ("/usr/sbin", "/sbin")
_FRR_USER, _FRR_CRASH_LOGS = "frr", Path("/var/tmp/frr")
_PACKAGES = {"bird": "bird2", "frr": "frr", "gobgp": "gobgpd"}


class Reach(msgspec.Struct, frozen=True):
    """How the router reaches an address or prefix: `via` holds next hops, or the hardware address
    and the host that has it."""

    destination: str
    via: tuple[str, ...]


class RouterView(msgspec.Struct, frozen=True):
    """The router's routes to VIPs (or neighbour entries for VIPs), and its BGP sessions."""

    daemon: str
    reach: tuple[Reach, ...]
    sessions: tuple[Session, ...] = ()


async def start(topology: Topology, size: Size) -> None:
    """Start the daemons of the router and return when they accept commands. Raise Refused if they
    are not installed."""
    directory = RunDirectory(topology.lab)
    home = directory.router
    plan = router_files(size.routing, home)
    programs = {each.name: _find(each.argv[0], size.routing.daemon) for each in plan.daemons}
    home.mkdir(exist_ok=True)
    for name, text in plan.files.items():
        (home / name).write_text(text)
    if size.routing.daemon == "frr":
        # The daemons give up root's rights and continue as this user.
        shutil.chown(home, _FRR_USER, _FRR_USER)
    for name, argv in plan.tools.items():
        directory.add_tool(ROUTER, name, (_find(argv[0], size.routing.daemon), *argv[1:]))
    for daemon in plan.daemons:
        label = f"{ROUTER}/{daemon.name}"
        if daemon.ready:
            daemon.ready.unlink(missing_ok=True)
        started = process.spawn(
            topology.lab,
            label,
            (programs[daemon.name], *daemon.argv[1:]),
            log=directory.log(label),
            inside=topology.namespace(ROUTER),
        )

        if daemon.ready:
            await process.await_ready(
                started, partial(_exists, daemon.ready), log=directory.log(label)
            )


def remove_traces(ended: Iterable[Process]) -> None:
    """Remove what daemons of routers leave outside of the run directory if they are killed."""
    for each in ended:
        kind, _, name = each.label.partition("/")
        if kind == ROUTER:
            shutil.rmtree(_FRR_CRASH_LOGS / f"{name}.{each.pid}", ignore_errors=True)
    with suppress(OSError):  # another FRR of this machine has files there
        _FRR_CRASH_LOGS.rmdir()


async def view(site: "Site") -> RouterView:
    """Return how the router reaches the VIPs at present. Raise Unavailable."""
    topology, daemon = site.topology, site.size.routing.daemon
    if topology.announce == "l2":
        return RouterView("", await _neighbours(site))
    routes = await _routes(site)
    if topology.announce == "none":
        return RouterView("", routes)
    return RouterView(daemon, routes, await _sessions(site, daemon))


async def _exists(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)


async def _sessions(site: "Site", daemon: RouterKind) -> tuple[Session, ...]:
    outputs = [(await site.exec(ROUTER, argv))[1] for argv in show_commands(daemon)]
    return sessions(daemon, outputs)


async def _routes(site: "Site") -> tuple[Reach, ...]:
    found = []
    for family, vips in zip(("-4", "-6"), VIPS, strict=True):
        for route in await _ip(site, family, "route", "show", "root", str(vips)):
            if route.get("type") == "blackhole":
                continue
            hops = route.get("nexthops", [route])
            via = [_hop(hop) for hop in hops]
            found.append(Reach(route["dst"], tuple(sorted(via))))
    return tuple(found)


async def _neighbours(site: "Site") -> tuple[Reach, ...]:
    pools = [each for addresses in site.topology.pools.values() for each in addresses]
    owners = {port.mac: host.name for host in site.topology.hosts for port in host.ports}
    found = [
        Reach(entry["dst"], (entry["lladdr"], owners.get(entry["lladdr"], "an unknown host")))
        for entry in await _ip(site, "neigh", "show")
        if "lladdr" in entry and _contains(pools, entry["dst"])
    ]
    return tuple(sorted(found, key=lambda each: ip_address(each.destination).packed))


async def _ip(site: "Site", *argv: str) -> list[dict[str, Any]]:
    code, output, errors = await site.exec(ROUTER, ["ip", "-json", *argv])
    if code:
        raise Unavailable(f"tried to run ip {' '.join(argv)} on the router: {errors.strip()}")
    entries: list[dict[str, Any]] = json.loads(output or "[]")
    return entries


def _hop(hop: dict[str, Any]) -> str:
    weight = hop.get("weight", 1)
    gateway = hop.get("gateway") or hop.get("via", {}).get("host") or hop.get("dev", "")
    return f"{gateway} weight {weight}" if weight != 1 else str(gateway)


def _contains(ranges: Collection[str], text: str) -> bool:
    address = ip_address(text)
    parsed = map(parse_range, ranges)
    return any(
        version == address.version and first <= int(address) <= last
        for version, first, last in parsed
    )


def _find(program: str, daemon: RouterKind) -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_MORE_PATH))
    found = shutil.which(program, path=path)
    if found is None:
        package = _PACKAGES[daemon]
        raise Refused(
            f"the router of the lab needs {program}, which is not installed",
            fix=f"install it: apt-get install --no-install-recommends {package}",
        )
    return found
