"""The doctor's rules: each fault has exactly its finding, with the right object, and clusters
without a fault have none."""

from typing import Any

import pytest
from tests.doctor.clusters import (
    CONFIG,
    NOW,
    NOW_S,
    OLD,
    healthy,
    make_event,
    make_node,
    make_pod,
    make_process,
    make_service,
    make_slice,
    make_workload,
    policy,
)

from fairlead.doctor.examine import confirmed
from fairlead.doctor.facts import Facts, NamedWorkload, Published, Target
from fairlead.doctor.pages import PAGES
from fairlead.doctor.rules import diagnose
from fairlead.kube.announcers import AnnouncerConflict, AnnouncerSession, AnnouncerStatus
from fairlead.kube.objects import (
    CLEANUP_FINALIZER,
    EXCLUDE_LABEL,
    Condition,
    ContainerPort,
    LoadBalancerIngress,
    PortStatus,
    ServicePort,
)
from fairlead.kube.presence import NotServed
from fairlead.model import ServiceKey

WEB = "Service default/web"
UNREADY = make_pod(ready=False)
LEAVING = make_pod(deleted=NOW)
DIRECT_AGAIN = make_service("other", addresses=("203.0.113.2",))
NAMED = (ServicePort(80, target_port="web", node_port=30080),)
DELETED: dict[str, Any] = {"deletion_timestamp": OLD, "finalizers": (CLEANUP_FINALIZER,)}
FOREIGN: dict[str, Any] = {"class_": "", "load_balancer_class": "example.com/lb"}
THREE_ONE = tuple(
    make_pod(f"w{number}", node, address=f"10.244.1.{number}")
    for number, node in enumerate(("node1", "node1", "node1", "node2", "node3"), 2)
)
RANGES: dict[str, Any] = {"load_balancer_source_ranges": ("198.51.100.0/24",)}
BOTH: dict[str, Any] = {
    "addresses": ("203.0.113.1", "2001:db8::1"),
    "ip_families": ("IPv4", "IPv6"),
}
NO_NODE_PORT = (ServicePort(80, target_port=8080),)
PORT_ERROR = LoadBalancerIngress(
    "203.0.113.1", ip_mode="Proxy", ports=(PortStatus(80, error="fairlead.io/NodePortMissing"),)
)
FULL = tuple(make_service(f"s{n}", addresses=(f"203.0.113.{n}",)) for n in range(4))
INSIDE_ONLY = policy(
    podSelector={"matchLabels": {"app": "web"}},
    ingress=[{"from": [{"podSelector": {}}, {"ipBlock": {"cidr": "10.244.0.0/16"}}]}],
)


def announcer(*sessions: AnnouncerSession, conflicts: tuple[AnnouncerConflict, ...] = ()) -> Facts:
    status = AnnouncerStatus(
        "gateway", "gw1", True, 1, len(conflicts), sessions=sessions, conflicts=conflicts
    )
    return healthy(announcers=(status,))


