"""The program that answers ARP requests, with real packets: a host and its router, connected by a
cable."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.l2 import ARP, Dot1Q, Ether
from tests.drivers.inside import run_inside

from fairlead.drivers.announce import maps as announce_maps
from fairlead.drivers.announce import responder as responder_module
from fairlead.drivers.announce.gratuitous import Gratuitous
from fairlead.drivers.announce.maps import Maps
from fairlead.drivers.announce.responder import (
    PRIORITY,
    Responder,
    directory_of,
    filter_name,
    remove_responder,
)
from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace
from fairlead.net import arp, bpffs, tc
from fairlead.net.elf import read_object
from fairlead.net.packet_socket import PacketSocket

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-announce"
ROUTER = f"{NAME}-router"
PINS = bpffs.ROOT / NAME
OTHER_PINS = bpffs.ROOT / f"{NAME}-other"
DEADLINE_S = 30
HOST, ASKER = "192.0.2.10", "192.0.2.1"
VIP, OTHERS, UNKNOWN = "192.0.2.224", "192.0.2.225", "192.0.2.226"
MAC, ROUTER_MAC, FOREIGN_MAC = b"\2\0\0\0\0\x0a", b"\2\0\0\0\0\1", b"\2\0\0\0\0\x99"
LEFT_ALONE, DROPPED, REDIRECTED = 0xFFFFFFFF, 2, 7
LOOPBACK = 1


def run_program(*words: str) -> str:
    return subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout


def ip(name: str, *words: str) -> str:
    return run_program("ip", "-n", name, *words)


def start_responding() -> "subprocess.Popen[str]":
    """Start a process that owns VIP."""
    script = Path(__file__).with_name("responding.py")
    words = [sys.executable, str(script), NAME, str(PINS), VIP]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.fixture(name="site", scope="module")
def made_site() -> Iterator[None]:
    """A host with all addresses of the tests on lo, as IPVS and external IPs have them: its kernel
    would answer for each of them."""
    try:
        for each in (NAME, ROUTER):
            namespace.create(each)
        ip(NAME, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", ROUTER)
        for name, mac, address in ((NAME, MAC, HOST), (ROUTER, ROUTER_MAC, ASKER)):
            ip(name, "link", "set", "eth0", "address", mac.hex(":"))
            ip(name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip(name, "link", "set", device, "up")
        for each in (VIP, OTHERS, UNKNOWN):
            ip(NAME, "address", "add", f"{each}/32", "dev", "lo")
        yield
    finally:
        for each in (NAME, ROUTER):
            namespace.delete(each)


@pytest.fixture(name="run")
def cleaned(site: None) -> Iterator[Callable[[Callable[[], Coroutine[Any, Any, None]]], None]]:
    yield partial(run_inside, NAME, deadline_s=DEADLINE_S)
    run_inside(NAME, partial(remove_quietly, PINS, OTHER_PINS))
    for each in (PINS, OTHER_PINS):
        bpffs.remove(each)


async def remove_quietly(*pin_paths: Path) -> None:
    for each in pin_paths:
        with suppress(Refused):
            await remove_responder(each)


class Router:
    """Asks for addresses from the router's end of the cable."""

    def __init__(self) -> None:
        with namespace.inside(ROUTER):
            self._socket = PacketSocket("eth0", arp.ETHERTYPE)

    def close(self) -> None:
        self._socket.close()

    def send(self, *frames: bytes) -> None:
        for each in frames:
            self._socket.send(each)

    def ask(self, *requests: bytes) -> list[tuple[str, bytes]]:
        """Send the requests. Return the address and the MAC address of each answer.

        The last request, for the address of the host itself, shows that all answers have
        arrived."""
        self.send(*requests, arp.request(ROUTER_MAC, ASKER, HOST))
        found: list[tuple[str, bytes]] = []
        while (frame := self._socket.receive(DEADLINE_S)) is not None:
            answer = arp.parse(frame)
            assert answer
            if answer.operation != arp.REPLY or answer.destination == arp.BROADCAST:
                continue  # a request of its own, or an announcement
            if answer.sender == HOST:
                return found
            assert (answer.target_mac, answer.destination) == (ROUTER_MAC, ROUTER_MAC)
            found.append((answer.sender, answer.sender_mac))
        raise AssertionError("the host does not answer for its own address")

    def answers(self, address: str) -> list[bytes]:
        """Return the MAC addresses in the answers to one request."""
        return [mac for _, mac in self.ask(arp.request(ROUTER_MAC, ASKER, address))]

    def answer_watch(self, mac: bytes, address: str) -> bool:
        """Answer the next question of a gateway that watches this MAC address. Return whether one
        had arrived."""
        while (frame := self._socket.receive()) is not None:
            found = arp.parse(frame)
            if found and (found.destination, found.target) == (mac, address):
                self.send(arp.reply(mac, address, found.sender_mac, found.sender))
                return True
        return False

    def received(self) -> Sequence[arp.Arp]:
        """Return the announcements that have arrived."""
        frames = iter(self._socket.receive, None)
        return [each for each in map(arp.parse, frames) if each and each.announces]


