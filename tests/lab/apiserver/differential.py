"""Send the same requests to two servers and compare the answers. Pure.

In: the decoded answers. Out: the answers without the parts that may differ: identities, versions,
times, and numbers that a server chose itself. Numbers and addresses that a request names are
compared: they are in the lower part of the ranges, from which no server allocates before the upper
part is exhausted.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.lab.apiserver.api import Object

_SET_BY_SERVER = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "time")
_VERSION = re.compile(r"in record \(\d+\)")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PORT = re.compile(r"\b3[0-2]\d{3}\b")
_ADDRESS = re.compile(r"\b10\.96\.\d+\.\d+\b|\b2001:db8:96::[0-9a-f:]*")
FIRST_CHOSEN_PORT = 30086
_NAMED_ADDRESS = re.compile(r"10\.96\.0\.[1-9]\d*|2001:db8:96::[1-9a-f][0-9a-f]?")


def comparable(value: Any, namespace: str, field: str = "") -> Any:
    """Return the answer without the parts that may differ."""
    if isinstance(value, dict):
        return {name: comparable(below, namespace, name) for name, below in value.items()}
    if field == "managedFields":
        # The entries are sorted by time, in whole seconds. Close to a full second the order may
        # differ between two servers.
        value = sorted(
            value,
            key=lambda entry: (entry["manager"], entry["operation"], entry.get("subresource", "")),
        )
    if field == "causes":
        # The real server checks some fields twice and then lists a cause twice. It lists conflicts
        # in any order. The message has neither difference.
        once = [cause for place, cause in enumerate(value) if cause not in value[:place]]
        value = sorted(once, key=lambda cause: (cause.get("field", ""), cause["message"]))
    if isinstance(value, list):
        return [comparable(item, namespace, field) for item in value]
    if field in _SET_BY_SERVER and value is not None:
        return f"<{field}>"
    if (
        field in ("nodePort", "healthCheckNodePort")
        and isinstance(value, int)
        and value >= FIRST_CHOSEN_PORT
    ):
        return "<port>"
    if isinstance(value, str):
        text = _VERSION.sub(
            "in record (<version>)", _UUID.sub("<uid>", value.replace(namespace, "<namespace>"))
        )
        text = _PORT.sub(
            lambda found: "<port>" if int(found[0]) >= FIRST_CHOSEN_PORT else found[0], text
        )
        return _ADDRESS.sub(
            lambda found: found[0] if _NAMED_ADDRESS.fullmatch(found[0]) else _family(found[0]),
            text,
        )
    return value


def _family(address: str) -> str:
    return "<IPv6>" if ":" in address else "<IPv4>"


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each place where two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            here = f"{path}.{name}"
            if name not in one:
                yield f"{here}: only the second: {other[name]!r}"
            elif name not in other:
                yield f"{here}: only the first: {one[name]!r}"
            else:
                yield from differences(one[name], other[name], here)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, yours, f"{path}[{place}]")
    elif one != other or type(one) is not type(other):
        yield f"{path}: {one!r} != {other!r}"


def answer_of(status: int, body: Any, namespace: str) -> Object:
    return {"status": status, "body": comparable(body, namespace)}
