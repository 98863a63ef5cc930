"""What the benchmarks are told, all in the same words."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
from bench.subject import ROOT


def options(module: str, purpose: str | None, *, rounds: int, quick: str, plots: bool = True) -> argparse.ArgumentParser:
    """Rounds, a quick run, the form of the output, and where plots are to be written if there are any."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    if plots:
        parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG files there too")
    return parser


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """How large the cluster is, and where it is kept between runs."""
    parser.add_argument("--services", type=int, default=10_000)
    parser.add_argument("--endpoints", type=int, default=10, help="of each Service")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")


def write_plots(folder: Path | None, plots: Mapping[str, str]) -> None:
    """Write each picture to the file of its name."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in plots.items():
            (folder / f"{name}.svg").write_text(text)


def show_json(report: msgspec.Struct) -> None:
    print(json.dumps(msgspec.to_builtins(report)))
