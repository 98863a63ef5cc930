"""`fairlead status`: what the roles on this host do, read from their web addresses; or which
processes run in the whole cluster, read from the Kubernetes API."""

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.errors import Refused, Unavailable

DEFAULT_ADDRESSES = ("127.0.0.1:9440", "127.0.0.1:9441", "127.0.0.1:9442")
"""Where a controller, a gateway and a node listen unless they are told otherwise."""


LOST = {
    "untracked": "new flows without an entry, over the limit",
    "unsent": "entries that peers were not told of, as they came too fast",
}
"""What may break connections later, shown where there was any."""


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


def fetch(address: str) -> dict[str, Any]:
    """The /state of a role. Raises Unavailable if nothing answers there."""
    url = f"http://{address}/state"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            state: dict[str, Any] = msgspec.json.decode(response.read())
    except (urllib.error.URLError, OSError) as error:
        raise Unavailable(
            f"GET {url}: {error}", fix="is a role running here, and is --address its web.listen?"
        ) from error
    except msgspec.DecodeError as error:
        raise Refused(f"GET {url}: the answer is not a role's state: {error}") from error
    return state


def _find() -> list[dict[str, Any]]:
    states = []
    for address in DEFAULT_ADDRESSES:
        try:
            states.append(fetch(address))
        except Unavailable as error:
            last = error
    if not states:
        raise Unavailable(f"no role answers at {', '.join(DEFAULT_ADDRESSES)}", fix=last.fix)
    return states


def _tables(states: list[dict[str, Any]]) -> None:
    for number, state in enumerate(states):
        if number:
            click.echo()
        click.echo(f"{' '.join(filter(None, (state['role'], state['node'])))}: {_step(state)}")
        if state["role"] == "gateway":
            _balancers(state)
            _proxied(state["traffic"])
            _api(state["traffic"])
            _nodes(state["traffic"])
            _probed(state["traffic"])
            _draining(state["traffic"])
            _interfaces(state["traffic"])
            _peers(state["traffic"])
        else:
            _outcomes(state["services"])
            _tunnel(state["traffic"])
            _octavia(state["traffic"])
        _host(state.get("host", ()))


def _step(state: Mapping[str, Any]) -> str:
    """Whether the role follows the cluster."""
    if not state["ready"]:
        return "not in step with the cluster yet"
    stale = [
        f"{name} {each['age_s']:.0f} s"
        for name, each in state.get("watches", {}).items()
        if each["stale"]
    ]
    if not stale:
        return "in step with the cluster"
    answered = f"{state['api_server']['answered_s_ago']:.0f} s ago"
    return (
        f"goes on with what it knew, which is stale: {', '.join(stale)}; the API server last "
        f"answered {answered}"
    )


def _outcomes(services: Mapping[str, Any]) -> None:
    outcomes = ((name, entry["outcome"] or {}) for name, entry in services.items())
    draw(
        ("SERVICE", "STATE", "MESSAGE"),
        [(name, each.get("state", "-"), each.get("message", "")) for name, each in outcomes],
    )


def _balancers(state: Mapping[str, Any]) -> None:
    traffic = state["traffic"]
    rows = []
    for name, entry in state["services"].items():
        counted = traffic.get("services", {}).get(name, {})
        # They are the Service's, so they stand once, however many listeners it has.
        counters = [str(counted.get(what, 0)) for what in ("flows", "packets", "bytes")]
        plan = entry["plan"] or {"addresses": (), "listeners": ()}
        for listener in plan["listeners"]:
            members = (
                ", ".join(f"{m['node']}={m['weight']} {m['state']}" for m in listener["members"])
                or "none"
            )
            addresses = [
                each
                for each in plan["addresses"]
                if (":" in each) == (listener["family"] == "IPv6")
            ]
            port = f"{listener['port']}/{listener['protocol']}"
            for address in addresses:
                rows.append((name, f"{address} {port}", members, *counters))
                counters = [""] * len(counters)
    draw(("SERVICE", "LISTENER", "MEMBERS (weight state)", "FLOWS", "PACKETS", "BYTES"), rows)
    failed = [
        (name, entry["outcome"])
        for name, entry in state["services"].items()
        if (entry["outcome"] or {}).get("message")
    ]
    for name, outcome in failed:
        click.echo(f"{name}: {outcome['state']}: {outcome['message']}")
    for name, counted in traffic.get("services", {}).items():
        if counted["drops"]:
            click.echo(f"{name}: drops: {_listed(counted['drops'])}")
    for what in ("drops", "messages"):
        click.echo(f"{what}: {_listed(traffic.get(what, {}))}")
    if resources := traffic.get("resources"):
        click.echo(
            f"used: {', '.join(_used(name, each['used'], each['most']) for name, each in resources.items())}"
        )
    for what, meaning in LOST.items():
        if count := traffic.get(what, 0):
            click.echo(f"{meaning}: {count}")


