"""The commands of docs/install.md, run as its reader runs them.

In: the heading of a section; a cluster. Out: what the commands print, and a failed test when one
fails or hangs."""

import asyncio
import os
import re
from pathlib import Path

from tests.deploy.chart import DEPLOY

from fairlead.kube.access import Access
from fairlead.lab import settings

TEXT = (DEPLOY.parent / "docs" / "install.md").read_text()
TIMEOUT_S = 60.0


def commands_of(section: str) -> list[str]:
    """The blocks of commands in a section, in their order."""
    _, found, text = TEXT.partition(f"\n## {section}\n")
    assert found, f"docs/install.md has no section {section}"
    return re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], flags=re.DOTALL)


class Reader:
    """Somebody who follows the document, as the cluster's administrator, in a folder with the
    tree's `deploy`."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        (folder / "administrator").write_text(settings.kubeconfig("documented", access))
        (folder / "deploy").symlink_to(DEPLOY)

    async def run(self, commands: str) -> str:
        """What they print, errors too."""
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
