"""A burst of connections tells a server that answers late from packets that are lost."""

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from fairlead.probe.burst import Tally, burst
from fairlead.probe.exchange import Answer

ANSWER = msgspec.json.encode(Answer(pod="pod", node="node", peer="127.0.0.1"))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket whose queue has room for one connection; the kernel drops the packets of
    further ones."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def answer_late(server: socket.socket, after_s: float) -> None:
    """Answer one request as an echo server does, after this time."""
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        time.sleep(after_s)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)


def run(server: socket.socket, connections: int, patience_s: float) -> Tally:
    """Open the connections at once, with a short timeout for their establishment."""
    return burst(
        "127.0.0.1",
        server.getsockname()[1],
        connections=connections,
        concurrency=connections,
        timeout_s=0.2,
        patience_s=patience_s,
    )


def test_a_late_answer_on_an_established_connection_counts(listener: socket.socket) -> None:
    thread = threading.Thread(target=answer_late, args=(listener, 0.5))
    thread.start()
    tally = run(listener, 1, 10)
    thread.join()
    assert (tally.requests, tally.answered, tally.failures) == (1, 1, {})
    assert tally.took_s >= 0.5


def test_failures_say_whether_the_connection_was_established(listener: socket.socket) -> None:
    """The server accepts no connection: one is established in its queue, and the kernel drops the
    packets of the others."""
    tally = run(listener, 5, 0.4)
    assert (tally.requests, tally.answered) == (5, 0)
    assert tally.failures == {"not answered": 1, "not established": 4}
