"""`fairlead controller`, `fairlead gateway`, `fairlead node`: run a role with these options until a
signal stops it."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from fairlead.cli.parameters import NamedFile, absolute, host_port, not_empty
from fairlead.config import INTERFACE, Config, load
from fairlead.errors import Refused
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
                type=NamedFile(),
                help="fairlead.yaml. Default: all options have their defaults.",
            ),
            click.option(
                "--kubeconfig",
                type=NamedFile(),
                help="Kubeconfig of the API server. Default: $KUBECONFIG, the pod's service "
                "account, ~/.kube/config.",
            ),
            click.option(
                "--context", help="Context of the kubeconfig. Default: the current context."
            ),
            click.option(
                "--listen",
                callback=host_port,
                help="address:port, or *:port, of /healthz, /readyz, /metrics and /state; empty: "
                "no server.",
            ),
            click.option("-v", "--verbose", is_flag=True, help="Log debug messages too."),
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
    """Return the configuration, and a function that returns how to reach the API server."""
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
def _without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector while modules are loaded. The modules all stay, and the
    collector would traverse them repeatedly, which takes a fifth of the time of loading them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _selectors(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Check the selectors as the configuration does. Raise BadParameter if one is invalid."""
    for each in given:
        try:
            selection.check(each)
        except ValueError as error:
            raise click.BadParameter(f"{error}; {INTERFACE}", context, parameter) from None
    return given


def _need_root(what: str, capabilities: str) -> None:
    if os.geteuid() != 0:
        raise click.ClickException(
            f"{what} needs root (with {capabilities}): run it as root."
            f" `{called('plan')}` and `{called('controller')}` work without root."
        )


def _leave(
    name: str,
    *,
    undo: bool,
    config_path: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    **_: object,
) -> None:
    """Let a gateway give its addresses away, or withdraw that. Exit with an error if it keeps some,
    because no other gateway can announce them."""
    from fairlead.cli.cluster import read_configuration
    from fairlead.cli.interrupt import run
    from fairlead.kube import leaving
    from fairlead.kube.auth import find_access
    from fairlead.kube.client import Client
    from fairlead.plan.classes import CLASSES

    async def ask() -> leaving.HandOver | None:
        config = load(config_path, CLASSES) if config_path else Config()
        async with Client(find_access(kubeconfig, context)) as client:
            if config_path is None:
                # The ConfigMap may be missing or not readable; then the default is used.
                with suppress(Refused):
                    config = await read_configuration(client)
            if undo:
                await leaving.stay(client, config.presence.namespace, name)
                return None
            return await leaving.leave(client, config.presence.namespace, name)

    result = run(ask())
    if result is None:
        click.echo(f"gateway {name} announces addresses again")
        return
    for address, owner in result.owners.items():
        click.echo(f"{address} is announced by gateway {owner}")
    if (more := result.moved - len(result.owners)) > 0:
        click.echo(f"and {more} more addresses by other gateways")
    if result.kept:
        more = result.kept - len(result.named)
        raise click.ClickException(
            f"gateway {name} keeps {', '.join(result.named)}"
            f"{f' and {more} more' if more else ''}: no other gateway can announce what it keeps. "
            "It gives them away when one can; --leave --undo ends that. `fairlead status "
            "--cluster` shows the other gateways"
        )
    click.echo(f"gateway {name} announces no address until it is restarted, or --leave --undo")


class _NamesClasses(click.Command):
    """A command whose help replaces `{classes}` by the names of all classes. The table of classes
    is loaded only for the help of this command."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from fairlead.plan.classes import names

        self.help = (self.help or "").replace("{classes}", names())
        super().format_help_text(ctx, formatter)


@click.command(cls=_NamesClasses)
@_shared
def controller(**options: Any) -> None:
    """Run the controller: assign addresses to Services, and write their status and Events.

    It serves Services of the classes {classes}, and Services without a class if defaultClass is set
    in the configuration. Run two or three controllers: one is the leader, by a Lease, and if it
    fails, another takes over within the duration of the Lease. Root is not needed. SIGTERM and
    Ctrl-C stop the process; the data planes continue without it."""
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
    callback=not_empty,
    help="Name of this gateway.",
)
@click.option(
    "--pin-path",
    callback=absolute,
    help="Directory on a bpffs for the pinned data plane; overrides the configuration.",
)
@click.option(
    "--proxy-path",
    callback=absolute,
    help="Directory for the HAProxy of class fairlead.io/proxy; overrides the configuration.",
)
@click.option(
    "--interface",
    "interfaces",
    multiple=True,
    callback=_selectors,
    help="Interface where packets arrive: a name, a pattern (eth*), a CIDR or default-route; may "
    "be repeated. Overrides the configuration.",
)
@click.option(
    "--cleanup",
    is_flag=True,
    help="Remove the data plane of this gateway from the kernel, delete its Lease, and exit.",
)
@click.option(
    "--leave",
    is_flag=True,
    help="Let the running gateway NODE_NAME give the addresses that it announces to other "
    "gateways, until it is restarted. Return when it announces none.",
)
@click.option(
    "--undo", is_flag=True, help="With --leave: let the gateway announce addresses again."
)
def gateway(
    node_name: str,
    pin_path: str | None,
    proxy_path: str | None,
    interfaces: tuple[str, ...],
    cleanup: bool,
    leave: bool,
    undo: bool,
    **options: Any,
) -> None:
    """Run a gateway: forward packets for load-balancer addresses to nodes with ready pods.

    Packets of class fairlead.io/direct are forwarded by an eBPF program, unmodified except for the
    hop limit; replies go from the node straight to the client. Connections of class
    fairlead.io/proxy end at a HAProxy process on this host. If the configuration has
    gateway.apiServer, another HAProxy process is the load balancer of the API servers; then the
    gateway may start before its kubeconfig exists. When the process ends for any reason, the kernel
    and HAProxy continue, and the next start takes over. --cleanup removes everything. Use --leave
    before the host is shut down: it needs access to the API server only, so it can run anywhere."""
    if undo and not leave:
        raise click.UsageError("--undo needs --leave")
    if leave and cleanup:
        raise click.UsageError("give --leave or --cleanup")
    if leave:
        _leave(node_name, undo=undo, **options)
        return
    _need_root("a gateway", "CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON")
    with _without_garbage_collector():
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
    callback=not_empty,
    help="Name of this Node in Kubernetes.",
)
@click.option(
    "--cleanup",
    is_flag=True,
    help="Remove the rules of this node and its end of the tunnel from the kernel, restore the "
    "settings of the host, delete the Lease of the node, and exit.",
)
@click.option(
    "--remove-at-stop",
    is_flag=True,
    help="Remove rules and tunnel when a signal stops the process. After a crash or kill -9 "
    "everything stays.",
)
def node(node_name: str, cleanup: bool, remove_at_stop: bool, **options: Any) -> None:
    """Run the node role: the service proxy, and the node's end of the gateways' tunnel.

    The service proxy (ClusterIP, NodePort, load-balancer addresses, healthCheckNodePort) replaces
    kube-proxy; if kube-proxy runs, set node.serviceProxy to false. The tunnel exists if tunnel.kind
    is ipip or vxlan, for nodes behind a router. Harmful settings of the host are reported, and
    corrected if node.adjustSystem is true. When the process ends, everything stays in place, so
    that a restart or an upgrade does not interrupt traffic. --cleanup removes everything,
    --remove-at-stop removes it when the process stops."""
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
