"""The steps from the actual to the desired state, with as few writes as possible, and with the
replacement of an object created before the object is deleted.

In: BalancerSpecs, and what was Found for each Service. Out: Changes in order. Pure. If nothing is
to be done, there is no step.

Invariants:

- A load balancer is created for a Service only after all other load balancers of the Service are
  deleted, including broken ones.
- Nothing is written to a load balancer while Octavia works on it.
- A listener is switched to a new pool only when the pool has its members and its monitor.
- A load balancer with listeners of others is neither deleted nor recreated; only the Service's own
  parts and marks are removed. The last Service on a load balancer that Fairlead created deletes it.
- An adopted load balancer is marked last, after all its parts are marked.

A broken object below a working load balancer is written again, which repairs it. A broken load
balancer is failed over if clients may know it (a Service shows its address, or it is adopted or
shared) and its provider supports failover; otherwise it is recreated with the same address."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.drivers.octavia import bodies, floating, security
from fairlead.drivers.octavia.balancers import (
    ERROR,
    BalancerSpec,
    BalancerState,
    Found,
    provider_of,
    transport,
)
from fairlead.drivers.octavia.blocked import (
    given_up,
    in_progress,
    not_located,
    obstacle,
    planned_for_another,
)
from fairlead.drivers.octavia.changes import Blocked, Call, Change, ExpectedListeners
from fairlead.drivers.octavia.marks import OCCM, ownerless, without_service
from fairlead.drivers.octavia.parts import drop_listener, drop_pool, part_steps
from fairlead.model import ExistingLoadBalancer, Outcome, ServiceKey, SharedOrAdopted

MAX_ATTEMPTS = 5
"""The number of repairs or creations in a row after which further attempts are rare
(GIVEN_UP_RETRY_S)."""


def diff(
    wanted: Mapping[ServiceKey, BalancerSpec], found: Mapping[ServiceKey, Found]
) -> list[Change]:
    """Return the steps of all Services, grouped by Service."""
    steps: list[Change] = []
    for key in sorted(wanted.keys() | found.keys()):
        actual = found.get(key, Found(()))
        own = _service_steps(key, wanted.get(key), actual)
        if (left := next((step for step in own if step in actual.after), None)) is not None:
            message = f"Octavia accepted a write without effect: {left}"
            own = [Blocked(key, Outcome("unavailable", message))]
        steps += own
    return steps


def chosen(
    balancers: Sequence[BalancerState],
    uid: str,
    addresses: Sequence[str] = (),
    located_id: str = "",
) -> BalancerState | None:
    """Return which of several load balancers of one Service to keep: the load balancer that was
    located for the Service; otherwise one that was made for the Service, where a working one comes
    before one in ERROR, then the one whose address the Service shows, then the oldest."""
    shown = set(addresses)
    own = [
        balancer
        for balancer in balancers
        if balancer.uid == uid and (balancer.id == located_id or balancer.ownership == "own")
    ]

    def order(balancer: BalancerState) -> tuple[bool, bool, bool, str, str]:
        return (
            balancer.id != located_id,
            balancer.status == ERROR,
            shown.isdisjoint(balancer.shown),
            balancer.created,
            balancer.id,
        )

    return min(own, key=order, default=None)


def is_located(
    found: Found, uid: str, addresses: Sequence[str], requested: SharedOrAdopted | None
) -> bool:
    """Return whether the load balancer that the Service requests is known: the last search was for
    this request and its result still exists, or no search is necessary."""
    keep = chosen(found.balancers, uid, addresses, found.located_id)
    if keep is None and found.located_id:
        return False
    return requested == found.located_for or (keep is not None and _is_at(keep, requested))


def _service_steps(key: ServiceKey, wanted: BalancerSpec | None, found: Found) -> list[Change]:
    if pending := [balancer for balancer in found.balancers if balancer.is_pending]:
        return [in_progress(key, balancer, found.poll_s) for balancer in pending]
    if wanted is None:
        gone: list[Change] = [step for balancer in found.balancers for step in _leave(balancer)]
        return [
            *gone,
            *security.all_rules_of(key, found),
            *floating.delete_unattached(key, found.unattached_ips),
        ]
    if not is_located(found, wanted.uid, wanted.addresses, wanted.shared_or_adopted):
        return [not_located(wanted)]
    keep = chosen(found.balancers, wanted.uid, wanted.addresses, found.located_id)
    if keep is not None and keep.ownership == "guest":
        return _guest_steps(wanted, keep, found)
    wanted = floating.covering(wanted, keep, found.covers)
    # A load balancer whose adoption was cancelled stays as it is.
    steps: list[Change] = []
    steps += [
        step
        for balancer in found.balancers
        if balancer is not keep and balancer.ownership != "foreign"
        for step in drop(balancer)
    ]
    if keep is None:
        exhausted = found.attempts >= MAX_ATTEMPTS
        return [*steps, given_up(key, "", found.attempts) if exhausted else _create(wanted)]
    if keep.status == ERROR:
        return [*steps, *_repair(wanted, keep, found.attempts)]
    if _is_other(wanted, keep):
        return [*steps, planned_for_another(wanted, keep)]
    steps += _balancer_steps(wanted, keep)
    opened = security.rules_to_add(wanted, keep, found)
    if steps:
        return [*opened, *steps]
    outside = floating.steps(wanted, keep, found.unattached_ips) or floating.uncovered(wanted, keep)
    last = [
        *opened,
        *outside,
        *security.rules_to_delete(wanted, keep, found),
        *security.groups_to_remove(wanted, found),
    ]
    return last or _unless_planned_for(wanted, keep)


def _is_other(wanted: BalancerSpec, balancer: BalancerState) -> bool:
    """Return whether no write can turn this load balancer into the desired one: the provider
    differs, or an address family is missing."""
    lacks_family = len(wanted.families) > 1 and not set(wanted.families) <= set(balancer.families)
    return lacks_family or provider_of(balancer.provider) != wanted.provider


def _is_at(balancer: BalancerState, requested: SharedOrAdopted | None) -> bool:
    """Return whether the load balancer is the requested one, as far as this is known without a
    search."""
    if requested is None:
        return balancer.ownership == "own"
    return balancer.id == requested.id or (not requested.id and balancer.ownership == "own")


def _guest_steps(wanted: BalancerSpec, balancer: BalancerState, found: Found) -> list[Change]:
    # Parts on other load balancers are removed after the parts here are complete. Parts here of an
    # earlier Service with the same name block the ports, and are removed first.
    before = [
        step
        for other in found.balancers
        if other is not balancer and other.id == balancer.id
        for step in drop(other)
    ]
    if (blocked := _obstacle(wanted, balancer)) is not None:
        return [*before, blocked]
    after = [
        step
        for other in found.balancers
        if other.id != balancer.id and other.ownership != "foreign"
        for step in _leave(other)
    ]
    steps = [*before, *part_steps(wanted, balancer), *after]
    opened = security.rules_to_add(wanted, balancer, found)
    if steps:
        return [*opened, *steps]
    # The Service shows the addresses of the shared load balancer, and needs no floating IP of its
    # own.
    back = floating.delete_unattached(wanted.service, found.unattached_ips)
    last = [
        *opened,
        *back,
        *security.rules_to_delete(wanted, balancer, found),
        *security.groups_to_remove(wanted, found),
    ]
    return last or _unless_planned_for(wanted, balancer)


def existing_of(balancer: BalancerState) -> ExistingLoadBalancer:
    """Return the properties of the load balancer that the plan needs."""
    floating = tuple(each.address for each in balancer.floating)
    shared = balancer.ownership == "guest"
    return ExistingLoadBalancer(
        balancer.uid, provider_of(balancer.provider), balancer.own, floating, shared
    )


def _unless_planned_for(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """Return no step, or a Blocked if the plan does not know the load balancer as it is, because
    the next drivers in the chain rely on the plan. Everything else must be as desired."""
    return (
        [] if wanted.existing == existing_of(balancer) else [planned_for_another(wanted, balancer)]
    )


def _obstacle(wanted: BalancerSpec, balancer: BalancerState) -> Blocked | None:
    """Return why a guest cannot be on this load balancer, or not as it was planned."""
    fix = "remove fairlead.io/load-balancer-id, or name another one"
    if balancer.status == ERROR:
        message = f"load balancer {balancer.id} is in ERROR, and was not made for this Service"
        return obstacle(wanted.service, message, fix)
    if _is_other(wanted, balancer):
        return planned_for_another(wanted, balancer)
    ports_in_use = {
        (transport(each.protocol), each.port): each.holder for each in balancer.ports_in_use
    }
    for listener in wanted.listeners:
        if holder := ports_in_use.get((transport(listener.protocol), listener.port)):
            message = (
                f"port {listener.port}/{listener.protocol} of load balancer {balancer.id} is "
                f"in use by {holder}"
            )
            return obstacle(wanted.service, message, f"give the Service another port; or {fix}")
    return None


def _leave(balancer: BalancerState) -> list[Change]:
    """Return the steps for a Service that is deleted or moves to another load balancer."""
    steps = drop(balancer)
    return [
        *(
            floating.detach_all(balancer.service, balancer)
            if any(step.ends for step in steps)
            else []
        ),
        *steps,
    ]


def drop(balancer: BalancerState) -> list[Call]:
    """Return the steps that remove the Service's parts; the whole load balancer, if no other
    listener is on it and Fairlead created it."""
    key = balancer.service
    if not balancer.others and (balancer.ownership != "guest" or ownerless(balancer.tags)):
        return [_delete(key, balancer)]
    steps: list[Call] = [
        *(drop_listener(key, balancer, each) for each in balancer.listeners),
        *(drop_pool(key, balancer, each) for each in balancer.pools),
    ]
    if balancer.ownership == "own":
        body = {"loadbalancer": {"tags": list(without_service(balancer.tags))}}
        steps.append(
            Call(
                key,
                "PUT",
                f"loadbalancers/{balancer.id}",
                body,
                "remove its marks, as other Services use it",
                balancer.id,
            )
        )
    expected_listeners = _expected_listeners(balancer)
    return [
        msgspec.structs.replace(step, leaves=True, expected_listeners=expected_listeners)
        for step in steps
    ]


def _expected_listeners(balancer: BalancerState) -> ExpectedListeners:
    return ExpectedListeners(tuple(each.id for each in balancer.listeners), balancer.others)


def _create(wanted: BalancerSpec) -> Call:
    subject = f"load balancer {wanted.name} of provider {wanted.provider}"
    return Call(
        wanted.service,
        "POST",
        "loadbalancers",
        {"loadbalancer": bodies.load_balancer(wanted)},
        subject,
        why=wanted.why,
    )


def _delete(key: ServiceKey, balancer: BalancerState, state: str = "") -> Call:
    subject = f"load balancer {balancer.address}{state}"
    path = f"loadbalancers/{balancer.id}?cascade=true"
    return Call(
        key,
        "DELETE",
        path,
        None,
        subject,
        balancer.id,
        ends=True,
        expected_listeners=_expected_listeners(balancer),
        repairs=bool(state),
    )


def _repair(wanted: BalancerSpec, keep: BalancerState, attempts: int) -> list[Change]:
    if attempts >= MAX_ATTEMPTS:
        return [given_up(wanted.service, keep.id, attempts)]
    shown = (
        not set(keep.shown).isdisjoint(wanted.addresses)
        or keep.ownership == "foreign"
        or keep.others
    )
    if (not attempts or keep.others) and shown and provider_of(keep.provider) == "amphora":
        path = f"loadbalancers/{keep.id}/failover"
        return [
            Call(
                wanted.service,
                "PUT",
                path,
                None,
                f"load balancer {keep.address}, which is in ERROR",
                keep.id,
                repairs=True,
            )
        ]
    if keep.others:
        return [given_up(wanted.service, keep.id, attempts)]
    return [_delete(wanted.service, keep, ", which is in ERROR"), _create(wanted)]


def _balancer_steps(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    steps = part_steps(wanted, balancer)
    body: dict[str, object] = {}
    if not set(wanted.tags) <= set(balancer.tags):
        body["tags"] = sorted({*balancer.tags, *wanted.tags})
    # An adopted load balancer keeps its name, by which cloud-provider-openstack would find it
    # again.
    if not balancer.name.startswith(OCCM) and (balancer.name, balancer.description) != (
        wanted.name,
        wanted.description,
    ):
        body |= {"name": wanted.name, "description": wanted.description}
    if body:
        subject = "its name and marks"
        steps.append(
            Call(
                wanted.service,
                "PUT",
                f"loadbalancers/{balancer.id}",
                {"loadbalancer": body},
                subject,
                balancer.id,
            )
        )
    return steps
