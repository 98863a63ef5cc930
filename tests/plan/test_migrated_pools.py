"""The AddressPools that a migration needs: MetalLB's pools of every version, and the addresses in
no pool."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fairlead.config import Config, PoolConfig
from fairlead.kube.crds import AddressPool
from fairlead.kube.manifests import Manifests, read_documents
from fairlead.kube.objects import Service
from fairlead.plan.exclusions import Exclusions, of_hosts
from fairlead.plan.metallb import concerns_pools
from fairlead.plan.migrated_pools import Inventory, PoolsToApply, pools_to_apply

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {namespace: metallb-system, name: config}
data:
  config: |
    peers: [{peer-address: 10.0.0.1, peer-asn: 64501, my-asn: 64500}]
    address-pools:
    - name: default
      protocol: bgp
      addresses: [198.51.100.10/24, 2001:db8::/124]
      avoid-buggy-ips: true
      bgp-advertisements: [{aggregation-length: 32, localpref: 100}]
    - name: spare
      protocol: layer2
      auto-assign: false
      addresses: [203.0.113.30 - 203.0.113.39]
"""


def their_pool(name: str, *addresses: str, kind: str = "IPAddressPool", **spec: Any) -> Any:
    return {
        "apiVersion": "metallb.io/v1beta1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "metallb-system"},
        "spec": {"addresses": list(addresses), **spec},
    }


def own_pool(name: str, *addresses: str, **meta: str) -> AddressPool:
    return msgspec.convert(
        {"metadata": {"name": name, **meta}, "spec": {"addresses": addresses}}, AddressPool
    )


def showing(*addresses: str, **spec: object) -> Service:
    ingress = [{"ip": each} for each in addresses]
    body = {
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"type": "LoadBalancer", **spec},
        "status": {"loadBalancer": {"ingress": ingress}},
    }
    return msgspec.convert(body, Service)


def made(
    *theirs: Mapping[str, Any],
    services: Sequence[Service] = (),
    existing: Sequence[AddressPool] = (),
    configured: Sequence[PoolConfig] = (),
    hosts: Sequence[str] = (),
) -> PoolsToApply:
    exclusions = Exclusions()
    exclusions.update("Node node1", of_hosts(hosts, "an address of Node node1"))
    inventory = Inventory(
        Manifests(services=tuple(services), address_pools=tuple(existing)), tuple(theirs)
    )
    return pools_to_apply(inventory, Config(pools=tuple(configured)), exclusions)


def specs(result: PoolsToApply) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in result.bodies}


def test_a_pool_of_metallb_becomes_an_equivalent_address_pool() -> None:
    documents = [each.object for each in read_documents([EXAMPLES])]
    result = made(*filter(concerns_pools, documents))
    assert result.bodies[0] == {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": "public"},
        "spec": {
            "addresses": ["203.0.113.16/28", "2001:db8:f::100-2001:db8:f::1ff"],
            "avoidBuggyIPs": True,
        },
    }
    assert specs(result)["shop"]["serviceAllocation"] == {
        "priority": 10,
        "namespaces": ["default"],
        "serviceSelectors": [{"matchLabels": {"team": "shop"}}],
    }
    assert (result.refused, result.remarks) == ((), ())


