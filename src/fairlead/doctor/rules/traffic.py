"""Rules about node ports and the shares of pods. Pure.

In: a `Case`. Out: findings, each about another setting."""

from collections import Counter

from fairlead.doctor.facts import Case
from fairlead.doctor.finding import Actor, Fact, RootCause
from fairlead.kube.objects import Pod
from fairlead.plan.classes import CLASSES
from fairlead.plan.members import listed

OWNER: Actor = "Service owner"
UNFAIR = 1.5
"""A pod that gets so many times its fair share is reported."""
BECAUSE, IF = ", because", " if"
CILIUM_BGP = "io.cilium/bgp-control-plane"
AWS_TARGETS = "service.beta.kubernetes.io/aws-load-balancer-nlb-target-type"
"""With the value `ip` the load balancer of Amazon sends to pods, not to nodes."""
NODE_PORT_MISSING = "NodePortMissing"
"""The end of the error of a port that has no node port."""


def unfair_by_placement(case: Case) -> RootCause | None:
    """Return the finding that a pod gets far more than its share, because each node gets the same
    share. During a rollout the placement changes, so nothing is said."""
    condition = _shares_by_node(case)
    if not case.local or not case.addresses or condition is None:
        return None
    pods = case.pods or ()
    if any(
        each.metadata.deletion_timestamp or not case.facts.settled(each.metadata.creation_timestamp)
        for each in pods
    ):
        return None
    per_node = Counter(each.spec.node_name for each in ready_pods(case))
    total = sum(per_node.values())
    if total < 3 or len(per_node) < 2:
        return None
    node, fewest = min(per_node.items(), key=lambda item: (item[1], item[0]))
    share = 1 / (len(per_node) * fewest)
    if share * total < UNFAIR:
        return None
    placed = ", ".join(f"{name}: {count}" for name, count in sorted(per_node.items()))
    selector = dict(case.service.spec.selector or {})
    labels = ", ".join(f"{key}: {value}" for key, value in selector.items())
    return RootCause(
        code="UnfairByPlacement",
        severity="warning",
        subject=case.subject,
        message=(
            f"A pod of {case.subject} on node {node} gets {share:.0%} of the connections instead "
            f"of {1 / total:.0%}{condition} each node gets the same share ({placed})"
        ),
        known_by=(
            Fact("ready pods per node", placed, "Pods spec.nodeName, status.conditions"),
            Fact("externalTrafficPolicy", "Local", f"{case.subject} spec"),
        ),
        remedy=(
            "topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, "
            f"whenUnsatisfiable: DoNotSchedule, labelSelector: {{matchLabels: {{{labels}}}}}}}]"
            "  # in the template of the pods; or use a class that weighs nodes"
        ),
        actor=OWNER,
    )


def nodeport_missing(case: Case) -> RootCause | None:
    """Return the finding that the load balancer needs node ports, and the Service has none."""
    lacking = [str(each.port) for each in case.service.spec.ports if not each.node_port]
    if not lacking:
        return None
    reported = [
        Fact(f"error of port {port.port}", port.error, f"{case.subject} status.loadBalancer")
        for each in case.service.status.load_balancer.ingress
        for port in each.ports
        if port.error and port.error.endswith(NODE_PORT_MISSING)
    ]
    if not reported:
        reported = [
            Fact(condition.type, condition.message, f"{case.subject} status.conditions")
            for condition in case.service.status.conditions
            if condition.status == "False" and _lacks_node_port(condition.message)
        ]
    if not reported and not case.our_class and not case.addresses:
        reported = [
            Fact(each.reason, each.message, f"Event of {case.subject}")
            for each in case.warnings[:1]
            if _lacks_node_port(each.message)
        ]
    if not reported:
        return None
    return RootCause(
        code="NodePortMissing",
        severity="error",
        subject=case.subject,
        message=(
            f"{case.subject} has no node port for port {listed(lacking)}, and its load balancer "
            "reaches nodes by node ports"
        ),
        known_by=(
            Fact(
                "allocateLoadBalancerNodePorts",
                str(case.service.spec.allocate_load_balancer_node_ports is not False).lower(),
                f"{case.subject} spec",
            ),
            *reported[:1],
        ),
        remedy=(
            f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
            """-p '{"spec":{"allocateLoadBalancerNodePorts":true}}'"""
        ),
        actor=OWNER,
    )


def ready_pods(case: Case) -> list[Pod]:
    """Return the selected pods that are ready and not terminating."""
    return [
        pod
        for pod in case.pods or ()
        if not pod.metadata.deletion_timestamp
        and any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)
    ]


def _lacks_node_port(message: str) -> bool:
    """Return whether a controller reports, about a Service without node ports, that it needs
    them."""
    return "nodeport" in message.lower().replace(" ", "")


def _shares_by_node(case: Case) -> str | None:
    """Return the conjunction before "each node gets the same share": certain, or likely; None if it
    is not so. Fairlead reports it for its own classes. Where one node gets everything there are no
    shares: with kube-vip and klipper, with Cilium except by BGP, and with MetalLB except by BGP,
    which only its Events show."""
    if case.our_class:
        reported = any(each.reason == "SharesByNode" for each in case.warnings)
        nodes = CLASSES[case.our_class].served_by != "gateways"
        return BECAUSE if nodes and reported else None
    annotations, class_ = case.service.metadata.annotations, case.service.spec.load_balancer_class
    by_node = {
        "MetalLB": case.announced_by_bgp,
        "Cilium": class_ == CILIUM_BGP,
        "OpenStack cloud controller": True,
        "kube-vip": False,
        "klipper": False,
    }
    if case.owner in by_node:
        return BECAUSE if by_node[case.owner] else None
    return None if annotations.get(AWS_TARGETS) == "ip" else IF
