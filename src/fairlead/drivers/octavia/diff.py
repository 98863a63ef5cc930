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
from fairlead.drivers.octavia.changes import Blocked, Call, Change, Company
from fairlead.drivers.octavia.marks import EXPLICIT, OCCM, ownerless, without_service
from fairlead.drivers.octavia.members import members_step
from fairlead.drivers.octavia.tree import (
    ERROR,
    Found,
    FoundListener,
    FoundMonitor,
    FoundPool,
    FoundTree,
    Listener,
    Monitor,
    Tree,
    pool_name,
    provider_of,
    transport,
)
from fairlead.model import ExistingLoadBalancer, Outcome, ServiceKey, SharedOrAdopted

MOST_ATTEMPTS = 5
"""So often one that fails is repaired or made anew, one time after the other; then rarely."""
RARELY_S = 900.0
"""After too many attempts in a row one load balancer is tried again no more often."""
OBSTACLE_S = 20.0
"""When to look again at a shared load balancer that others hold."""


def diff(
    wanted: Mapping[ServiceKey, Tree], found: Mapping[ServiceKey, Found], *, covers: bool = False
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
    trees: Sequence[FoundTree], uid: str, addresses: Sequence[str] = (), at: str = ""
) -> FoundTree | None:
    """The one to keep, of several load balancers of one Service: the one that it is to be `at`;
    else of those that were made for it one that works, then the one whose address is shown, then
    the oldest."""
    shown = set(addresses)
    own = [tree for tree in trees if tree.uid == uid and (tree.id == at or tree.standing == "own")]

    def order(tree: FoundTree) -> tuple[bool, bool, bool, str, str]:
        return (
            tree.id != at,
            tree.status == ERROR,
            shown.isdisjoint(tree.shown),
            tree.created,
            tree.id,
        )

    return min(own, key=order, default=None)


def is_located(
    found: Found, uid: str, addresses: Sequence[str], wish: SharedOrAdopted | None
) -> bool:
    """Whether the last look was for the shared or adopted load balancer that is wished for, and
    what it found is there still; or no look is necessary to know which one it is."""
    keep = chosen(found.trees, uid, addresses, found.located_id)
    if keep is None and found.located_id:
        return False
    return wish == found.located_for or (keep is not None and _is_at(keep, wish))


def _service_steps(
    key: ServiceKey, wanted: Tree | None, found: Found, covers: bool
) -> list[Change]:
    if pending := [tree for tree in found.trees if tree.works_on]:
        return [_at_work(key, tree, found.look_s) for tree in pending]
    if wanted is None:
        gone: list[Change] = [step for tree in found.trees for step in _leave(tree)]
        return [*gone, *security.gone(key, found), *floating.given_back(key, found.loose)]
    if not is_located(found, wanted.uid, wanted.addresses, wanted.elsewhere):
        return [_not_located(wanted)]
    keep = chosen(found.trees, wanted.uid, wanted.addresses, found.located_id)
    if keep is not None and keep.standing == "guest":
        return _guest_steps(wanted, keep, found)
    wanted = floating.covering(wanted, keep, covers)
    # What was to be taken over, and is not any more, stays as it is.
    steps: list[Change] = []
    steps += [
        step
        for tree in found.trees
        if tree is not keep and tree.standing != "foreign"
        for step in drop(tree)
    ]
    if keep is None:
        tired = found.attempts >= MOST_ATTEMPTS
        return [*steps, _given_up(key, "", found.attempts) if tired else _create(wanted)]
    if keep.status == ERROR:
        return [*steps, *_repair(wanted, keep, found.attempts)]
    if _is_other(wanted, keep):
        return [*steps, _planned_for_another(wanted, keep)]
    steps += _tree_steps(wanted, keep)
    opened = security.opened(wanted, keep, found)
    if steps:
        return [*opened, *steps]
    outside = floating.steps(wanted, keep, found.loose) or floating.uncovered(wanted, keep)
    last = [
        *opened,
        *outside,
        *security.closed(wanted, keep, found),
        *security.loosened(wanted, found),
    ]
    return last or _unless_planned_for(wanted, keep)


def _is_other(wanted: Tree, tree: FoundTree) -> bool:
    """It is nothing that the one could become."""
    lacks = len(wanted.families) > 1 and not set(wanted.families) <= set(tree.families)
    return lacks or provider_of(tree.provider) != wanted.provider


