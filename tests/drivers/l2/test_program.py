"""The program that answers for addresses, frame in, frame out (BPF_PROG_TEST_RUN): which requests
it answers, drops and records, and which frames it leaves alone."""

import struct
import time
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptSrcLLAddr,
    IPv6,
)
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet

from fairlead.drivers.l2 import maps as l2_maps
from fairlead.drivers.l2 import records
from fairlead.drivers.l2.maps import Maps
from fairlead.drivers.l2.records import Place, Presentation, claim_of, group_of
from fairlead.net import arp, ndp
from fairlead.net.address import pack_address
from fairlead.net.elf import read_object
from fairlead.net.program import Program
from fairlead.net.ringbuf import RingBuffer

pytestmark = pytest.mark.root

LOOPBACK, LEFT_ALONE, DROPPED, SENT = 1, 0xFFFFFFFF, 2, 7
OWN_MAC, OTHER_MAC = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
HERE = bytes(6)
"""The MAC address of the loopback interface, on which test frames arrive."""
OWNED = {4: "192.0.2.200", 6: "2001:db8::200"}
SILENT = {4: "192.0.2.201", 6: "2001:db8::201"}
UNKNOWN = {4: "192.0.2.202", 6: "2001:db8::202"}
ASKER = {4: "192.0.2.1", 6: "2001:db8::1"}
GROUP = group_of("cluster", "gateway")


class Kernel:
    """The program with its maps."""

    def __init__(self) -> None:
        self.maps = Maps.create()
        self.program: Program = self.maps.program()
        self.ring: RingBuffer = self.maps.reports()
        self.present()
        self.maps.set_states({Place(LOOPBACK, each): True for each in OWNED.values()})
        self.maps.set_states({Place(LOOPBACK, each): False for each in SILENT.values()})

    def present(self, left_s: float = 60, group: bytes = GROUP) -> None:
        deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
        self.maps.present(LOOPBACK, Presentation(group, OWN_MAC, "gw-1", "ready", deadline_ns))

    def run(self, frame: Packet | bytes, context: bytes = b"") -> tuple[int, bytes]:
        result = self.program.test_run(bytes(frame), context=context)
        return result.verdict, result.packet

    def claims(self) -> list[tuple[str, bytes, str, bool]]:
        return [
            (claim.place.address, claim.mac, claim.kind, claim.yielded)
            for claim in map(claim_of, self.ring.read(100))
        ]

    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.maps.counters().items() if count}

    def close(self) -> None:
        self.ring.close()
        self.program.close()
        self.maps.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.close()


@cache
def shared_kernel() -> Kernel:
    """Return one program for all examples of a property."""
    return Kernel()


def solicitation(target: str, *, source: str = ASKER[6], unicast: bool = False) -> Packet:
    probe = source == "::"
    group = ndp.solicited_node(target)
    to = "00:00:00:00:00:00" if unicast else ndp.multicast_mac(group).hex(":")
    message = ICMPv6ND_NS(tgt=target)
    head = IPv6(src=source, dst=target if unicast else group, hlim=255)
    frame = Ether(src=OTHER_MAC.hex(":"), dst=to) / head / message
    return frame if probe else frame / ICMPv6NDOptSrcLLAddr(lladdr=OTHER_MAC.hex(":"))


@pytest.mark.parametrize("to", [arp.BROADCAST, HERE])
@pytest.mark.parametrize("source", [ASKER[4], "0.0.0.0"])
def test_an_arp_request_or_probe_for_an_owned_address_is_answered(
    kernel: Kernel, to: bytes, source: str
) -> None:
    verdict, frame = kernel.run(arp.request(OTHER_MAC, source, OWNED[4], to=to))
    assert verdict == SENT
    assert arp.parse(frame) == arp.Arp(
        arp.REPLY, OWN_MAC, OWNED[4], OTHER_MAC, source, OWN_MAC, OTHER_MAC
    )
    assert kernel.counted() == {"arp_answered": 1}


