"""Two gateways on a bridge, without an API server: one is cut off, and returns. Both answer for all
addresses meanwhile; afterwards each address has one owner. IPv4 and IPv6 each alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.drivers.announce.test_packets import DEADLINE_S, ip

from fairlead.lab import namespace
from fairlead.net import arp, bpffs, ndp
from fairlead.net.packet_socket import PacketSocket

pytestmark = pytest.mark.root

ID = f"flt-{os.getpid()}-split"
BRIDGE, HOSTS = f"{ID}-bridge", {name: f"{ID}-{name}" for name in ("gw1", "gw2")}
MACS = {"gw1": "02:00:00:00:00:01", "gw2": "02:00:00:00:00:02"}
ASKER, ASKER6 = "192.0.2.1", "fe80::1"
ADDRESSES = [f"192.0.2.{number}" for number in range(224, 232)]
ADDRESSES6 = [f"2001:db8:1::{number:x}" for number in range(224, 232)]


def start(name: str, addresses: Sequence[str]) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("announcing.py")
    words = [HOSTS[name], str(bpffs.ROOT / HOSTS[name]), name, json.dumps(MACS), *addresses]
    return subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(params=[ADDRESSES, ADDRESSES6], ids=["IPv4", "IPv6"])
def addresses(request: pytest.FixtureRequest) -> Iterator[Sequence[str]]:
    """Start both gateways. Return the addresses that they announce."""
    running: list[subprocess.Popen[str]] = []
    try:
        for each in (BRIDGE, *HOSTS.values()):
            namespace.create(each)
        ip(BRIDGE, "link", "add", "lan", "type", "bridge")
        ip(BRIDGE, "address", "add", f"{ASKER}/24", "dev", "lan")
        ip(BRIDGE, "link", "set", "lan", "up")
        for number, (name, host) in enumerate(HOSTS.items(), 10):
            with namespace.inside(host):
                # Its kernel sends frames of its own accord.
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
            ip(BRIDGE, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip(BRIDGE, "link", "set", name, "master", "lan", "up")
            ip(host, "link", "set", "eth0", "address", MACS[name], "up")
            ip(host, "address", "add", f"192.0.2.{number}/24", "dev", "eth0")
        running += [start(name, request.param) for name in HOSTS]
        for process in running:
            assert process.stdout
            assert process.stdout.readline() == "applied\n"
        yield request.param
    finally:
        for process in running:
            process.kill()
            process.wait(DEADLINE_S)
            if process.stdout:
                process.stdout.close()
        for name in (BRIDGE, *HOSTS.values()):
            namespace.delete(name)
        for host in HOSTS.values():
            bpffs.remove(bpffs.ROOT / host)


def listening(addresses: Sequence[str]) -> PacketSocket:
    """Open a socket of the bridge for the messages about these addresses."""
    with namespace.inside(BRIDGE):
        return PacketSocket("lan", (ndp if addresses == ADDRESSES6 else arp).ETHERTYPE)


def read(frame: bytes) -> tuple[str, str, bool] | None:
    """Return the address, the gateway that has it, and whether it announces it."""
    names = {mac: name for name, mac in MACS.items()}
    if (answer := arp.parse(frame)) and answer.operation == arp.REPLY:
        return answer.sender, names[answer.sender_mac.hex(":")], answer.announces
    if (message := ndp.parse(frame)) and message.type == ndp.ADVERTISEMENT:
        return message.target, names[message.mac.hex(":")], message.announces
    return None


def owners(addresses: Sequence[str]) -> dict[str, set[str]]:
    """Return the gateways that answer for each address."""
    found: dict[str, set[str]] = {each: set() for each in addresses}
    with listening(addresses) as made:
        made.reserve(1 << 20)
        for each in addresses:
            made.send(
                ndp.solicitation(made.mac, ASKER6, each)
                if addresses == ADDRESSES6
                else arp.request(made.mac, ASKER, each)
            )
        while (frame := made.receive(0.05)) is not None:
            if (seen := read(frame)) and not seen[2]:
                found[seen[0]].add(seen[1])
    return found


def until(
    condition: Callable[[dict[str, set[str]]], bool], addresses: Sequence[str]
) -> dict[str, set[str]]:
    end_s = time.monotonic() + DEADLINE_S
    while not condition(found := owners(addresses)):
        assert time.monotonic() < end_s, found
    return found


def one(found: dict[str, set[str]]) -> bool:
    return all(len(each) == 1 for each in found.values())


def test_a_cut_gateway_loses_its_addresses_and_after_its_return_each_has_one_owner(
    addresses: Sequence[str],
) -> None:
    before = until(one, addresses)
    assert {name for each in before.values() for name in each} == {*HOSTS}
    # The other one takes over only from a gateway that has answered it.
    time.sleep(1)
    ip(BRIDGE, "link", "set", "gw1", "nomaster")
    until(lambda found: all(each == {"gw2"} for each in found.values()), addresses)
    # It takes the addresses of the other one over as well, and nobody hears it.
    time.sleep(1)
    with listening(addresses) as made:
        ip(BRIDGE, "link", "set", "gw1", "master", "lan")
        until(lambda found: any(len(each) > 1 for each in found.values()), addresses)
        after = until(one, addresses)
        seen = [each for each in map(read, iter(made.receive, None)) if each and each[2]]
        told = {address: name for address, name, _ in seen}
    assert {each: next(iter(after[each])) for each in told} == told
    assert told.keys() >= {each for each in addresses if before[each] == {"gw1"}}
