"""The steps below a load balancer: listeners, their pools, members and monitors.

In: a BalancerSpec, the BalancerState that is to match it. Out: Changes in order, for listeners and
pools of the Service only. Pure. Invariants: a listener is switched to a new pool only when the pool
has its members and its monitor; an object in ERROR is written again."""

from collections.abc import Iterable, Sequence

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.balancers import (
    ERROR,
    BalancerSpec,
    BalancerState,
    FoundListener,
    FoundMonitor,
    FoundPool,
    Listener,
    Monitor,
    pool_name,
    transport,
)
from fairlead.drivers.octavia.changes import Call, Change
from fairlead.drivers.octavia.marks import EXPLICIT
from fairlead.drivers.octavia.members import members_step
from fairlead.model import ServiceKey


def part_steps(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """Return the steps for everything below the load balancer."""
    steps: list[Change] = []
    used: set[str] = set()
    gone: set[str] = set()
    for listener in wanted.listeners:
        steps += _listener_steps(wanted, balancer, listener, used, gone)
    ports = {(each.protocol, each.port) for each in wanted.listeners}
    for found in balancer.listeners:
        if (found.protocol, found.port) not in ports and found.id not in gone:
            steps.append(drop_listener(wanted.service, balancer, found))
    dropped = [
        drop_pool(wanted.service, balancer, pool) for pool in balancer.pools if pool.id not in used
    ]
    return [
        *steps,
        *dropped,
        *(
            _restore_affinity(wanted, balancer, steps)
            if dropped and wanted.provider == "ovn"
            else ()
        ),
    ]


def _restore_affinity(
    wanted: BalancerSpec, balancer: BalancerState, steps: Sequence[Change]
) -> list[Change]:
    """Return the writes that restore affinity after a pool was deleted. Provider ovn has one
    affinity for all pools of a protocol, and drops it when any of these pools is deleted."""
    made = {step.saves for step in steps if isinstance(step, Call) and step.saves}
    ids: dict[str, tuple[str, Listener]] = {}
    for listener in wanted.listeners:
        if listener.pool.affinity_s is None:
            continue
        existing = next(
            (
                each
                for each in balancer.listeners
                if (each.protocol, each.port) == (listener.protocol, listener.port)
            ),
            None,
        )
        new = pool_name(listener) in made
        if new or existing is not None:
            ids[listener.protocol] = (
                f"${pool_name(listener)}" if new or existing is None else existing.pool_id,
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
    """Return the field that provider ovn needs in every update of a pool. Without admin_state_up it
    fails when an affinity is added, and it leaves the listener in PENDING_UPDATE forever when only
    tags change (`helper.pool_update`)."""
    return {"admin_state_up": True} if wanted.provider == "ovn" else {}


def drop_listener(key: ServiceKey, balancer: BalancerState, found: FoundListener) -> Call:
    return Call(
        key,
        "DELETE",
        f"listeners/{found.id}",
        None,
        f"listener {found.protocol}/{found.port}",
        balancer.id,
    )


def drop_pool(key: ServiceKey, balancer: BalancerState, found: FoundPool) -> Call:
    return Call(key, "DELETE", f"pools/{found.id}", None, f"pool {found.name}", balancer.id)


def _listener_steps(
    wanted: BalancerSpec,
    balancer: BalancerState,
    listener: Listener,
    used: set[str],
    gone: set[str],
) -> list[Change]:
    """Return the steps for one listener. The function adds the pools that stay to `used`, and the
    listeners that it deletes to `gone`."""
    existing = next(
        (
            each
            for each in balancer.listeners
            if (each.protocol, each.port) == (listener.protocol, listener.port)
        ),
        None,
    )
    pool = _pool_for(balancer, listener, existing, used)
    steps: list[Change] = []
    if pool is not None:
        used.add(pool.id)
        pool_id = pool.id
        steps += _pool_steps(wanted, balancer, listener, pool)
    else:
        pool_id = f"${pool_name(listener)}"
        steps += _new_pool(wanted, balancer, listener)
    if existing is not None:
        return [*steps, *_listener_update(wanted, balancer, listener, existing, pool_id)]
    for other in balancer.listeners:
        # Each port can have one listener for all protocols that are carried over TCP.
        if (
            other.port == listener.port
            and transport(other.protocol) == transport(listener.protocol)
            and other.id not in gone
        ):
            gone.add(other.id)
            steps.append(drop_listener(wanted.service, balancer, other))
    body = bodies.listener(listener, wanted.child_tags) | {
        "loadbalancer_id": balancer.id,
        "default_pool_id": pool_id,
    }
    subject = f"listener {listener.protocol}/{listener.port}"
    return [
        *steps,
        Call(wanted.service, "POST", "listeners", {"listener": body}, subject, balancer.id),
    ]


def _pool_for(
    balancer: BalancerState, listener: Listener, existing: FoundListener | None, used: Iterable[str]
) -> FoundPool | None:
    """Return the pool of the listener if it can be changed into the desired one; otherwise a pool
    that was created for the listener and is not attached to it yet; otherwise None."""
    current = next(
        (pool for pool in balancer.pools if existing is not None and pool.id == existing.pool_id),
        None,
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
    """Return whether updates can turn the pool into the desired one. Provider ovn accepts an update
    of the method, or the removal of affinity, without effect."""
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
        path, subject = f"pools/${name}/members", f"members of pool {name}"
        steps.append(
            Call(wanted.service, "PUT", path, bodies.members(pool.members), subject, balancer.id)
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
        pool.monitor is None or _must_recreate(wanted, pool.monitor, monitor)
    ):
        subject = f"monitor of pool {name}"
        steps.append(
            Call(
                wanted.service, "DELETE", f"healthmonitors/{monitor.id}", None, subject, balancer.id
            )
        )
        monitor = None
    # The port for health checks is a field of the members, so they are written before the monitor.
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


def _must_recreate(wanted: BalancerSpec, monitor: Monitor, found: FoundMonitor) -> bool:
    """Return whether the monitor must be recreated instead of updated. Provider ovn applies an
    update, but leaves the listener in PENDING_UPDATE forever (`helper.hm_update`)."""
    return monitor.type != found.monitor.type or (
        wanted.provider == "ovn" and _differs(wanted, monitor, found)
    )


def _differs(wanted: BalancerSpec, monitor: Monitor, found: FoundMonitor) -> bool:
    return monitor != found.monitor or found.status == ERROR or bool(_marks(wanted, found.tags))


def _marks(wanted: BalancerSpec, tags: Iterable[str]) -> dict[str, object]:
    """Return the tags to write to a part that lacks the Service's marks; other tags are kept."""
    missing = set(wanted.child_tags) - set(tags)
    return {"tags": sorted({*tags, *wanted.child_tags})} if missing else {}


def _listener_update(
    wanted: BalancerSpec,
    balancer: BalancerState,
    listener: Listener,
    found: FoundListener,
    pool_id: str,
) -> list[Change]:
    explicit = {EXPLICIT + name for name, _ in listener.timeouts}
    stale = {
        tag.removeprefix(EXPLICIT)
        for tag in found.tags
        if tag.startswith(EXPLICIT) and tag not in explicit
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
        changed |= bodies.without_defaults(body)
    if set(_texts(body["tags"])) != set(found.tags):
        changed["tags"] = body["tags"]
    if found.pool_id != pool_id:
        changed["default_pool_id"] = pool_id
    if not changed:
        return []
    subject = f"listener {listener.protocol}/{listener.port}"
    return [
        Call(
            wanted.service,
            "PUT",
            f"listeners/{found.id}",
            {"listener": changed},
            subject,
            balancer.id,
        )
    ]


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
