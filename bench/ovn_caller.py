"""When does a new connection reach a pod? `python ovn_caller.py ADDRESS PORT POD`, standard library
only, in the network namespace of the client.

In: an address, and the name of a pod that runs the lab's echo server. Out: the line `ready`; then,
after the first answer of this pod, its time by CLOCK_MONOTONIC, and the program ends. A connection
is opened every 2 ms, whether or not earlier ones have been answered. Each is closed with a reset
after its answer, so that no port stays in use."""

import json
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress

EVERY_S = 0.002
LINGER_NONE = struct.pack("ii", 1, 0)


class Caller:
    """Connections to one address."""

    def __init__(self, address: str, port: int) -> None:
        self._target = (address, port)
        self._selector = selectors.DefaultSelector()

    def open(self) -> None:
        """Open a connection."""
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        with suppress(BlockingIOError):
            connection.connect(self._target)
        self._selector.register(connection, selectors.EVENT_WRITE)

    def answers(self, within_s: float) -> list[str]:
        """Return the pods that answer within this time."""
        pods = []
        for key, events in self._selector.select(within_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            answer = b""
            try:
                if events & selectors.EVENT_WRITE:
                    connection.send(b"who\n")
                    self._selector.modify(connection, selectors.EVENT_READ)
                    continue
                answer = connection.recv(4096)
            except OSError:  # refused, or reset
                pass
            self._selector.unregister(connection)
            connection.close()
            if answer:
                pods.append(json.loads(answer)["pod"])
        return pods


def main(address: str, port: int, pod: str) -> None:
    caller = Caller(address, port)
    print("ready", flush=True)
    due_s = time.monotonic()
    while True:
        if (now_s := time.monotonic()) >= due_s:
            caller.open()
            due_s = now_s + EVERY_S
        if pod in caller.answers(max(0.0, due_s - time.monotonic())):
            print(time.monotonic(), flush=True)
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
