"""Configuration of the logs. Metrics are declared by their owners, in modules named `metrics`.

Each log line is one event with keys: key=value on a terminal, JSON elsewhere. It is written with
one write(2), so that the lines of processes that share a stream, such as a gateway and its prober,
do not mix. Linux guarantees this for files, and for pipes up to 4,096 bytes (PIPE_BUF); a longer
line can be torn only if it does not fit into the pipe because its reader is late.

Metrics are collected when they are scraped, from the state at that time, so that the passes of a
loop do not pay for them. Each role has a registry of its own (`web.View`). Metrics are collected in
a thread: a collector first copies, in one step, data that the event loop changes meanwhile."""

import logging
import sys

import structlog


def configure_logging(verbose: bool = False) -> None:
    """Write the records of structlog and of the standard library to standard error in the same
    form."""
    level = logging.DEBUG if verbose else logging.INFO
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    terminal = sys.stderr.isatty()
    render: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write for each line and its newline, as StreamHandler below does. PrintLoggerFactory
        # writes them separately if Python is unbuffered.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
