"""Server-side apply: merge the fields that a manager wants into an object. Pure; the time is an
argument.

In: the live object (or none), the applied object, the manager's name. Out: the merged object and
the owners of its fields, or ApiFailure 409 with a cause for each field that another manager owns
with a different value. Follows KEP-555 and
https://kubernetes.io/docs/reference/using-api/server-side-apply/.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import ApiFailure
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
    """The applied object contains an item of a list twice. The text is the API server's message."""


class Applied(NamedTuple):
    """The merged object, without managedFields, and the owners of its fields."""

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
    """Merge the fields that `manager` wants into `live`. Remove the fields that it applied before
    and does not apply now, unless another manager owns them.

    Raise ApiFailure 409 for a conflict, and Duplicates.
    """
    applied = leaves(wanted, shape)
    had = owners.get(manager, Owned(frozenset(), "")).paths
    others = {other: owned for other, owned in owners.items() if other != manager}
    merged = _merge(live, wanted, shape, ())
    dropped = _dropped(had, frozenset(applied), others.values())
    merged = _prune(merged, dropped, shape, ())
    before, after = leaves(live, shape), leaves(merged, shape)
    written, gone = changed(before, after)
    _check_conflicts(others, written & frozenset(applied), force=force)
    kept: Owners = {}
    for other, owned in others.items():
        paths = owned.paths - written - gone
        if paths:
            kept[other] = Owned(paths, owned.time)
    applied_paths = frozenset(applied)
    # An apply that changes nothing keeps the manager's previous timestamp.
    since = owners[manager].time if manager in owners else ""
    if applied_paths:
        kept[manager] = Owned(applied_paths, time if written or gone else since)
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
    """Return the wanted items in the wanted order. A live item that is not wanted stays behind the
    item that it followed."""
    present = {item_step(item, shape): item for item in live}
    steps = [item_step(item, shape) for item in wanted]
    again = [step for index, step in enumerate(steps) if step in steps[:index]]
    if again:
        errors = [
            f"{format_path(path)}: duplicate entries for key {format_path((step,))}"
            for step in again
        ]
        raise Duplicates(errors[0] if len(errors) == 1 else "\n  ".join(["errors:", *errors]))
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


def _dropped(had: Paths, applied: Paths, others: Iterable[Owned]) -> Paths:
    """Return the paths to remove: the manager no longer applies them, and no manager owns them or
    anything below them."""
    held: set[Path] = set()
    for paths in (applied, *(owned.paths for owned in others)):
        for path in paths:
            held.update(path[:length] for length in range(1, len(path) + 1))
    return frozenset(path for path in had if path not in held)


def _prune(value: Any, dropped: Paths, shape: Shape, path: Path) -> Any:
    """Return the value without the dropped paths. A map or list that becomes empty by this is
    removed, too."""
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
            "message": f"conflict with {_format_manager(manager)}",
            "field": format_path(path),
        }
        for manager, path in clashes
    ]
    managers = dict.fromkeys(manager for manager, _ in clashes)
    if len(clashes) == 1:
        text = f"conflict with {_format_manager(clashes[0][0])}: {format_path(clashes[0][1])}"
    else:
        parts = []
        for manager in managers:
            fields = [f"- {format_path(path)}" for other, path in clashes if other == manager]
            parts.append(f"conflicts with {_format_manager(manager)}:\n" + "\n".join(fields))
        text = "\n".join(parts)
    plural = "conflict" if len(clashes) == 1 else "conflicts"
    message = f"Apply failed with {len(clashes)} {plural}: {text}"
    raise ApiFailure(409, "Conflict", message, {"causes": causes})


def _order(path: Path) -> tuple[tuple[bool, str], ...]:
    """Sort key in the order of the API's messages: at each level the fields first, then the fields
    below other fields."""
    return tuple((index < len(path) - 1, step) for index, step in enumerate(path))


def _format_manager(manager: Manager) -> str:
    text = f'"{manager.name}"'
    if manager.subresource:
        text += f' with subresource "{manager.subresource}"'
    return text if manager.operation == "Apply" else f"{text} using {manager.api_version}"


def format_path(path: Path) -> str:
    """Return a path as the API prints it: `.spec.ports[port=80,protocol="TCP"].name`."""
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