def _used(resource: str, used: int, most: int) -> str:
    """How much of a resource is used, in MiB if it is memory."""
    if resource == "table_memory":
        return f"table memory {used / 2**20:.1f} of {most / 2**20:g} MiB"
    return f"{resource.replace('_', ' ')} {used} of {most}"


def _proxied(traffic: Mapping[str, Any]) -> None:
    """What HAProxy has counted of Services whose connections end at it."""
    counted = ("connections", "open", "bytes_in", "bytes_out", "refused", "failed")
    rows = [
        (name, *(str(each[what]) for what in counted))
        for name, each in traffic.get("proxied", {}).items()
    ]
    if rows:
        click.echo()
        draw(
            (
                "PROXIED SERVICE",
                "CONNECTIONS",
                "OPEN",
                "BYTES IN",
                "BYTES OUT",
                "REFUSED",
                "NOT TAKEN",
            ),
            rows,
        )
        if (worker := traffic.get("proxyWorker", {})).get("limit"):
            click.echo(
                f"HAProxy takes {worker['limit']} connections at a time, and has "
                f"{worker['connections']}"
            )


def _api(traffic: Mapping[str, Any]) -> None:
    """The API server's own balancer: who gets connections."""
    if api := traffic.get("api"):
        click.echo(f"\nAPI servers behind {', '.join(api['addresses'])}:")
        rows = [
            (name, each["state"], str(each["open"]), str(each["connections"]))
            for name, each in api["servers"].items()
        ]
        draw(("API SERVER", "STATE", "OPEN", "CONNECTIONS"), rows)


def _nodes(traffic: Mapping[str, Any]) -> None:
    """What each node got, and how it gets there."""
    counted = ("flows", "packets", "bytes")
    rows = [
        (
            name,
            ", ".join(each["forwarding"]),
            ", ".join(each["next_hops"]),
            *(str(each[what]) for what in counted),
        )
        for name, each in traffic.get("nodes", {}).items()
    ]
    click.echo()
    draw(("NODE", "FORWARDING", "NEXT HOP", "FLOWS", "PACKETS", "BYTES"), rows)


def _probed(traffic: Mapping[str, Any]) -> None:
    """The path by which each node is probed, and the verdict."""
    rows = [
        (each["node"], each["address"], each["way"], each["verdict"])
        for each in traffic.get("probed", ())
    ]
    if rows:
        click.echo()
        draw(("NODE", "ADDRESS", "PROBED BY", "VERDICT"), rows)


def _draining(traffic: Mapping[str, Any]) -> None:
    """Which nodes keep connections for some time yet."""
    rows = [
        (each["service"], each["listener"], each["node"], f"{max(0.0, each['left_s']):.0f} s")
        for each in traffic.get("draining", ())
    ]
    if rows:
        click.echo()
        draw(("SERVICE", "LISTENER", "DRAINING", "LEFT"), rows)


def _interfaces(traffic: Mapping[str, Any]) -> None:
    """Where packets are taken, and why there."""
    rows = [(each["name"], each["attach"], each["why"]) for each in traffic.get("interfaces", ())]
    click.echo()
    draw(("INTERFACE", "ATTACHED", "WHY"), rows)


def _peers(traffic: Mapping[str, Any]) -> None:
    """The other gateways, and whether what is in transition there is known here."""
    rows = [
        (each["address"], "yes" if each["connected"] else "no", each["problem"])
        for each in traffic.get("peers", ())
    ]
    if rows:
        click.echo()
        draw(("PEER", "FOLLOWED", "PROBLEM"), rows)


def _tunnel(traffic: Mapping[str, Any]) -> None:
    """What came out of the tunnel to this node, or did not."""
    if tunnel := traffic.get("tunnel"):
        click.echo(f"tunnel: {tunnel['kind']}, packets: {_listed(tunnel['packets'])}")


def _octavia(traffic: Mapping[str, Any]) -> None:
    """OpenStack's load balancers by Octavia's account, and where pods are ready and it thinks
    otherwise."""
    if not (healths := traffic.get("octavia", ())):
        return
    rows = []
    for each in healths:
        told = [
            each["service"],
            f"{each['address']} ({each['provider']})",
            each["operating"],
            f"{each['seen_s_ago']:.0f} s",
        ]
        for listener, members in each["members"].items():
            names = (
                ", ".join(
                    f"{m['address']}:{m['port']}={m['weight']} {m['operating']}" for m in members
                )
                or "none"
            )
            rows.append((*told, listener, names))
            told = [""] * len(told)
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
    for each in healths:
        for doubt in each["doubts"]:
            click.echo(f"{each['service']}: {doubt} (load balancer {each['id']})")


def _host(findings: Sequence[Mapping[str, Any]]) -> None:
    """Settings of the host that do harm, with the command that sets them."""
    for each in findings:
        what = (
            f"was {each['value']}, set to" if each["adjusted"] else f"is {each['value']}, should be"
        )
        command = "" if each["adjusted"] else f"; {each['command']}"
        click.echo(f"host: {each['setting']} {what} {each['should']}: {each['why']}{command}")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"
