"""ARP frames: built here, read by Scapy, and the reverse; and what Linux neighbors do with them."""

from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.l2 import ARP, Ether

from fairlead.net import arp

MAC, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
ADDRESS = "192.0.2.200"


def fields(frame: bytes) -> tuple[str, int, str, str, str, str]:
    read = Ether(frame)
    head = read[ARP]
    return read.dst, head.op, head.hwsrc, head.psrc, head.hwdst, head.pdst


def test_announcements_have_the_address_as_sender_and_target() -> None:
    mac, none, all_stations = MAC.hex(":"), "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"
    request = fields(arp.announcement_request(MAC, ADDRESS))
    assert request == (all_stations, 1, mac, ADDRESS, none, ADDRESS)
    reply = fields(arp.announcement_reply(MAC, ADDRESS))
    assert reply == (all_stations, 2, mac, ADDRESS, mac, ADDRESS), "Linux ignores another target"


def test_a_probe_has_no_sender_address() -> None:
    read = fields(arp.probe(MAC, ADDRESS))
    assert read[2:] == (MAC.hex(":"), "0.0.0.0", "00:00:00:00:00:00", ADDRESS)


def test_frames_are_not_shorter_than_ethernet_allows() -> None:
    for make in (arp.probe, arp.announcement_reply, arp.announcement_request):
        assert len(make(MAC, ADDRESS)) == arp.MIN_FRAME


def test_what_is_built_is_read_back() -> None:
    frame = arp.request(MAC, "192.0.2.1", ADDRESS, to=OTHER)
    assert arp.parse(frame) == arp.Arp(1, MAC, "192.0.2.1", bytes(6), ADDRESS, MAC, OTHER)
    announced = arp.parse(arp.announcement_reply(MAC, ADDRESS))
    assert announced is not None
    assert announced.announces
    asked = arp.parse(frame)
    assert asked is not None
    assert not asked.announces


@given(st.binary(max_size=80))
def test_any_other_frame_is_none(data: bytes) -> None:
    found = arp.parse(data)
    assert found is None or data[12:14] == b"\x08\x06"
