"""The configuration file: every error names the path of the option."""

from pathlib import Path

import pytest

from fairlead.config import load
from fairlead.errors import Refused
from fairlead.plan.classes import CLASSES

VALID = """
defaultClass: fairlead.io/direct
cluster: {podCIDRs: [10.244.0.0/16, "2001:db8:244::/48"]}
pools:
  - {name: main, addresses: [203.0.113.0/28, 203.0.113.32-203.0.113.40, 203.0.113.50]}
  - {name: kept, addresses: ["2001:db8:f::/112"], autoAssign: false}
gateway: {interfaces: [eth0], pinPath: /sys/fs/bpf/fairlead, probeIntervalS: 0.2, forwarding: ipip,
  peers: ["192.0.2.1:9445", "[2001:db8:0::1]:9445"],
  apiServer: {addresses: [203.0.113.60, "2001:db8:f:1::5"],
    servers: ["192.0.2.1:6443", "[2001:db8::1]:6443"], sourceRanges: [192.0.2.0/24]}}
tunnel: {kind: ipip, gateways: [192.0.2.0/28]}
"""


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "fairlead.yaml").write_text(VALID)
    config = load(path, CLASSES)
    assert config.default_class == "fairlead.io/direct"
    assert [pool.auto_assign for pool in config.pools] == [True, False]
    assert config.gateway.probe_interval_s == 0.2
    assert config.gateway.api_server is not None
    assert config.gateway.api_server.port == 6443


