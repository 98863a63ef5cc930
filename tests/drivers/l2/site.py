"""A link with announcing hosts and neighbors, out of namespaces:

    neighbor 192.0.2.1 ── bridge ── h1 192.0.2.11, h2 192.0.2.12, h3 ...

The bridge is in a namespace of its own, the switch. Announced addresses are in the network of the
hosts. An announcing host also has the announced addresses on `lo`, as kube-proxy in IPVS mode has
them on its interface, and answers datagrams to them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fairlead.lab import namespace
from fairlead.net import bpffs

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
POLL_S = 0.01
PORT = 7007
VIP = {4: "192.0.2.200", 6: "2001:db8:1::200"}
PREFIX = {4: "192.0.2.{}/24", 6: "2001:db8:1::{}/64"}
T = TypeVar("T")


def wait_for(read: Callable[[], T], wanted: Callable[[T], bool], what: str = "") -> T:
    """Return the first value that is wanted. Fail after a long time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not wanted(found := read()):
        assert time.monotonic() < deadline_s, f"{what}: last {found}"
        time.sleep(POLL_S)
    return found


class Announcer:
    """A process with the driver, in the namespace of a host. `under`: a command that starts it."""

    def __init__(
        self, site: "Site", host: str, *, under: Sequence[str] = (), **arguments: Any
    ) -> None:
        pins = site.pins / arguments.get("role", "gateway") / host
        given = {"name": host, "pin_path": str(pins), **arguments}
        self.host = host
        self.process = subprocess.Popen(
            [
                # `ip netns exec` would hide the bpffs behind a new /sys.
                *("nsenter", f"--net={namespace.path(site.namespace(host))}"),
                *under,
                *(sys.executable, "-m", "tests.drivers.l2.host", json.dumps(given)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = self._read()

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the announcer on {self.host} ended"
        return json.loads(line)

    def announce(self, services: Mapping[str, Sequence[str]], **fields: Any) -> Any:
        return self.ask(announce=services, **fields)

    def state(self) -> Any:
        return self.ask(state=1)

    def owned(self) -> set[str]:
        return {each["address"] for each in self.state()["addresses"]}

    def members(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.state()["members"]}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End as a role ends on SIGTERM: the kernel goes on."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)


class Site:
    """The namespaces of one test."""

    def __init__(self, name: str, hosts: int = 2) -> None:
        self.prefix = f"flt-{os.getpid()}-{name}-"
        self.pins = bpffs.ROOT / f"flt-{os.getpid()}-{name}"
        self.hosts = [f"h{number}" for number in range(1, hosts + 1)]
        self.announcers: list[Announcer] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._names: list[str] = []

    def namespace(self, host: str) -> str:
        return self.prefix + host

    def __enter__(self) -> "Site":
        try:
            self._create("switch")
            self.ip("switch", "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
            self.ip("switch", "link", "set", "br0", "up")
            self.add("neighbor", 1)
            for number, host in enumerate(self.hosts, 11):
                self.add(host, number)
                for version in VIP:
                    self.assign(host, VIP[version])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.announcers:
            if each.process.poll() is None:
                each.kill()
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self._names:
            namespace.delete(self.namespace(name))
        bpffs.remove(self.pins)

    def _create(self, host: str) -> None:
        namespace.create(self.namespace(host))
        self._names.append(host)
        namespace.set_sysctls(
            self.namespace(host),
            {
                **{f"net/ipv6/conf/{each}/accept_dad": 0 for each in ("all", "default")},
                **{f"net/ipv4/conf/{each}/rp_filter": 0 for each in ("all", "default")},
                "net/ipv4/conf/default/arp_announce": 2,
                "net/ipv4/icmp_ratelimit": 0,
            },
        )
        self.ip(host, "link", "set", "lo", "up")

    def add(self, host: str, number: int, device: str = "eth0") -> None:
        """Add a host and plug it into the switch."""
        if host not in self._names:
            self._create(host)
        port = f"{host}-{device}"
        peer = ("peer", "name", device, "netns", self.namespace(host))
        self.ip("switch", "link", "add", port, "type", "veth", *peer)
        self.ip("switch", "link", "set", port, "master", "br0", "up")
        self.ip(host, "link", "set", device, "up")
        for version, text in PREFIX.items():
            nodad = ("nodad",) if version == 6 else ()
            self.ip(host, "address", "add", text.format(number), "dev", device, *nodad)

    def assign(self, host: str, address: str, device: str = "lo") -> None:
        nodad = ("nodad",) if ":" in address else ()
        self.ip(host, "address", "add", address, "dev", device, *nodad)

    def start(self, host: str, **arguments: Any) -> Announcer:
        made = Announcer(self, host, **arguments)
        self.announcers.append(made)
        return made

    def ip(self, host: str, *words: str) -> str:
        command = ["ip", "-n", self.namespace(host), *words]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DEADLINE_S
        ).stdout

    def run(self, host: str, *argv: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = ["ip", "netns", "exec", self.namespace(host), *argv]
        return subprocess.run(
            command, check=check, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def remove(self, host: str, role: str = "gateway") -> list[str]:
        """Remove what the announcer of a host has left, in a process of its own."""
        code = (
            "import asyncio, pathlib, json; from fairlead.drivers.l2 import remove_l2; "
            f"path = pathlib.Path({str(self.pins / role / host)!r}); "
            f"print(json.dumps(asyncio.run(remove_l2({role!r}, path))))"
        )
        done = subprocess.run(
            [
                *("nsenter", f"--net={namespace.path(self.namespace(host))}"),
                *(sys.executable, "-c", code),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return list(json.loads(done.stdout))

    def background(self, host: str, *argv: str) -> "subprocess.Popen[str]":
        """Start a program in the namespace of a host; it is killed at the end of the test."""
        command = ["ip", "netns", "exec", self.namespace(host), *argv]
        made = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._processes.append(made)
        return made

    def mac(self, host: str, device: str = "eth0") -> str:
        (link,) = json.loads(self.ip(host, "-j", "link", "show", "dev", device))
        return str(link["address"])

    def plug(self, host: str, *, silent: bool = False) -> None:
        """Undo `unplug`."""
        self._cable(host, silent, up=True)

    def unplug(self, host: str, *, silent: bool = False) -> None:
        """Pull the cable of a host; with `silent`, at the far side of the switch: the link of the
        host stays up."""
        self._cable(host, silent, up=False)

    def _cable(self, host: str, silent: bool, *, up: bool) -> None:
        port = f"{host}-eth0"
        if silent:
            words = ("master", "br0") if up else ("nomaster",)
        else:
            words = ("up",) if up else ("down",)
        self.ip("switch", "link", "set", port, *words)

    def neighbor_mac(self, address: str, host: str = "neighbor") -> str:
        """Return the MAC address that the kernel of a host knows for the address; empty if it knows
        none."""
        found = json.loads(self.ip(host, "-j", "neighbor", "show", "to", address) or "[]")
        return str(next((each["lladdr"] for each in found if "lladdr" in each), ""))

    def forget(self, address: str, host: str = "neighbor") -> None:
        self.ip(host, "neighbor", "flush", "to", address)

    def serve(self, host: str) -> None:
        """Answer datagrams to the announced addresses with the name of the host."""
        script = ROOT / "tests" / "drivers" / "l2" / "echo.py"
        made = self.background(host, sys.executable, str(script), host, str(PORT), *VIP.values())
        assert made.stdout is not None
        made.stdout.readline()

    def call(self, address: str, host: str = "neighbor", *, wait_s: float = 1.0) -> str:
        """Send a datagram to the address, and return the name of the host that answers; empty if
        none does."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with namespace.make_socket(self.namespace(host), family, socket.SOCK_DGRAM) as caller:
            caller.settimeout(wait_s)
            try:
                caller.sendto(b"?", (address, PORT))
                return caller.recv(64).decode()
            except OSError:  # it is late, or the neighbor knows that the address is unreachable
                return ""

    def resolves_to(self, address: str, host: str = "neighbor") -> str:
        """Ask for the address as a host without an entry does, and return the answer."""
        self.forget(address, host)
        self.call(address, host, wait_s=0.2)
        return self.neighbor_mac(address, host)
