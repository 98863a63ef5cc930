"""Rules about the controller of a Service: whether there is one, whether there are two, and what it
reports. Pure.

In: a `Case`. Out: at most one finding of this module for each Service."""

from collections.abc import Iterable

from fairlead.doctor.facts import Case
from fairlead.doctor.finding import Evidence, RootCause
from fairlead.kube.objects import CLEANUP_FINALIZER, Condition
from fairlead.plan.classes import CLASSES
from fairlead.plan.service import CLASS_PREFIX, claimed_class

PATIENCE = 10
"""A controller that is not known may need this many grace periods for a deletion: clouds are
slow."""
GARBAGE_COLLECTOR = ("foregroundDeletion", "orphan")
"""Finalizers of Kubernetes' own garbage collector."""


def finalizer_orphaned(case: Case) -> RootCause | None:
    """Return the finding that a Service is not deleted, because no controller removes its
    finalizer."""
    metadata, facts = case.service.metadata, case.facts
    left = [each for each in metadata.finalizers if each not in GARBAGE_COLLECTOR]
    if not metadata.deletion_timestamp or not left:
        return None
    ours = bool(claimed_class(case.service)) and left[0] == CLEANUP_FINALIZER
    if ours and (facts.processes is None or _controllers(case)):
        return None
    patience_s = facts.grace_s * (1 if ours else PATIENCE)
    if facts.age_s(metadata.deletion_timestamp) <= patience_s:
        return None
    index = metadata.finalizers.index(left[0])
    path = f"/metadata/finalizers/{index}"
    tests = f'{{"op":"test","path":"{path}","value":"{left[0]}"}}'
    evidence = [
        Evidence("deletionTimestamp", metadata.deletion_timestamp, f"{case.object} metadata"),
        Evidence("finalizers", ", ".join(left), f"{case.object} metadata"),
    ]
    if ours:
        evidence.append(
            Evidence("live controllers of Fairlead", "0", "Leases with the label of Fairlead")
        )
    whose = "Fairlead" if ours else "its controller"
    return RootCause(
        "finalizer-orphaned",
        "broken",
        case.object,
        f"{case.object} has been in deletion since {metadata.deletion_timestamp}, because {whose} "
        f"does not remove the finalizer {left[0]}",
        tuple(evidence),
        f"kubectl patch service -n {case.namespace} {case.name} --type=json "
        f'-p \'[{tests},{{"op":"remove","path":"{path}"}}]\''
        "  # only if the controller is uninstalled: its load balancers outside of the cluster stay",
        "cluster operator",
        (f"addresses {', '.join(case.addresses)} remain assigned",) if case.addresses else (),
    )


def two_controllers(case: Case) -> RootCause | None:
    """Return the finding that two controllers overwrite each other's addresses: the first one wrote
    again after the second one. A single change of the writer is a migration."""
    writes = (case.facts.writes or {}).get(case.service.key, ())
    order = [each.manager for each in writes]
    turns = [b for a, b in zip(["", *order], order, strict=False) if a != b]
    if len(turns) < 3 or len(set(turns)) < 2:
        return None
    managers = sorted(set(turns))
    return RootCause(
        "two-controllers",
        "broken",
        case.object,
        f"{' and '.join(managers)} overwrite each other's addresses in the status of {case.object}",
        (
            *(
                Evidence(
                    f"addresses by {each.manager}",
                    ", ".join(each.addresses) or "none",
                    f"{case.object} managedFields, status.loadBalancer",
                )
                for each in {each.manager: each for each in writes}.values()
            ),
            Evidence(
                "changes of the writer while doctor watched",
                str(len(turns) - 1),
                f"watch of {case.object}; {turns[-1]} wrote last",
            ),
        ),
        f"kubectl get service -n {case.namespace} {case.name} -o yaml --show-managed-fields"
        "  # give the Service to one of them by spec.loadBalancerClass",
        "cluster operator",
    )


