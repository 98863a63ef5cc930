"""Rules by netlink of our own, beside libnftables, in a network namespace of their own."""

import os
from collections.abc import Iterator

import pytest

from fairlead.errors import Conflict
from fairlead.lab import namespace
from fairlead.net.nfnetlink import Nfnetlink, remember_ipv6
from fairlead.net.nftables import Nftables

pytestmark = pytest.mark.root

TABLE = """\
add table inet t
add map inet t m { type ipv6_addr . inet_proto . inet_service . ipv6_addr : ipv6_addr . inet_service; \
size 100; flags dynamic, timeout; }
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


def test_a_chain_comes_with_its_rule_or_not_at_all(both: tuple[Nftables, Nfnetlink]) -> None:
    nft, netlink = both
    nft.run(TABLE)
    for _ in range(2):
        with pytest.raises(Conflict, match="No such file or directory"):
            netlink.add_chain("t", "c", remember_ipv6("elsewhere", 60))
        with pytest.raises(Conflict, match="No such file or directory"):
            netlink.add_chain("nowhere", "c", remember_ipv6("m", 60))
    assert "chain c" not in nft.run("list table inet t")
    netlink.add_chain("t", "c", remember_ipv6("m", 60))
    listed = nft.run("list table inet t")
    assert "update @m { ct original ip6 daddr . meta l4proto . ct original proto-dst . ct original ip6 saddr" in listed
    assert "ct original ip6 saddr timeout 1m : ip6 daddr . th dport }" in listed


def test_the_generation_grows_with_each_transaction(both: tuple[Nftables, Nfnetlink]) -> None:
    nft, netlink = both
    first = netlink.generation()
    assert netlink.generation() == first
    nft.run(TABLE)
    assert netlink.generation() == first + 1
    nft.run("list ruleset")
    netlink.add_chain("t", "c", remember_ipv6("m", 60))
    assert netlink.generation() == first + 2
    with pytest.raises(Conflict):
        netlink.add_chain("nowhere", "c", remember_ipv6("m", 60))
    assert netlink.generation() == first + 2
