"""The steps from what was found to what is wanted: as few writes as can be, and nothing goes before what replaces it is made.

In: Trees, and what was found of each Service. Out: Changes in order. Pure.
Invariant: of one Service there is never a step that makes a load balancer while another one is there, be it broken: it goes
first, or nothing happens. A load balancer that Octavia is working on is waited for. A listener's traffic goes to its new pool
only when that has its members and its monitor. Nothing to do: no step.
What is broken below a load balancer that works is written again, which repairs it; the load balancer itself is failed over, if
it has served somebody and can be, or else made anew with the same address.
"""

from collections.abc import Iterable, Mapping, Sequence

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.changes import Await, Call, Change, GiveUp, Replan, Verify
from fairlead.drivers.octavia.marks import EXPLICIT
from fairlead.drivers.octavia.tree import (
    ACTIVE,
    ERROR,
    Found,
    FoundListener,
    FoundPool,
    FoundTree,
    Listener,
    Member,
    Tree,
    pool_name,
    provider_of,
    transport,
)
from fairlead.model import ServiceKey

MOST_ATTEMPTS = 5
"""So often one that fails is repaired or made anew, one time after the other; then rarely."""


def diff(wanted: Mapping[ServiceKey, Tree], found: Mapping[ServiceKey, Found]) -> list[Change]:
    steps: list[Change] = []
    for key in sorted(wanted.keys() | found.keys()):
        own = _service_steps(key, wanted.get(key), found.get(key, Found(())))
        if any(isinstance(step, Call) for step in own) and (tree := wanted.get(key)) is not None:
            own.append(Verify(key, tree))
        steps += own
    return steps


def chosen(trees: Sequence[FoundTree], uid: str, addresses: Sequence[str] = ()) -> FoundTree | None:
    """The one to keep, of several load balancers of one Service: one that works, then the one whose address is shown, then the
    oldest."""
    own = [tree for tree in trees if tree.uid == uid]
    return min(own, key=lambda tree: (tree.status == ERROR, tree.address not in addresses, tree.created, tree.id), default=None)


def _service_steps(key: ServiceKey, wanted: Tree | None, found: Found) -> list[Change]:
    if pending := [tree for tree in found.trees if tree.status not in (ACTIVE, ERROR)]:
        return [Await(key, tree.id, tree.status) for tree in pending]
    keep = chosen(found.trees, wanted.uid, wanted.addresses) if wanted is not None else None
    steps: list[Change] = [_delete(key, tree) for tree in found.trees if tree is not keep]
    if wanted is None:
        return steps
    if keep is None:
        return [*steps, _create(wanted)]
    if keep.status == ERROR:
        return [*steps, *_repair(wanted, keep, found.attempts)]
    if provider_of(keep.provider) != wanted.provider:
        return [*steps, Replan(key, keep.id, keep.provider)]
    return [*steps, *_tree_steps(wanted, keep)]


def _create(wanted: Tree) -> Call:
    words = f"load balancer {wanted.name} of provider {wanted.provider}"
    return Call(wanted.service, "POST", "loadbalancers", {"loadbalancer": bodies.load_balancer(wanted)}, words)


def _delete(key: ServiceKey, tree: FoundTree) -> Call:
    return Call(
        key, "DELETE", f"loadbalancers/{tree.id}?cascade=true", None, f"load balancer {tree.address}", tree.id, ends=True
    )


def _repair(wanted: Tree, keep: FoundTree, attempts: int) -> list[Change]:
    if attempts >= MOST_ATTEMPTS:
        return [GiveUp(wanted.service, keep.id, attempts)]
    if not attempts and keep.address in wanted.addresses and provider_of(keep.provider) == "amphora":
        path = f"loadbalancers/{keep.id}/failover"
        return [
            Call(wanted.service, "PUT", path, None, f"load balancer {keep.address}, which is in ERROR", keep.id, repairs=True)
        ]
    delete = Call(
        wanted.service,
        "DELETE",
        f"loadbalancers/{keep.id}?cascade=true",
        None,
        f"load balancer {keep.address}, which is in ERROR",
        keep.id,
        ends=True,
        repairs=True,
    )
    return [delete, _create(wanted)]


def _tree_steps(wanted: Tree, tree: FoundTree) -> list[Change]:
    steps: list[Change] = []
    if (tree.name, tree.description) != (wanted.name, wanted.description) or not set(wanted.tags) <= set(tree.tags):
        tags = sorted({*tree.tags, *wanted.tags})
        body = {"loadbalancer": {"name": wanted.name, "description": wanted.description, "tags": tags}}
        steps.append(Call(wanted.service, "PUT", f"loadbalancers/{tree.id}", body, "its name and marks", tree.id))
    used: set[str] = set()
    gone: set[str] = set()
    for listener in wanted.listeners:
        steps += _listener_steps(wanted, tree, listener, used, gone)
    ports = {(each.protocol, each.port) for each in wanted.listeners}
    for found in tree.listeners:
        if (found.protocol, found.port) not in ports and found.id not in gone:
            steps.append(_drop_listener(wanted, tree, found))
    steps += [
        Call(wanted.service, "DELETE", f"pools/{pool.id}", None, f"pool {pool.name}", tree.id)
        for pool in tree.pools
        if pool.id not in used
    ]
    return steps


def _drop_listener(wanted: Tree, tree: FoundTree, found: FoundListener) -> Call:
    return Call(wanted.service, "DELETE", f"listeners/{found.id}", None, f"listener {found.protocol}/{found.port}", tree.id)


