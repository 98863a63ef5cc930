"""The doctor's rules: each fault has exactly its finding, with the right object, and clusters
without a fault have none."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.doctor.clusters import (
    CONFIG,
    DIRECT,
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

from fairlead.config import ClusterConfig, Config, PoolConfig
from fairlead.doctor.examine import confirmed
from fairlead.doctor.facts import Facts, NamedWorkload, Published, Refusal
from fairlead.doctor.objects import OwnedService
from fairlead.doctor.pages import PAGES
from fairlead.doctor.rights import Right
from fairlead.doctor.rules import diagnose
from fairlead.doctor.rules.addresses import CILIUM_REQUEST
from fairlead.doctor.rules.control import KUBE_VIP
from fairlead.doctor.rules.traffic import AWS_TARGETS
from fairlead.kube.objects import (
    CLEANUP_FINALIZER,
    EXCLUDE_LABEL,
    Condition,
    ContainerPort,
    LoadBalancerIngress,
    Node,
    ObjectMeta,
    PortStatus,
    ServicePort,
)
from fairlead.kube.presence import NotServed
from fairlead.model import ServiceKey
from fairlead.sections import AnnounceConfig

WEB = "Service default/web"
UNREADY = make_pod(ready=False)
NO_NODE = make_pod(node="")
KLIPPER = "svccontroller.k3s.cattle.io/"
LACKS_NODES = Refusal("gateway", "fairlead-system/fairlead-gateway", Right("", "nodes", "list"))
LEAVING = make_pod(deleted=NOW)
DIRECT_AGAIN = make_service("other", addresses=("203.0.113.2",))
NAMED = (ServicePort(80, target_port="web", node_port=30080),)
DELETED: dict[str, Any] = {"deletion_timestamp": OLD, "finalizers": (CLEANUP_FINALIZER,)}
FOREIGN: dict[str, Any] = {"class_": "", "load_balancer_class": "example.com/lb"}
THREE_ONE = tuple(
    make_pod(f"w{number}", node, address=f"10.244.1.{number}")
    for number, node in enumerate(("node1", "node1", "node1", "node2", "node3"), 2)
)
EXCLUDED = make_node("node1", 1, {EXCLUDE_LABEL: ""})
METALLB = make_service(
    class_="", meta={"annotations": {"metallb.io/ip-allocated-from-pool": "lan"}}
)
NO_POOL = Condition(CILIUM_REQUEST, "False", "no_pool", "no pool", OLD)
BEFORE = "2027-01-15T06:30:00Z"
"""Half an hour before OLD."""
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


def not_allocated(message: str) -> Facts:
    """A Service without an address, for which MetalLB wrote an Event with this message."""
    return healthy(
        make_service(addresses=(), class_=""),
        config=None,
        events=(make_event("Service", "web", "AllocationFailed", message),),
    )


TAKES_TURNS = {
    ServiceKey("default", "web"): [
        Published("fairlead-status", ("203.0.113.1",)),
        Published("metallb", ("203.0.113.9",)),
        Published("fairlead-status", ("203.0.113.1",)),
    ]
}
FAULTS: dict[str, tuple[str, Facts]] = {
    "SelectorMatchesNothing": (WEB, healthy(make_service(selector={"app": "wep"}), slices=())),
    "SelectorMatchesNothing, scaled to 0": (
        WEB,
        healthy(
            pods=(), workloads=(NamedWorkload("Deployment", make_workload({"app": "web"}, 0)),)
        ),
    ),
    "TargetPortNameUnknown": (WEB, healthy(make_service(ports=NAMED), slices=())),
    "SelectorMatchesNothing, a workload creates none": (
        WEB,
        healthy(
            pods=(),
            workloads=(NamedWorkload("Deployment", make_workload({"app": "web"}, 2, OLD)),),
        ),
    ),
    "PortNameDiffers": (
        WEB,
        healthy(
            make_service(selector=None),
            slices=(make_slice(make_pod(), port="https"),),
        ),
    ),
    "EndpointsWithoutNode": (WEB, healthy(slices=(make_slice(NO_NODE),))),
    "AddressExcluded": (WEB, healthy(make_service(addresses=("192.0.2.1",)))),
    "AddressExcluded, of MetalLB": (
        WEB,
        healthy(
            make_service(
                class_="",
                addresses=("192.0.2.2",),
                meta={"annotations": {"metallb.io/ip-allocated-from-pool": "lan"}},
            ),
            config=None,
        ),
    ),
    "AddressElsewhere, of a node": (
        WEB,
        healthy(
            make_service(addresses=(), load_balancer_ip="192.0.2.1"),
            config=Config(default_class=DIRECT, pools=(PoolConfig("lan", ("192.0.2.0/28",)),)),
        ),
    ),
    "AddressElsewhere, of Cilium": (
        WEB,
        healthy(
            make_service(
                addresses=(),
                class_="",
                load_balancer_ip="192.0.2.77",
                conditions=(NO_POOL,),
            ),
            config=None,
        ),
    ),
    "PoolExhausted, of MetalLB 0.16": (
        WEB,
        not_allocated("no suitable pool for IPv4"),
    ),
    "PoolExhausted, of Cilium": (
        WEB,
        healthy(
            make_service(
                addresses=(),
                class_="",
                conditions=(Condition(CILIUM_REQUEST, "False", "out_of_ips", "full", OLD),),
            ),
            config=None,
        ),
    ),
    "PoolExhausted, the cluster uses the rest": (
        "pool lan",
        healthy(
            make_service(addresses=()),
            config=Config(
                default_class=DIRECT, pools=(PoolConfig("lan", ("192.0.2.1-192.0.2.3",)),)
            ),
        ),
    ),
    "SourceRangeForgetsPods, CIDRs of the configuration": (
        WEB,
        healthy(
            make_service(**RANGES),
            nodes=(Node(ObjectMeta(name="node1")),),
            config=Config(
                default_class=DIRECT, cluster=ClusterConfig(pod_cidrs=("10.244.0.0/16",))
            ),
        ),
    ),
    "ApiForbidden": (
        "ServiceAccount fairlead-system/fairlead-gateway",
        healthy(refusals=(LACKS_NODES,)),
    ),
    "AddressPending, its controller says nothing": (
        WEB,
        healthy(
            make_service(addresses=(), class_="", meta={"finalizers": (CLEANUP_FINALIZER,)}),
            config=None,
        ),
    ),
    "PodsNotReady": (WEB, healthy(pods=(UNREADY,))),
    "PodsNotReady, some for long": (WEB, healthy(pods=(UNREADY, make_pod("w2", "node2")))),
    "AllTerminating": (WEB, healthy(pods=(LEAVING,))),
    "AllTerminating, with a new pod": (
        WEB,
        healthy(pods=(LEAVING, make_pod("w2", ready=False, since=NOW))),
    ),
    "ClassUnserved": (
        WEB,
        healthy(make_service(addresses=(), class_="", load_balancer_class="example.com/none")),
    ),
    "ClassUnserved, of this domain": (
        WEB,
        healthy(make_service(addresses=(), class_="", load_balancer_class="fairlead.io/driect")),
    ),
    "ClassUnserved, without a controller": (
        WEB,
        healthy(
            make_service(addresses=(), class_="", load_balancer_class="fairlead.io/direct"),
            processes=(),
        ),
    ),
    "ClassUnserved, of the default class": (
        WEB,
        healthy(make_service(addresses=(), class_=""), processes=()),
    ),
    "TwoControllers": (WEB, healthy(writes=TAKES_TURNS)),
    "AddressElsewhere": (
        WEB,
        healthy(make_service(addresses=(), load_balancer_ip="192.0.2.77")),
    ),
    "AddressElsewhere, held": (
        WEB,
        healthy(make_service(addresses=(), load_balancer_ip="203.0.113.2"), DIRECT_AGAIN),
    ),
    "AddressElsewhere, without Fairlead": (
        WEB,
        healthy(
            make_service(addresses=(), class_="", load_balancer_ip="203.0.113.2"),
            make_service("other", class_="", addresses=("203.0.113.2",)),
            config=None,
            events=(make_event("Service", "web", "AllocationFailed", "address in use"),),
        ),
    ),
    "PoolExhausted": ("pool public", healthy(make_service(addresses=()), *FULL)),
    "PoolExhausted, of MetalLB": (
        WEB,
        not_allocated("no available IPs"),
    ),
    "ExcludedNode": (WEB, healthy(pods=(make_pod(),), nodes=(EXCLUDED,))),
    "ExcludedNode, all nodes": (
        WEB,
        healthy(make_service(external_traffic_policy="Cluster"), nodes=(EXCLUDED,)),
    ),
    "ExcludedNode, the cloud has no node": (
        WEB,
        healthy(
            make_service(class_="", meta={"finalizers": (CLEANUP_FINALIZER,)}),
            nodes=(EXCLUDED,),
            pods=(make_pod(),),
            config=None,
            events=(make_event("Service", "web", "UnAvailableLoadBalancer", "no nodes"),),
        ),
    ),
    "AddressPending, of a family": (
        WEB,
        healthy(
            make_service(
                class_="",
                ip_families=("IPv4", "IPv6"),
                ip_family_policy="RequireDualStack",
                conditions=(NO_POOL,),
            ),
            config=None,
        ),
    ),
    "ChangeFailed": (
        WEB,
        healthy(
            make_service(class_=""),
            config=None,
            events=(
                make_event("Service", "web", "UpdateLoadBalancerFailed", "PENDING_UPDATE"),
                make_event("Service", "web", "EnsuredLoadBalancer", "", time=BEFORE),
            ),
        ),
    ),
    "SourceRangeForgetsPods": (WEB, healthy(make_service(**RANGES))),
    "SourceRangeForgetsFamily": (
        WEB,
        healthy(make_service(**BOTH, load_balancer_source_ranges=("0.0.0.0/0",))),
    ),
    "UnfairByPlacement": (WEB, healthy(make_service(**FOREIGN), pods=THREE_ONE)),
    "UnfairByPlacement, MetalLB announces by BGP": (
        WEB,
        healthy(
            METALLB,
            pods=THREE_ONE,
            config=None,
            events=(make_event("Service", "web", "nodeAssigned", 'with protocol "bgp"'),),
        ),
    ),
    "FinalizerOrphaned": (WEB, healthy(make_service(meta=DELETED), processes=())),
    "FinalizerOrphaned, of another controller": (
        WEB,
        healthy(make_service(**FOREIGN, meta=DELETED)),
    ),
    "NodePortMissing": (
        WEB,
        healthy(make_service(ports=NO_NODE_PORT, ingress=(PORT_ERROR,))),
    ),
    "NodePortMissing, by a refusal": (
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
    "NodePortMissing, by the Event of a cloud": (
        WEB,
        healthy(
            make_service(ports=NO_NODE_PORT, addresses=(), class_=""),
            config=None,
            events=(
                make_event("Service", "web", "SyncLoadBalancerFailed", "port has no node port"),
            ),
        ),
    ),
    "AddressPending": (
        WEB,
        healthy(
            make_service(addresses=(), **FOREIGN),
            events=(make_event("Service", "web", "SyncLoadBalancerFailed", "quota exceeded"),),
        ),
    ),
    "ChangeFailed, everybody is admitted": (
        WEB,
        healthy(
            make_service(class_=""),
            config=None,
            events=(
                make_event("Service", "web", "LoadBalancerSourceRangesIgnored", "not supported"),
                make_event("Service", "web", "EnsuredLoadBalancer", "", time=NOW),
            ),
        ),
    ),
    "ConditionFalse": (
        WEB,
        healthy(
            make_service(
                conditions=(
                    Condition("fairlead.io/Ready", "False", "NoGateway", "no gateway", OLD),
                )
            )
        ),
    ),
    "NetworkPolicyDropsClients": (
        "NetworkPolicy default/inside",
        healthy(policies=(INSIDE_ONLY,)),
    ),
    "GatewaysDiffer": (
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
    "GatewayStale": (
        "gateway gw1",
        healthy(processes=(make_process("gateway", "gw1", stale={"services": 60}),)),
    ),
    "GatewayStale, gone": (
        "gateway gw1",
        healthy(processes=(make_process("gateway", "gw1", alive=False),)),
    ),
}
YOUNG: dict[str, Any] = {"creation_timestamp": NOW}
NEAR_MISSES: dict[str, Facts] = {
    "ClassUnserved, new Service": healthy(
        make_service(addresses=(), class_="", load_balancer_class="example.com/x", meta=YOUNG)
    ),
    "SelectorMatchesNothing, new workload": healthy(
        pods=(), workloads=(NamedWorkload("Deployment", make_workload({"app": "web"}, 2)),)
    ),
    "PodsNotReady, pod starts": healthy(pods=(make_pod(ready=False, since=NOW),)),
    "PodsNotReady, one of two is slow": healthy(
        pods=(make_pod("w2", ready=False, since="2027-01-15T07:58:00Z"), make_pod())
    ),
    "AllTerminating, rollout": healthy(
        pods=(make_pod(), make_pod("w2", deleted=NOW), make_pod("w3", since=NOW))
    ),
    "TargetPortNameUnknown, rollout": healthy(
        make_service(ports=NAMED),
        pods=(make_pod(), make_pod("w2", ports=(ContainerPort(9090, "web"),), created=NOW)),
    ),
    "UnfairByPlacement, rollout": healthy(
        make_service(**FOREIGN), pods=(*THREE_ONE, make_pod("w9", created=NOW))
    ),
    "UnfairByPlacement, nodes are weighed": healthy(pods=THREE_ONE),
    "ExcludedNode, another node has a pod": healthy(nodes=(EXCLUDED, make_node("node2", 2))),
    "ExcludedNode, the configuration ignores the label": healthy(
        pods=(make_pod(),),
        nodes=(EXCLUDED,),
        config=Config(default_class=DIRECT, announce=AnnounceConfig(ignore_exclude_label=True)),
    ),
    "ExcludedNode, kube-vip does not read the label": healthy(
        make_service(class_="", meta={"annotations": {"kube-vip.io/vipHost": "node1"}}),
        pods=(make_pod(),),
        nodes=(EXCLUDED,),
        config=None,
    ),
    "ExcludedNode, not a load balancer": healthy(
        make_service(type="NodePort", addresses=(), class_=""),
        pods=(make_pod(),),
        nodes=(EXCLUDED,),
        wanted=(ServiceKey("default", "web"),),
    ),
    "ChangeFailed, succeeded since": healthy(
        make_service(class_=""),
        config=None,
        events=(
            make_event("Service", "web", "SyncLoadBalancerFailed", "quota", time=BEFORE),
            make_event("Service", "web", "EnsuredLoadBalancer", ""),
        ),
    ),
    "SourceRangeForgetsPods, with pods": healthy(
        make_service(load_balancer_source_ranges=("198.51.100.0/24", "10.244.0.0/16"))
    ),
    "SourceRangeForgetsPods, callers inside pass the load balancer": healthy(
        make_service(**RANGES, ip_mode="Proxy")
    ),
    "FinalizerOrphaned, deletion in progress": healthy(
        make_service(meta=DELETED | {"deletion_timestamp": NOW}), processes=()
    ),
    "FinalizerOrphaned, live controller": healthy(make_service(meta=DELETED)),
    "TwoControllers, migration": healthy(
        writes={
            ServiceKey("default", "web"): [
                Published("metallb", ("203.0.113.9",)),
                Published("fairlead-status", ("203.0.113.1",)),
            ]
        }
    ),
    "AddressElsewhere, assigned": healthy(make_service(load_balancer_ip="203.0.113.1")),
    "PoolExhausted, no Service waits": healthy(*FULL),
    "NetworkPolicyDropsClients, another policy admits them": healthy(
        policies=(INSIDE_ONLY, policy(podSelector={}, ingress=[{"ports": [{"port": 8080}]}]))
    ),
    "NetworkPolicyDropsClients, of other pods": healthy(
        policies=(policy(podSelector={"matchLabels": {"app": "db"}}),)
    ),
    "NetworkPolicyDropsClients, for egress": healthy(
        policies=(policy(podSelector={}, policyTypes=["Egress"]),)
    ),
    "NetworkPolicyDropsClients, policy Cluster hides clients": healthy(
        make_service(external_traffic_policy="Cluster"), policies=(INSIDE_ONLY,)
    ),
    "ConditionFalse, pending": healthy(
        make_service(
            conditions=(Condition("fairlead.io/Programmed", "False", "Pending", "soon", OLD),)
        )
    ),
    "NodePortMissing, not needed": healthy(make_service(ports=NO_NODE_PORT)),
    "PortNameDiffers, both are unnamed": healthy(
        make_service(selector=None), slices=(make_slice(make_pod()),)
    ),
    "EndpointsWithoutNode, policy Cluster": healthy(
        make_service(external_traffic_policy="Cluster"), slices=(make_slice(NO_NODE),)
    ),
    "EndpointsWithoutNode, another slice names it": healthy(
        slices=(make_slice(NO_NODE), make_slice(make_pod()))
    ),
    "AddressExcluded, klipper publishes addresses of nodes": healthy(
        make_service(
            class_="", addresses=("192.0.2.1",), meta={"finalizers": (f"{KLIPPER}daemonset",)}
        )
    ),
    "SourceRangeForgetsPods, two ranges contain a CIDR": healthy(
        make_service(load_balancer_source_ranges=("10.244.0.0/23", "10.244.2.0/23"))
    ),
    "SourceRangeForgetsFamily, both families": healthy(
        make_service(**BOTH, load_balancer_source_ranges=("0.0.0.0/0", "::/0"))
    ),
    "SourceRangeForgetsFamily, one family is served": healthy(
        make_service(load_balancer_source_ranges=("0.0.0.0/0",))
    ),
    "UnfairByPlacement, one node of MetalLB announces": healthy(
        METALLB, pods=THREE_ONE, config=None
    ),
    "UnfairByPlacement, one node of Cilium announces": healthy(
        make_service(class_="", conditions=(Condition(CILIUM_REQUEST, "True"),)),
        pods=THREE_ONE,
        config=None,
    ),
    "UnfairByPlacement, the load balancer sends to pods": healthy(
        make_service(
            class_="",
            meta={"annotations": {AWS_TARGETS: "ip"}, "finalizers": ("service.k8s.aws/resources",)},
        ),
        pods=THREE_ONE,
        config=None,
    ),
    "ApiForbidden, rights are not known": healthy(refusals=None),
    "GatewaysDiffer, no gateway serves it": healthy(
        processes=(
            make_process("controller", "c1"),
            *(
                make_process(
                    "gateway", name, not_served=(NotServed("default/web"),), not_served_count=1
                )
                for name in ("gw1", "gw2")
            ),
        )
    ),
    "GatewayStale, a controller stands by and another one is gone": healthy(
        processes=(make_process("controller", "c1"), make_process("controller", "c2", alive=False))
    ),
    "AddressPending, a second family is only preferred": healthy(
        make_service(
            class_="",
            ip_families=("IPv4", "IPv6"),
            ip_family_policy="PreferDualStack",
            conditions=(NO_POOL,),
        ),
        config=None,
    ),
    "AddressPending, a slow cloud": healthy(
        make_service(
            addresses=(),
            class_="",
            meta={"creation_timestamp": "2027-01-15T07:58:00Z", "finalizers": (CLEANUP_FINALIZER,)},
        ),
        config=None,
    ),
}
HEALTHY: dict[str, Facts] = {
    "idle": Facts(now_s=NOW_S),
    "serving": healthy(),
    "a rollout": healthy(
        pods=(make_pod(), make_pod("w2", deleted=NOW), make_pod("w3", ready=False, since=NOW))
    ),
    "a drain": healthy(
        pods=(make_pod(deleted=NOW), make_pod("w2", "node2")),
        nodes=(make_node("node1", 1), make_node("node2", 2)),
    ),
    "scaling": healthy(
        pods=(make_pod(), *(make_pod(f"n{n}", ready=False, since=NOW) for n in range(3)))
    ),
    "200 Services": healthy(
        *(make_service(f"s{n}", addresses=(f"198.51.100.{n}",)) for n in range(200)),
        config=None,
    ),
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
        processes=None,
        refusals=None,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_exactly_its_finding(name: str) -> None:
    object_, facts = FAULTS[name]
    found = diagnose(facts)
    assert [each.key for each in found] == [(name.partition(",")[0], object_)]
    assert found[0].known_by
    assert all(each.name and each.value and each.origin for each in found[0].known_by)
    assert found[0].remedy


@pytest.mark.parametrize("name", [*HEALTHY, *NEAR_MISSES])
def test_a_cluster_without_a_fault_has_no_finding(name: str) -> None:
    assert diagnose((HEALTHY | NEAR_MISSES)[name]) == ()


@pytest.mark.parametrize("table", [FAULTS, NEAR_MISSES], ids=["faults", "near misses"])
def test_every_page_has_faults_and_near_misses(table: Mapping[str, object]) -> None:
    assert {name.partition(",")[0] for name in table} == set(PAGES)


def test_what_the_controller_reports_follows_from_the_cause() -> None:
    report = Condition("fairlead.io/Ready", "False", "NoReadyEndpoints", "no endpoint", OLD)
    service = make_service(selector={"app": "wep"}, conditions=(report,))
    (found,) = diagnose(healthy(service, slices=()))
    assert found.consequences == (
        "its controller reports fairlead.io/Ready is False (NoReadyEndpoints): no endpoint",
    )


def test_a_condition_that_follows_from_a_finding_about_the_cluster_is_listed_under_it() -> None:
    reports = (Condition("fairlead.io/Ready", "False", "NoGateway", "no gateway", OLD),)
    gone = make_process("gateway", "gw1", alive=False)
    facts = healthy(
        make_service(conditions=reports), processes=(make_process("controller", "c1"), gone)
    )
    (found,) = diagnose(facts)
    assert (found.code, found.consequences) == ("GatewayStale", (f"{WEB}: no gateway",))


def test_the_pod_whose_label_is_most_alike_is_the_nearest() -> None:
    pods = (
        make_pod("other", labels={"app": "db", "tier": "x"}),
        make_pod("w1", labels={"app": "web", "tier": "x"}),
    )
    selector = {"app": "wep", "tier": "x"}
    (found,) = diagnose(healthy(make_service(selector=selector), pods=pods, slices=()))
    assert "the nearest is pod w1" in found.message


def test_the_class_that_is_most_alike_is_in_the_remedy() -> None:
    service = make_service(addresses=(), class_="", load_balancer_class="fairlead.io/driect")
    (found,) = diagnose(healthy(service))
    assert '"loadBalancerClass":"fairlead.io/direct"' in found.remedy


def test_the_nearest_pod_is_named_with_the_label_that_differs() -> None:
    (found,) = diagnose(healthy(make_service(selector={"app": "wep"}), slices=()))
    assert found.message.endswith("the nearest is pod w1, which has app=web")
    assert '{"spec":{"selector":{"app":"web"}}}' in found.remedy


def test_the_reason_of_an_unready_pod_is_the_output_of_its_probe() -> None:
    failed = make_event("Pod", "w1", "Unhealthy", "HTTP probe failed with statuscode: 500")
    (found,) = diagnose(healthy(pods=(UNREADY,), events=(failed,)))
    assert found.known_by[1].value == "Unhealthy: HTTP probe failed with statuscode: 500"


def test_services_that_wait_for_one_pool_are_one_finding() -> None:
    waiting = [make_service(f"w{number}", addresses=()) for number in (1, 2)]
    (found,) = diagnose(healthy(*waiting, *FULL))
    assert len(found.consequences) == 2


def test_the_share_of_the_busiest_pod_is_named() -> None:
    (found,) = diagnose(healthy(make_service(**FOREIGN), pods=THREE_ONE))
    assert "gets 33% of the connections instead of 20% if each node gets the same" in found.message


@pytest.mark.parametrize(
    ("service", "config", "severity", "condition"),
    [
        (make_service(), CONFIG, "error", "no other node serves them"),
        (make_service(), None, "warning", "is not known, sets announce.ignoreExcludeLabel"),
        (METALLB, None, "warning", "unless the speakers of MetalLB run with --ignore-exclude-lb"),
        (make_service(**FOREIGN), None, "warning", "as most do"),
    ],
)
def test_an_exclusion_names_the_condition_under_which_it_counts(
    service: OwnedService, config: Config | None, severity: str, condition: str
) -> None:
    (found,) = diagnose(healthy(service, pods=(make_pod(),), nodes=(EXCLUDED,), config=config))
    assert found.severity == severity
    assert found.message.endswith(condition)


def test_that_a_cloud_finds_no_node_follows_from_their_labels() -> None:
    _, facts = FAULTS["ExcludedNode, the cloud has no node"]
    (found,) = diagnose(facts)
    assert len(found.consequences) == 1
    assert "UnAvailableLoadBalancer: no nodes" in found.consequences[0]


def test_a_failed_deletion_is_explained_by_the_controller() -> None:
    event = make_event("Service", "web", "SyncLoadBalancerFailed", "the LB is in ERROR")
    facts = healthy(make_service(**FOREIGN, meta=DELETED), events=(event,), config=None)
    (found,) = diagnose(facts)
    assert "fails to delete what belongs to it: SyncLoadBalancerFailed: the LB" in found.message


def test_a_note_of_metallb_is_not_why_a_service_has_no_address() -> None:
    events = (
        make_event("Service", "web", "AllocationFailed", 'unknown pool "x"', time=BEFORE),
        make_event("Service", "web", "deprecatedAnnotation", "use metallb.io"),
    )
    service = make_service(addresses=(), class_="")
    (found,) = diagnose(healthy(service, config=None, events=events))
    assert found.message.endswith('its controller reports AllocationFailed: unknown pool "x"')


def test_a_controller_that_is_silent_may_have_no_addresses() -> None:
    """MetalLB writes nothing on a Service before it has a pool."""
    service = make_service(addresses=(), class_="", load_balancer_class="io.cilium/l2-announcer")
    (found,) = diagnose(healthy(service, config=None))
    assert "or has no addresses that it may assign" in found.message
    assert found.actor == "cluster operator"
    (found,) = diagnose(healthy(make_service(addresses=(), class_=""), config=None))
    assert "or has no addresses that it may assign" in found.message


def test_what_a_controller_reports_is_said_once() -> None:
    refused = Condition(CILIUM_REQUEST, "False", "no_pool", "no pool matches", OLD)
    service = make_service(addresses=(), class_="", conditions=(refused,))
    (found,) = diagnose(healthy(service, config=None))
    assert "(no_pool): no pool matches" in found.message
    assert found.consequences == ()


def test_that_kube_vip_gives_no_address_follows_from_pods_that_are_not_ready() -> None:
    service = make_service(addresses=(), class_="", load_balancer_class=KUBE_VIP)
    (found,) = diagnose(healthy(service, pods=(UNREADY,), config=None))
    assert (found.code, found.consequences[1]) == (
        "PodsNotReady",
        f"{WEB} gets no address from kube-vip",
    )


def test_services_that_metallb_does_not_let_share_an_address_are_told_why() -> None:
    meta = {"annotations": {"metallb.universe.tf/allow-shared-ip": "global"}}
    event = make_event("Service", "web", "AllocationFailed", "no available IPs")
    service = make_service(addresses=(), class_="", meta=meta)
    (found,) = diagnose(healthy(service, config=None, events=(event,)))
    assert found.message.endswith("only if they have the same selector")


def test_events_of_a_deleted_service_of_the_same_name_do_not_count() -> None:
    foreign = make_service(addresses=(), **FOREIGN, meta={"uid": "new"})
    event = make_event("Service", "web", "EnsuringLoadBalancer", "by the old one", uid="old")
    assert [each.code for each in diagnose(healthy(foreign, events=(event,)))] == ["ClassUnserved"]


def test_a_finding_that_is_gone_at_the_second_look_is_not_reported() -> None:
    before = diagnose(healthy(pods=(UNREADY,)))
    assert confirmed(before, ()) == ()
    assert confirmed((), before) == ()
    assert confirmed(before, before) == before


def test_only_the_named_services_are_examined() -> None:
    wrong = make_service("wrong", selector={"app": "nothing"})
    facts = healthy(make_service(), wrong, wanted=(ServiceKey("default", "web"),))
    assert diagnose(facts) == ()


def test_without_the_configuration_the_claim_of_a_service_tells_its_class() -> None:
    assert CONFIG.default_class
    assert diagnose(healthy(config=None)) == ()


def test_a_full_set_of_slices_is_not_needed_for_a_service_without_a_selector() -> None:
    service = make_service(selector=None)
    assert diagnose(healthy(service, slices=(make_slice(make_pod()),))) == ()
