"""A Service whose addresses are announced by the hosts of a lab, and how the network sees them.

In: a running lab with `announce`. Out: `AnnouncedShop`, the Service; who answers ARP requests for
an address; the routes of the router; checks of the flows that lived through a failure."""

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from ipaddress import IPv4Address
from typing import Any, Self

import msgspec
from tests.e2e.crowd import Crowd, Period, Shop
from tests.e2e.load import NAME, until

from fairlead.drivers.l2.records import group_of, parse_withdrawal
from fairlead.errors import Unavailable
from fairlead.kube.crds import ADDRESS_POOLS
from fairlead.kube.objects import NAMESPACES, NODES, SERVICES, ObjectKey
from fairlead.lab import namespace, process, routing
from fairlead.lab.process import Process
from fairlead.lab.rundir import ROOT
from fairlead.lab.site import ROLE_PORTS, Site
from fairlead.lab.topology import ROUTER

INTERVAL_S = 1.0
EXCLUDE_LABEL = "node.kubernetes.io/exclude-from-external-load-balancers"
AWAY_S = 6
"""After this time without an answer, the Lease of a gateway of a lab has expired."""
LISTEN_S = 0.3
"""How long answers to an ARP request are awaited: kernels answer within a millisecond."""
_ETH_P_ARP, _ETH_P_ALL = 0x0806, 3
_SO_TIMESTAMPNS = 35
_REQUEST, _REPLY = 1, 2


class AnnouncedShop(Shop):
    """A Shop whose gateways are separate hosts or nodes, and show their state at the gateways'
    port."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, interval_s=INTERVAL_S)

    async def members(self, gateway: str = "") -> dict[str, tuple[int, str]]:
        view = await self.view(gateway or self.gateways[0])
        plan = view.get("services", {}).get(f"default/{NAME}", {}).get("plan")
        listeners = (plan or {}).get("listeners") or [{"members": []}]
        return {
            member["node"]: (member["weight"], member["state"])
            for member in listeners[0]["members"]
        }

    async def view(self, gateway: str) -> dict[str, Any]:
        """Return what a gateway shows at /state; empty while it does not answer."""
        code, shown, _ = await self.site.exec(
            gateway, ["curl", "-sfm5", f"http://127.0.0.1:{ROLE_PORTS['gateway']}/state"]
        )
        found: dict[str, Any] = json.loads(shown) if code == 0 else {}
        return found

    async def api_server_away(self) -> None:
        """Wait until every gateway shows that the API server does not answer it."""

        async def away() -> bool:
            views = [await self.view(gateway) for gateway in self.gateways]
            return all(view["api_server"]["answered_s_ago"] > AWAY_S for view in views)

        await until(away, "gateways without the API server")

    async def set_policy(self, policy: str) -> None:
        """Set the external traffic policy of the Service, and wait until the gateways follow."""
        body = {"spec": {"externalTrafficPolicy": policy}}
        async with self.site.client() as client:
            await client.patch(SERVICES, ObjectKey("default", NAME), body)

        async def followed() -> bool:
            for gateway in self.gateways:
                plan = (await self.view(gateway))["services"][f"default/{NAME}"]["plan"]
                if {each["policy"] for each in plan["listeners"]} != {policy}:
                    return False
            return True

        await until(followed, f"policy {policy}")

    async def edit_pools(self, more: str) -> None:
        """Add a pool with these addresses, change it and delete it. The Service's pool stays."""
        key = ObjectKey("", "more")
        metadata = {"name": key.name}
        for avoid in (False, True):
            spec = {"addresses": [more], "avoidBuggyIPs": avoid}
            kind = {"apiVersion": "fairlead.io/v1alpha1", "kind": "AddressPool"}
            await self.site.apply([{**kind, "metadata": metadata, "spec": spec}])
        async with self.site.client() as client:
            await client.delete(ADDRESS_POOLS, key)

    async def restart(self, hosts: Iterable[str], role: str = "gateway") -> None:
        """Restart a role on one host after the other, as a rolling update does."""
        for host in hosts:
            await self.site.stop_role(host, role)
            await self.site.start_role(host, role)

    async def exclude(self, node: str, *, excluded: bool) -> None:
        """Set or remove the label that excludes a node from external load balancers."""
        body = {"metadata": {"labels": {EXCLUDE_LABEL: "" if excluded else None}}}
        async with self.site.client() as client:
            await client.patch(NODES, ObjectKey("", node), body)

    async def answers(self, caller: str, address: str) -> bool:
        """Return whether a request of this host is answered within two seconds."""
        try:
            _, writer = await self.site.connect(caller, address, 80, timeout_s=2)
        except Unavailable:
            return False
        writer.close()
        return True