@pytest.fixture(name="router")
def made_router(site: None) -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def responder(pin_path: Path = PINS, *, lifetime_s: float = 60.0) -> Responder:
    return Responder(lambda: ("eth0",), pin_path, lifetime_s)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_only_the_owner_answers(run: Any, router: Router) -> None:
    async def scenario() -> None:
        assert router.answers(OTHERS) == [MAC], "the host's stack answers for addresses on lo"
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        before = made.counts()
        requests = [arp.request(ROUTER_MAC, ASKER, VIP)] * 20
        assert router.ask(*requests) == [(VIP, MAC)] * 20
        assert router.ask(arp.probe(ROUTER_MAC, VIP)) == [(VIP, MAC)]
        assert router.answers(OTHERS) == []
        assert router.ask(arp.probe(ROUTER_MAC, OTHERS)) == []
        assert router.answers(UNKNOWN) == [MAC]
        counted = made.counts()
        assert {name: counted[name] - before[name] for name in counted} == {
            "answered": 21,
            "dropped": 2,
        }
        age_s = made.last_request("eth0")
        assert age_s is not None
        assert age_s < DEADLINE_S
        watch = arp.request(ROUTER_MAC, arp.UNSPECIFIED, VIP, to=MAC)
        assert router.ask(watch) == [(VIP, MAC)]
        assert made.counts() == counted, "another gateway is no client"
        await made.set({OTHERS: "eth0"}, {VIP})
        assert (router.answers(OTHERS), router.answers(VIP)) == ([MAC], [])
        await made.set({}, ())
        assert router.answers(VIP) == [MAC]
        assert made.counts()["answered"] == counted["answered"] + 1
        await made.close()

    run(scenario)


def test_an_address_that_is_owned_on_another_interface_is_not_answered(
    run: Any, router: Router
) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth1"}, ())
        assert router.answers(VIP) == []
        await made.close()

    run(scenario)


def test_past_its_deadline_an_entry_has_no_effect(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder(lifetime_s=0.0)
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [MAC])
        made.refresh()
        assert router.answers(VIP) == [MAC]
        assert made.counts() == {"answered": 0, "dropped": 0}
        await made.close()
        successor = responder()
        await successor.open()
        successor.refresh()
        assert router.answers(OTHERS) == [MAC], "entries of a previous process are not prolonged"
        await successor.close()

    run(scenario)


def test_the_program_goes_on_without_the_process_and_a_restart_adopts_it(
    run: Any, router: Router
) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        await made.close()
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
        successor = responder()
        await successor.open()
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
        assert successor.counts()["answered"] == 2
        assert len(await tc.filters(filter_name(PINS))) == 1
        with pytest.raises(Refused, match="another process uses the pins"):
            await responder().open()
        await successor.close()

    run(scenario)


def test_the_program_goes_on_after_a_kill(run: Any, router: Router) -> None:
    async def scenario() -> None:
        process = start_responding()
        assert process.stdout
        assert process.stdout.readline() == "set\n"
        with pytest.raises(Refused, match="another process uses the pins"):
            await remove_responder(PINS)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        process.stdout.close()
        assert router.answers(VIP) == [MAC]
        successor = responder()
        await successor.open()
        assert successor.counts() == {"answered": 1, "dropped": 0}
        await successor.close()

    run(scenario)