def _is_at(tree: FoundTree, wish: SharedOrAdopted | None) -> bool:
    """Whether it is where it is to be, as far as that is known without a look."""
    if wish is None:
        return tree.standing == "own"
    return tree.id == wish.id or (not wish.id and tree.standing == "own")


def _guest_steps(wanted: Tree, tree: FoundTree, found: Found) -> list[Change]:
    # What the Service has elsewhere goes when this is there; what a Service of the same name had
    # here is in the way.
    before = [
        step
        for other in found.trees
        if other is not tree and other.id == tree.id
        for step in drop(other)
    ]
    if (obstacle := _obstacle(wanted, tree)) is not None:
        return [*before, obstacle]
    after = [
        step
        for other in found.trees
        if other.id != tree.id and other.standing != "foreign"
        for step in _leave(other)
    ]
    steps = [*before, *_part_steps(wanted, tree), *after]
    opened = security.opened(wanted, tree, found)
    if steps:
        return [*opened, *steps]
    # It shows what the load balancer has, and needs no floating IP of its own.
    back = floating.given_back(wanted.service, found.loose)
    last = [
        *opened,
        *back,
        *security.closed(wanted, tree, found),
        *security.loosened(wanted, found),
    ]
    return last or _unless_planned_for(wanted, tree)


def existing_of(tree: FoundTree) -> ExistingLoadBalancer:
    """What plans have to know of it."""
    floating = tuple(each.address for each in tree.floating)
    shared = tree.standing == "guest"
    return ExistingLoadBalancer(tree.uid, provider_of(tree.provider), tree.own, floating, shared)


def _unless_planned_for(wanted: Tree, tree: FoundTree) -> list[Change]:
    """All is as wanted. Drivers that come next rely on what the plan says of the load balancer."""
    return [] if wanted.existing == existing_of(tree) else [_planned_for_another(wanted, tree)]


def _planned_for_another(wanted: Tree, tree: FoundTree) -> Blocked:
    what = f"of provider {tree.provider}, with addresses of {' and '.join(tree.families)}"
    message = f"it is planned anew, as its load balancer {tree.id} is {what}"
    return Blocked(wanted.service, Outcome("waiting", message))


def _at_work(key: ServiceKey, tree: FoundTree, look_s: float) -> Blocked:
    message = f"Octavia is at work on load balancer {tree.id}, which is in {tree.status}"
    return Blocked(key, Outcome("waiting", message, again_s=look_s))


def _not_located(wanted: Tree) -> Blocked:
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


def _obstacle(wanted: Tree, tree: FoundTree) -> Blocked | None:
    """Why a guest cannot be there, or not as it was planned."""

    def obstacle(message: str, fix: str) -> Blocked:
        return Blocked(
            wanted.service, Outcome("unavailable", f"{message}; {fix}", again_s=OBSTACLE_S)
        )

    fix = "remove fairlead.io/load-balancer-id, or name another one"
    if tree.status == ERROR:
        message = f"load balancer {tree.id} is in ERROR, and it is not this Service's"
        return obstacle(message, fix)
    if _is_other(wanted, tree):
        return _planned_for_another(wanted, tree)
    taken = {(transport(each.protocol), each.port): each.holder for each in tree.taken}
    for listener in wanted.listeners:
        if holder := taken.get((transport(listener.protocol), listener.port)):
            message = (
                f"port {listener.port}/{listener.protocol} of load balancer {tree.id} is "
                f"taken by {holder}"
            )
            return obstacle(message, f"give the Service another port; or {fix}")
    return None


def _leave(tree: FoundTree) -> list[Change]:
    """For a Service that goes, or goes elsewhere."""
    steps = drop(tree)
    return [
        *(floating.parted(tree.service, tree) if any(step.ends for step in steps) else []),
        *steps,
    ]


def drop(tree: FoundTree) -> list[Call]:
    """What of a load balancer was the Service's goes; all of it, if nobody else is on it and it was
    made by us."""
    key = tree.service
    if not tree.others and (tree.standing != "guest" or ownerless(tree.tags)):
        return [_delete(key, tree)]
    steps: list[Call] = [
        *(_drop_listener(key, tree, each) for each in tree.listeners),
        *(_drop_pool(key, tree, each) for each in tree.pools),
    ]
    if tree.standing == "own":
        body = {"loadbalancer": {"tags": list(without_service(tree.tags))}}
        steps.append(
            Call(
                key,
                "PUT",
                f"loadbalancers/{tree.id}",
                body,
                "its marks, as others are on it",
                tree.id,
            )
        )
    company = _company(tree)
    return [msgspec.structs.replace(step, leaves=True, company=company) for step in steps]