def test_requests_for_a_silent_address_are_dropped(kernel: Kernel) -> None:
    assert kernel.run(arp.request(OTHER_MAC, ASKER[4], SILENT[4]))[0] == DROPPED
    assert kernel.run(solicitation(SILENT[6]))[0] == DROPPED
    assert kernel.run(solicitation(SILENT[6], unicast=True))[0] == DROPPED
    assert kernel.counted() == {"silenced": 3}
    assert kernel.claims() == []


@pytest.mark.parametrize("unicast", [False, True])
def test_a_solicitation_of_an_owned_address_is_answered(kernel: Kernel, unicast: bool) -> None:
    verdict, frame = kernel.run(solicitation(OWNED[6], unicast=unicast))
    assert verdict == SENT
    assert ndp.parse(frame) == ndp.Message(
        ndp.ADVERTISEMENT, OWNED[6], ASKER[6], OWNED[6], OWN_MAC, True, True, OWN_MAC
    )
    assert Ether(frame).dst == OTHER_MAC.hex(":")
    again = Ether(frame)
    del again[ICMPv6ND_NA].cksum
    assert bytes(again) == frame, "Scapy computes the same checksum"


def test_duplicate_address_detection_is_answered_to_all_nodes(kernel: Kernel) -> None:
    verdict, frame = kernel.run(solicitation(OWNED[6], source="::"))
    assert verdict == SENT
    assert Ether(frame).dst == "33:33:00:00:00:01"
    assert ndp.parse(frame) == ndp.Message(
        ndp.ADVERTISEMENT, OWNED[6], "ff02::1", OWNED[6], OWN_MAC, False, True, OWN_MAC
    )


def test_requests_for_other_addresses_and_answers_are_left_alone(kernel: Kernel) -> None:
    for frame in (
        arp.request(OTHER_MAC, ASKER[4], UNKNOWN[4]),
        arp.probe(OTHER_MAC, UNKNOWN[4]),
        arp.announcement_request(OTHER_MAC, UNKNOWN[4]),
        bytes(solicitation(UNKNOWN[6])),
        ndp.announcement(OTHER_MAC, UNKNOWN[6]),
        bytes(solicitation("::ffff:" + OWNED[4])),
    ):
        assert kernel.run(frame) == (LEFT_ALONE, frame)
    assert kernel.counted() == {}


def test_frames_for_other_stations_or_vlans_are_left_alone(kernel: Kernel) -> None:
    request = Ether(arp.request(OTHER_MAC, ASKER[4], OWNED[4]))
    tagged = Ether(src=request.src, dst=request.dst) / Dot1Q(vlan=7) / request[ARP]
    flooded = arp.request(OTHER_MAC, ASKER[4], OWNED[4], to=OTHER_MAC)
    for frame in (bytes(tagged), flooded):
        assert kernel.run(frame) == (LEFT_ALONE, frame)


def test_claims_of_other_stations_are_reported_by_kind(kernel: Kernel) -> None:
    address4, address6 = OWNED[4], OWNED[6]
    cases: list[tuple[bytes, str, str, int]] = [
        (arp.announcement_request(OTHER_MAC, address4), address4, "announced", DROPPED),
        (arp.announcement_reply(b"\2\0\0\0\0\3", address4), address4, "announced", LEFT_ALONE),
        (arp.request(b"\2\0\0\0\0\4", address4, UNKNOWN[4]), address4, "used", LEFT_ALONE),
        (ndp.announcement(OTHER_MAC, address6), address6, "announced", LEFT_ALONE),
        (ndp.solicitation(b"\2\0\0\0\0\3", address6, UNKNOWN[6]), address6, "used", LEFT_ALONE),
        (arp.probe(OTHER_MAC, SILENT[4]), SILENT[4], "probed", DROPPED),
        (ndp.probe(OTHER_MAC, SILENT[6]), SILENT[6], "probed", DROPPED),
    ]
    for frame, address, kind, verdict in cases:
        found: list[tuple[str, bytes, str, bool]] = []
        while not found:  # another claim of the address a moment ago delays the report
            assert kernel.run(frame)[0] == verdict
            found = kernel.claims()
        assert [(each[0], each[2]) for each in found] == [(address, kind)]
    solicited = Ether(ndp.announcement(OTHER_MAC, SILENT[6]))
    solicited[ICMPv6ND_NA].S = 1
    solicited[ICMPv6ND_NA].cksum = None
    found = []
    while not found:
        kernel.run(solicited)
        found = kernel.claims()
    assert found[0][2] == "used"


