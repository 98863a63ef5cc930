"""Rules about the pods behind a Service: whether there are any, and whether they can serve. Pure.

In: a `Case`. Out: at most one finding of this module for each Service, because each of these faults
hides the next one: a Service whose selector is wrong has no pod that could be unready. Follows
KEP-1669 (terminating endpoints) and KEP-752 (EndpointSlice: ports are joined by their names)."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from fairlead.doctor.facts import Case, NamedWorkload, warnings_of
from fairlead.doctor.finding import Actor, Fact, RootCause
from fairlead.kube.objects import EXCLUDE_LABEL, Condition, Pod
from fairlead.plan.members import excluded, listed

OWNER: Actor = "Service owner"
ALIKE = 0.6
"""Values of a label that are at least so similar differ by a typo."""


def pod_rules(case: Case) -> Iterable[RootCause]:
    """Return the first fault of the pods of the Service."""
    for rule in (
        selector_matches_nothing,
        target_port_name_unknown,
        port_name_differs,
        all_terminating,
        pods_not_ready,
        endpoints_without_node,
        excluded_node,
    ):
        if (found := rule(case)) is not None:
            return [found]
    return []


def selector_matches_nothing(case: Case) -> RootCause | None:
    """Return the finding that no pod has the labels of the selector, or that the workload whose
    pods have them has none. A new workload is about to create its pods."""
    selector = case.service.spec.selector or {}
    if not selector or case.pods is None or case.pods or not case.settled:
        return None
    written = _text(selector)
    evidence = [
        Fact("selector", written, f"{case.subject} spec.selector"),
        Fact("pods with these labels", "0", f"pods of namespace {case.namespace}"),
    ]
    if (found := _workload(case, selector)) is not None:
        return _without_pods(case, found, evidence)
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
            Fact(f"label {key}", value or "absent", f"Pod {_name(pod)} metadata.labels")
        )
        if value is not None:
            remedy = (
                f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
                f'-p \'{{"spec":{{"selector":{{"{key}":"{value}"}}}}}}\''
            )
    return RootCause(
        code="SelectorMatchesNothing",
        severity="error",
        subject=case.subject,
        message=(
            f"No pod of namespace {case.namespace} has the labels {written} that {case.subject} "
            f"selects{nearest}"
        ),
        known_by=tuple(evidence),
        remedy=remedy,
        actor=OWNER,
    )


def _workload(case: Case, selector: Mapping[str, str]) -> NamedWorkload | None:
    """Return the workload whose pods have the labels of the selector."""
    for each in case.facts.workloads or ():
        workload = each.workload
        if (
            workload.metadata.namespace == case.namespace
            and selector.items() <= workload.spec.template.metadata.labels.items()
        ):
            return each
    return None


def _without_pods(case: Case, found: NamedWorkload, evidence: Sequence[Fact]) -> RootCause | None:
    kind, workload = found
    meta, replicas = workload.metadata, workload.spec.replicas
    name = f"{kind} {meta.namespace}/{meta.name}"
    target = f"-n {meta.namespace} {kind.lower()}/{meta.name}"
    if replicas == 0:
        why, remedy = "is scaled to 0", f"kubectl scale {target} --replicas=1"
    elif not case.facts.settled(meta.creation_timestamp):
        return None
    else:
        why, remedy = "has created none", f"kubectl describe {target}  # see its Events"
    return RootCause(
        code="SelectorMatchesNothing",
        severity="error",
        subject=case.subject,
        message=f"{case.subject} has no pod, because {name}, whose pods it selects, {why}",
        known_by=(
            *evidence,
            Fact("replicas", "absent" if replicas is None else str(replicas), f"{name} spec"),
        ),
        remedy=remedy,
        actor=OWNER,
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
            code="TargetPortNameUnknown",
            severity="warning" if some else "error",
            subject=case.subject,
            message=(
                f"Port {port.port}/{port.protocol} of {case.subject} has the targetPort {wanted}, "
                f"and {'some' if some else 'none'} of its pods "
                f"{'do not have' if some else 'has'} a container port of this name"
            ),
            known_by=(
                Fact("targetPort", wanted, f"{case.subject} spec.ports"),
                Fact("pods without the name", _names(lacking), "Pods spec.containers[].ports"),
                Fact(
                    f"names of {port.protocol} ports",
                    ", ".join(names) or "none",
                    "Pods spec.containers[].ports",
                ),
            ),
            remedy=remedy,
            actor=OWNER,
        )
    return None


def port_name_differs(case: Case) -> RootCause | None:
    """Return the finding that EndpointSlices that are not made from pods have no port of the name
    of the Service's port, by which the two are joined."""
    if case.service.spec.selector or not case.slices or not case.settled:
        return None
    filled = [each for each in case.slices if each.endpoints]
    present = sorted(
        {(port.name or "", port.protocol) for each in filled for port in each.ports or ()}
    )
    for port in case.service.spec.ports:
        if not filled or (port.name, port.protocol) in present:
            continue
        names = ", ".join(f"{name or 'unnamed'} ({protocol})" for name, protocol in present)
        wanted = port.name or "unnamed"
        slice_ = filled[0].metadata.name
        return RootCause(
            code="PortNameDiffers",
            severity="error",
            subject=case.subject,
            message=(
                f"No EndpointSlice of {case.subject} has a {port.protocol} port of the name of its "
                f"port {port.port}, which is {wanted}: ports are joined by their names"
            ),
            known_by=(
                Fact("name of the port", wanted, f"{case.subject} spec.ports"),
                Fact("names of ports", names or "none", _slices(case)),
            ),
            remedy=(
                f"kubectl edit endpointslice -n {case.namespace} {slice_}"
                "  # give its port the name of the Service's port"
            ),
            actor=OWNER,
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
        code="AllTerminating",
        severity="warning",
        subject=case.subject,
        message=(
            f"{case.subject} is served by terminating pods only{by}, because no other pod is ready"
        ),
        known_by=(
            Fact(
                "endpoints",
                f"{len(endpoints)}, none ready, {len(ending)} terminating",
                _slices(case),
            ),
            Fact("terminating pods", _names(leaving) or "not known", "Pods deletionTimestamp"),
        ),
        remedy=(
            f"kubectl get deployment -n {case.namespace} -o wide  # set maxUnavailable below 100 %"
        ),
        actor=OWNER,
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
        code="PodsNotReady",
        severity="warning" if some else "error",
        subject=case.subject,
        message=f"{'Some' if some else 'All'} pods of {case.subject} are not ready: {_names(late)}",
        known_by=(
            Fact(
                condition.type if condition else "Ready",
                f"False since {_since(first) or 'its creation'}",
                f"Pod {_name(first)} status.conditions",
            ),
            Fact("reason", why, f"Pod {_name(first)}"),
        ),
        remedy=f"kubectl describe pod -n {case.namespace} {first.metadata.name}",
        actor=OWNER,
        consequences=consequences,
    )


