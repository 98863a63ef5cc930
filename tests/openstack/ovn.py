"""OVN's control plane: both databases and northd, without a hypervisor.

In: a directory. Out: the addresses of the databases, and their rows."""

import json
from pathlib import Path
from typing import Any

from tests.openstack import places
from tests.openstack.processes import Processes, run

from fairlead.lab.ovn.central import plain
from fairlead.lab.ports import free_ports

NORTH, SOUTH = "nb", "sb"


class Ovn:
    """OVN's control plane. Call `start` and `end` once each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = dict(zip((NORTH, SOUTH), free_ports(2), strict=True))
        self._processes = Processes(directory)

    @property
    def north(self) -> str:
        """The address of the northbound database."""
        return f"tcp:127.0.0.1:{self.ports[NORTH]}"

    @property
    def south(self) -> str:
        """The address of the southbound database."""
        return f"tcp:127.0.0.1:{self.ports[SOUTH]}"

    def start(self) -> None:
        schemas = places.OVN / "usr/share/ovn"
        for name in (NORTH, SOUTH):
            here = self.directory / name
            run(
                [
                    places.program("ovsdb-tool"),
                    "create",
                    f"{here}.db",
                    schemas / f"ovn-{name}.ovsschema",
                ],
                self.directory,
            )
            remotes = (f"--remote=punix:{here}.sock", f"--remote=ptcp:{self.ports[name]}:127.0.0.1")
            server = self._processes.start(
                f"ovsdb-{name}",
                [places.program("ovsdb-server"), f"{here}.db", *remotes, *self._own(name)],
            )
            server.await_(here.with_suffix(".sock").exists)
            self.control(name, "init")
        databases = [f"--ovn{name}-db=unix:{self.directory}/{name}.sock" for name in (NORTH, SOUTH)]
        self._processes.start(
            "northd", [places.program("ovn-northd"), *databases, *self._own("northd")]
        )

    def end(self) -> None:
        self._processes.end()

    def control(self, database: str, *command: str) -> str:
        """Return the output of `ovn-nbctl` or `ovn-sbctl`. `database`: NORTH or SOUTH."""
        return run(
            [
                places.program(f"ovn-{database}ctl"),
                f"--db=unix:{self.directory}/{database}.sock",
                "--timeout=120",
                *command,
            ],
            self.directory,
        )

    def rows(self, table: str, *, database: str = NORTH) -> list[dict[str, Any]]:
        """Return all rows of a table: maps as dicts, sets as lists."""
        answer = json.loads(self.control(database, "--format=json", "list", table))
        return [
            dict(zip(answer["headings"], map(plain, row), strict=True)) for row in answer["data"]
        ]

    def _own(self, name: str) -> tuple[str, ...]:
        return (f"--unixctl={self.directory}/{name}.ctl", "--no-chdir", "-vconsole:warn")
