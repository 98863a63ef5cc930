"""Every command with the option `-o` obeys it."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from fairlead.cli import cli

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
HERE = {
    "plan": ("-f", str(ROOT / "examples/plan")),
    "migrate services": ("-f", str(ROOT / "examples/plan")),
    "doctor": ("explain",),
    "ingress check": ("127.0.0.1:1",),
    "probe": ("tcp://127.0.0.1:1", "--interval", "0.05", "--duration", "0.1"),
}
"""The commands that need no server, each with arguments."""
ELSEWHERE = {
    "announce plan": "cli/test_announce.py",
    "demo": "lab/test_demo.py",
    "lab status": "cli/test_lab.py",
    "octavia gc": "drivers/octavia/test_leftovers.py",
    "status": "cli/test_status.py",
    "status --cluster": "e2e/test_gateways_gone.py",
    "doctor": "e2e/test_doctor.py",
}
"""The tests that use `-o json` of the other commands, and of those that can also ask a server."""
CONTROLLERS = ("ingress nginx", "ingress haproxy", "ingress traefik")


def formats(command: click.Command, names: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the option `-o`, and the formats that it has."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from formats(found, (*names, name))
    for option in command.params:
        if "-o" in option.opts and isinstance(option.type, click.Choice):
            yield " ".join(names), list(option.type.choices)


FORMATS = dict(formats(cli))


def run(command: str, *arguments: str) -> str:
    return CliRunner().invoke(cli, [*command.split(), *arguments]).stdout


def test_the_format_of_every_command_is_tested() -> None:
    assert FORMATS.keys() == {
        *HERE,
        *(each.partition(" --")[0] for each in ELSEWHERE),
        *CONTROLLERS,
    }
    for file in ELSEWHERE.values():
        assert '"-o", "json"' in (TESTS / file).read_text()


@pytest.mark.parametrize("command", HERE)
def test_the_output_has_the_format_that_was_asked_for(command: str) -> None:
    table, *others = FORMATS[command]
    assert table == "table"
    texts = [run(command, *HERE[command], "-o", each) for each in (table, *others)]
    if command == "probe":
        assert all(map(json.loads, texts[1].splitlines()))
        return
    assert json.loads(texts[1]) == yaml.safe_load(texts[2])
    with pytest.raises(json.JSONDecodeError):
        json.loads(texts[0])


@pytest.mark.parametrize("command", CONTROLLERS)
def test_settings_are_printed_as_manifests_or_as_values(command: str) -> None:
    assert FORMATS[command] == ["yaml", "helm"]
    manifests, values = (run(command, "-o", each) for each in FORMATS[command])
    assert any("kind" in each for each in yaml.safe_load_all(manifests))
    assert "kind" not in yaml.safe_load(values)
