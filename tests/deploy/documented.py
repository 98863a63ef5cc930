"""The commands of the README and of docs/install.md, executed like by a reader.

In: a document, the heading of a section, and a cluster. Out: the output of the commands; the test
fails when a command fails or hangs."""

import asyncio
import os
import re
from pathlib import Path

from tests.deploy.chart import DEPLOY

from fairlead.kube.access import Access
from fairlead.lab import settings

INSTALL, README = DEPLOY.parent / "docs" / "install.md", DEPLOY.parent / "README.md"
TIMEOUT_S = 60.0


def commands_of(section: str, document: Path = INSTALL) -> list[str]:
    """Return the blocks of commands in a section, in order."""
    _, found, text = document.read_text().partition(f"\n## {section}\n")
    assert found, f"{document.name} has no section {section}"
    return re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], flags=re.DOTALL)


class Reader:
    """A reader who follows the document as the cluster's administrator, in a folder with the tree's
    `deploy`."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        (folder / "administrator").write_text(settings.kubeconfig("documented", access))
        (folder / "deploy").symlink_to(DEPLOY)

    async def run(self, commands: str) -> str:
        """Run the commands; return their output and errors."""
        child = await asyncio.create_subprocess_exec(
            *("sh", "-euc", commands),
            cwd=self._folder,
            env=os.environ | {"KUBECONFIG": str(self._folder / "administrator")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said = (await child.communicate())[0].decode()
        finally:
            if child.returncode is None:
                child.kill()
        assert child.returncode == 0, said
        return said