def class_unserved(case: Case) -> RootCause | None:
    """Return the finding that no controller has claimed the Service."""
    name = case.service.spec.load_balancer_class or ""
    if not case.settled or case.addresses:
        return None
    wanted = name or case.our_class
    if wanted in CLASSES:
        if case.facts.processes is None or _controllers(case):
            return None
    elif not name.startswith(CLASS_PREFIX) and (_claimed(case) or case.facts.events is None):
        return None
    known = sorted(
        {
            each.spec.load_balancer_class
            for each in case.facts.services
            if each.spec.load_balancer_class and each.status.load_balancer.ingress
        }
        | (set(CLASSES) if _controllers(case) else set())
    )
    value = name or "absent"
    served = ", ".join(known) or "none"
    if wanted in CLASSES:
        message = f"{case.object} is of class {wanted}, and no controller of Fairlead runs"
    elif not name:
        message = (
            f"{case.object} has no loadBalancerClass, and no controller of the cluster serves "
            "Services without one"
        )
    else:
        message = (
            f"{case.object} has the loadBalancerClass {name}, which no controller serves; "
            f"classes that are served: {served}"
        )
    remedy = "kubectl get deployments -A  # install or start the controller of load balancers"
    if name and name not in CLASSES:
        remedy = (
            f"kubectl get service -n {case.namespace} {case.name} -o yaml > service.yaml"
            "  # the class is immutable: correct it, delete the Service, and apply the file"
        )
    return RootCause(
        "class-unserved",
        "broken",
        case.object,
        message,
        (
            Evidence("loadBalancerClass", value, f"{case.object} spec"),
            Evidence("classes with addresses or a controller", served, "Services, Leases"),
            Evidence("addresses", "none", f"{case.object} status.loadBalancer"),
        ),
        remedy,
        "Service owner" if name and name not in CLASSES else "cluster operator",
    )


def address_pending(case: Case) -> RootCause | None:
    """Return the finding that a controller has claimed the Service and publishes no address. This
    is the last rule about addresses: the others know why."""
    if case.addresses or not case.settled:
        return None
    said = _false_conditions(case) or tuple(
        f"{each.reason}: {each.message}" for each in case.warnings[:1]
    )
    if not said:
        return None
    return RootCause(
        "address-pending",
        "broken",
        case.object,
        f"{case.object} has no address; its controller reports: {said[0]}",
        (
            Evidence("addresses", "none", f"{case.object} status.loadBalancer"),
            Evidence("report", said[0], f"Events and conditions of {case.object}"),
        ),
        f"kubectl describe service -n {case.namespace} {case.name}",
        "Service owner",
    )


def condition_false(case: Case) -> RootCause | None:
    """Return the finding that a condition of Fairlead is False, for causes that no other rule
    knows."""
    condition = false_condition(case)
    if condition is None:
        return None
    return RootCause(
        "condition-false",
        "broken",
        case.object,
        f"{case.object} is not {condition.type.removeprefix(CLASS_PREFIX)}: {condition.message}",
        (
            Evidence(
                condition.type,
                f"False since {condition.last_transition_time or 'its start'} ({condition.reason})",
                f"{case.object} status.conditions",
            ),
        ),
        f"kubectl describe service -n {case.namespace} {case.name}",
        "Service owner",
    )


def false_condition(case: Case) -> Condition | None:
    """Return the first condition of Fairlead that has been False for the grace period."""
    if case.service.metadata.deletion_timestamp:
        return None
    return next(
        (
            each
            for each in case.service.status.conditions
            if each.type.startswith(CLASS_PREFIX)
            and each.status == "False"
            and each.reason != "Pending"
            and case.facts.settled(each.last_transition_time)
        ),
        None,
    )


def consequences(case: Case) -> tuple[str, ...]:
    """Return what the controller reports about the Service, which follows from its cause."""
    return tuple(f"the controller reports: {each}" for each in _false_conditions(case))


def _false_conditions(case: Case) -> tuple[str, ...]:
    return tuple(
        f"{each.type} is False ({each.reason}): {each.message}"
        for each in case.service.status.conditions
        if each.status == "False" and each.message
    )


def _controllers(case: Case) -> Iterable[str]:
    return [
        each.record.name
        for each in case.facts.processes or ()
        if each.record.role == "controller" and each.alive
    ]


def _claimed(case: Case) -> bool:
    """Return whether a controller has left a mark on the Service."""
    service = case.service
    return bool(
        service.status.conditions
        or CLEANUP_FINALIZER in service.metadata.finalizers
        or claimed_class(service)
        or any(each.subresource == "status" for each in service.metadata.managed_fields)
        or case.has_events
    )
