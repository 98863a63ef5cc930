"""The steps from what was found to what is wanted: as few writes as can be, and nothing goes before
what replaces it is made.

In: Trees, and what was found of each Service. Out: Changes in order. Pure. Invariant: of one
Service there is never a step that makes a load balancer while another one is there, be it broken:
it goes first, or nothing happens. A load balancer that Octavia is working on is waited for. A
listener's traffic goes to its new pool only when that has its members and its monitor. Nothing to
do: no step. A load balancer with listeners of others on it is neither deleted nor made anew: the
Service's own parts go, and its marks; whoever is the last on one that was made by us takes it away.
One that is taken over is marked last, when all its parts are. What is broken below a load balancer
that works is written again, which repairs it; the load balancer itself is failed over, if it has
served somebody and can be, or else made anew with the same address."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia import bodies, floating, security
from fairlead.drivers.octavia.balancers import (
    ERROR,
    BalancerSpec,
    BalancerState,
    Found,
    FoundListener,
    FoundMonitor,
    FoundPool,
    Listener,
    Monitor,
    pool_name,
    provider_of,
    transport,
)
from fairlead.drivers.octavia.changes import Blocked, Call, Change, Company
from fairlead.drivers.octavia.marks import EXPLICIT, OCCM, ownerless, without_service
from fairlead.drivers.octavia.members import members_step
from fairlead.model import ExistingLoadBalancer, Outcome, ServiceKey, SharedOrAdopted

MOST_ATTEMPTS = 5
"""So often one that fails is repaired or made anew, one time after the other; then rarely."""
RARELY_S = 900.0
"""After too many attempts in a row one load balancer is tried again no more often."""
OBSTACLE_S = 20.0
"""When to look again at a shared load balancer that others hold."""


def diff(
    wanted: Mapping[ServiceKey, BalancerSpec],
    found: Mapping[ServiceKey, Found],
    *,
    covers: bool = False,
) -> list[Change]:
    """`covers`: monitors that provider ovn makes cover floating IPs that come later."""
    steps: list[Change] = []
    for key in sorted(wanted.keys() | found.keys()):
        there = found.get(key, Found(()))
        own = _service_steps(key, wanted.get(key), there, covers)
        if (left := next((step for step in own if step in there.after), None)) is not None:
            message = f"Octavia has not carried out all: what is left is {left}"
            own = [Blocked(key, Outcome("unavailable", message))]
        steps += own
    return steps


def chosen(
    balancers: Sequence[BalancerState], uid: str, addresses: Sequence[str] = (), at: str = ""
) -> BalancerState | None:
    """The one to keep, of several load balancers of one Service: the one that it is to be `at`;
    else of those that were made for it one that works, then the one whose address is shown, then
    the oldest."""
    shown = set(addresses)
    own = [
        balancer
        for balancer in balancers
        if balancer.uid == uid and (balancer.id == at or balancer.ownership == "own")
    ]

    def order(balancer: BalancerState) -> tuple[bool, bool, bool, str, str]:
        return (
            balancer.id != at,
            balancer.status == ERROR,
            shown.isdisjoint(balancer.shown),
            balancer.created,
            balancer.id,
        )

    return min(own, key=order, default=None)


def is_located(
    found: Found, uid: str, addresses: Sequence[str], wish: SharedOrAdopted | None
) -> bool:
    """Whether the last look was for the shared or adopted load balancer that is wished for, and
    what it found is there still; or no look is necessary to know which one it is."""
    keep = chosen(found.balancers, uid, addresses, found.located_id)
    if keep is None and found.located_id:
        return False
    return wish == found.located_for or (keep is not None and _is_at(keep, wish))


def _service_steps(
    key: ServiceKey, wanted: BalancerSpec | None, found: Found, covers: bool
) -> list[Change]:
    if pending := [balancer for balancer in found.balancers if balancer.works_on]:
        return [_at_work(key, balancer, found.look_s) for balancer in pending]
    if wanted is None:
        gone: list[Change] = [step for balancer in found.balancers for step in _leave(balancer)]
        return [
            *gone,
            *security.all_rules_of(key, found),
            *floating.given_back(key, found.unattached_ips),
        ]
    if not is_located(found, wanted.uid, wanted.addresses, wanted.elsewhere):
        return [_not_located(wanted)]
    keep = chosen(found.balancers, wanted.uid, wanted.addresses, found.located_id)
    if keep is not None and keep.ownership == "guest":
        return _guest_steps(wanted, keep, found)
    wanted = floating.covering(wanted, keep, covers)
    # What was to be taken over, and is not any more, stays as it is.
    steps: list[Change] = []
    steps += [
        step
        for balancer in found.balancers
        if balancer is not keep and balancer.ownership != "foreign"
        for step in drop(balancer)
    ]
    if keep is None:
        tired = found.attempts >= MOST_ATTEMPTS
        return [*steps, _given_up(key, "", found.attempts) if tired else _create(wanted)]
    if keep.status == ERROR:
        return [*steps, *_repair(wanted, keep, found.attempts)]
    if _is_other(wanted, keep):
        return [*steps, _planned_for_another(wanted, keep)]
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
    """It is nothing that the one could become."""
    lacks = len(wanted.families) > 1 and not set(wanted.families) <= set(balancer.families)
    return lacks or provider_of(balancer.provider) != wanted.provider


def _is_at(balancer: BalancerState, wish: SharedOrAdopted | None) -> bool:
    """Whether it is where it is to be, as far as that is known without a look."""
    if wish is None:
        return balancer.ownership == "own"
    return balancer.id == wish.id or (not wish.id and balancer.ownership == "own")


def _guest_steps(wanted: BalancerSpec, balancer: BalancerState, found: Found) -> list[Change]:
    # What the Service has elsewhere goes when this is there; what a Service of the same name had
    # here is in the way.
    before = [
        step
        for other in found.balancers
        if other is not balancer and other.id == balancer.id
        for step in drop(other)
    ]
    if (obstacle := _obstacle(wanted, balancer)) is not None:
        return [*before, obstacle]
    after = [
        step
        for other in found.balancers
        if other.id != balancer.id and other.ownership != "foreign"
        for step in _leave(other)
    ]
    steps = [*before, *_part_steps(wanted, balancer), *after]
    opened = security.rules_to_add(wanted, balancer, found)
    if steps:
        return [*opened, *steps]
    # It shows what the load balancer has, and needs no floating IP of its own.
    back = floating.given_back(wanted.service, found.unattached_ips)
    last = [
        *opened,
        *back,
        *security.rules_to_delete(wanted, balancer, found),
        *security.groups_to_remove(wanted, found),
    ]
    return last or _unless_planned_for(wanted, balancer)


def existing_of(balancer: BalancerState) -> ExistingLoadBalancer:
    """What plans have to know of it."""
    floating = tuple(each.address for each in balancer.floating)
    shared = balancer.ownership == "guest"
    return ExistingLoadBalancer(
        balancer.uid, provider_of(balancer.provider), balancer.own, floating, shared
    )


def _unless_planned_for(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """All is as wanted. Drivers that come next rely on what the plan says of the load balancer."""
    return (
        [] if wanted.existing == existing_of(balancer) else [_planned_for_another(wanted, balancer)]
    )


def _planned_for_another(wanted: BalancerSpec, balancer: BalancerState) -> Blocked:
    what = f"of provider {balancer.provider}, with addresses of {' and '.join(balancer.families)}"
    message = f"it is planned anew, as its load balancer {balancer.id} is {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def _at_work(key: ServiceKey, balancer: BalancerState, look_s: float) -> Blocked:
    message = f"Octavia is at work on load balancer {balancer.id}, which is in {balancer.status}"
    return Blocked(key, Outcome("waiting", message, again_s=look_s))


def _not_located(wanted: BalancerSpec) -> Blocked:
    """The wish is newer than the last look."""
    wish = wanted.elsewhere
    what = "none any more" if wish is None else wish.id or " or ".join(wish.names)
    message = f"the load balancer that the Service is to be on is looked for: {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def _given_up(key: ServiceKey, id_: str, attempts: int) -> Blocked:
    """`id_`: empty if no load balancer has come of it."""
    problem = (
        f"load balancer {id_} is in ERROR, {attempts} attempts to repair it failed"
        if id_
        else f"Octavia has failed {attempts} times to make a load balancer"
    )
    fix = "ask the cloud's operators; it is tried again now and then"
    return Blocked(key, Outcome("unavailable", f"{problem}; {fix}", again_s=RARELY_S / 10))


def _obstacle(wanted: BalancerSpec, balancer: BalancerState) -> Blocked | None:
    """Why a guest cannot be there, or not as it was planned."""

    def obstacle(message: str, fix: str) -> Blocked:
        return Blocked(
            wanted.service, Outcome("unavailable", f"{message}; {fix}", again_s=OBSTACLE_S)
        )

    fix = "remove fairlead.io/load-balancer-id, or name another one"
    if balancer.status == ERROR:
        message = f"load balancer {balancer.id} is in ERROR, and it is not this Service's"
        return obstacle(message, fix)
    if _is_other(wanted, balancer):
        return _planned_for_another(wanted, balancer)
    taken = {(transport(each.protocol), each.port): each.holder for each in balancer.taken}
    for listener in wanted.listeners:
        if holder := taken.get((transport(listener.protocol), listener.port)):
            message = (
                f"port {listener.port}/{listener.protocol} of load balancer {balancer.id} is "
                f"taken by {holder}"
            )
            return obstacle(message, f"give the Service another port; or {fix}")
    return None


def _leave(balancer: BalancerState) -> list[Change]:
    """For a Service that goes, or goes elsewhere."""
    steps = drop(balancer)
    return [
        *(floating.parted(balancer.service, balancer) if any(step.ends for step in steps) else []),
        *steps,
    ]


def drop(balancer: BalancerState) -> list[Call]:
    """What of a load balancer was the Service's goes; all of it, if nobody else is on it and it was
    made by us."""
    key = balancer.service
    if not balancer.others and (balancer.ownership != "guest" or ownerless(balancer.tags)):
        return [_delete(key, balancer)]
    steps: list[Call] = [
        *(_drop_listener(key, balancer, each) for each in balancer.listeners),
        *(_drop_pool(key, balancer, each) for each in balancer.pools),
    ]
    if balancer.ownership == "own":
        body = {"loadbalancer": {"tags": list(without_service(balancer.tags))}}
        steps.append(
            Call(
                key,
                "PUT",
                f"loadbalancers/{balancer.id}",
                body,
                "its marks, as others are on it",
                balancer.id,
            )
        )
    company = _company(balancer)
    return [msgspec.structs.replace(step, leaves=True, company=company) for step in steps]


def _company(balancer: BalancerState) -> Company:
    return Company(tuple(each.id for each in balancer.listeners), balancer.others)


def _create(wanted: BalancerSpec) -> Call:
    words = f"load balancer {wanted.name} of provider {wanted.provider}"
    return Call(
        wanted.service,
        "POST",
        "loadbalancers",
        {"loadbalancer": bodies.load_balancer(wanted)},
        words,
        why=wanted.why,
    )


def _delete(key: ServiceKey, balancer: BalancerState, state: str = "") -> Call:
    words = f"load balancer {balancer.address}{state}"
    path = f"loadbalancers/{balancer.id}?cascade=true"
    return Call(
        key,
        "DELETE",
        path,
        None,
        words,
        balancer.id,
        ends=True,
        company=_company(balancer),
        repairs=bool(state),
    )


def _repair(wanted: BalancerSpec, keep: BalancerState, attempts: int) -> list[Change]:
    if attempts >= MOST_ATTEMPTS:
        return [_given_up(wanted.service, keep.id, attempts)]
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
        return [_given_up(wanted.service, keep.id, attempts)]
    return [_delete(wanted.service, keep, ", which is in ERROR"), _create(wanted)]


def _balancer_steps(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    steps = _part_steps(wanted, balancer)
    body: dict[str, object] = {}
    if not set(wanted.tags) <= set(balancer.tags):
        body["tags"] = sorted({*balancer.tags, *wanted.tags})
    # By its name cloud-provider-openstack would find again what was taken over from it.
    if not balancer.name.startswith(OCCM) and (balancer.name, balancer.description) != (
        wanted.name,
        wanted.description,
    ):
        body |= {"name": wanted.name, "description": wanted.description}
    if body:
        words = "its name and marks"
        steps.append(
            Call(
                wanted.service,
                "PUT",
                f"loadbalancers/{balancer.id}",
                {"loadbalancer": body},
                words,
                balancer.id,
            )
        )
    return steps


def _part_steps(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """What is below the load balancer."""
    steps: list[Change] = []
    used: set[str] = set()
    gone: set[str] = set()
    for listener in wanted.listeners:
        steps += _listener_steps(wanted, balancer, listener, used, gone)
    ports = {(each.protocol, each.port) for each in wanted.listeners}
    for found in balancer.listeners:
        if (found.protocol, found.port) not in ports and found.id not in gone:
            steps.append(_drop_listener(wanted.service, balancer, found))
    dropped = [
        _drop_pool(wanted.service, balancer, pool) for pool in balancer.pools if pool.id not in used
    ]
    return [
        *steps,
        *dropped,
        *(_affinity_again(wanted, balancer, steps) if dropped and wanted.provider == "ovn" else ()),
    ]


def _affinity_again(
    wanted: BalancerSpec, balancer: BalancerState, steps: Sequence[Change]
) -> list[Change]:
    """Provider ovn has one affinity for all pools of a protocol, and forgets it with any of
    them."""
    made = {step.saves for step in steps if isinstance(step, Call) and step.saves}
    ids: dict[str, tuple[str, Listener]] = {}
    for listener in wanted.listeners:
        if listener.pool.affinity_s is None:
            continue
        there = next(
            (
                each
                for each in balancer.listeners
                if (each.protocol, each.port) == (listener.protocol, listener.port)
            ),
            None,
        )
        new = pool_name(listener) in made
        if new or there is not None:
            ids[listener.protocol] = (
                f"${pool_name(listener)}" if new or there is None else there.pool_id,
                listener,
            )
    return [
        Call(
            wanted.service,
            "PUT",
            f"pools/{id_}",
            {"pool": bodies.pool_settings(listener.pool) | _enabled(wanted)},
            "its affinity",
            balancer.id,
        )
        for id_, listener in ids.values()
    ]


def _enabled(wanted: BalancerSpec) -> dict[str, object]:
    """Without admin_state_up in the update of a pool, provider ovn fails where a new affinity
    comes, and for ever leaves its listener in PENDING_UPDATE where marks alone do
    (`helper.pool_update`)."""
    return {"admin_state_up": True} if wanted.provider == "ovn" else {}


def _drop_listener(key: ServiceKey, balancer: BalancerState, found: FoundListener) -> Call:
    return Call(
        key,
        "DELETE",
        f"listeners/{found.id}",
        None,
        f"listener {found.protocol}/{found.port}",
        balancer.id,
    )


def _drop_pool(key: ServiceKey, balancer: BalancerState, found: FoundPool) -> Call:
    return Call(key, "DELETE", f"pools/{found.id}", None, f"pool {found.name}", balancer.id)


def _listener_steps(
    wanted: BalancerSpec,
    balancer: BalancerState,
    listener: Listener,
    used: set[str],
    gone: set[str],
) -> list[Change]:
    """`used`: takes the pools that are to stay; `gone`: the listeners that go here."""
    there = next(
        (
            each
            for each in balancer.listeners
            if (each.protocol, each.port) == (listener.protocol, listener.port)
        ),
        None,
    )
    pool = _pool_for(balancer, listener, there, used)
    steps: list[Change] = []
    if pool is not None:
        used.add(pool.id)
        pool_id = pool.id
        steps += _pool_steps(wanted, balancer, listener, pool)
    else:
        pool_id = f"${pool_name(listener)}"
        steps += _new_pool(wanted, balancer, listener)
    if there is not None:
        return [*steps, *_listener_update(wanted, balancer, listener, there, pool_id)]
    for other in balancer.listeners:
        # Of one port there can be one listener for all that is carried over TCP.
        if (
            other.port == listener.port
            and transport(other.protocol) == transport(listener.protocol)
            and other.id not in gone
        ):
            gone.add(other.id)
            steps.append(_drop_listener(wanted.service, balancer, other))
    body = bodies.listener(listener, wanted.child_tags) | {
        "loadbalancer_id": balancer.id,
        "default_pool_id": pool_id,
    }
    words = f"listener {listener.protocol}/{listener.port}"
    return [
        *steps,
        Call(wanted.service, "POST", "listeners", {"listener": body}, words, balancer.id),
    ]


def _pool_for(
    balancer: BalancerState, listener: Listener, there: FoundListener | None, used: Iterable[str]
) -> FoundPool | None:
    """The pool that the listener has, if it can become the one that is wanted; or one that was made
    for it and not yet put in its place."""
    current = next(
        (pool for pool in balancer.pools if there is not None and pool.id == there.pool_id), None
    )
    if current is not None and _can_become(balancer, current, listener):
        return current
    others = {each.pool_id for each in balancer.listeners} | set(used)
    return next(
        (
            pool
            for pool in balancer.pools
            if pool.name == pool_name(listener)
            and _can_become(balancer, pool, listener)
            and pool.id not in others
        ),
        None,
    )


def _can_become(balancer: BalancerState, pool: FoundPool, listener: Listener) -> bool:
    """Provider ovn takes another method, and the end of affinity, for a pool that is there, and
    does nothing about it."""
    if pool.protocol != listener.pool.protocol or balancer.provider != "ovn":
        return pool.protocol == listener.pool.protocol
    return pool.method == listener.pool.method and (
        pool.affinity_s is None or listener.pool.affinity_s is not None
    )


def _new_pool(wanted: BalancerSpec, balancer: BalancerState, listener: Listener) -> list[Change]:
    name, pool = pool_name(listener), listener.pool
    body = bodies.pool(listener, wanted.child_tags) | {"loadbalancer_id": balancer.id}
    steps: list[Change] = [
        Call(
            wanted.service, "POST", "pools", {"pool": body}, f"pool {name}", balancer.id, saves=name
        )
    ]
    if pool.members:
        path, words = f"pools/${name}/members", f"members of pool {name}"
        steps.append(
            Call(wanted.service, "PUT", path, bodies.members(pool.members), words, balancer.id)
        )
    if pool.monitor is not None:
        monitor = bodies.monitor(pool.monitor, wanted.monitor_tags) | {"pool_id": f"${name}"}
        steps.append(
            Call(
                wanted.service,
                "POST",
                "healthmonitors",
                {"healthmonitor": monitor},
                f"monitor of pool {name}",
                balancer.id,
            )
        )
    return steps


def _pool_steps(
    wanted: BalancerSpec, balancer: BalancerState, listener: Listener, found: FoundPool
) -> list[Change]:
    pool, name = listener.pool, found.name
    steps: list[Change] = []
    settings: dict[str, object] = {}
    if (pool.method, pool.affinity_s) != (found.method, found.affinity_s) or found.status == ERROR:
        settings |= bodies.pool_settings(pool)
    settings |= _marks(wanted, found.tags)
    if settings:
        settings |= _enabled(wanted)
        steps.append(
            Call(
                wanted.service,
                "PUT",
                f"pools/{found.id}",
                {"pool": settings},
                f"pool {name}",
                balancer.id,
            )
        )
    monitor = found.monitor
    if monitor is not None and (
        pool.monitor is None or _is_made_anew(wanted, pool.monitor, monitor)
    ):
        words = f"monitor of pool {name}"
        steps.append(
            Call(wanted.service, "DELETE", f"healthmonitors/{monitor.id}", None, words, balancer.id)
        )
        monitor = None
    # Where members are asked is said with the members: before anybody asks them there.
    if (step := members_step(wanted.service, balancer, found, pool.members)) is not None:
        steps.append(step)
    if pool.monitor is None:
        return steps
    if monitor is None:
        body = {
            "healthmonitor": bodies.monitor(pool.monitor, wanted.monitor_tags)
            | {"pool_id": found.id}
        }
        steps.append(
            Call(
                wanted.service,
                "POST",
                "healthmonitors",
                body,
                f"monitor of pool {name}",
                balancer.id,
            )
        )
    elif _differs(wanted, pool.monitor, monitor):
        body = {
            "healthmonitor": bodies.monitor_settings(pool.monitor) | _marks(wanted, monitor.tags)
        }
        steps.append(
            Call(
                wanted.service,
                "PUT",
                f"healthmonitors/{monitor.id}",
                body,
                f"monitor of pool {name}",
                balancer.id,
            )
        )
    return steps


def _is_made_anew(wanted: BalancerSpec, monitor: Monitor, found: FoundMonitor) -> bool:
    """Rather than written. Provider ovn writes one that is there, and for ever leaves its listener
    in PENDING_UPDATE (`helper.hm_update`)."""
    return monitor.type != found.monitor.type or (
        wanted.provider == "ovn" and _differs(wanted, monitor, found)
    )


def _differs(wanted: BalancerSpec, monitor: Monitor, found: FoundMonitor) -> bool:
    return monitor != found.monitor or found.status == ERROR or bool(_marks(wanted, found.tags))


def _marks(wanted: BalancerSpec, tags: Iterable[str]) -> dict[str, object]:
    """What is to be written to a part that lacks our marks; others' stay."""
    missing = set(wanted.child_tags) - set(tags)
    return {"tags": sorted({*tags, *wanted.child_tags})} if missing else {}


