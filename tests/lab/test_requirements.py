"""The requirements of a lab are checked by trying them. All missing ones are reported together, and
the check leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

from fairlead.invocation import called
from fairlead.lab import namespace, requirements

FAIRLEAD = Path(sys.executable).with_name("fairlead")


async def test_this_machine_meets_all_requirements_and_the_check_leaves_nothing() -> None:
    await requirements.check()
    assert namespace.names(f"flcheck-{os.getpid()}") == ()


def test_missing_requirements_and_the_commands_that_work_without_them_are_named(
    lab_name: str,
) -> None:
    # Root without CAP_NET_ADMIN: it cannot configure networks.
    command = [
        "setpriv",
        "--bounding-set=-net_admin",
        str(FAIRLEAD),
        "lab",
        "up",
        "--name",
        lab_name,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        _, output = up.communicate(timeout=60)
    assert up.returncode == 1, output
    assert "lacks what a lab needs" in output
    assert "bridge and veth devices" in output
    assert "nftables with NAT" in output
    assert f"`{called('plan', argv=[str(FAIRLEAD)])}` works without these" in output
    assert "Traceback" not in output
    assert namespace.names(f"flcheck-{up.pid}") == ()
    assert namespace.names(f"fl-{lab_name}-") == ()
