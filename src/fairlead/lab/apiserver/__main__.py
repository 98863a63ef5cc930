"""The API server as a process: `python -m fairlead.lab.apiserver --listen 127.0.0.1:0 --ready-file
PATH`.

In: addresses to listen on, or file descriptors of listening sockets, which the parent process may
have opened in another network namespace. Out: once it serves, a line of JSON in the ready file,
`{"urls": [...], "pid": ...}`. SIGTERM and SIGINT stop it at once, even with open watches.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from fairlead.errors import FairleadError, plain
from fairlead.lab.apiserver.server import ApiServer


@click.command()
@click.option(
    "--listen",
    multiple=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one.",
)
@click.option(
    "--fd",
    "descriptors",
    multiple=True,
    type=int,
    metavar="N",
    help="Inherited listening socket to serve on.",
)
@click.option(
    "--service-cidr", "service_cidrs", multiple=True, default=("10.96.0.0/16",), show_default=True
)
@click.option(
    "--bookmark-interval",
    "bookmark_interval_s",
    default=60.0,
    show_default=True,
    help="Seconds between bookmarks.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="Receives one line of JSON when the server is ready.",
)
def main(
    listen: Sequence[str],
    descriptors: Sequence[int],
    service_cidrs: Sequence[str],
    bookmark_interval_s: float,
    ready_file: Path | None,
) -> None:
    """Serve the Kubernetes API from memory until SIGTERM or SIGINT."""
    try:
        sockets = [socket.socket(fileno=number) for number in descriptors]
        addresses = listen or (() if sockets else ("127.0.0.1:0",))
        asyncio.run(_serve(addresses, sockets, service_cidrs, bookmark_interval_s, ready_file))
    except (FairleadError, OSError) as error:
        sys.exit(f"the API server cannot serve: {plain(error)}")


async def _serve(
    listen: Sequence[str],
    sockets: Sequence[socket.socket],
    service_cidrs: Sequence[str],
    bookmark_interval_s: float,
    ready_file: Path | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with ApiServer(
        listen=listen,
        sockets=sockets,
        service_cidrs=service_cidrs,
        bookmark_interval_s=bookmark_interval_s,
    ) as server:
        line = msgspec.json.encode({"urls": server.urls, "pid": os.getpid()}).decode()
        print(line, flush=True)
        if ready_file is not None:
            _write_atomically(ready_file, line)
        await stop.wait()


def _write_atomically(path: Path, line: str) -> None:
    """Write a draft and rename it, so that a process that waits for the file never reads a part of
    it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(line + "\n", encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main()