def _listener_steps(wanted: Tree, tree: FoundTree, listener: Listener, used: set[str], gone: set[str]) -> list[Change]:
    """`used`: takes the pools that are to stay; `gone`: the listeners that go here."""
    there = next((each for each in tree.listeners if (each.protocol, each.port) == (listener.protocol, listener.port)), None)
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
        if other.port == listener.port and transport(other.protocol) == transport(listener.protocol) and other.id not in gone:
            gone.add(other.id)
            steps.append(_drop_listener(wanted, tree, other))
    body = bodies.listener(listener, wanted.child_tags) | {"loadbalancer_id": tree.id, "default_pool_id": pool_id}
    words = f"listener {listener.protocol}/{listener.port}"
    return [*steps, Call(wanted.service, "POST", "listeners", {"listener": body}, words, tree.id)]


def _pool_for(tree: FoundTree, listener: Listener, there: FoundListener | None, used: Iterable[str]) -> FoundPool | None:
    """The pool that the listener has, if it can become the one that is wanted; or one that was made for it and not yet put in
    its place."""
    current = next((pool for pool in tree.pools if there is not None and pool.id == there.pool_id), None)
    if current is not None and current.protocol == listener.pool.protocol:
        return current
    others = {each.pool_id for each in tree.listeners} | set(used)
    return next(
        (
            pool
            for pool in tree.pools
            if pool.name == pool_name(listener) and pool.protocol == listener.pool.protocol and pool.id not in others
        ),
        None,
    )


def _new_pool(wanted: Tree, tree: FoundTree, listener: Listener) -> list[Change]:
    name, pool = pool_name(listener), listener.pool
    body = bodies.pool(listener, wanted.child_tags) | {"loadbalancer_id": tree.id}
    steps: list[Change] = [Call(wanted.service, "POST", "pools", {"pool": body}, f"pool {name}", tree.id, saves=name)]
    if pool.members:
        path, words = f"pools/${name}/members", f"members of pool {name}"
        steps.append(Call(wanted.service, "PUT", path, bodies.members(pool.members), words, tree.id))
    if pool.monitor is not None:
        monitor = bodies.monitor(pool.monitor, wanted.child_tags) | {"pool_id": f"${name}"}
        steps.append(
            Call(wanted.service, "POST", "healthmonitors", {"healthmonitor": monitor}, f"monitor of pool {name}", tree.id)
        )
    return steps


def _pool_steps(wanted: Tree, tree: FoundTree, listener: Listener, found: FoundPool) -> list[Change]:
    pool, name = listener.pool, found.name
    steps: list[Change] = []
    if (pool.method, pool.affinity_s) != (found.method, found.affinity_s) or found.status == ERROR:
        body = {"pool": bodies.pool_settings(pool)}
        steps.append(Call(wanted.service, "PUT", f"pools/{found.id}", body, f"pool {name}", tree.id))
    monitor = found.monitor
    if monitor is not None and (pool.monitor is None or pool.monitor.type != monitor.monitor.type):
        words = f"monitor of pool {name}"
        steps.append(Call(wanted.service, "DELETE", f"healthmonitors/{monitor.id}", None, words, tree.id))
        monitor = None
    # Where members are asked is said with the members: before anybody asks them there.
    if _differ(pool.members, found) or any(each.status == ERROR for each in found.members):
        path = f"pools/{found.id}/members"
        steps.append(Call(wanted.service, "PUT", path, bodies.members(pool.members), f"members of pool {name}", tree.id))
    if pool.monitor is None:
        return steps
    if monitor is None:
        body = {"healthmonitor": bodies.monitor(pool.monitor, wanted.child_tags) | {"pool_id": found.id}}
        steps.append(Call(wanted.service, "POST", "healthmonitors", body, f"monitor of pool {name}", tree.id))
    elif pool.monitor != monitor.monitor or monitor.status == ERROR:
        body = {"healthmonitor": bodies.monitor_settings(pool.monitor)}
        steps.append(Call(wanted.service, "PUT", f"healthmonitors/{monitor.id}", body, f"monitor of pool {name}", tree.id))
    return steps


def _differ(members: Iterable[Member], found: FoundPool) -> bool:
    """Where a member is, Octavia may have found by itself, and nobody can change."""
    return {_told(each) for each in members} != {_told(each.member) for each in found.members}


def _told(member: Member) -> tuple[object, ...]:
    return member.address, member.port, member.weight, member.monitor_port


def _listener_update(wanted: Tree, tree: FoundTree, listener: Listener, found: FoundListener, pool_id: str) -> list[Change]:
    asked = {EXPLICIT + name for name, _ in listener.timeouts}
    stale = {tag.removeprefix(EXPLICIT) for tag in found.tags if tag.startswith(EXPLICIT) and tag not in asked}
    foreign = [tag for tag in found.tags if tag not in wanted.child_tags and not tag.startswith(EXPLICIT)]
    body = bodies.listener_settings(listener, [*foreign, *wanted.child_tags], stale)
    now: dict[str, object] = {
        "connection_limit": found.connection_limit,
        "allowed_cidrs": list(found.cidrs) or None,
        "insert_headers": {bodies.HEADER: "true"} if found.forwarded_for else {},
        **dict(found.timeouts),
    }
    changed = {name: value for name, value in body.items() if name != "tags" and value != now.get(name)}
    if found.status == ERROR:
        changed |= bodies.said(body)
    if set(_texts(body["tags"])) != set(found.tags):
        changed["tags"] = body["tags"]
    if found.pool_id != pool_id:
        changed["default_pool_id"] = pool_id
    if not changed:
        return []
    words = f"listener {listener.protocol}/{listener.port}"
    return [Call(wanted.service, "PUT", f"listeners/{found.id}", {"listener": changed}, words, tree.id)]


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
