"""`fairlead status`: the state of the roles on this host, read from their web servers, or the
processes of a cluster, read from the Kubernetes API."""

import http.client
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.cli.parameters import NamedFile, host_port
from fairlead.errors import Unavailable, plain
from fairlead.model import LoadBalancer, NodeService
from fairlead.net.address import bracketed
from fairlead.role_state import (
    STATES,
    GatewayState,
    ListenerTraffic,
    Part,
    ResourceState,
    RoleState,
    ServiceState,
    TrafficState,
    decode,
    listed,
    parts_of,
)

DEFAULT_ADDRESSES = ("127.0.0.1:9440", "127.0.0.1:9441", "127.0.0.1:9442")
"""The default addresses of a controller, a gateway and a node."""
NOT_IN_STEP = "not in step with the cluster yet"


@click.command()
@click.option(
    "--address",
    "addresses",
    multiple=True,
    callback=host_port,
    help="Address of a role (web.listen); may be repeated.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Show all controllers, gateways and nodes of the cluster, from the Kubernetes API.",
)
@click.option(
    "--kubeconfig",
    type=NamedFile(),
    help="With --cluster: kubeconfig of the cluster. Default: as kubectl.",
)
@click.option(
    "--context", help="With --cluster: context of the kubeconfig. Default: the current context."
)
@click.option(
    "--config",
    "config_path",
    type=NamedFile(),
    help="With --cluster: fairlead.yaml. Default: ConfigMap fairlead-system/fairlead of the "
    "cluster.",
)
@output_option
def status(
    addresses: tuple[str, ...],
    cluster: bool,
    kubeconfig: Path | None,
    context: str | None,
    config_path: Path | None,
    output: Format,
) -> None:
    """Show the state of the roles on this host: Services, members with their weights, traffic
    counters.

    Without --address it shows every role that listens at a default address. In a lab: fairlead lab
    exec gw1 -- fairlead status

    With --cluster it shows the controllers, gateways and nodes of the cluster, which controller
    leads, which Services each of them cannot serve, and which gateway announces which address. The
    command waits until every process has renewed its Lease or is found to be gone: with the default
    configuration 10 s, or 30 s if a process is gone."""
    if cluster:
        if addresses:
            raise click.UsageError(
                "--address selects a role on a host, --cluster reads the Kubernetes API: give one "
                "or the other"
            )
        from fairlead.cli.instances import show_cluster

        show_cluster(kubeconfig, context, config_path, output)
        return
    if kubeconfig or context or config_path:
        raise click.UsageError("--kubeconfig, --context and --config are for --cluster")
    states = [fetch(address) for address in addresses] if addresses else _find()
    show(states, output, lambda: _tables(states))


def fetch(address: str) -> RoleState:
    """Return the /state of a role. Raise Unavailable if the role does not answer, and Refused if
    the answer is not the state of a role, or has an unsupported version."""
    url = f"http://{address}/state"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            body: bytes = response.read()
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise Unavailable(
            f"GET {url}: {plain(error)}",
            fix="is a role running here, and is --address its web.listen?",
        ) from error
    return decode(body, f"GET {url}")


def _find() -> list[RoleState]:
    states = []
    for address in DEFAULT_ADDRESSES:
        try:
            states.append(fetch(address))
        except Unavailable as error:
            last = error
    if not states:
        raise Unavailable(f"no role answers at {', '.join(DEFAULT_ADDRESSES)}", fix=last.fix)
    return states


def _tables(states: Sequence[RoleState]) -> None:
    for number, state in enumerate(states):
        if number:
            click.echo()
        click.echo(f"{' '.join(filter(None, (_role(state), state.node)))}: {_step(state)}")
        if isinstance(state, GatewayState):
            _balancers(state.services, state.traffic or TrafficState())
        else:
            _outcomes(state.services)
        for part in parts_of(state):
            _print(part)
        for finding in state.host:
            click.echo(f"host: {finding}")


def _role(state: RoleState) -> str:
    return next(role for role, type_ in STATES.items() if isinstance(state, type_))


def _print(part: Part) -> None:
    for shown in part.shown():
        if isinstance(shown, str):
            click.echo(shown)
            continue
        click.echo()
        if shown.title:
            click.echo(shown.title)
        draw(shown.header, shown.rows)


def _step(state: RoleState) -> str:
    """Return whether the role is in step with the cluster, for display."""
    if not state.ready:
        problems = [each.message for each in state.host if each.blocks == "Ready"]
        return f"does not work: {'; '.join(problems)}" if problems else NOT_IN_STEP
    stale = [f"{name} {each.age_s:.0f} s" for name, each in state.watches.items() if each.stale]
    if not stale:
        return "in step with the cluster"
    knowledge = f"continues with a stale state of the cluster: {', '.join(stale)}"
    if state.api_server is None:
        return knowledge
    return f"{knowledge}; the API server last answered {state.api_server.answered_s_ago:.0f} s ago"


def _outcomes(
    services: Mapping[str, ServiceState[LoadBalancer] | ServiceState[NodeService]],
) -> None:
    outcomes = ((name, each.outcome) for name, each in services.items())
    draw(
        ("SERVICE", "STATE", "MESSAGE"),
        [
            (name, outcome.state, outcome.message) if outcome is not None else (name, "-", "")
            for name, outcome in outcomes
        ],
    )


def _balancers(services: Mapping[str, ServiceState[LoadBalancer]], traffic: TrafficState) -> None:
    rows = []
    for name, service in services.items():
        for listener in service.plan.listeners if service.plan is not None else ():
            members = (
                ", ".join(f"{each.node}={each.weight} {each.state}" for each in listener.members)
                or "none"
            )
            port = f"{listener.port}/{listener.protocol}"
            for address in service.plan.listening(listener) if service.plan is not None else ():
                counters = _counters(traffic.listeners.get(f"{bracketed(address)}:{port}"))
                rows.append((name, f"{address} {port}", members, *counters))
    draw(("SERVICE", "LISTENER", "MEMBERS (weight state)", "FLOWS", "PACKETS", "BYTES"), rows)
    for name, service in services.items():
        if service.outcome is not None and service.outcome.message:
            click.echo(f"{name}: {service.outcome.state}: {service.outcome.message}")
    for name, counted in traffic.services.items():
        if counted.drops:
            click.echo(f"{name}: drops: {listed(counted.drops)}")
    click.echo(f"drops: {listed(traffic.drops)}")
    click.echo(f"messages: {listed(traffic.messages)}")
    if used := [_used(name, each) for name, each in traffic.resources.items()]:
        click.echo(f"used: {', '.join(used)}")
    if traffic.untracked:
        click.echo(f"new flows without an entry, over the limit: {traffic.untracked}")
    if traffic.unsent:
        click.echo(f"new entries not sent to peers, over the limit: {traffic.unsent}")


def _counters(traffic: ListenerTraffic | None) -> Sequence[str]:
    """Return the cells with the counters of a listener. None: it is not one of the eBPF data plane;
    HAProxy counts by Service."""
    if traffic is None:
        return ("-", "-", "-")
    return (str(traffic.flows), str(traffic.packets), str(traffic.bytes))


def _used(name: str, resource: ResourceState) -> str:
    """Return the usage of a resource, in MiB if it is memory."""
    used, limit = resource.used, resource.limit
    if name == "table_memory":
        return f"table memory {used / 2**20:.1f} of {limit / 2**20:g} MiB"
    return f"{name.replace('_', ' ')} {used} of {limit}"
