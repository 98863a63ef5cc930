"""The logs of roles while they are being written.

In: the path of a log. Out: its entries. A process may be writing the last line, so only complete
lines count; a position in a log is always the begin of a line."""

import json
from pathlib import Path
from typing import Any


def end_of(log: Path) -> int:
    """Return the position after the last complete line."""
    return log.read_text().rfind("\n") + 1


def lines_of(log: Path, start: int = 0) -> list[str]:
    """Return the complete lines from this position on."""
    return log.read_text()[start:].rpartition("\n")[0].splitlines()


def entries_of(log: Path, start: int = 0) -> list[dict[str, Any]]:
    """Return the entries from this position on, without lines that are not JSON objects."""
    return [json.loads(line) for line in lines_of(log, start) if line.startswith("{")]
