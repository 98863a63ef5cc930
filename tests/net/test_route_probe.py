"""The packets that show whether a router has a route."""

import pytest

from fairlead.net import route_probe
from fairlead.net.route_probe import MAGIC, Heard, answer, parse, probe

MAC, ROUTER = bytes.fromhex("020000000001"), bytes.fromhex("0200000000fe")
OTHER = bytes.fromhex("020000000002")
V4 = ("198.51.100.1", "203.0.113.7", "198.51.100.254")
V6 = ("2001:db8:1::1", "2001:db8:f::7", "2001:db8:1::254")
EACH = pytest.mark.parametrize(("source", "address", "by"), [V4, V6], ids=["IPv4", "IPv6"])


def icmp(source: str, to: str, type_: int, code: int, quoted: bytes) -> bytes:
    """Return an ICMP error that quotes a packet, as routers send it, without its checksum."""
    protocol = 58 if ":" in to else 1
    body = bytes([type_, code, 0, 0]) + bytes(4) + quoted
    return route_probe._frame(ROUTER, MAC, source, to, protocol, 64, body)


def run_filter(frame: bytes) -> bool:
    """Run the socket filter on a frame. A load beyond its end drops it, as in the kernel."""
    steps = list(route_probe._STEP.iter_unpack(route_probe.filter_program()))
    sizes = {route_probe._BYTE: 1, route_probe._HALF: 2, route_probe._WORD: 4}
    at = value = 0
    while True:
        code, yes, no, operand = steps[at]
        if code == route_probe._RETURN:
            return bool(operand)
        if (size := sizes.get(code)) is not None:
            if operand + size > len(frame):
                return False
            value = int.from_bytes(frame[operand : operand + size], "big")
            at += 1
        else:
            at += 1 + (yes if value == operand else no)


@EACH
def test_a_probe_is_recognized_and_passes_the_filter(source: str, address: str, by: str) -> None:
    sent = probe(MAC, ROUTER, source, address)
    assert run_filter(sent.frame)
    heard = parse(sent.frame + bytes(4))  # padding of short frames
    assert heard is not None
    assert heard[:6] == ("probe", source, address, sent.mark, "", "")
    assert heard.mac == MAC
    assert sent.mark != probe(MAC, ROUTER, source, address).mark


@EACH
def test_the_answer_of_another_announcer_is_told_from_that_of_any_other_host(
    source: str, address: str, by: str
) -> None:
    sent = probe(MAC, ROUTER, source, address)
    heard = parse(sent.frame)
    assert heard is not None
    told = answer(OTHER, by, heard)
    assert run_filter(told)
    assert parse(told) == Heard("announced", source, address, sent.mark, by, "", OTHER)
    plain = parse(told.replace(MAGIC, bytes(4), 1))
    assert plain is not None
    assert (plain.kind, plain.text) == ("other", "port unreachable")


@pytest.mark.parametrize("quoted", [8, 1000])
@EACH
def test_errors_of_routers_are_recognized_even_if_they_quote_eight_bytes(
    source: str, address: str, by: str, quoted: int
) -> None:
    sent = probe(MAC, ROUTER, source, address)
    header = 40 if ":" in address else 20
    part = sent.frame[14 : 14 + header + quoted]
    cases = (
        {(1, 0): "refused", (1, 3): "refused", (3, 0): "other"}
        if ":" in address
        else {(3, 0): "refused", (3, 1): "refused", (3, 13): "refused", (11, 0): "other"}
    )
    for (type_, code), kind in cases.items():
        frame = icmp(by, source, type_, code, part)
        assert run_filter(frame)
        heard = parse(frame)
        assert heard is not None
        assert (heard.kind, heard.mark, heard.by) == (kind, sent.mark, by)
        assert not heard.forwarded
        at = 14 + (7 if ":" in address else 8)
        later = parse(frame[:at] + bytes([63]) + frame[at + 1 :])
        assert later == heard._replace(forwarded=True)
        assert heard.text


@EACH
def test_other_packets_are_dropped_by_the_filter(source: str, address: str, by: str) -> None:
    sent = probe(MAC, ROUTER, source, address)
    echo = icmp(by, source, 128 if ":" in address else 8, 0, sent.frame[14:])
    redirect = icmp(by, source, 137 if ":" in address else 5, 0, sent.frame[14:])
    without_magic = sent.frame.replace(MAGIC, b"none")
    arp = sent.frame[:12] + b"\x08\x06" + sent.frame[14:]
    for frame in (echo, redirect, without_magic, arp, sent.frame[:30], b""):
        assert not run_filter(frame)
    for frame in (echo, redirect, without_magic, sent.frame[:30], b""):
        assert parse(frame) is None
