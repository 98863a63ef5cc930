"""The rules: pure functions from facts to root causes.

In: a `Facts`. Out: findings, the most severe first. Pure. Invariants: a healthy cluster has none,
and one root cause gives one finding. Rules in a group exclude each other, because the first cause
hides the others; rules of different groups are independent."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from fairlead.doctor.facts import Case, Facts, cases
from fairlead.doctor.finding import RootCause
from fairlead.doctor.rules import control, processes, traffic
from fairlead.doctor.rules.addresses import (
    WAITS,
    address_elsewhere,
    address_excluded,
    pools_exhausted,
)
from fairlead.doctor.rules.pods import pod_rules
from fairlead.doctor.rules.policy import policy_drops_clients
from fairlead.doctor.rules.ranges import ranges_forget_family, ranges_forget_pods

Rule = Callable[[Case], RootCause | None]

OF_ADDRESSES: Sequence[Rule] = (
    control.two_controllers,
    control.class_unserved,
    traffic.nodeport_missing,
    address_elsewhere,
    address_excluded,
)
"""Why a Service does not have the addresses that it should have."""
OF_SETTINGS: Sequence[Rule] = (
    ranges_forget_pods,
    ranges_forget_family,
    traffic.unfair_by_placement,
    policy_drops_clients,
)
OF_THE_CLUSTER: Sequence[Callable[[Facts], Iterable[RootCause]]] = (
    processes.api_forbidden,
    processes.process_stale,
    processes.gateways_differ,
)
EXPLAINS: Mapping[str, Sequence[str]] = {
    "ApiForbidden": ("GatewayNotServing", "NoGateway", "Unavailable"),
    "ExcludedNode": ("UnAvailableLoadBalancer",),
    "GatewayStale": ("GatewayNotServing", "NoGateway"),
    "GatewaysDiffer": ("GatewayNotServing",),
    "NodePortMissing": ("NodePortMissing",),
    "UnfairByPlacement": ("SharesByNode",),
}
"""Reasons of the conditions and Events that follow from a finding."""
SEVERITIES = ("error", "warning")


def diagnose(facts: Facts) -> tuple[RootCause, ...]:
    """Return the findings."""
    examined = cases(facts)
    found = [*pools_exhausted(examined), *(one for rule in OF_THE_CLUSTER for one in rule(facts))]
    waiting = {text.removesuffix(WAITS) for each in found for text in each.consequences}
    waiting |= {each.subject for each in found}
    for case in examined:
        causes = _of_service(case, case.subject in waiting)
        condition = control.false_condition(case)
        found += [*_with_failed_change(case, causes), *_of_settings(case)]
        if causes or condition is None or case.subject in waiting:
            continue
        if (index := _explanation(found, condition.reason)) is not None:
            found[index] = _with(found[index], f"{case.subject}: {condition.message}")
        elif (unknown := control.condition_false(case)) is not None:
            found.append(unknown)
    unique = {(*each.key, each.message): each for each in found}
    order = SEVERITIES.index
    return tuple(sorted(unique.values(), key=lambda each: (order(each.severity), each.subject)))


def _of_service(case: Case, waits_for_pool: bool) -> list[RootCause]:
    """Return why the Service has no working pods or addresses."""
    if case.service.metadata.deletion_timestamp:
        orphaned = control.finalizer_orphaned(case)
        return [orphaned] if orphaned is not None else []
    known = list(pod_rules(case))
    if known and not case.addresses and control.waits_for_pods(case):
        known[0] = _with(known[0], f"{case.subject} gets no address from kube-vip")
    elif case.service.spec.type == "LoadBalancer" and not waits_for_pool:
        causes = _first(OF_ADDRESSES, case)
        known += causes or ([] if known else _first((control.address_pending,), case))
    if known:
        # The first cause carries what the controller reports, which follows from it.
        reports = [each for each in control.consequences(case) if each not in known[0].message]
        known[0] = _with(known[0], *reports)
    return known


def _with_failed_change(case: Case, causes: list[RootCause]) -> list[RootCause]:
    """Return the causes, and that the last change is not in force unless it follows from one."""
    failed = None if case.service.metadata.deletion_timestamp else control.change_failed(case)
    if failed is None:
        return causes
    index = _explanation(causes, failed.known_by[0].name)
    if index is None:
        return [*causes, failed]
    explains = _with(causes[index], failed.message)
    return [*causes[:index], explains, *causes[index + 1 :]]


def _of_settings(case: Case) -> list[RootCause]:
    if case.service.metadata.deletion_timestamp:
        return []
    return [each for rule in OF_SETTINGS if (each := rule(case)) is not None]


def _first(rules: Iterable[Rule], case: Case) -> list[RootCause]:
    return next(([each] for rule in rules if (each := rule(case)) is not None), [])


def _explanation(found: Sequence[RootCause], reason: str) -> int | None:
    """Return the index of the finding from which a condition with this reason follows."""
    return next(
        (index for index, each in enumerate(found) if reason in EXPLAINS.get(each.code, ())), None
    )


def _with(cause: RootCause, *consequences: str) -> RootCause:
    return msgspec.structs.replace(cause, consequences=(*cause.consequences, *consequences))