def test_an_empty_file_has_the_default_values(tmp_path: Path) -> None:
    (path := tmp_path / "fairlead.yaml").write_text("")
    assert load(path, CLASSES).default_class is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: [{name: a, addresses: [203.0.113.300]}]", "$.pools[0].addresses[0]"),
        ("pools: [{name: a, addresses: [127.0.0.1-127.0.0.9]}]", "not reachable from other hosts"),
        ("pools: [{name: a, addresses: [main]}]", "'main' is not a range of addresses"),
        ("pools: [{name: a, addresses: [192.0.2.0/33]}]", "is not a prefix length of IPv4"),
        (
            "pools: [{name: a, addresses: [192.0.2.0/\u0662\u0664]}]",
            "is not a prefix length of IPv4",
        ),
        ("pools: [{name: a, addresses: [192.0.2.9/24]}]", "host bits set (write 192.0.2.0/24);"),
        (
            "pools: [{name: a, addresses: ['::ffff:10.0.0.0/120']}]",
            "::ffff:10.0.0.0/120 is an IPv4-mapped IPv6 address (write it as IPv4: 10.0.0.0)",
        ),
        (
            "pools: [{name: a, addresses: ['::ffff:10.0.0.1-::ffff:10.0.0.9']}]",
            "is an IPv4-mapped IPv6 address (write it as IPv4: 10.0.0.1)",
        ),
        (
            "pools: [{name: a, addresses: ['2001:db8::1%eth0']}]",
            "has a zone, which has a meaning on one host only (remove %eth0)",
        ),
        (
            "pools: [{name: a, addresses: [203.0.113.9-203.0.113.1]}]",
            "is not a range from a lower to a higher",
        ),
        ("pools: [{name: a, addresses: [203.0.113.9-2001:db8::1]}]", "of one family"),
        (
            "pools: [{name: a, addresses: [203.0.113.0/24]}, {name: b, addresses: [203.0.113.9]}]",
            "203.0.113.9 overlaps 203.0.113.0/24",
        ),
        (
            "pools: [{name: a, addresses: [203.0.113.1]}, {name: a, addresses: [203.0.113.2]}]",
            "$.pools[1].name",
        ),
        ("pools: [{name: a, addresses: []}]", "$.pools[0].addresses"),
        ("announce: l3", "'l3' is not a mapping of names to values - at $.announce"),
        (
            "announce: {l3: {}}",
            "there is no field l3 - at $.announce; fields there: bgp, ignoreExcludeLabel, l2",
        ),
        *(
            (f"announce: {{bgp: {{asn: 64513, routers: [{{{router}}}]}}}}", words)
            for router, words in (
                ("name: a, address: 192.0.2.1, asn: 0", "$.announce.bgp.routers[0].asn"),
                ("name: A, address: 192.0.2.1, asn: 1", "$.announce.bgp.routers[0].name"),
                (
                    'name: "a\\n", address: 192.0.2.1, asn: 1',
                    "ends with a line break - at $.announce.bgp.routers[0].name",
                ),
                (
                    "name: a, address: 192.0.2.1, asn: 65535",
                    "AS 65535 is reserved (RFC 7300) - at $.announce.bgp.routers[0].asn",
                ),
                (
                    "name: a, address: 192.0.2.1, asn: 1, gracefulRestart: true",
                    "the router keeps the routes of a dead gateway for two minutes - at "
                    "$.announce.bgp.routers[0].gracefulRestart; add bfd: {}",
                ),
                ("name: a, address: tor, asn: 1", "'tor' does not appear to be an IPv4 or IPv6"),
                ("name: a, address: '2001:DB8::1', asn: 1", "is not the usual form of this"),
                ("name: a, address: 'fe80::1', asn: 1", "not reachable from other hosts - at"),
                (
                    "name: a, address: 192.0.2.1, asn: 1, holdTimeS: 5",
                    "more than half of the hold time of 5 s",
                ),
                ("name: a, address: 192.0.2.1, asn: 1, passwordFile: x", "'x' is relative"),
                (
                    "name: a, address: 192.0.2.1, asn: 1}, {name: b, address: 192.0.2.1, asn: 1",
                    "two routers have the name b or the address 192.0.2.1 - at",
                ),
            )
        ),
        ("announce: {bgp: {asn: 64513, routers: []}}", "$.announce.bgp.routers"),
        (
            "announce: {bgp: {asn: 1, networks: [203.0.113.1/24], routers: [{name: a, address: "
            "192.0.2.1, asn: 1}]}}",
            "$.announce.bgp.networks[0]",
        ),
        (
            "announce: {bgp: {asn: 23456, routers: [{name: a, address: 192.0.2.1, asn: 1}]}}",
            "AS 23456 stands for numbers above 65535 (RFC 6793) - at $.announce.bgp.asn",
        ),
        (
            "announce: {bgp: {asn: 1, routerId: a, routers: [{name: a, address: 192.0.2.1, "
            "asn: 1}]}}",
            "'a' is not an IPv4 address - at $.announce.bgp.routerId",
        ),
        (
            "announce: {l2: {}, bgp: {asn: 1, routers: [{name: a, address: 192.0.2.1, asn: 1}]}}",
            "either on layer 2 or by BGP - at $.announce",
        ),
        (
            "{pools: [{name: p, addresses: [192.0.2.0/24]}], "
            "announce: {bgp: {asn: 1, routers: [{name: a, address: 192.0.2.1, asn: 1}]}}}",
            "192.0.2.1 is in 192.0.2.0/24 of a pool, so a Service may get it",
        ),
        ("announce: {l2: {interfaces: [192.0.2.1]}}", "$.announce.l2.interfaces[0]"),
        ("announce: {l2: {networks: [192.0.2.1/24]}}", "$.announce.l2.networks[0]"),
        ("announce: {l2: {networks: ['2001:db8::1/64']}}", "$.announce.l2.networks[0]"),
        (
            "defaultClass: fairlead.io/dirct",
            "is unknown - at $.defaultClass; write one of: fairlead.io/direct, ",
        ),
        ("defaultClass: metallb", "write one of: fairlead.io/direct, fairlead.io/octavia"),
        ("web: {listen: nonsense}", "$.web.listen"),
        ("web: {metricsFrom: [everybody]}", "$.web.metricsFrom[0]"),
        ("gateway: {peerTLS: {certificate: a.crt, key: a.key}}", "ca"),
        (
            "gateway: {peers: [gateway1:9445]}",
            "'gateway1:9445' has no numeric address - at $.gateway.peers[0]",
        ),
        (
            'gateway: {peers: ["2001:db8::1:9445"]}',
            '$.gateway.peers[0]; write 192.0.2.1:9445 or "[2001:db8::1]:9445"',
        ),
        ('gateway: {peers: ["192.0.2.1:9445", "[192.0.2.1]:9445"]}', "$.gateway.peers[1]"),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: []}}",
            "$.gateway.apiServer.servers",
        ),
        (
            "gateway: {apiServer: {addresses: [cp], servers: [192.0.2.1:6443]}}",
            "$.gateway.apiServer.addresses[0]",
        ),
        (
            "gateway: {apiServer: {addresses: [127.0.0.1], servers: [192.0.2.1:6443]}}",
            "not reachable from other hosts",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [cp1:6443]}}",
            "$.gateway.apiServer.servers[0]; write 192.0.2.1",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5, 203.0.113.5], servers: "
            "[192.0.2.1:6443]}}",
            "is listed twice - at $.gateway.apiServer.addresses[1]",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [192.0.2.1:0]}}",
            "$.gateway.apiServer.servers[0]",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [203.0.113.5:6443]}}",
            "is an address of the load balancer itself",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [192.0.2.1:6443, "
            "192.0.2.1:6443]}}",
            "is listed twice - at $.gateway.apiServer.servers[1]",
        ),
        (
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [192.0.2.1:6443], "
            "sourceRanges: [10.0.0.1/8]}}",
            "$.gateway.apiServer.sourceRanges[0]",
        ),
        (
            "{pools: [{name: a, addresses: [203.0.113.0/24]}], "
            "gateway: {apiServer: {addresses: [203.0.113.5], servers: [192.0.2.1:6443]}}}",
            "overlaps 203.0.113.0/24 of a pool",
        ),
        ("proxy: {hostnameSuffix: not a name}", "$.proxy.hostnameSuffix"),
        (
            "gateway: {interfaces: [eth0, 192.0.2.1]}",
            "write it as a CIDR - at $.gateway.interfaces[1]; give the name of",
        ),
        (
            "gateway: {interfacesByNode: {edge-*: [192.0.2.1/24]}}",
            "host bits set (write 192.0.2.0/24) - at $.gateway.interfacesByNode.edge-*[0]",
        ),
        ("gateway: {interfacesByNode: {edge-1: []}}", "$.gateway.interfacesByNode"),
        ("node: {interfaces: [a name]}", "$.node.interfaces[0]"),
        ("gateway: {way: ipip}", "gateway.way is now called gateway.forwarding - at $.gateway.way"),
        (
            "gateway: {forwarding: ipip}",
            "gateway.forwarding is ipip, but tunnel.kind is none - at $.gateway.forwarding",
        ),
        (
            "{gateway: {forwarding: vxlan}, tunnel: {kind: ipip, gateways: [192.0.2.0/28]}}",
            "gateway.forwarding is vxlan, but tunnel.kind is ipip - at $.gateway.forwarding",
        ),
        ("tunnel: {kind: vxlan}", "no host may send through the tunnel - at $.tunnel.gateways"),
        ("gateway: {probeTimeoutS: 0}", "$.gateway.probeTimeoutS"),
        ("pools: [{name: a, adresses: []}]", "adresses"),
        ("defaultclass: x", "defaultclass"),
        (
            "cluster: {podCIDRs: [10.244.0.1/16]}",
            "10.244.0.1/16 has host bits set - at $.cluster.podCIDRs[0]; write 10.244.0.0/16",
        ),
        ("gateway: {probeIntervalS: soon}", "$.gateway.probeIntervalS"),
        ("a: [", "is not valid YAML: line 2, column 1: "),
        ("web:\n\tlisten: x", "line 2, column 1: while scanning for the next token, found charac"),
        ("web:\n\tlisten: x", "indent with spaces instead of tabs"),
        ("[" * 100_000, "line 1: it is nested deeper than 200 levels; is this the right file?"),
        ("pools:\n  - name: a\n addresses: []", "line 3, column 2"),
        ("defaultClass: \x01", "is not valid YAML: character 15: control characters"),
        ("defaultClass: 2026-13-45", "month must be in 1..12; write texts in quotes"),
        ("- 1", "this is a list, not a mapping of names to values"),
        ("defaultClass: a\npools: []\ndefaultClass: b", "line 3: defaultClass is in line 1"),
        ("gateway: {attach: tc, forwarding: l2, attach: xdp}", "attach is in line 1 already"),
        ("defaultClas: x", "there is no field defaultClas; did you mean defaultClass?"),
        ("Pools: []", "there is no field Pools; did you mean pools?"),
        (
            "gateway: {interface: eth0}",
            "no field interface - at $.gateway; did you mean interfaces or interfacesByNode?",
        ),
        (
            "gateway: {attach: native}",
            "'native' is not a valid value - at $.gateway.attach; write one of: auto, tc, xdp, "
            "xdp-generic",
        ),
        (
            "pools: [{name: a, addresses: [203.0.113.1], serviceAllocation: {serviceSelectors: "
            "[{matchExpressions: [{key: a, operator: Inn}]}]}}]",
            "matchExpressions[0].operator; write one of: DoesNotExist, Exists, In, NotIn",
        ),
        ("octavia: {lbMethod: RR}", 'write one of: "", LEAST_CONNECTIONS, ROUND_ROBIN'),
        (
            "gateway: {peerTLS: {certificate: a, key: b}}",
            "the field ca is missing - at $.gateway.peerTLS; add ca",
        ),
        (
            "pools: [{name: a, addresses: []}]",
            "a list without entries is not valid - at $.pools[0].addresses; write at least one",
        ),
        ("cluster:", "the value is missing - at $.cluster; write a mapping of names to values, or"),
        (
            "pools: {name: a}",
            "this is a mapping of names to values, not a list - at $.pools; write a list",
        ),
        ("gateway: {peers: [10:22]}", "622 is not a text - at $.gateway.peers[0]; write it in q"),
        ("gateway: {interfacesByNode: {1: [eth0]}}", "a name is not a text - at $.gateway.interf"),
        ("controller: {leaseDurationS: yes}", "true is not a number - at $.controller.lease"),
        (
            "gateway: {connectionEntries: 7}",
            "7 is out of range - at $.gateway.connectionEntries; write a number that is at least "
            "1024",
        ),
        ("octavia: {callsPerS: .inf}", "infinity is out of range - at $.octavia.callsPerS"),
        ("gateway: {probeIntervalS: .nan}", "nan is out of range - at $.gateway.probeIntervalS"),
        ("gateway: {pinPath: pins}", "write an absolute path"),
        ("gateway: {peerListen: 'gw1:9445'}", "no numeric address - at $.gateway.peerListen"),
        ("presence: {namespace: kube-system}", "could write then - at $.presence.namespace; name"),
        ("presence: {namespace: My Leases}", "write a name of lower-case letters"),
        ("controller: {leaseName: ''}", "write a name of lower-case letters"),
        ("web: {listen: ' 127.0.0.1:9440'}", "is not address:port - at $.web.listen; write an"),
        ("web: {listen: '[::1:9440'}", "'[::1:9440' is not address:port - at $.web.listen"),
        ("octavia: {nodeSelector: '=a'}", "write labels with or without a value"),
        ("node: {podInterfaces: ['a b']}", "write the name of an interface"),
        (
            "cluster: {podCIDRs: [10.244.0.0]}",
            "10.244.0.0 has no prefix length - at $.cluster.podCIDRs[0]; write 10.244.0.0/32 for",
        ),
        ("cluster: {serviceCIDRs: ['2001:db8::']}", "write 2001:db8::/128 for this address alone"),
        ("cluster: {serviceCIDRs: [10.96.0.0/33]}", "write a length from 0 to 32"),
        ("cluster: {podCIDRs: ['::ffff:10.0.0.0/104']}", "IPv4-mapped IPv6 address - at $.cluster"),
        ("web: {listen: '127.0.0.1:\u0668\u0660'}", "is not address:port - at $.web.listen"),
        (
            "controller: {leaseDurationS: 1.0e+32}",
            "1e+32 is out of range - at $.controller.leaseDurationS; write a number that is at "
            "most 86400",
        ),
        ("gateway: {drainTimeoutS: 9999999999}", "at $.gateway.drainTimeoutS; write a number that"),
        ("cluster: {serviceCIDRs: [10.96.0.0/]}", "'' in 10.96.0.0/ is not a prefix length"),
        ("web: {metricsFrom: [192.0.2.7]}", "has no prefix length - at $.web.metricsFrom[0]"),
        ("node: {nodePortAddresses: [192.0.2.7]}", "no prefix length - at $.node.nodePortAdd"),
        (
            "tunnel: {kind: ipip, gateways: [192.0.2.7]}",
            "no prefix length - at $.tunnel.gateways[0]",
        ),
    ],
)
def test_errors_name_the_path_of_the_option(tmp_path: Path, text: str, words: str) -> None:
    (path := tmp_path / "fairlead.yaml").write_text(text)
    with pytest.raises(Refused) as caught:
        load(path, CLASSES)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.fix
    for raw in ("Expected", "`", "Errno", "<", "object at", "regex"):
        assert raw not in str(caught.value)


def test_a_mapping_may_be_merged_into_others(tmp_path: Path) -> None:
    (path := tmp_path / "fairlead.yaml").write_text(
        "gateway: &shared {interfaces: [eth0], interfacesByNode: {a: [eth1]}}\n"
        "node: {<<: {interfaces: [eth0]}, interfaces: [eth2]}\n"
    )
    assert load(path, CLASSES).node.interfaces == ("eth2",)


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    (path := tmp_path / "fairlead.yaml").write_bytes(b"defaultClass: \xff")
    with pytest.raises(Refused, match="character 15: invalid"):
        load(path, CLASSES)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read: No such file or directory; name a file"):
        load(tmp_path / "none.yaml", CLASSES)