def endpoints_without_node(case: Case) -> RootCause | None:
    """Return the finding that with policy Local no ready endpoint names its node."""
    ready = [each for each in case.endpoints or () if each.ready and not each.terminating]
    if not case.local or not ready or any(each.node_name for each in ready) or not case.settled:
        return None
    addresses = listed([each.addresses[0] for each in ready if each.addresses])
    names = sorted({each.metadata.name for each in case.slices or () if each.endpoints})
    return RootCause(
        code="EndpointsWithoutNode",
        severity="error",
        subject=case.subject,
        message=(
            f"No ready endpoint of {case.subject} names its node, and with externalTrafficPolicy "
            "Local a node serves only endpoints that name it"
        ),
        known_by=(
            Fact("ready endpoints without nodeName", addresses, f"EndpointSlice {listed(names)}"),
            Fact("externalTrafficPolicy", "Local", f"{case.subject} spec"),
        ),
        remedy=(
            f"kubectl edit endpointslice -n {case.namespace} {names[0]}"
            "  # set nodeName of each endpoint"
        ),
        actor=OWNER,
    )


def excluded_node(case: Case) -> RootCause | None:
    """Return the finding that all nodes that could serve the Service are excluded from load
    balancers: with policy Local those with ready pods, otherwise all nodes."""
    condition = _label_counts(case)
    if case.service.spec.type != "LoadBalancer" or condition is None:
        return None
    nodes = {each.metadata.name: each for each in case.facts.nodes or ()}
    with_pods = {
        each.node_name
        for each in case.endpoints or ()
        if each.ready and not each.terminating and each.node_name in nodes
    }
    names = sorted(name for name in (with_pods if case.local else nodes) if name)
    # Without a label, the cluster autoscaler is about to delete the node, and moves the pods.
    labelled = [name for name in names if EXCLUDE_LABEL in nodes[name].metadata.labels]
    if not with_pods or not labelled or not all(excluded(nodes[name]) for name in names):
        return None
    problem = (
        f"All ready pods of {case.subject} are on nodes that are excluded from load balancers "
        f"({listed(names)}), and with externalTrafficPolicy Local no other node serves them"
        if case.local
        else f"All nodes ({listed(names)}) are excluded from load balancers, so no node serves "
        f"{case.subject}"
    )
    return RootCause(
        code="ExcludedNode",
        severity="warning" if condition else "error",
        subject=case.subject,
        message=f"{problem}, {condition}" if condition else problem,
        known_by=(
            Fact("label", EXCLUDE_LABEL, f"Node {labelled[0]} metadata.labels"),
            Fact("nodes with ready pods", listed(sorted(filter(None, with_pods))), _slices(case)),
        ),
        remedy=f"kubectl label node {' '.join(labelled)} {EXCLUDE_LABEL}-",
        actor="cluster operator",
    )


