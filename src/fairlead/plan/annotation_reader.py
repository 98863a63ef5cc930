"""Reads one by one what a Service's annotations annotation for, and notes what it cannot use.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; ours comes first.
Out: values within their limits, and a Finding for each text that is none: what it is, what is
allowed, what holds instead. Pure. Names, units and limits of cloud-provider-openstack 1.34 and
Octavia; times may also be written as Go does (`50s`)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fairlead.model import Finding, ProxyHeader
from fairlead.plan.annotations import NOT_UNDERSTOOD, found, names_of, quoted, seconds_of

LONGEST_MS = 2_073_600_000
"""24 days; HAProxy's timers take a little more."""
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
    """Of one Service. `notes`: what could not be used so far."""

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
        """The first of these annotations that is there."""
        name, text = found(self._annotations, names)
        if not name:
            return default
        if (value := parse(text)) is None:
            message = f"{name} is {quoted(text)}; allowed: {allowed}; it counts as not given"
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
        """`true` or `false` by the first of these annotations."""
        return self.read_any(
            names, lambda text: SWITCHES.get(text.lower()), ", ".join(SWITCHES), default
        )

    def time_ms(self, annotation: str, default: int) -> int:
        allowed = f"milliseconds from 0 to {LONGEST_MS}, or a duration such as 50s or 5m"
        return self.read(annotation, _milliseconds, allowed, default)

    def number(self, annotation: str, lowest: int, highest: int, default: int) -> int:
        def parse(text: str) -> int | None:
            number = int(text) if re.fullmatch(r"-?\d{1,12}", text, re.ASCII) else None
            return number if number is not None and lowest <= number <= highest else None

        return self.read(annotation, parse, f"a whole number from {lowest} to {highest}", default)

    def given(self, annotation: str) -> str:
        """The name under which it is there, or nothing."""
        return found(self._annotations, names_of(annotation))[0]


def _milliseconds(text: str) -> int | None:
    if re.fullmatch(r"\d{1,12}", text, re.ASCII):
        value = int(text)
    else:
        seconds = None if re.fullmatch(r"[\d.]+", text) else seconds_of(text)
        if seconds is None:
            return None
        value = round(seconds * 1000) if seconds < LONGEST_MS else LONGEST_MS + 1
    return value if value <= LONGEST_MS else None
