"""The validation of metadata of all kinds. Pure.

In: an object. Out: the errors; empty if it is valid. Messages follow the API server's
apis/meta/v1/validation."""

from collections.abc import Callable, Iterable
from typing import Final

from fairlead.kube.rules import names
from fairlead.kube.rules.causes import Cause, Object, invalid, required

_STANDARD_FINALIZERS: Final = ("kubernetes", "orphan", "foregroundDeletion")
_MAX_ANNOTATIONS_BYTES: Final = 256 * 1024


def check_metadata(obj: Object, rule: Callable[[str], list[str]]) -> Iterable[Cause]:
    """Yield the errors in the metadata of an object. `rule` checks the name."""
    metadata = obj["metadata"]
    name = metadata.get("name")
    if not name:
        yield required("metadata.name", "name or generateName is required")
    else:
        yield from (invalid("metadata.name", name, problem) for problem in rule(name))
    for key, value in (metadata.get("labels") or {}).items():
        yield from (
            invalid("metadata.labels", key, problem) for problem in names.qualified_name(key)
        )
        yield from (
            invalid("metadata.labels", value, problem) for problem in names.label_value(value)
        )
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        yield from (
            invalid("metadata.annotations", key, problem)
            for problem in names.qualified_name(key.lower())
        )
    if sum(len(key) + len(value) for key, value in annotations.items()) > _MAX_ANNOTATIONS_BYTES:
        yield Cause(
            "FieldValueTooLong",
            "metadata.annotations",
            f"Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes",
        )
    for index, finalizer in enumerate(metadata.get("finalizers") or []):
        path = f"metadata.finalizers[{index}]"
        yield from (
            invalid(path, finalizer, problem) for problem in names.qualified_name(finalizer)
        )
        if "/" not in finalizer and finalizer not in _STANDARD_FINALIZERS:
            yield invalid(
                path,
                finalizer,
                "name is neither a standard finalizer name nor is it fully qualified",
            )
