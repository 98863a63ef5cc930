"""Reads what else on this host announces addresses.

In: nothing. Out: `plan.other_announcers.HostAnnouncers`: the addresses of the interfaces, the
interfaces with strict ARP, and the routing daemons. A daemon is found by the control socket on
which it listens: the kernel lists the sockets of a network namespace, so a role that uses the
network of its host finds daemons in other containers too. Only reads: nothing of another program is
changed. Follows ip-sysctl (arp_ignore) and proc(5) (/proc/net/unix)."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fairlead.errors import Unavailable
from fairlead.net import sysctl
from fairlead.net.interfaces import present
from fairlead.plan.other_announcers import Daemon, HostAnnouncers

_OWN_ONLY = "1"
"""The least value of arp_ignore with which the kernel answers only for addresses of the interface
that receives the request."""
_SOCKETS = Path("/proc/thread-self/net/unix")
_LISTENS = 0x10000
"""The flag of a socket that accepts connections (__SO_ACCEPTCON)."""
DAEMONS: Sequence[tuple[str, str, str]] = (
    (
        "/calico/bird.ctl",
        "Calico's BIRD",
        "export the routes of table {table} (a BGPFilter, and a kernel protocol with `learn` for "
        "that table)",
    ),
    ("/frr/bgpd.vty", "FRR", "redistribute the routes: redistribute table-direct {table}"),
)
"""The end of the path of a control socket, the daemon that listens there, and how this daemon
announces routes of the kernel."""


def read() -> HostAnnouncers:
    """Return the facts about this host. Raise Unavailable if the kernel does not tell them."""
    found = present(routes=False)
    holders: dict[str, list[str]] = {}
    for each in found:
        for address in each.addresses:
            holders.setdefault(address, []).append(each.name)
    return HostAnnouncers(
        holders, tuple(_strict([each.name for each in found])), tuple(_daemons(_listening()))
    )


def _strict(names: Collection[str]) -> Iterator[str]:
    """Yield the interfaces that answer ARP only for their own addresses. The kernel uses the
    greater of the value of the interface and that of `all`."""
    everywhere = sysctl.read("net/ipv4/conf/all/arp_ignore") or "0"
    for name in names:
        own = sysctl.read(f"net/ipv4/conf/{name}/arp_ignore") or "0"
        if max(own, everywhere) >= _OWN_ONLY:
            yield name


def _listening() -> set[str]:
    """Return the paths of the Unix sockets of this network namespace that accept connections."""
    try:
        text = _SOCKETS.read_text(errors="replace")
    except OSError as problem:
        raise Unavailable(f"reading {_SOCKETS} failed: {problem.strerror}") from problem
    rows = (line.split(maxsplit=7) for line in text.splitlines()[1:])
    return {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS}


def _daemons(paths: Collection[str]) -> Iterator[Daemon]:
    for end, name, exports in DAEMONS:
        for path in sorted(each for each in paths if each.endswith(end)):
            yield Daemon(name, f"it listens at {path}", exports)
            break
