"""A flood of health ports: `python flooding.py SOURCE PORT...`, until its standard input is closed.

In turn to each port: connections that ask a megabyte of requests and read no answer, connections that ask them and read, ones
that say nothing, ones that send a byte now and then, ones that are closed at once. It says `flooding` once all are there.
"""

import selectors
import socket
import sys
from contextlib import suppress

MEGABYTE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 30_000
DEAF, GREEDY, SILENT, SLOW = 8, 16, 200, 100
BURST = 20
"""Connections that are made and closed again in each round."""


class Caller:
    """One connection that keeps sending, and is made again when it is closed."""

    def __init__(self, source: str, address: tuple[str, int], data: bytes, *, reading: bool, at_once: int) -> None:
        self._source, self._address, self._data = source, address, data
        self._reading, self._at_once = reading, at_once
        self._socket = self._connect()
        self._left = data

    def _connect(self) -> socket.socket:
        made = socket.socket()
        made.bind((self._source, 0))
        made.connect(self._address)
        made.setblocking(False)
        return made

    def go_on(self) -> None:
        try:
            if self._reading:
                with suppress(BlockingIOError):
                    if not self._socket.recv(1 << 20):
                        raise ConnectionResetError
            with suppress(BlockingIOError):
                self._left = self._left[self._socket.send(self._left[: self._at_once]) :] or self._data
        except OSError:
            self._socket.close()
            self._socket, self._left = self._connect(), self._data


def main(source: str, *ports: str) -> None:
    addresses = [("127.0.0.1", int(port)) for port in ports]
    callers: list[Caller] = []
    for address in addresses:
        callers += [Caller(source, address, MEGABYTE, reading=False, at_once=1 << 20) for _ in range(DEAF)]
        callers += [Caller(source, address, MEGABYTE, reading=True, at_once=1 << 20) for _ in range(GREEDY)]
        callers += [Caller(source, address, b"", reading=True, at_once=0) for _ in range(SILENT)]
        callers += [Caller(source, address, MEGABYTE, reading=True, at_once=1) for _ in range(SLOW)]
    print("flooding", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not selector.select(0):
            for caller in callers:
                caller.go_on()
            for address in addresses:
                for _ in range(BURST):
                    with suppress(OSError), socket.socket() as made:
                        made.bind((source, 0))
                        made.connect(address)


if __name__ == "__main__":
    main(*sys.argv[1:])
