"""`fairlead announce plan`: from manifests, and from a cluster with gateways that renew their
Leases."""

import asyncio
import json
import sys
from pathlib import Path

import yaml

from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import NODES, ObjectKey
from fairlead.kube.presence import Presence, lease_body, lease_name
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "examples" / "plan"
CONFIGURATION = """
defaultClass: fairlead.io/direct
pools: [{name: main, addresses: [203.0.113.0/24]}]
announce: {bgp: {asn: 64513}}
"""


async def announce(*arguments: str) -> tuple[int, str, str]:
    """Run `fairlead announce plan`. Return exit status, standard output and standard error."""
    pipe = asyncio.subprocess.PIPE
    program = str(Path(sys.executable).with_name("fairlead"))
    child = await asyncio.create_subprocess_exec(
        program, "announce", "plan", *arguments, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(60):
        output, errors = await child.communicate()
    assert child.returncode is not None
    return child.returncode, output.decode(), errors.decode()


def configured(folder: Path, text: str = CONFIGURATION) -> tuple[str, str]:
    file = folder / "fairlead.yaml"
    file.write_text(text)
    return "--config", str(file)


async def test_routes_for_manifests_lead_to_all_nodes(tmp_path: Path) -> None:
    code, output, errors = await announce("-f", str(MANIFESTS), *configured(tmp_path))
    assert code == 0
    hops = " ".join(f"nexthop via 192.0.2.2{number} weight 1" for number in (1, 2, 3))
    assert f"ip route replace 203.0.113.0/24 {hops}\n" in output
    assert "check: dead hosts: " in errors


async def test_routes_to_nodes_have_the_weights_of_the_ready_pods(tmp_path: Path) -> None:
    code, output, _ = await announce(
        "-f", str(MANIFESTS), *configured(tmp_path), "--to", "nodes", "-o", "json"
    )
    assert code == 0
    (route,) = json.loads(output)["plan"]["routes"]
    assert route["about"] == "Service default/ingress-controller"
    assert [each["weight"] for each in route["targets"]] == [3, 1]


def by_ovn(topology: str) -> str:
    """Return a configuration whose default class is ovn."""
    section = "northbound: ['tcp:192.0.2.9:6641'], clusterId: c1, drainAddress: 198.18.0.1"
    text = CONFIGURATION.replace("fairlead.io/direct", "fairlead.io/ovn")
    return f"{text}ovn: {{{section}, {topology}}}\n"


async def test_routes_to_gateway_routers_have_the_weights_of_the_ready_pods(
    tmp_path: Path,
) -> None:
    gateways = by_ovn("topology: gateways, routers: 'GR_{node}'")
    hops = ("node1=192.0.2.131", "node2=192.0.2.132", "node3=192.0.2.133")
    code, output, _ = await announce(
        *("-f", str(MANIFESTS), *configured(tmp_path, gateways), "--to", "nodes"),
        *(word for each in hops for word in ("--next-hop", each)),
        *("-o", "json"),
    )
    assert code == 0
    (route,) = json.loads(output)["plan"]["routes"]
    assert sorted(each["weight"] for each in route["targets"]) == [1, 3]
    assert {each["address"] for each in route["targets"]} < {each.split("=")[1] for each in hops}


async def test_a_service_that_one_router_of_ovn_serves_has_no_route_to_nodes(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, by_ovn("router: edge"))
    code, output, errors = await announce(
        "-f", str(MANIFESTS), *config, "--to", "nodes", "-o", "json"
    )
    assert code == 0
    assert not json.loads(output)["plan"].get("routes")
    assert "router edge serves it, no node" in errors


async def test_a_next_hop_without_its_node_is_refused_for_routes_to_nodes(tmp_path: Path) -> None:
    given = ("--to", "nodes", "--next-hop", "192.0.2.131")
    code, _, errors = await announce("-f", str(MANIFESTS), *configured(tmp_path), *given)
    assert code
    assert "--to nodes needs NODE=ADDRESS" in errors


async def test_given_next_hops_replace_those_that_are_found(tmp_path: Path) -> None:
    code, output, _ = await announce(
        "-f", str(MANIFESTS), *configured(tmp_path), "--next-hop", "192.0.2.5", "-o", "yaml"
    )
    assert code == 0
    assert [each["addresses"] for each in yaml.safe_load(output)["plan"]["hops"]] == [["192.0.2.5"]]


async def test_the_as_number_of_the_router_selects_bgp(tmp_path: Path) -> None:
    frr = ("--router", "frr", "-f", str(MANIFESTS), *configured(tmp_path))
    _, static, _ = await announce(*frr)
    assert "router bgp" not in static
    code, output, errors = await announce(*frr, "--asn", "64512")
    assert code == 0
    assert "router bgp 64512\n" in output
    assert " neighbor 192.0.2.21 description node1\n" in output
    assert "check: peers: " in errors


async def test_peers_and_pools_may_be_objects(tmp_path: Path) -> None:
    """A pool that is announced by layer 2 needs no routes. A mistake in a BGPPeer is reported."""
    group = {"apiVersion": "fairlead.io/v1alpha1"}
    shop = {"addresses": ["198.51.100.0/28"], "announce": {"method": "l2"}}
    objects = [
        group | {"kind": "AddressPool", "metadata": {"name": "shop"}, "spec": shop},
        group
        | {
            "kind": "BGPPeer",
            "metadata": {"name": "tor"},
            "spec": {"asn": 64512, "address": "192.0.2.1", "holdTimeS": 30},
        },
        group | {"kind": "BGPPeer", "metadata": {"name": "bad"}, "spec": {"asn": 0}},
    ]
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    sources = ("-f", str(MANIFESTS), "-f", str(file), *configured(tmp_path))
    code, output, errors = await announce(*sources, "--router", "frr")
    assert code == 0, errors
    assert " neighbor fairlead timers 3 30\n" in output
    assert "198.51.100.0" not in output
    assert "pool shop is announced by ARP" in errors
    assert "left out: BGPPeer bad: " in errors


async def test_a_router_of_a_redundant_pair_is_named(tmp_path: Path) -> None:
    """Without its name, neither sessions with options of another peer nor static routes are
    printed. A BGPPeer with the name of a configured peer is not used, so it is no choice."""
    group = {"apiVersion": "fairlead.io/v1alpha1", "kind": "BGPPeer"}
    secret = {"name": "session"}
    spec = {"asn": 64512, "multihop": 2, "holdTimeS": 30, "passwordSecret": secret}
    tor1, tor2 = spec | {"address": "192.0.2.1"}, spec | {"address": "192.0.2.2"}
    bgp = {"asn": 64513, "peers": [{"name": "tor1", **tor1}]}
    text = CONFIGURATION.replace("{bgp: {asn: 64513}}", json.dumps({"method": "bgp", "bgp": bgp}))
    file = tmp_path / "objects.yaml"
    objects = [group | {"metadata": {"name": name}, "spec": tor2} for name in ("tor1", "tor2")]
    file.write_text(yaml.safe_dump_all(objects))
    sources = ("-f", str(MANIFESTS), "-f", str(file), *configured(tmp_path, text))
    for options in ((), ("--asn", "64512")):
        code, output, errors = await announce(*sources, "--router", "frr", *options)
        assert (code, output) == (1, "")
        assert "name the router with --peer: tor1, tor2" in errors
        assert "left out: BGPPeer tor1: " in errors
    code, output, errors = await announce(*sources, "--router", "frr", "--peer", "tor2")
    assert code == 0, errors
    assert "router bgp 64512\n" in output
    assert " neighbor fairlead timers 3 30\n" in output
    assert " neighbor fairlead ebgp-multihop 2\n" in output
    assert " ! neighbor fairlead password " in output
    assert "bfd" not in output
    assert "is no peer" not in errors
    code, output, errors = await announce(*sources, "--router", "linux")
    assert code == 0, errors
    assert "ip route replace 203.0.113.0/24 " in output


async def test_the_objects_of_the_example_are_planned(tmp_path: Path) -> None:
    """The pool with layer 2 needs no route; the other one goes to the router of the BGPPeer."""
    config = "announce: {method: l2, bgp: {asn: 64513}}"
    sources = ("-f", str(MANIFESTS), "-f", str(ROOT / "examples" / "announce"))
    code, output, errors = await announce(*sources, *configured(tmp_path, config), "-o", "json")
    assert code == 0, errors
    networks = json.loads(output)["plan"]["networks"]
    assert [each["prefix"] for each in networks] == ["203.0.113.0/24"]
    code, output, errors = await announce(
        *sources, *configured(tmp_path, config), "--router", "frr"
    )
    assert code == 0, errors
    assert "router bgp 64512" in output
    assert "left out" not in errors


async def test_the_limits_have_room_for_the_host_routes_of_announcing_nodes(tmp_path: Path) -> None:
    """Nodes of class fairlead.io/announce announce each address, whatever the pool aggregates."""
    gateways = """
defaultClass: fairlead.io/announce
pools: [{name: main, addresses: [203.0.113.0/24], announce: {aggregationLength: 24}}]
announce: {method: bgp, bgp: {asn: 64513, peers: [{name: tor, address: 192.0.2.1, asn: 64512}]}}
"""
    nodes = gateways + "node: {serviceProxy: false, announce: true}\n"
    for config, limit in ((gateways, 1), (nodes, 256)):
        code, output, errors = await announce(
            *("-f", str(MANIFESTS), *configured(tmp_path, config), "--router", "frr")
        )
        assert code == 0, errors
        assert f" neighbor fairlead maximum-prefix {limit}\n" in output


async def test_wrong_options_are_refused_with_a_remedy(tmp_path: Path) -> None:
    common = ("-f", str(MANIFESTS), *configured(tmp_path))
    for options, message in (
        (("--next-hop", "gateway1"), "give an IPv4 or IPv6 address"),
        (("--range", "192.0.2.1/24", "--router", "frr", "--asn", "64512"), "give a network"),
        (("--pool", "other"), "name one of the pools: main"),
        (("--router", "linux", "--method", "bgp", "--asn", "64512"), "use --method static"),
    ):
        code, output, errors = await announce(*common, *options)
        assert (code, output) == (1, "")
        assert message in errors


async def test_next_hops_are_the_gateways_that_renew_their_leases(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    """A Node without a gateway, and a gateway that is gone, are no next hops. A gateway that is no
    Node has an address that only the operator knows."""
    home = "announce-plan"
    options = configured(tmp_path, CONFIGURATION + f"presence: {{namespace: {home}}}\n")
    async with Client(real_apiserver.access) as client:
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": home}})
        names = [f"announce-plan-{number}" for number in (1, 2, 3)]
        for number, name in enumerate(names, 1):
            await client.create(NODES, {"metadata": {"name": name}})
            address = {"type": "InternalIP", "address": f"192.0.2.7{number}"}
            body = {"status": {"addresses": [address]}}
            await client.patch(NODES, ObjectKey("", name), body, subresource="status")

        async def write(name: str, count: int) -> None:
            presence = Presence("gateway", name, "1", "now", ready=True, interfaces=("eth0",))
            body = lease_body(
                presence, identity=name, now=f"2026-01-01T00:00:00.{count:06}Z", lease_s=2
            )
            key = ObjectKey(home, lease_name("gateway", name))
            await client.apply(LEASES, key, body, field_manager="test")

        async def renew() -> None:
            for count in range(1, 1_000_000):
                for name in alive:
                    await write(name, count)
                await asyncio.sleep(0.2)

        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(settings.kubeconfig("here", client.access))
        await write(names[1], 0)
        alive = [names[0]]
        task = asyncio.create_task(renew())
        try:
            cluster = ("--kubeconfig", str(kubeconfig), *options)
            code, output, errors = await announce(*cluster)
            assert code == 0, errors
            assert "ip route replace 203.0.113.0/24 via 192.0.2.71\n" in output
            assert "rule add to 203.0.113.0/24 iif eth0 " in output
            alive.append("outside")
            code, _, errors = await announce(*cluster)
            assert code == 1
            assert "no Node has the name of gateway outside" in errors
            assert "--next-hop" in errors
        finally:
            task.cancel()
            for name in names:
                await client.delete(NODES, ObjectKey("", name))
