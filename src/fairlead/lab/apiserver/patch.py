"""The three types of PATCH that modify an object: JSON patch, merge patch, strategic merge patch.

In: the current object and the patch. Out: a new object; no argument is changed. Raise ApiFailure
400, 422 or 500 for an invalid patch. Follows RFC 6902, RFC 7386 and Kubernetes' strategic merge
(directives `$patch`, `$setElementOrder/`, `$deleteFromPrimitiveList/`, `$retainKeys`).
"""

from copy import deepcopy
from typing import Any

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import ApiFailure, bad_request, storage_error
from fairlead.lab.apiserver.schema import Shape

_ORDER = "$setElementOrder/"
_DELETE = "$deleteFromPrimitiveList/"
_DIRECTIVE = "$patch"
_RETAIN = "$retainKeys"


def merge(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386): maps merge, null deletes, everything else replaces."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def strategic_merge(target: Any, patch: Any, shape: Shape) -> Any:
    """Apply a merge patch that also merges lists of maps, item by item, by the key that `shape`
    names."""
    if not isinstance(patch, dict) or not isinstance(target, dict):
        return _without_directives(patch)
    directive = patch.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    if directive == "replace":
        return _without_directives(patch)
    if directive not in (None, "merge"):
        raise storage_error(500, f"unknown patch type: {directive} in map: {_format_go(patch)}")
    merged = dict(target)
    if _RETAIN in patch:
        merged = {name: value for name, value in merged.items() if name in patch[_RETAIN]}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_field(merged.get(name), value, shape.below(name))
    for name in (name for name in patch if name.startswith(_DELETE)):
        field = name.removeprefix(_DELETE)
        merged[field] = [item for item in merged.get(field) or [] if item not in patch[name]]
    for name in (name for name in patch if name.startswith(_ORDER)):
        field = name.removeprefix(_ORDER)
        if isinstance(merged.get(field), list):
            merged[field] = _in_order(
                merged[field], patch[name], target.get(field) or [], shape.below(field)
            )
    return merged


def _merge_field(current: Any, value: Any, shape: Shape) -> Any:
    if isinstance(value, list) and shape.form == "keyed":
        key = shape.patch_key
        merged = _merge_keyed(current or [], value, shape)
        deleted = [item.get(key) for item in value if item.get(_DIRECTIVE) == "delete"]
        live = [item for item in current or [] if item.get(key) not in deleted]
        return _in_order(merged, [item for item in value if key in item], live, shape)
    if isinstance(value, list) and shape.form == "set":
        return _in_order(
            list(dict.fromkeys([*(current or []), *value])), value, current or [], shape
        )
    return strategic_merge(current, value, shape)


def _merge_keyed(current: list[Any], items: list[Any], shape: Shape) -> list[Any]:
    key = shape.patch_key
    if any(
        isinstance(item, dict) and item.get(_DIRECTIVE) == "replace" and key not in item
        for item in items
    ):
        return [_without_directives(item) for item in items if _DIRECTIVE not in item]
    merged = list(current)
    for item in items:
        if not isinstance(item, dict) or key not in item:
            raise storage_error(
                500, f"map: {_format_go(item)} does not contain declared merge key: {key}"
            )
        indices = [index for index, old in enumerate(merged) if old.get(key) == item[key]]
        if item.get(_DIRECTIVE) == "delete":
            merged = [old for old in merged if old.get(key) != item[key]]
        elif indices:
            merged[indices[0]] = strategic_merge(merged[indices[0]], item, shape)
        else:
            merged.append(_without_directives(item))
    return merged


def _format_go(value: Any) -> str:
    """Return a value as Go prints it."""
    if isinstance(value, dict):
        return (
            "map[" + " ".join(f"{name}:{_format_go(value[name])}" for name in sorted(value)) + "]"
        )
    if isinstance(value, list):
        return "[" + " ".join(map(_format_go, value)) + "]"
    return (
        "<nil>" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _in_order(items: list[Any], order: list[Any], live: list[Any], shape: Shape) -> list[Any]:
    """Return the items that the client lists in the client's order. Each other item comes before
    the first listed item that it precedes in the live list, or else at the end."""

    def name_of(item: Any) -> Any:
        return item.get(shape.patch_key) if shape.form == "keyed" else item

    ranks = {name_of(item): rank for rank, item in reversed(list(enumerate(order)))}
    indices = {name_of(item): index for index, item in reversed(list(enumerate(live)))}
    named = sorted(
        (item for item in items if name_of(item) in ranks), key=lambda item: ranks[name_of(item)]
    )
    others = [item for item in items if name_of(item) not in ranks]
    placed: list[Any] = []
    while named and others:
        first, other = name_of(named[0]), name_of(others[0])
        before = first in indices and other in indices and indices[other] < indices[first]
        placed.append((others if before else named).pop(0))
    return [*placed, *named, *others]


def _without_directives(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_directives(below)
            for name, below in value.items()
            if not name.startswith("$") and below is not None
        }
    if isinstance(value, list):
        return [_without_directives(item) for item in value]
    return value


def json_patch(target: Object, operations: Any) -> Object:
    """Apply a JSON patch (RFC 6902). A failed `test` or a path that does not exist is 422, as in
    the API server."""
    if not isinstance(operations, list):
        raise bad_request(
            "error decoding patch: json: cannot unmarshal object into Go value of type "
            "[]handlers.jsonPatchOp"
        )
    document: Any = deepcopy(target)
    for operation in operations:
        try:
            document = _operate(document, operation)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            message = "the server rejected our request due to an error in our request"
            raise ApiFailure(422, "Invalid", message, {}) from error
    if not isinstance(document, dict):
        raise bad_request("the patched document is not an object")
    return document


def _operate(document: Any, operation: dict[str, Any]) -> Any:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "add":
            return _add(document, path, operation["value"])
        case "remove":
            return _remove(document, path)
        case "replace":
            _find(document, path)
            return (
                _add(_remove(document, path), path, operation["value"])
                if path
                else operation["value"]
            )
        case "move":
            source = _pointer(operation["from"])
            value = _find(document, source)
            return _add(_remove(document, source), path, value)
        case "copy":
            return _add(document, path, deepcopy(_find(document, _pointer(operation["from"]))))
        case "test":
            if _find(document, path) != operation["value"]:
                raise ValueError(f"testing value {operation['path']} failed")
            return document
        case other:
            raise ValueError(f"unexpected kind: {other}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(f"not a JSON pointer: {text}")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _find(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _find(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError(f"index {last} out of bounds")
        parent.insert(index, value)
    else:
        parent[last] = value
    return document


def _remove(document: Any, path: list[str]) -> Any:
    parent, last = _find(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        del parent[last]
    return document