def _listener_update(
    wanted: BalancerSpec,
    balancer: BalancerState,
    listener: Listener,
    found: FoundListener,
    pool_id: str,
) -> list[Change]:
    asked = {EXPLICIT + name for name, _ in listener.timeouts}
    stale = {
        tag.removeprefix(EXPLICIT)
        for tag in found.tags
        if tag.startswith(EXPLICIT) and tag not in asked
    }
    foreign = [
        tag for tag in found.tags if tag not in wanted.child_tags and not tag.startswith(EXPLICIT)
    ]
    body = bodies.listener_settings(listener, [*foreign, *wanted.child_tags], stale)
    now: dict[str, object] = {
        "connection_limit": found.connection_limit,
        "allowed_cidrs": list(found.cidrs) or None,
        "insert_headers": {bodies.HEADER: "true"} if found.forwarded_for else {},
        **dict(found.timeouts),
    }
    changed = {
        name: value for name, value in body.items() if name != "tags" and value != now.get(name)
    }
    if found.status == ERROR:
        changed |= bodies.said(body)
    if set(_texts(body["tags"])) != set(found.tags):
        changed["tags"] = body["tags"]
    if found.pool_id != pool_id:
        changed["default_pool_id"] = pool_id
    if not changed:
        return []
    words = f"listener {listener.protocol}/{listener.port}"
    return [
        Call(
            wanted.service,
            "PUT",
            f"listeners/{found.id}",
            {"listener": changed},
            words,
            balancer.id,
        )
    ]


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
