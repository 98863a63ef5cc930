"""Rules about the processes of Fairlead: their Leases, and their rights. Pure.

In: a `Facts`. Out: findings about gateways, nodes, and roles."""

from collections.abc import Iterable, Sequence

import msgspec

from fairlead.doctor.facts import Facts, Refusal
from fairlead.doctor.finding import Fact, RootCause
from fairlead.doctor.rights import RIGHTS, Right
from fairlead.plan.members import listed

ROLES = ("gateway", "node")


def process_stale(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each gateway or node that does not renew its Lease, or whose view of the
    cluster is stale."""
    for process in facts.processes or ():
        record = process.record
        if record.role not in ROLES:
            continue
        name, origin = f"{record.role} {record.name}", f"Lease of {record.role} {record.name}"
        if not process.alive:
            message = (
                f"{name} has not renewed its Lease since {process.renewed}: its process has ended, "
                "or it does not reach the API server, and its kernel forwards by its last view of "
                "the cluster"
            )
            fact = Fact("renewTime", process.renewed, f"{origin} spec")
        elif record.stale:
            message = f"{name} has a stale view of the cluster: {', '.join(sorted(record.stale))}"
            ages = ", ".join(f"{kind} {age} s" for kind, age in sorted(record.stale.items()))
            fact = Fact("age of its watches", ages, f"{origin} metadata.annotations")
        else:
            continue
        yield RootCause(
            code="GatewayStale",
            severity="warning",
            subject=name,
            message=message,
            known_by=(fact,),
            remedy=f"fairlead status  # on host {record.name}: the age of its view of the cluster",
            actor="cluster operator",
        )


def gateways_differ(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each gateway that cannot serve Services that another gateway serves."""
    live = [
        each.record
        for each in facts.processes or ()
        if each.alive
        and each.record.role == "gateway"
        and each.record.ready
        and not each.record.stale
        and facts.settled(each.record.since)
    ]
    if len(live) < 2:
        return
    common = set.intersection(*({each.service for each in one.not_served} for one in live))
    for one in live:
        only = [each for each in one.not_served if each.service not in common]
        if not only or one.not_served_count > len(one.not_served):
            continue
        why = only[0].message or "see `fairlead status` on the host"
        yield RootCause(
            code="GatewaysDiffer",
            severity="warning",
            subject=f"gateway {one.name}",
            message=(
                f"Gateway {one.name} cannot serve {listed([each.service for each in only])}, which "
                "other gateways serve"
            ),
            known_by=(
                Fact("not served", why, f"Lease of gateway {one.name} metadata.annotations"),
                Fact("gateways", ", ".join(each.name for each in live), "Leases of the gateways"),
            ),
            remedy=f"fairlead status  # on host {one.name}; compare its fairlead.yaml with others",
            actor="cluster operator",
        )


def api_forbidden(facts: Facts) -> Iterable[RootCause]:
    """Yield a finding for each role of Fairlead whose ServiceAccount lacks rights."""
    lacking: dict[tuple[str, str], list[Refusal]] = {}
    for each in facts.refusals or ():
        lacking.setdefault((each.role, each.account), []).append(each)
    for (role, account), refusals in lacking.items():
        rights = [each.right for each in refusals]
        yield RootCause(
            code="ApiForbidden",
            severity="error",
            subject=f"ServiceAccount {account}",
            message=(
                f"The {role} of Fairlead may not {listed([str(each) for each in rights])}: what it "
                "cannot read or write, it cannot serve"
            ),
            known_by=tuple(
                Fact(str(each), "not allowed", f"SubjectAccessReview of {account}")
                for each in rights[:3]
            ),
            remedy=_grant(role, account, rights),
            actor="cluster operator",
        )


def _grant(role: str, account: str, rights: Sequence[Right]) -> str:
    """Return the command that adds the rights to the ClusterRole. If the role has no right at all,
    the ClusterRole is not bound to its account."""
    if {each for each in RIGHTS[role] if each.resource in ("services", "nodes")} <= set(rights):
        return (
            f"kubectl create clusterrolebinding fairlead-{role} --clusterrole=fairlead-{role} "
            f"--serviceaccount={account.replace('/', ':')}"
        )
    by_resource: dict[tuple[str, str], list[str]] = {}
    for each in rights:
        by_resource.setdefault((each.group, each.resource), []).append(each.verb)
    patch = [
        {
            "op": "add",
            "path": "/rules/-",
            "value": {"apiGroups": [group], "resources": [resource], "verbs": verbs},
        }
        for (group, resource), verbs in by_resource.items()
    ]
    written = msgspec.json.encode(patch).decode()
    return f"kubectl patch clusterrole fairlead-{role} --type=json -p '{written}'"
