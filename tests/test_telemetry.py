"""Processes that share one stream, as a gateway and its prober do, write log lines that a log
collector can parse."""

import json
import os
import socket
import subprocess
import sys

import pytest

WRITER = """
import logging, sys
import structlog
from fairlead.telemetry import configure_logging

lines, length = map(int, sys.argv[1:])
configure_logging()
loggers = structlog.get_logger(), logging.getLogger("asyncio")
for number in range(lines):
    loggers[number % 2].warning("x" * length)
"""
PROCESSES, LINES = 2, 5_000
BUFFERINGS = pytest.mark.parametrize("unbuffered", ["", "1"])


def start(stream: int, unbuffered: str, lines: int, length: int) -> subprocess.Popen[bytes]:
    """Start a process that writes log lines to this stream, through structlog and through the
    standard library in turns."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(lines), str(length)],
        stderr=stream,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )


@BUFFERINGS
def test_two_processes_that_share_a_pipe_write_whole_lines(unbuffered: str) -> None:
    reading, writing = os.pipe()
    children = [start(writing, unbuffered, LINES, 80) for _ in range(PROCESSES)]
    os.close(writing)
    with open(reading) as stream:
        entries = [json.loads(line) for line in stream]
    assert [child.wait() for child in children] == [0] * PROCESSES
    assert [entry["event"] for entry in entries] == ["x" * 80] * PROCESSES * LINES


@BUFFERINGS
@pytest.mark.parametrize("length", [80, 100_000])
def test_a_line_is_one_write(unbuffered: str, length: int) -> None:
    """This also applies to lines that are longer than the buffers of Python. Each write to a
    datagram socket is one datagram."""
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reading:
        with writing:
            child = start(writing.fileno(), unbuffered, 4, length)
        datagrams = [reading.recv(2 * length + 1000) for _ in range(4)]
        assert child.wait() == 0
        assert all(line.endswith(b"\n") for line in datagrams)
        assert [json.loads(line)["event"] for line in datagrams] == ["x" * length] * 4
