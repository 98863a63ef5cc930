"""Two gateways on a bridge, without an API server: one is cut off, and returns. Both answer for all
addresses meanwhile; afterwards each address has one owner."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.drivers.announce.test_packets import DEADLINE_S, ip

from fairlead.lab import namespace
from fairlead.net import arp, bpffs
from fairlead.net.packet_socket import PacketSocket

pytestmark = pytest.mark.root

ID = f"flt-{os.getpid()}-split"
BRIDGE, HOSTS = f"{ID}-bridge", {name: f"{ID}-{name}" for name in ("gw1", "gw2")}
MACS = {"gw1": "02:00:00:00:00:01", "gw2": "02:00:00:00:00:02"}
ASKER = "192.0.2.1"
ADDRESSES = [f"192.0.2.{number}" for number in range(224, 232)]


def start(name: str) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("announcing.py")
    words = [HOSTS[name], str(bpffs.ROOT / HOSTS[name]), name, json.dumps(MACS), *ADDRESSES]
    return subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def gateways() -> Iterator[None]:
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
        running += [start(name) for name in HOSTS]
        for process in running:
            assert process.stdout
            assert process.stdout.readline() == "applied\n"
        yield
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


def owners() -> dict[str, set[str]]:
    """Return the gateways that answer for each address."""
    names = {mac: name for name, mac in MACS.items()}
    found: dict[str, set[str]] = {each: set() for each in ADDRESSES}
    with namespace.inside(BRIDGE):
        made = PacketSocket("lan", arp.ETHERTYPE)
    with made:
        made.reserve(1 << 20)
        for each in ADDRESSES:
            made.send(arp.request(made.mac, ASKER, each))
        while (frame := made.receive(0.05)) is not None:
            answer = arp.parse(frame)
            if answer and answer.operation == arp.REPLY and not answer.announces:
                found[answer.sender].add(names[answer.sender_mac.hex(":")])
    return found


def until(condition: Callable[[dict[str, set[str]]], bool]) -> dict[str, set[str]]:
    end_s = time.monotonic() + DEADLINE_S
    while not condition(found := owners()):
        assert time.monotonic() < end_s, found
    return found


def one(found: dict[str, set[str]]) -> bool:
    return all(len(each) == 1 for each in found.values())


def test_a_cut_gateway_loses_its_addresses_and_after_its_return_each_has_one_owner(
    gateways: None,
) -> None:
    before = until(one)
    assert {name for each in before.values() for name in each} == {*HOSTS}
    # The other one takes over only from a gateway that has answered it.
    time.sleep(1)
    ip(BRIDGE, "link", "set", "gw1", "nomaster")
    until(lambda found: all(each == {"gw2"} for each in found.values()))
    # It takes the addresses of the other one over as well, and nobody hears it.
    time.sleep(1)
    with namespace.inside(BRIDGE):
        made = PacketSocket("lan", arp.ETHERTYPE)
    with made:
        ip(BRIDGE, "link", "set", "gw1", "master", "lan")
        until(lambda found: any(len(each) > 1 for each in found.values()))
        after = until(one)
        frames = map(arp.parse, iter(made.receive, None))
        told = {each.sender: each.sender_mac.hex(":") for each in frames if each and each.announces}
    assert {each: MACS[next(iter(after[each]))] for each in told} == told
    assert told.keys() >= {each for each in ADDRESSES if before[each] == {"gw1"}}
