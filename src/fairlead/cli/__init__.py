"""The command line: a module for each command, and modules that several commands share. A module is
imported only when its command is run, so that `--help` is fast."""

import errno
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import click

COMMANDS = {
    "plan": ("fairlead.cli.plan", "Show what Fairlead would do, for a cluster or for manifests."),
    "demo": ("fairlead.cli.demo", "Compare Fairlead with three other setups, with real packets."),
    "lab": ("fairlead.cli.lab", "Create a complete cluster of network namespaces on this machine."),
    "migrate": (
        "fairlead.cli.migrate",
        "Prepare to take Services over from MetalLB or OpenStack's cloud controller.",
    ),
    "announce": (
        "fairlead.cli.announce",
        "Print the routes, or the BGP configuration, by which routers reach the gateways.",
    ),
    "ingress": (
        "fairlead.cli.ingress",
        "Configure an ingress controller behind a load balancer, and check one.",
    ),
    "doctor": (
        "fairlead.cli.doctor",
        "Name the root cause of what is wrong with Services, on any cluster.",
    ),
    "probe": (
        "fairlead.cli.probe",
        "Call load balancers continuously, and show what their clients notice.",
    ),
    "octavia": (
        "fairlead.cli.octavia",
        "List and delete the OpenStack resources of deleted Services.",
    ),
    "status": (
        "fairlead.cli.status",
        "Show what a running role does, or which roles run in a cluster.",
    ),
    "controller": ("fairlead.cli.roles", "Run the controller: addresses and Service status."),
    "gateway": (
        "fairlead.cli.roles",
        "Run a gateway: forward packets for load-balancer addresses to nodes.",
    ),
    "node": (
        "fairlead.cli.roles",
        "Run a node: the service proxy without kube-proxy, the end of tunnels.",
    ),
}


SOURCE_TREE_ONLY = frozenset({"demo", "lab"})
"""Commands that are missing in the wheel and in the image, because these do not include the lab."""

UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE))
"""The errors of a write to an output that is full, broken or closed."""

PLUGIN_NAMES = {"kubectl-fairlead": "kubectl fairlead"}
"""What users enter to run a program of this name: kubectl runs it as a plugin."""


class Commands(click.Group):
    """A group whose commands are loaded from the table above when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if is_installed(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if not is_installed(cmd_name):
            return _absent(cmd_name)
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from fairlead.mistakes import suggestion

            hint = suggestion(name, self.list_commands(ctx), "commands")
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def is_installed(name: str) -> bool:
    """Return whether this installation has the command."""
    return name not in SOURCE_TREE_ONLY or importlib.util.find_spec("fairlead.lab") is not None


def _absent(name: str) -> click.Command:
    """Return a substitute for a command that this installation does not have. With any arguments it
    reports where the command is available."""

    def refuse() -> None:
        from fairlead.errors import Refused

        raise Refused(
            f"`fairlead {name}` is not part of this installation: the lab is only in Fairlead's "
            "source tree, not in its wheel or its image",
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
    """Load balancers for Kubernetes Services with externalTrafficPolicy Local.

    \b
    Without a cluster, without root:      fairlead plan -f examples/plan
    With root, in the source tree:        fairlead demo
                                          fairlead lab up
    Processes of a cluster:               fairlead controller | gateway | node
    As a client of a cluster:             kubectl fairlead plan | doctor | announce plan
    As a client of load balancers:        fairlead probe
    """


def main() -> None:
    """Run the command line. Print a FairleadError, which the user can correct, as one message, and
    exit with status 1; so also if the output cannot be written, as on a full disk."""
    from fairlead.errors import FairleadError, plain

    try:
        try:
            cli(prog_name=PLUGIN_NAMES.get(Path(sys.argv[0]).name))
        finally:
            if sys.stdout is not None:  # None: it was closed before the start
                sys.stdout.flush()
    except FairleadError as error:
        click.echo(f"fairlead: {error}", err=True)
        raise SystemExit(1) from error
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        # The interpreter would try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            click.echo(f"fairlead: the output cannot be written: {plain(error)}", err=True)
        raise SystemExit(1) from error
