"""The fixed part of the table `inet fairlead`: base chains, empty maps, and the chains made when
first needed.

In: the CIDRs of the cluster. Out: nft commands. Pure. Invariant: the number of chains does not grow
with the number of Services. What does is the kernel's own check for loops: whenever a verdict that
leads to a chain is added it goes through all verdict maps, some milliseconds at 10,000 Services. So
it costs the same everywhere to move an endpoint, but not to change how many there are.

How a new connection passes. Those that exist go by conntrack; of them the filters see that they are
not new, and the rest nothing. A flow that nobody answers is new to the filters as long as it lasts,
and to translation once:

    filter prerouting, output ── source_ranges ─ drop
    nat prerouting, output ── recall4/6 (frontends with session affinity) ── recall4_M: to the endpoint that the client had
                    ├─ from outside: outside4/6 (frontends with policy Local) ─┐
                    └─ from pods and this node: services4/6 (all frontends) ───┴─ goto pick_N, pick_local_N, refuse, or drop
    filter forward, output ── cluster_ips_check, of what nobody has translated ─ refuse, drop
    nat postrouting, input ─ remember4/6 (frontends with session affinity) ─ remember4_T_M: notes the client's endpoint
    nat postrouting ─ hairpin4/6, masquerade4/6: by the address that the client called

Clients of Services with session affinity are in the maps affinity4_M and affinity6_M. While there
are at most AFFINITY_MAPS such Services, each has its own number M: packets from forged sources to
one Service fill its own map and no other. A full map accepts no further client until others are
forgotten; each connection of such a client may go to any endpoint. T is the time in seconds for
which a client is remembered. The numbers are few, and Services do not have separate chains, because
the kernel walks all chains whenever it checks for loops: with 10,000 chains the check takes five
times as long.

`flows4/6` is for no packet: it says to which endpoints the flows (UDP, SCTP) of a frontend may lead
(see `aftermath`).

No packet mark is used: whether to masquerade follows from the original destination that conntrack
keeps, so the marks of other software stay as they are. The rules are kube-proxy's (KEP-3866,
KEP-2086); `numgen` in a concatenated key gives every endpoint the same chance. `ct original
proto-dst` needs the protocol in the same rule (nft 1.0.6), hence one rule each. Protocols are
written as numbers because a container need not have /etc/protocols."""

import hashlib
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

from fairlead.net.nfnetlink import Expression, update_ipv6_map

TABLE = "inet fairlead"
PROTOCOL_NUMBERS = {"TCP": 6, "UDP": 17, "SCTP": 132}
AFFINITY_MAPS = 1024
"""Maps of each family for the clients of Services with session affinity. Each is made without a
size, and the kernel lets it grow to 65,535 clients: for an explicit size, the kernel would allocate
a part of the memory at once."""

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
    """The commands that make the table with nothing in it. Every chain and map must not exist
    before. `pod_interfaces`: where packets of the node's pods come in, by name or the beginning of
    names with a `*`; then addresses do not count."""
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
    """The name of an empty chain that marks a table as made by exactly this skeleton and these
    chains on demand."""
    samples = "".join(
        map(on_demand, ("pick_1", "pick_local_1", "recall4_1", "recall6_1", "remember4_1_1"))
    )
    words = text + samples + repr(written_raw("remember6_1_1"))
    return f"layout_{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def on_demand(chain: str) -> str:
    """The commands that make `pick_3`, `pick_local_3`, `recall4_17` with the map `affinity4_17`, or
    `remember4_10800_17`.

    A `pick` chain has endpoint maps of its own: nft 1.0.6 takes a rule that looks up a `typeof` map
    only in the transaction that makes the map ("conflicting protocols" otherwise)."""
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


def written_raw(chain: str) -> tuple[Expression, ...]:
    """The rule of `remember6_10800_17`, which libnftables cannot write; nothing for other
    chains."""
    kind, _, timeout_s = chain.rpartition("_")[0].partition("_")
    return update_ipv6_map(affinity_map(chain), int(timeout_s)) if kind == "remember6" else ()


def affinity_map(chain: str) -> str:
    """The map of clients that `recall4_17` and `remember4_10800_17` use: `affinity4_17`."""
    kind, _, number = chain.rpartition("_")
    return f"affinity{'6' if kind.startswith(('recall6', 'remember6')) else '4'}_{number}"


