"""What else runs on a gateway is not to be reached by the addresses of Services.

An address that is the host's own leads to everything that listens on all addresses there: a shell's daemon, a kubelet. In: the
listeners of HAProxy. Out: one nftables table that drops what comes to one of their addresses and is for none of them; ICMP
passes. Of TCP only the packet that begins a connection is looked at: where it is dropped there is none, and what has begun goes
on when its listener goes. Packets of class direct are taken before, at the interface.
Invariant: the table is replaced as a whole, in one transaction. Follows nft(8), kernel hooks of netfilter: input.
"""

from collections.abc import Collection

from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.net.nftables import Nftables

TABLE = "inet fairlead_proxy"
API_TABLE = "inet fairlead_apiserver"


def rules(keys: Collection[ProxyKey], table: str = TABLE) -> str:
    """The transaction. Without listeners there is no table. Pure."""
    if not keys:
        return f"table {table} {{ }}\ndelete table {table}\n"
    lines = [f"table {table} {{ }}", f"delete table {table}", f"table {table} {{"]
    chain = ["  chain input {", "    type filter hook input priority filter - 10; policy accept;"]
    chain += ["    tcp flags & (syn | ack) != syn accept"]
    for family, kind, is_ipv6 in (("ip", "ipv4_addr", False), ("ip6", "ipv6_addr", True)):
        own = sorted(key for key in keys if (":" in key.address) == is_ipv6)
        if not own:
            continue
        addresses = ", ".join(dict.fromkeys(key.address for key in own))
        listeners = ", ".join(f"{key.address} . {key.port}" for key in own)
        lines.append(f"  set {family}_addresses {{ type {kind}; elements = {{ {addresses} }} }}")
        lines.append(f"  set {family}_listeners {{ type {kind} . inet_service; elements = {{ {listeners} }} }}")
        chain.append(f"    {family} daddr . tcp dport @{family}_listeners accept")
        chain.append(f"    {family} daddr @{family}_addresses meta l4proto != {{ icmp, ipv6-icmp }} drop")
    return "\n".join([*lines, *chain, "  }", "}", ""])


def shown(table: str = TABLE) -> str:
    """The table as the kernel has it; nothing if there is none. Raises as `Nftables.run`."""
    family, name = table.split()
    with Nftables() as nft:
        if all(each["table"]["name"] != name for each in nft.listing(f"list tables {family}")):
            return ""
        return nft.run(f"list table {table}")


def put(keys: Collection[ProxyKey], table: str = TABLE) -> None:
    """Have exactly these. Raises as `Nftables.run`."""
    with Nftables() as nft:
        nft.run(rules(keys, table))
