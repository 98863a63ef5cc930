"""Rules about the controller of a Service: whether there is one, whether there are two, and what it
reports. Pure.

In: a `Case`. Out: at most one finding of this module for each Service."""

from collections.abc import Mapping
from difflib import get_close_matches

from fairlead.doctor.facts import Case, Facts, is_about
from fairlead.doctor.finding import Fact, RootCause
from fairlead.doctor.objects import Event
from fairlead.kube.objects import CLEANUP_FINALIZER, Condition
from fairlead.net.address import family_of
from fairlead.plan.classes import CLASSES
from fairlead.plan.service import CLASS_PREFIX, claimed_class

PATIENCE = 10
"""A controller that is not known may need this many grace periods for a deletion: clouds are
slow."""
SILENT = "it does not run, or has no addresses that it may assign"
"""What may be the matter with a controller that has written nothing. MetalLB, Cilium and kube-vip
write nothing on a Service while they have no pool, or no address for it."""
KUBE_VIP = "kube-vip.io/kube-vip-class"
OF_OTHERS: Mapping[str, str] = {
    "io.cilium/bgp-control-plane": "Cilium",
    "io.cilium/l2-announcer": "Cilium",
    "io.cilium/node": "Cilium",
    KUBE_VIP: "kube-vip",
    "service.k8s.aws/nlb": "the AWS Load Balancer Controller",
    "eks.amazonaws.com/nlb": "EKS",
    "tailscale": "Tailscale",
}
"""Classes that controllers other than Fairlead define."""
FAILURES = (
    "SyncLoadBalancerFailed",
    "UpdateLoadBalancerFailed",
    "UnAvailableLoadBalancer",
    "FailedBuildModel",
    "FailedDeployModel",
)
"""Reasons of Events by which controllers report that they could not apply a change: those of the
cloud-provider library, and of the AWS Load Balancer Controller."""
SUCCESSES = ("EnsuredLoadBalancer", "UpdatedLoadBalancer", "SuccessfullyReconciled")
"""Reasons of their Events after which earlier failures do not count."""
LIMITS = ("announceFailed", "LoadBalancerSourceRangesIgnored")
"""Reasons of Warnings of MetalLB and of OpenStack's controller, which then report a success all the
same: an interface for the announcement does not exist; everybody is admitted."""
NOTE = "deprecatedAnnotation"
"""The reason of a Warning of MetalLB that says nothing about the address."""
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
    if ours and (facts.processes is None or case.facts.controllers):
        return None
    patience_s = facts.grace_s * (1 if ours else PATIENCE)
    if facts.age_s(metadata.deletion_timestamp) <= patience_s:
        return None
    index = metadata.finalizers.index(left[0])
    path = f"/metadata/finalizers/{index}"
    tests = f'{{"op":"test","path":"{path}","value":"{left[0]}"}}'
    evidence = [
        Fact("deletionTimestamp", metadata.deletion_timestamp, f"{case.subject} metadata"),
        Fact("finalizers", ", ".join(left), f"{case.subject} metadata"),
    ]
    if ours:
        evidence.append(
            Fact("live controllers of Fairlead", "0", "Leases with the label of Fairlead")
        )
    nobody = "none", "not known", "an unknown controller"
    whose = case.owner if case.owner not in nobody else "its controller"
    problem = f"{whose} does not remove the finalizer {left[0]}"
    failed = [each for each in case.warnings if each.time >= metadata.deletion_timestamp]
    if failed:
        problem = f"{whose} fails to delete what belongs to it: {said(failed[0])}"
        evidence.append(Fact(failed[0].reason, failed[0].message, f"Event of {case.subject}"))
    return RootCause(
        code="FinalizerOrphaned",
        severity="error",
        subject=case.subject,
        message=(
            f"{case.subject} has been in deletion since {metadata.deletion_timestamp}, because "
            f"{problem}"
        ),
        known_by=tuple(evidence),
        remedy=f"kubectl describe service -n {case.namespace} {case.name}"
        if failed
        else (
            f"kubectl patch service -n {case.namespace} {case.name} --type=json "
            f'-p \'[{tests},{{"op":"remove","path":"{path}"}}]\''
            "  # only if the controller is uninstalled; what it made outside of the cluster stays"
        ),
        actor="cluster operator",
        consequences=(f"addresses {', '.join(case.addresses)} remain assigned",)
        if case.addresses
        else (),
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
        code="TwoControllers",
        severity="error",
        subject=case.subject,
        message=(
            f"{' and '.join(managers)} overwrite each other's addresses in the status of "
            f"{case.subject}"
        ),
        known_by=(
            *(
                Fact(
                    f"addresses by {each.manager}",
                    ", ".join(each.addresses) or "none",
                    f"{case.subject} managedFields, status.loadBalancer",
                )
                for each in {each.manager: each for each in writes}.values()
            ),
            Fact(
                "changes of the writer while doctor watched",
                str(len(turns) - 1),
                f"watch of {case.subject}; {turns[-1]} wrote last",
            ),
        ),
        remedy=(
            f"kubectl get service -n {case.namespace} {case.name} -o yaml --show-managed-fields"
            "  # give the Service to one of them by spec.loadBalancerClass"
        ),
        actor="cluster operator",
    )


