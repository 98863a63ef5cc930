"""Checks of parameters that several commands share: a wrong value is reported before the command
does anything."""

from typing import TypeVar

import click

from fairlead.config import LISTEN
from fairlead.net.address import split_host_port

GivenT = TypeVar("GivenT", str, tuple[str, ...], None)


def host_port(context: click.Context, parameter: click.Parameter, given: GivenT) -> GivenT:
    """Check one or several `address:port`. Raise BadParameter if one is invalid."""
    several: tuple[str, ...] = (given,) if isinstance(given, str) else given or ()
    for each in several:
        try:
            if each:
                split_host_port(each)
        except ValueError as error:
            raise click.BadParameter(f"{error}; {LISTEN}", context, parameter) from None
    return given