@asynccontextmanager
async def withdrawing(site: Site, host: str, role: str = "gateway") -> AsyncIterator[None]:
    """Configure one host to withdraw what it announces after five seconds without the API server,
    and when its role is stopped. The role is stopped at the end."""
    path = site.directory.config_of(host)
    before = path.read_text()
    config = msgspec.yaml.decode(before)
    config["announce"] |= {"withdrawWithoutApiS": 5, "withdrawAtStop": True}
    site.directory.write_config_of(host, msgspec.yaml.encode(config).decode())
    await site.stop_role(host, role)
    await site.start_role(host, role)
    try:
        yield
    finally:
        await site.stop_role(host, role)
        path.write_text(before)


async def arp_owners(site: Site, host: str, address: str) -> set[str]:
    """Ask on the link of a host who has an IPv4 address. Return the names of the hosts that answer:
    of the owner of the hardware address in each answer."""
    found = site.topology.host(host)
    names = {port.mac: each.name for each in site.topology.hosts for port in each.ports}
    with namespace.make_socket(
        site.topology.namespace(host), socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ARP)
    ) as sock:
        sock.bind(("eth0", _ETH_P_ARP))
        sock.setblocking(False)
        sock.send(_arp_request(found.mac, found.addresses[0], address))
        owners = set()
        loop = asyncio.get_running_loop()
        with_deadline = asyncio.timeout(LISTEN_S)
        try:
            async with with_deadline:
                while True:
                    frame = await loop.sock_recv(sock, 2000)
                    operation, sender, sender_ip = struct.unpack("!H6s4s", frame[20:32])
                    if operation == _REPLY and sender_ip == IPv4Address(address).packed:
                        mac = sender.hex(":")
                        owners.add(names.get(mac, mac))
        except TimeoutError:
            return owners


async def await_one_owner(
    site: Site, host: str, addresses: Sequence[str], among: Collection[str] = ()
) -> dict[str, str]:
    """Wait until each IPv4 address has exactly one owner on the link of a host, one of `among` if
    it is given. Return the owners."""
    owners: dict[str, set[str]] = {}

    async def settled() -> bool:
        for address in addresses:
            owners[address] = await arp_owners(site, host, address)
        found = list(owners.values())
        return all(len(each) == 1 and (not among or each <= set(among)) for each in found)

    try:
        await until(settled, "one owner of each address", deadline_s=30)
    except AssertionError as late:
        raise AssertionError(f"the owners are {owners}, expected one of {among or 'any'}") from late
    return {address: next(iter(found)) for address, found in owners.items()}


async def neighbours(site: Site, host: str) -> dict[str, str]:
    """Return the hosts that a host has in its neighbour table, by address."""
    names = {port.mac: each.name for each in site.topology.hosts for port in each.ports}
    _, shown, _ = await site.exec(host, ["ip", "-json", "neigh", "show"])
    return {
        entry["dst"]: names.get(entry["lladdr"], entry["lladdr"])
        for entry in json.loads(shown or "[]")
        if "lladdr" in entry
    }


async def router_hops(site: Site) -> dict[str, int]:
    """Return the number of next hops of the router's route to each VIP."""
    view = await routing.view(site)
    return {reach.destination: len(reach.via) for reach in view.reach}


async def await_hops(site: Site, addresses: Iterable[str], hops: int) -> None:
    """Wait until the router's routes to these addresses have this number of next hops."""

    async def as_expected() -> bool:
        found = await router_hops(site)
        return all(found.get(address, 0) == hops for address in addresses)

    await until(as_expected, f"{hops} next hops to {addresses}", deadline_s=30)


