"""The table of classes: what its columns decide, for the existing classes and for a new one."""

from collections.abc import Mapping

import msgspec
import pytest
from tests.makers import make_service, make_slice, plan_at_gateway, plan_gateway

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config, NodeConfig, PoolConfig
from fairlead.drivers.direct import spec
from fairlead.errors import Refused
from fairlead.kube.objects import (
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectKey,
    ObjectMeta,
    Service,
    ServiceStatus,
)
from fairlead.model import (
    AnnounceSettings,
    DirectSettings,
    LoadBalancer,
    OctaviaSettings,
    OvnSettings,
    ProxySettings,
    ServiceKey,
)
from fairlead.plan import classes
from fairlead.plan.classes import CLASSES, DIRECT, ServiceClass
from fairlead.plan.cloud import plan_cloud
from fairlead.plan.cluster import plan_controller
from fairlead.plan.gateways import NO_GATEWAY, Gateways
from fairlead.plan.ledger import Ledger
from fairlead.plan.services import plan_services
from fairlead.sections import OctaviaConfig, OvnConfig
from fairlead.state import State

EXAMPLE = DIRECT._replace(name="fairlead.io/example")
CONFIG = Config(
    pools=(PoolConfig("public", ("203.0.113.0/28",)),),
    octavia=OctaviaConfig(subnet_id="subnet"),
    ovn=OvnConfig(northbound=("tcp:192.0.2.1:6641",), router="router", cluster_id="c1"),
    announce=AnnounceConfig(method="bgp"),
    node=NodeConfig(announce=True),
)
NODES = {
    name: Node(ObjectMeta(name=name), status=NodeStatus((NodeAddress("InternalIP", address),)))
    for name, address in (("node1", "192.0.2.21"), ("node2", "192.0.2.22"))
}
OTHERS = ("fairlead.io/none", "example.com/other", None)


def named(class_name: str | None, shown: str = "") -> Service:
    """A Service whose name is that of its class."""
    service = make_service(
        (class_name or "unclassed").rpartition("/")[2], load_balancer_class=class_name
    )
    ingress = (LoadBalancerIngress(shown),) if shown else ()
    return msgspec.structs.replace(service, status=ServiceStatus(LoadBalancerStatus(ingress)))


def state_of(*services: Service) -> State:
    state = State(())
    state.update_nodes({ObjectKey("", name): node for name, node in NODES.items()})
    state.update_services({ObjectKey(*each.key): each for each in services})
    return state


@pytest.fixture
def with_example(monkeypatch: pytest.MonkeyPatch) -> ServiceClass:
    """Return a new class, whose row is added to the table."""
    table: Mapping[str, ServiceClass] = {**CLASSES, EXAMPLE.name: EXAMPLE}
    monkeypatch.setattr(classes, "CLASSES", table)
    return EXAMPLE


def test_each_service_is_planned_either_with_addresses_of_pools_or_for_the_cloud() -> None:
    state = state_of(*(named(name) for name in (*CLASSES, *OTHERS)))
    by_controller = plan_controller(state, CONFIG, Ledger(), state.services)
    by_cloud = plan_cloud(state, CONFIG, state.services)
    assert not by_controller.keys() & by_cloud.keys()
    planned = plan_services(state, CONFIG, Ledger(), state.services)
    assert planned.keys() == by_controller.keys() | by_cloud.keys()
    kinds = {
        key.name: type(each.settings)
        for key, each in planned.items()
        if not isinstance(each, Refused)
    }
    known = {
        "direct": DirectSettings,
        "proxy": ProxySettings,
        "octavia": OctaviaSettings,
        "announce": AnnounceSettings,
        "ovn": OvnSettings,
    }
    assert kinds.keys() == {name.rpartition("/")[2] for name in CLASSES}
    assert kinds.items() >= known.items()
    (refused,) = (each for each in planned.values() if isinstance(each, Refused))
    assert str(refused) == (
        f"there is no class fairlead.io/none; recreate the Service with one of {classes.names()}"
    )


def test_a_class_that_is_not_configured_is_refused() -> None:
    state = state_of(*(named(name) for name in CLASSES))
    config = msgspec.structs.replace(CONFIG, octavia=None, announce=None, ovn=None)
    planned = plan_services(state, config, Ledger(), state.services)
    refused = {key.name: str(each) for key, each in planned.items() if isinstance(each, Refused)}
    assert refused == {
        "octavia": "class fairlead.io/octavia is not configured; configure the cloud in "
        "section `octavia` of the configuration",
        "announce": "class fairlead.io/announce is not configured; set announce.method to l2 or "
        "bgp, and node.announce to true in the configuration, or use class fairlead.io/direct",
        "ovn": "class fairlead.io/ovn is not configured; configure the northbound database in "
        "section `ovn` of the configuration",
    }
    assert plan_cloud(state, config, state.services) == {}


def test_a_new_class_needs_only_a_row(with_example: ServiceClass) -> None:
    """Its Service gets an address of a pool, and the driver of its settings serves it."""
    key = ServiceKey("default", "example")
    state = state_of(named(with_example.name))
    given = plan_services(state, CONFIG, Ledger(), state.services)[key]
    assert isinstance(given, LoadBalancer)
    assert (given.class_name, given.addresses) == ("fairlead.io/example", ("203.0.113.0",))
    state.update_services({ObjectKey(*key): named(with_example.name, given.addresses[0])})
    (served,) = plan_gateway(state, CONFIG, state.services).values()
    assert isinstance(served, LoadBalancer)
    rendered = spec.render({key: served})
    assert [str(each.key) for each in rendered[key].listeners] == ["203.0.113.0:80/TCP"]


def test_only_classes_that_gateways_serve_are_served_by_gateways_and_report_missing_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class may have addresses of pools and still not be served by gateways."""
    row = EXAMPLE._replace(served_by="octavia")
    monkeypatch.setattr(classes, "CLASSES", {**CLASSES, row.name: row})
    shown = enumerate(classes.CLASSES)
    state = state_of(*(named(name, f"203.0.113.{number}") for number, name in shown))
    state.gateways = Gateways()
    planned = plan_services(state, CONFIG, Ledger(), state.services)
    missed = {
        key.name
        for key, each in planned.items()
        if isinstance(each, LoadBalancer) and NO_GATEWAY in [note.code for note in each.notes]
    }
    by_gateways = [each.name for each in CLASSES.values() if each.served_by == "gateways"]
    expected = {name.rpartition("/")[2] for name in by_gateways}
    assert missed == expected
    assert {key.name for key in plan_gateway(state, CONFIG, state.services)} == expected
    assert isinstance(planned[ServiceKey("default", "example")], LoadBalancer)


def test_members_of_a_class_that_relies_on_the_api_are_not_probed() -> None:
    slices = [make_slice([("10.0.1.1", "node1", "ready"), ("10.0.2.1", "node2", "ready")])]
    verdicts = {"192.0.2.21": "up", "192.0.2.22": "down"}
    found = {}
    for members in ("probed", "api"):
        balancer = plan_at_gateway(
            make_service(),
            slices,
            NODES,
            ["203.0.113.1"],
            DIRECT._replace(members=members),
            lambda address, _port: verdicts[address],  # type: ignore[arg-type, return-value]
        )
        (listener,) = balancer.listeners
        states = [each.state for each in listener.members]
        found[members] = (balancer.health_monitor is not None, states)
    assert found == {"probed": (True, ["active", "down"]), "api": (False, ["active", "active"])}
