"""`fairlead status`: what the roles on this host do, read from their web addresses; or which
processes run in the whole cluster, read from the Kubernetes API."""

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from msgspec.structs import astuple

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer, NodeService
from fairlead.role_state import (
    STATES,
    ApiServersState,
    ControllerState,
    GatewayState,
    NodeState,
    OctaviaState,
    PeersState,
    ProbesState,
    ProxyState,
    ResourceState,
    RoleState,
    ServiceState,
    ServiceTraffic,
    TrafficState,
    decode,
)

DEFAULT_ADDRESSES = ("127.0.0.1:9440", "127.0.0.1:9441", "127.0.0.1:9442")
"""Where a controller, a gateway and a node listen unless they are told otherwise."""


@click.command()
@click.option(
    "--address",
    "addresses",
    multiple=True,
    help="Where a role listens (web.listen); may be repeated.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Show all controllers, gateways and nodes of the cluster, as the API knows them.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="With --cluster: kubeconfig to use; by default as kubectl.",
)
@click.option(
    "--context", help="With --cluster: context of the kubeconfig; by default its current context."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="With --cluster: fairlead.yaml; by default the cluster's own (ConfigMap "
    "fairlead-system/fairlead).",
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
    """Show what the roles on this host do: their Services, members with their weights, traffic
    counters.

    Without --address every role is asked that listens where roles listen by default. In a lab:
    fairlead lab exec gw1 -- fairlead status

    With --cluster, show which controllers, gateways and nodes run, which controller leads, and
    which Services each of them cannot serve. The command watches until every process has renewed
    its Lease, or is found to be gone: with the default configuration 10 s, or 30 s if a process is
    gone."""
    if cluster:
        if addresses:
            raise click.UsageError(
                "--address names a role on a host, --cluster asks the Kubernetes API: give one "
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
    """The /state of a role. Raises Unavailable if nothing answers there, and Refused if the answer
    is not the state of a role, or is one of another version."""
    url = f"http://{address}/state"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            body: bytes = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise Unavailable(
            f"GET {url}: {error}", fix="is a role running here, and is --address its web.listen?"
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
        match state:
            case GatewayState():
                _gateway(state)
            case NodeState():
                _outcomes(state.services)
                if state.tunnel is not None:
                    packets = _listed(state.tunnel.packets)
                    click.echo(f"tunnel: {state.tunnel.kind}, packets: {packets}")
            case ControllerState():
                _outcomes(state.services)
                if state.octavia is not None:
                    _octavia(state.octavia)
        for finding in state.host:
            click.echo(f"host: {finding}")


def _role(state: RoleState) -> str:
    return next(role for role, type_ in STATES.items() if isinstance(state, type_))


def _gateway(state: GatewayState) -> None:
    traffic = state.traffic or TrafficState()
    _balancers(state.services, traffic)
    _proxied(state.proxy or ProxyState())
    _api_servers(state.api_servers or ApiServersState())
    _nodes(traffic)
    _probed(state.probes or ProbesState())
    _draining(traffic)
    _interfaces(traffic)
    _peers(state.peers or PeersState())


def _step(state: RoleState) -> str:
    """Whether the role follows the cluster."""
    if not state.ready:
        return "not in step with the cluster yet"
    stale = [f"{name} {each.age_s:.0f} s" for name, each in state.watches.items() if each.stale]
    if not stale:
        return "in step with the cluster"
    knowledge = f"goes on with what it knew, which is stale: {', '.join(stale)}"
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
        counted = traffic.services.get(name, ServiceTraffic(0, 0, 0, {}))
        # They are the Service's, so they stand once, however many listeners it has.
        counters = [str(each) for each in (counted.flows, counted.packets, counted.bytes)]
        for listener in service.plan.listeners if service.plan is not None else ():
            members = (
                ", ".join(f"{each.node}={each.weight} {each.state}" for each in listener.members)
                or "none"
            )
            port = f"{listener.port}/{listener.protocol}"
            for address in service.plan.listening(listener) if service.plan is not None else ():
                rows.append((name, f"{address} {port}", members, *counters))
                counters = [""] * len(counters)
    draw(("SERVICE", "LISTENER", "MEMBERS (weight state)", "FLOWS", "PACKETS", "BYTES"), rows)
    for name, service in services.items():
        if service.outcome is not None and service.outcome.message:
            click.echo(f"{name}: {service.outcome.state}: {service.outcome.message}")
    for name, counted in traffic.services.items():
        if counted.drops:
            click.echo(f"{name}: drops: {_listed(counted.drops)}")
    click.echo(f"drops: {_listed(traffic.drops)}")
    click.echo(f"messages: {_listed(traffic.messages)}")
    if used := [_used(name, each) for name, each in traffic.resources.items()]:
        click.echo(f"used: {', '.join(used)}")
    if traffic.untracked:
        click.echo(f"new flows without an entry, over the limit: {traffic.untracked}")
    if traffic.unsent:
        click.echo(f"entries that peers were not told of, as they came too fast: {traffic.unsent}")


def _used(name: str, resource: ResourceState) -> str:
    """How much of a resource is used, in MiB if it is memory."""
    used, most = resource.used, resource.most
    if name == "table_memory":
        return f"table memory {used / 2**20:.1f} of {most / 2**20:g} MiB"
    return f"{name.replace('_', ' ')} {used} of {most}"


def _proxied(proxy: ProxyState) -> None:
    """What HAProxy has counted of Services whose connections end at it."""
    if not proxy.services:
        return
    header = "CONNECTIONS", "OPEN", "BYTES IN", "BYTES OUT", "REFUSED", "NOT TAKEN"
    click.echo()
    draw(
        ("PROXIED SERVICE", *header),
        [(name, *map(str, astuple(each))) for name, each in proxy.services.items()],
    )
    if proxy.worker.limit:
        click.echo(
            f"HAProxy takes {proxy.worker.limit} connections at a time, and has "
            f"{proxy.worker.connections}"
        )


def _api_servers(balancer: ApiServersState) -> None:
    """The API server's own balancer: which API servers get connections."""
    if not balancer.addresses:
        return
    click.echo(f"\nAPI servers behind {', '.join(balancer.addresses)}:")
    rows = [
        (name, each.state, str(each.open), str(each.connections))
        for name, each in balancer.servers.items()
    ]
    draw(("API SERVER", "STATE", "OPEN", "CONNECTIONS"), rows)


def _nodes(traffic: TrafficState) -> None:
    """What each node got, and how it gets there."""
    rows = [
        (
            name,
            ", ".join(each.forwarding),
            ", ".join(each.next_hops),
            *map(str, (each.flows, each.packets, each.bytes)),
        )
        for name, each in traffic.nodes.items()
    ]
    click.echo()
    draw(("NODE", "FORWARDING", "NEXT HOP", "FLOWS", "PACKETS", "BYTES"), rows)


def _probed(probes: ProbesState) -> None:
    """The path by which each node is probed, and the verdict."""
    _if_any(("NODE", "ADDRESS", "PROBED BY", "VERDICT"), [astuple(each) for each in probes.nodes])


def _draining(traffic: TrafficState) -> None:
    """Which nodes keep connections for some time yet."""
    rows = [
        (each.service, each.listener, each.node, f"{max(0.0, each.left_s):.0f} s")
        for each in traffic.draining
    ]
    _if_any(("SERVICE", "LISTENER", "DRAINING", "LEFT"), rows)


def _interfaces(traffic: TrafficState) -> None:
    """Where packets are taken, and why there."""
    click.echo()
    draw(("INTERFACE", "ATTACHED", "WHY"), [astuple(each) for each in traffic.interfaces])


def _peers(peers: PeersState) -> None:
    """The other gateways, and whether what is in transition there is known here."""
    rows = [
        (each.address, "yes" if each.connected else "no", each.problem) for each in peers.gateways
    ]
    _if_any(("PEER", "FOLLOWED", "PROBLEM"), rows)


def _octavia(state: OctaviaState) -> None:
    """OpenStack's load balancers by Octavia's account, and where pods are ready and Octavia says
    otherwise."""
    if not state.load_balancers:
        return
    rows = []
    for each in state.load_balancers:
        balancer = [
            each.service,
            f"{each.address} ({each.provider})",
            each.operating,
            f"{each.seen_s_ago:.0f} s",
        ]
        for listener, members in each.members.items():
            names = (
                ", ".join(f"{m.address}:{m.port}={m.weight} {m.operating}" for m in members)
                or "none"
            )
            rows.append((*balancer, listener, names))
            balancer = [""] * len(balancer)
    click.echo()
    draw(
        (
            "LOAD BALANCER OF",
            "ADDRESS",
            "OCTAVIA SAYS",
            "SEEN BEFORE",
            "LISTENER",
            "MEMBERS (weight status)",
        ),
        rows,
    )
    for each in state.load_balancers:
        for doubt in each.doubts:
            click.echo(f"{each.service}: {doubt} (load balancer {each.id})")


def _if_any(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        click.echo()
        draw(header, rows)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"
