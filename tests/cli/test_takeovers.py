"""What `fairlead migrate services` says about Services that other systems serve: the plan after the
migration agrees with it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.cli.migrate import examined, pools_of
from fairlead.cli.planning import plan_manifests
from fairlead.config import Config, PoolConfig
from fairlead.kube.crds import AddressPool
from fairlead.kube.manifests import Manifests, read_documents, typed
from fairlead.kube.objects import SERVICES, Node, Service
from fairlead.model import LoadBalancer
from fairlead.plan.metallb import concerns_pools
from fairlead.plan.migrated_pools import Inventory, assumed_class
from fairlead.plan.migration import Takeover
from fairlead.sections import OctaviaConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
DIRECT, OCTAVIA = "fairlead.io/direct", "fairlead.io/octavia"
MAIN = PoolConfig("main", ("203.0.113.16/28",))
NODE = msgspec.convert(
    {
        "metadata": {"name": "node1", "creationTimestamp": "2025-01-01T00:00:00Z"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.21"}]},
    },
    Node,
)


def made(
    name: str,
    *shown: str,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    **spec: object,
) -> Service:
    """Return a Service that shows these addresses or hostnames."""
    body = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": annotations or {},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80, "nodePort": 30080}]} | spec,
        "status": {
            "loadBalancer": {
                "ingress": [{"ip" if each[-1].isalnum() else "hostname": each} for each in shown]
            }
        },
    }
    return msgspec.convert(body, Service)


def found(
    *services: Service, metallb: Sequence[Mapping[str, Any]] = (), pools: Sequence[AddressPool] = ()
) -> Inventory:
    return Inventory(
        Manifests(services=services, nodes=(NODE,), address_pools=tuple(pools)), tuple(metallb)
    )


def takeovers(config: Config, *services: Service) -> dict[str, Takeover]:
    return {each.service: each for each in examined(config, found(*services))}


def takeover(config: Config, service: Service) -> Takeover:
    [one] = takeovers(config, service).values()
    return one


def direct(*pools: PoolConfig) -> Config:
    return Config(default_class=DIRECT, pools=pools or (MAIN,))


def errors(one: Takeover) -> list[str]:
    return [each.code for each in one.findings if each.severity == "error"]


@pytest.fixture(scope="module")
def examples() -> Inventory:
    documents = list(read_documents([EXAMPLES]))
    return Inventory(
        Manifests(
            services=tuple(
                typed(each, SERVICES) for each in documents if each.kind == ("v1", "Service")
            )
        ),
        tuple(each.object for each in documents if concerns_pools(each.object)),
    )


def test_a_takeover_names_the_present_system_and_whether_the_service_is_ready(
    examples: Inventory,
) -> None:
    public = PoolConfig("public", ("203.0.113.16/28", "2001:db8:f::100-2001:db8:f::1ff"))
    found = {each.service: each for each in examined(direct(public), examples)}
    assert {
        name: (each.system, each.ready, each.addresses, each.pools) for name, each in found.items()
    } == {
        "default/web": ("metallb", True, ("203.0.113.20",), ("public",)),
        "default/dns-tcp": ("metallb", True, ("203.0.113.21",), ("public",)),
        "default/dns-udp": ("metallb", True, ("203.0.113.21",), ("public",)),
        "default/classed": ("metallb", False, ("203.0.113.22",), ("public",)),
        "default/ingress": ("openstack", True, ("203.0.113.99",), ("",)),
    }
    assert found["default/web"].findings == ()
    [classed] = found["default/classed"].findings
    assert "cannot be changed in place" in str(classed)
    assert "fairlead.io/addresses=203.0.113.22" in str(classed)
    assert (classed.code, classed.severity, classed.subject) == (
        "ClassOfAnotherController",
        "error",
        "Service default/classed",
    )


def test_the_findings_name_annotations_without_effect_and_obstacles_to_the_takeover(
    examples: Inventory,
) -> None:
    [ingress] = [each for each in examined(Config(), examples) if each.service.endswith("/ingress")]
    text = "\n".join(map(str, ingress.findings))
    for message in (
        "set defaultClass",
        "proxy-protocol has no effect",
        "timeout-client-data has no effect",
        "203.0.113.99 is in no pool",
        "203.0.113.99 belongs to its load balancer in Octavia",
        "class fairlead.io/octavia takes the load balancer over",
        "kubectl patch service -n default ingress --type=merge"
        """ -p '{"metadata":{"finalizers":[]}}'""",
    ):
        assert message in text
    assert "keep-floatingip" not in text, "this annotation has an effect"


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (
            ("bad",),
            "it shows 'bad', which is no address: Fairlead would assign another one; correct ",
        ),
        (("203.0.113.999",), "it shows '203.0.113.999', which is no address"),
        (("203.0.113.20", "fe80::1%eth0"), "it shows 'fe80::1%eth0', which is no address"),
        (("127.0.0.1",), "it shows 127.0.0.1, which no client outside of its host or link reaches"),
        (("0.0.0.0",), "it shows 0.0.0.0, which no client"),
    ],
)
def test_a_status_without_a_usable_address_is_reported(shown: tuple[str, ...], words: str) -> None:
    one = takeover(direct(), made("a", *shown))
    assert not one.ready
    (finding,) = (each for each in one.findings if each.code == "AddressNotValid")
    assert str(finding).startswith(words)
    assert "AddressInNoPool" not in [each.code for each in one.findings]


def test_services_of_two_namespaces_or_without_a_key_at_one_address_are_not_ready() -> None:
    key = {"metallb.universe.tf/allow-shared-ip": "one"}
    ssh, http = [{"port": 22}], [{"port": 80}]
    for other, same, ready, words in (
        ("edge", key, False, "Services of two namespaces cannot share an address"),
        ("forge", {}, False, "give both the same annotation fairlead.io/sharing-key"),
        ("forge", key, True, ""),
    ):
        shell = made("shell", "203.0.113.20", namespace="forge", annotations=same, ports=ssh)
        web = made("web", "203.0.113.20", namespace=other, annotations=same, ports=http)
        both = takeovers(direct(), shell, web)
        assert {each.ready for each in both.values()} == {ready}, other
        for each in both.values():
            assert errors(each) == [] if ready else ["AddressSharedWithoutKey"]
            assert words in "".join(map(str, each.findings))


@pytest.mark.parametrize(
    ("service", "code", "words"),
    [
        (
            made(
                "a",
                "203.0.113.20",
                annotations={"kube-vip.io/loadbalancerIPs": "0.0.0.0"},
                loadBalancerIP="0.0.0.0",
            ),
            "NotAccepted",
            "0.0.0.0 is in no pool (main); to keep the address, request it: kubectl annotate "
            "service -n default a --overwrite fairlead.io/addresses=203.0.113.20",
        ),
        (
            made("a", "203.0.113.20", loadBalancerIP="203.0.113.21"),
            "AddressWouldChange",
            "it shows 203.0.113.20 and would get 203.0.113.21, without 203.0.113.20; to keep",
        ),
        (
            made("a", "203.0.113.20", annotations={"metallb.io/loadBalancerIPs": "web"}),
            "NotAccepted",
            "at most one IPv4 and one IPv6 address; to keep the address, request it",
        ),
        (
            made("a", "203.0.113.20", "203.0.113.21"),
            "AddressWouldChange",
            "a Service has one address of each family",
        ),
        (
            made("a", "203.0.113.20", "2001:db8::1", ipFamilies=["IPv4"]),
            "AddressWouldChange",
            "would get 203.0.113.20, without 2001:db8::1; add the family to spec.ipFamilies",
        ),
        (
            made("a", "192.0.2.21"),
            "AddressExcluded",
            "192.0.2.21 is an address of Node node1, which keeps it",
        ),
        (
            made("a", "203.0.113.20", loadBalancerSourceRanges=["everybody"]),
            "NotAccepted",
            "source range 'everybody' is not a CIDR; write it as",
        ),
        (made("a", ipFamilies=["IPv6"]), "NotAccepted", "no IPv6 address is free in pool main"),
        (made("a", loadBalancerClass="metallb.io/x"), "ClassOfAnotherController", "its class is"),
        (made("a", loadBalancerClass="fairlead.io/x"), "ClassOfAnotherController", "its class is"),
    ],
)
def test_a_service_that_the_plan_refuses_or_changes_is_not_ready(
    service: Service, code: str, words: str
) -> None:
    one = takeover(direct(), service)
    assert not one.ready
    assert errors(one) == [code]
    assert words in "".join(map(str, one.findings))


def test_the_request_that_is_suggested_has_one_address_of_each_family() -> None:
    three = ("203.0.113.20", "203.0.113.21", "2001:db8::1")
    wish = {"kube-vip.io/loadbalancerIPs": ",".join(three)}
    text = "".join(map(str, takeover(direct(), made("a", *three, annotations=wish)).findings))
    assert "fairlead.io/addresses=203.0.113.20,2001:db8::1" in text


def test_ports_that_the_class_does_not_serve_are_named() -> None:
    config = Config(default_class="fairlead.io/proxy", pools=(MAIN,))
    ports = [
        {"port": 53, "protocol": "UDP", "nodePort": 30053, "name": "dns"},
        {"port": 80, "nodePort": 30080, "name": "web"},
    ]
    one = takeover(config, made("a", "203.0.113.20", ports=ports))
    assert not one.ready
    assert "53/UDP" in "".join(map(str, one.findings))


def test_a_request_that_only_another_system_reads_is_named() -> None:
    for name in ("kube-vip.io/loadbalancerIPs", "lbipam.cilium.io/ips"):
        one = takeover(direct(), made("a", "203.0.113.20", annotations={name: "203.0.113.20"}))
        assert one.ready
        [text] = map(str, one.findings)
        assert f"{name} ('203.0.113.20') is not read" in text
        assert "fairlead.io/addresses=203.0.113.20" in text


def test_pools_do_not_matter_where_the_cloud_assigns_addresses() -> None:
    theirs = {"loadbalancer.openstack.org/load-balancer-id": "6a1f2f0e-6c0d-4a3e-9d0c-6b3f3f5b9f10"}
    ports = [{"port": 80, "nodePort": 30080}]
    service = made("a", "203.0.113.99", annotations=theirs, ports=ports)
    cloud = OctaviaConfig(cloud="c", subnet_id="6a1f2f0e-6c0d-4a3e-9d0c-6b3f3f5b9f11")
    for octavia, ready, words in (
        (msgspec.structs.replace(cloud, adopt_from="kubernetes"), True, ""),
        (cloud, False, "set octavia.adoptFrom to the --cluster-name"),
        (None, False, "class fairlead.io/octavia is not configured"),
    ):
        one = takeover(Config(default_class=OCTAVIA, octavia=octavia), service)
        text = "".join(map(str, one.findings))
        assert (one.ready, one.pools) == (ready, ("",)), text
        assert "pool" not in text
        assert words in text
    config = Config(default_class=OCTAVIA, octavia=cloud)
    metallb = made("a", "203.0.113.20", annotations={"metallb.io/ip-allocated-from-pool": "x"})
    assert errors(takeover(config, metallb)) == ["AddressFromCloud"]
    assert pools_of(config, found(service)).bodies == ()


ADDRESSES = [
    "203.0.113.20",
    "203.0.113.21",
    "203.0.113.40",
    "198.51.100.9",
    "192.0.2.21",
    "2001:db8:f::5",
    "127.0.0.1",
]
SERVICE = st.fixed_dictionaries(
    {
        "shown": st.lists(st.sampled_from([*ADDRESSES, "host.example.com."]), max_size=2),
        "namespace": st.sampled_from(["default", "edge"]),
        "annotations": st.dictionaries(
            st.sampled_from(
                [
                    "metallb.io/loadBalancerIPs",
                    "fairlead.io/addresses",
                    "metallb.io/address-pool",
                    "metallb.io/allow-shared-ip",
                    "kube-vip.io/loadbalancerIPs",
                    "fairlead.io/keep-address",
                    "loadbalancer.openstack.org/proxy-protocol",
                ]
            ),
            st.sampled_from([*ADDRESSES, "main", "theirs", "true", "x", "0.0.0.0", ""]),
            max_size=2,
        ),
        "loadBalancerIP": st.sampled_from(["", "", *ADDRESSES, "0.0.0.0"]),
        "loadBalancerClass": st.sampled_from([None, None, None, "fairlead.io/proxy", "other.io/x"]),
        "ipFamilies": st.sampled_from([["IPv4"], ["IPv4"], ["IPv6"], ["IPv4", "IPv6"], []]),
        "ports": st.lists(
            st.sampled_from(
                [
                    {"name": "a", "port": 80, "nodePort": 30080},
                    {"name": "b", "port": 22},
                    {"name": "c", "port": 53, "protocol": "UDP", "nodePort": 30053},
                ]
            ),
            min_size=1,
            max_size=2,
            unique_by=str,
        ),
    }
)
THEIR_POOLS = st.lists(
    st.sampled_from(["203.0.113.40/29", "203.0.113.32/27", "198.51.100.9/24", "203.0.113.16/30"]),
    max_size=2,
)


@settings(max_examples=60, report_multiple_bugs=False)
@given(st.lists(SERVICE, min_size=1, max_size=4), THEIR_POOLS, st.sampled_from([None, DIRECT]))
def test_the_plan_accepts_whatever_is_ready_and_a_recreated_service_gets_its_address_again(
    rows: list[dict[str, Any]], their_pools: list[str], default_class: str | None
) -> None:
    services = [
        made(f"s{number}", *row["shown"], **{key: row[key] for key in row if key != "shown"})
        for number, row in enumerate(rows)
    ]
    metallb = [
        {
            "apiVersion": "metallb.io/v1beta1",
            "kind": "IPAddressPool",
            "metadata": {"name": "theirs" if not number else "more"},
            "spec": {"addresses": [text]},
        }
        for number, text in enumerate(their_pools)
    ]
    config = Config(default_class=default_class, pools=(MAIN,))
    inventory = found(*services, metallb=metallb)
    ready = {each.service: each for each in examined(config, inventory) if each.ready}
    # The migration: apply the pools, set a default class.
    pools = pools_of(config, inventory).applied_to(())
    after = msgspec.structs.replace(config, default_class=assumed_class(config))
    manifests = msgspec.structs.replace(inventory.manifests, address_pools=pools)
    planned = plan_manifests(after, manifests).balancers
    for service in services:
        if (one := ready.get(str(service.key))) is None:
            continue
        balancer = planned[service.key]
        assert isinstance(balancer, LoadBalancer), balancer
        assert not balancer.unserved_ports
        if not one.addresses:
            continue
        assert set(balancer.addresses) == set(one.addresses)
        # The Service is deleted, created again, and requests its addresses.
        wish = {**service.metadata.annotations, "fairlead.io/addresses": ",".join(one.addresses)}
        again = msgspec.convert(
            msgspec.to_builtins(service)
            | {
                "status": {},
                "metadata": {
                    **msgspec.to_builtins(service)["metadata"],
                    "annotations": wish,
                    "creationTimestamp": "2026-06-01T00:00:00Z",
                },
            },
            Service,
        )
        others = tuple(again if each is service else each for each in services)
        recreated = plan_manifests(after, msgspec.structs.replace(manifests, services=others))
        result = recreated.balancers[service.key]
        assert isinstance(result, LoadBalancer), result
        assert set(result.addresses) == set(one.addresses)
