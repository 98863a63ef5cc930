"""HTTP ports under floods. The tests count the work of each turn, with real connections between
loopback addresses."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus

import pytest

from fairlead.net.httpport import (
    ACCEPTS,
    IDLE_S,
    LINGER_S,
    REQUEST_S,
    STEPS,
    SWEEP_S,
    Limits,
    Ports,
)
from fairlead.net.httprequest import MAX_BYTES, Answer, Request, read_request

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MEGABYTE = REQUEST * (1_000_000 // len(REQUEST))
FLOODER, OTHER = "127.0.0.2", "127.0.0.3"
MANY_TURNS = 10_000
FEW_TURNS = 4
"""The maximum number of turns until a request is answered. The kernel reports the request after the
steps of a turn, and each of two sources gets its share of the STEPS steps."""


class Server:
    """One open port. Its clock stands still unless a test advances it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now_s = 0.0
        self.ports = Ports(
            lambda number, request: Answer(HTTPStatus.OK, b"{}"),
            limits=limits,
            clock=lambda: self.now_s,
        )
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            self.number = int(probe.getsockname()[1])
        self.ports.open(self.number)
        self._callers: list[socket.socket] = []

    def close(self) -> None:
        self.ports.close_all()
        for each in self._callers:
            each.close()

    def connect(self, source: str) -> socket.socket:
        made = socket.socket()
        self._callers.append(made)
        made.bind((source, 0))
        made.connect(("127.0.0.1", self.number))
        made.setblocking(False)
        if len(self._callers) % 100 == 0:
            # The accept queue of the port is short.
            self.turn()
            self.turn()
        return made

    def turn(self) -> int:
        """Run one turn. Return how many requests it answered."""
        turn = self.ports.turn(0.0)
        assert turn.accepted <= ACCEPTS
        assert turn.answered <= turn.steps <= STEPS
        return turn.answered

    def rest(self) -> None:
        """Run turns until there is nothing left to do."""
        while self.ports.turn(0.0) != (0, 0, 0):
            pass

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.turn()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def small() -> Iterator[Server]:
    """A server with limits that few connections reach."""
    made = Server(Limits(per_source=8, per_source_per_port=0, total=16, total_per_port=0))
    yield made
    made.close()


class Flood:
    """Connections that all send the same data as fast as the server reads it. `reading`: whether
    they read the answers."""

    def __init__(self, callers: Sequence[socket.socket], data: bytes, *, reading: bool) -> None:
        self._left = dict.fromkeys(callers, data)
        self._reading = reading

    def send(self) -> None:
        for each, data in self._left.items():
            with suppress(OSError):
                self._left[each] = data[each.send(data) :]
            if self._reading:
                with suppress(OSError):
                    each.recv(1 << 20)


def turns_until_answered(server: Server, caller: socket.socket, flood: Flood) -> int:
    for count in range(1, MANY_TURNS):
        flood.send()
        server.turn()
        with suppress(BlockingIOError):
            assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")
            return count
    raise AssertionError("no answer")


def is_open(caller: socket.socket) -> bool:
    try:
        return bool(caller.recv(1 << 20))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("connections", [1, 200])
def test_a_megabyte_of_requests_delays_another_source_by_few_turns(
    server: Server, connections: int, reading: bool
) -> None:
    flood = Flood([server.connect(FLOODER) for _ in range(connections)], MEGABYTE, reading=reading)
    while server.ports.connections < connections:
        flood.send()
        server.turn()
    for _ in range(20):
        other = server.connect(OTHER)
        other.send(REQUEST)
        assert turns_until_answered(server, other, flood) <= FEW_TURNS


def test_another_connection_of_the_same_source_waits_for_one_request_of_each(
    server: Server,
) -> None:
    """Clients share an address if, for example, a network plug-in masquerades pods and a gateway to
    the address of their node."""
    flood = Flood([server.connect(FLOODER) for _ in range(200)], MEGABYTE, reading=True)
    for _ in range(20):
        flood.send()
        server.turn()
    other = server.connect(FLOODER)
    other.send(REQUEST)
    # The 200 connections and this one get one step each, and a step may find nothing to read.
    assert turns_until_answered(server, other, flood) <= 2 * 201 // STEPS + FEW_TURNS