def class_unserved(case: Case) -> RootCause | None:
    """Return the finding that no controller has claimed the Service."""
    name = case.service.spec.load_balancer_class or ""
    if not case.settled or case.addresses:
        return None
    wanted = name or case.our_class
    if wanted in CLASSES:
        if case.facts.processes is None or case.facts.controllers:
            return None
    elif not name.startswith(CLASS_PREFIX) and case.owner != "none":
        return None
    known = _served_classes(case.facts)
    served = ", ".join(known) or "none"
    if wanted in CLASSES:
        message = f"{case.subject} is of class {wanted}, and no controller of Fairlead runs"
    elif not name:
        message = (
            f"{case.subject} has no loadBalancerClass, and no controller has taken it up: there is "
            f"none for Services without a class, or {SILENT}"
        )
    elif name in OF_OTHERS:
        message = (
            f"{case.subject} has the loadBalancerClass {name} of {OF_OTHERS[name]}, which has not "
            f"taken it up: {SILENT}"
        )
    else:
        message = (
            f"{case.subject} has the loadBalancerClass {name}, and no controller has taken it up; "
            f"classes that are served: {served}"
        )
    is_wrong = bool(name) and name not in CLASSES and name not in OF_OTHERS
    remedy = (
        "kubectl get deployments,daemonsets -A  # install or start the controller of load "
        "balancers, and give it addresses"
    )
    if is_wrong:
        near = get_close_matches(name, known, 1)
        remedy = _change_class(case, near[0] if near else "CLASS")
    return RootCause(
        code="ClassUnserved",
        severity="error",
        subject=case.subject,
        message=message,
        known_by=(
            Fact("loadBalancerClass", name or "absent", f"{case.subject} spec"),
            Fact("classes with addresses or a controller", served, "Services, Leases"),
            Fact("addresses", "none", f"{case.subject} status.loadBalancer"),
        ),
        remedy=remedy,
        actor="Service owner" if is_wrong else "cluster operator",
    )


def waits_for_pods(case: Case) -> bool:
    """Return whether kube-vip serves the class: with policy Local it gives no address before a pod
    is ready."""
    return case.local and case.service.spec.load_balancer_class == KUBE_VIP


def _served_classes(facts: Facts) -> list[str]:
    shown = {
        each.spec.load_balancer_class
        for each in facts.services
        if each.spec.load_balancer_class and each.status.load_balancer.ingress
    }
    return sorted(shown | (set(CLASSES) if facts.controllers else set()))


def _change_class(case: Case, name: str) -> str:
    """Return the commands that change the class, which the API allows only together with the
    type."""
    patch = f"kubectl patch service -n {case.namespace} {case.name} --type=merge -p"
    return (
        f"""{patch} '{{"spec":{{"type":"NodePort","loadBalancerClass":null}}}}' && """
        f"""{patch} '{{"spec":{{"type":"LoadBalancer","loadBalancerClass":"{name}"}}}}'"""
    )


