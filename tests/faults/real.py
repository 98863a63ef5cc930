"""The processes of a lab's real API server, which can be killed, restarted unchanged, or restarted
with etcd's data restored from a backup.

In: a lab with a real API server. Out: its processes, stopped and restarted. They keep their command
lines, and so their ports. The restoration follows etcd's disaster recovery: the API server is
stopped, the backup replaces the data, then both start."""

import asyncio
import os
import shutil
from pathlib import Path

from fairlead.errors import Unavailable
from fairlead.lab import process
from fairlead.lab.kubeapiserver import ETCD_LABEL, LABEL, find_program
from fairlead.lab.process import Process
from fairlead.lab.site import Site
from fairlead.lab.topology import CONTROL

CHECK_INTERVAL_S = 0.05
DEADLINE_S = 60.0


class RealServer:
    """kube-apiserver and etcd of one lab."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._commands = {
            label: _command(process.one(site.name, label)) for label in (ETCD_LABEL, LABEL)
        }
        self._backup = site.directory.path / "backup"

    async def kill(self, label: str) -> None:
        await process.one(self._site.name, label).kill()

    def start(self, label: str) -> None:
        self._site.spawn(CONTROL, self._commands[label], label=label)

    async def ready(self) -> None:
        """Return when the API server answers."""
        async with self._site.client() as client, asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await client.request("GET", "/readyz")
                    return
                except Unavailable:
                    await asyncio.sleep(CHECK_INTERVAL_S)

    async def save(self) -> None:
        """Take a backup of etcd."""
        self._backup.unlink(missing_ok=True)
        await self._run(
            "etcdctl",
            "--endpoints",
            self._option("listen-client-urls"),
            "snapshot",
            "save",
            str(self._backup),
        )

    async def restore(self) -> None:
        """Restore etcd from the backup; versions continue from there."""
        for label in (LABEL, ETCD_LABEL):
            await self.kill(label)
        data = Path(self._option("data-dir"))
        await asyncio.to_thread(shutil.rmtree, data)
        await self._run(
            "etcdutl", "snapshot", "restore", str(self._backup), "--data-dir", str(data)
        )
        for label in (ETCD_LABEL, LABEL):
            self.start(label)
        await self.ready()

    async def _run(self, program: str, *arguments: str) -> None:
        code, _, errors = await self._site.exec(CONTROL, [str(find_program(program)), *arguments])
        assert code == 0, f"{program} {' '.join(arguments)} ended with {code}: {errors}"

    def _option(self, name: str) -> str:
        start = f"--{name}="
        return next(
            each.removeprefix(start)
            for each in self._commands[ETCD_LABEL]
            if each.startswith(start)
        )


def _command(running: Process) -> list[str]:
    return [
        os.fsdecode(word)
        for word in Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")[:-1]
    ]
