"""What a node announces for Services of class announce: the methods, weights, candidates, and the
confirmation by its own service proxy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.makers import EndpointRow
from tests.plan.test_announcing_nodes import ADDRESS, CLUSTER, Site, pods, shown, slice_of

from fairlead.announce_sections import AnnounceConfig, PoolAnnounce
from fairlead.config import Config, PoolConfig
from fairlead.kube.objects import Node, ObjectKey, Service, ServicePort
from fairlead.model import Announcement, ServiceKey
from fairlead.plan.confirming import HOLD_S, Confirmation, confirm
from fairlead.plan.node_announcing import NodeAnnouncing
from fairlead.plan.settling import COLLECT_S

WEB = ServiceKey("default", "web")
EXCLUDE = "node.kubernetes.io/exclude-from-external-load-balancers"


class Host:
    """One node of a site, with its clock."""

    def __init__(self, site: Site, name: str, **section: Any) -> None:
        self.site = site
        self.name = name
        self.config = Config(announce=AnnounceConfig(**section))
        self.announcing = NodeAnnouncing(self.config, name)
        self.unconfirmed: set[ServiceKey] = set()
        self.others: set[ServiceKey] = set()

    def at(self, now_s: float, key: ServiceKey = WEB) -> tuple[Announcement, ...]:
        service = self.site.state.services[key]
        decided = self.announcing.decide(self.site.state, service, now_s, self._serves)
        self.due_s, self.others = decided.due_s, set(decided.others)
        return decided.announcements

    def weight(self, now_s: float) -> int | None:
        """Return the weight that the node tells routers; None: it announces nothing."""
        announced = self.at(now_s)
        return announced[0].weight if announced else None

    def _serves(self, service: Service) -> bool:
        return service.key not in self.unconfirmed


@pytest.fixture
def site(nodes: dict[str, Node]) -> Site:
    return Site(nodes)


def put(site: Site, *rows: Sequence[EndpointRow], **spec: Any) -> None:
    site.add(shown(**spec), slice_of("web", [each for some in rows for each in some]))


def exclude(site: Site, name: str, labels: Mapping[str, str]) -> None:
    node = site.state.nodes[name]
    metadata = msgspec.structs.replace(node.metadata, labels=labels)
    site.state.update_nodes({ObjectKey("", name): msgspec.structs.replace(node, metadata=metadata)})


def test_a_node_announces_by_bgp_while_it_has_ready_pods(site: Site) -> None:
    put(site, pods("node1", "node1", "node2"))
    assert [Host(site, f"node{n}", method="bgp").weight(0) for n in (1, 2, 3)] == [2, 1, None]


def test_nothing_is_announced_without_the_section_or_for_another_class(site: Site) -> None:
    site.add(shown(class_name="fairlead.io/direct"), slice_of("web", pods("node1")))
    assert Host(site, "node1", method="bgp").at(0) == ()
    put(site, pods("node1"))
    assert Host(site, "node1", method="none").at(0) == ()
    service = site.state.services[WEB]
    none = NodeAnnouncing(Config(), "node1")
    assert none.decide(site.state, service, 0, lambda _: True).announcements == ()
    assert not none.may_serve(site.state, service)


def test_an_address_that_gateways_serve_too_is_left_to_them(site: Site) -> None:
    """The class of a Service at a shared address was changed."""
    put(site, pods("node1"))
    host = Host(site, "node1", method="bgp")
    assert host.weight(0) == 1
    ports = (ServicePort(81, node_port=30081),)
    site.add(shown("api", class_name="fairlead.io/direct", ports=ports), slice_of("api", ()))
    assert host.weight(0) is None


def test_in_layer_2_every_node_knows_the_candidates(site: Site) -> None:
    put(site, pods("node1", "node1", "node2"))
    for name in ("node1", "node2", "node3"):
        (announced,) = Host(site, name, method="l2").at(0)
        assert (announced.candidates, announced.weight) == (("node1", "node2"), 0)


def test_in_layer_2_candidates_follow_the_pods_at_once(site: Site) -> None:
    put(site, pods("node1"))
    host = Host(site, "node3", method="l2")
    host.at(0)
    put(site, pods("node1", "node2"))
    (announced,) = host.at(0.1)
    assert (announced.candidates, host.due_s) == (("node1", "node2"), math.inf)
    put(site, pods("node1", state="unready"))
    assert host.at(0.2)[0].candidates == ()


def test_a_node_announces_only_what_its_service_proxy_confirms(site: Site) -> None:
    put(site, pods("node1", "node2"))
    bgp, l2 = Host(site, "node1", method="bgp"), Host(site, "node1", method="l2")
    bgp.unconfirmed = l2.unconfirmed = {WEB}
    assert bgp.at(0) == ()
    assert l2.at(0)[0].candidates == ("node2",)
    assert bgp.announcing.may_serve(site.state, site.state.services[WEB]), "it has to be probed"
    bgp.unconfirmed = set()
    assert [each.weight for each in bgp.at(0.1)] == [1]


def test_a_node_without_pods_is_not_probed(site: Site) -> None:
    put(site, pods("node1"))
    web = site.state.services[WEB]
    assert not Host(site, "node2", method="bgp").announcing.may_serve(site.state, web)


def test_a_node_is_withdrawn_at_once_and_joins_later(site: Site) -> None:
    put(site, pods("node1"))
    host = Host(site, "node2", method="bgp")
    assert host.at(0) == ()
    put(site, pods("node1", "node2"))
    assert host.at(10) == ()
    assert host.due_s == 10 + COLLECT_S
    assert host.weight(15) == 1
    put(site, pods("node1"))
    assert host.at(15.1) == ()


def test_with_resilient_routers_a_node_joins_at_once_if_its_proxy_confirms_the_pods(
    site: Site,
) -> None:
    put(site, pods("node1"))
    host = Host(site, "node2", method="bgp", resilient=True)
    host.at(0)
    put(site, pods("node1", "node2"))
    assert host.weight(10) == 1
    put(site, pods("node1"), **CLUSTER)
    assert host.weight(20) == 1, "its weight changes together with the joins of other nodes"
    assert host.due_s == 20 + COLLECT_S, "no health port confirms rules for pods of other nodes"


def test_a_flip_of_the_policy_withdraws_no_node_that_can_still_serve(site: Site) -> None:
    put(site, pods("node1", "node2"))
    with_pod, without = Host(site, "node1", method="bgp"), Host(site, "node3", method="bgp")
    assert (with_pod.weight(0), without.weight(0)) == (1, None)
    put(site, pods("node1", "node2"), **CLUSTER)
    assert (with_pod.weight(10), without.weight(10)) == (1, None)
    assert (with_pod.weight(15), without.weight(15)) == (0, 0)
    put(site, pods("node1", "node2"))
    assert (with_pod.weight(20), without.weight(20)) == (0, None)
    assert with_pod.weight(25) == 1


def test_a_node_that_is_excluded_hands_over_and_then_withdraws(site: Site) -> None:
    put(site, pods("node1", "node2"))
    host = Host(site, "node1", method="bgp")
    host.at(0)
    exclude(site, "node1", {EXCLUDE: ""})
    (announced,) = host.at(1)
    assert announced.leaving
    put(site, pods("node1"))  # no other node is left: nothing can be handed over
    assert host.at(2) == ()
    exclude(site, "node1", {})
    assert host.weight(20) == 1


def test_an_excluded_node_that_announced_nothing_announces_nothing(site: Site) -> None:
    put(site, pods("node1", "node2"))
    exclude(site, "node1", {EXCLUDE: ""})
    assert Host(site, "node1", method="bgp").at(0) == ()


def test_services_at_one_address_are_decided_together(site: Site) -> None:
    """The announcement of each Service depends on the pods of the others, so a change of one of
    them marks the others, once."""
    from fairlead.kube.objects import ServicePort

    api = ServiceKey("default", "api")
    put(site, pods("node1", "node2"))
    site.add(
        shown("api", ports=(ServicePort(81, node_port=30081),)),
        slice_of("api", pods("node1", "node2", first=7)),
    )
    host = Host(site, "node1", method="bgp")
    assert [each.weight for each in host.at(0)] == [2]
    assert host.others == {api}
    assert [each.weight for each in host.at(0, api)] == [2]
    assert host.others == set()
    put(site, pods("node2"))
    assert host.at(1) == ()
    assert host.others == {api}
    assert host.at(1, api) == ()
    assert host.others == set()


def test_addresses_that_no_service_shows_are_forgotten(site: Site) -> None:
    put(site, pods("node1"))
    host = Host(site, "node2", method="bgp")
    host.at(0)
    site.state.update_services({ObjectKey(*WEB): None})
    host.announcing.forget(site.state)
    put(site, pods("node2"))
    assert host.weight(0.1) == 1, "a new Service is announced at once"
    assert [each.addresses for each in host.at(0.1)] == [(ADDRESS,)]


def test_a_health_port_confirms_by_answering_and_may_be_silent_for_a_while() -> None:
    state = confirm(Confirmation(), None, 0)
    assert not state.confirmed
    assert not confirm(state, "unready", 1).confirmed
    state = confirm(state, "up", 2)
    assert state == Confirmation(confirmed=True)
    state = confirm(state, "unready", 10)
    assert (state.confirmed, state.due_s) == (True, 10 + HOLD_S)
    assert confirm(state, "down", 20) == state, "the time counts from the first failure"
    assert confirm(confirm(state, "up", 20), "down", 30).due_s == 30 + HOLD_S
    gone = confirm(state, "unready", 10 + HOLD_S)
    assert gone == Confirmation()
    assert gone.due_s == math.inf


def test_a_service_without_ready_pods_does_not_withdraw_the_address_of_another(site: Site) -> None:
    """The service proxy confirms no Service without ready pods. While it has some on another node,
    it counts."""
    api = ServiceKey("default", "api")
    service = shown("api", ports=(ServicePort(81, node_port=30081),))
    put(site, pods("node1", "node2"))
    site.add(service, slice_of("api", ()))
    for pod in ((), pods("node1", state="unready")):
        site.add(service, slice_of("api", pod))
        for method in ("bgp", "l2"):
            host = Host(site, "node1", method=method)
            host.unconfirmed = {api}
            (announced,) = host.at(0)
            assert announced.weight == (1 if method == "bgp" else 0)
            assert method == "bgp" or announced.candidates == ("node1", "node2")
    site.add(service, slice_of("api", pods("node2", first=7)))
    host = Host(site, "node1", method="bgp")
    host.unconfirmed = {api}
    assert host.at(0) == ()
    host = Host(site, "node2", method="bgp")
    host.unconfirmed = {api}
    assert host.at(0) == ()
    host.unconfirmed = set()
    assert [each.weight for each in host.at(0)] == [2]


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_a_node_announces_host_routes_whatever_the_aggregates_of_the_pool(
    site: Site, policy: str
) -> None:
    """A shorter prefix would bring the node the packets of Services that it does not serve."""
    put(site, pods("node1"), **(CLUSTER if policy == "Cluster" else {}))
    pool = PoolConfig(
        "main",
        ("203.0.113.0/24", "2001:db8:f::/112"),
        announce=PoolAnnounce("bgp", aggregation_length=24, aggregation_length_v6=112),
    )
    host = Host(site, "node1", method="bgp")
    host.announcing = NodeAnnouncing(
        Config(pools=(pool,), announce=AnnounceConfig(method="bgp")), "node1"
    )
    (announced,) = host.at(0)
    assert (announced.aggregation_length, announced.aggregation_length_v6) == (32, 128)
