"""Forged packets are well-formed: scapy, which computes checksums itself, decodes them."""

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6

from fairlead.probe.flood import PORTS, Kind, packets

SOURCES = {4: ("198.19.0.1", "203.0.113.10"), 6: ("2001:db8:bad::1", "2001:db8:f::10")}


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_checksums_are_right_and_flows_differ(version: int, kind: Kind) -> None:
    source, destination = SOURCES[version]
    upper = TCP if kind == "tcp" else UDP
    flows = set()
    for number, packet in enumerate(packets(kind, source, destination, 80, PORTS + 10)):
        flows.add(bytes(packet[12:22] if version == 4 else packet[8:42]))
        if number % 997 == 0 or number >= PORTS:
            read = (IP if version == 4 else IPv6)(bytes(packet))
            given = read[upper].chksum
            del read[upper].chksum
            assert type(read)(bytes(read))[upper].chksum == given
            assert (read.dst, read[upper].dport) == (destination, 80)
            assert kind == "udp" or read[upper].flags == "S"
    assert len(flows) == PORTS + 10


@pytest.mark.parametrize("version", [4, 6])
def test_a_forged_connection_continues_with_the_next_sequence_number(version: int) -> None:
    source, destination = SOURCES[version]
    made = [bytes(packet) for packet in packets("connection", source, destination, 80, 3)]
    read = [(IP if version == 4 else IPv6)(each) for each in made]
    assert [(each[TCP].flags, each[TCP].seq) for each in read] == [("S", 1), ("A", 2)] * 3
    assert len({(each.src, each[TCP].sport) for each in read}) == 3
    for each in read:
        given = each[TCP].chksum
        del each[TCP].chksum
        assert type(each)(bytes(each))[TCP].chksum == given
