"""The real kubectl, in every version on this machine: on the PATH and in the usual folders, moved
by a Debian diversion (`kubectl.distrib`), or with the version in its name (`kubectl-1.20`)."""

import asyncio
import base64
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.lab.apiserver.api import Api, Object

DEADLINE_S = 60
_PLACES = ("/usr/local/bin", "/usr/bin", "/bin", "/snap/bin")
_NAME = re.compile(r"kubectl([-.]?v?\d[\d.]*|\.distrib)?")


class Program(NamedTuple):
    """A kubectl program and its version: `1.20.2`."""

    path: Path
    version: str


MISSING = Program(Path("kubectl"), "")
"""Stands for a missing kubectl, so that its tests fail instead of being skipped."""


class CommandResult(NamedTuple):
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        return [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines() if line.strip()]


class Kubectl:
    """Runs one kubectl against one server, in the test's namespace, with its own home and cache."""

    def __init__(self, program: Program, api: Api, home: Path) -> None:
        self.home = home
        self.api = api
        assert program is not MISSING, (
            "kubectl is needed: apt-get install kubernetes-client, or from dl.k8s.io"
        )
        self.minor = int(program.version.split(".")[1])
        self._command = [str(program.path), f"--cache-dir={home}/cache"]
        config = home / "kubeconfig"
        config.write_text(json.dumps(_kubeconfig(api)))
        self._environment = os.environ | {"HOME": str(home), "KUBECONFIG": str(config)}

    @asynccontextmanager
    async def start(
        self, *arguments: str, **environment: str
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            env=self._environment | environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def run(self, *arguments: str, stdin: str = "", **environment: str) -> CommandResult:
        async with self.start(*arguments, **environment) as process, asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return CommandResult(process.returncode, out.decode(), err.decode())

    async def __call__(self, *arguments: str, stdin: str = "", **environment: str) -> CommandResult:
        """Run a command that must succeed without output on standard error."""
        ran = await self.run(*arguments, stdin=stdin, **environment)
        assert (ran.code, ran.err) == (0, ""), f"kubectl {' '.join(arguments)}: {ran.err}{ran.out}"
        return ran


def _kubeconfig(api: Api) -> Object:
    """Return a kubeconfig for a server, as JSON."""
    access = api.access
    cluster: Object = {"server": access.server}
    if access.authority_pem:
        cluster["certificate-authority-data"] = base64.b64encode(
            access.authority_pem.encode()
        ).decode()
        cluster["tls-server-name"] = access.server_name
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [
            {
                "name": "test",
                "context": {"cluster": "test", "user": "test", "namespace": api.namespace},
            }
        ],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": access.token} if access.token else {}}],
    }


@cache
def installed() -> list[Program]:
    """Return every version of kubectl on this machine, each once."""
    programs = {
        program.version: program for program in map(program_at, dict.fromkeys(_candidates()))
    }
    return list(programs.values())


def _candidates() -> Iterator[Path]:
    for place in [*os.environ.get("PATH", "").split(os.pathsep), *_PLACES]:
        folder = Path(place)
        if folder.is_dir():
            names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
            yield from (
                path.resolve()
                for path in (folder / name for name in names)
                if os.access(path, os.X_OK)
            )


def program_at(path: Path) -> Program:
    """Return the kubectl at a path, with its version."""
    command = [str(path), "version", "--client", "-o", "json"]
    output = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S).stdout
    version = re.match(r"v(\d+\.\d+\.\d+)", json.loads(output)["clientVersion"]["gitVersion"])
    assert version, f"{path} tells no version: {output!r}"
    return Program(path, version[1])
