"""Fairlead's client of OVSDB beside ovsdbapp, at a northbound database of OVN.

`python -m bench.ovsdb [--rows N] [--rounds N] [--output json]`. In: the OVN and the Python
environment of the tests, where ovsdbapp uses the package `ovs`. Out: for each client, what it costs
to read all rows of Load_Balancer, and to change one row, which ends when the client's own copy has
the change. Each measurement is a new process of the client (`bench/ovsdb_client.py`,
`bench/ovsdb_peer.py`); the clients take turns. CPU time excludes the start of the interpreter and
the import of modules."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from bench.options import log_to_stderr
from tests.openstack import places

from fairlead.net.ovsdb import Database, Insert, new_uuid

HERE = Path(__file__).parent
BATCH = 1000
HEADER = (
    f"{'CLIENT':10} {'READ wall s':>22} {'READ CPU s':>22} {'MEMORY MiB':>12} {'CHANGE ms':>20} "
    f"{'CPU ms':>20}"
)


def row(number: int) -> dict[str, Any]:
    """Return the columns of a load balancer with three backends, as the driver writes it."""
    return {
        "name": f"fairlead:cluster:ns/service-{number}:http:tcp",
        "protocol": "tcp",
        "vips": {
            f"203.0.{113 + number // 250}.{number % 250}:80": ",".join(
                f"10.244.{each}.{number % 250}:8080" for each in range(3)
            )
        },
        "options": {"reject": "true", "skip_snat": "true", "neighbor_responder": "none"},
        "external_ids": {
            "fairlead.io/cluster": "cluster",
            "fairlead.io/service": f"ns/service-{number}",
            "fairlead.io/port": "http",
        },
    }


async def fill(remote: str, rows: int) -> None:
    """Insert the rows."""
    database = Database("OVN_Northbound", [remote], {})
    running = asyncio.create_task(database.run())
    await database.wait_synced(60)
    for start in range(0, rows, BATCH):
        numbers = range(start, min(start + BATCH, rows))
        await database.transact(
            [Insert("Load_Balancer", row(each), new_uuid()) for each in numbers], timeout_s=60
        )
    running.cancel()


def clients() -> dict[str, list[str]]:
    """Return the command lines of the clients."""
    return {
        "fairlead": [sys.executable, "-m", "bench.ovsdb_client"],
        "ovsdbapp": [str(places.python()), "-W", "ignore", str(HERE / "ovsdb_peer.py")],
    }


def measure(argv: list[str], remote: str) -> dict[str, float]:
    """Run a client, and return its figures."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [*argv, remote], check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=600
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


@click.command(help="Measure Fairlead's client of OVSDB beside ovsdbapp.")
@click.option("--rows", default=10_000, help="The number of load balancers.")
@click.option("--rounds", default=3)
@click.option("--output", type=click.Choice(["table", "json"]), default="table")
def main(rows: int, rounds: int, output: str) -> None:
    log_to_stderr()
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in clients()}
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        schema = places.OVN / "usr/share/ovn/ovn-nb.ovsschema"
        subprocess.run([places.program("ovsdb-tool"), "create", here / "nb.db", schema], check=True)
        server = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", places.program("ovsdb-server"), here / "nb.db"),
                *(f"--remote=punix:{here}/nb.sock", f"--unixctl={here}/nb.ctl", "--no-chdir"),
                "-vconsole:off",
            ],
            env=os.environ | {"OVS_RUNDIR": directory},
        )
        try:
            asyncio.run(fill(f"unix:{here}/nb.sock", rows))
            for _ in range(rounds):
                for name, argv in clients().items():
                    figures[name].append(measure(argv, f"unix:{here}/nb.sock"))
                    if figures[name][-1]["rows"] != rows:
                        raise SystemExit(f"{name} has read {figures[name][-1]['rows']:.0f} rows")
        finally:
            server.kill()
            server.wait()
    if output == "json":
        load = os.getloadavg()[0]
        print(json.dumps({"rows": rows, "load": load, "rounds": figures}, indent=2))
        return
    print(HEADER)
    for name, of in figures.items():
        columns = {key: [each[key] for each in of] for key in of[0]}
        print(
            f"{name:10} {spread(columns['read_s']):>22} {spread(columns['read_cpu_s']):>22} "
            f"{statistics.median(columns['memory_mib']):12.1f} {spread(columns['change_ms']):>20} "
            f"{spread(columns['change_cpu_ms']):>20}"
        )


if __name__ == "__main__":
    main()
