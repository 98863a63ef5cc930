"""The output of commands: a table for people, JSON or YAML for programs."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click
import msgspec

WHOLE = 1000
"""A length that no first sentence of a help text has."""

Format = Literal["table", "json", "yaml"]
CommandT = TypeVar("CommandT", bound=Any)


class Group(click.Group):
    """A group whose help shows the whole first sentence of each command; click's own would cut it
    at the width of the terminal."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(WHOLE))
                    for name in self.list_commands(ctx)
                    if (command := self.get_command(ctx, name)) is not None
                ]
            )


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
    for line in columns(header, rows):
        click.echo(line)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, see `draw`."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
