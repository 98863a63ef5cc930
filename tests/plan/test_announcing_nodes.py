"""Which nodes announce an address of class announce, with which weights, and what its owner is
told."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.makers import EndpointRow, make_service, make_slice

from fairlead.announce_sections import AnnounceConfig, BgpConfig, PoolAnnounce
from fairlead.config import Config
from fairlead.kube.objects import (
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeCondition,
    NodeStatus,
    ObjectKey,
    PortStatus,
    Service,
    ServicePort,
    ServiceStatus,
)
from fairlead.model import Announcement, Finding, ServiceKey
from fairlead.plan.announce import admitted
from fairlead.plan.announced import (
    AGGREGATION_IGNORED,
    ANNOUNCE,
    CONNECTIONS_NOT_KEPT,
    NO_COMMON_NODE,
    ONE_NODE_AT_A_TIME,
    SHARES_BY_NODE,
)
from fairlead.plan.announced_notes import announced_notes, services_at, without_aggregates
from fairlead.plan.announcing_nodes import AnnouncingNodes, announcing_nodes
from fairlead.plan.pool_terms import PoolTerms
from fairlead.state import State

ADDRESS = "203.0.113.10"
CLUSTER: dict[str, Any] = {"external_traffic_policy": "Cluster", "health_check_node_port": 0}
BGP, L2 = Announcement((ADDRESS,), "bgp"), Announcement((ADDRESS,), "l2")
CONFIG = Config(announce=AnnounceConfig())


def shown(name: str = "web", class_name: str = ANNOUNCE, **spec: Any) -> Service:
    """A Service whose status shows ADDRESS with all its ports."""
    service = make_service(name, load_balancer_class=class_name, **spec)
    ports = tuple(PortStatus(each.port, each.protocol) for each in service.spec.ports)
    ingress = (LoadBalancerIngress(ADDRESS, ports=ports),)
    return msgspec.structs.replace(service, status=ServiceStatus(LoadBalancerStatus(ingress)))


def slice_of(
    name: str, rows: Sequence[EndpointRow], ports: Sequence[tuple[str, int]] = (("", 8080),)
) -> EndpointSlice:
    made = make_slice(rows, name=f"{name}-1", ports=ports)
    labels = {"kubernetes.io/service-name": name}
    return msgspec.structs.replace(
        made, metadata=msgspec.structs.replace(made.metadata, labels=labels)
    )


class Site:
    """Services at ADDRESS, with their endpoints."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.state = State(())
        self.state.update_nodes({ObjectKey("", name): node for name, node in nodes.items()})

    def add(self, service: Service, *slices: EndpointSlice) -> None:
        self.state.update_services({ObjectKey(*service.key): service})
        self.state.update_slices({ObjectKey("default", s.metadata.name): s for s in slices})

    def found(self) -> AnnouncingNodes:
        at_address = services_at(self.state, CONFIG, ADDRESS)
        return announcing_nodes(self.state, ADDRESS, at_address, admitted(self.state.nodes))

    def notes(
        self, service: Service, announcement: Announcement, **section: Any
    ) -> Mapping[str, Finding]:
        config = Config(announce=AnnounceConfig(**section))
        found = announced_notes(self.state, config, service, [announcement])
        return {each.code: each for each in found}


@pytest.fixture
def site(nodes: dict[str, Node]) -> Site:
    return Site(nodes)


def pods(*on: str, state: str = "ready", first: int = 1) -> list[EndpointRow]:
    return [(f"10.0.0.{first + index}", node, state) for index, node in enumerate(on)]


THREE_ONE_ONE = pods("node1", "node1", "node1", "node2", "node3")


def test_with_policy_local_nodes_announce_with_the_number_of_their_ready_pods(site: Site) -> None:
    site.add(shown(), slice_of("web", THREE_ONE_ONE))
    assert site.found() == AnnouncingNodes({"node1": 3, "node2": 1, "node3": 1}, local=True)


