"""Checks of parameters that several commands share: a wrong value is reported before the command
does anything."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fairlead.config import LISTEN
from fairlead.kube.rules import names
from fairlead.net.address import split_host_port

ADDRESS = "write an address and a port, such as 127.0.0.1:9440"
EMPTY_PATH = "the path is empty, as that of an unset variable is; write the path of a file"

Check = Callable[[click.Context, click.Parameter, str | None], str | None]
GivenT = TypeVar("GivenT", str, tuple[str, ...], None)


class NamedFile(click.Path):
    """The path of a file. An empty text is no path: `pathlib` would make the present folder of
    it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the Path. Raise BadParameter if the text is empty."""
        if value == "":
            self.fail(EMPTY_PATH, param, ctx)
        return super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A number of seconds that is at least `min` and finite."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raise BadParameter for `nan` and `inf` too, which are in any range."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


def host_port(context: click.Context, parameter: click.Parameter, given: GivenT) -> GivenT:
    """Check one or several `address:port`. Raise BadParameter if one is invalid. An empty text is
    valid only for `--listen`: no server."""
    several: tuple[str, ...] = (given,) if isinstance(given, str) else given or ()
    listens = parameter.name == "listen"
    for each in several:
        try:
            if each or not listens:
                split_host_port(each)
        except ValueError as error:
            fix = LISTEN if listens else ADDRESS
            raise click.BadParameter(f"{error}; {fix}", context, parameter) from None
    return given


def _text(is_wrong: Callable[[str], object], problem: str) -> Check:
    """Return the check of a text that may be absent. `problem`: what is wrong with it, and what to
    write."""

    def check(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
        if given is not None and is_wrong(given):
            raise click.BadParameter(f"{given!r} is {problem}", context, parameter)
        return given

    return check


namespace_name = _text(
    names.dns_label, "not the name of a namespace; write lower-case letters, digits and -"
)
"""Check the name of a namespace. Raise BadParameter if no namespace can have it."""
object_name = _text(
    names.dns_subdomain, "not a name in Kubernetes; write lower-case letters, digits, - and ."
)
"""Check the name of an object of Kubernetes. Raise BadParameter if no object can have it."""
absolute = _text(lambda path: not path.startswith("/"), "relative; write an absolute path")
"""Check a path. Raise BadParameter if it is relative."""


def not_empty(context: click.Context, parameter: click.Parameter, given: str) -> str:
    """Check a name. Raise BadParameter if it is empty, as that of an unset variable is."""
    if not given.strip():
        raise click.BadParameter("the name is empty; write a name", context, parameter)
    return given
