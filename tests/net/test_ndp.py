"""Messages of neighbor discovery: built here, read by Scapy, and the reverse."""

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
from scapy.layers.l2 import Ether

from fairlead.net import ndp

MAC = bytes.fromhex("020000000001")
ADDRESS, SOURCE = "2001:db8::abcd:1234", "2001:db8::1"


def with_own_checksum(frame: bytes) -> bytes:
    """Return the frame with the checksum that Scapy computes."""
    read = Ether(frame)
    layer = read[ICMPv6ND_NA] if ICMPv6ND_NA in read else read[ICMPv6ND_NS]
    layer.cksum = None
    return bytes(read)


@pytest.mark.parametrize(
    "frame",
    [
        ndp.announcement(MAC, ADDRESS),
        ndp.probe(MAC, ADDRESS),
        ndp.solicitation(MAC, SOURCE, ADDRESS),
        ndp.solicitation(MAC, SOURCE, ADDRESS, to=b"\2\0\0\0\0\2"),
    ],
)
def test_checksums_are_right(frame: bytes) -> None:
    assert with_own_checksum(frame) == frame


def test_an_announcement_is_unsolicited_and_overrides() -> None:
    read = Ether(ndp.announcement(MAC, ADDRESS))
    assert (read.dst, read[IPv6].dst) == ("33:33:00:00:00:01", "ff02::1")
    message = read[ICMPv6ND_NA]
    assert (message.R, message.S, message.O, message.tgt) == (0, 0, 1, ADDRESS)
    assert read[ICMPv6NDOptDstLLAddr].lladdr == MAC.hex(":")


def test_a_probe_has_no_source_and_no_link_layer_address() -> None:
    read = Ether(ndp.probe(MAC, ADDRESS))
    assert (read[IPv6].src, read[IPv6].dst) == ("::", "ff02::1:ffcd:1234")
    assert read.dst == "33:33:ff:cd:12:34"
    assert read[ICMPv6ND_NS].tgt == ADDRESS
    assert ICMPv6NDOptSrcLLAddr not in read


def test_what_is_built_is_read_back() -> None:
    message = ndp.parse(ndp.announcement(MAC, ADDRESS))
    assert message == ndp.Message(136, ADDRESS, "ff02::1", ADDRESS, MAC, False, True, MAC)
    assert message is not None
    assert message.announces
    probe = ndp.parse(ndp.probe(MAC, ADDRESS))
    assert probe is not None
    assert (probe.source, probe.mac, probe.announces) == ("::", b"", False)


@given(st.integers(12, 85), st.integers(1, 255))
def test_a_changed_message_is_not_read_as_another_one(at: int, change: int) -> None:
    frame = bytearray(ndp.announcement(MAC, ADDRESS))
    frame[at] ^= change
    found = ndp.parse(bytes(frame))
    # The checksum covers everything but fields of the IP header that are not checked.
    assert found is None or found == ndp.parse(ndp.announcement(MAC, ADDRESS))


@given(st.binary(max_size=120))
def test_any_other_frame_is_none(data: bytes) -> None:
    found = ndp.parse(data)
    assert found is None or data[12:14] == b"\x86\xdd"
