"""Messages name the program as it was called; see `tests/cli/test_lab.py` for the commands that
print them."""

import sys
from pathlib import Path

import pytest

from fairlead.invocation import called

PROGRAM = Path(sys.executable).with_name("fairlead")


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (".venv/bin/fairlead", ".venv/bin/fairlead lab down"),
        ("/opt/a folder/fairlead", "'/opt/a folder/fairlead' lab down"),
        (str(PROGRAM.with_name("kubectl-fairlead")), "kubectl fairlead lab down"),
        ("/somewhere/fairlead/__main__.py", f"{sys.executable} -m fairlead lab down"),
        ("/usr/bin/pytest", "fairlead lab down"),
    ],
)
def test_a_command_in_a_message_can_be_copied(typed: str, command: str) -> None:
    assert called("lab down", argv=[typed]) == command
