"""A reader of the settings in a Service's annotations, which records values that it cannot use.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; the first name
takes precedence. Out: values within their limits, and a Finding for each invalid value with the
allowed values. Pure. Names, units and limits follow cloud-provider-openstack 1.34 and Octavia.
Times may also be written as Go durations (`50s`)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fairlead.model import Finding, ProxyHeader
from fairlead.plan.annotations import NOT_UNDERSTOOD, found, names_of, quoted, seconds_of

MAX_MS = 2_073_600_000
"""The longest time that is accepted: 24 days. HAProxy's timers accept slightly more."""
HEADERS: Mapping[str, ProxyHeader] = {"true": "v1", "v1": "v1", "v2": "v2", "false": ""}
SWITCHES: Mapping[str, bool] = {"true": True, "false": False}
CHECKS = (
    "health-monitor-delay",
    "health-monitor-timeout",
    "health-monitor-max-retries",
    "health-monitor-max-retries-down",
)

ValueT = TypeVar("ValueT")


class AnnotationReader:
    """A reader of the annotations of one Service. `notes` collects a Finding for each value that
    could not be used.

    A method takes an annotation by its name without prefix, and returns `default` if the annotation
    is absent or its value is invalid."""

    def __init__(self, annotations: Mapping[str, str]) -> None:
        self._annotations = annotations
        self.notes: list[Finding] = []

    def read(
        self, annotation: str, parse: Callable[[str], ValueT | None], allowed: str, default: ValueT
    ) -> ValueT:
        return self.read_any(names_of(annotation), parse, allowed, default)

    def read_any(
        self,
        names: Sequence[str],
        parse: Callable[[str], ValueT | None],
        allowed: str,
        default: ValueT,
    ) -> ValueT:
        """Return the parsed value of the first of these annotations that is present. `parse`
        returns None for an invalid text; `allowed` describes valid values for the Finding."""
        name, text = found(self._annotations, names)
        if not name:
            return default
        if (value := parse(text)) is None:
            message = f"{name} is {quoted(text)}; allowed: {allowed}; the annotation is ignored"
            self.notes.append(Finding(NOT_UNDERSTOOD, message))
            return default
        return value

    def choice(self, annotation: str, choices: Mapping[str, ValueT], default: ValueT) -> ValueT:
        return self.read(
            annotation,
            lambda text: choices.get(text.lower().replace("_", "-")),
            ", ".join(choices),
            default,
        )

    def switch(self, names: Sequence[str], default: bool) -> bool:
        """Return whether the first of these annotations that is present is `true`."""
        return self.read_any(
            names, lambda text: SWITCHES.get(text.lower()), ", ".join(SWITCHES), default
        )

    def time_ms(self, annotation: str, default: int) -> int:
        allowed = f"milliseconds from 0 to {MAX_MS}, or a duration such as 50s or 5m"
        return self.read(annotation, _milliseconds, allowed, default)

    def number(self, annotation: str, lowest: int, highest: int, default: int) -> int:
        def parse(text: str) -> int | None:
            number = int(text) if re.fullmatch(r"-?\d{1,12}", text, re.ASCII) else None
            return number if number is not None and lowest <= number <= highest else None

        return self.read(annotation, parse, f"a whole number from {lowest} to {highest}", default)

    def given(self, annotation: str) -> str:
        """Return the full name under which the annotation is present; empty if it is absent."""
        return found(self._annotations, names_of(annotation))[0]


def _milliseconds(text: str) -> int | None:
    """Read milliseconds (`5000`) or a Go duration (`5s`); None if the text is neither, or exceeds
    MAX_MS."""
    if re.fullmatch(r"\d{1,12}", text, re.ASCII):
        value = int(text)
    else:
        seconds = None if text[-1:].isdecimal() else seconds_of(text)
        if seconds is None:
            return None
        value = round(seconds * 1000) if seconds < MAX_MS else MAX_MS + 1
    return value if value <= MAX_MS else None
