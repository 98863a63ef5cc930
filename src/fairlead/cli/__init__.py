"""The command line: one thin module per command, imported only when the command is run, so that
`--help` stays quick."""

import importlib
import importlib.util
import sys
from pathlib import Path

import click

COMMANDS = {
    "plan": ("fairlead.cli.plan", "Show what Fairlead would do, for a cluster or for manifests."),
    "demo": ("fairlead.cli.demo", "Show the main job with real packets, beside three other ways."),
    "lab": ("fairlead.cli.lab", "Bring up a whole cluster of network namespaces on this machine."),
    "migrate": (
        "fairlead.cli.migrate",
        "Prepare to take Services over from MetalLB or OpenStack's cloud controller.",
    ),
    "ingress": (
        "fairlead.cli.ingress",
        "Set an ingress controller up behind a load balancer, and check one.",
    ),
    "octavia": (
        "fairlead.cli.octavia",
        "Find what Services that are gone have left at OpenStack, and delete it.",
    ),
    "status": (
        "fairlead.cli.status",
        "Show what a running role does, or which roles run in a cluster.",
    ),
    "controller": ("fairlead.cli.roles", "Run the controller: addresses and Service status."),
    "gateway": (
        "fairlead.cli.roles",
        "Run a gateway: hand packets for load-balancer addresses to nodes.",
    ),
    "node": (
        "fairlead.cli.roles",
        "Run a node: service proxy where there is no kube-proxy, end of tunnels.",
    ),
}


OF_THE_SOURCE_TREE = frozenset({"demo", "lab"})
"""Commands that the wheel and the image do not have, because they do not have the lab."""

PLUGIN_NAMES = {"kubectl-fairlead": "kubectl fairlead"}
"""What users type for a program of this name: kubectl runs it as its own command."""


class Commands(click.Group):
    """A group whose commands are loaded from the table above when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if is_here(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if not is_here(cmd_name):
            return _absent(cmd_name)
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def is_here(name: str) -> bool:
    """Whether this installation has the command."""
    return name not in OF_THE_SOURCE_TREE or importlib.util.find_spec("fairlead.lab") is not None


def _absent(name: str) -> click.Command:
    """Stands for a command that this installation does not have: whatever follows it, it says where
    the command is."""

    def refuse() -> None:
        from fairlead.errors import Refused

        raise Refused(
            f"`fairlead {name}` is not part of this installation: the lab comes with Fairlead's "
            "source tree, and neither with its wheel nor with its image",
            fix=f"in a clone of the repository run `make base`, then `.venv/bin/fairlead {name}`",
        )

    settings = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
    return click.Command(name, context_settings=settings, callback=refuse)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairlead")
def cli() -> None:
    """Kubernetes Services of type LoadBalancer with externalTrafficPolicy Local that fully work.

    \b
    Without a cluster and without root:   fairlead plan -f examples/plan
    With root, in the source tree:        fairlead demo
                                          fairlead lab up
    In a cluster, as its processes:       fairlead controller | gateway | node
    Of a cluster, from anywhere:          kubectl fairlead plan
    """


def main() -> None:
    """Entry point: turn the failures that users can mend into one clear message and exit status
    1."""
    from fairlead.errors import FairleadError

    try:
        cli(prog_name=PLUGIN_NAMES.get(Path(sys.argv[0]).name))
    except FairleadError as error:
        click.echo(f"fairlead: {error}", err=True)
        raise SystemExit(1) from error