def test_own_frames_and_impossible_stations_are_no_claims(kernel: Kernel) -> None:
    kernel.run(arp.announcement_request(OWN_MAC, OWNED[4]))
    kernel.run(arp.announcement_request(arp.BROADCAST, OWNED[4]))
    kernel.run(arp.announcement_request(bytes(6), OWNED[4]))
    assert kernel.claims() == []


def test_the_same_claim_is_reported_rarely(kernel: Kernel) -> None:
    for _ in range(50):
        kernel.run(arp.announcement_request(OTHER_MAC, OWNED[4]))
    assert 1 <= len(kernel.claims()) < 50
    assert kernel.counted()["claimed"] == 50


def test_an_owned_address_yields_to_a_claim_only_after_the_deadline(kernel: Kernel) -> None:
    kernel.run(arp.announcement_request(OTHER_MAC, OWNED[4]))
    assert kernel.maps.states()[Place(LOOPBACK, OWNED[4])]
    kernel.present(left_s=-1)
    request = arp.request(OTHER_MAC, ASKER[4], OWNED[4])
    assert kernel.run(request)[0] == SENT, "it still answers"
    kernel.run(arp.request(b"\2\0\0\0\0\5", OWNED[4], UNKNOWN[4]))
    assert kernel.maps.states()[Place(LOOPBACK, OWNED[4])], "only an announcement is a claim"
    kernel.claims()
    kernel.run(arp.announcement_request(OTHER_MAC, OWNED[4]))
    assert kernel.claims() == [(OWNED[4], OTHER_MAC, "announced", True)]
    assert kernel.run(request)[0] == DROPPED
    kernel.run(ndp.announcement(OTHER_MAC, OWNED[6]))
    assert kernel.run(solicitation(OWNED[6]))[0] == DROPPED
    assert kernel.counted()["yielded"] == 2


def test_a_hello_request_of_the_same_group_is_answered(kernel: Kernel) -> None:
    request = records.hello_request(OTHER_MAC, GROUP, 77)
    verdict, frame = kernel.run(request)
    hello = records.parse_hello(frame, GROUP)
    assert verdict == SENT
    assert len(frame) == len(request), "an answer is not longer than its request"
    assert hello is not None
    assert hello._replace(remaining_ms=0) == records.Hello(OWN_MAC, "gw-1", "ready", 0, 77)
    assert 0 < hello.remaining_ms <= 60_000
    assert Ether(frame).dst == OTHER_MAC.hex(":")
    kernel.present(left_s=-5)
    stale = records.parse_hello(kernel.run(request)[1], GROUP)
    assert stale is not None
    assert stale.remaining_ms == 0


def test_only_the_owner_of_an_address_answers_a_request_for_its_owner(kernel: Kernel) -> None:
    for address in OWNED.values():
        verdict, frame = kernel.run(records.hello_request(OTHER_MAC, GROUP, 77, owner_of=address))
        hello = records.parse_hello(frame, GROUP)
        assert verdict == SENT
        assert hello is not None
        assert (hello.name, hello.address) == ("gw-1", address)
    for address in (*SILENT.values(), *UNKNOWN.values()):
        request = records.hello_request(OTHER_MAC, GROUP, 77, owner_of=address)
        assert kernel.run(request)[0] == DROPPED


def test_hello_frames_of_other_groups_and_answers_are_left_alone(kernel: Kernel) -> None:
    request = records.hello_request(OTHER_MAC, GROUP, 77)
    for frame in (
        records.hello_request(OTHER_MAC, group_of("other", "gateway"), 1),
        records.hello_request(OTHER_MAC, group_of("cluster", "node"), 1),
        records.hello_request(arp.BROADCAST, GROUP, 1),
        request[:-1],
        request[:14] + b"\0" + request[15:],
        kernel.run(request)[1],
    ):
        own = HERE + frame[6:]
        assert kernel.run(own)[0] == LEFT_ALONE


