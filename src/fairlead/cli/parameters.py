"""Checks of parameters that several commands share: a wrong value is reported before the command
does anything."""

from typing import TypeVar

import click

from fairlead.config import LISTEN
from fairlead.net.address import split_host_port

ADDRESS = "write an address and a port, such as 127.0.0.1:9440"

GivenT = TypeVar("GivenT", str, tuple[str, ...], None)


def host_port(context: click.Context, parameter: click.Parameter, given: GivenT) -> GivenT:
    """Check one or several `address:port`. Raise BadParameter if one is invalid."""
    several: tuple[str, ...] = (given,) if isinstance(given, str) else given or ()
    for each in several:
        try:
            if each:
                split_host_port(each)
        except ValueError as error:
            fix = LISTEN if parameter.name == "listen" else ADDRESS
            raise click.BadParameter(f"{error}; {fix}", context, parameter) from None
    return given


def not_empty(context: click.Context, parameter: click.Parameter, given: str) -> str:
    """Check a name. Raise BadParameter if it is empty, as that of an unset variable is."""
    if not given.strip():
        raise click.BadParameter("the name is empty; write a name", context, parameter)
    return given


def absolute(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Check a path. Raise BadParameter if it is relative."""
    if given is not None and not given.startswith("/"):
        raise click.BadParameter(
            f"{given!r} is relative; write an absolute path", context, parameter
        )
    return given
