"""The fixed part of the table `inet fairlead`: base chains, empty maps, and the chains that are
created when first needed.

In: the CIDRs of the cluster. Out: nft commands. Pure. Invariant: the number of chains does not grow
with the number of Services. But the kernel's check for loops takes longer with more Services:
whenever a verdict that leads to a chain is added, the kernel walks all verdict maps, which takes
some milliseconds with 10,000 Services. Therefore the cost of moving an endpoint is constant, but
the cost of changing the number of endpoints is not.

The path of a new connection is shown below. Packets of an existing connection are translated by
conntrack: the filter chains see that they are not new, and the nat chains do not see them. A flow
without an answer is new to the filter chains as long as it lasts, and to the nat chains once:

    filter prerouting, output ── source_ranges ─ drop
    nat prerouting, output ── recall4/6 (frontends with session affinity)
                    │           └─ recall4_M: to the endpoint that the client had
                    ├─ from outside: outside4/6 (frontends with policy Local) ─┐
                    └─ from pods and this node: services4/6 (all frontends) ───┴─ goto pick_N,
                                                        pick_local_N or refuse; or drop
    filter forward, output ── cluster_ips_check, for packets without translation ─ refuse, drop
    filter forward ── packets of a gateway that conntrack calls invalid ─ drop
    nat postrouting, input ─ remember4/6 (frontends with session affinity)
                    └─ remember4_T_M: records the client's endpoint
    nat postrouting ─ hairpin4/6, masquerade4/6: by the address to which the client connected

The clients of Services with session affinity are in the maps affinity4_M and affinity6_M. While
there are at most AFFINITY_MAPS such Services, each has its own number M, so packets from forged
sources to one Service fill only that Service's map. A full map accepts no further client until
others are deleted or expire; each connection of such a client may go to any endpoint. T is the time
in seconds for which a client is remembered. The number of maps is limited, and Services have no
chains of their own, because the kernel walks all chains whenever it checks for loops: with 10,000
chains the check takes five times as long.

`flows4/6` is used by no packet: it records to which endpoints the flows (UDP, SCTP) of a frontend
may lead (see `cleanup`).

No packet mark is used: whether to masquerade follows from the original destination in conntrack, so
the marks of other software stay unchanged. The rules are kube-proxy's (KEP-3866, KEP-2086);
`numgen` in a concatenated key gives every endpoint the same probability. `ct original proto-dst`
requires the protocol in the same rule (nft 1.0.6), hence one rule per protocol. Protocols are
written as numbers because a container may lack /etc/protocols."""

import hashlib
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

from fairlead.net.nfnetlink import Expression, update_ipv6_map

TABLE = "inet fairlead"
PROTOCOL_NUMBERS = {"TCP": 6, "UDP": 17, "SCTP": 132}
HOPS_LEFT = 16
"""A packet of a gateway arrives with this hop limit."""
AFFINITY_MAPS = 1024
"""Number of maps per address family for the clients of Services with session affinity. A map is
created without a size, and the kernel lets it grow to 65,535 clients; with an explicit size, the
kernel would allocate a part of the memory at once."""

_ANY_PROTOCOL = "meta l4proto { 6, 17, 132 }"
_FAMILIES = (("4", "ip", "ipv4"), ("6", "ip6", "ipv6"))

_MAPS = """\
add map {table} services{n} {{ type {addr} . inet_proto . inet_service : verdict; }}
add map {table} outside{n} {{ type {addr} . inet_proto . inet_service : verdict; }}
add map {table} masquerade{n} {{ type {addr} . inet_proto . inet_service : verdict; }}
add map {table} recall{n} {{ type {addr} . inet_proto . inet_service : verdict; }}
add map {table} remember{n} {{ type {addr} . inet_proto . inet_service : verdict; }}
add set {table} hairpin{n} {{ type {addr} . inet_proto . inet_service . {addr} . {addr}; }}
add set {table} restricted{n} {{ type {addr} . inet_proto . inet_service; }}
add set {table} allowed{n} {{ type {addr} . inet_proto . inet_service . {addr}; flags interval; }}
add set {table} cluster_ips{n} {{ type {addr}; }}
add set {table} flows{n} {{ type {addr} . inet_proto . inet_service . {addr} . inet_service; }}
add set {table} pods{n} {{ type {addr}; flags interval; }}
"""

