"""Rules about ports, session affinity and shares. Pure.

In: a `Case`. Out: findings, each about another setting."""

from collections import Counter
from collections.abc import Iterable

from fairlead.doctor.facts import Case, Target
from fairlead.doctor.finding import Actor, Evidence, RootCause
from fairlead.kube.objects import Pod
from fairlead.net.address import family_of
from fairlead.plan.classes import CLASSES
from fairlead.plan.members import listed

OWNER: Actor = "Service owner"
UNFAIR = 1.5
"""A pod that gets so many times its fair share is reported."""
NODE_PORT_MISSING = "NodePortMissing"
"""The end of the error of a port that has no node port."""


def port_closed(case: Case) -> RootCause | None:
    """Return the finding that ready pods refuse connections to their target port. A port that
    another connection of this host reaches proves that the network leads to the pods, but a refusal
    is an answer by itself."""
    answers = case.facts.answers
    if answers is None:
        return None
    for port in case.service.spec.ports:
        if port.protocol != "TCP":
            continue
        tried = [
            (pod, target)
            for pod in ready_pods(case)
            for target in targets(case, pod, port.target_port or port.port)
            if target in answers
        ]
        refused = [(pod, target) for pod, target in tried if answers[target] == "refused"]
        if not refused or any(answers[target] == "open" for _, target in tried):
            continue
        number = refused[0][1].port
        return RootCause(
            "target-port-closed",
            "broken",
            case.object,
            f"Port {port.port}/TCP of {case.object} leads to port {number} of its pods, where no "
            "process accepts connections, although the pods are ready",
            tuple(
                Evidence(
                    f"connection to {target.address} port {number}",
                    "refused",
                    f"this host to pod {pod.metadata.namespace}/{pod.metadata.name}",
                )
                for pod, target in refused[:3]
            ),
            f"kubectl edit service -n {case.namespace} {case.name}  # set targetPort to the port "
            "of the process, which must not listen on 127.0.0.1 only",
            OWNER,
        )
    return None


def affinity_behind_nat(case: Case) -> RootCause | None:
    """Return the finding that session affinity sees the load balancer instead of the clients: with
    ipMode Proxy, connections arrive from the load balancer's own addresses."""
    ingress = case.service.status.load_balancer.ingress
    if case.service.spec.session_affinity != "ClientIP" or not any(
        each.ip_mode == "Proxy" for each in ingress
    ):
        return None
    per_node = Counter(each.spec.node_name for each in ready_pods(case))
    if not per_node or (case.local and max(per_node.values()) == 1):
        return None
    group = "on each node" if case.local else "of the Service"
    return RootCause(
        "affinity-behind-nat",
        "degraded",
        case.object,
        f"sessionAffinity ClientIP of {case.object} sends all connections of one load-balancer "
        f"address to the same pod {group}, because nodes see that address and not the clients'",
        (
            Evidence("sessionAffinity", "ClientIP", f"{case.object} spec"),
            Evidence("ipMode", "Proxy", f"{case.object} status.loadBalancer"),
            Evidence("ready pods", str(sum(per_node.values())), "Pods"),
        ),
        f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
        """-p '{"spec":{"sessionAffinity":"None"}}'""",
        OWNER,
    )


def unfair_by_placement(case: Case) -> RootCause | None:
    """Return the finding that a pod gets far more than its share, because each node gets the same
    share. During a rollout the placement changes, so nothing is said."""
    if not case.local or not case.addresses or not _shares_by_node(case):
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
        "unfair-by-placement",
        "degraded",
        case.object,
        f"A pod of {case.object} on node {node} gets {share:.0%} of the connections instead of "
        f"{1 / total:.0%}, because each node gets the same share ({placed})",
        (
            Evidence("ready pods per node", placed, "Pods spec.nodeName, status.conditions"),
            Evidence("externalTrafficPolicy", "Local", f"{case.object} spec"),
        ),
        "topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, "
        f"whenUnsatisfiable: DoNotSchedule, labelSelector: {{matchLabels: {{{labels}}}}}}}]"
        "  # in the template of the pods; or use a class that weighs nodes",
        OWNER,
    )


def nodeport_missing(case: Case) -> RootCause | None:
    """Return the finding that the load balancer needs node ports, and the Service has none."""
    lacking = [str(each.port) for each in case.service.spec.ports if not each.node_port]
    if not lacking:
        return None
    reported = [
        Evidence(f"error of port {port.port}", port.error, f"{case.object} status.loadBalancer")
        for each in case.service.status.load_balancer.ingress
        for port in each.ports
        if port.error and port.error.endswith(NODE_PORT_MISSING)
    ]
    if not reported:
        reported = [
            Evidence(condition.type, condition.message, f"{case.object} status.conditions")
            for condition in case.service.status.conditions
            if condition.status == "False" and _lacks_node_port(condition.message)
        ]
    if not reported and not case.our_class and not case.addresses:
        reported = [
            Evidence(each.reason, each.message, f"Event of {case.object}")
            for each in case.warnings[:1]
            if _lacks_node_port(each.message)
        ]
    if not reported:
        return None
    return RootCause(
        "nodeport-missing",
        "broken",
        case.object,
        f"{case.object} has no node port for port {listed(lacking)}, and its load balancer reaches "
        "nodes by node ports",
        (
            Evidence(
                "allocateLoadBalancerNodePorts",
                str(case.service.spec.allocate_load_balancer_node_ports is not False).lower(),
                f"{case.object} spec",
            ),
            *reported[:1],
        ),
        f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
        """-p '{"spec":{"allocateLoadBalancerNodePorts":true}}'""",
        OWNER,
    )


def ready_pods(case: Case) -> list[Pod]:
    """Return the selected pods that are ready and not terminating."""
    return [
        pod
        for pod in case.pods or ()
        if not pod.metadata.deletion_timestamp
        and any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)
    ]


def targets(case: Case, pod: Pod, port: int | str) -> Iterable[Target]:
    """Return where a target port of a pod is reached, in the families of the Service."""
    number = port if isinstance(port, int) else _number(pod, port)
    families = case.service.spec.ip_families or ("IPv4",)
    for each in pod.status.pod_ips:
        if number is not None and family_of(each.ip) in families:
            yield Target(each.ip, number)


def _lacks_node_port(message: str) -> bool:
    """Return whether a controller reports, about a Service without node ports, that it needs
    them."""
    return "nodeport" in message.lower().replace(" ", "")


def _number(pod: Pod, name: str) -> int | None:
    return next(
        (
            port.container_port
            for container in pod.spec.containers
            for port in container.ports
            if port.name == name and port.protocol == "TCP"
        ),
        None,
    )


def _shares_by_node(case: Case) -> bool:
    """Return whether each node gets the same share: Fairlead reports it for its own classes, and
    other load balancers weigh no nodes."""
    if case.our_class:
        return CLASSES[case.our_class].served_by != "gateways" and any(
            each.reason == "SharesByNode" for each in case.warnings
        )
    return case.service.spec.load_balancer_class not in CLASSES
