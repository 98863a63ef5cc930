"""`fairlead announce plan` from the view of a user: its output for manifests and for a cluster, and
clear errors."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from fairlead.cli.announce import announce
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import NODES, ObjectKey
from fairlead.kube.presence import Presence, lease_body, lease_name
from fairlead.lab import settings
from fairlead.lab.apiserver import ApiServer

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("fairlead")
EXAMPLE = str(ROOT / "examples" / "plan")
CONFIGURATION = "pools: [{name: main, addresses: [203.0.113.0/24]}]\n"


async def plan(*options: str | Path) -> tuple[int, str, str]:
    """Run the command, and return its exit status, its output and its messages."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "announce", "plan", *options, stdout=-1, stderr=-1
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    assert b"Traceback" not in errors, errors.decode()
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "fairlead.yaml"
    file.write_text(CONFIGURATION)
    return file


async def test_static_routes_are_the_default(config: Path) -> None:
    code, output, errors = await plan("-f", EXAMPLE, "--config", config)
    assert code == 0, errors
    hops = "nexthop via 192.0.2.21 nexthop via 192.0.2.22 nexthop via 192.0.2.23"
    assert f"\nip route replace 203.0.113.0/24 {hops}  # pool main\n" in output
    assert "no Node has the label fairlead.io/gateway: every Node counts as a gateway" in errors
    assert "check: a router goes on sending packets to a dead gateway by a static route" in errors


async def test_without_a_configuration_the_pools_are_examples() -> None:
    code, output, errors = await plan("-f", EXAMPLE)
    assert code == 0, errors
    assert "ip route replace 203.0.113.128/26 " in output
    assert "no --config: the pools are examples" in errors


async def test_labelled_nodes_are_the_gateways_and_pools_may_be_objects(tmp_path: Path) -> None:
    """A pool that is not used is reported, and so is an address that no router can use."""
    addresses = ["192.0.2.31", "fe80::1"]
    status = {"addresses": [{"type": "InternalIP", "address": each} for each in addresses]}
    objects = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "gw1", "labels": {"fairlead.io/gateway": ""}},
            "status": status,
        },
        *(
            {
                "apiVersion": "fairlead.io/v1alpha1",
                "kind": "AddressPool",
                "metadata": {"name": name},
                "spec": {"addresses": [cidr]},
            }
            for name, cidr in (("first", "203.0.113.0/24"), ("second", "203.0.113.128/25"))
        ),
    ]
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    code, output, errors = await plan("-f", EXAMPLE, "-f", file)
    assert code == 0, errors
    assert "ip route replace 203.0.113.0/24 via 192.0.2.31  # pool first\n" in output
    assert "192.0.2.21" not in output
    assert "left out: AddressPool second is not used: 203.0.113.128/25 overlaps" in errors
    assert "left out: an InternalIP of gw1: 'fe80::1' is valid on one link only" in errors


async def test_both_sides_of_the_sessions_have_the_same_numbers(config: Path) -> None:
    given = ("-f", EXAMPLE, "--config", config, "--asn", "4200000001", "--router-asn", "65001")
    for router in ("frr", "bird"):
        code, output, errors = await plan(*given, "--router", router, "--bfd")
        assert code == 0, errors
        assert "65001" in output
        assert "192.0.2.21 as 4200000001" in output or "remote-as 4200000001" in output
        assert "check: announce.bgp is not configured: each gateway needs a BIRD" in errors
    side = ("--gateway", "bird", "--router-address", "192.0.2.1", "--router-address", "192.0.2.2")
    code, output, errors = await plan(*given, *side)
    assert code == 0, errors
    assert "    local as 4200000001;\n" in output
    assert "    neighbor 192.0.2.2 as 65001;\n" in output
    assert "check: without --bfd a router notices a dead gateway after 9 s" in errors
    assert "every Node counts" not in errors


def test_the_configuration_has_the_numbers_of_the_sessions(tmp_path: Path) -> None:
    routers = [
        {"name": f"tor{number}", "address": f"192.0.2.{number}", "asn": 65000 + number, "bfd": {}}
        for number in (1, 2)
    ]
    routers[1] |= {"bfd": None, "passwordFile": "/etc/fairlead/tor2"}
    file = tmp_path / "fairlead.yaml"
    for own, options, words in (
        (routers[:1], ("--router", "frr"), "router bgp 65001\n"),
        (routers, ("--router", "frr", "--router-asn", "65002"), "router bgp 65002\n"),
        (
            routers,
            ("--router", "frr"),
            "several AS numbers: 65001, 65002; give that of this router",
        ),
        (
            routers,
            ("--gateway", "bird", "--router-address", "192.0.2.1"),
            "each gateway itself writes /run/fairlead/bird/bird.conf for its BIRD; use --router",
        ),
    ):
        section = {"announce": {"bgp": {"asn": 65100, "routers": own}}}
        file.write_text(CONFIGURATION + yaml.safe_dump(section))
        done = CliRunner().invoke(
            announce, ("plan", "-f", EXAMPLE, "--config", str(file), *options)
        )
        said = str(done.exception) if done.exception is not None else done.output
        assert words in said
        if done.exception is None:
            assert " neighbor fairlead4 remote-as 65100\n" in said
            assert " neighbor fairlead4 bfd\n" in said
            assert "not configured" not in said
            assert ("use no BFD with tor2" in said) == (len(own) == 2)
            assert ("have a password on the side of the gateways: tor2;" in said) == (len(own) == 2)