def test_a_removed_program_is_attached_again(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        following = asyncio.create_task(made.run())
        await asyncio.sleep(0.1)
        run_program("tc", "-n", NAME, "qdisc", "del", "dev", "eth0", "clsact")
        assert router.answers(OTHERS) == [MAC]
        await until(lambda: router.answers(OTHERS) == [])
        following.cancel()
        await made.close()

    run(scenario)


def test_a_changed_mac_address_is_followed(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, ())
        following = asyncio.create_task(made.run())
        changed = b"\2\0\0\0\7\7"
        ip(NAME, "link", "set", "eth0", "address", changed.hex(":"))
        await until(lambda: router.answers(VIP) == [changed])
        ip(NAME, "link", "set", "eth0", "address", MAC.hex(":"))
        await until(lambda: router.answers(VIP) == [MAC])
        following.cancel()
        await made.close()

    run(scenario)


def test_stations_that_use_an_owned_address_are_named(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        router.send(*arp.announcement(MAC, VIP), *arp.announcement(FOREIGN_MAC, OTHERS))
        router.ask()
        assert made.claims() == []
        for _ in range(50):
            router.send(*arp.announcement(FOREIGN_MAC, VIP))
        assert router.ask() == [], "an announcement is no request"
        (claim,) = made.claims()
        assert (claim.address, claim.mac) == (VIP, FOREIGN_MAC.hex(":"))
        await made.set({}, {VIP})
        assert made.claims() == []
        await made.close()

    run(scenario)


def test_the_new_owner_of_each_of_many_addresses_is_known(run: Any, router: Router) -> None:
    """The former owner goes on answering for an address until it has heard the new one."""
    addresses = [f"198.18.{number // 250}.{number % 250}" for number in range(1500)]

    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set(dict.fromkeys(addresses, "eth0"), ())
        for at in range(0, len(addresses), 250):  # the kernel queues up to a thousand frames
            some = addresses[at : at + 250]
            router.ask(*(arp.announcement_request(FOREIGN_MAC, each) for each in some))
        assert {each.address for each in made.claims()} == {*addresses}
        await made.close()

    run(scenario)


def test_removal_leaves_what_belongs_to_others(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        made, other = responder(), responder(OTHER_PINS)
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        with made._opened.program() as program:
            (index,) = made._attached
            await tc.attach(index, program.descriptor, name="foreign", priority=PRIORITY + 1)
        await made.close()
        await other.open()
        await other.close()
        (PINS / "other").mkdir()
        foreign = (await tc.filters("foreign"))[0]
        monkeypatch.setattr(responder_module, "RELEASED_S", 0.0)
        with pytest.raises(Refused, match="in another network namespace"):
            await remove_responder(PINS)
        monkeypatch.undo()
        await tc.detach(foreign)
        assert await remove_responder(PINS) == [
            f"program that answers for addresses at interface {index}",
            f"pins in {directory_of(PINS)}",
        ]
        assert (PINS / "other").exists()
        assert directory_of(OTHER_PINS).exists()
        assert not directory_of(PINS).exists()
        assert router.answers(VIP) == [MAC]
        assert await remove_responder(PINS) == []

    run(scenario)


def test_the_kernel_of_a_router_learns_an_announced_address(run: Any, router: Router) -> None:
    async def scenario() -> None:
        ip(
            ROUTER,
            "neigh",
            "replace",
            VIP,
            "lladdr",
            "02:00:00:00:00:77",
            "dev",
            "eth0",
            "nud",
            "stale",
        )
        made = Gratuitous()
        sending = asyncio.create_task(made.run())
        made.announce(VIP, "eth0")
        made.announce(OTHERS, "eth9")  # there is no such interface
        await until(lambda: MAC.hex(":") in ip(ROUTER, "neigh", "show", VIP))
        found = list(router.received())
        while len(found) < 6:
            await asyncio.sleep(0.01)
            found += router.received()
        assert [each.operation for each in found[:6]] == [arp.REQUEST, arp.REPLY] * 3
        assert {each.sender for each in found} == {VIP}
        made.withdraw(VIP)
        sending.cancel()
        made.close()

    run(scenario)


def test_a_packet_socket_names_what_is_missing(run: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(Unavailable, match="opening a packet socket on eth9: No such device"):
            PacketSocket("eth9")

    run(scenario)


@pytest.fixture(name="maps", scope="module")
def made_maps() -> Iterator[Maps]:
    """The maps with an owned address on the loopback interface, on which test frames arrive."""
    made = Maps.open(directory_of(PINS.with_name(f"{NAME}-frames")))
    made.set_interfaces({LOOPBACK: MAC})
    far = announce_maps.now_ns() + 10**12
    made.set_entries({VIP: announce_maps.Entry(far, LOOPBACK), OTHERS: announce_maps.Entry(far, 0)})
    yield made
    made.close()
    bpffs.remove(PINS.with_name(f"{NAME}-frames"))


REQUEST = arp.request(ROUTER_MAC, ASKER, VIP)


def with_octet(at: int, octet: int, frame: bytes = REQUEST) -> bytes:
    changed = bytearray(frame)
    changed[at] = octet
    return bytes(changed)


def tagged(vlan: int) -> bytes:
    request = Ether(REQUEST)
    return bytes(Ether(src=request.src, dst=request.dst) / Dot1Q(vlan=vlan) / request[ARP])


@pytest.mark.parametrize(
    ("frame", "verdict"),
    [
        pytest.param(REQUEST, REDIRECTED, id="request"),
        pytest.param(arp.request(ROUTER_MAC, ASKER, VIP, to=bytes(6)), REDIRECTED, id="unicast"),
        pytest.param(arp.request(ROUTER_MAC, ASKER, OTHERS), DROPPED, id="of another host"),
        pytest.param(arp.announcement(ROUTER_MAC, VIP)[0], DROPPED, id="announcement"),
        pytest.param(arp.announcement(ROUTER_MAC, VIP)[1], LEFT_ALONE, id="gratuitous reply"),
        pytest.param(arp.request(ROUTER_MAC, ASKER, UNKNOWN), LEFT_ALONE, id="unknown"),
        pytest.param(arp.request(ROUTER_MAC, ASKER, VIP, to=MAC), LEFT_ALONE, id="other station"),
        pytest.param(arp.reply(ROUTER_MAC, ASKER, bytes(6), VIP), LEFT_ALONE, id="reply"),
        pytest.param(tagged(7), LEFT_ALONE, id="VLAN"),
        pytest.param(tagged(0), LEFT_ALONE, id="priority tag"),
        pytest.param(REQUEST[:41], LEFT_ALONE, id="short"),
        pytest.param(REQUEST[:42], REDIRECTED, id="no padding"),
        pytest.param(with_octet(15, 6), LEFT_ALONE, id="no Ethernet"),
        pytest.param(with_octet(16, 0x86), LEFT_ALONE, id="no IPv4"),
        pytest.param(with_octet(18, 8), LEFT_ALONE, id="length of MAC addresses"),
        pytest.param(with_octet(19, 16), LEFT_ALONE, id="length of addresses"),
        pytest.param(with_octet(21, 3), LEFT_ALONE, id="RARP"),
        pytest.param(with_octet(22, 1), LEFT_ALONE, id="sender is a group"),
        pytest.param(with_octet(12, 0x86), LEFT_ALONE, id="no ARP"),
    ],
)
def test_only_valid_requests_are_answered_or_dropped(
    maps: Maps, frame: bytes, verdict: int
) -> None:
    with maps.program() as program:
        result = program.test_run(frame)
    assert result.verdict == verdict
    if verdict == REDIRECTED:
        read = arp.parse(result.packet)
        assert read == arp.Arp(arp.REPLY, MAC, VIP, ROUTER_MAC, ASKER, MAC, ROUTER_MAC)
        assert len(result.packet) == len(frame)
    else:
        assert result.packet == frame


def test_a_frame_at_an_interface_without_a_record_is_left_alone(maps: Maps) -> None:
    maps.set_interfaces({})
    with maps.program() as program:
        assert program.test_run(REQUEST).verdict == LEFT_ALONE
    maps.set_interfaces({LOOPBACK: MAC})


def test_the_records_have_the_sizes_of_the_program() -> None:
    specs = read_object(announce_maps.OBJECT).maps
    assert specs["entries"].value_size == announce_maps.ENTRY.size
    assert specs["interfaces"].value_size == announce_maps.INTERFACE.size
    assert specs["claims"].value_size == announce_maps.CLAIM.size
    assert specs["outcomes"].max_entries == len(announce_maps.OUTCOMES)
    assert struct.calcsize("=I12s") == specs["entries"].key_size
