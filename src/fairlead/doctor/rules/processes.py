"""Rules about the processes of Fairlead: their Leases, and their rights. Pure.

In: a `Facts`. Out: findings about gateways, nodes, and roles."""

from collections.abc import Iterable

from fairlead.doctor.facts import Facts, Refusal
from fairlead.doctor.finding import Fact, RootCause
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
        rights = listed([str(each.right) for each in refusals])
        first = refusals[0].right
        rule = (
            f'{{"apiGroups":["{first.group}"],"resources":["{first.resource}"],'
            f'"verbs":["{first.verb}"]}}'
        )
        yield RootCause(
            code="ApiForbidden",
            severity="error",
            subject=f"ServiceAccount {account}",
            message=(
                f"The {role} of Fairlead may not {rights}: what it cannot read or write, it cannot "
                "serve"
            ),
            known_by=tuple(
                Fact(str(each.right), "not allowed", f"SubjectAccessReview of {account}")
                for each in refusals[:3]
            ),
            remedy=(
                f"kubectl patch clusterrole fairlead-{role} --type=json "
                f'-p \'[{{"op":"add","path":"/rules/-","value":{rule}}}]\''
                + ("  # and so on for each right; or apply the chart again" if refusals[1:] else "")
            ),
            actor="cluster operator",
        )
