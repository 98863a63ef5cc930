"""Render the configuration of the router's routing daemon, and read what the daemon shows. Pure.

In: the daemon, and how it detects dead neighbours. Out: files and command lines of the daemon's
processes; sessions, from the output of its command-line tool. The router accepts sessions from any
address of the network lan, as hosts of any other AS, for routes of both families. It uses up to
MAX_PATHS routes to a prefix at the same time (ECMP), and announces nothing. GoBGP does not write
routes into the kernel, so `lab.gobgp` does this for it. Follows the manuals of BIRD 2.0, FRR 8.4
and GoBGP 3.10.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from fairlead.errors import Refused
from fairlead.lab.topology import LAN

RouterKind = Literal["bird", "frr", "gobgp"]

ROUTER_ASN, HOST_ASN = 64512, 64513
"""The AS numbers of the router, and of the hosts that announce addresses. Both are private (RFC
6996)."""
SESSION_NETWORK = "lan"
ROUTER_ADDRESSES = tuple(str(network[1]) for network in LAN)
PEERS = ("router", "router6")
"""The names of the router in the configuration of the hosts: its IPv4 and its IPv6 session."""
HOLD_S, KEEPALIVE_S = 9, 3
MAX_PATHS = 64
BFD_MULTIPLIER = 3
MAX_WEIGHT = 64
"""BIRD ignores the link bandwidth of routes. Its configuration reads the weight of a route from the
community HOST_ASN:WEIGHT instead, up to this weight."""
BIRD_SOCKET = "bird.ctl"
_EXECUTABLE = {
    "zebra": "/usr/lib/frr/zebra",
    "bgpd": "/usr/lib/frr/bgpd",
    "bfdd": "/usr/lib/frr/bfdd",
}


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The router's routing daemon. `bfd_interval_ms`: the interval of BFD; 0: no BFD."""

    daemon: RouterKind = "bird"
    bfd_interval_ms: int = 0


class Daemon(NamedTuple):
    """A process of the router. `ready` is the file that exists when it accepts commands; None: the
    next process waits for it."""

    name: str
    argv: tuple[str, ...]
    ready: Path | None


class RouterFiles(NamedTuple):
    """The files of a router's daemons by name, the daemons in the order of their start, and the
    command lines of the tools that a user calls by these names."""

    files: Mapping[str, str]
    daemons: tuple[Daemon, ...]
    tools: Mapping[str, tuple[str, ...]]


class Session(msgspec.Struct, frozen=True):
    """A BGP session of the router. `routes`: the number of routes that the peer announces. `bfd`:
    the state of BFD, or empty."""

    peer: str
    state: str
    routes: int
    bfd: str = ""


def check(routing: Routing) -> None:
    """Raise Refused if the daemon does not have what is requested."""
    if routing.daemon == "gobgp" and routing.bfd_interval_ms:
        raise Refused("GoBGP has no BFD", fix="choose --router bird or --router frr")


def router_files(routing: Routing, directory: Path) -> RouterFiles:
    """Return what the daemon's processes need, with all files in this directory."""
    check(routing)
    return {"bird": _bird, "frr": _frr, "gobgp": _gobgp}[routing.daemon](routing, directory)


def _bird(routing: Routing, directory: Path) -> RouterFiles:
    socket = directory / BIRD_SOCKET
    config = directory / "bird.conf"
    argv = ("bird", "-f", "-c", str(config), "-s", str(socket))
    return RouterFiles(
        {config.name: bird_configuration(routing)},
        (Daemon("bird", argv, socket),),
        {"birdc": ("birdc", "-s", str(socket))},
    )