def address_pending(case: Case) -> RootCause | None:
    """Return the finding that a controller publishes no address, or none of a family that the
    Service requires. This is the last rule about addresses: the others know why. A controller that
    reports no failure may need longer: clouds are slow."""
    lacking = _lacking_address(case)
    if not lacking or not case.settled:
        return None
    warnings = [each for each in case.warnings if each.reason != NOTE]
    reports = _false_conditions(case) or tuple(map(said, warnings[:1]))
    age_s = case.facts.age_s(case.service.metadata.creation_timestamp)
    if not reports and age_s <= PATIENCE * case.facts.grace_s:
        return None
    report = reports[0] if reports else "nothing that the doctor was able to read"
    return RootCause(
        code="AddressPending",
        severity="warning" if case.addresses else "error",
        subject=case.subject,
        message=f"{case.subject} has no {lacking}; its controller reports {report}",
        known_by=(
            Fact(
                "addresses",
                ", ".join(case.addresses) or "none",
                f"{case.subject} status.loadBalancer",
            ),
            Fact("report", report, f"Events and conditions of {case.subject}"),
        ),
        remedy=f"kubectl describe service -n {case.namespace} {case.name}",
        actor="Service owner" if reports else "cluster operator",
    )


def _lacking_address(case: Case) -> str:
    """Return which address the Service lacks; empty if it has all that it requires."""
    if not case.addresses:
        return "address"
    ingress, spec = case.service.status.load_balancer.ingress, case.service.spec
    # The families behind a host name are not known.
    if (
        case.our_class
        or spec.ip_family_policy != "RequireDualStack"
        or not all(each.ip for each in ingress)
    ):
        return ""
    have = {family_of(each.ip) for each in ingress}
    return next((f"{each} address" for each in spec.ip_families if each not in have), "")


def change_failed(case: Case) -> RootCause | None:
    """Return the finding that the controller of a Service with addresses has reported that it could
    not do as its owner wants, and no success since."""
    if not case.addresses or case.our_class:
        return None
    events = case.facts.events or ()
    about = [each for each in events if is_about(each, "Service", case.service.metadata)]
    success = max((each.time for each in about if each.reason in SUCCESSES), default="")
    failed = [
        each
        for each in case.warnings
        if each.reason in LIMITS or (each.reason in FAILURES and each.time > success)
    ]
    if not failed:
        return None
    return RootCause(
        code="ChangeFailed",
        severity="warning",
        subject=case.subject,
        message=(
            f"{case.subject} is served, but not as its owner wants: its controller reports "
            f"{said(failed[0])}"
        ),
        known_by=(
            Fact(failed[0].reason, f"at {failed[0].time}", f"Event of {case.subject}"),
            Fact("last success", success or "none that is known", f"Events of {case.subject}"),
        ),
        remedy=f"kubectl describe service -n {case.namespace} {case.name}",
        actor="cluster operator",
    )


def condition_false(case: Case) -> RootCause | None:
    """Return the finding that a condition of Fairlead is False, for causes that no other rule
    knows."""
    condition = false_condition(case)
    if condition is None:
        return None
    return RootCause(
        code="ConditionFalse",
        severity="error",
        subject=case.subject,
        message=(
            f"{case.subject} is not {condition.type.removeprefix(CLASS_PREFIX)}: "
            f"{condition.message}"
        ),
        known_by=(
            Fact(
                condition.type,
                f"False since {condition.last_transition_time or 'its start'} ({condition.reason})",
                f"{case.subject} status.conditions",
            ),
        ),
        remedy=f"kubectl describe service -n {case.namespace} {case.name}",
        actor="Service owner",
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


def said(event: Event) -> str:
    """Return what an Event reports."""
    return f"{event.reason}: {event.message}"


def consequences(case: Case) -> tuple[str, ...]:
    """Return what the controller reports about the Service, which follows from its cause."""
    return tuple(f"its controller reports {each}" for each in _false_conditions(case))


def _false_conditions(case: Case) -> tuple[str, ...]:
    return tuple(
        f"{each.type} is False ({each.reason}): {each.message}"
        for each in case.service.status.conditions
        if each.status == "False" and each.message
    )