class Moves:
    """What the link lan and the router show of an IPv4 address while it moves from one method of
    announcement to another. Times are those of the kernel and of `ip monitor`, by one clock."""

    def __init__(self, site: Site, address: str) -> None:
        self._site = site
        self._address = address
        self._frames: list[tuple[float, bytes]] = []

    async def __aenter__(self) -> Self:
        site = self._site
        async with site.client() as client:
            cluster = (await client.get(NAMESPACES, ObjectKey("", "kube-system"))).metadata.uid
        self._group = group_of(cluster, "gateway")
        self._log = site.directory.log("router/moves")
        self._log.unlink(missing_ok=True)
        self._monitor = site.spawn(ROUTER, ["ip", "-ts", "monitor", "route"], label="router/moves")
        self._socket = namespace.make_socket(
            site.topology.namespace(ROUTER), socket.AF_PACKET, socket.SOCK_RAW, 0
        )
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.bind(("lan", _ETH_P_ALL))
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        await self._monitor.kill()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                frame, control, _, _ = self._socket.recvmsg(2000, socket.CMSG_SPACE(16))
                seconds, nanoseconds = struct.unpack("qq", control[0][2])
                self._frames.append((seconds + nanoseconds / 1e9, frame))

    def claims(self) -> list[float]:
        """Return when hosts announced the address on the link."""
        sender = IPv4Address(self._address).packed
        return [
            at
            for at, frame in self._frames
            if frame[12:14] == _ETH_P_ARP.to_bytes(2) and frame[28:32] == sender
        ]

    def withdrawals(self) -> list[float]:
        """Return when hosts ceased to answer for the address."""
        return [
            at
            for at, frame in self._frames
            if (found := parse_withdrawal(frame, self._group)) and found.address == self._address
        ]

    def routes(self, *, deleted: bool) -> list[float]:
        """Return when the router got routes to the address, or lost them."""
        found = []
        for line in self._log.read_text().splitlines():
            stamp, _, event = line.removeprefix("[").partition("] ")
            known = event.removeprefix("Deleted ").startswith(f"{self._address} ")
            if known and event.startswith("Deleted ") == deleted:
                found.append(datetime.fromisoformat(stamp).astimezone().timestamp())
        return found


@asynccontextmanager
async def unchanged_routes(site: Site, addresses: Sequence[str] = ()) -> AsyncIterator[None]:
    """Check that no route to these addresses changes on the router inside: the kernel reports each
    change. Without `addresses`: no route to any VIP."""
    log = site.directory.log("router/monitor")
    log.unlink(missing_ok=True)
    monitor = site.spawn(ROUTER, ["ip", "monitor", "route"], label="router/monitor")
    try:
        yield
    finally:
        await monitor.kill()
    lines = log.read_text().splitlines()
    # A deletion begins with the word `Deleted`.
    destinations = [line.removeprefix("Deleted ").partition(" ")[0] for line in lines]
    changes = [
        line
        for line, to in zip(lines, destinations, strict=True)
        if (to in addresses if addresses else to.startswith(("203.0.113.", "2001:db8:f:")))
    ]
    assert not changes, changes


def check_kept(period: Period, gone: Collection[str] = ()) -> None:
    """Check that all flows lived through the death of a host: new connections may have been late,
    but none failed, and only open connections to the pods `gone` may have broken."""
    assert sum(count.answered for count in period.values()) > 10, period
    failed = {name: count.failed for name, count in period.items() if count.failed}
    assert not failed, failed
    broken = {
        name: lost
        for name, count in period.items()
        if (lost := {pod: why for pod, why in count.broken.items() if pod not in gone})
    }
    assert not broken, broken


def crowd(shop: AnnouncedShop, host: str = "client1") -> Crowd:
    """Return flows of a client of a moderate size."""
    return Crowd(shop, tcp=50, udp=0, quic=0, new_per_s=25, host=host)


def traces(name: str) -> list[str]:
    """Return what exists of a lab on this machine."""
    running: Sequence[Process] = process.find(name)
    found = [*namespace.names(f"fl-{name}-"), *(each.label for each in running)]
    return [*found, *([name] if (ROOT / name).exists() else [])]


async def during(event: Awaitable[object], *crowds: Crowd) -> list[Period]:
    """Return the counts of all crowds during an event."""
    done = asyncio.ensure_future(event)

    async def watch(each: Crowd) -> Period:
        return await each.counts_during(asyncio.wait([done]))

    periods = await asyncio.gather(*(watch(each) for each in crowds))
    await done
    return periods


def services(count: int, policy: str = "Local", **annotations: str) -> list[dict[str, Any]]:
    """Return IPv4 Services for the pods of the Shop."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": f"more{number}",
                "namespace": "default",
                "annotations": {f"fairlead.io/{key}": text for key, text in annotations.items()},
            },
            "spec": {
                "type": "LoadBalancer",
                "externalTrafficPolicy": policy,
                "selector": {"app": NAME},
                "ports": [{"port": 80, "targetPort": "http"}],
            },
        }
        for number in itertools.islice(_numbers, count)
    ]


_numbers = itertools.count(1)


def _arp_request(mac: str, source: str, target: str) -> bytes:
    hardware = bytes.fromhex(mac.replace(":", ""))
    header = b"\xff" * 6 + hardware + struct.pack("!H", _ETH_P_ARP)
    body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, _REQUEST)
    body += hardware + IPv4Address(source).packed + bytes(6) + IPv4Address(target).packed
    return header + body
