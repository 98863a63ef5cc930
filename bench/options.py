"""The common command-line options of the benchmarks, and their output."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from bench.subject import ROOT

from fairlead.errors import FairleadError

Report = TypeVar("Report", bound=msgspec.Struct)


def options(
    module: str, purpose: str | None, *, rounds: int, quick: str, plots: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options for rounds, a quick run, the output format and, with
    `plots`, the folder for plots."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=purpose,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    if plots:
        parser.add_argument(
            "--plots", type=Path, metavar="FOLDER", help="also write SVG files to this folder"
        )
    return parser


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options for the size of the cluster and for the folder that keeps it between runs."""
    parser.add_argument("--services", type=int, default=10_000)
    parser.add_argument("--endpoints", type=int, default=10, help="of each Service")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")


def progress(what: str) -> None:
    """Print progress on standard error, so that it does not mix with the tables."""
    print(f"bench: {what}", file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Write warnings to standard error, so that they do not mix with the report."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def run_benchmark(
    arguments: argparse.Namespace,
    measure: Callable[[], Report],
    show: Callable[[Report], None],
    plots: Callable[[Report], Mapping[str, str]] | None = None,
) -> None:
    """Measure and print the report in the requested format. A FairleadError ends the command with
    its text."""
    try:
        found = measure()
    except FairleadError as error:
        raise SystemExit(f"bench: {error}") from error
    if plots and arguments.plots:
        write_plots(arguments.plots, plots(found))
    if arguments.output == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found)


def write_plots(folder: Path, plots: Mapping[str, str]) -> None:
    """Write each plot to the file with its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in plots.items():
        (folder / f"{name}.svg").write_text(text)