def endpoint_map(chain: str, number: str) -> str:
    """The map of family `4` or `6` in which `pick_3` (`pick_local_3`) finds its endpoints."""
    kind, _, count = chain.rpartition("_")
    return f"{'local_endpoints' if kind.endswith('_local') else 'endpoints'}{number}_{count}"


def chain_of(name: str) -> str:
    """The chain that is made together with the endpoint map of this name; nothing for other
    maps."""
    kind, endpoints, count = name.partition("endpoints")
    return f"pick_{kind}{count.partition('_')[2]}" if endpoints else ""


def owned_sets(chains: Iterable[str]) -> tuple[str, ...]:
    """The maps and sets whose elements belong to Services, where these chains exist.

    Excludes `affinity4_17`, which packets fill, and `pods`, which the configuration fills.
    """
    picks = [chain for chain in chains if chain.startswith("pick_")]
    return tuple(
        [f"{kind}{n}" for kind in _OWNED_KINDS for n, _, _ in _FAMILIES]
        + [endpoint_map(chain, n) for chain in picks for n, _, _ in _FAMILIES]
    )


def needed_first(chain: str) -> tuple[str, ...]:
    """The chains that this one needs, and itself last: a chain that remembers clients writes into
    the map that is made with the chain that recalls them."""
    return (
        (affinity_map(chain).replace("affinity", "recall"), chain)
        if chain.startswith("remember")
        else (chain,)
    )


def of_family(number: str, cidrs: Iterable[str]) -> tuple[str, ...]:
    """The CIDRs of family `4` or `6`, without overlaps (an interval set takes none), as nft prints
    them."""
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
    """Chain, declaration of a base chain, rules; in the order in which they may refer to each
    other."""
    both = [(n, ip, name) for n, ip, name in _FAMILIES]
    frontend = {n: f"{ip} daddr . meta l4proto . th dport" for n, ip, _ in both}
    # kube-proxy masquerades what calls a ClusterIP from outside the pods; where pods cannot be told
    # from others, nothing.
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
    # A pod of another node that calls a NodePort here is a caller from outside: from a pod
    # elsewhere it would be answered directly, past the translation. It comes in where the called
    # address is, and our own pods do not, unless what they call is their gateway's address, which
    # is of the pods' networks. By interfaces there is no doubt.
    foreign_pods = [
        f"fib daddr . iif type local {ip} daddr != @pods{n} {frontend[n]} vmap @outside{n}"
        for n, ip, _ in both
    ]
    # The chain to which a frontend leads returns if the client is not known.
    recall = [f"{frontend[n]} vmap @recall{n}" for n, _, _ in both]
    return [
        # A reset is believed by every client at once; ICMP is limited in rate, filtered by some and
        # a hint to others.
        ("refuse", "", ["meta l4proto 6 reject with tcp reset", "reject"]),
        ("masquerade_always", "", ["masquerade fully-random"]),
        ("masquerade_strangers", "", strangers),
        # A packet with no ingress interface was made on this node (postrouting knows the ingress
        # since Linux 5.7).
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
        # By the address that is called, so before any translation; and dropped without a word.
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
        # After all translation: another table may serve a ClusterIP that no Service of ours has.
        # And not on the way in, for what is bound to a ClusterIP on this node has the ports that
        # the Service has not.
        (
            "cluster_ips_forward",
            " { type filter hook forward priority filter; }",
            ["ct state new jump cluster_ips_check"],
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
        # Where a connection went is known after DNAT: just before masquerade, or on the way into a
        # pod of the host network. NAT chains see the first packet alone. What a client repeats
        # because nobody answers is new to conntrack for long; it would bring an endpoint back that
        # was forgotten, and the client would be led there again and again.
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
    """The key of the frontend that the client called, from conntrack."""
    return f"ct original {ip} daddr . meta l4proto . ct original proto-dst"


def _by_original_destination() -> list[tuple[str, str]]:
    return [
        (n, f"meta nfproto {name} meta l4proto {protocol} {_called(ip)}")
        for n, ip, name in _FAMILIES
        for protocol in PROTOCOL_NUMBERS.values()
    ]