def _company(tree: FoundTree) -> Company:
    return Company(tuple(each.id for each in tree.listeners), tree.others)


def _create(wanted: Tree) -> Call:
    words = f"load balancer {wanted.name} of provider {wanted.provider}"
    return Call(
        wanted.service,
        "POST",
        "loadbalancers",
        {"loadbalancer": bodies.load_balancer(wanted)},
        words,
        why=wanted.why,
    )


def _delete(key: ServiceKey, tree: FoundTree, state: str = "") -> Call:
    words = f"load balancer {tree.address}{state}"
    path = f"loadbalancers/{tree.id}?cascade=true"
    return Call(
        key,
        "DELETE",
        path,
        None,
        words,
        tree.id,
        ends=True,
        company=_company(tree),
        repairs=bool(state),
    )


def _repair(wanted: Tree, keep: FoundTree, attempts: int) -> list[Change]:
    if attempts >= MOST_ATTEMPTS:
        return [_given_up(wanted.service, keep.id, attempts)]
    shown = (
        not set(keep.shown).isdisjoint(wanted.addresses)
        or keep.standing == "foreign"
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


def _tree_steps(wanted: Tree, tree: FoundTree) -> list[Change]:
    steps = _part_steps(wanted, tree)
    body: dict[str, object] = {}
    if not set(wanted.tags) <= set(tree.tags):
        body["tags"] = sorted({*tree.tags, *wanted.tags})
    # By its name cloud-provider-openstack would find again what was taken over from it.
    if not tree.name.startswith(OCCM) and (tree.name, tree.description) != (
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
                f"loadbalancers/{tree.id}",
                {"loadbalancer": body},
                words,
                tree.id,
            )
        )
    return steps


def _part_steps(wanted: Tree, tree: FoundTree) -> list[Change]:
    """What is below the load balancer."""
    steps: list[Change] = []
    used: set[str] = set()
    gone: set[str] = set()
    for listener in wanted.listeners:
        steps += _listener_steps(wanted, tree, listener, used, gone)
    ports = {(each.protocol, each.port) for each in wanted.listeners}
    for found in tree.listeners:
        if (found.protocol, found.port) not in ports and found.id not in gone:
            steps.append(_drop_listener(wanted.service, tree, found))
    dropped = [_drop_pool(wanted.service, tree, pool) for pool in tree.pools if pool.id not in used]
    return [
        *steps,
        *dropped,
        *(_affinity_again(wanted, tree, steps) if dropped and wanted.provider == "ovn" else ()),
    ]


def _affinity_again(wanted: Tree, tree: FoundTree, steps: Sequence[Change]) -> list[Change]:
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
                for each in tree.listeners
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
            tree.id,
        )
        for id_, listener in ids.values()
    ]


def _enabled(wanted: Tree) -> dict[str, object]:
    """Without admin_state_up in the update of a pool, provider ovn fails where a new affinity
    comes, and for ever leaves its listener in PENDING_UPDATE where marks alone do
    (`helper.pool_update`)."""
    return {"admin_state_up": True} if wanted.provider == "ovn" else {}


def _drop_listener(key: ServiceKey, tree: FoundTree, found: FoundListener) -> Call:
    return Call(
        key,
        "DELETE",
        f"listeners/{found.id}",
        None,
        f"listener {found.protocol}/{found.port}",
        tree.id,
    )


def _drop_pool(key: ServiceKey, tree: FoundTree, found: FoundPool) -> Call:
    return Call(key, "DELETE", f"pools/{found.id}", None, f"pool {found.name}", tree.id)


def _listener_steps(
    wanted: Tree, tree: FoundTree, listener: Listener, used: set[str], gone: set[str]
) -> list[Change]:
    """`used`: takes the pools that are to stay; `gone`: the listeners that go here."""
    there = next(
        (
            each
            for each in tree.listeners
            if (each.protocol, each.port) == (listener.protocol, listener.port)
        ),
        None,
    )
    pool = _pool_for(tree, listener, there, used)
    steps: list[Change] = []
    if pool is not None:
        used.add(pool.id)
        pool_id = pool.id
        steps += _pool_steps(wanted, tree, listener, pool)
    else:
        pool_id = f"${pool_name(listener)}"
        steps += _new_pool(wanted, tree, listener)
    if there is not None:
        return [*steps, *_listener_update(wanted, tree, listener, there, pool_id)]
    for other in tree.listeners:
        # Of one port there can be one listener for all that is carried over TCP.
        if (
            other.port == listener.port
            and transport(other.protocol) == transport(listener.protocol)
            and other.id not in gone
        ):
            gone.add(other.id)
            steps.append(_drop_listener(wanted.service, tree, other))
    body = bodies.listener(listener, wanted.child_tags) | {
        "loadbalancer_id": tree.id,
        "default_pool_id": pool_id,
    }
    words = f"listener {listener.protocol}/{listener.port}"
    return [*steps, Call(wanted.service, "POST", "listeners", {"listener": body}, words, tree.id)]