async def test_programs_get_the_plan_and_the_text(config: Path) -> None:
    hops = ("--next-hop", "gw1=192.0.2.5", "--next-hop", "gw1=2001:db8::5")
    code, output, _ = await plan("-f", EXAMPLE, "--config", config, *hops, "-o", "json")
    assert code == 0
    found = json.loads(output)
    assert found["target"] == "router static"
    assert found["plan"]["gateways"] == [{"name": "gw1", "addresses": ["192.0.2.5", "2001:db8::5"]}]
    assert found["plan"]["prefixes"] == [
        {"pool": "main", "prefix": "203.0.113.0/24", "family": "IPv4"}
    ]
    assert "ip route replace 203.0.113.0/24 via 192.0.2.5  # pool main\n" in found["text"]
    assert len(found["notes"]) == 1


def test_wrong_options_are_refused_in_words(config: Path) -> None:
    for options, status, words in (
        (("--asn", "0"), 2, "'--asn': 0 is not in the range"),
        (("--asn", "65535"), 2, "'--asn': AS 65535 is reserved (RFC 7300); write another number"),
        (("--router-asn", "23456"), 2, "AS 23456 stands for numbers above 65535"),
        (("--bfd",), 2, "--asn, --router-asn and --bfd are for BGP: add --router frr or bird"),
        (("--router", "frr", "--gateway", "bird"), 2, "give one or the other"),
        (("--gateway", "bird"), 2, "--gateway needs --router-address"),
        (("--router-address", "192.0.2.1"), 2, "--gateway needs --router-address, and only"),
        (
            ("--gateway", "bird", "--router-address", "192.0.2.1", "--next-hop", "192.0.2.2"),
            2,
            "--next-hop is for the router",
        ),
        (("--next-hop", "gateway1"), 1, "'gateway1' is not an IP address; give an address that"),
        (("--gateway", "bird", "--router-address", "tor"), 1, "--router-address: 'tor' is not an"),
        (
            ("--gateway", "bird", "--router-address", "2001:db8::1"),
            1,
            "the pools have IPv4 addresses, and no address of a router of that family is given",
        ),
        (("--next-hop", "203.0.113.1"), 1, "address 203.0.113.1 of gateway 203.0.113.1 is in"),
    ):
        arguments = ("plan", "-f", EXAMPLE, "--config", str(config), *options)
        done = CliRunner().invoke(announce, arguments)
        refused = isinstance(done.exception, Refused)
        assert (done.exit_code, refused) == (status, status == 1), options
        said = str(done.exception) if refused else done.output
        assert words in " ".join(said.split())


@asynccontextmanager
async def cluster(*alive: Presence, gone: str = "") -> AsyncIterator[str]:
    """Yield the text of a kubeconfig of a cluster with the nodes gw1 and gw2, the configuration,
    gateways that renew their Leases, and one that does not."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        for namespace in ("fairlead-system", "fairlead-presence"):
            await client.request(
                "POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}}
            )
        await client.request(
            "POST",
            "/api/v1/namespaces/fairlead-system/configmaps",
            body={"metadata": {"name": "fairlead"}, "data": {"fairlead.yaml": CONFIGURATION}},
        )
        for number in (1, 2):
            await client.create(NODES, {"metadata": {"name": f"gw{number}"}})
            address = {"type": "InternalIP", "address": f"192.0.2.7{number}"}
            await client.patch(
                NODES,
                ObjectKey("", f"gw{number}"),
                {"status": {"addresses": [address]}},
                subresource="status",
            )

        async def write(presence: Presence, count: int) -> None:
            now = f"2026-01-01T00:00:00.{count:06}Z"
            body = lease_body(presence, identity=presence.name, now=now, lease_s=1)
            key = ObjectKey("fairlead-presence", lease_name("gateway", presence.name))
            await client.apply(LEASES, key, body, field_manager="test")

        async def renew() -> None:
            for count in range(1_000_000):
                for each in alive:
                    await write(each, count)
                await asyncio.sleep(0.1)

        if gone:
            await write(Presence("gateway", gone, "1", "now"), 0)
        task = asyncio.create_task(renew())
        try:
            yield settings.kubeconfig("here", client.access)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_the_next_hops_are_the_gateways_that_renew_their_leases(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    async with cluster(Presence("gateway", "gw1", "1", "now"), gone="gw2") as text:
        kubeconfig.write_text(text)
        code, output, errors = await plan("--kubeconfig", kubeconfig)
        assert code == 0, errors
        assert "ip route replace 203.0.113.0/24 via 192.0.2.71  # pool main\n" in output
        assert "left out: gateway gw2 does not renew its Lease" in errors
        assert "check: gateway gw1 is not ready now" in errors


async def test_the_address_of_a_gateway_outside_of_the_cluster_has_to_be_given(
    tmp_path: Path,
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    async with cluster(Presence("gateway", "edge", "1", "now", ready=True)) as text:
        kubeconfig.write_text(text)
        code, output, errors = await plan("--kubeconfig", kubeconfig)
        assert (code, output) == (1, "")
        assert "no Node is called edge like this gateway, so its address is not known" in errors
        code, output, errors = await plan("--kubeconfig", kubeconfig, "--next-hop", "192.0.2.9")
        assert code == 0, errors
        assert "via 192.0.2.9  # pool main\n" in output
