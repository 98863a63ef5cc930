"""kubectl, and manifests of Services as users write them.

In: command lines; the fields of a Service. Out: what kubectl prints, and a failed test when it does
not do as expected."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fairlead.lab import process

TIMEOUT_S = 60.0


class Kubectl:
    """kubectl with a kubeconfig. `lab`: the mark by which the lab recognizes the processes."""

    def __init__(self, kubeconfig: Path, lab: str) -> None:
        self._kubeconfig = kubeconfig
        self._lab = lab

    async def __call__(self, *arguments: str, stdin: str = "", fails: bool = False) -> str:
        command = ["kubectl", "--kubeconfig", str(self._kubeconfig), *arguments]
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=process.environment(self._lab, "kubectl"),
        )
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await child.communicate(stdin.encode())
        assert (child.returncode != 0) == fails, (
            f"{' '.join(arguments)}: {errors.decode()}{output.decode()}"
        )
        return (errors if fails else output).decode()

    async def apply(self, name: str, **fields: Any) -> None:
        """Apply a Service; `annotations` go into its metadata, everything else into its spec."""
        await self("apply", "-f", "-", stdin=yaml.safe_dump(service(name, **fields)))

    async def service(self, name: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = json.loads(await self("get", "service", name, "-o", "json"))
        return answer


def service(
    name: str, *, annotations: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    fields = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "web"},
        "ports": [{"name": "web", "port": 80, "targetPort": "web"}],
    } | spec
    kept = {key: value for key, value in fields.items() if value is not None}
    metadata = {"name": name, "annotations": dict(annotations or {})}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": kept}


def addresses_of(shown: Mapping[str, Any]) -> list[str]:
    return [entry["ip"] for entry in shown["status"]["loadBalancer"].get("ingress", ())]