def bird_configuration(routing: Routing) -> str:
    """Return the configuration of BIRD."""
    bfd, interval = "", routing.bfd_interval_ms
    if interval:
        bfd = (
            f'protocol bfd {{ interface "*" {{ interval {interval} ms; multiplier '
            f"{BFD_MULTIPLIER}; }}; }}\n"
        )
    kernels = "".join(
        f"protocol kernel {{ {family} {{ export where source = RTS_BGP; }}; merge paths on limit "
        f"{MAX_PATHS}; }}\n"
        for family in ("ipv4", "ipv6")
    )
    weights = "".join(
        f"  if ({HOST_ASN}, {weight}) ~ bgp_community then weight = {weight};\n"
        for weight in range(2, MAX_WEIGHT + 1)
    )
    sessions = "".join(
        f"protocol bgp from_lan{family} from host {{\n"
        f"  local {address} as {ROUTER_ASN}; neighbor range {network} external;\n"
        f'  dynamic name "lan{family}_";\n}}\n'
        for family, address, network in zip((4, 6), ROUTER_ADDRESSES, map(str, LAN), strict=True)
    )
    return f"""\
log stderr all;
router id {ROUTER_ADDRESSES[0]};
protocol device {{ scan time 10; }}
{bfd}{kernels}filter hosts {{
  if (65535, 0) ~ bgp_community then bgp_local_pref = 0;  # graceful shutdown (RFC 8326)
{weights}  accept;
}}
template bgp host {{
  hold time {HOLD_S}; keepalive time {KEEPALIVE_S};
  error wait time 1, 5; connect retry time 1;{" bfd on;" if interval else ""}
  ipv4 {{ import filter hosts; export none; add paths rx; extended next hop on; }};
  ipv6 {{ import filter hosts; export none; add paths rx; }};
}}
{sessions}"""


def _frr(routing: Routing, directory: Path) -> RouterFiles:
    names = ["zebra", "bgpd", *(["bfdd"] if routing.bfd_interval_ms else [])]
    files = {f"{name}.conf": frr_configuration(name, routing) for name in names}
    return RouterFiles(
        # vtysh reports an error if its own configuration does not exist.
        files | {"vtysh.conf": ""},
        tuple(_frr_daemon(name, directory) for name in names),
        {"vtysh": ("vtysh", "--config_dir", str(directory), "--vty_socket", str(directory))},
    )


def _frr_daemon(name: str, directory: Path) -> Daemon:
    argv = [_EXECUTABLE[name], "-f", str(directory / f"{name}.conf")]
    argv += ["-i", str(directory / f"{name}.pid"), "-z", str(directory / "zserv.api")]
    argv += ["--vty_socket", str(directory), "-A", "127.0.0.1", "-P", "0", "--log", "stdout"]
    if name == "bfdd":
        argv += ["--bfdctl", str(directory / "bfdd.sock")]
    return Daemon(name, tuple(argv), directory / f"{name}.vty")


def frr_configuration(name: str, routing: Routing) -> str:
    """Return the configuration of one daemon of FRR."""
    interval = routing.bfd_interval_ms
    if name == "zebra":
        return "hostname router\n"
    if name == "bfdd":
        return f"""\
bfd
 profile lab
  detect-multiplier {BFD_MULTIPLIER}
  receive-interval {interval}
  transmit-interval {interval}
"""
    ranges = "".join(f" bgp listen range {network} peer-group hosts\n" for network in LAN)
    families = "".join(
        f" address-family {family} unicast\n  neighbor hosts activate\n"
        f"  maximum-paths {MAX_PATHS}\n exit-address-family\n"
        for family in ("ipv4", "ipv6")
    )
    return f"""\
router bgp {ROUTER_ASN}
 bgp router-id {ROUTER_ADDRESSES[0]}
 no bgp ebgp-requires-policy
 no bgp default ipv4-unicast
 bgp bestpath as-path multipath-relax
 bgp listen limit 1000
 neighbor hosts peer-group
 neighbor hosts remote-as external
 neighbor hosts timers {KEEPALIVE_S} {HOLD_S}
{" neighbor hosts bfd profile lab" if interval else "!"}
{ranges}{families}"""


def _gobgp(_: Routing, directory: Path) -> RouterFiles:
    config, ready = directory / "gobgpd.toml", directory / "routes-ready"
    writer = (sys.executable, "-m", "fairlead.lab.gobgp", SESSION_NETWORK, str(ready))
    return RouterFiles(
        {config.name: gobgp_configuration()},
        (
            Daemon("gobgpd", ("gobgpd", "-t", "toml", "-f", str(config)), None),
            Daemon("routes", writer, ready),
        ),
        {},
    )


