"""Flood HTTP ports until killed: `python bench/flooding.py KIND SOURCE ADDRESS PORT...`.

KIND: `pipelined`, connections that each send a megabyte of requests, and some of which read no
response; `bursts`, connections that are opened and closed one after the other; `many`, connections
that send nothing; `slow`, connections that send one byte at a time; `all`, all of these. SOURCE:
the source address, or `any` for the host's. Prints `flooding` when it begins.
"""

import socket
import sys
from contextlib import suppress

MEGABYTE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 30_000
DEAF, GREEDY, SILENT, SLOW, BURST = 8, 16, 200, 100, 20
"""Connections to each port: DEAF ones read no response, GREEDY ones read; BURST ones are opened in
each round."""
CONNECT_S = 0.1


class Caller:
    """A connection that keeps sending, and is opened again when it is closed."""

    def __init__(
        self, source: str, address: tuple[str, int], data: bytes, *, reading: bool, at_once: int
    ) -> None:
        self._source, self._address, self._data = source, address, data
        self._reading, self._at_once = reading, at_once
        self._socket: socket.socket | None = None
        self._left = data

    def step(self) -> None:
        try:
            if self._socket is None:
                self._socket, self._left = connected(self._source, self._address), self._data
            if self._reading:
                with suppress(BlockingIOError):
                    if not self._socket.recv(1 << 20):
                        raise ConnectionResetError
            with suppress(BlockingIOError):
                self._left = (
                    self._left[self._socket.send(self._left[: self._at_once]) :] or self._data
                )
        except OSError:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def connected(source: str, address: tuple[str, int], wait_s: float = 0.0) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    if source != "any":
        made.bind((source, 0))
    made.settimeout(wait_s)
    with suppress(BlockingIOError, TimeoutError):
        made.connect(address)
    made.setblocking(False)
    return made


def callers_of(kind: str, source: str, address: tuple[str, int]) -> list[Caller]:
    callers: list[Caller] = []
    if kind in ("pipelined", "all"):
        callers += [
            Caller(source, address, MEGABYTE, reading=False, at_once=1 << 20) for _ in range(DEAF)
        ]
        callers += [
            Caller(source, address, MEGABYTE, reading=True, at_once=1 << 20) for _ in range(GREEDY)
        ]
    if kind in ("many", "all"):
        callers += [Caller(source, address, b"", reading=True, at_once=0) for _ in range(SILENT)]
    if kind in ("slow", "all"):
        callers += [Caller(source, address, MEGABYTE, reading=True, at_once=1) for _ in range(SLOW)]
    return callers


def main(kind: str, source: str, host: str, *ports: str) -> None:
    addresses = [(host, int(port)) for port in ports]
    callers = [caller for address in addresses for caller in callers_of(kind, source, address)]
    print("flooding", flush=True)
    while True:
        for caller in callers:
            caller.step()
        for address in addresses if kind in ("bursts", "all") else ():
            for _ in range(BURST):
                with suppress(OSError):
                    connected(source, address, CONNECT_S).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
