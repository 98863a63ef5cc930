"""The output of commands: a table for people, JSON or YAML for programs."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click
import msgspec

Format = Literal["table", "json", "yaml"]
CommandT = TypeVar("CommandT", bound=Any)


def output_option(command: CommandT) -> CommandT:
    """Add the option `-o table|json|yaml`."""
    option = click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml"]),
        default="table",
        show_default=True,
        help="Output format.",
    )
    decorated: CommandT = option(command)
    return decorated


def show(value: object, output: Format, table: Callable[[], None]) -> None:
    """Print `value`, or call `table` to draw it."""
    if output == "table":
        table()
        return
    plain = msgspec.to_builtins(value)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
        return
    import yaml

    click.echo(yaml.safe_dump(plain, sort_keys=False).rstrip())


def draw(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns like kubectl. They are as wide as their content and never truncated, so a pipe
    gets the same text as a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo(
            "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
