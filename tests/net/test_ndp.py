"""Messages of neighbor discovery: what Scapy reads from frames that we build, and what we read from
frames of Scapy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptSrcLLAddr,
    ICMPv6NDOptUnknown,
    IPv6,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from fairlead.net import ndp

MAC, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
VIP, ASKER = "2001:db8:1::abcd:1234", "2001:db8:1::1"
GROUP, GROUP_MAC = "ff02::1:ffcd:1234", "33:33:ff:cd:12:34"


def fields(frame: bytes) -> tuple[str, str, str, str, int]:
    """Return what Scapy reads: MAC and IP addresses, and the hop limit. Fail unless the checksum is
    that of Scapy."""
    read = Ether(frame)
    layer = read[ICMPv6ND_NA] if ICMPv6ND_NA in read else read[ICMPv6ND_NS]
    assert layer.tgt == VIP
    layer.cksum = None
    assert bytes(read) == frame
    return read.dst, read.src, read[IPv6].dst, read[IPv6].src, read[IPv6].hlim


def test_an_announcement_is_unsolicited_and_overrides() -> None:
    frame = ndp.announcement(MAC, VIP)
    assert fields(frame) == ("33:33:00:00:00:01", MAC.hex(":"), "ff02::1", VIP, 255)
    message = Ether(frame)[ICMPv6ND_NA]
    assert (message.R, message.S, message.O) == (0, 0, 1)
    assert message[ICMPv6NDOptDstLLAddr].lladdr == MAC.hex(":")


def test_an_answer_is_solicited_and_overrides() -> None:
    frame = ndp.advertisement(MAC, VIP, OTHER, ASKER)
    assert fields(frame) == (OTHER.hex(":"), MAC.hex(":"), ASKER, VIP, 255)
    message = Ether(frame)[ICMPv6ND_NA]
    assert (message.R, message.S, message.O) == (0, 1, 1)
    assert message[ICMPv6NDOptDstLLAddr].lladdr == MAC.hex(":")


def test_solicitations_and_probes() -> None:
    asked = ndp.solicitation(MAC, ASKER, VIP)
    assert fields(asked) == (GROUP_MAC, MAC.hex(":"), GROUP, ASKER, 255)
    assert Ether(asked)[ICMPv6NDOptSrcLLAddr].lladdr == MAC.hex(":")
    unicast = ndp.solicitation(MAC, ASKER, VIP, to=OTHER)
    assert fields(unicast) == (OTHER.hex(":"), MAC.hex(":"), VIP, ASKER, 255)
    probe = ndp.probe(MAC, VIP)
    assert fields(probe) == (GROUP_MAC, MAC.hex(":"), GROUP, "::", 255)
    assert ICMPv6NDOptSrcLLAddr not in Ether(probe)
    question = ndp.question(MAC, ASKER, VIP, OTHER)
    assert fields(question) == (OTHER.hex(":"), MAC.hex(":"), VIP, ASKER, 255)
    assert ICMPv6NDOptSrcLLAddr not in Ether(question)


def test_the_link_local_address_of_a_mac_address() -> None:
    assert ndp.link_local(bytes.fromhex("00155d012345")) == "fe80::215:5dff:fe01:2345"


def test_what_is_built_is_read_back() -> None:
    group, everybody = ndp.multicast_mac(GROUP), ndp.multicast_mac("ff02::1")
    assert list(
        map(
            ndp.parse,
            (
                ndp.announcement(MAC, VIP),
                ndp.advertisement(MAC, VIP, OTHER, ASKER),
                ndp.solicitation(MAC, ASKER, VIP),
                ndp.probe(MAC, VIP),
            ),
        )
    ) == [
        ndp.Message(136, VIP, "ff02::1", VIP, MAC, False, True, MAC, everybody),
        ndp.Message(136, VIP, ASKER, VIP, MAC, True, True, MAC, OTHER),
        ndp.Message(135, ASKER, GROUP, VIP, MAC, False, False, MAC, group),
        ndp.Message(135, "::", GROUP, VIP, b"", False, False, MAC, group),
    ]
    announced, answered = ndp.announcement(MAC, VIP), ndp.advertisement(MAC, VIP, OTHER, ASKER)
    assert [each and each.announces for each in map(ndp.parse, (announced, answered))] == [
        True,
        False,
    ]


def read(*layers: Packet, source: str = ASKER, destination: str = GROUP, hops: int = 255) -> object:
    """Return what we read from a packet of Scapy."""
    packet: Packet = Ether(src=MAC.hex(":")) / IPv6(src=source, dst=destination, hlim=hops)
    for each in layers:
        packet = packet / each
    return ndp.parse(bytes(packet))


def nonce(length: int = 1) -> Packet:
    """Return an option that the program does not know (RFC 3971, 5.3)."""
    return ICMPv6NDOptUnknown(type=14, len=length, data=b"nonce!")


def test_only_valid_messages_are_read() -> None:
    asks, link = ICMPv6ND_NS(tgt=VIP), ICMPv6NDOptSrcLLAddr(lladdr=MAC.hex(":"))
    assert read(asks)
    assert read(asks, nonce(), link) == ndp.Message(
        135, ASKER, GROUP, VIP, MAC, False, False, MAC, ndp.multicast_mac(GROUP)
    )
    assert read(asks, nonce(), source="::")
    assert read(ICMPv6ND_NA(tgt=VIP, S=1), destination=ASKER)
    for invalid in (
        read(asks, hops=254),
        read(ICMPv6ND_NS(tgt=VIP, cksum=1)),
        read(ICMPv6ND_NS(tgt=VIP, code=1)),
        read(ICMPv6ND_NS(tgt="ff02::1")),
        read(asks, nonce(0)),
        read(asks, nonce(2)),
        read(asks, link, source="::"),
        read(asks, source="::", destination=VIP),
        read(ICMPv6ND_NA(tgt=VIP, S=1), destination="ff02::1"),
        read(ICMPv6EchoRequest(data=b"16 bytes of data")),
    ):
        assert invalid is None


@given(st.integers(12, 85), st.integers(1, 255))
def test_a_changed_message_is_not_read_as_another_one(at: int, change: int) -> None:
    frame = bytearray(ndp.announcement(MAC, VIP))
    frame[at] ^= change
    # The checksum covers everything but fields of the IP header that do not matter.
    assert ndp.parse(bytes(frame)) in (None, ndp.parse(ndp.announcement(MAC, VIP)))


@pytest.mark.parametrize("frame", [ndp.probe(MAC, VIP), ndp.solicitation(MAC, ASKER, VIP)])
def test_a_frame_that_is_cut_off_is_not_read(frame: bytes) -> None:
    assert ndp.parse(frame + bytes(6)) == ndp.parse(frame), "padding"
    assert [ndp.parse(frame[:length]) for length in range(len(frame))] == [None] * len(frame)


@given(st.binary(max_size=120))
def test_no_frame_makes_the_parser_fail(frame: bytes) -> None:
    ndp.parse(frame)
