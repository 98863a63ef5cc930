"""Rules about the pods behind a Service: whether there are any, and whether they can serve. Pure.

In: a `Case`. Out: at most one finding of this module for each Service, because each of these faults
hides the next one: a Service whose selector is wrong has no pod that could be unready."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from fairlead.doctor.facts import Case, warnings_of
from fairlead.doctor.finding import Actor, Evidence, RootCause
from fairlead.kube.objects import EXCLUDE_LABEL, Condition, Pod
from fairlead.plan.members import excluded, listed

OWNER: Actor = "Service owner"


def pod_rules(case: Case) -> Iterable[RootCause]:
    """Return the first fault of the pods of the Service."""
    for rule in (
        selector_matches_nothing,
        target_port_name_unknown,
        all_terminating,
        pods_not_ready,
        excluded_node,
    ):
        if (found := rule(case)) is not None:
            return [found]
    return []


def selector_matches_nothing(case: Case) -> RootCause | None:
    """Return the finding that no pod has the labels of the selector. If a workload has them in its
    template, its pods are about to be created, unless it is scaled to zero."""
    selector = case.service.spec.selector or {}
    if not selector or case.pods is None or case.pods or not case.settled:
        return None
    written = _text(selector)
    evidence = [
        Evidence("selector", written, f"{case.object} spec.selector"),
        Evidence("pods with these labels", "0", f"pods of namespace {case.namespace}"),
    ]
    for kind, each in case.facts.workloads or ():
        if (
            each.metadata.namespace == case.namespace
            and selector.items() <= each.spec.template.metadata.labels.items()
        ):
            if each.spec.replicas != 0:
                return None
            name = f"{kind} {each.metadata.namespace}/{each.metadata.name}"
            return RootCause(
                "selector-matches-nothing",
                "broken",
                case.object,
                f"{case.object} has no pod, because {name}, whose pods it selects, is scaled to 0",
                (*evidence, Evidence("replicas", "0", f"{name} spec.replicas")),
                f"kubectl scale -n {case.namespace} {kind.lower()}/{each.metadata.name} "
                "--replicas=1",
                OWNER,
            )
    near = _nearest(case, selector)
    remedy = f"kubectl get pods -n {case.namespace} --show-labels"
    nearest = ""
    if near is not None:
        key, pod = near
        value = pod.metadata.labels.get(key)
        nearest = (
            f"; the nearest is pod {pod.metadata.name}, which has {key}={value}"
            if value is not None
            else f"; the nearest is pod {pod.metadata.name}, which has no label {key}"
        )
        evidence.append(
            Evidence(f"label {key}", value or "absent", f"Pod {_name(pod)} metadata.labels")
        )
        if value is not None:
            remedy = (
                f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
                f'-p \'{{"spec":{{"selector":{{"{key}":"{value}"}}}}}}\''
            )
    return RootCause(
        "selector-matches-nothing",
        "broken",
        case.object,
        f"No pod of namespace {case.namespace} has the labels {written} that {case.object} "
        f"selects{nearest}",
        tuple(evidence),
        remedy,
        OWNER,
    )


def target_port_name_unknown(case: Case) -> RootCause | None:
    """Return the finding that pods lack the name of a target port. Some pods may lack it during a
    rollout, so then all pods must be older than the grace period."""
    pods = [each for each in case.pods or () if not each.metadata.deletion_timestamp]
    for port in case.service.spec.ports:
        wanted = port.target_port
        if not isinstance(wanted, str) or not pods:
            continue
        lacking = [each for each in pods if wanted not in _port_names(each, port.protocol)]
        if not lacking or not all(
            case.facts.settled(each.metadata.creation_timestamp) for each in pods
        ):
            continue
        names = sorted({name for each in lacking for name in _port_names(each, port.protocol)})
        some = len(lacking) < len(pods)
        remedy = f"kubectl edit service -n {case.namespace} {case.name}  # set targetPort"
        if len(names) == 1:
            index = case.service.spec.ports.index(port)
            patch = (
                f'[{{"op":"replace","path":"/spec/ports/{index}/targetPort","value":"{names[0]}"}}]'
            )
            remedy = (
                f"kubectl patch service -n {case.namespace} {case.name} --type=json -p '{patch}'"
            )
        return RootCause(
            "target-port-name-unknown",
            "degraded" if some else "broken",
            case.object,
            f"Port {port.port}/{port.protocol} of {case.object} has the targetPort {wanted}, and "
            f"{'some' if some else 'none'} of its pods "
            f"{'do not have' if some else 'has'} a container port of this name",
            (
                Evidence("targetPort", wanted, f"{case.object} spec.ports"),
                Evidence("pods without the name", _names(lacking), "Pods spec.containers[].ports"),
                Evidence(
                    f"names of {port.protocol} ports",
                    ", ".join(names) or "none",
                    "Pods spec.containers[].ports",
                ),
            ),
            remedy,
            OWNER,
        )
    return None


def all_terminating(case: Case) -> RootCause | None:
    """Return the finding that only terminating pods serve (KEP-1669)."""
    endpoints = case.endpoints or ()
    ending = [each for each in endpoints if each.terminating]
    if any(each.ready and not each.terminating for each in endpoints):
        return None
    if not any(each.serving for each in ending):
        return None
    leaving = [each for each in case.pods or () if each.metadata.deletion_timestamp]
    until = max((each.metadata.deletion_timestamp or "" for each in leaving), default="")
    by = f" until {until}" if until else ""
    return RootCause(
        "all-terminating",
        "degraded",
        case.object,
        f"{case.object} is served by terminating pods only{by}, because no other pod is ready",
        (
            Evidence(
                "endpoints",
                f"{len(endpoints)}, none ready, {len(ending)} terminating",
                f"EndpointSlices of {case.name}",
            ),
            Evidence("terminating pods", _names(leaving) or "not known", "Pods deletionTimestamp"),
        ),
        f"kubectl get deployment -n {case.namespace} -o wide  # set maxUnavailable below 100 %",
        OWNER,
    )


def pods_not_ready(case: Case) -> RootCause | None:
    """Return the finding that pods are not ready for longer than the grace period. While another
    pod is ready, a pod may take ten times as long: a slow start is no fault."""
    pods = [each for each in case.pods or () if not each.metadata.deletion_timestamp]
    if case.service.spec.publish_not_ready_addresses:
        return None
    unready = [each for each in pods if not _is(each, "Ready")]
    some = len(unready) < len(pods)
    patience_s = case.facts.grace_s * (10 if some else 1)
    late = [each for each in unready if case.facts.age_s(_since(each)) > patience_s]
    if not late or (not some and len(late) < len(unready)):
        return None
    first = late[0]
    condition, why = _reason(case, first)
    consequences: tuple[str, ...] = ()
    if case.local and case.service.spec.health_check_node_port and not some:
        consequences = (
            f"healthCheckNodePort {case.service.spec.health_check_node_port} answers 503 on every "
            "node, so load balancers send no traffic",
        )
    return RootCause(
        "pods-not-ready",
        "degraded" if some else "broken",
        case.object,
        f"{'Some' if some else 'All'} pods of {case.object} are not ready: {_names(late)}",
        (
            Evidence(
                condition.type if condition else "Ready",
                f"False since {_since(first) or 'its creation'}",
                f"Pod {_name(first)} status.conditions",
            ),
            Evidence("reason", why, f"Pod {_name(first)}"),
        ),
        f"kubectl describe pod -n {case.namespace} {first.metadata.name}",
        OWNER,
        consequences,
    )


def excluded_node(case: Case) -> RootCause | None:
    """Return the finding that all nodes with ready pods are excluded from load balancers."""
    nodes = {each.metadata.name: each for each in case.facts.nodes or ()}
    names = {
        each.node_name
        for each in case.endpoints or ()
        if each.ready and not each.terminating and each.node_name in nodes
    }
    hit = sorted(name for name in names if name and excluded(nodes[name]))
    if not case.local or not hit or len(hit) < len(names):
        return None
    label = EXCLUDE_LABEL
    labelled = [name for name in hit if label in nodes[name].metadata.labels]
    if not labelled:
        # The cluster autoscaler is about to delete the nodes, and moves the pods.
        return None
    return RootCause(
        "excluded-node",
        "broken",
        case.object,
        f"All ready pods of {case.object} are on nodes that are excluded from load balancers "
        f"({listed(hit)}), and with externalTrafficPolicy Local no other node serves them",
        (
            Evidence("label", label, f"Node {labelled[0]} metadata.labels"),
            Evidence("nodes with ready pods", ", ".join(hit), f"EndpointSlices of {case.name}"),
        ),
        f"kubectl label node {' '.join(labelled)} {label}-",
        "cluster operator",
    )


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _nearest(case: Case, wanted: Mapping[str, str]) -> tuple[str, Pod] | None:
    """Return a label and the pod that has all labels of the selector except that one. If the
    selector has one label, the values of the label must be alike, as with a typo."""
    for pod in case.pods_of_namespace:
        missing = [key for key, value in wanted.items() if pod.metadata.labels.get(key) != value]
        if len(missing) != 1:
            continue
        value = pod.metadata.labels.get(missing[0])
        if len(wanted) > 1 or (value and get_close_matches(wanted[missing[0]], [value])):
            return missing[0], pod
    return None


def _port_names(pod: Pod, protocol: str) -> list[str]:
    return [
        port.name
        for container in pod.spec.containers
        for port in container.ports
        if port.name and port.protocol == protocol
    ]


def _is(pod: Pod, type_: str) -> bool:
    return any(each.type == type_ and each.status == "True" for each in pod.status.conditions)


def _condition(pod: Pod, type_: str) -> Condition | None:
    return next((each for each in pod.status.conditions if each.type == type_), None)


def _since(pod: Pod) -> str | None:
    """Return since when the pod is not ready."""
    ready = _condition(pod, "Ready")
    since = ready.last_transition_time if ready is not None else None
    return since or pod.metadata.creation_timestamp


def _reason(case: Case, pod: Pod) -> tuple[Condition | None, str]:
    """Return the condition that holds the pod back, and why: the message of the condition, or that
    of the last Warning Event, which has the output of the probe."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled, scheduled.message or scheduled.reason
    warnings = warnings_of(case.facts.events or (), "Pod", pod.metadata)
    ready = _condition(pod, "Ready")
    if warnings:
        return ready, f"{warnings[0].reason}: {warnings[0].message}"
    if ready is not None and (ready.message or ready.reason):
        return ready, ready.message or ready.reason
    return ready, "no Warning Event about the pod"


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _names(pods: Iterable[Pod]) -> str:
    return listed(sorted(each.metadata.name for each in pods))
