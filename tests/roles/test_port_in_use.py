"""A gateway whose port for health and metrics is not free ends before it changes the host."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.kube.access import Access
from fairlead.lab.settings import kubeconfig

pytestmark = pytest.mark.root

SCRIPT = """
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
"$1" - <<'END' &
import socket, time
taken = socket.create_server(("127.0.0.1", 9441))
time.sleep(60)
END
holder=$!
until ss -Hltn | grep -q :9441; do sleep 0.1; done
timeout 30 "$2" gateway --kubeconfig "$3" --interface lo
echo "status $?"
kill $holder
tc filter show dev lo ingress
ls /sys/fs/bpf
"""


def test_a_port_in_use_is_reported_before_the_program_is_attached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("dead", Access(f"http://127.0.0.1:{port}")))
    fairlead = Path(sys.executable).with_name("fairlead")
    done = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", SCRIPT, "sh", sys.executable, fairlead, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "cannot listen on 127.0.0.1:9441 for health and metrics: Address already in use" in (
        done.stderr
    )
    assert "set --listen, or web.listen in the configuration" in done.stderr
    status, *left = done.stdout.splitlines()
    assert status == "status 1"
    assert set(left) <= {"maps.debug", "progs.debug"}