_ENDPOINTS = (
    "add map {table} {map} {{ typeof {ip} daddr . meta l4proto . th dport . numgen "
    "random mod 2 : {ip} daddr . th dport; }}\n"
)
_CLIENTS = (
    "add map {table} {map} {{ type {addr} . inet_proto . inet_service . {addr} : {addr} . "
    "inet_service; "
    "flags dynamic, timeout; }}\n"
)
_OWNED_KINDS = (
    *("services", "outside", "masquerade", "recall", "remember"),
    *("hairpin", "restricted", "allowed", "cluster_ips", "flows"),
)


def skeleton(
    pod_cidrs: Sequence[str], service_cidrs: Sequence[str], pod_interfaces: Sequence[str] = ()
) -> str:
    """Return the commands that create the empty table. None of its chains and maps may exist
    before. `pod_interfaces`: the interfaces at which packets of the node's pods arrive, as names or
    as prefixes with a `*`; if given, `pod_cidrs` is not used."""
    lines = [f"add table {TABLE}"]
    for number, ip, name in _FAMILIES:
        lines += _MAPS.format(table=TABLE, n=number, ip=ip, addr=f"{name}_addr").splitlines()
        pods = [] if pod_interfaces else of_family(number, pod_cidrs)
        lines += [f"add element {TABLE} pods{number} {{ {', '.join(pods)} }}"] if pods else []
    for chain, declaration, rules in _chains(pod_cidrs, service_cidrs, pod_interfaces):
        lines.append(f"add chain {TABLE} {chain}{declaration}")
        lines += [f"add rule {TABLE} {chain} {rule}" for rule in rules]
    return "\n".join(lines) + "\n"


def layout(text: str) -> str:
    """Return the name of an empty chain that marks a table as created with exactly this skeleton
    and this version of the chains on demand."""
    samples = "".join(
        map(on_demand, ("pick_1", "pick_local_1", "recall4_1", "recall6_1", "remember4_1_1"))
    )
    words = text + samples + repr(raw_rule("remember6_1_1"))
    return f"layout_{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def on_demand(chain: str) -> str:
    """Return the commands that create `pick_3`, `pick_local_3`, `recall4_17` with the map
    `affinity4_17`, or `remember4_10800_17`.

    A `pick` chain has endpoint maps of its own: nft 1.0.6 accepts a rule that looks up a `typeof`
    map only in the transaction that creates the map ("conflicting protocols" otherwise)."""
    kind, _, number = chain.rpartition("_")
    kind, _, timeout_s = kind.partition("_") if kind.startswith("remember") else (kind, "", "")
    maps: list[str] = []
    rules: list[str] = []
    for n, ip, name in _FAMILIES:
        frontend = f"{ip} daddr . meta l4proto . th dport"
        match kind.removesuffix(n):
            case "pick" | "pick_local":
                endpoints = endpoint_map(chain, n)
                maps.append(_ENDPOINTS.format(table=TABLE, map=endpoints, ip=ip))
                rules.append(
                    f"{_ANY_PROTOCOL} dnat {ip} to {frontend} . numgen random mod {number} map "
                    f"@{endpoints}"
                )
            case "recall":
                clients = affinity_map(chain)
                maps.append(_CLIENTS.format(table=TABLE, map=clients, addr=f"{name}_addr"))
                rules.append(f"{_ANY_PROTOCOL} dnat {ip} to {frontend} . {ip} saddr map @{clients}")
            case "remember" if n == "4":
                rules += [
                    f"meta nfproto ipv4 meta l4proto {protocol} update @{affinity_map(chain)} "
                    f"{{ {_called('ip')} . ct original ip saddr timeout {timeout_s}s : ip daddr "
                    f". th dport }}"
                    for protocol in PROTOCOL_NUMBERS.values()
                ]
    if not rules:
        raise ValueError(f"no chain is called {chain}")
    return "".join(
        [
            *maps,
            f"add chain {TABLE} {chain}\n",
            *(f"add rule {TABLE} {chain} {rule}\n" for rule in rules),
        ]
    )


def raw_rule(chain: str) -> tuple[Expression, ...]:
    """Return the rule of `remember6_10800_17`, which libnftables cannot write; empty for other
    chains."""
    kind, _, timeout_s = chain.rpartition("_")[0].partition("_")
    return update_ipv6_map(affinity_map(chain), int(timeout_s)) if kind == "remember6" else ()


