"""The command by which this program was started, so that commands in messages can be copied.

In: `sys.argv[0]` and $PATH. Out: `fairlead` if a shell finds this program by that name, otherwise
the path that was entered."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM, PLUGIN = "fairlead", "kubectl-fairlead"


def called(arguments: str = "", *, argv: Sequence[str] = sys.argv) -> str:
    """Return a command line of this program with these arguments: `.venv/bin/fairlead lab down`."""
    return f"{_program(argv[0])} {arguments}".strip()


def _program(path: str) -> str:
    if Path(path).name == PLUGIN:
        return "kubectl fairlead"
    if Path(path).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m fairlead"
    found = shutil.which(PROGRAM)
    # If the name differs, another program uses this package, for example a test.
    if Path(path).name != PROGRAM or (found and os.path.realpath(found) == os.path.realpath(path)):
        return PROGRAM
    return shlex.quote(path)
