"""What a migration to Fairlead does with Services that other systems serve."""

from pathlib import Path
from typing import Any

import pytest

from fairlead.config import PoolConfig
from fairlead.errors import Refused
from fairlead.kube.manifests import Document, read_documents, typed
from fairlead.kube.objects import SERVICES, Service
from fairlead.plan.migration import (
    IP_ADDRESS_POOL,
    TAKEN_OVER,
    Takeover,
    pool_for_unpooled,
    takeovers,
    translated,
)
from fairlead.plan.pools import Pools, read_pools

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
DIRECT = "fairlead.io/direct"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return list(read_documents([EXAMPLES]))


@pytest.fixture(scope="module")
def services(documents: list[Document]) -> list[Service]:
    return [typed(each, SERVICES) for each in documents if each.kind == ("v1", "Service")]


def pools_of(documents: list[Document]) -> list[dict[str, Any]]:
    return [translated(each.object) for each in documents if each.kind == IP_ADDRESS_POOL]


def read(*configured: PoolConfig) -> Pools:
    return read_pools(configured, [])


def by_name(found: list[Takeover]) -> dict[str, Takeover]:
    return {each.service: each for each in found}


def test_a_pool_of_metallb_becomes_an_equivalent_address_pool(documents: list[Document]) -> None:
    public, shop = pools_of(documents)
    assert public == {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": "public"},
        "spec": {
            "addresses": ["203.0.113.16/28", "2001:db8:f::100-2001:db8:f::1ff"],
            "avoidBuggyIPs": True,
        },
    }
    assert shop["spec"]["serviceAllocation"] == {
        "priority": 10,
        "namespaces": ["default"],
        "serviceSelectors": [{"matchLabels": {"team": "shop"}}],
    }
    with pytest.raises(Refused, match=r"IPAddressPool x has no spec\.addresses"):
        translated({"metadata": {"name": "x"}})


def test_addresses_outside_all_pools_get_a_pool_without_automatic_assignment(
    services: list[Service],
) -> None:
    public = PoolConfig("public", ("203.0.113.16/28",))
    assert pool_for_unpooled(services, read(public)) == {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": TAKEN_OVER},
        "spec": {"addresses": ["203.0.113.99"], "autoAssign": False},
    }
    assert pool_for_unpooled(services, read(PoolConfig("all", ("203.0.113.0/24",)))) is None


def test_a_takeover_names_the_present_system_and_whether_the_service_is_ready(
    services: list[Service],
) -> None:
    found = by_name(takeovers(services, read(PoolConfig("public", ("203.0.113.16/28",))), DIRECT))
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
    services: list[Service],
) -> None:
    found = by_name(takeovers(services, read(), None))["default/ingress"].findings
    text = "\n".join(map(str, found))
    for message in (
        "set defaultClass",
        "proxy-protocol has no effect",
        "timeout-client-data has no effect",
        "203.0.113.99 is in no pool",
        "kubectl patch service -n default ingress --type=merge"
        """ -p '{"metadata":{"finalizers":[]}}'""",
    ):
        assert message in text
    assert "keep-floatingip" not in text, "this annotation has an effect"
