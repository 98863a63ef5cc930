"""Real routers in a network namespace: BIRD, FRR and GoBGP, with one interface for tests.

A router runs in its own namespace, with its files in a folder. `prefixes` is what it has learned,
`attributes` what it knows about a prefix, and `kernel` what is in its routing table (not GoBGP,
which has no routing table)."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fairlead.lab import namespace

ROUTER_ASN, HOST_ASN = 64512, 64513
WAIT_S = 40
FRR = Path("/usr/lib/frr")


class Neighbor(msgspec.Struct, frozen=True):
    """How a router is configured for one neighbor. `refused`: prefixes that its policy rejects."""

    address: str = "198.51.100.1"
    asn: int = HOST_ASN
    password: str = ""
    bfd: bool = False
    gtsm: bool = False
    multihop: int = 0
    max_prefixes: int = 0
    refused: tuple[str, ...] = ()
    extended_next_hop: bool = False
    interface: str = ""
    source: str = ""
    add_paths: bool = False
    families: tuple[str, ...] = ("ipv4", "ipv6")


class Router:
    """A routing daemon in the namespace `inside`."""

    name = ""
    has_kernel_routes = True
    has_bfd = True

    def __init__(
        self,
        inside: str,
        folder: Path,
        *neighbors: Neighbor,
        asn: int = ROUTER_ASN,
        address: str = "198.51.100.254",
        port: int = 179,
    ) -> None:
        self.inside, self.folder, self.asn, self.address = inside, folder, asn, address
        self.neighbors, self.port = neighbors or (Neighbor(),), port
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        raise NotImplementedError

    async def prefixes(self) -> set[str]:
        raise NotImplementedError

    async def attributes(self, prefix: str) -> str:
        """Return what the router shows about the route, as text in lower case."""
        raise NotImplementedError

    async def established(self) -> bool:
        """Return whether the router has an established session."""
        raise NotImplementedError

    def kernel(self, prefix: str = "") -> str:
        """Return the routes in the kernel that the router added, in both families."""
        texts = [
            self._call("ip", family, "route", "show", *([prefix] if prefix else []))
            for family in ("-4", "-6")
            if not prefix or (family == "-6") == (":" in prefix)
        ]
        lines = [line for text in texts for line in text.splitlines()]
        marked = [line for line in lines if "proto bird" in line or "proto bgp" in line]
        return "\n".join(marked) if not prefix else "\n".join(lines)

    def stop(self) -> None:
        for each in reversed(self._processes):
            each.terminate()
        for each in self._processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(10)
            if each.poll() is None:
                each.kill()
                each.wait()
        self._processes = []

    def kill(self) -> None:
        """End the processes without a farewell to the neighbors."""
        for each in self._processes:
            each.send_signal(signal.SIGKILL)
            each.wait()
        self._processes = []

    def _spawn(self, *argv: str) -> None:
        log = (self.folder / f"{Path(argv[0]).name}.out").open("wb")
        with log, namespace.inside(self.inside):
            self._processes.append(
                subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def _call(self, *argv: str) -> str:
        with namespace.inside(self.inside):
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        await until(holds)

    async def learns(self, *prefixes: str) -> None:
        """Wait until the router has exactly these prefixes."""

        async def holds() -> bool:
            return await self.prefixes() == set(prefixes)

        try:
            await until(holds)
        except TimeoutError as error:
            raise AssertionError(
                f"{self.name} has {sorted(await self.prefixes())}, and not {sorted(prefixes)}"
            ) from error


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. Raise TimeoutError if it never does."""
    async with asyncio.timeout(WAIT_S):
        while not await holds():
            await asyncio.sleep(0.05)


