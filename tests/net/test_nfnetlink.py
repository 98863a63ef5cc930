"""nftables over netlink beside libnftables, in a separate network namespace."""

import os
import struct
import time
from collections.abc import Iterator

import pytest

from fairlead.errors import Conflict
from fairlead.lab import namespace
from fairlead.net.nfelements import DROP, GOTO, element, verdict
from fairlead.net.nfnetlink import ElementChange, Nfnetlink, update_ipv6_map
from fairlead.net.nftables import Nftables

pytestmark = pytest.mark.root

DEADLINE_S = 10.0
TABLE = """\
add table inet t
add map inet t m { type ipv6_addr . inet_proto . inet_service . ipv6_addr \
: ipv6_addr . inet_service; size 100; flags dynamic, timeout; }
"""


@pytest.fixture
def both() -> Iterator[tuple[Nftables, Nfnetlink]]:
    name = f"flt-{os.getpid()}-nfnl"
    namespace.create(name)
    try:
        with namespace.inside(name):
            nft, netlink = Nftables(), Nfnetlink()
        yield nft, netlink
        nft.close()
        netlink.close()
    finally:
        namespace.delete(name)


def test_a_chain_and_its_rule_are_created_in_one_transaction(
    both: tuple[Nftables, Nfnetlink],
) -> None:
    nft, netlink = both
    nft.run(TABLE)
    for _ in range(2):
        with pytest.raises(Conflict, match="No such file or directory"):
            netlink.add_chain("t", "c", update_ipv6_map("elsewhere", 60))
        with pytest.raises(Conflict, match="No such file or directory"):
            netlink.add_chain("nowhere", "c", update_ipv6_map("m", 60))
    assert "chain c" not in nft.run("list table inet t")
    netlink.add_chain("t", "c", update_ipv6_map("m", 60))
    listed = nft.run("list table inet t")
    assert (
        "update @m { ct original ip6 daddr . meta l4proto . ct original proto-dst . ct original "
        "ip6 saddr"
    ) in listed
    assert "ct original ip6 saddr timeout 1m : ip6 daddr . th dport }" in listed


def test_the_generation_grows_with_each_transaction(both: tuple[Nftables, Nfnetlink]) -> None:
    nft, netlink = both
    first = netlink.generation()
    assert netlink.generation() == first
    nft.run(TABLE)
    assert netlink.generation() == first + 1
    nft.run("list ruleset")
    netlink.add_chain("t", "c", update_ipv6_map("m", 60))
    assert netlink.generation() == first + 2
    with pytest.raises(Conflict):
        netlink.add_chain("nowhere", "c", update_ipv6_map("m", 60))
    assert netlink.generation() == first + 2


def await_elements(netlink: Nfnetlink, number: int) -> set[bytes]:
    """Return the keys of the set, when it has this number of elements, or after some seconds.

    The kernel grows the hash table of a set in the background, and a dump meanwhile leaves elements
    out (nft_rhash_walk in net/netfilter/nft_set_hash.c goes on when the walk is interrupted).
    """
    until_s = time.monotonic() + DEADLINE_S
    while True:
        found = {each.key for each in netlink.elements("t", "noted")}
        if len(found) == number or time.monotonic() > until_s:
            return found
        time.sleep(0.01)


def test_elements_are_changed_in_one_transaction(both: tuple[Nftables, Nfnetlink]) -> None:
    nft, netlink = both
    nft.run(
        "add table inet t; add chain inet t c; add map inet t verdicts { type ipv4_addr : "
        "verdict; }"
    )
    nft.run("add set inet t noted { type ipv4_addr; }")
    ports = [struct.pack(">I", number) for number in range(3000)]
    first = netlink.generation()
    noted = ElementChange("add", "noted", map(element, ports))
    netlink.change(
        "t",
        [noted, ElementChange("add", "verdicts", [element(ports[80], b"", verdict(GOTO, "c"))])],
    )
    assert netlink.generation() == first + 1
    assert await_elements(netlink, len(ports)) == set(ports)
    (only,) = netlink.elements("t", "verdicts")
    assert (only.key, only.verdict, only.chain) == (ports[80], GOTO, "c")
    gone = ElementChange("delete", "noted", map(element, ports[:10]))
    for wrong in (
        ElementChange("delete", "noted", [element(struct.pack(">I", 4000))]),
        ElementChange("add", "elsewhere", [element(ports[0])]),
        ElementChange("add", "verdicts", [element(ports[81], b"", verdict(GOTO, "nowhere"))]),
    ):
        with pytest.raises(
            Conflict, match=f"{wrong.verb} element inet t {wrong.set}: No such file"
        ):
            netlink.change("t", [ElementChange("delete", "noted", map(element, ports[:10])), wrong])
    with pytest.raises(Conflict, match="verdicts"):
        netlink.change(
            "t", [ElementChange("add", "verdicts", [element(ports[80], b"", verdict(DROP))])]
        )
    assert await_elements(netlink, 3000) == set(ports)
    netlink.change("t", [gone])
    assert await_elements(netlink, 2990) == set(ports[10:])
    assert netlink.elements("t", "elsewhere") == []
    netlink.change("t", [])
