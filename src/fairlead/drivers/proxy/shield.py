"""nftables rules by which the addresses of Services lead to HAProxy's listeners only, and to no
other process of the gateway.

An address that is local to the host leads to every process that listens on all addresses: sshd, the
kubelet. In: the listeners of HAProxy. Out: one nftables table that drops packets to an address of a
listener unless they are for a listener; ICMP passes.

- Only the first packet of a TCP connection is examined. Without it there is no connection, and a
  connection that has begun continues when its listener is removed.
- Packets of class direct are taken earlier, at the interface.
- On a gateway that is also a node, a service proxy may answer NodePorts at every local address, and
  a network plugin may answer the host ports of pods. Both rewrite the destination in the hook
  prerouting. Therefore packets are examined before that, and again in the hook input.
- An address that Services of other classes may share is examined in the hook input only: packets
  from pods to the ports of those Services are for the service proxy.

Invariant: the table is replaced as a whole, in one transaction. Follows nft(8), hooks of netfilter:
prerouting, input."""

from collections.abc import Collection, Iterable

from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.net.address import is_ipv6
from fairlead.net.nftables import Nftables

TABLE = "inet fairlead_proxy"
API_TABLE = "inet fairlead_apiserver"


def rules(keys: Collection[ProxyKey], table: str = TABLE, shared: Collection[str] = ()) -> str:
    """Return the transaction. `shared`: addresses at which Services of other classes may have
    ports. Without listeners there is no table. Pure."""
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
        # Only the first fragment has the ports. Without it the other fragments reach no process, so
        # they may pass.
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


def listing(table: str = TABLE) -> str:
    """Return the table as the kernel lists it; empty if there is none. Raise the errors of
    `Nftables.run`."""
    with Nftables() as nft:
        present = f"table {table}" in nft.run("list tables").splitlines()
        return nft.run(f"list table {table}") if present else ""


def is_present(table: str = TABLE) -> bool:
    """Return whether the table has its rules: `nft flush table` leaves an empty one. Raise the
    errors of `Nftables.run`."""
    return "jump shield" in listing(table)


def install(keys: Collection[ProxyKey], table: str = TABLE, shared: Collection[str] = ()) -> None:
    """Install the table for exactly these listeners. Raise the errors of `Nftables.run`."""
    with Nftables() as nft:
        nft.run(rules(keys, table, shared))
