"""Logs, set up here once. Metrics are declared by their owners, in the modules `metrics`.

Logs are events with keys, one line each: key=value on a terminal, JSON elsewhere. Metrics are
collected when a scrape asks, from what is there then, so that no pass of a loop pays for them; each
role has a registry of its own (`web.View`). They are collected in a thread: what others change
meanwhile is copied first, in one step."""

import logging
import sys

import structlog


def configure_logging(verbose: bool = False) -> None:
    """Send structlog's and the standard library's records to standard error in one form."""
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