def test_pools_of_older_versions_are_translated_without_their_announcement() -> None:
    old = their_pool(
        "old",
        "192.0.2.128/25",
        kind="AddressPool",
        protocol="bgp",
        autoAssign=False,
        bgpAdvertisements=[{"localPref": 100}],
    )
    config_map = yaml.safe_load(CONFIG_MAP)
    assert concerns_pools(config_map)
    result = made(old, config_map)
    assert specs(result) == {
        "old": {"addresses": ["192.0.2.128/25"], "autoAssign": False},
        "default": {
            "addresses": ["198.51.100.0/24", "2001:db8::/124"],
            "avoidBuggyIPs": True,
        },
        "spare": {"addresses": ["203.0.113.30-203.0.113.39"], "autoAssign": False},
    }
    [remark] = result.remarks
    assert "198.51.100.10/24 is written as 198.51.100.0/24" in remark


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("address-pools: [", "ConfigMap config, line 2: this is not valid YAML"),
        ("address-pools: " + "[" * 100_000, "ConfigMap config, line 1: it is nested deeper than"),
        ("address-pools: x", "ConfigMap config: address-pools is not a list"),
        (
            "address-pools: [{addresses: [192.0.2.0/28]}]",
            "a pool of ConfigMap config has no name that is a text",
        ),
        ("address-pools: [3]", "a pool of ConfigMap config has no name"),
        (
            "address-pools: [{name: My_Pool, addresses: [192.0.2.0/28]}]",
            "pool My_Pool of ConfigMap config: an AddressPool cannot have this name",
        ),
        (
            "address-pools: [{name: a, rack: 3, addresses: [192.0.2.0/28]}]",
            "pool a of ConfigMap config: spec.rack is not known",
        ),
    ],
)
def test_a_config_map_that_is_not_understood_is_refused(text: str, words: str) -> None:
    config_map = yaml.safe_load(CONFIG_MAP) | {"data": {"config": text}}
    result = made(config_map, services=[showing("203.0.113.9")])
    assert specs(result) == {}
    [refused] = result.refused
    assert words in str(refused)
    assert refused.fix
    assert "taken-over is not printed" in result.remarks[-1]


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (their_pool("a", "203.0.113.300/24"), "203.0.113.300/24"),
        (their_pool("a", "203.0.113.9-203.0.113.2"), "not a range from a lower to a higher"),
        (their_pool("a", "203.0.113.0/28", "203.0.113.8-203.0.113.9"), "another entry"),
        (their_pool("a", "127.0.0.0/8"), "not reachable from other hosts"),
        (their_pool("a", "198.51.100.0/24"), "198.51.100.0/24 overlaps pool main"),
        (their_pool("main", "203.0.113.0/24"), "there is a pool main already"),
        (their_pool("a", "198.51.100.0-198.51.100.255/24"), "198.51.100.255/24"),
        (their_pool("a"), "has no spec.addresses"),
        (their_pool("a") | {"spec": None}, "has no spec.addresses"),
        (their_pool("a") | {"metadata": []}, "IPAddressPool has no name that is a text"),
        (their_pool("a", "10.0.0.0/8") | {"metadata": {"name": ["a"]}}, "has no name that is a"),
        (
            their_pool("A_b", "10.0.0.0/8"),
            "IPAddressPool A_b: an AddressPool cannot have this name; write an AddressPool for it",
        ),
        (
            their_pool("a", "203.0.113.0/28", kind="IpAddressPool"),
            "there is no kind IpAddressPool of MetalLB; write IPAddressPool",
        ),
        (their_pool("a", "::ffff:203.0.113.0/120"), "is an IPv4-mapped IPv6 address"),
        (their_pool("a", addresses="10.0.0.0/8"), "$.spec.addresses"),
        (their_pool("a", addresses=[10]), "$.spec.addresses[0]"),
        (their_pool("a", "203.0.113.0/28", autoAssign="no"), "$.spec.autoAssign"),
    ],
)
def test_a_pool_that_is_not_usable_is_refused_and_its_addresses_go_into_no_other_pool(
    pool: Mapping[str, Any], words: str
) -> None:
    result = made(
        pool,
        their_pool("fine", "192.0.2.0/28"),
        services=[showing("192.0.2.77")],
        configured=[PoolConfig("main", ("198.51.100.0/28",))],
    )
    assert list(specs(result)) == ["fine"]
    [refused] = result.refused
    assert words in str(refused)


def test_the_pool_for_the_rest_does_not_replace_a_pool_of_its_name() -> None:
    result = made(their_pool("taken-over", "203.0.113.0/24"), services=[showing("192.0.2.77")])
    assert specs(result) == {"taken-over": {"addresses": ["203.0.113.0/24"]}}
    assert "taken-over is not made for 192.0.2.77: another pool has its name" in str(
        result.refused[0]
    )


def test_two_pools_that_overlap_or_have_one_name_are_not_both_printed() -> None:
    overlapping = made(their_pool("a", "203.0.113.0/28"), their_pool("b", "203.0.113.8/29"))
    assert list(specs(overlapping)) == ["a"]
    [refused] = overlapping.refused
    assert "IPAddressPool b: 203.0.113.8/29 overlaps pool a" in str(refused)
    same = made(their_pool("a", "203.0.113.0/28"), their_pool("a", "192.0.2.0/28"))
    assert list(specs(same)) == ["a"]
    assert "has the name of IPAddressPool a" in str(same.refused[0])


