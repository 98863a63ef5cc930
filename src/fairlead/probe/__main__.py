"""`python -m fairlead.probe burst|steady ...`: the two loads as processes, so that they can run inside a namespace.

`burst` prints one Tally as JSON. `steady` runs until its standard input ends; each line that it reads there ends a period,
which it prints as a line of JSON.
"""

import argparse
import asyncio
import sys

import msgspec

from fairlead.probe.burst import burst
from fairlead.probe.steady import Steady


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fairlead.probe", description=__doc__)
    parser.add_argument("load", choices=["burst", "steady"])
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for a new connection; burst: 1, steady: 0.4")
    parser.add_argument("--callers", type=int, default=5)
    parser.add_argument("--open", type=int, default=20, help="connections kept open")
    arguments = parser.parse_args()
    if arguments.load == "burst":
        tally = burst(
            arguments.address,
            arguments.port,
            connections=arguments.connections,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout or 1.0,
        )
        sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")
        return
    steady = Steady(
        arguments.address,
        arguments.port,
        callers=arguments.callers,
        timeout_s=arguments.timeout or 0.4,
        open_connections=arguments.open,
    )
    asyncio.run(_steady(steady))


async def _steady(load: Steady) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    task = asyncio.ensure_future(load.run())
    try:
        while await lines.readline():
            sys.stdout.buffer.write(msgspec.json.encode(load.take()) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    main()
