"""The process that answers health checks for a node: `python -m
fairlead.roles.health_check_server`, started by `drivers/healthport`.

In: Updates on a socket that is its standard input. Out: for each Update a Done on the same socket,
and answers on the health ports. It is a separate process, so that no health check waits for a plan,
and no flood of health checks delays a plan. Invariant: it does not outlive the role. When the other
end of the socket is closed, for any reason, it ends, and its ports are closed."""

import gc
import resource
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from fairlead.drivers.health_answers import Done, Health, Update
from fairlead.net.frames import Frames, frame
from fairlead.net.httpport import Ports

WAIT_S = 60.0
CHUNK_BYTES = 1 << 16


def command() -> Sequence[str]:
    """The command that starts this process; Python loads no modules from the working directory."""
    return sys.executable, "-P", "-m", "fairlead.roles.health_check_server"


def carry_out(update: Update, ports: Ports, health: Health) -> dict[int, int]:
    """Close and open ports. Ports are closed first, so that a port can move from one Service to
    another. Return the problems, see `Done`."""
    problems: dict[int, int] = {}
    for number in update.closed:
        ports.close(number)
        health.closed(number)
    for index, opened in enumerate(update.opened):
        try:
            ports.open(opened.number, opened.addresses)
            health.opened(opened)
        except OSError as problem:
            problems[index] = problem.errno or 0
    health.store(update)
    return problems


def serve(role: socket.socket) -> None:
    """Answer until the role has ended."""
    health = Health()
    ports = Ports(health.answer)
    frames = Frames(msgspec.msgpack.Decoder(Update))
    updates, gone = 0, False

    def listen_to_role() -> None:
        nonlocal updates, gone
        try:
            data = role.recv(CHUNK_BYTES)
            for update in frames.take(data):
                updates += 1
                role.sendall(frame(Done(updates, carry_out(update, ports, health))))
                if len(update.opened) > 1:
                    # Otherwise the garbage collector would traverse ten thousand ports repeatedly.
                    gc.freeze()
        except ConnectionError:
            data = b""
        gone = not data

    ports.watch(role.fileno(), listen_to_role)
    while not gone:
        ports.turn(WAIT_S)
    ports.close_all()


def main() -> None:
    # A signal from a terminal is for the role, which ends this process when it is ready.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Each port needs a descriptor; the usual soft limit exists only for programs that use
    # select(2).
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with socket.socket(fileno=sys.stdin.fileno()) as role:
        serve(role)


if __name__ == "__main__":
    main()
