"""What class ovn refuses or reports."""

import pytest
from tests.makers import make_service

from fairlead.config import Config
from fairlead.drivers.ovn import checks
from fairlead.drivers.ovn.foreign import ForeignRow, holder, read_foreign, taken
from fairlead.drivers.ovn.spec import Attachment, Frontend
from fairlead.errors import Refused
from fairlead.plan.ovn import ovn_terms
from fairlead.plan.terms import ServiceContext
from fairlead.sections import OvnConfig

WEB = Frontend("203.0.113.40", 80, "TCP")


def row(*vips: str, protocol: str = "tcp", **external_ids: str) -> ForeignRow:
    """Return a row of others."""
    return read_foreign(
        {
            "_uuid": "uuid1",
            "name": "theirs",
            "protocol": protocol,
            "vips": dict.fromkeys(vips, ""),
            "external_ids": external_ids,
        }
    )


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("22.12.1-20.27.0-70.6", True),
        ("23.03.1-20.27.0-70.6", False),
        ("25.03.0-20.41.0-78.0", False),
        ("", False),
    ],
)
def test_an_ovn_before_23_03_is_refused(text: str, refused: bool) -> None:
    found = checks.check_version({"northd_internal_version": text} if text else {})
    assert (found is not None) == refused
    assert found is None or "OVN 22.12 is too old" in str(found)


@pytest.mark.parametrize(
    ("gateways", "chassis", "reported"),
    [(2, 2, True), (2, 3, False), (3, 3, False), (1, 1, False)],
)
def test_two_gateway_chassis_without_a_third_chassis_are_reported(
    gateways: int, chassis: int, reported: bool
) -> None:
    found = checks.check_failover("edge", gateways, chassis)
    assert (found is not None) == reported


@pytest.mark.parametrize(
    ("name", "marks", "refused"),
    [
        ("edge", {}, False),
        ("GR_berlin", {}, False),
        ("GR_node1", {"k8s.ovn.org/kind": "Service"}, True),
        ("ovn_cluster_router", {}, True),
        ("edge", {"k8s.ovn.org/owner": "default/web"}, True),
    ],
)
def test_routers_of_ovn_kubernetes_are_refused(
    name: str, marks: dict[str, str], refused: bool
) -> None:
    other = ForeignRow("uuid1", "theirs", "tcp", ("203.0.113.9:80",), marks)
    place = Attachment("Logical_Router", name)
    assert (checks.check_owner(place, [other]) is not None) == refused


@pytest.mark.parametrize(
    ("other", "held"),
    [
        (row("203.0.113.40:80"), True),
        (row("203.0.113.40:81"), False),
        (row("203.0.113.40:80", protocol="udp"), False),
        (row("203.0.113.40", protocol="udp"), True),
        (row("203.0.113.41:80", "203.0.113.40:80"), True),
        (row("^vip:80", ""), False),
    ],
)
def test_an_address_and_port_belong_to_one_row(other: ForeignRow, held: bool) -> None:
    assert (holder([other], WEB) is not None) == held


@pytest.mark.parametrize(
    ("vip", "held"),
    [
        ("[2001:DB8::1]:80", True),
        ("[2001:db8:0::1]:80", True),
        ("[2001:db8::1]:81", False),
        ("2001:DB8:0:0::1", True),
        ("[2001:db8::2]:80", False),
    ],
)
def test_an_ipv6_address_of_others_is_recognized_in_every_notation(vip: str, held: bool) -> None:
    frontend = Frontend("2001:db8::1", 80, "TCP")
    assert (holder([row(vip)], frontend) is not None) == held


def test_a_refusal_names_the_row_and_its_owner() -> None:
    other = row("203.0.113.40:80", **{"k8s.ovn.org/owner": "default/web"})
    edge = Attachment("Logical_Router", "edge")
    text = str(taken(WEB, other, edge))
    assert text.startswith("router edge has another load balancer for 203.0.113.40:80/TCP")
    assert "row theirs (uuid1), owner OVN-Kubernetes (k8s.ovn.org/owner=default/web)" in text
    marks = {"fairlead.io/cluster": "c2", "fairlead.io/service": "a/b"}
    assert "owner Service a/b of Fairlead cluster c2" in str(taken(WEB, row(**marks), edge))


def test_a_row_without_the_mark_of_its_cluster_is_named_as_such() -> None:
    other = ForeignRow("uuid1", "fairlead:c1:default/web:x", "tcp", (), {})
    assert "removed the mark fairlead.io/cluster" in other.owner


def test_source_ranges_are_refused() -> None:
    section = OvnConfig(northbound=("tcp:192.0.2.1:6641",), router="edge", cluster_id="c1")
    config = Config(ovn=section)
    service = make_service(load_balancer_source_ranges=("198.51.100.0/24",))
    with pytest.raises(Refused, match="admits every client"):
        ovn_terms(ServiceContext(service, config, {}, ("203.0.113.40",)))
