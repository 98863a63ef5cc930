"""Server-side apply: what an object becomes when a manager says which fields it wants, and with
which values.

In: the live object (or none), what the manager applies, its name. Out: the object as it should be
and its owners, or ApiFailure 409 with a cause for each field that another manager holds at another
value. Follows KEP-555 and https://kubernetes.io/docs/reference/using-api/server-side-apply/. Pure;
the time is an argument."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fairlead.lab.apiserver.failure import ApiFailure, Object
from fairlead.lab.apiserver.ownership import (
    Manager,
    Owned,
    Owners,
    Path,
    Paths,
    changed,
    item_step,
    leaves,
    value_step,
)
from fairlead.lab.apiserver.schema import Shape


class Duplicates(Exception):
    """The applied object has an item of a list twice; prints as the API server's words about it."""


class Applied(NamedTuple):
    """The merged object, without managedFields, and who owns its fields."""

    object: Object
    owners: Owners


def apply(
    live: Object,
    wanted: Object,
    owners: Owners,
    manager: Manager,
    *,
    shape: Shape,
    force: bool,
    time: str,
) -> Applied:
    """Merge what `manager` wants into `live`. What it wanted before and does not want now is
    removed, if nobody else has it.

    Raises ApiFailure 409 for a conflict, and Duplicates.
    """
    asked = leaves(wanted, shape)
    had = owners.get(manager, Owned(frozenset(), "")).paths
    others = {other: owned for other, owned in owners.items() if other != manager}
    merged = _merge(live, wanted, shape, ())
    dropped = _dropped(had, frozenset(asked), others.values())
    merged = _prune(merged, dropped, shape, ())
    before, after = leaves(live, shape), leaves(merged, shape)
    written, gone = changed(before, after)
    _check_conflicts(others, written & frozenset(asked), force=force)
    kept: Owners = {}
    for other, owned in others.items():
        paths = owned.paths - written - gone
        if paths:
            kept[other] = Owned(paths, owned.time)
    mine = frozenset(asked)
    # Who only asks for what is there already changes nothing, and so has no time of his own.
    since = owners[manager].time if manager in owners else ""
    if mine:
        kept[manager] = Owned(mine, time if written or gone else since)
    return Applied(merged, kept)


def _merge(live: Any, wanted: Any, shape: Shape, path: Path) -> Any:
    if isinstance(wanted, dict) and shape.form != "value":
        merged = dict(live) if isinstance(live, dict) else {}
        for name, value in wanted.items():
            merged[name] = _merge(merged.get(name), value, shape.below(name), (*path, f"f:{name}"))
        return merged
    if isinstance(wanted, list) and shape.form == "keyed":
        return _merge_items(live or [], wanted, shape, path)
    if isinstance(wanted, list) and shape.form == "set":
        return list(dict.fromkeys([*(live or []), *wanted]))
    return wanted


def _merge_items(live: list[Any], wanted: list[Any], shape: Shape, path: Path) -> list[Any]:
    """The wanted items in the wanted order; the live ones that are not wanted follow the item that
    they followed."""
    present = {item_step(item, shape): item for item in live}
    steps = [item_step(item, shape) for item in wanted]
    again = [step for place, step in enumerate(steps) if step in steps[:place]]
    if again:
        told = [
            f"{told_path(path)}: duplicate entries for key {told_path((step,))}" for step in again
        ]
        raise Duplicates(told[0] if len(told) == 1 else "\n  ".join(["errors:", *told]))
    merged = {
        step: _merge(present.get(step, {}), item, shape, (*path, step))
        for step, item in zip(steps, wanted, strict=True)
    }
    order: list[str] = list(steps)
    follows = None
    for step in present:
        if step not in merged:
            order.insert(order.index(follows) + 1 if follows is not None else 0, step)
        follows = step
    return [merged.get(step) or present[step] for step in order]


def _dropped(had: Paths, asked: Paths, others: Iterable[Owned]) -> Paths:
    """The paths that go: the manager no longer asks for them, and nobody owns them or anything
    below them."""
    held: set[Path] = set()
    for paths in (asked, *(owned.paths for owned in others)):
        for path in paths:
            held.update(path[:length] for length in range(1, len(path) + 1))
    return frozenset(path for path in had if path not in held)


def _prune(value: Any, dropped: Paths, shape: Shape, path: Path) -> Any:
    """The value without the dropped paths. A map or list that becomes empty by that goes too."""
    if not dropped:
        return value
    if isinstance(value, dict) and shape.form != "value":
        kept: Object = {}
        for name, below in value.items():
            here = (*path, f"f:{name}")
            pruned = None if here in dropped else _prune(below, dropped, shape.below(name), here)
            if pruned is None or (pruned in ({}, []) and below):
                continue
            kept[name] = pruned
        return kept
    if isinstance(value, list) and shape.form == "keyed":
        pairs = [(item, (*path, item_step(item, shape))) for item in value]
        return [_prune(item, dropped, shape, here) for item, here in pairs if here not in dropped]
    if isinstance(value, list) and shape.form == "set":
        return [item for item in value if (*path, value_step(item)) not in dropped]
    return value


def _check_conflicts(others: Owners, written: Paths, *, force: bool) -> None:
    if force:
        return
    clashes = [
        (manager, path)
        for manager, owned in others.items()
        for path in sorted(owned.paths & written, key=_order)
    ]
    if not clashes:
        return
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f"conflict with {_told(manager)}",
            "field": told_path(path),
        }
        for manager, path in clashes
    ]
    managers = dict.fromkeys(manager for manager, _ in clashes)
    if len(clashes) == 1:
        text = f"conflict with {_told(clashes[0][0])}: {told_path(clashes[0][1])}"
    else:
        parts = []
        for manager in managers:
            fields = [f"- {told_path(path)}" for other, path in clashes if other == manager]
            parts.append(f"conflicts with {_told(manager)}:\n" + "\n".join(fields))
        text = "\n".join(parts)
    plural = "conflict" if len(clashes) == 1 else "conflicts"
    message = f"Apply failed with {len(clashes)} {plural}: {text}"
    raise ApiFailure(409, "Conflict", message, {"causes": causes})


def _order(path: Path) -> tuple[tuple[bool, str], ...]:
    """As the API tells them: at each level the fields first, then what is below other fields."""
    return tuple((place < len(path) - 1, step) for place, step in enumerate(path))


def _told(manager: Manager) -> str:
    text = f'"{manager.name}"'
    if manager.subresource:
        text += f' with subresource "{manager.subresource}"'
    return text if manager.operation == "Apply" else f"{text} using {manager.api_version}"


def told_path(path: Path) -> str:
    """A path as the API prints it: `.spec.ports[port=80,protocol="TCP"].name`."""
    text = ""
    for step in path:
        sort, _, value = step.partition(":")
        if sort == "f":
            text += f".{value}"
        elif sort == "k":
            text += "[" + value[1:-1].replace('":', "=").replace(',"', ",").removeprefix('"') + "]"
        else:
            text += f"[={value}]"
    return text
