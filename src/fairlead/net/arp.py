"""Build and parse ARP frames for IPv4 over Ethernet. Pure.

In: MAC addresses as 6 bytes, IPv4 addresses as text. Out: Ethernet frames, or an `Arp` value.
Follows RFC 826, and RFC 5227 for probes and announcements."""

import socket
import struct
from typing import NamedTuple

ETHERTYPE = 0x0806
REQUEST, REPLY = 1, 2
BROADCAST = b"\xff" * 6
UNSPECIFIED = "0.0.0.0"
_NO_MAC = bytes(6)
_FRAME = struct.Struct("!6s6sHHHBBH6s4s6s4s")
_ETHERNET, _IPV4 = 1, 0x0800
MIN_FRAME = 60
"""The length of the shortest Ethernet frame, without its check sequence."""


class Arp(NamedTuple):
    """The content of an ARP frame, and the addresses of its Ethernet header."""

    operation: int
    sender_mac: bytes
    sender: str
    target_mac: bytes
    target: str
    source: bytes = _NO_MAC
    destination: bytes = BROADCAST

    @property
    def announces(self) -> bool:
        """Whether the sender announces its address (gratuitous ARP)."""
        return self.sender == self.target


def announcement(mac: bytes, address: str) -> tuple[bytes, bytes]:
    """Return the frames that announce the address at this MAC address: as a request, and as a reply
    for neighbors that ignore requests."""
    return announcement_request(mac, address), announcement_reply(mac, address)


def announcement_request(mac: bytes, address: str) -> bytes:
    """Return an ARP announcement as a request (RFC 5227, 2.3), with which neighbors update the
    entries that they have (gratuitous ARP)."""
    return _frame(BROADCAST, mac, REQUEST, address, _NO_MAC, address)


def announcement_reply(mac: bytes, address: str) -> bytes:
    """Return an ARP announcement as a reply.

    The target MAC address is that of the sender: Linux ignores other values within a second of the
    last update of its entry (locktime)."""
    return _frame(BROADCAST, mac, REPLY, address, mac, address)


def probe(mac: bytes, address: str) -> bytes:
    """Return an ARP probe, which asks whether any station uses the address, and changes no entry of
    a neighbor (RFC 5227, 2.1.1)."""
    return _frame(BROADCAST, mac, REQUEST, UNSPECIFIED, _NO_MAC, address)


def reply(mac: bytes, address: str, to: bytes, target: str) -> bytes:
    """Return the answer that `address` is at this MAC address, to the station with the MAC address
    `to` and the address `target`."""
    return _frame(to, mac, REPLY, address, to, target)


def request(mac: bytes, source: str, address: str, *, to: bytes = BROADCAST) -> bytes:
    """Return an ARP request for the MAC address of `address`."""
    return _frame(to, mac, REQUEST, source, _NO_MAC, address)


def parse(frame: bytes) -> Arp | None:
    """Return the content of a frame; None if it is not ARP for IPv4 over Ethernet."""
    if len(frame) < _FRAME.size:
        return None
    (
        destination,
        source,
        ethertype,
        hardware,
        protocol,
        hardware_bytes,
        protocol_bytes,
        operation,
        sender_mac,
        sender,
        target_mac,
        target,
    ) = _FRAME.unpack_from(frame)
    kind = (ethertype, hardware, protocol, hardware_bytes, protocol_bytes)
    if kind != (ETHERTYPE, _ETHERNET, _IPV4, 6, 4):
        return None
    return Arp(
        operation,
        sender_mac,
        socket.inet_ntoa(sender),
        target_mac,
        socket.inet_ntoa(target),
        source,
        destination,
    )


def _frame(
    to: bytes, mac: bytes, operation: int, sender: str, target_mac: bytes, target: str
) -> bytes:
    return _FRAME.pack(
        to,
        mac,
        ETHERTYPE,
        _ETHERNET,
        _IPV4,
        6,
        4,
        operation,
        mac,
        socket.inet_aton(sender),
        target_mac,
        socket.inet_aton(target),
    ).ljust(MIN_FRAME, b"\0")
