"""Why the API server rejects an object: its errors, and their messages. Pure.

In: the facts of an error. Out: a Cause. Invariant: messages are those of k8s.io/apimachinery
(util/validation/field), because clients match them and kubectl prints them unchanged."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from fairlead.errors import FairleadError, Refused

Object = dict[str, Any]


class Cause(NamedTuple):
    """An error in one field. `message` is what kubectl prints after the field."""

    reason: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def shown(value: object) -> str:
    """Return a value as the API prints it in a message: strings quoted, numbers bare, the rest as
    JSON."""
    return msgspec.json.encode(value).decode()


def invalid(field: str, value: object, detail: str) -> Cause:
    return Cause("FieldValueInvalid", field, f"Invalid value: {shown(value)}: {detail}")


def required(field: str, detail: str = "") -> Cause:
    return Cause("FieldValueRequired", field, "Required value" + (f": {detail}" if detail else ""))


def forbidden(field: str, detail: str) -> Cause:
    return Cause("FieldValueForbidden", field, f"Forbidden: {detail}")


def duplicate(field: str, value: object) -> Cause:
    return Cause("FieldValueDuplicate", field, f"Duplicate value: {shown(value)}")


def unsupported(field: str, value: object, supported: Iterable[str]) -> Cause:
    choices = ", ".join(shown(choice) for choice in sorted(supported))
    return Cause(
        "FieldValueNotSupported",
        field,
        f"Unsupported value: {shown(value)}: supported values: {choices}",
    )


def too_many(field: str, number: int, limit: int) -> Cause:
    message = f"Too many: {number}: must have at most {limit} items"
    return Cause("FieldValueTooMany", field, message)


def joined(causes: Iterable[Cause]) -> str:
    """Return the errors as one text, each once."""
    texts = [str(cause) for cause in dict.fromkeys(causes)]
    return texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"


class Rejected(Refused):
    """The object is well-formed, but not allowed."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        super().__init__(joined(causes))
        self.causes = list(causes)


class NoneFree(FairleadError):
    """An address or port cannot be allocated."""


class UsedTwice(FairleadError):
    """An update gives the same node port to two ports of a Service."""
