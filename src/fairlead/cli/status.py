"""`fairlead status`: what the roles that run here do, asked over their own web addresses."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.errors import Refused, Unavailable

DEFAULT_ADDRESSES = ("127.0.0.1:9440", "127.0.0.1:9441", "127.0.0.1:9442")
"""Where a controller, a gateway and a node listen unless they are told otherwise."""


@click.command()
@click.option("--address", "addresses", multiple=True, help="Where a role listens (web.listen); may be repeated.")
@output_option
def status(addresses: tuple[str, ...], output: Format) -> None:
    """Show what the roles on this host do: their Services, members with their weights, traffic counters.

    Without --address every role is asked that listens where roles listen by default. In a lab:
    fairlead lab exec gw1 -- fairlead status
    """
    states = [fetch(address) for address in addresses] if addresses else _find()
    show(states, output, lambda: _tables(states))


def fetch(address: str) -> dict[str, Any]:
    """The /state of a role. Raises Unavailable if nothing answers there."""
    url = f"http://{address}/state"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            state: dict[str, Any] = msgspec.json.decode(response.read())
    except (urllib.error.URLError, OSError) as error:
        raise Unavailable(f"GET {url}: {error}", fix="is a role running here, and is --address its web.listen?") from error
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
        step = "in step with the cluster" if state["ready"] else "not in step with the cluster yet"
        click.echo(f"{' '.join(filter(None, (state['role'], state['node'])))}: {step}")
        if state["role"] == "gateway":
            _balancers(state)
        else:
            _outcomes(state["services"])


def _outcomes(services: Mapping[str, Any]) -> None:
    outcomes = ((name, entry["outcome"] or {}) for name, entry in services.items())
    draw(("SERVICE", "STATE", "MESSAGE"), [(name, each.get("state", "-"), each.get("message", "")) for name, each in outcomes])


def _balancers(state: Mapping[str, Any]) -> None:
    traffic = state["traffic"]
    rows = []
    for name, entry in state["services"].items():
        counted = traffic.get("services", {}).get(name, {})
        counters = [str(counted.get(what, 0)) for what in ("flows", "packets", "bytes")]
        plan = entry["plan"] or {"addresses": (), "listeners": ()}
        for listener in plan["listeners"]:
            members = ", ".join(f"{m['node']}={m['weight']} {m['state']}" for m in listener["members"]) or "none"
            addresses = [each for each in plan["addresses"] if (":" in each) == (listener["family"] == "IPv6")]
            port = f"{listener['port']}/{listener['protocol']}"
            rows += [(name, f"{address} {port}", members, *counters) for address in addresses]
    draw(("SERVICE", "LISTENER", "MEMBERS (weight state)", "FLOWS", "PACKETS", "BYTES"), rows)
    failed = [(name, entry["outcome"]) for name, entry in state["services"].items() if (entry["outcome"] or {}).get("message")]
    for name, outcome in failed:
        click.echo(f"{name}: {outcome['state']}: {outcome['message']}")
    drops = {reason: count for reason, count in traffic.get("drops", {}).items() if count}
    click.echo("drops: " + (", ".join(f"{reason} {count}" for reason, count in drops.items()) or "none"))