def _pool_for(
    tree: FoundTree, listener: Listener, there: FoundListener | None, used: Iterable[str]
) -> FoundPool | None:
    """The pool that the listener has, if it can become the one that is wanted; or one that was made
    for it and not yet put in its place."""
    current = next(
        (pool for pool in tree.pools if there is not None and pool.id == there.pool_id), None
    )
    if current is not None and _can_become(tree, current, listener):
        return current
    others = {each.pool_id for each in tree.listeners} | set(used)
    return next(
        (
            pool
            for pool in tree.pools
            if pool.name == pool_name(listener)
            and _can_become(tree, pool, listener)
            and pool.id not in others
        ),
        None,
    )


def _can_become(tree: FoundTree, pool: FoundPool, listener: Listener) -> bool:
    """Provider ovn takes another method, and the end of affinity, for a pool that is there, and
    does nothing about it."""
    if pool.protocol != listener.pool.protocol or tree.provider != "ovn":
        return pool.protocol == listener.pool.protocol
    return pool.method == listener.pool.method and (
        pool.affinity_s is None or listener.pool.affinity_s is not None
    )


def _new_pool(wanted: Tree, tree: FoundTree, listener: Listener) -> list[Change]:
    name, pool = pool_name(listener), listener.pool
    body = bodies.pool(listener, wanted.child_tags) | {"loadbalancer_id": tree.id}
    steps: list[Change] = [
        Call(wanted.service, "POST", "pools", {"pool": body}, f"pool {name}", tree.id, saves=name)
    ]
    if pool.members:
        path, words = f"pools/${name}/members", f"members of pool {name}"
        steps.append(
            Call(wanted.service, "PUT", path, bodies.members(pool.members), words, tree.id)
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
                tree.id,
            )
        )
    return steps


def _pool_steps(
    wanted: Tree, tree: FoundTree, listener: Listener, found: FoundPool
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
                tree.id,
            )
        )
    monitor = found.monitor
    if monitor is not None and (
        pool.monitor is None or _is_made_anew(wanted, pool.monitor, monitor)
    ):
        words = f"monitor of pool {name}"
        steps.append(
            Call(wanted.service, "DELETE", f"healthmonitors/{monitor.id}", None, words, tree.id)
        )
        monitor = None
    # Where members are asked is said with the members: before anybody asks them there.
    if (step := members_step(wanted.service, tree, found, pool.members)) is not None:
        steps.append(step)
    if pool.monitor is None:
        return steps
    if monitor is None:
        body = {
            "healthmonitor": bodies.monitor(pool.monitor, wanted.monitor_tags)
            | {"pool_id": found.id}
        }
        steps.append(
            Call(wanted.service, "POST", "healthmonitors", body, f"monitor of pool {name}", tree.id)
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
                tree.id,
            )
        )
    return steps


def _is_made_anew(wanted: Tree, monitor: Monitor, found: FoundMonitor) -> bool:
    """Rather than written. Provider ovn writes one that is there, and for ever leaves its listener
    in PENDING_UPDATE (`helper.hm_update`)."""
    return monitor.type != found.monitor.type or (
        wanted.provider == "ovn" and _differs(wanted, monitor, found)
    )


def _differs(wanted: Tree, monitor: Monitor, found: FoundMonitor) -> bool:
    return monitor != found.monitor or found.status == ERROR or bool(_marks(wanted, found.tags))


def _marks(wanted: Tree, tags: Iterable[str]) -> dict[str, object]:
    """What is to be written to a part that lacks our marks; others' stay."""
    missing = set(wanted.child_tags) - set(tags)
    return {"tags": sorted({*tags, *wanted.child_tags})} if missing else {}


def _listener_update(
    wanted: Tree, tree: FoundTree, listener: Listener, found: FoundListener, pool_id: str
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
        Call(wanted.service, "PUT", f"listeners/{found.id}", {"listener": changed}, words, tree.id)
    ]


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