def test_with_policy_cluster_all_nodes_announce_without_weights(site: Site) -> None:
    site.add(shown(**CLUSTER), slice_of("web", pods("node1", "node1")))
    assert site.found() == AnnouncingNodes(dict.fromkeys(site.state.nodes, 0))


@pytest.mark.parametrize("spec", [{}, CLUSTER])
def test_without_a_usable_pod_no_node_announces(site: Site, spec: dict[str, Any]) -> None:
    rows = [*pods("node1", state="unready"), *pods("node2", state="dying", first=5)]
    site.add(shown(**spec), slice_of("web", rows))
    assert site.found().weights == {}
    assert site.found().disjoint == ()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([*pods("node1"), *pods("node2", state="draining", first=5)], {"node1": 1}),
        (pods("node1", "node2", "node2", state="draining"), {"node1": 1, "node2": 2}),
        (pods("node1", state="serving"), {}),
        ([*pods("gone"), *pods("node2", state="draining", first=5)], {"node2": 1}),
        (pods("gone"), {}),
        (pods(""), {}),
    ],
    ids=["ready first", "only draining", "not ready", "ready on no node", "unknown", "nameless"],
)
def test_pods_that_drain_count_only_if_no_pod_is_ready(
    site: Site, rows: Sequence[EndpointRow], expected: Mapping[str, int]
) -> None:
    site.add(shown(), slice_of("web", rows))
    assert site.found().weights == expected


def test_a_node_whose_pods_all_terminate_retires_when_others_have_ready_pods(site: Site) -> None:
    rows = [*pods("node1", "node1", state="draining"), *pods("node2", first=5)]
    rows += pods("node3", state="dying", first=7)
    site.add(shown(), slice_of("web", rows))
    assert site.found() == AnnouncingNodes({"node2": 1}, local=True, retiring={"node1": 2})
    site.add(shown(**CLUSTER), slice_of("web", rows))
    assert site.found().retiring == {}


def test_a_node_retires_only_if_it_still_serves_every_service_at_the_address(site: Site) -> None:
    draining = pods("node1", state="draining")
    site.add(shown(), slice_of("web", [*draining, *pods("node2", first=5)]))
    api = shown("api", ports=(ServicePort(81, node_port=30081),))
    site.add(api, slice_of("api", pods("node2", first=7)))
    assert site.found() == AnnouncingNodes({"node2": 2}, local=True)
    site.add(api, slice_of("api", pods("node1", "node2", first=7)))
    assert site.found() == AnnouncingNodes({"node2": 2}, local=True, retiring={"node1": 2})


def test_a_node_that_is_excluded_does_not_announce(site: Site) -> None:
    label = {"node.kubernetes.io/exclude-from-external-load-balancers": ""}
    node = site.state.nodes["node1"]
    excluded = msgspec.structs.replace(
        node, metadata=msgspec.structs.replace(node.metadata, labels=label)
    )
    site.state.update_nodes({ObjectKey("", "node1"): excluded})
    site.add(shown(), slice_of("web", THREE_ONE_ONE))
    assert site.found().weights == {"node2": 1, "node3": 1}


def cordon(site: Site, *names: str) -> None:
    for name in names:
        node = site.state.nodes[name]
        spec = msgspec.structs.replace(node.spec, unschedulable=True)
        site.state.update_nodes({ObjectKey("", name): msgspec.structs.replace(node, spec=spec)})


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_a_cordoned_node_announces_as_long_as_it_has_pods(site: Site, state: str) -> None:
    for spec in ({}, CLUSTER):
        site.add(shown(**spec), slice_of("web", pods("node1", state=state)))
        cordon(site, "node1")
        assert "node1" in site.found().weights