DOWN = AnnouncerSession("router", "192.0.2.254", "active", OLD, "OPEN: bad peer AS")
UP = AnnouncerSession("router", "192.0.2.254", "established", OLD)
CONFLICT = AnnouncerConflict("203.0.113.1", "eth0", "02:00:00:00:00:09", ("default/web",))
TAKES_TURNS = {
    ServiceKey("default", "web"): [
        Published("fairlead-status", ("203.0.113.1",)),
        Published("metallb", ("203.0.113.9",)),
        Published("fairlead-status", ("203.0.113.1",)),
    ]
}
FAULTS: dict[str, tuple[str, Facts]] = {
    "selector-matches-nothing": (WEB, healthy(make_service(selector={"app": "wep"}), slices=())),
    "selector-matches-nothing, scaled to 0": (
        WEB,
        healthy(
            pods=(), workloads=(NamedWorkload("Deployment", make_workload({"app": "web"}, 0)),)
        ),
    ),
    "target-port-name-unknown": (WEB, healthy(make_service(ports=NAMED), slices=())),
    "target-port-closed": (
        WEB,
        healthy(
            answers={Target("10.244.1.2", 8080): "refused", Target("10.244.2.2", 8080): "refused"}
        ),
    ),
    "pods-not-ready": (WEB, healthy(pods=(UNREADY,))),
    "pods-not-ready, some for long": (WEB, healthy(pods=(UNREADY, make_pod("w2", "node2")))),
    "all-terminating": (WEB, healthy(pods=(LEAVING,))),
    "all-terminating, with a new pod": (
        WEB,
        healthy(pods=(LEAVING, make_pod("w2", ready=False, since=NOW))),
    ),
    "class-unserved": (
        WEB,
        healthy(make_service(addresses=(), class_="", load_balancer_class="example.com/none")),
    ),
    "class-unserved, of this domain": (
        WEB,
        healthy(make_service(addresses=(), class_="", load_balancer_class="fairlead.io/driect")),
    ),
    "class-unserved, without a controller": (
        WEB,
        healthy(
            make_service(addresses=(), class_="", load_balancer_class="fairlead.io/direct"),
            processes=(),
        ),
    ),
    "class-unserved, of the default class": (
        WEB,
        healthy(make_service(addresses=(), class_=""), processes=()),
    ),
    "two-controllers": (WEB, healthy(writes=TAKES_TURNS)),
    "address-elsewhere": (
        WEB,
        healthy(make_service(addresses=(), load_balancer_ip="192.0.2.77")),
    ),
    "address-elsewhere, held": (
        WEB,
        healthy(make_service(addresses=(), load_balancer_ip="203.0.113.2"), DIRECT_AGAIN),
    ),
    "address-elsewhere, without Fairlead": (
        WEB,
        healthy(
            make_service(addresses=(), class_="", load_balancer_ip="203.0.113.2"),
            make_service("other", class_="", addresses=("203.0.113.2",)),
            config=None,
            events=(make_event("Service", "web", "AllocationFailed", "address in use"),),
        ),
    ),
    "pool-exhausted": ("pool public", healthy(make_service(addresses=()), *FULL)),
    "pool-exhausted, of MetalLB": (
        WEB,
        healthy(
            make_service(addresses=(), class_=""),
            config=None,
            events=(make_event("Service", "web", "AllocationFailed", "no available IPs"),),
        ),
    ),
    "excluded-node": (
        WEB,
        healthy(pods=(make_pod(),), nodes=(make_node("node1", 1, {EXCLUDE_LABEL: ""}),)),
    ),
    "source-range-lacks-pods": (WEB, healthy(make_service(**RANGES))),
    "source-range-lacks-family": (
        WEB,
        healthy(make_service(**BOTH, load_balancer_source_ranges=("0.0.0.0/0",))),
    ),
    "affinity-behind-nat": (
        WEB,
        healthy(
            make_service(ip_mode="Proxy", session_affinity="ClientIP"),
            pods=THREE_ONE,
        ),
    ),
    "unfair-by-placement": (WEB, healthy(make_service(**FOREIGN), pods=THREE_ONE)),
    "finalizer-orphaned": (WEB, healthy(make_service(meta=DELETED), processes=())),
    "finalizer-orphaned, of another controller": (
        WEB,
        healthy(make_service(**FOREIGN, meta=DELETED)),
    ),
    "nodeport-missing": (
        WEB,
        healthy(make_service(ports=NO_NODE_PORT, ingress=(PORT_ERROR,))),
    ),
    "nodeport-missing, by a refusal": (
        WEB,
        healthy(
            make_service(
                ports=NO_NODE_PORT,
                addresses=(),
                class_="fairlead.io/proxy",
                conditions=(
                    Condition("fairlead.io/Accepted", "False", "Refused", "needs node ports", OLD),
                ),
            )
        ),
    ),
    "nodeport-missing, by the Event of a cloud": (
        WEB,
        healthy(
            make_service(ports=NO_NODE_PORT, addresses=(), class_=""),
            config=None,
            events=(
                make_event("Service", "web", "SyncLoadBalancerFailed", "port has no node port"),
            ),
        ),
    ),
    "address-pending": (
        WEB,
        healthy(
            make_service(addresses=(), **FOREIGN),
            events=(make_event("Service", "web", "SyncLoadBalancerFailed", "quota exceeded"),),
        ),
    ),
    "condition-false": (
        WEB,
        healthy(
            make_service(
                conditions=(
                    Condition("fairlead.io/Ready", "False", "NoGateway", "no gateway", OLD),
                )
            )
        ),
    ),
    "network-policy-drops-clients": (
        "NetworkPolicy default/inside",
        healthy(policies=(INSIDE_ONLY,)),
    ),
    "bgp-down": ("gateway gw1", announcer(DOWN)),
    "address-conflict": ("address 203.0.113.1", announcer(conflicts=(CONFLICT,))),
    "gateways-differ": (
        "gateway gw2",
        healthy(
            processes=(
                make_process("controller", "c1"),
                make_process("gateway", "gw1"),
                make_process(
                    "gateway", "gw2", not_served=(NotServed("default/web"),), not_served_count=1
                ),
            )
        ),
    ),
    "gateway-stale": (
        "gateway gw1",
        healthy(processes=(make_process("gateway", "gw1", stale={"services": 60}),)),
    ),
    "gateway-stale, gone": (
        "gateway gw1",
        healthy(processes=(make_process("gateway", "gw1", alive=False),)),
    ),
}
YOUNG: dict[str, Any] = {"creation_timestamp": NOW}
HEALTHY: dict[str, Facts] = {
    "idle": Facts(now_s=NOW_S),
    "serving": healthy(),
    "new Service without an address": healthy(
        make_service(addresses=(), class_="", load_balancer_class="example.com/x", meta=YOUNG)
    ),
    "pods are about to be created": healthy(
        pods=(), workloads=(NamedWorkload("Deployment", make_workload({"app": "web"}, 2)),)
    ),
    "pod starts": healthy(pods=(make_pod(ready=False, since=NOW),)),
    "one pod of two is slow": healthy(
        pods=(make_pod("w2", ready=False, since="2027-01-15T07:58:00Z"), make_pod())
    ),
    "rollout": healthy(pods=(make_pod(), make_pod("w2", deleted=NOW), make_pod("w3", since=NOW))),
    "rollout changes the name of a port": healthy(
        make_service(ports=NAMED),
        pods=(make_pod(), make_pod("w2", ports=(ContainerPort(9090, "web"),), created=NOW)),
    ),
    "uneven during a rollout": healthy(
        make_service(**FOREIGN), pods=(*THREE_ONE, make_pod("w9", created=NOW))
    ),
    "uneven, and nodes are weighed": healthy(pods=THREE_ONE),
    "another pod of the node is excluded": healthy(
        nodes=(make_node("node1", 1, {EXCLUDE_LABEL: ""}), make_node("node2", 2))
    ),
    "ranges with pods": healthy(
        make_service(load_balancer_source_ranges=("198.51.100.0/24", "10.244.0.0/16"))
    ),
    "ranges, and callers inside pass the load balancer": healthy(
        make_service(**RANGES, ip_mode="Proxy")
    ),
    "deletion in progress": healthy(
        make_service(meta=DELETED | {"deletion_timestamp": NOW}), processes=()
    ),
    "deletion by a live controller": healthy(make_service(meta=DELETED)),
    "migration from one controller to another": healthy(
        writes={
            ServiceKey("default", "web"): [
                Published("metallb", ("203.0.113.9",)),
                Published("fairlead-status", ("203.0.113.1",)),
            ]
        }
    ),
    "requested address is assigned": healthy(make_service(load_balancer_ip="203.0.113.1")),
    "pool is full and no Service waits": healthy(*FULL),
    "affinity with the clients' addresses": healthy(make_service(session_affinity="ClientIP")),
    "no answer is no refusal": healthy(answers={Target("10.244.1.2", 8080): "silent"}),
    "one of two pods accepts": healthy(
        answers={Target("10.244.1.2", 8080): "refused", Target("10.244.2.2", 8080): "open"}
    ),
    "policy admits clients": healthy(
        policies=(INSIDE_ONLY, policy(podSelector={}, ingress=[{"ports": [{"port": 8080}]}]))
    ),
    "policy of other pods": healthy(policies=(policy(podSelector={"matchLabels": {"app": "db"}}),)),
    "policy for egress": healthy(policies=(policy(podSelector={}, policyTypes=["Egress"]),)),
    "policy Cluster hides clients": healthy(
        make_service(external_traffic_policy="Cluster"), policies=(INSIDE_ONLY,)
    ),
    "session is established": announcer(UP),
    "session starts": announcer(
        AnnouncerSession("router", "192.0.2.254", "connect", NOW, "connection refused")
    ),
    "condition is pending": healthy(
        make_service(
            conditions=(Condition("fairlead.io/Programmed", "False", "Pending", "soon", OLD),)
        )
    ),
    "node ports are not needed": healthy(make_service(ports=NO_NODE_PORT)),
    "nothing may be read": Facts(
        now_s=NOW_S,
        services=(make_service(),),
        slices=None,
        nodes=None,
        pods=None,
        events=None,
        workloads=None,
        policies=None,
        pools=None,
        grants=None,
        announcers=None,
        processes=None,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_exactly_its_finding(name: str) -> None:
    object_, facts = FAULTS[name]
    found = diagnose(facts)
    assert [each.key for each in found] == [(name.partition(",")[0], object_)]
    assert found[0].evidence
    assert all(each.fact and each.value and each.origin for each in found[0].evidence)
    assert found[0].remedy


@pytest.mark.parametrize("name", HEALTHY)
def test_a_cluster_without_a_fault_has_no_finding(name: str) -> None:
    assert diagnose(HEALTHY[name]) == ()


def test_every_finding_has_a_page_and_a_test() -> None:
    assert {name.partition(",")[0] for name in FAULTS} == set(PAGES)


def test_what_the_controller_reports_follows_from_the_cause() -> None:
    report = Condition("fairlead.io/Ready", "False", "NoReadyEndpoints", "no endpoint", OLD)
    service = make_service(selector={"app": "wep"}, conditions=(report,))
    (found,) = diagnose(healthy(service, slices=()))
    assert found.consequences == (
        "the controller reports: fairlead.io/Ready is False (NoReadyEndpoints): no endpoint",
    )


def test_the_nearest_pod_is_named_with_the_label_that_differs() -> None:
    (found,) = diagnose(healthy(make_service(selector={"app": "wep"}), slices=()))
    assert found.message.endswith("the nearest is pod w1, which has app=web")
    assert '{"spec":{"selector":{"app":"web"}}}' in found.remedy


def test_the_reason_of_an_unready_pod_is_the_output_of_its_probe() -> None:
    failed = make_event("Pod", "w1", "Unhealthy", "HTTP probe failed with statuscode: 500")
    (found,) = diagnose(healthy(pods=(UNREADY,), events=(failed,)))
    assert found.evidence[1].value == "Unhealthy: HTTP probe failed with statuscode: 500"


def test_a_condition_that_follows_from_a_finding_about_the_cluster_is_listed_under_it() -> None:
    reports = (Condition("fairlead.io/Ready", "False", "NotAnnounced", "not announced", OLD),)
    status = AnnouncerStatus("gateway", "gw1", True, 1, 0, sessions=(DOWN,))
    (found,) = diagnose(healthy(make_service(conditions=reports), announcers=(status,)))
    assert found.id == "bgp-down"
    assert found.consequences == (f"{WEB}: not announced",)


def test_services_that_wait_for_one_pool_are_one_finding() -> None:
    waiting = [make_service(f"w{number}", addresses=()) for number in (1, 2)]
    (found,) = diagnose(healthy(*waiting, *FULL))
    assert len(found.consequences) == 2


def test_the_share_of_the_busiest_pod_is_named() -> None:
    (found,) = diagnose(healthy(make_service(**FOREIGN), pods=THREE_ONE))
    assert "gets 33% of the connections instead of 20%" in found.message


def test_events_of_a_deleted_service_of_the_same_name_do_not_count() -> None:
    foreign = make_service(addresses=(), **FOREIGN, meta={"uid": "new"})
    event = make_event("Service", "web", "EnsuringLoadBalancer", "by the old one", uid="old")
    assert [each.id for each in diagnose(healthy(foreign, events=(event,)))] == ["class-unserved"]


def test_a_finding_that_is_gone_at_the_second_look_is_not_reported() -> None:
    before = diagnose(healthy(pods=(UNREADY,)))
    assert confirmed(before, ()) == ()
    assert confirmed((), before) == ()
    assert confirmed(before, before) == before


def test_only_the_named_services_are_examined() -> None:
    wrong = make_service("wrong", selector={"app": "nothing"})
    facts = healthy(make_service(), wrong, wanted=(ServiceKey("default", "web"),))
    assert diagnose(facts) == ()


def test_the_announcer_of_a_process_that_is_gone_does_not_count() -> None:
    status = AnnouncerStatus("gateway", "gw9", True, 1, 0, sessions=(DOWN,))
    assert diagnose(healthy(announcers=(status,))) == ()


def test_without_the_configuration_the_claim_of_a_service_tells_its_class() -> None:
    assert CONFIG.default_class
    assert diagnose(healthy(config=None)) == ()


def test_a_full_set_of_slices_is_not_needed_for_a_service_without_a_selector() -> None:
    service = make_service(selector=None)
    assert diagnose(healthy(service, slices=(make_slice(make_pod()),))) == ()
