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
        ("announce: l3", "Expected `object`, got `str` - at `$.announce`"),
        ("announce: {l3: {}}", "unknown field `l3` - at `$.announce`"),
        ("announce: {l2: {interfaces: [192.0.2.1]}}", "$.announce.l2.interfaces[0]"),
        ("announce: {l2: {networks: [192.0.2.1/24]}}", "$.announce.l2.networks[0]"),
        (
            "announce: {l2: {networks: ['2001:db8::/64']}}",
            "only IPv4 addresses are announced - at $.announce.l2.networks[0]",
        ),
        ("defaultClass: fairlead.io/dirct", "known: fairlead.io/direct"),
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
            "host bits set - at $.gateway.interfacesByNode.edge-*[0]",
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
        ("cluster: {podCIDRs: [10.244.0.1/16]}", "$.cluster.podCIDRs[0]"),
        ("gateway: {probeIntervalS: soon}", "$.gateway.probeIntervalS"),
        ("a: [", "is not YAML"),
        ("- 1", "Expected `object`"),
    ],
)
def test_errors_name_the_path_of_the_option(tmp_path: Path, text: str, words: str) -> None:
    (path := tmp_path / "fairlead.yaml").write_text(text)
    with pytest.raises(Refused) as caught:
        load(path, CLASSES)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        load(tmp_path / "none.yaml", CLASSES)
