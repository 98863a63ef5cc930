"""How this program was called, so that the commands in hints can be copied as they are.

In: `sys.argv[0]` and $PATH. Out: `fairlead` where a shell finds this program by that name, else the
path that was typed."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM, PLUGIN = "fairlead", "kubectl-fairlead"


def called(arguments: str = "", *, argv: Sequence[str] = sys.argv) -> str:
    """A command line of this program with these arguments: `.venv/bin/fairlead lab down`."""
    return f"{_program(argv[0])} {arguments}".strip()


def _program(path: str) -> str:
    if Path(path).name == PLUGIN:
        return "kubectl fairlead"
    if Path(path).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m fairlead"
    found = shutil.which(PROGRAM)
    # Another program uses this package, for example a test.
    if Path(path).name != PROGRAM or (found and os.path.realpath(found) == os.path.realpath(path)):
        return PROGRAM
    return shlex.quote(path)
