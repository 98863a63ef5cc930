"""`python -m fairlead.probe burst|steady|crowd|flood ...`: run the loads as processes, so that they
can run inside a network namespace.

`burst` prints one Tally as JSON, `flood` the number of packets that it sent. `steady` and `crowd`
run until their standard input ends; each line of their input ends a period, whose results they
print as a line of JSON."""

import argparse
import asyncio
import sys

import msgspec

from fairlead.probe import crowd, flood
from fairlead.probe.burst import burst
from fairlead.probe.flow import Target
from fairlead.probe.steady import Steady


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fairlead.probe", description=__doc__)
    loads = parser.add_subparsers(dest="load", required=True)
    for name in ("burst", "steady"):
        load = loads.add_parser(name)
        load.add_argument("address")
        load.add_argument("port", type=int)
        load.add_argument(
            "--timeout", type=float, metavar="SECONDS", default=1.0 if name == "burst" else 0.4
        )
        if name == "burst":
            load.add_argument(
                "--patience",
                type=float,
                metavar="SECONDS",
                default=5.0,
                help="time limit for the answer on an established connection",
            )
            load.add_argument("--connections", type=int, default=1000)
            load.add_argument("--concurrency", type=int, default=64)
        else:
            load.add_argument(
                "--patience",
                type=float,
                metavar="SECONDS",
                help="time limit of a call without a lost packet, instead of --timeout",
            )
            load.add_argument("--callers", type=int, default=5)
            load.add_argument("--open", type=int, default=20, help="connections kept open")
            load.add_argument(
                "--open-pause",
                type=float,
                metavar="SECONDS",
                default=0.2,
                help="time between requests on an open connection",
            )
    load = loads.add_parser("crowd")
    load.add_argument(
        "--flows",
        nargs=4,
        action="append",
        required=True,
        metavar=("tcp|udp|quic", "ADDRESS", "PORT", "OPEN"),
    )
    load.add_argument("--new", type=float, default=300, metavar="PER_SECOND")
    load.add_argument(
        "--interval",
        type=float,
        default=4.0,
        metavar="SECONDS",
        help="time between requests on an open flow",
    )
    load.add_argument(
        "--patience",
        type=float,
        default=crowd.SILENCE_S,
        metavar="SECONDS",
        help="time limit for the answer on a new flow",
    )
    load = loads.add_parser("flood")
    load.add_argument("kind", choices=["tcp", "connection", "udp"])
    load.add_argument("source", help="the first of the forged source addresses")
    load.add_argument("address")
    load.add_argument("port", type=int)
    load.add_argument("--count", type=int, default=100_000)
    load.add_argument("--per-second", type=float, default=1e9)
    run = {"burst": _burst, "steady": _steady, "crowd": _crowd, "flood": _flood}
    arguments = parser.parse_args()
    run[arguments.load](arguments)


def _burst(arguments: argparse.Namespace) -> None:
    tally = burst(
        arguments.address,
        arguments.port,
        connections=arguments.connections,
        concurrency=arguments.concurrency,
        timeout_s=arguments.timeout,
        patience_s=arguments.patience,
    )
    sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")


def _steady(arguments: argparse.Namespace) -> None:
    steady = Steady(
        arguments.address,
        arguments.port,
        callers=arguments.callers,
        timeout_s=arguments.timeout,
        patience_s=arguments.patience,
        open_connections=arguments.open,
        open_pause_s=arguments.open_pause,
    )
    asyncio.run(_run_by_commands(steady))


async def _run_by_commands(load: Steady) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    task = asyncio.ensure_future(load.run())
    try:
        while await lines.readline():
            await load.settle()
            sys.stdout.buffer.write(msgspec.json.encode(load.take()) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _crowd(arguments: argparse.Namespace) -> None:
    texts = [
        dict(zip(("kind", "address", "port", "open"), given, strict=True))
        for given in arguments.flows
    ]
    targets = msgspec.convert(texts, list[Target], strict=False)
    crowd.run(
        crowd.Crowd(
            targets,
            new_per_s=arguments.new,
            interval_s=arguments.interval,
            patience_s=arguments.patience,
        ),
    )


def _flood(arguments: argparse.Namespace) -> None:
    made = flood.packets(
        arguments.kind, arguments.source, arguments.address, arguments.port, arguments.count
    )
    print(flood.send(made, arguments.address, per_s=arguments.per_second))


if __name__ == "__main__":
    main()
