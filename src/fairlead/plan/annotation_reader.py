"""The values that annotations may have, and a reader of them.

In: annotations, `fairlead.io/NAME` or OCCM's `loadbalancer.openstack.org/NAME`; the first name
takes precedence. Out: values within their limits, and a Finding for each invalid value with the
allowed values. Each class lists its `Values` in one table, by which `plan.understood` replaces
values that are not understood before they are read here. Pure. Names, units and limits follow
cloud-provider-openstack 1.34 and Octavia. Times may also be written as Go durations (`50s`)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from fairlead.model import Finding, ProxyHeader
from fairlead.plan.annotations import (
    DRAIN_TIMEOUT,
    MAX_VALUE_LENGTH,
    NOT_UNDERSTOOD,
    found,
    names_of,
    quoted,
    seconds_of,
)

MAX_MS = 2_073_600_000
"""The longest time that is accepted: 24 days. HAProxy's timers accept slightly more."""
MAX_CONNECTIONS = 1_000_000
HEADERS: Mapping[str, ProxyHeader] = {"true": "v1", "v1": "v1", "v2": "v2", "false": ""}
SWITCHES: Mapping[str, bool] = {"true": True, "false": False}

ValueT = TypeVar("ValueT")
CovariantT = TypeVar("CovariantT", covariant=True)
_NUMBER = re.compile(r"-?\d{1,12}", re.ASCII)


class Values(NamedTuple, Generic[CovariantT]):
    """The values that an annotation may have. `names`: its names, of which the first one that is
    present counts. `parse` returns None for an invalid text; `allowed` describes valid values for
    the Finding."""

    names: Sequence[str]
    parse: Callable[[str], CovariantT | None]
    allowed: str

    def read(self, text: str) -> CovariantT | None:
        """Return the value; None if the text is invalid or too long."""
        return self.parse(text) if len(text) <= MAX_VALUE_LENGTH else None

    def problem(self, name: str, text: str) -> str:
        """Return why the text is not a value."""
        if len(text) > MAX_VALUE_LENGTH:
            return f"{name} has {len(text):,} characters, and at most {MAX_VALUE_LENGTH:,} are read"
        return f"{name} is {quoted(text)}; allowed: {self.allowed}"


def any_text(names: Sequence[str]) -> Values[str]:
    return Values(names, lambda text: text, "")


def choice(annotation: str, choices: Mapping[str, ValueT]) -> Values[ValueT]:
    return Values(
        names_of(annotation),
        lambda text: choices.get(text.lower().replace("_", "-")),
        ", ".join(choices),
    )


def switch(names: Sequence[str]) -> Values[bool]:
    return Values(names, lambda text: SWITCHES.get(text.lower()), ", ".join(SWITCHES))


def number(annotation: str, lowest: int, highest: int) -> Values[int]:
    def parse(text: str) -> int | None:
        value = int(text) if _NUMBER.fullmatch(text) else None
        return value if value is not None and lowest <= value <= highest else None

    return Values(names_of(annotation), parse, f"a whole number from {lowest} to {highest}")


def time_ms(annotation: str) -> Values[int]:
    return Values(
        names_of(annotation),
        _milliseconds,
        f"milliseconds from 0 to {MAX_MS}, or a duration such as 50s or 5m",
    )


def _milliseconds(text: str) -> int | None:
    """Read milliseconds (`5000`) or a Go duration (`5s`); None if the text is neither, or exceeds
    MAX_MS."""
    if text[-1:].isdecimal():
        value = int(text) if _NUMBER.fullmatch(text) else -1
    else:
        seconds = seconds_of(text)
        value = round(seconds * 1000) if seconds is not None else -1
    return value if 0 <= value <= MAX_MS else None


DRAINED_AFTER = Values(
    DRAIN_TIMEOUT, seconds_of, "seconds, as in 300, or a duration of h, m and s, as in 5m or 1h30m"
)
HEADER = choice("proxy-protocol", HEADERS)
FORWARDED_FOR = choice("x-forwarded-for", SWITCHES)
LIMIT = number("connection-limit", -1, MAX_CONNECTIONS)
TIMES = {
    name: time_ms(name)
    for name in (
        "timeout-client-data",
        "timeout-member-connect",
        "timeout-member-data",
        "timeout-tcp-inspect",
    )
}
CHECKED = choice("enable-health-monitor", SWITCHES)
CHECKS = {
    name: number(name, 1, highest)
    for name, highest in (
        ("health-monitor-delay", 3600),
        ("health-monitor-timeout", 3600),
        ("health-monitor-max-retries", 10),
        ("health-monitor-max-retries-down", 10),
    )
}
CONNECTIONS: Sequence[Values[object]] = (
    HEADER,
    FORWARDED_FOR,
    LIMIT,
    *TIMES.values(),
    CHECKED,
    *CHECKS.values(),
)
"""The annotations about connections that have the same values in every class that reads them."""


class AnnotationReader:
    """A reader of the annotations of one Service. `notes` collects a Finding for each value that
    could not be used."""

    def __init__(self, annotations: Mapping[str, str]) -> None:
        self._annotations = annotations
        self.notes: list[Finding] = []

    def get(self, values: Values[ValueT], default: ValueT) -> ValueT:
        """Return the value of the annotation; `default` if it is absent or invalid."""
        name, text = found(self._annotations, values.names)
        if not name:
            return default
        if (value := values.read(text)) is None:
            message = f"{values.problem(name, text)}; the annotation is ignored"
            self.notes.append(Finding(NOT_UNDERSTOOD, message))
            return default
        return value

    def text(self, annotation: str, default: str = "") -> str:
        return self.get(any_text(names_of(annotation)), default)

    def given(self, annotation: str) -> str:
        """Return the full name under which the annotation is present; empty if it is absent."""
        return found(self._annotations, names_of(annotation))[0]

    def note_second_header(self) -> None:
        """Add the Finding about a Service that requests both headers with the client's address."""
        one, other = self.given("proxy-protocol"), self.given("x-forwarded-for")
        message = (
            f"{other} has no effect together with {one}: pods get the client's address in one "
            "header only"
        )
        remedy = "remove one of the two annotations"
        self.notes.append(Finding(NOT_UNDERSTOOD, message, remedy=remedy))