def affinity_map(chain: str) -> str:
    """Return the map of clients that a chain uses: `affinity4_17` for `recall4_17` and
    `remember4_10800_17`."""
    kind, _, number = chain.rpartition("_")
    return f"affinity{'6' if kind.startswith(('recall6', 'remember6')) else '4'}_{number}"


def endpoint_map(chain: str, number: str) -> str:
    """Return the map of family `4` or `6` in which `pick_3` (`pick_local_3`) looks up its
    endpoints."""
    kind, _, count = chain.rpartition("_")
    return f"{'local_endpoints' if kind.endswith('_local') else 'endpoints'}{number}_{count}"


def chain_of(name: str) -> str:
    """Return the chain that is created together with this endpoint map; empty for other maps."""
    kind, endpoints, count = name.partition("endpoints")
    return f"pick_{kind}{count.partition('_')[2]}" if endpoints else ""


def owned_sets(chains: Iterable[str]) -> tuple[str, ...]:
    """Return the maps and sets whose elements belong to Services, if these chains exist.
    `affinity4_17`, which packets fill, and `pods`, which the configuration fills, are not among
    them."""
    picks = [chain for chain in chains if chain.startswith("pick_")]
    return tuple(
        [f"{kind}{n}" for kind in _OWNED_KINDS for n, _, _ in _FAMILIES]
        + [endpoint_map(chain, n) for chain in picks for n, _, _ in _FAMILIES]
    )


def prerequisites(chain: str) -> tuple[str, ...]:
    """Return the chains that must exist for this one, and the chain itself last. A `remember` chain
    writes into the map that is created with the `recall` chain."""
    return (
        (affinity_map(chain).replace("affinity", "recall"), chain)
        if chain.startswith("remember")
        else (chain,)
    )


def of_family(number: str, cidrs: Iterable[str]) -> tuple[str, ...]:
    """Return the CIDRs of family `4` or `6` as nft prints them, merged, because an interval set
    accepts no overlaps."""
    networks = [ip_network(cidr.strip(), strict=False) for cidr in cidrs]
    four = [network for network in networks if isinstance(network, IPv4Network)]
    six = [network for network in networks if isinstance(network, IPv6Network)]
    merged: list[IPv4Network | IPv6Network] = (
        list(collapse_addresses(four)) if number == "4" else list(collapse_addresses(six))
    )
    return tuple(
        str(n.network_address) if n.prefixlen == n.max_prefixlen else str(n) for n in merged
    )