def test_a_pool_that_exists_with_the_same_addresses_is_not_printed_again() -> None:
    theirs = their_pool("a", "203.0.113.4/28")
    for configured, existing in (
        ([PoolConfig("a", ("203.0.113.0/28",))], []),
        ([], [own_pool("a", "203.0.113.0/28")]),
    ):
        result = made(theirs, configured=configured, existing=existing)
        assert (result.bodies, result.refused) == ((), ())


def test_a_null_field_is_an_absent_field() -> None:
    result = made(
        their_pool("a", "203.0.113.0/28", serviceAllocation={"priority": None}, autoAssign=None)
    )
    assert specs(result) == {"a": {"addresses": ["203.0.113.0/28"], "serviceAllocation": {}}}


def test_announcements_are_named() -> None:
    one = their_pool("a") | {"kind": "L2Advertisement"}
    result = made(one, one, their_pool("a") | {"kind": "BFDProfile"})
    assert (result.bodies, result.refused) == ((), ())
    assert [each.partition(":")[0] for each in result.remarks] == [
        "1 BFDProfile not translated",
        "2 L2Advertisements not translated",
    ]


def test_pools_of_other_systems_are_named() -> None:
    others = [
        {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumLoadBalancerIPPool",
            "metadata": {"name": "b"},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kubevip"}},
    ]
    assert all(map(concerns_pools, others))
    result = made(*others)
    assert (result.bodies, result.refused) == ((), ())
    assert [each.partition(":")[0] for each in result.remarks] == [
        "CiliumLoadBalancerIPPool b is not translated",
        "ConfigMap kubevip is not translated",
    ]


def test_an_address_that_its_pool_avoids_goes_into_no_other_pool() -> None:
    pool = their_pool("a", "203.0.113.0/24", avoidBuggyIPs=True)
    result = made(pool, services=[showing("203.0.113.255")])
    assert list(specs(result)) == ["a"]
    [remark] = result.remarks
    assert "set avoidBuggyIPs of the pool to false" in remark


def test_addresses_outside_all_pools_get_a_pool_without_automatic_assignment() -> None:
    services = [
        showing("203.0.113.16", "2001:db8::1"),
        showing("203.0.113.99"),
        showing("203.0.113.100"),
        showing("203.0.113.200", loadBalancerClass="fairlead.io/octavia"),
    ]
    public = PoolConfig("public", ("203.0.113.16/28",))
    assert specs(made(services=services, configured=[public])) == {
        "taken-over": {
            "addresses": ["203.0.113.99-203.0.113.100", "2001:db8::1"],
            "autoAssign": False,
        }
    }
    everything = [PoolConfig("all", ("203.0.113.0/24", "2001:db8::/64"))]
    assert made(services=services, configured=everything).bodies == ()


def test_a_pool_of_a_former_run_keeps_its_addresses() -> None:
    result = made(
        services=[showing("203.0.113.8"), showing("203.0.113.99")],
        existing=[own_pool("taken-over", "203.0.113.7", "203.0.113.99")],
    )
    assert specs(result)["taken-over"]["addresses"] == [
        "203.0.113.7-203.0.113.8",
        "203.0.113.99",
    ]
    [pool] = result.applied_to([own_pool("taken-over", "203.0.113.7")])
    assert len(pool.spec.addresses) == 2


def test_an_address_that_no_service_can_have_goes_into_no_pool() -> None:
    result = made(services=[showing("192.0.2.21"), showing("127.0.0.1")], hosts=["192.0.2.21"])
    assert (result.bodies, result.refused) == ((), ())
    assert [each.partition(",")[0] for each in result.remarks] == [
        "192.0.2.21 of Service default/web is an address of Node node1",
        "127.0.0.1 of Service default/web cannot be in a pool: no client reaches it; request "
        "another address by fairlead.io/addresses",
    ]


def test_an_existing_pool_that_is_not_used_is_corrected_first() -> None:
    broken = own_pool("mine", "203.0.113.240/24")
    result = made(services=[showing("203.0.113.7")], existing=[broken])
    assert result.bodies == ()
    assert "AddressPool mine is not used: " in str(result.refused[0])
    going = own_pool("mine", "203.0.113.0/24", deletionTimestamp="2026-01-01T00:00:00Z")
    assert "taken-over" in specs(made(services=[showing("203.0.113.7")], existing=[going]))