class BirdRouter(Router):
    name = "bird"

    async def start(self) -> None:
        configuration = self.folder / "router.conf"
        configuration.write_text(self._text())
        self._spawn(
            "/usr/sbin/bird",
            *("-f", "-c", str(configuration), "-s", str(self.folder / "router.ctl")),
        )
        await until(self._answers)

    def _text(self) -> str:
        return "\n".join(
            [
                f"log stderr all; router id {self._router_id()};",
                "protocol device { scan time 2; } protocol bfd { }",
                "protocol kernel { ipv4 { export all; import none; }; merge paths on; }",
                "protocol kernel { ipv6 { export all; import none; }; merge paths on; }",
                *(self._session(number, each) for number, each in enumerate(self.neighbors)),
            ]
        )

    def _session(self, number: int, each: Neighbor) -> str:
        # BIRD does not know link bandwidth, and takes the weight from the plain community.
        weights = [
            f"if ({each.asn},{weight}) ~ bgp_community then weight = {weight};"
            for weight in range(1, 10)
        ]
        checks = [f"if net = {prefix} then reject;" for prefix in each.refused]
        limit = f"import limit {each.max_prefixes} action disable;" if each.max_prefixes else ""
        accept = f"{limit} import filter {{ {' '.join((*checks, *weights))} accept; }};"
        options = [
            f"local {each.source} port {self.port} as {self.asn};",
            f"neighbor {each.address} as {each.asn};",
            f"multihop {each.multihop};" if each.multihop else "direct;",
            "connect delay time 1; connect retry time 1; error wait time 1,5;",
        ]
        options += ["bfd on;"] if each.bfd else []
        options += ["ttl security on;"] if each.gtsm else []
        options += [f'password "{each.password}";'] if each.password else []
        for family in each.families:
            extended = family == "ipv4" and each.extended_next_hop
            more = "extended next hop on;" if extended else ""
            more += "add paths rx;" if each.add_paths else ""
            options.append(f"{family} {{ {accept} export none; {more} }};")
        return f"protocol bgp n{number} {{ {' '.join(options)} }}"

    def _router_id(self) -> str:
        return self.address if ":" not in self.address else "198.51.100.254"

    async def _answers(self) -> bool:
        return "Daemon is up" in self._query("show status")

    def _query(self, command: str) -> str:
        return self._call("birdc", "-s", str(self.folder / "router.ctl"), command)

    async def prefixes(self) -> set[str]:
        text = self._query("show route")
        return set(re.findall(r"^(\S+/\d+) ", text, re.MULTILINE))

    async def attributes(self, prefix: str) -> str:
        return self._query(f"show route all {prefix}").lower()

    async def established(self) -> bool:
        return "Established" in self._query("show protocols")


class FrrRouter(Router):
    name = "frr"

    async def start(self) -> None:
        shutil.chown(self.folder, "frr", "frr")
        configuration = self.folder / "frr.conf"
        configuration.write_text(self._text())
        zserv = str(self.folder / "zserv.api")
        common = ("-z", zserv, "--vty_socket", str(self.folder), "-A", "127.0.0.1", "-P", "0")
        for daemon in ("zebra", "bgpd", *(["bfdd"] if any(e.bfd for e in self.neighbors) else [])):
            self._spawn(
                str(FRR / daemon),
                *common,
                *("-f", str(configuration), "-i", str(self.folder / f"{daemon}.pid")),
                *(("-p", str(self.port)) if daemon == "bgpd" and self.port != 179 else ()),
                *(("--bfdctl", str(self.folder / "bfdd.sock")) if daemon == "bfdd" else ()),
            )
            if daemon == "zebra":
                await until(self._zebra_listens)
        await until(self._answers)

    async def _zebra_listens(self) -> bool:
        return (self.folder / "zserv.api").exists()

    async def _answers(self) -> bool:
        return bool(self._show("show bgp summary json"))

    def _text(self) -> str:
        lines = [
            "frr defaults traditional",
            f"router bgp {self.asn}",
            f" bgp router-id {self.address if ':' not in self.address else '198.51.100.254'}",
            " no bgp ebgp-requires-policy",
            " no bgp default ipv4-unicast",
            " bgp bestpath as-path multipath-relax",
            " timers bgp 3 9",
        ]
        lists = []
        for number, each in enumerate(self.neighbors):
            peer = each.interface or each.address
            declared = f" neighbor {peer}{' interface' if each.interface else ''}"
            lines.append(f"{declared} remote-as {each.asn}")
            lines.append(f" neighbor {peer} timers connect 1")
            if each.password:
                lines.append(f" neighbor {peer} password {each.password}")
            if each.bfd:
                lines.append(f" neighbor {peer} bfd 3 100 100")
            if each.gtsm:
                lines.append(f" neighbor {peer} ttl-security hops 1")
            if each.multihop:
                lines.append(f" neighbor {peer} ebgp-multihop {each.multihop}")
            if each.source:
                lines.append(f" neighbor {peer} update-source {each.source}")
            if each.extended_next_hop:
                lines.append(f" neighbor {peer} capability extended-nexthop")
            for family in each.families:
                lines.append(f" address-family {family} unicast")
                lines.append(f"  neighbor {peer} activate")
                if each.max_prefixes:
                    lines.append(f"  neighbor {peer} maximum-prefix {each.max_prefixes}")
                if each.refused:
                    lines.append(f"  neighbor {peer} prefix-list refuse{number} in")
                lines.append(" exit-address-family")
            lists += [f"ip prefix-list refuse{number} deny {prefix}" for prefix in each.refused]
            if each.refused:
                lists.append(f"ip prefix-list refuse{number} permit any")
        return "\n".join([*lines, "exit", *lists]) + "\n"

    def _show(self, command: str) -> Any:
        text = self._call("vtysh", "--vty_socket", str(self.folder), "-c", command)
        with suppress(json.JSONDecodeError):
            return json.loads(text)
        return {}

    async def prefixes(self) -> set[str]:
        found: set[str] = set()
        for family in ("ipv4", "ipv6"):
            table = self._show(f"show bgp {family} unicast json")
            found |= {
                prefix
                for prefix, paths in table.get("routes", {}).items()
                if any(path.get("valid") for path in paths)
            }
        return found

    async def attributes(self, prefix: str) -> str:
        family = "ipv6" if ":" in prefix else "ipv4"
        return json.dumps(self._show(f"show bgp {family} unicast {prefix} json")).lower()

    async def established(self) -> bool:
        summary = self._show("show bgp summary json")
        return "Established" in json.dumps(summary)


