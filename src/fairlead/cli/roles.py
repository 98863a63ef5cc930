"""`fairlead controller`, `fairlead gateway`, `fairlead node`: options in, a role run until it is
signalled."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from fairlead.config import Config, load
from fairlead.invocation import called
from fairlead.kube.access import Access
from fairlead.net import selection

CommandT = TypeVar("CommandT", bound=Any)


def _shared(command: CommandT) -> CommandT:
    for option in reversed(
        (
            click.option(
                "--config",
                "config_path",
                type=click.Path(path_type=Path),
                help="fairlead.yaml; without it, defaults.",
            ),
            click.option(
                "--kubeconfig",
                type=click.Path(path_type=Path),
                help="How to reach the API server. Without it: $KUBECONFIG, the pod's service "
                "account, ~/.kube/config.",
            ),
            click.option(
                "--context", help="Context of the kubeconfig; without it, its current one."
            ),
            click.option(
                "--listen",
                help="address:port, or *:port, of /healthz, /readyz, /metrics and /state; empty: "
                "none.",
            ),
            click.option("-v", "--verbose", is_flag=True, help="Log more."),
        )
    ):
        command = option(command)
    return command


def _start(**options: Any) -> tuple[Config, Access]:
    config, find = _prepare(**options)
    return config, find()


def _prepare(
    config_path: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    listen: str | None,
    verbose: bool,
) -> tuple[Config, Callable[[], Access]]:
    """The configuration, and what finds the way to the API server."""
    from fairlead.kube.auth import find_access
    from fairlead.plan.classes import CLASSES
    from fairlead.telemetry import configure_logging

    configure_logging(verbose)
    config = load(config_path, CLASSES) if config_path else Config()
    if listen is not None:
        config = msgspec.structs.replace(
            config, web=msgspec.structs.replace(config.web, listen=listen)
        )
    return config, partial(find_access, kubeconfig, context)


@contextmanager
def _uncollected() -> Iterator[None]:
    """While modules are loaded, which all stay, the collector of cycles would look through them
    again and again: a fifth of the time that it takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _selectors(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Check the selectors as the configuration does. Raises BadParameter."""
    for each in given:
        try:
            selection.check(each)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return given


def _need_root(what: str, capabilities: str) -> None:
    if os.geteuid() != 0:
        raise click.ClickException(
            f"{what} needs root (with {capabilities}): run it as root."
            f" `{called('plan')}` and `{called('controller')}` work without root."
        )


class _NamesClasses(click.Command):
    """A command whose help names every class of the table in place of `{classes}`. Other commands
    of this module, and this one when it runs, do not load the table for that."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from fairlead.plan.classes import names

        self.help = (self.help or "").replace("{classes}", names())
        super().format_help_text(ctx, formatter)


@click.command(cls=_NamesClasses)
@_shared
def controller(**options: Any) -> None:
    """Run the controller: give Services their addresses, write their status and Events.

    It serves Services of the classes {classes}, and those without a class if the configuration's
    defaultClass says so. Run two or three of them: one leads, by a Lease; when it dies another
    takes over within the lease's duration. Needs no root. SIGTERM and Ctrl-C stop it; the data
    planes go on without it."""
    from fairlead.roles.controller import run
    from fairlead.roles.process import run_until_signalled

    config, access = _start(**options)
    run_until_signalled(run(config, access))


@click.command()
@_shared
@click.option(
    "--node-name",
    default=socket.gethostname,
    show_default="host name",
    help="Name of this gateway.",
)
@click.option(
    "--pin-path", help="Folder on a bpffs for the pinned data plane; overrides the configuration."
)
@click.option(
    "--proxy-path",
    help="Folder for the HAProxy of class fairlead.io/proxy; overrides the configuration.",
)
@click.option(
    "--interface",
    "interfaces",
    multiple=True,
    callback=_selectors,
    help="Interface where packets arrive: a name, a pattern (eth*), a CIDR or default-route; may "
    "be repeated. Overrides the"
    " configuration.",
)
@click.option(
    "--cleanup",
    is_flag=True,
    help="Remove this gateway's data plane from the kernel, delete its Lease, and exit.",
)
def gateway(
    node_name: str,
    pin_path: str | None,
    proxy_path: str | None,
    interfaces: tuple[str, ...],
    cleanup: bool,
    **options: Any,
) -> None:
    """Run a gateway: take packets for load-balancer addresses, hand each to a node with ready pods.

    Packets of class fairlead.io/direct are forwarded by an eBPF program, unmodified except for the
    hop limit; replies go from the node straight to the client. Connections of class
    fairlead.io/proxy end at a HAProxy of this host's. Another one balances the API server itself if
    the configuration has gateway.apiServer; then the gateway may start before its kubeconfig
    exists. When the process ends, by whatever cause, the kernel and HAProxy go on; the next start
    takes over. --cleanup takes everything away."""
    _need_root("a gateway", "CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON")
    with _uncollected():
        from fairlead.roles.gateway import clean_up, run
        from fairlead.roles.presence import withdraw
        from fairlead.roles.process import run_until_signalled

    config, find = _prepare(**options)
    section = msgspec.structs.replace(
        config.gateway,
        pin_path=pin_path or config.gateway.pin_path,
        proxy_path=proxy_path or config.gateway.proxy_path,
        interfaces=interfaces or config.gateway.interfaces,
        interfaces_by_node={} if interfaces else config.gateway.interfaces_by_node,
    )
    config = msgspec.structs.replace(config, gateway=section)
    if cleanup:
        run_until_signalled(clean_up(config))
        run_until_signalled(withdraw(config.presence, find, "gateway", node_name))
        return
    run_until_signalled(run(config, find, node_name))


@click.command()
@_shared
@click.option(
    "--node-name",
    default=socket.gethostname,
    show_default="host name",
    help="Name of this Node in Kubernetes.",
)
@click.option(
    "--cleanup",
    is_flag=True,
    help="Remove this node's rules and its end of the tunnel from the kernel, put the host's "
    "settings back, delete the node's"
    " Lease, and exit.",
)
@click.option(
    "--remove-at-stop",
    is_flag=True,
    help="Do the same when a signal stops it. A crash, or kill -9, leaves everything.",
)
def node(node_name: str, cleanup: bool, remove_at_stop: bool, **options: Any) -> None:
    """Run what a node does for its Services: the service proxy, its end of the gateways' tunnel.

    The service proxy (ClusterIP, NodePort, load-balancer addresses, healthCheckNodePort) is for
    clusters without kube-proxy, whose rules it makes; beside kube-proxy set node.serviceProxy to
    false. The tunnel is there if tunnel.kind is ipip or vxlan, for nodes behind a router. Settings
    of the host that do harm are named, and set if node.adjustSystem is true. When the process ends
    everything stays in force, so that a restart or an upgrade is no gap; --cleanup takes it away,
    --remove-at-stop lets it go with the process."""
    from fairlead.roles.process import run_until_signalled

    _need_root("a node", "CAP_NET_ADMIN, for tunnel.kind ipip also CAP_BPF, CAP_PERFMON")
    if cleanup:
        from fairlead.roles.node import clean_up
        from fairlead.roles.presence import withdraw

        config, find = _prepare(**options)
        run_until_signalled(clean_up())
        run_until_signalled(withdraw(config.presence, find, "node", node_name))
        return
    from fairlead.roles.node import run

    config, access = _start(**options)
    run_until_signalled(run(config, access, node_name, remove_at_stop=remove_at_stop))
