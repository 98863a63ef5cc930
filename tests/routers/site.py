"""A router with a client on one side and two gateways on the other, in network namespaces.

A gateway has no process of Fairlead, but what the process leaves in its kernel: the blackhole
routes of the addresses that it serves. It has these addresses on `lo` too, so that it answers a
caller with a reset."""

import errno
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

from fairlead.drivers.direct.host_network.blackhole import PROTOCOL
from fairlead.lab import namespace
from fairlead.net.blackhole import Blackholes
from fairlead.routers.speaker import TABLE
from fairlead.routers.values import Hop

GATEWAYS = (
    Hop("gw1", ("192.0.2.11", "2001:db8:2::11")),
    Hop("gw2", ("192.0.2.12", "2001:db8:2::12")),
)
ROUTER = ("192.0.2.1", "2001:db8:2::1")
ADDRESSES = ("203.0.113.10", "2001:db8:f::10")
"""The addresses that the gateways serve."""
OUTSIDE = "198.51.100.77"
"""An address in no pool, for which gateways have a blackhole route too."""


class Site:
    """The namespaces, and the processes in them. `folder`: for sockets and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """Yield a site that ends with the block."""
        site = cls(folder)
        with ExitStack() as stack:
            stack.callback(site._down)
            site._up()
            yield site

    def name(self, host: str) -> str:
        """Return the name of the namespace of a host."""
        return f"flt-{os.getpid()}-{host}"

    def run(self, host: str, *command: str | Path, given: str | None = None) -> str:
        """Run a command on a host, and return its output. It must succeed."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name(host), *command],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, host: str, *command: str | Path) -> None:
        """Start a daemon on a host; it ends with the site."""
        with (self.folder / f"{host}.log").open("ab") as log:
            self._processes[host] = subprocess.Popen(
                ["ip", "netns", "exec", self.name(host), *command], stdout=log, stderr=log
            )

    def kill(self, host: str) -> None:
        """Kill the daemon of a host."""
        process = self._processes.pop(host)
        process.kill()
        process.wait()

    def serve(self, host: str, addresses: Sequence[str], *, ends: bool = False) -> None:
        """Write the routes that a gateway keeps for the addresses that it serves, or remove them if
        its service `ends`."""
        with namespace.inside(self.name(host)), closing(Blackholes(TABLE, PROTOCOL)) as kernel:
            (kernel.delete_routes if ends else kernel.add_routes)(addresses)

    def calls(self, address: str) -> bool:
        """Return whether a call of the client reaches a gateway: a closed port answers."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with namespace.make_socket(self.name("client"), family) as caller:
            caller.settimeout(5)
            return caller.connect_ex((address, 80)) == errno.ECONNREFUSED

    def _up(self) -> None:
        for host in ("router", "client", "gw1", "gw2"):
            namespace.create(self.name(host))
            self._ip(host, "link", "set", "lo", "up")
        keys = ("net/ipv4/conf/all/forwarding", "net/ipv6/conf/all/forwarding")
        namespace.set_sysctls(self.name("router"), dict.fromkeys(keys, 1))
        self._ip("router", "link", "add", "br0", "type", "bridge")
        self._ip("router", "link", "set", "br0", "up")
        self._join("client", "lan", ("198.51.100.2/24", "2001:db8:1::2/64"))
        for number, each in enumerate(GATEWAYS, 1):
            addresses = [f"{one}/{64 if ':' in one else 24}" for one in each.addresses]
            self._join(each.name, f"port{number}", addresses)
            self._ip("router", "link", "set", f"port{number}", "master", "br0")
            for one in ADDRESSES:
                self._ip(each.name, "address", "add", one, "dev", "lo")
        for address, device in ((ROUTER[0] + "/24", "br0"), ("198.51.100.1/24", "lan")):
            self._ip("router", "address", "add", address, "dev", device)
        for address, device in ((ROUTER[1] + "/64", "br0"), ("2001:db8:1::1/64", "lan")):
            self._ip("router", "address", "add", address, "dev", device, "nodad")
        for address in ("198.51.100.1", "2001:db8:1::1"):
            self._ip("client", "route", "add", "default", "via", address)
        for gateway in GATEWAYS:
            for address in ROUTER:
                self._ip(gateway.name, "route", "add", "default", "via", address)

    def _join(self, host: str, port: str, addresses: Sequence[str]) -> None:
        peer = ("type", "veth", "peer", "name", "eth0", "netns", self.name(host))
        self._ip("router", "link", "add", port, *peer)
        self._ip("router", "link", "set", port, "up")
        self._ip(host, "link", "set", "eth0", "up")
        for each in addresses:
            nodad = ("nodad",) if ":" in each else ()
            self._ip(host, "address", "add", each, "dev", "eth0", *nodad)

    def _ip(self, host: str, *words: str) -> None:
        self.run(host, "ip", *(("-6",) if any("2001:" in each for each in words) else ()), *words)

    def _down(self) -> None:
        for host in list(self._processes):
            self.kill(host)
        for host in ("router", "client", "gw1", "gw2"):
            namespace.delete(self.name(host))
