"""The terms of class ovn."""

from collections.abc import Sequence

import pytest
from tests.makers import make_service

from fairlead.config import Config
from fairlead.kube.objects import Service
from fairlead.model import Listener, PodMember
from fairlead.plan.ovn import AFFINITY, PODS_WITHOUT_NODE, ovn_terms
from fairlead.plan.terms import ServiceContext, Terms
from fairlead.sections import OvnConfig

NORTHBOUND = ("tcp:192.0.2.1:6641",)
ONE_ROUTER = OvnConfig(northbound=NORTHBOUND, router="edge", cluster_id="c1")
GATEWAYS = OvnConfig(
    northbound=NORTHBOUND, topology="gateways", routers="GR_{node}", cluster_id="c1"
)


def terms(section: OvnConfig, service: Service) -> Terms:
    return ovn_terms(ServiceContext(service, Config(ovn=section), {}, ("203.0.113.40",)))


def with_pods(*nodes: str) -> Sequence[Listener]:
    """Return a listener with a pod on each of these nodes."""
    pods = tuple(PodMember(f"10.244.1.{at}", 8080, node) for at, node in enumerate(nodes))
    return [Listener("IPv4", 80, "TCP", "Local", 30080, (), pods=pods)]


@pytest.mark.parametrize(
    ("section", "nodes", "reported"),
    [
        (ONE_ROUTER, ("n1", ""), False),
        (GATEWAYS, ("n1", "n2"), False),
        (GATEWAYS, ("n1", ""), True),
        (GATEWAYS, (), False),
    ],
)
def test_pods_that_no_gateway_router_sends_to_are_reported(
    section: OvnConfig, nodes: tuple[str, ...], reported: bool
) -> None:
    found = terms(section, make_service()).remarks(with_pods(*nodes))
    assert [each.code for each in found] == [PODS_WITHOUT_NODE] * reported


@pytest.mark.parametrize(("section", "reported"), [(ONE_ROUTER, False), (GATEWAYS, True)])
def test_session_affinity_holds_for_one_node_only(section: OvnConfig, reported: bool) -> None:
    service = make_service(session_affinity="ClientIP")
    assert (AFFINITY in terms(section, service).notes) == reported
    assert not terms(section, make_service()).notes