class GobgpRouter(Router):
    name = "gobgp"
    has_kernel_routes = False
    has_bfd = False

    async def start(self) -> None:
        configuration = self.folder / "gobgp.json"
        configuration.write_text(json.dumps(self._value()))
        self._spawn(
            "/usr/bin/gobgpd",
            *("-t", "json", "-f", str(configuration), "--api-hosts", "127.0.0.1:50051"),
        )
        await until(self._answers)

    def _value(self) -> Mapping[str, Any]:
        refused = [prefix for each in self.neighbors for prefix in each.refused]
        prefixes = {"prefix-list": [{"ip-prefix": each} for each in refused]}
        statement = {
            "name": "refuse",
            "conditions": {"match-prefix-set": {"prefix-set": "refused"}},
            "actions": {"route-disposition": "reject-route"},
        }
        return {
            "global": {
                "config": {
                    "as": self.asn,
                    "router-id": self.address if ":" not in self.address else "198.51.100.254",
                    "port": self.port,
                },
                "apply-policy": {"config": {"import-policy-list": ["refuse"] if refused else []}},
            },
            "neighbors": [_gobgp_neighbor(each) for each in self.neighbors],
            "defined-sets": {"prefix-sets": [{"prefix-set-name": "refused"} | prefixes]},
            "policy-definitions": [{"name": "refuse", "statements": [statement]}],
        }

    async def _answers(self) -> bool:
        return bool(self._gobgp("global"))

    def _gobgp(self, *words: str) -> Any:
        text = self._call("gobgp", *words, "-j")
        with suppress(json.JSONDecodeError):
            return json.loads(text)
        return None

    async def prefixes(self) -> set[str]:
        found: set[str] = set()
        for family in ("ipv4", "ipv6"):
            table = self._gobgp("global", "rib", "-a", family)
            found |= set(table or ())
        return found

    async def attributes(self, prefix: str) -> str:
        family = "ipv6" if ":" in prefix else "ipv4"
        return self._call("gobgp", "global", "rib", "-a", family, prefix).lower()

    async def established(self) -> bool:
        return "Establ" in self._call("gobgp", "neighbor")


def _gobgp_neighbor(each: Neighbor) -> Mapping[str, Any]:
    families = [
        {
            "config": {"afi-safi-name": f"{family}-unicast"},
            "mp-graceful-restart": {"config": {"enabled": True}},
            "prefix-limit": {"config": {"max-prefixes": each.max_prefixes}},
        }
        for family in each.families
    ]
    multihop = {"enabled": bool(each.multihop), "multihop-ttl": each.multihop}
    return {
        "config": {
            "neighbor-address": each.address,
            "peer-as": each.asn,
            "auth-password": each.password,
        },
        "timers": {"config": {"connect-retry": 1, "idle-hold-time-after-reset": 1}},
        "ttl-security": {"config": {"enabled": each.gtsm, "ttl-min": 255}},
        "ebgp-multihop": {"config": multihop},
        "graceful-restart": {"config": {"enabled": True, "restart-time": 20}},
        "afi-safis": families,
    }


ROUTERS: Mapping[str, type[Router]] = {
    each.name: each for each in (BirdRouter, FrrRouter, GobgpRouter)
}
