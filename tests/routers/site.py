"""A router with a client on one side and two hosts on the other, out of network namespaces. The
hosts have a load-balancer address, so that the client gets an answer if the router has routes."""

import errno
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fairlead.lab import namespace

ADDRESS, UNASSIGNED, OUTSIDE = "203.0.113.1", "203.0.113.9", "203.0.113.200"
ADDRESS6 = "2001:db8:f::1"
FRR = Path("/usr/lib/frr")
LINKS = """
link add br0 type bridge
link set br0 up
addr add 192.0.2.1/24 dev br0
addr add 2001:db8:2::1/64 dev br0 nodad
"""


class RouterSite:
    """The namespaces. `hosts` are the names of the hosts."""

    hosts = ("gw1", "gw2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folders: list[Path] = []

    def name(self, host: str) -> str:
        return f"flt-{os.getpid()}-{host}"

    def command(self, host: str, *command: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.name(host), *map(str, command)]

    def run(self, host: str, *command: str | Path, given: str | None = None) -> str:
        """Run a command on a host and return its output; fail if it fails."""
        done = subprocess.run(
            self.command(host, *command),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, host: str, *command: str | Path) -> None:
        """Start a daemon on a host; it ends with the site."""
        log = (self.folder / f"{host}.log").open("ab")
        self._processes.append(
            subprocess.Popen(self.command(host, *command), stdout=log, stderr=log)
        )

    def up(self) -> None:
        for host in ("router", "client", *self.hosts):
            namespace.create(self.name(host))
            namespace.set_sysctls(self.name(host), {"net/ipv6/conf/default/accept_dad": 0})
            self.run(host, "ip", "link", "set", "lo", "up")
        for family in ("ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"):
            namespace.set_sysctls(self.name("router"), {f"net/{family}": 1})
            # A host routes as well: a packet for an address that it does not have goes back.
            for host in self.hosts:
                namespace.set_sysctls(self.name(host), {f"net/{family}": 1})
        self.run("router", "ip", "-batch", "-", given=LINKS)
        self._link("client", "lan0", "198.51.100.2/24", "2001:db8:1::2/64")
        self.run("router", "ip", "addr", "add", "198.51.100.1/24", "dev", "lan0")
        self.run("router", "ip", "addr", "add", "2001:db8:1::1/64", "dev", "lan0", "nodad")
        self._default("client", "198.51.100.1", "2001:db8:1::1")
        for number, host in enumerate(self.hosts, 1):
            self._link(host, f"port{number}", f"192.0.2.1{number}/24", f"2001:db8:2::1{number}/64")
            self.run("router", "ip", "link", "set", f"port{number}", "master", "br0")
            self._default(host, "192.0.2.1", "2001:db8:2::1")
            for address in (f"{ADDRESS}/32", f"{ADDRESS6}/128"):
                self.run(host, "ip", "addr", "add", address, "dev", "lo")

    def _link(self, host: str, port: str, *addresses: str) -> None:
        pair = ("type", "veth", "peer", "name", "eth0", "netns", self.name(host))
        self.run("router", "ip", "link", "add", port, *pair)
        self.run("router", "ip", "link", "set", port, "up")
        self.run(host, "ip", "link", "set", "eth0", "up")
        for address in addresses:
            self.run(host, "ip", "addr", "add", address, "dev", "eth0", "nodad")

    def _default(self, host: str, via: str, via6: str) -> None:
        self.run(host, "ip", "route", "add", "default", "via", via)
        self.run(host, "ip", "-6", "route", "add", "default", "via", via6)

    def down(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(timeout=60)
        for host in ("router", "client", *self.hosts):
            namespace.delete(self.name(host))
        for folder in self._folders:
            shutil.rmtree(folder)

    def connect(self, address: str) -> str:
        """Open a TCP connection from the client to a closed port. Return `reached`, `looped`,
        `unreachable` or `no answer`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with namespace.make_socket(self.name("client"), family) as caller:
            caller.settimeout(2)
            try:
                caller.connect((address, 7))
            except TimeoutError:
                return "no answer"
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    return "reached"
                # ICMP Time Exceeded has this error, an unreachable network another one.
                return "looped" if error.errno == errno.EHOSTUNREACH else "unreachable"
        raise AssertionError(f"a process listens at {address} port 7")

    def frr_folder(self) -> Path:
        """Create the folder of FRR's sockets, which its own user has to reach."""
        folder = Path(tempfile.mkdtemp(prefix=f"flt-{os.getpid()}-frr-"))
        self._folders.append(folder)
        folder.chmod(0o755)
        shutil.chown(folder, "frr", "frr")
        return folder

    def reaches(self, address: str) -> bool:
        return self.connect(address) == "reached"


@contextmanager
def running(folder: Path) -> Iterator[RouterSite]:
    """Yield a site that ends with the block."""
    site = RouterSite(folder)
    with ExitStack() as stack:
        stack.callback(site.down)
        site.up()
        yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RouterSite]:
    """The site of one test."""
    with running(tmp_path) as site:
        yield site