def test_with_policy_cluster_a_cordoned_node_without_pods_leaves_the_address_to_others(
    site: Site,
) -> None:
    site.add(shown(**CLUSTER), slice_of("web", pods("node1", "node2")))
    changes = site.state.node_changes
    cordon(site, "node2", "node3")
    assert site.state.node_changes > changes, "the cordon causes no new plan"
    assert site.found().weights.keys() == site.state.nodes.keys() - {"node3"}
    site.add(shown(**CLUSTER), slice_of("web", pods("node1")))
    assert site.found().weights.keys() == site.state.nodes.keys() - {"node2", "node3"}


def test_if_all_nodes_are_cordoned_nodes_with_pods_announce_and_without_pods_all_do(
    site: Site,
) -> None:
    cordon(site, *site.state.nodes)
    site.add(shown(**CLUSTER), slice_of("web", pods("node1", "node2")))
    assert site.found().weights.keys() == {"node1", "node2"}
    site.add(shown(**CLUSTER), slice_of("web", pods("elsewhere")))
    assert site.found().weights.keys() == site.state.nodes.keys()


def test_a_cordon_takes_no_node_from_an_address_that_only_this_node_serves(site: Site) -> None:
    """Another Service at the address has policy Local, and pods on the cordoned node only."""
    site.add(shown(**CLUSTER), slice_of("web", pods("node2")))
    api = shown("api", ports=(ServicePort(81, node_port=30081),))
    site.add(api, slice_of("api", pods("node1", first=7)))
    cordon(site, "node1")
    assert site.found().weights.keys() == {"node1"}


def test_only_nodes_with_pods_of_every_service_announce_a_shared_address(site: Site) -> None:
    site.add(shown(), slice_of("web", pods("node1", "node1", "node2")))
    dns = shown("dns", ports=(ServicePort(53, protocol="UDP", node_port=30053),))
    site.add(dns, slice_of("dns", pods("node2", "node3", first=7), ports=()))
    # Without a port in its slice, the second Service has no endpoint and excludes no node.
    assert site.found().weights == {"node1": 2, "node2": 1}
    made = slice_of("dns", pods("node2", "node3", first=7))
    udp = msgspec.structs.replace(made.ports[0], protocol="UDP")  # type: ignore[index]
    site.add(dns, msgspec.structs.replace(made, ports=(udp,)))
    assert site.found().weights == {"node2": 2}


def test_if_no_node_serves_every_service_none_announces_and_the_owners_learn_the_reason(
    site: Site,
) -> None:
    first, second = shown(), shown("api", ports=(ServicePort(81, node_port=30081),))
    site.add(first, slice_of("web", pods("node1")))
    site.add(second, slice_of("api", pods("node2", first=7)))
    assert site.found().weights == {}
    for service in (first, second):
        note = site.notes(service, BGP)[NO_COMMON_NODE]
        assert note.blocks == "Ready"
        assert "default/api, default/web" in note.message
        assert "class fairlead.io/direct" in note.remedy


def test_a_node_must_serve_every_port_of_a_service(site: Site) -> None:
    """Pods may serve different ports, by named target ports."""
    ports = (
        ServicePort(80, name="http", node_port=30080),
        ServicePort(443, name="https", node_port=30443),
    )
    service = shown(ports=ports)
    site.add(
        service,
        slice_of("web", pods("node1", "node2"), ports=(("http", 8080),)),
        msgspec.structs.replace(
            slice_of("web", pods("node2", first=9), ports=(("https", 8443),)),
            metadata=msgspec.structs.replace(slice_of("web", []).metadata, name="web-2"),
        ),
    )
    assert site.found().weights == {"node2": 1}


def test_services_of_other_classes_at_the_address_do_not_count(site: Site) -> None:
    site.add(shown(), slice_of("web", THREE_ONE_ONE))
    site.add(shown("other", class_name="fairlead.io/direct"), slice_of("other", pods("node4")))
    assert site.found().weights == {"node1": 3, "node2": 1, "node3": 1}


