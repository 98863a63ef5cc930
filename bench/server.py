"""Pods with many addresses, as the destinations of service proxies: `python -m bench.server`, run
in the namespace that has the addresses.

In: a port, and a file that is created once the port is served. Out: each client receives the
address that it has reached, and nothing else, until the process is killed.
"""

import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

LINGER_NONE = struct.pack("ii", 1, 0)
"""Close with a reset: thousands of connections would leave as many ports in TIME_WAIT."""


def main(port: int, serving: Path) -> None:
    with socket.create_server(("0.0.0.0", port), backlog=4096) as listener:
        serving.touch()
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):  # the client ends it, by a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                connection.send(f"{connection.getsockname()[0]}\n".encode())
                connection.recv(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
