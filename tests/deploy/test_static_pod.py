"""The static pod for the load balancer of the API servers: a kubelet can start it without an API
server, and it becomes ready without one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import CHART, DEPLOY, Manifest, pod_spec, render

from fairlead.config import load
from fairlead.lab import namespace, settings
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.plan.classes import CLASSES

STATIC = DEPLOY / "static"
GATEWAYS = CHART / "ci" / "gateways-values.yaml"
"""Gateways that announce no address, like the static pod."""
MANIFEST = STATIC / "apiserver-balancer.yaml"
DEADLINE_S = 30.0


@pytest.fixture
def spec() -> Manifest:
    found: Manifest = yaml.safe_load(MANIFEST.read_text())["spec"]
    return found


def test_a_real_api_server_accepts_the_static_pod(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(settings.kubeconfig("real", real_apiserver.access))
    command = [
        "kubectl",
        "--kubeconfig",
        str(kubeconfig),
        "apply",
        "--server-side",
        "--dry-run=server",
        "-f",
        str(MANIFEST),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (
        "pod/fairlead-gateway serverside-applied (server dry run)\n",
        "",
    )


def test_the_static_pod_refers_to_no_api_object(spec: Manifest) -> None:
    """The kubelet rejects a static pod that refers to other API objects."""
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} == {
        "hostPath",
        "emptyDir",
    }
    assert spec["automountServiceAccountToken"] is False
    assert not {"serviceAccountName", "imagePullSecrets"} & spec.keys()
    (container,) = spec["containers"]
    assert "envFrom" not in container
    assert [each["valueFrom"] for each in container["env"]] == [
        {"fieldRef": {"fieldPath": "spec.nodeName"}}
    ]


def test_the_static_pod_has_no_more_privileges_than_the_gateways_of_the_chart(
    helm: Path, spec: Manifest
) -> None:
    chart = pod_spec(render(helm, "--values", GATEWAYS), "gateway")
    for each in (spec, chart):
        assert each["hostNetwork"]
        assert not {"hostPID", "hostIPC"} & each.keys()
    assert spec["securityContext"] == chart["securityContext"]
    assert spec["containers"][0]["securityContext"] == chart["containers"][0]["securityContext"]


@pytest.fixture
def inside() -> Iterator[str]:
    """A host without any external connectivity. At the end no process runs in it."""
    name = f"flt-{os.getpid()}-static"
    namespace.create(name)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        said = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout
        for pid in map(int, said.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        namespace.delete(name)


def start(spec: Manifest, name: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start the container's process as in the manifest: its arguments, its capabilities, and only
    /run writable."""
    (container,) = spec["containers"]
    (configuration,) = (
        each["mountPath"] for each in container["volumeMounts"] if each["name"] == "configuration"
    )
    arguments = [
        each.replace(configuration, str(STATIC)).replace("$(NODE_NAME)", "cp1")
        for each in container["args"]
    ]
    bounds = ",".join(
        [
            "-all",
            *(f"+{each.lower()}" for each in container["securityContext"]["capabilities"]["add"]),
        ]
    )
    mounts = 'mount -t tmpfs tmpfs /run; mkdir /run/fairlead; mount -o remount,bind,ro /; exec "$@"'
    program = str(Path(sys.executable).with_name("fairlead"))
    with namespace.inside(name), log.open("wb") as said:
        return subprocess.Popen(
            [
                *("unshare", "--mount", "sh", "-ec", mounts, "sh"),
                *("setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounds),
                *(program, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        )


def answers(name: str, address: str, port: int) -> bool:
    with (
        namespace.inside(name),
        suppress(OSError),
        socket.create_connection((address, port), timeout=1),
    ):
        return True
    return False


@pytest.mark.root
async def test_the_command_of_the_static_pod_starts_the_balancer_without_an_api_server(
    inside: str, spec: Manifest, tmp_path: Path
) -> None:
    api = load(STATIC / "fairlead.yaml", CLASSES).gateway.api_server
    assert api is not None
    log = tmp_path / "log"
    process = start(spec, inside, log)
    async with asyncio.timeout(DEADLINE_S):
        while not all(answers(inside, address, api.port) for address in api.addresses):
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.1)
        while "waiting for access to the API server" not in log.read_text():
            await asyncio.sleep(0.1)
    assert "error" not in log.read_text()
    assert process.poll() is None
    process.kill()
    process.wait()