def test_without_a_presentation_every_frame_is_left_alone(kernel: Kernel) -> None:
    kernel.maps.withdraw(LOOPBACK)
    for frame in (
        arp.request(OTHER_MAC, ASKER[4], OWNED[4]),
        bytes(solicitation(OWNED[6])),
        records.hello_request(OTHER_MAC, GROUP, 1),
    ):
        assert kernel.run(frame) == (LEFT_ALONE, frame)


def test_invalid_neighbor_discovery_is_left_alone(kernel: Kernel) -> None:
    valid = bytes(solicitation(OWNED[6]))
    checksum = bytearray(valid)
    checksum[56] ^= 1
    forwarded = bytearray(valid)
    forwarded[21] = 254
    code = Ether(valid)
    code[ICMPv6ND_NS].code = 1
    code[ICMPv6ND_NS].cksum = None
    empty_option = Ether(valid)
    empty_option[ICMPv6NDOptSrcLLAddr].len = 0
    empty_option[ICMPv6ND_NS].cksum = None
    with_address = solicitation(OWNED[6], source="::") / ICMPv6NDOptSrcLLAddr(
        lladdr=OTHER_MAC.hex(":")
    )
    for frame in (checksum, forwarded, code, empty_option, with_address):
        assert kernel.run(bytes(frame))[0] == LEFT_ALONE
    assert kernel.claims() == []


def test_a_solicitation_with_further_options_is_answered(kernel: Kernel) -> None:
    nonce = ICMPv6NDOptDstLLAddr(type=14, lladdr="01:02:03:04:05:06")
    verdict, frame = kernel.run(solicitation(OWNED[6], source="::") / nonce)
    assert verdict == SENT
    assert ndp.parse(frame) is not None


@given(data=st.data())
def test_any_frame_is_answered_correctly_or_not_changed(data: st.DataObject) -> None:
    """Change octets of valid frames and cut them: the program answers only what the parser of the
    house, or an ARP request, admits."""
    frames = [
        arp.request(OTHER_MAC, ASKER[4], OWNED[4]),
        arp.announcement_reply(OTHER_MAC, OWNED[4]),
        bytes(solicitation(OWNED[6])),
        bytes(solicitation(OWNED[6], source="::")),
        ndp.announcement(OTHER_MAC, OWNED[6]),
        records.hello_request(OTHER_MAC, GROUP, 1),
    ]
    frame = bytearray(data.draw(st.sampled_from(frames)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(12, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(min(54, len(frame)), len(frame)))]  # no shorter test run
    verdict, after = shared_kernel().run(bytes(frame))
    if verdict in (LEFT_ALONE, DROPPED):
        assert after == bytes(frame)
        return
    assert verdict == SENT
    sent = arp.parse(after)
    if sent is not None:
        assert (sent.operation, sent.sender, sent.sender_mac) == (arp.REPLY, OWNED[4], OWN_MAC)
    elif (message := ndp.parse(after)) is not None:
        assert (message.type, message.target, message.mac) == (
            ndp.ADVERTISEMENT,
            OWNED[6],
            OWN_MAC,
        )
    else:
        assert records.parse_hello(after, GROUP) is not None


def test_the_records_have_the_sizes_of_the_program() -> None:
    specs = read_object(l2_maps.OBJECT).maps
    assert specs["entries"].key_size == records.ENTRY_KEY.size
    assert specs["entries"].value_size == records.ENTRY.size
    assert specs["claims"].value_size == records.CLAIM.size
    assert specs["hosts"].value_size == records.HOST.size
    assert specs["neighbor_events"].max_entries == len(records.EVENTS)


def test_a_key_is_read_back() -> None:
    for address in (*OWNED.values(), "::"):
        place = Place(3, address)
        assert records.place_of(place.key()) == place
        assert place.key() == struct.pack("=I", 3) + pack_address(address)
