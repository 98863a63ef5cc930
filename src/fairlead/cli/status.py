"""`fairlead status`: what a running role does, asked over its own web address."""

import urllib.error
import urllib.request
from typing import Any

import click
import msgspec

from fairlead.cli.output import Format, draw, output_option, show
from fairlead.errors import Refused, Unavailable


@click.command()
@click.option("--address", default="127.0.0.1:9440", show_default=True, help="Where the role listens (web.listen).")
@output_option
def status(address: str, output: Format) -> None:
    """Show what a running controller, gateway or node does: its Services, members with their shares, traffic counters.

    Run it where the role runs. In a lab: fairlead lab exec gw1 -- fairlead status
    """
    state = fetch(address)
    show(state, output, lambda: _table(state))


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


def _table(state: dict[str, Any]) -> None:
    step = "in step with the cluster" if state["ready"] else "not in step with the cluster yet"
    click.echo(f"{state['role']} {state['node']}: {step}".replace(" :", ":"))
    if state["role"] == "gateway":
        _balancers(state)
    else:
        outcomes = ((name, entry["outcome"] or {}) for name, entry in state["services"].items())
        rows = [(name, outcome.get("state", "-"), outcome.get("message", "")) for name, outcome in outcomes]
        draw(("SERVICE", "STATE", "MESSAGE"), rows)


def _balancers(state: dict[str, Any]) -> None:
    traffic = state["traffic"]
    rows = []
    for name, entry in state["services"].items():
        counted = traffic.get("services", {}).get(name, {})
        counters = [str(counted.get(what, 0)) for what in ("flows", "packets", "bytes")]
        for listener in (entry["plan"] or {}).get("listeners", ()):
            members = ", ".join(f"{m['node']}={m['weight']} {m['state']}" for m in listener["members"]) or "none"
            rows.append((name, f"{listener['address']} {listener['port']}/{listener['protocol']}", members, *counters))
    draw(("SERVICE", "LISTENER", "MEMBERS (weight state)", "FLOWS", "PACKETS", "BYTES"), rows)
    drops = {reason: count for reason, count in traffic.get("drops", {}).items() if count}
    click.echo("drops: " + (", ".join(f"{reason} {count}" for reason, count in drops.items()) or "none"))
