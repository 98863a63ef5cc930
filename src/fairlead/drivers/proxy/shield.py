"""What else runs on a gateway is not to be reached by the addresses of Services.

An address that is the host's own leads to everything that listens on all addresses there: a shell's
daemon, a kubelet. In: the listeners of HAProxy. Out: one nftables table that drops what comes to
one of their addresses and is for none of them; ICMP passes. Of TCP only the packet that begins a
connection is looked at: where it is dropped there is none, and what has begun goes on when its
listener goes. Packets of class direct are taken before, at the interface. Where a gateway is a node
too, a service proxy may answer NodePorts at each address that is the host's own, and a network
plugin the ports of pods: by a new destination, given in the hook prerouting. So packets are looked
at before that, and as they come in. An address that Services of other classes may share is looked
at only as packets come in: what comes from pods for their ports is the service proxy's to answer.
Invariant: the table is replaced as a whole, in one transaction. Follows nft(8), hooks of netfilter:
prerouting, input."""

from collections.abc import Collection, Iterable

from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.net.address import is_ipv6
from fairlead.net.nftables import Nftables

TABLE = "inet fairlead_proxy"
API_TABLE = "inet fairlead_apiserver"


def rules(keys: Collection[ProxyKey], table: str = TABLE, shared: Collection[str] = ()) -> str:
    """The transaction. `shared`: addresses at which others may have ports too. Without listeners
    there is no table. Pure."""
    if not keys:
        return f"table {table} {{ }}\ndelete table {table}\n"
    sets, passing, shield = [], [], ["tcp flags & (syn | ack) != syn accept"]
    for family, kind, ipv6 in (("ip", "ipv4_addr", False), ("ip6", "ipv6_addr", True)):
        own = sorted(key for key in keys if is_ipv6(key.address) == ipv6)
        if not own:
            continue
        addresses = list(dict.fromkeys(key.address for key in own))
        listeners = ", ".join(f"{key.address} . {key.port}" for key in own)
        sets.append(
            f"set {family}_addresses {{ type {kind}; elements = {{ {', '.join(addresses)} }} }}"
        )
        sets.append(
            f"set {family}_listeners {{ type {kind} . inet_service; elements = {{ {listeners} }} }}"
        )
        if with_others := [address for address in addresses if address in shared]:
            passing.append(f"{family} daddr {{ {', '.join(with_others)} }} accept")
        # Only the first of the fragments has the ports; without it the rest is for nobody.
        passing.append(f"{'frag frag-off' if ipv6 else 'ip frag-off & 0x1fff'} != 0 accept")
        shield.append(f"{family} daddr . tcp dport @{family}_listeners accept")
        shield.append(
            f"{family} daddr @{family}_addresses meta l4proto != {{ icmp, ipv6-icmp }} drop"
        )
    lines = [
        f"table {table} {{ }}",
        f"delete table {table}",
        f"table {table} {{",
        *sets,
        *_chain("shield", shield),
        *_chain(
            "prerouting",
            ["type filter hook prerouting priority dstnat - 10;", *passing, "jump shield"],
        ),
        *_chain("input", ["type filter hook input priority filter - 10;", "jump shield"]),
        "}",
    ]
    return "\n".join([*lines, ""])


def _chain(name: str, lines: Iterable[str]) -> list[str]:
    return [f"chain {name} {{", *lines, "}"]


def shown(table: str = TABLE) -> str:
    """The table as the kernel has it; nothing if there is none. Raises as `Nftables.run`."""
    with Nftables() as nft:
        there = f"table {table}" in nft.run("list tables").splitlines()
        return nft.run(f"list table {table}") if there else ""


def put(keys: Collection[ProxyKey], table: str = TABLE, shared: Collection[str] = ()) -> None:
    """Have exactly these. Raises as `Nftables.run`."""
    with Nftables() as nft:
        nft.run(rules(keys, table, shared))
