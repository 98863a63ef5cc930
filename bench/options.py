"""What the benchmarks are told, and how they say what they have found, all in the same words."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from bench.subject import ROOT

from fairlead.errors import FairleadError

Report = TypeVar("Report", bound=msgspec.Struct)


def options(
    module: str, purpose: str | None, *, rounds: int, quick: str, plots: bool = True
) -> argparse.ArgumentParser:
    """Rounds, a quick run, the form of the output, and where plots are to be written if there are
    any."""
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
            "--plots", type=Path, metavar="FOLDER", help="write SVG files there too"
        )
    return parser


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """How large the cluster is, and where it is kept between runs."""
    parser.add_argument("--services", type=int, default=10_000)
    parser.add_argument("--endpoints", type=int, default=10, help="of each Service")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")


def tell(what: str) -> None:
    """Say how far it is: not among the tables."""
    print(f"bench: {what}", file=sys.stderr, flush=True)


def give_out(
    asked: argparse.Namespace,
    measure: Callable[[], Report],
    show: Callable[[Report], None],
    plots: Callable[[Report], Mapping[str, str]] | None = None,
) -> None:
    """Measure, and give out what was found in the form that was asked for. A FairleadError ends the
    command, with its text."""
    try:
        found = measure()
    except FairleadError as error:
        raise SystemExit(f"bench: {error}") from error
    if plots and asked.plots:
        write_plots(asked.plots, plots(found))
    if asked.output == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found)


def write_plots(folder: Path, plots: Mapping[str, str]) -> None:
    """Write each picture to the file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in plots.items():
        (folder / f"{name}.svg").write_text(text)