@pytest.mark.parametrize(
    ("rows", "announcement", "spec", "expected"),
    [
        (THREE_ONE_ONE, BGP, {}, {CONNECTIONS_NOT_KEPT, SHARES_BY_NODE}),
        (pods("node1", "node2"), BGP, {}, {CONNECTIONS_NOT_KEPT}),
        (THREE_ONE_ONE, BGP, CLUSTER, {CONNECTIONS_NOT_KEPT}),
        (THREE_ONE_ONE, L2, {}, {CONNECTIONS_NOT_KEPT, ONE_NODE_AT_A_TIME}),
        (pods("node1", "node1"), L2, {}, {CONNECTIONS_NOT_KEPT}),
        (THREE_ONE_ONE, L2, CLUSTER, {CONNECTIONS_NOT_KEPT}),
    ],
)
def test_the_owner_learns_what_the_class_cannot_do_and_which_class_can(
    site: Site,
    rows: Sequence[EndpointRow],
    announcement: Announcement,
    spec: dict[str, Any],
    expected: set[str],
) -> None:
    service = shown(**spec)
    site.add(service, slice_of("web", rows))
    notes = site.notes(service, announcement)
    assert notes.keys() == expected
    assert all("fairlead.io/direct, with gateways on the nodes" in n.remedy for n in notes.values())
    assert not any(note.blocks for note in notes.values())


def test_nodes_announce_if_the_network_of_all_of_them_is_not_ready(site: Site) -> None:
    site.add(shown(), slice_of("web", THREE_ONE_ONE))
    wanted = site.found().weights
    nodes = site.state.nodes.copy()
    status = NodeStatus(conditions=(NodeCondition("NetworkUnavailable", "True"),))
    for number, (name, node) in enumerate(nodes.items(), 1):
        changed = msgspec.structs.replace(node, status=status)
        site.state.update_nodes({ObjectKey("", name): changed})
        assert (name in site.found().weights) == (number == len(nodes) and name in wanted)
    assert site.found().weights == wanted


def test_with_speaker_routes_the_owner_learns_that_routers_get_no_weights(site: Site) -> None:
    service = shown()
    site.add(service, slice_of("web", THREE_ONE_ONE))
    assert "weighted ECMP" in site.notes(service, BGP)[SHARES_BY_NODE].remedy
    note = site.notes(service, BGP, bgp=BgpConfig(speaker="routes"))[SHARES_BY_NODE]
    assert "routers learn no weights" in note.message
    assert "set announce.bgp.speaker to bird" in note.remedy
    assert "weighted ECMP" not in note.remedy


def test_with_resilient_routers_only_the_connections_of_a_withdrawn_node_break(site: Site) -> None:
    service = shown()
    site.add(service, slice_of("web", THREE_ONE_ONE))
    assert "15 to 50 %" in site.notes(service, BGP)[CONNECTIONS_NOT_KEPT].message
    note = site.notes(service, BGP, resilient=True)[CONNECTIONS_NOT_KEPT]
    assert "15 to 50 %" not in note.message


def test_only_nodes_that_the_pool_selects_announce(site: Site) -> None:
    service = shown()
    site.add(service, slice_of("web", THREE_ONE_ONE))
    selected = msgspec.structs.replace(BGP, candidates=("node2", "node3"))
    assert site.notes(service, selected).keys() == {CONNECTIONS_NOT_KEPT}  # one pod on each
    assert site.state.services.keys() == {ServiceKey("default", "web")}


def test_the_owner_is_told_that_nodes_announce_no_aggregates() -> None:
    terms = PoolTerms("main", PoolAnnounce("bgp", aggregation_length=24, aggregation_length_v6=64))
    addresses = ("203.0.113.1", "203.0.113.2", "2001:db8::1")
    notes = without_aggregates((terms, each) for each in addresses)
    assert [each.code for each in notes] == [AGGREGATION_IGNORED] * 2
    assert "aggregationLength of pool main has no effect" in str(notes[0])
    assert "class fairlead.io/direct" in str(notes[1])
    assert without_aggregates([(PoolTerms("", PoolAnnounce()), "203.0.113.1")]) == []
