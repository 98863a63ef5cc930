"""The chart for the tests, rendered by the real helm."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart" / "fairlead"
PRESETS = sorted((CHART / "presets").glob("*.yaml"))
VALUES = [*sorted((CHART / "ci").glob("*-values.yaml")), *PRESETS]
EVERYTHING = CHART / "ci" / "everything-values.yaml"
NAMESPACE = "fairlead-system"

Manifest = dict[str, Any]


def run(helm: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm with its own home directory, so that settings of this machine have no effect."""
    home = {f"HELM_{name}_HOME": "/nonexistent" for name in ("CONFIG", "CACHE", "DATA")}
    return subprocess.run(
        [helm, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", **home},
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


def capabilities(objects: Sequence[Manifest], role: str) -> list[str]:
    """Return the capabilities that a role's container adds, such as `NET_ADMIN`."""
    (container,) = pod_spec(objects, role)["containers"]
    given = container["securityContext"]["capabilities"]
    assert given["drop"] == ["ALL"]
    return list(given.get("add", []))
