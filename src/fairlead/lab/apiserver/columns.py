"""The columns of custom resources in `kubectl get`. Pure.

In: an object and the `additionalPrinterColumns` of its CRD. Out: the cells. Supports the part of
JSONPath that such columns use: fields, `[*]` and `[?(@.field=="text")]`. Follows the table
convertor of apiextensions-apiserver.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.kinds import Column

_STEP: Final = re.compile(
    r"""\.([A-Za-z0-9_-]+)|(\[\*\])|\[\?\(@\.([A-Za-z0-9_-]+)==["']([^"']*)["']\)\]"""
)


def cells(columns: tuple[Column, ...], obj: Object, age: Callable[[str], str]) -> list[Any]:
    """Return the name and a cell for each column; `age` formats a time."""
    return [obj["metadata"]["name"], *(_cell(column, obj, age) for column in columns)]


def _cell(column: Column, obj: Object, age: Callable[[str], str]) -> Any:
    found = list(_find(obj, column.path))
    if not found:
        return None
    if column.type == "date":
        return age(str(found[0]))
    # The API server prints only the first of several values.
    return _text(found[0]) if column.type == "string" else found[0]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _find(value: Any, path: str) -> Iterator[Any]:
    found = [value]
    for name, everything, field, text in _STEP.findall(path):
        if name:
            found = [each[name] for each in found if isinstance(each, dict) and name in each]
        elif everything:
            found = [item for each in found if isinstance(each, list) for item in each]
        else:
            found = [
                item
                for each in found
                if isinstance(each, list)
                for item in each
                if field in item and item[field] == text
            ]
    yield from found
