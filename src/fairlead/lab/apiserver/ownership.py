"""The owners of an object's fields: `metadata.managedFields`, as sets of paths. Pure; the time is
an argument.

In: objects, and the managedFields of one. Out: the leaves of an object by path, the owners of
paths, and managedFields again. A path is a tuple of FieldsV1 steps (`f:name`,
`k:{"port":80,"protocol":"TCP"}`, `v:"value"`). Follows KEP-555 (server-side apply) and the FieldsV1
format of the API reference (ManagedFieldsEntry).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.schema import Shape

Path = tuple[str, ...]
Paths = frozenset[Path]

ITEM: Final = object()
"""The value in `leaves` that stands for the existence of a list item or container, apart from its
contents."""

_SERVER_FIELDS: Final = frozenset(
    {
        "name",
        "generateName",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
        "managedFields",
    }
)


class Manager(NamedTuple):
    """A writer: the field manager's name, its operation (Apply or Update), the API version and the
    subresource."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""


class Owned(NamedTuple):
    """The paths that one manager owns, and the time of its last change of the object (RFC 3339);
    empty if it never changed it."""

    paths: Paths
    time: str


Owners = dict[Manager, Owned]


def leaves(obj: Object, shape: Shape, *, containers: bool = False) -> dict[Path, Any]:
    """Return every field of an object that a manager can own, with its value. Fields that only the
    server sets are left out. With `containers`, also include the existence of each map or list of
    items: the manager that adds the first entry with an update owns it."""
    found: dict[Path, Any] = {}
    for name, value in obj.items():
        if name in ("apiVersion", "kind"):
            continue
        if name == "metadata":
            value = {field: below for field, below in value.items() if field not in _SERVER_FIELDS}
            if not value:
                continue
        _collect(value, shape.below(name), (f"f:{name}",), found, containers=containers)
    return found


def _collect(
    value: Any, shape: Shape, path: Path, found: dict[Path, Any], *, containers: bool
) -> None:
    if containers and value and shape.form in ("map", "keyed", "set"):
        found[path] = ITEM
    if isinstance(value, dict) and value and shape.form != "value":
        for name, below in value.items():
            _collect(below, shape.below(name), (*path, f"f:{name}"), found, containers=containers)
    elif isinstance(value, list) and shape.form == "keyed":
        for item in value:
            step = (*path, item_step(item, shape))
            found[step] = ITEM
            for name, below in item.items():
                _collect(
                    below, shape.below(name), (*step, f"f:{name}"), found, containers=containers
                )
    elif isinstance(value, list) and shape.form == "set":
        for item in value:
            found[(*path, value_step(item))] = item
    else:
        found[path] = value


def item_step(item: Mapping[str, Any], shape: Shape) -> str:
    keys = {key: item.get(key, shape.defaults.get(key)) for key in sorted(shape.keys)}
    return "k:" + _compact({key: value for key, value in keys.items() if value is not None})


def value_step(item: object) -> str:
    return "v:" + _compact(item)


def _compact(value: object) -> str:
    return msgspec.json.encode(value).decode()


def changed(old: Mapping[Path, Any], new: Mapping[Path, Any]) -> tuple[Paths, Paths]:
    """Return the paths that were set or changed, and the paths that were removed."""
    missing = object()
    written = frozenset(path for path, value in new.items() if old.get(path, missing) != value)
    return written, frozenset(path for path in old if path not in new)


def read_owners(managed_fields: Iterable[Mapping[str, Any]]) -> Owners:
    owners: Owners = {}
    for entry in managed_fields:
        manager = Manager(
            entry.get("manager", ""),
            entry.get("operation", ""),
            entry.get("apiVersion", ""),
            entry.get("subresource", ""),
        )
        owners[manager] = Owned(
            frozenset(_paths(entry.get("fieldsV1") or {}, ())), entry.get("time", "")
        )
    return owners


def _paths(fields: Mapping[str, Any], path: Path) -> Iterator[Path]:
    if not fields and path:
        yield path
    for step, below in fields.items():
        if step == ".":
            yield path
        else:
            yield from _paths(below, (*path, step))


def write_owners(owners: Owners) -> list[Object]:
    """Return the managedFields of these owners, in the API server's order: Apply before Update,
    then by time."""
    entries = []
    for manager, owned in sorted(
        owners.items(), key=lambda item: (item[0].operation, item[1].time, item[0])
    ):
        entry: Object = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.api_version,
            "time": owned.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(owned.paths),
        }
        if not owned.time:
            del entry["time"]
        if manager.subresource:
            entry["subresource"] = manager.subresource
        entries.append(entry)
    return entries


def _tree(paths: Paths) -> Object:
    root: Object = {}
    for path in sorted(paths):
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node.setdefault(path[-1], {})
    _mark(root, (), paths)
    return root


def _mark(node: Object, path: Path, paths: Paths) -> None:
    """Mark a path that is owned itself and has other paths below it with a `.`."""
    for step, below in list(node.items()):
        here = (*path, step)
        if below:
            _mark(below, here, paths)
            if here in paths:
                below["."] = {}


def record_update(
    owners: Owners, manager: Manager, old: Mapping[Path, Any], new: Mapping[Path, Any], time: str
) -> Owners:
    """Return the owners after `manager` wrote `new` over `old` (create, update, or any patch but
    apply).

    The manager becomes the only owner of what it changed; what it removed has no owner. A write
    that changes nothing changes no owner.
    """
    written, gone = changed(old, new)
    # A map that became empty because its contents were removed does not count as written.
    written -= {
        path
        for path in written
        if new[path] == {} and any(then[: len(path)] == path for then in old)
    }
    if not written and not gone:
        return owners
    after: Owners = {}
    for other, owned in owners.items():
        lost = gone if other == manager else gone | written
        kept = owned.paths - lost
        if kept:
            after[other] = Owned(kept, owned.time)
    if written:
        before = after.get(manager, Owned(frozenset(), "")).paths
        after[manager] = Owned(before | written, time)
    return after