def gobgp_configuration() -> str:
    """Return the configuration of GoBGP."""
    families = "".join(
        "[[peer-groups.afi-safis]]\n[peer-groups.afi-safis.config]\n"
        f'afi-safi-name = "{family}-unicast"\n'
        for family in ("ipv4", "ipv6")
    )
    ranges = "".join(
        "[[dynamic-neighbors]]\n[dynamic-neighbors.config]\n"
        f'prefix = "{network}"\npeer-group = "hosts"\n'
        for network in LAN
    )
    return f"""\
[global.config]
as = {ROUTER_ASN}
router-id = "{ROUTER_ADDRESSES[0]}"
[global.apply-policy.config]
default-export-policy = "reject-route"
[[peer-groups]]
[peer-groups.config]
peer-group-name = "hosts"
peer-as = {HOST_ASN}
[peer-groups.timers.config]
hold-time = {HOLD_S}
keepalive-interval = {KEEPALIVE_S}
{families}{ranges}"""


def show_commands(daemon: RouterKind) -> tuple[tuple[str, ...], ...]:
    """Return the commands whose outputs `sessions` reads, in this order. Each begins with the name
    of a tool."""
    if daemon == "bird":
        return ("birdc", "show protocols all"), ("birdc", "show bfd sessions")
    if daemon == "gobgp":
        return (("gobgp", "neighbor", "-j"),)
    return (
        ("vtysh", "-c", "show bgp summary json"),
        ("vtysh", "-c", "show bfd peers json"),
    )


def sessions(daemon: RouterKind, outputs: Sequence[str]) -> tuple[Session, ...]:
    """Return the router's sessions, by peer, from the outputs of `show_commands`."""
    read: Mapping[RouterKind, Callable[..., list[Session]]] = {
        "bird": _bird_sessions,
        "frr": _frr_sessions,
        "gobgp": _gobgp_sessions,
    }
    found = read[daemon](*outputs)
    return tuple(sorted(found, key=lambda session: session.peer))


_BIRD_BGP = re.compile(r"^\S+ +BGP ", re.MULTILINE)
_BIRD_BFD = re.compile(r"^(\S+) +\S+ +(Up|Down|Init|AdminDown) ", re.MULTILINE)


def _bird_sessions(protocols: str, bfd: str) -> list[Session]:
    states = dict(_BIRD_BFD.findall(bfd))
    found = []
    for part in _BIRD_BGP.split(protocols)[1:]:
        # The protocol that accepts sessions has a neighbour range and no address.
        if peer := re.search(r"Neighbor address: (\S+)", part):
            state = re.search(r"BGP state: +(\S+)", part)
            imported = re.findall(r"Routes: +(\d+) imported", part)
            found.append(
                Session(
                    peer[1],
                    state[1] if state else "",
                    sum(map(int, imported)),
                    states.get(peer[1], "").lower(),
                )
            )
    return found


class _FrrPeer(msgspec.Struct):
    state: str = ""
    received: int = msgspec.field(default=0, name="pfxRcd")


class _FrrFamily(msgspec.Struct):
    peers: dict[str, _FrrPeer] = {}


class _FrrBfd(msgspec.Struct):
    peer: str
    status: str = ""


def _frr_sessions(summary: str, bfd: str) -> list[Session]:
    families = msgspec.json.decode(summary or "{}", type=dict[str, _FrrFamily])
    # Without bfdd, vtysh has no such command.
    answered = bfd.lstrip().startswith("[")
    states = msgspec.json.decode(bfd, type=list[_FrrBfd]) if answered else []
    by_peer = {each.peer: each.status for each in states}
    found: dict[str, Session] = {}
    for family in families.values():
        for address, peer in family.peers.items():
            routes = peer.received + (found[address].routes if address in found else 0)
            found[address] = Session(address, peer.state, routes, by_peer.get(address, ""))
    return list(found.values())


class _GobgpState(msgspec.Struct, frozen=True):
    neighbor_address: str = ""
    session_state: int = 0


class _GobgpCounts(msgspec.Struct, frozen=True):
    received: int = 0


class _GobgpFamily(msgspec.Struct, frozen=True):
    state: _GobgpCounts = _GobgpCounts()


class _GobgpPeer(msgspec.Struct, frozen=True):
    state: _GobgpState
    afi_safis: list[_GobgpFamily] = []


_GOBGP_STATES = ("Unknown", "Idle", "Connect", "Active", "OpenSent", "OpenConfirm", "Established")


def _gobgp_sessions(neighbors: str) -> list[Session]:
    return [
        Session(
            peer.state.neighbor_address,
            _GOBGP_STATES[peer.state.session_state],
            sum(family.state.received for family in peer.afi_safis),
        )
        for peer in msgspec.json.decode(neighbors or "[]", type=list[_GobgpPeer])
    ]
