"""ARP frames: what Scapy reads from frames that we build, and what we read from frames of Scapy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.l2 import ARP, Ether

from fairlead.net import arp

MAC, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
VIP, ASKER = "192.0.2.224", "192.0.2.1"


def fields(frame: bytes) -> tuple[str, str, int, str, str, str, str]:
    """Return what Scapy reads: destination, source, operation, sender and target."""
    read = Ether(frame)
    assert (read[ARP].hwtype, read[ARP].ptype, read[ARP].hwlen, read[ARP].plen) == (1, 0x800, 6, 4)
    return (
        read.dst,
        read.src,
        read[ARP].op,
        read[ARP].hwsrc,
        read[ARP].psrc,
        read[ARP].hwdst,
        read[ARP].pdst,
    )


def test_an_announcement_is_a_request_and_a_reply_that_every_router_accepts() -> None:
    """The target MAC address of the reply is that of the sender: Linux ignores other replies within
    a second of the last update."""
    ours, everybody, nobody = MAC.hex(":"), "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"
    request, reply = arp.announcement(MAC, VIP)
    assert fields(request) == (everybody, ours, 1, ours, VIP, nobody, VIP)
    assert fields(reply) == (everybody, ours, 2, ours, VIP, ours, VIP)
    assert len(request) == len(reply) == arp.MIN_FRAME


def test_requests_probes_and_replies() -> None:
    one, two, everybody, nobody = (
        MAC.hex(":"),
        OTHER.hex(":"),
        "ff:ff:ff:ff:ff:ff",
        "00:" * 5 + "00",
    )
    assert fields(arp.request(MAC, ASKER, VIP)) == (everybody, one, 1, one, ASKER, nobody, VIP)
    assert fields(arp.request(MAC, ASKER, VIP, to=OTHER))[0] == two
    assert fields(arp.probe(MAC, VIP)) == (everybody, one, 1, one, "0.0.0.0", nobody, VIP)
    assert fields(arp.reply(MAC, VIP, OTHER, ASKER)) == (two, one, 2, one, VIP, two, ASKER)


def test_a_frame_is_read_back() -> None:
    read = arp.parse(
        bytes(
            Ether(src=OTHER.hex(":"), dst=MAC.hex(":"))
            / ARP(op=2, hwsrc=OTHER.hex(":"), psrc=VIP, hwdst=MAC.hex(":"), pdst=ASKER)
        )
    )
    assert read == arp.Arp(arp.REPLY, OTHER, VIP, MAC, ASKER, OTHER, MAC)
    assert not read.announces
    assert all(each and each.announces for each in map(arp.parse, arp.announcement(MAC, VIP)))


@pytest.mark.parametrize(("at", "octet"), [(12, 0x86), (15, 6), (16, 0x86), (18, 8), (19, 16)])
def test_a_frame_of_another_protocol_is_not_read(at: int, octet: int) -> None:
    frame = bytearray(arp.request(MAC, ASKER, VIP))
    frame[at] = octet
    assert arp.parse(bytes(frame)) is None


@given(st.binary(max_size=64))
def test_no_frame_makes_the_parser_fail(frame: bytes) -> None:
    arp.parse(frame)
    arp.parse(arp.request(MAC, ASKER, VIP)[: len(frame)])