def _label_counts(case: Case) -> str | None:
    """Return the condition under which the load balancer leaves out nodes with the label: empty if
    it certainly does; None if it does not. kube-vip, klipper and Cilium do not read the label."""
    config = case.facts.config
    if case.owner in ("kube-vip", "klipper", "Cilium"):
        return None
    if case.owner == "Fairlead" and config is not None:
        return None if config.announce.ignore_exclude_label else ""
    if case.owner == "Fairlead":
        return "unless its configuration, which is not known, sets announce.ignoreExcludeLabel"
    if case.owner == "MetalLB":
        return "unless the speakers of MetalLB run with --ignore-exclude-lb"
    if case.owner in ("OpenStack cloud controller", "a cloud"):
        return ""
    return "if its load balancer leaves out nodes with this label, as most do"


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _nearest(case: Case, wanted: Mapping[str, str]) -> tuple[str, Pod] | None:
    """Return a label and the pod that has all labels of the selector except that one; of several
    pods, the one whose value is most like the selector's. If the selector has one label, the values
    must be alike, as with a typo."""
    found: list[tuple[float, str, Pod]] = []
    for pod in case.pods_of_namespace:
        missing = [key for key, value in wanted.items() if pod.metadata.labels.get(key) != value]
        if len(missing) != 1:
            continue
        value = pod.metadata.labels.get(missing[0], "")
        likeness = SequenceMatcher(None, wanted[missing[0]], value).ratio()
        if len(wanted) > 1 or likeness >= ALIKE:
            found.append((likeness, missing[0], pod))
    return max(found, key=lambda each: each[0])[1:] if found else None


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


def _slices(case: Case) -> str:
    return f"EndpointSlices of {case.name}"


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _names(pods: Iterable[Pod]) -> str:
    return listed(sorted(each.metadata.name for each in pods))
