"""The command of a process that a gateway starts, and that loads no more than it needs.

Two libraries load modules that they can do without, and that no such process uses. They are marked
as absent (`sys.modules`) before anything else is loaded, as in a Python that was built or installed
without them. The gateway itself needs both."""

import sys
from collections.abc import Sequence

ABSENT = ("ssl", "typing_extensions")
"""asyncio needs the first one for TLS only, and msgspec the second one for older versions of Python
only. Each takes 1.4 MiB."""


def small_process(module: str, *arguments: str) -> Sequence[str]:
    """Return the command that calls `main` of the module. Python loads no modules from the working
    directory."""
    absent = ", ".join(f"{each}=None" for each in ABSENT)
    start = f"import sys; sys.modules.update({absent}); from {module} import main; main()"
    return (sys.executable, "-P", "-c", start, *arguments)