def _chains(
    pod_cidrs: Sequence[str], service_cidrs: Sequence[str], pod_interfaces: Sequence[str]
) -> list[tuple[str, str, list[str]]]:
    """Return (chain, declaration if it is a base chain, rules), each chain after those to which its
    rules refer."""
    both = [(n, ip, name) for n, ip, name in _FAMILIES]
    frontend = {n: f"{ip} daddr . meta l4proto . th dport" for n, ip, _ in both}
    # Like kube-proxy, masquerade connections to a ClusterIP that do not come from pods; none if
    # pods cannot be distinguished from other clients.
    if pod_interfaces:
        own_pods = [f'iifname "{name}"' for name in pod_interfaces]
        strangers = [*(f"{match} return" for match in own_pods), "masquerade fully-random"]
    else:
        own_pods = [f"{ip} saddr @pods{n}" for n, ip, _ in both]
        strangers = [
            f"{ip} saddr != @pods{n} masquerade fully-random"
            for n, ip, _ in both
            if of_family(n, pod_cidrs)
        ]
    unallocated = [
        f"{ip} daddr {cidr} drop" for n, ip, _ in both for cidr in of_family(n, service_cidrs)
    ]
    # A pod of another node that connects to a NodePort here must be treated as an external client:
    # if its connection went to a pod elsewhere, that pod would answer it directly, past the
    # translation. The packets of such a pod arrive at the interface that has the destination
    # address. Packets of our own pods do not, unless they go to the pods' gateway address, which is
    # in a pod CIDR. With `pod_interfaces` the origin is known, and these rules are not needed.
    foreign_pods = [
        f"fib daddr . iif type local {ip} daddr != @pods{n} {frontend[n]} vmap @outside{n}"
        for n, ip, _ in both
    ]
    # The `recall` chain of a frontend returns if the client is not remembered.
    recall = [f"{frontend[n]} vmap @recall{n}" for n, _, _ in both]
    return [
        # Every client accepts a reset at once. ICMP errors are rate-limited, filtered in some
        # networks, and only a hint to some clients.
        ("refuse", "", ["meta l4proto 6 reject with tcp reset", "reject"]),
        ("masquerade_always", "", ["masquerade fully-random"]),
        ("masquerade_strangers", "", strangers),
        # A packet without an ingress interface originates from this node (postrouting knows the
        # ingress interface since Linux 5.7).
        ("masquerade_own", "", ["meta iif 0 masquerade fully-random"]),
        (
            "source_ranges",
            "",
            [
                f"{frontend[n]} @restricted{n} {frontend[n]} . {ip} saddr != @allowed{n} drop"
                for n, ip, _ in both
            ],
        ),
        ("services", "", [f"{frontend[n]} vmap @services{n}" for n, _, _ in both]),
        (
            "cluster_ips_check",
            "",
            [f"{ip} daddr @cluster_ips{n} goto refuse" for n, ip, _ in both] + unallocated,
        ),
        ("remember", "", [f"{match} vmap @remember{n}" for n, match in _by_original_destination()]),
        # Source ranges are checked against the original destination, so before any translation.
        # Rejected packets are dropped without an answer.
        (
            "source_ranges_prerouting",
            " { type filter hook prerouting priority -110; }",
            ["ct state new jump source_ranges"],
        ),
        (
            "source_ranges_output",
            " { type filter hook output priority -110; }",
            ["ct state new jump source_ranges"],
        ),
        (
            "prerouting",
            " { type nat hook prerouting priority dstnat; }",
            recall
            + ([] if pod_interfaces else foreign_pods)
            + [f"{match} goto services" for match in own_pods]
            + [f"{frontend[n]} vmap @outside{n}" for n, _, _ in both]
            + ["goto services"],
        ),
        ("output", " { type nat hook output priority -100; }", [*recall, "goto services"]),
        # After all translation, because another table may serve a ClusterIP that no Service of ours
        # has. There is no such chain at the hook input, because a process may listen on a ClusterIP
        # of this node, at ports that the Service does not have.
        (
            "cluster_ips_forward",
            " { type filter hook forward priority filter; }",
            ["ct state new jump cluster_ips_check"],
        ),
        # What conntrack calls invalid is not translated. If it comes from a gateway, which is known
        # by its hop limit (bpf/hops.h), it would be routed back there.
        (
            "invalid_forward",
            " { type filter hook forward priority filter; }",
            [f"ct state invalid {hops} <= {HOPS_LEFT} drop" for hops in ("ip ttl", "ip6 hoplimit")],
        ),
        (
            "cluster_ips_output",
            " { type filter hook output priority filter; }",
            ["ct state new jump cluster_ips_check"],
        ),
        (
            "postrouting",
            " { type nat hook postrouting priority srcnat; }",
            ["ct status & dnat == 0 return"]
            + [
                f"{match} . {ip} saddr . {ip} daddr @hairpin{n} masquerade fully-random"
                for (n, match), ip in zip(
                    _by_original_destination(), ("ip",) * 3 + ("ip6",) * 3, strict=True
                )
            ]
            + [f"{match} vmap @masquerade{n}" for n, match in _by_original_destination()],
        ),
        # The endpoint of a connection is known after DNAT: just before masquerading, or at the hook
        # input for a pod in the host network. These are nat chains because they see only the first
        # packet. Retransmissions without an answer stay new to conntrack; in a filter chain they
        # would remember an endpoint again after it was deleted, and the client would never get
        # another one.
        (
            "remember_forwarded",
            " { type nat hook postrouting priority 99; }",
            ["ct status dnat jump remember"],
        ),
        (
            "remember_delivered",
            " { type nat hook input priority 99; }",
            ["ct status dnat jump remember"],
        ),
    ]


def _called(ip: str) -> str:
    """Return the key of the frontend to which the client connected, from conntrack."""
    return f"ct original {ip} daddr . meta l4proto . ct original proto-dst"


def _by_original_destination() -> list[tuple[str, str]]:
    """Return the match on the frontend to which the client connected, by family and protocol."""
    return [
        (n, f"meta nfproto {name} meta l4proto {protocol} {_called(ip)}")
        for n, ip, name in _FAMILIES
        for protocol in PROTOCOL_NUMBERS.values()
    ]
