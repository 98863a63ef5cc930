"""The command `fairlead doctor` on a node of a lab, and faults for it.

In: options. Out: the exit status and the findings; a failed test if others are found."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.e2e.kubectl import Kubectl

from fairlead.lab import process
from fairlead.lab.site import Site

PROGRAM = Path(sys.executable).with_name("fairlead")
DEADLINE_S = 90.0
GRACE = ("--grace", "1")
"""Faults are reported soon."""


Manifest = dict[str, Any]


def pod(name: str, app: str, node: str, *, port: str = "web", grace_s: int = 2) -> Manifest:
    """Return a pod with one port, 8080."""
    ports = [{"name": port, "containerPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": app}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": grace_s,
            "containers": [{"name": "echo", "image": "echo", "ports": ports}],
        },
    }


async def apply(kubectl: Kubectl, *objects: Manifest) -> None:
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


class Fault(NamedTuple):
    """A fault: the finding that it has, the objects that it consists of, and the commands of
    kubectl that make it. `fix`: the commands of kubectl that remove it; empty: the remedy of the
    finding is executed."""

    id: str
    objects: Sequence[Manifest]
    make: Sequence[Sequence[str]] = ()
    fix: Sequence[Sequence[str]] = ()
    object: str = "Service default/web"
    options: Sequence[str] = ()

    async def play(self, doctor: "Doctor", kubectl: Kubectl) -> None:
        """Make the fault, check that it is named and nothing else, remove it, and check that
        nothing is named."""
        await apply(kubectl, *self.objects)
        await doctor.site.await_pods()
        for command in self.make:
            await kubectl(*command)
        (found,) = await doctor.finds([(self.id, self.object)], *self.options)
        if self.fix:
            for command in self.fix:
                await kubectl(*command)
        else:
            await doctor.carry_out(found)
        await doctor.finds([], *self.options)


class Doctor:
    """The command, on a node of the lab."""

    def __init__(self, site: Site) -> None:
        self.site = site

    async def __call__(self, *options: str) -> tuple[int, str]:
        """Run the command. Return its exit status and its output."""
        kubeconfig = str(self.site.directory.kubeconfig_inside)
        command = [str(PROGRAM), "doctor", "--kubeconfig", kubeconfig, *options]
        status, output, errors = await self.site.exec("node1", command, timeout_s=120)
        assert "Traceback" not in errors, errors
        return status, output

    async def findings(self, *options: str) -> list[dict[str, Any]]:
        status, output = await self("-o", "json", *options)
        report = json.loads(output)
        assert status == (1 if report["findings"] else 0)
        found: list[dict[str, Any]] = report["findings"]
        return found

    async def finds(self, wanted: Sequence[tuple[str, str]], *options: str) -> list[dict[str, Any]]:
        """Wait until the command finds exactly this. Return the findings."""
        found: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    found = await self.findings(*GRACE, *options)
                    if [(each["id"], each["object"]) for each in found] == list(wanted):
                        return found
        except TimeoutError:
            pytest.fail(f"wanted {wanted}, found {json.dumps(found, indent=1)}")

    async def carry_out(self, finding: dict[str, Any]) -> None:
        """Execute the remedy of a finding, which is a command."""
        remedy = finding["remedy"]
        child = await asyncio.create_subprocess_exec(
            "sh",
            "-ec",
            remedy,
            env=process.environment(self.site.name, "remedy")
            | {"KUBECONFIG": str(self.site.directory.kubeconfig), "PATH": os.environ["PATH"]},
        )
        assert await child.wait() == 0, remedy
