"""The chart for the tests, rendered by the real helm."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart" / "fairlead"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
EVERYTHING = CHART / "ci" / "everything-values.yaml"
NAMESPACE = "fairlead-system"

Manifest = dict[str, Any]


def run(
    helm: Path, *arguments: str | Path, home: Path = Path("/nonexistent")
) -> subprocess.CompletedProcess[str]:
    """Run helm with its own home directory, so that settings of this machine have no effect. A
    command that asks an API server writes its cache there."""
    own = {f"HELM_{name}_HOME": "/nonexistent" for name in ("CONFIG", "CACHE", "DATA")}
    return subprocess.run(
        [helm, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), **own},
    )


def render(helm: Path, *options: str | Path) -> list[Manifest]:
    """Return the objects that helm renders with these values."""
    done = run(
        helm,
        "template",
        "fairlead",
        CHART,
        "--namespace",
        NAMESPACE,
        "--kube-version",
        "1.36.0",
        *options,
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def find(objects: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Return the only object with this kind and name."""
    (found,) = (
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_spec(objects: Sequence[Manifest], role: str) -> Manifest:
    """Return the spec of the pods that run a role."""
    kind = "Deployment" if role == "controller" else "DaemonSet"
    spec: Manifest = find(objects, kind, f"fairlead-{role}")["spec"]["template"]["spec"]
    return spec


def container(objects: Sequence[Manifest], role: str, name: str = "fairlead") -> Manifest:
    """Return a container of the pods that run a role."""
    found: Manifest
    (found,) = (each for each in pod_spec(objects, role)["containers"] if each["name"] == name)
    return found


def capabilities(objects: Sequence[Manifest], role: str, name: str = "fairlead") -> list[str]:
    """Return the capabilities that a container of a role adds, such as `NET_ADMIN`."""
    given = container(objects, role, name)["securityContext"]["capabilities"]
    assert given["drop"] == ["ALL"]
    return list(given.get("add", []))
