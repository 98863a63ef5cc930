"""The logs of roles while they are being written.

In: the path of a log. Out: its entries. A process may be writing the last line, so only complete
lines count."""

import json
from pathlib import Path
from typing import Any


def lines_of(log: Path) -> list[str]:
    """Return the complete lines."""
    return log.read_text().rpartition("\n")[0].splitlines()


def entries_of(log: Path) -> list[dict[str, Any]]:
    """Return the entries, without lines that are not JSON objects."""
    return [json.loads(line) for line in lines_of(log) if line.startswith("{")]
