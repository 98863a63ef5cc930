"""Findings about other programs that announce addresses: which facts are conflicts, and what each
remedy names."""

import msgspec
import pytest
from tests.makers import make_service

from fairlead.kube.objects import Condition, Service, ServiceStatus
from fairlead.plan.other_announcers import (
    Daemon,
    HostAnnouncers,
    address_conflicts,
    controller_conflicts,
    daemon_conflicts,
)

VIP = "203.0.113.10"
BIRD = Daemon("Calico's BIRD", "its control socket answers", "export the routes of table {table}")


def test_an_address_that_is_not_announced_is_no_conflict() -> None:
    host = HostAnnouncers({VIP: ["kube-ipvs0", "eth0"]}, [])
    assert len(address_conflicts({VIP}, host, ["eth0"])) == 2
    assert address_conflicts({"203.0.113.11"}, host, ["eth0"]) == []


def test_an_address_of_the_loopback_interface_is_one_of_another_program() -> None:
    (found,) = address_conflicts({VIP}, HostAnnouncers({VIP: ["lo"]}, []), ["eth0"])
    assert "another program has assigned" in found.message
    assert "arp_ignore to 1" in found.remedy
    assert address_conflicts({VIP}, HostAnnouncers({VIP: ["lo"]}, ["eth0"]), ["eth0"]) == []


def test_a_message_names_a_limited_number_of_addresses() -> None:
    holders = {f"203.0.113.{number}": ["kube-ipvs0"] for number in range(20)}
    (found,) = address_conflicts(holders, HostAnnouncers(holders, []), ["eth0"])
    assert "and 15 more" in found.message
    assert len(str(found)) < 1024


def test_another_daemon_is_a_conflict_only_if_fairlead_has_its_own_sessions() -> None:
    host = HostAnnouncers({}, [], [BIRD])
    assert daemon_conflicts(host, "routes", 7471) == ()
    (found,) = daemon_conflicts(host, "bird", 7471)
    for each in ("announce.bgp.speaker to routes", "table 7471", "sourceAddress", "localPort"):
        assert each in found.remedy
    assert daemon_conflicts(HostAnnouncers({}, []), "bird", 7471) == []


def marked(
    *annotations: str, conditions: tuple[str, ...] = (), class_name: str | None = None
) -> Service:
    service = make_service(
        annotations=dict.fromkeys(annotations, "x"), load_balancer_class=class_name
    )
    found = tuple(Condition(each, "True") for each in conditions)
    return msgspec.structs.replace(service, status=ServiceStatus(conditions=found))


@pytest.mark.parametrize(
    ("service", "system"),
    [
        (marked("metallb.io/ip-allocated-from-pool"), "MetalLB"),
        (marked("metallb.universe.tf/ip-allocated-from-pool"), "MetalLB"),
        (marked("kube-vip.io/vipHost"), "kube-vip"),
        (marked(conditions=("cilium.io/IPAMRequestSatisfied",)), "Cilium"),
    ],
)
def test_marks_of_another_controller_are_a_conflict(service: Service, system: str) -> None:
    (found,) = controller_conflicts(service)
    assert found.message.startswith(f"{system} has served this Service")
    assert "spec.loadBalancerClass" in found.remedy
    assert found.evidence
    spec = msgspec.structs.replace(service.spec, load_balancer_class="fairlead.io/announce")
    with_class = msgspec.structs.replace(service, spec=spec)
    assert controller_conflicts(with_class) == (), "other controllers ignore the class"


def test_without_marks_there_is_no_conflict() -> None:
    assert controller_conflicts(marked(conditions=("fairlead.io/Ready",))) == []
    # A request of the user, not a mark of a controller.
    assert controller_conflicts(marked("metallb.io/loadBalancerIPs")) == []


def test_each_system_is_named_once() -> None:
    both = marked(
        "metallb.io/ip-allocated-from-pool",
        "metallb.universe.tf/ip-allocated-from-pool",
        "kube-vip.io/vipHost",
    )
    assert len(controller_conflicts(both)) == 2
