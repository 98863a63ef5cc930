"""`fairlead lab`, run as by a user."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.invocation import called
from fairlead.lab import namespace, process
from fairlead.lab.rundir import ROOT

pytestmark = [pytest.mark.long, pytest.mark.root]

FAIRLEAD = str(Path(sys.executable).with_name("fairlead"))
CALLED = called(argv=[FAIRLEAD])
"""The name of the program in messages: its path if a shell does not find it by its name."""
DEADLINE_S = 60
MANIFESTS = """
apiVersion: v1
kind: Pod
metadata: {name: web-1, labels: {app: web}}
spec:
  nodeName: node1
  containers: [{name: web, image: echo, ports: [{name: http, containerPort: 8080}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: http}]}
"""
_numbers = itertools.count(1)


def lab(*arguments: str, text: str = "", status: int = 0) -> str:
    """Run a command. Return its standard output, or its error output if it should fail."""
    command = [FAIRLEAD, "lab", *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def traces(name: str) -> list[str]:
    labels = [running.label for running in process.find(name)]
    return [
        *namespace.names(f"fl-{name}-"),
        *labels,
        *([str(ROOT / name)] if (ROOT / name).exists() else []),
    ]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (
            ["--attach", "xdp"],
            1,
            "loses the packets that a native XDP program sends; give",
        ),
        (["--gateways", "3", "--gateways-on-nodes"], 2, "so --gateways has no effect: give one"),
        (["--far-nodes", "1"], 1, "only through a tunnel; give --tunnel ipip or"),
        (
            ["--far-nodes", "1", "--tunnel", "ipip", "--forwarding", "l2"],
            1,
            "and --forwarding auto",
        ),
        (["--forwarding", "ipip"], 1, "and --tunnel is none; give --tunnel ipip"),
        (["--forwarding", "vxlan", "--tunnel", "ipip"], 1, "give --tunnel vxlan"),
        (["--nodes", "-1"], 1, "a lab cannot have -1 nodes; choose 0 to"),
    ],
)
def test_a_lab_without_traffic_is_refused(options: list[str], status: int, words: str) -> None:
    name = f"refused{os.getpid()}"
    assert words in lab("up", "--name", name, *options, status=status)
    assert not traces(name)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"c{os.getpid()}x{next(_numbers)}"
    yield name
    lab("down", "--name", name)
    assert traces(name) == []


def test_lab_commands_from_up_to_down(name: str) -> None:
    option = ("--name", name)
    output = lab("up", *option, "--nodes", "1", "--gateways", "0", "--no-roles")
    kubeconfig = lab("kubeconfig", *option).strip()
    assert f"KUBECONFIG={kubeconfig}" in output
    assert f"  {CALLED} lab down --name {name}\n" in output
    assert "already" in lab("up", *option, "--no-roles", status=1)
    assert (
        lab("apply", *option, "-f", "-", text=MANIFESTS)
        == "pod/web-1 applied\nservice/web applied\n"
    )
    kubectl = ["kubectl", "--kubeconfig", kubeconfig]
    subprocess.run(
        [*kubectl, "wait", "--for=condition=Ready", "pod/web-1", "--timeout=30s"],
        check=True,
        timeout=DEADLINE_S,
    )
    seen = json.loads(lab("status", *option, "-o", "json"))
    assert [host["name"] for host in seen["hosts"]] == ["control", "node1", "client1"]
    assert [(pod["name"], pod["node"], pod["state"]) for pod in seen["pods"]] == [
        ("web-1", "node1", "ready")
    ]
    table = lab("status", *option)
    assert "web-1   node1   10.244.1.2, 2001:db8:244:1::2   ready" in table
    answer = json.loads(
        lab("exec", *option, "client1", "--", "curl", "-s", "http://10.244.1.2:8080/x")
    )
    assert (answer["pod"], answer["peer"], answer["path"]) == ("web-1", "198.51.100.11", "/x")
    assert lab(
        "exec", *option, "default/web-1", "--", "ip", "-br", "link", "show", "eth0"
    ).startswith("eth0@")
    lab("exec", *option, "node1", "--", "sh", "-c", "exit 7", status=7)
    assert "no host node9" in lab("exec", *option, "node9", "true", status=1)
    assert "cluster is up" in lab("logs", *option, "cluster")
    assert lab("logs", *option, "default/web-1") == ""
    assert "choose one of lab-apiserver" in lab("logs", *option, "nonsense", status=1)
    assert "node1 of lab" in lab("revive", *option, "node1", status=1)
    lab("exec", *option, "node1", "--", "ip", "route", "get", "198.51.100.11")
    assert f"{CALLED} lab kill --name {name} node1" in lab("revive", *option, "node1", status=1)
    lab("kill", *option, "node1")
    assert json.loads(lab("status", *option, "-o", "json"))["hosts"][1]["state"] == "off"
    lab("revive", *option, "node1")
    lab("exec", *option, "node1", "--", "ip", "route", "get", "198.51.100.11")
    assert lab("down", *option) == f"Lab {name} is down.\n"
    assert traces(name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("step", ["node2", "API server", "control plane"])
def test_an_interrupted_up_leaves_nothing(name: str, number: signal.Signals, step: str) -> None:
    command = [FAIRLEAD, "lab", "up", "--name", name, "--nodes", "3", "--no-roles"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as up:
        assert up.stderr is not None
        assert any(f": {step}" in line for line in up.stderr)
        assert traces(name)
        up.send_signal(number)
        up.stderr.read()
        assert up.wait(DEADLINE_S) != 0
    if number == signal.SIGKILL:
        assert traces(name)
        lab("down", "--name", name)
    assert traces(name) == []


def test_without_root_that_is_reported_first(name: str) -> None:
    """The error about missing root privileges is reported first, even if a lab of this name exists:
    without root, it cannot be removed."""
    namespace.create(f"fl-{name}-control")
    # The process becomes another user, by number, that can still read this tree.
    without_root = ["unshare", "--user", "--map-user=65534", "--", FAIRLEAD]
    for command in (
        ["demo", "--name", name],
        ["lab", "up", "--name", name],
        ["lab", "down", "--name", name],
    ):
        done = subprocess.run(
            [*without_root, *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("fairlead: a lab needs root")
        assert f"`{CALLED} plan` works without" in done.stderr


def test_a_missing_lab_or_host_is_reported(name: str) -> None:
    assert f"there is no lab {name}" in lab("status", "--name", name, status=1)
    assert "not a valid lab name" in lab("up", "--name", "No-Such", status=1)
    assert "cannot have 201 nodes" in lab("up", "--nodes", "201", "--name", name, status=1)
    assert lab("down", "--name", name).startswith(f"Lab {name} does not exist.")
