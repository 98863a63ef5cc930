"""What a lab needs is tried out first; what is missing is named all at once, and nothing stays behind."""

import subprocess
import sys
from pathlib import Path

from fairlead.lab import namespace, requirements

FAIRLEAD = Path(sys.executable).with_name("fairlead")


async def test_this_machine_has_all_of_it_and_nothing_is_left() -> None:
    before = namespace.names("")
    await requirements.check()
    assert [name for name in namespace.names("flcheck-") if name not in before] == []


def test_what_is_missing_is_named_and_so_is_what_works_without() -> None:
    # Root, but without the right to configure networks.
    command = ["setpriv", "--bounding-set=-net_admin", str(FAIRLEAD), "lab", "up", "--name", "lesser"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "lacks what a lab needs" in done.stderr
    assert "bridge and veth devices" in done.stderr
    assert "nftables with NAT" in done.stderr
    assert "`fairlead plan` works all the same" in done.stderr
    assert "Traceback" not in done.stderr
    assert namespace.names("flcheck-") == ()
    assert namespace.names("fl-lesser-") == ()