def test_a_source_at_its_limit_does_not_affect_another_and_its_next_connection_is_answered(
    small: Server,
) -> None:
    other = small.connect(OTHER)
    small.rest()
    flooders = [small.connect(FLOODER) for _ in range(50)]
    small.rest()
    assert small.ports.connections == 8 + 1
    assert is_open(other)
    assert [is_open(each) for each in flooders] == [False] * 42 + [True] * 8
    newest = small.connect(FLOODER)
    newest.send(REQUEST)
    small.rest()
    assert newest.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert is_open(other)


def test_at_the_total_limit_the_source_with_most_connections_loses_one(small: Server) -> None:
    other = small.connect(OTHER)
    flooders = [small.connect(f"127.0.1.{source}") for source in range(1, 11) for _ in range(4)]
    small.rest()
    assert small.ports.connections == 16
    assert is_open(other)
    assert sum(map(is_open, flooders)) == 15


def test_one_connection_each_from_many_sources_does_not_block_a_new_one(small: Server) -> None:
    for source in range(1, 101):
        small.connect(f"127.0.1.{source}").send(b"GET / HT")
    small.rest()
    other = small.connect(OTHER)
    other.send(REQUEST)
    small.rest()
    assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert small.ports.connections == 16


def test_the_connection_that_was_answered_last_is_closed_last(small: Server) -> None:
    first, *later = [small.connect(FLOODER) for _ in range(8)]
    small.rest()
    first.send(REQUEST)
    small.rest()
    assert first.recv(4096)
    small.connect(FLOODER)
    small.rest()
    assert [is_open(each) for each in (first, *later)] == [True, False, *[True] * 6]


def test_a_slow_or_silent_client_and_one_that_reads_no_answer_are_closed(server: Server) -> None:
    silent, slow, answered, deaf = (server.connect(OTHER) for _ in range(4))
    answered.send(REQUEST)
    flood = Flood([deaf], MEGABYTE * 10, reading=False)
    for _ in range(2000):
        flood.send()
        server.turn()
    for byte in b"GET / ":
        slow.send(bytes([byte]))
        server.pass_s(REQUEST_S / 8)
    assert server.ports.connections == 4
    server.pass_s(REQUEST_S / 4 + SWEEP_S)
    assert [is_open(each) for each in (silent, slow, answered)] == [False, False, True]
    assert server.ports.connections == 1
    server.pass_s(IDLE_S)
    assert server.ports.connections == 0


def test_data_after_the_last_request_is_discarded_and_the_answer_arrives(
    server: Server,
) -> None:
    caller = server.connect(OTHER)
    caller.send(b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000)
    server.rest()
    assert caller.recv(4096).startswith(b"HTTP/1.1 431 ")
    assert caller.recv(4096) == b""
    server.pass_s(LINGER_S + SWEEP_S)
    assert server.ports.connections == 0


def test_one_port_of_many_that_are_flooded_is_served(server: Server) -> None:
    """The server accepts new connections of all ports in turn."""
    flooders = [server.connect(FLOODER) for _ in range(99)]
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        number = int(probe.getsockname()[1])
    server.ports.open(number)
    with socket.socket() as other:
        other.connect(("127.0.0.1", number))
        other.send(REQUEST)
        other.setblocking(False)
        assert (
            turns_until_answered(server, other, Flood(flooders, REQUEST, reading=True)) <= FEW_TURNS
        )


def test_an_incomplete_request_is_parsed_a_bounded_number_of_times() -> None:
    assert read_request(b"x" * (MAX_BYTES - 1)) == "incomplete"
    assert read_request(b"x" * MAX_BYTES) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    assert read_request(b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n") == (
        Request("GET", "/"),
        5036,
        False,
    )


def test_an_end_of_stream_that_arrives_with_a_request_is_noticed(server: Server) -> None:
    caller = server.connect(OTHER)
    caller.send(REQUEST)
    caller.shutdown(socket.SHUT_WR)
    server.rest()
    assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert caller.recv(4096) == b""
    assert server.ports.connections == 0
