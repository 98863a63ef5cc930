"""`fairlead status`: the state of the roles on this host, read from their web servers, or the
processes of a cluster, read from the Kubernetes API."""

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
    BgpState,
    ControllerState,
    GatewayState,
    L2State,
    NodeState,
    OctaviaState,
    OvnState,
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
"""The default addresses of a controller, a gateway and a node."""


@click.command()
@click.option(
    "--address",
    "addresses",
    multiple=True,
    help="Address of a role (web.listen); may be repeated.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Show all controllers, gateways and nodes of the cluster, from the Kubernetes API.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="With --cluster: kubeconfig of the cluster. Default: as kubectl.",
)
@click.option(
    "--context", help="With --cluster: context of the kubeconfig. Default: the current context."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
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
    leads, which Services each of them cannot serve, and which of them announces which address. The
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
                _announced(state.l2 or L2State(), state.bgp or BgpState())
            case ControllerState():
                _outcomes(state.services)
                if state.octavia is not None:
                    _octavia(state.octavia)
                if state.ovn is not None:
                    _ovn(state.ovn)
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
    _announced(state.l2 or L2State(), state.bgp or BgpState())


def _step(state: RoleState) -> str:
    """Return whether the role is in step with the cluster, for display."""
    if not state.ready:
        return "not in step with the cluster yet"
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
        counted = traffic.services.get(name, ServiceTraffic(0, 0, 0, {}))
        # The counters are of the whole Service, so they are shown only in the row of its first
        # listener.
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
        click.echo(f"new entries not sent to peers, over the limit: {traffic.unsent}")


def _used(name: str, resource: ResourceState) -> str:
    """Return the usage of a resource, in MiB if it is memory."""
    used, limit = resource.used, resource.limit
    if name == "table_memory":
        return f"table memory {used / 2**20:.1f} of {limit / 2**20:g} MiB"
    return f"{name.replace('_', ' ')} {used} of {limit}"


def _proxied(proxy: ProxyState) -> None:
    """Print the counters of Services whose connections end at HAProxy."""
    if not proxy.services:
        return
    header = "CONNECTIONS", "OPEN", "BYTES IN", "BYTES OUT", "REFUSED", "FAILED"
    click.echo()
    draw(
        ("PROXIED SERVICE", *header),
        [(name, *map(str, astuple(each))) for name, each in proxy.services.items()],
    )
    if proxy.worker.limit:
        click.echo(
            f"HAProxy has {proxy.worker.connections} open connections, of at most "
            f"{proxy.worker.limit}"
        )


def _api_servers(balancer: ApiServersState) -> None:
    """Print the load balancer of the API servers, and which API servers get connections."""
    if not balancer.addresses:
        return
    click.echo(f"\nAPI servers behind {', '.join(balancer.addresses)}:")
    rows = [
        (name, each.state, str(each.open), str(each.connections))
        for name, each in balancer.servers.items()
    ]
    draw(("API SERVER", "STATE", "OPEN", "CONNECTIONS"), rows)


def _nodes(traffic: TrafficState) -> None:
    """Print the traffic of each node, and how packets reach it."""
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
    """Print the paths by which nodes are probed, and the verdicts."""
    _if_any(("NODE", "ADDRESS", "PROBE PATH", "VERDICT"), [astuple(each) for each in probes.nodes])


def _draining(traffic: TrafficState) -> None:
    """Print the nodes that are draining, with the remaining time."""
    rows = [
        (each.service, each.listener, each.node, f"{max(0.0, each.left_s):.0f} s")
        for each in traffic.draining
    ]
    _if_any(("SERVICE", "LISTENER", "DRAINING", "LEFT"), rows)


def _interfaces(traffic: TrafficState) -> None:
    """Print where the data plane is attached at each interface, and why."""
    click.echo()
    draw(("INTERFACE", "ATTACHED", "WHY"), [astuple(each) for each in traffic.interfaces])


def _peers(peers: PeersState) -> None:
    """Print the other gateways, and whether this gateway receives their flow entries."""
    rows = [
        (each.address, "yes" if each.connected else "no", each.problem) for each in peers.gateways
    ]
    _if_any(("PEER", "FOLLOWED", "PROBLEM"), rows)
    for finding in peers.findings:
        click.echo(f"peers: {finding}")


def _announced(l2: L2State, bgp: BgpState) -> None:
    """Print the addresses that this host announces, its BGP sessions, and the other announcers."""
    rows = [
        (each.address, ", ".join(each.services), "l2", ", ".join(each.interfaces), each.since)
        for each in l2.addresses
    ]
    nowhere = "routing daemon" if bgp.speaker == "routes" else "no peer"
    rows += [
        (
            each.address,
            ", ".join(each.services),
            "bgp",
            ", ".join(each.peers) or nowhere,
            each.since,
        )
        for each in bgp.addresses
    ]
    _if_any(("ANNOUNCED", "SERVICES", "METHOD", "ON / TO", "SINCE"), sorted(rows))
    sessions = [
        (
            each.peer,
            each.address,
            each.state,
            each.since,
            str(each.announced),
            "-" if each.accepted is None else str(each.accepted),
            each.bfd or "-",
            each.last_error,
        )
        for each in bgp.sessions
    ]
    _if_any(
        (
            "BGP PEER",
            "ADDRESS",
            "STATE",
            "SINCE",
            "ANNOUNCED",
            "ACCEPTED",
            "BFD",
            "LAST ERROR",
        ),
        sessions,
    )
    routes = [
        (each.address or "-", each.peer, each.state, each.since or "-", each.reason)
        for each in bgp.routes
    ]
    _if_any(("ROUTE TO", "BGP PEER", "STATE", "SINCE", "REASON"), routes)
    members = [(each.name, each.interface, each.state, each.since) for each in l2.members]
    _if_any(("ANNOUNCER", "INTERFACE", "STATE", "SINCE"), members)
    conflicts = [
        (each.address, each.interface, each.mac, each.since, each.seen) for each in l2.conflicts
    ]
    _if_any(("CONFLICT", "INTERFACE", "OTHER HOST", "SINCE", "LAST SEEN"), conflicts)
    if bgp.problem:
        click.echo(f"bgp: {bgp.problem}")
    for finding in (*l2.findings, *bgp.findings):
        click.echo(f"announce: {finding}")


def _octavia(state: OctaviaState) -> None:
    """Print the status of load balancers in Octavia, and the ready pods that Octavia reports as
    failed."""
    if not state.load_balancers:
        return
    rows = []
    for each in state.load_balancers:
        balancer = [
            each.service,
            f"{each.address} ({each.provider})",
            each.operating,
            f"{each.seen_s_ago:.0f} s ago",
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
            "OCTAVIA STATUS",
            "LAST SEEN",
            "LISTENER",
            "MEMBERS (weight status)",
        ),
        rows,
    )
    for each in state.load_balancers:
        for discrepancy in each.discrepancies:
            click.echo(f"{each.service}: {discrepancy} (load balancer {each.id})")


def _ovn(state: OvnState) -> None:
    """Print the load balancers in OVN, and the databases that are not connected."""
    rows = [
        (
            each.service,
            f"{each.address}/{each.protocol}{f' on {each.node}' if each.node else ''}",
            _listed(each.positions),
            ", ".join(each.draining) or "none",
            ", ".join(each.attached) or "none",
            "removed" if each.removed else "installed" if each.installed else "waiting for chassis",
        )
        for each in state.load_balancers
    ]
    header = "LISTENER", "BACKENDS (positions)", "DRAINING", "ATTACHED TO", "STATE"
    _if_any(("OVN LOAD BALANCER OF", *header), rows)
    for each in state.databases:
        if not each.connected:
            click.echo(
                f"ovn: {each.name} is not connected, and its state is {each.stale_s:.0f} s old: "
                f"{each.problem}"
            )
    if state.chassis_behind:
        click.echo(f"ovn: chassis without the last change: {', '.join(state.chassis_behind)}")


def _if_any(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        click.echo()
        draw(header, rows)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"
