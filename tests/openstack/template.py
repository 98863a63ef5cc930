"""Create the data directory that databases of OpenStack's services start from: `python -m
tests.openstack.template`.

In: the services' own migrations. Out: the directory that `places.template` names, either complete
or absent. When its inputs change, another directory is created, and the old one stays for the tree
that uses it. Invariant: a server that started from a copy of it had every schema and Keystone's
administrator. Only one process at a time creates it."""

import fcntl
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.openstack import places, settings
from tests.openstack.database import PID_FILE, Database
from tests.openstack.keystone import make_keys
from tests.openstack.processes import Processes, run

from fairlead.errors import Refused, Unavailable

ATTEMPTS = 2
FIX = "run `make clean-cache`, then `make setup`"


def main() -> None:
    try:
        place = places.template_of_now()
        places.CACHE.mkdir(parents=True, exist_ok=True)
        with (places.CACHE / ".openstack-data.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                make(place, migrate)
    except (Refused, Unavailable) as error:
        sys.exit(f"setup: {error}")


def make(place: Path, fill: Callable[[Database], None]) -> None:
    """Create the directory `place`, with what `fill` writes to the databases. Raise Unavailable
    if it is incomplete after ATTEMPTS attempts; `place` does not exist then."""
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".data") as name:
            database = Database(Path(name))
            try:
                database.bootstrap()
                write(database, fill)
                check(database.data)
            except Unavailable as error:
                if attempt == ATTEMPTS:
                    raise Unavailable(
                        f"{place} could not be made: {error.message}", fix=FIX
                    ) from error
                print(f"setup: making it again: {error.message}", flush=True)
                continue
            database.data.rename(place)
            return


def write(database: Database, fill: Callable[[Database], None]) -> None:
    """Start a server on the data, and shut it down after `fill`."""
    processes = Processes(database.directory)
    try:
        database.start(processes)
        fill(database)
        database.shut_down()
    finally:
        processes.end()


def check(data: Path) -> None:
    """Raise Unavailable if a server that starts from a copy of this data lacks a schema or
    Keystone's administrator, or would have to recover them."""
    if (data / PID_FILE).exists():
        raise Unavailable(f"MariaDB was not shut down cleanly: {PID_FILE} is left")
    # Not beside the data: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="fairlead-") as name:
        copy, processes = Database(Path(name)), Processes(Path(name))
        copy.copy(data)
        try:
            copy.start(processes)
            program = (places.python(), "-W", "ignore", "-m", "tests.openstack.servers.content")
            missing = run([*program, copy.url("")], copy.directory)
        finally:
            processes.end()
    if missing:
        raise Unavailable(f"the databases lack {', '.join(missing.splitlines())}")


def migrate(database: Database) -> None:
    """Create each service's schema with its own program, and Keystone's administrator."""
    directory = database.directory
    make_keys(directory)
    password = ("--bootstrap-password", settings.ADMIN_PASSWORD)
    for service, *command in (
        ("octavia", "octavia-db-manage", "upgrade", "head"),
        ("neutron", "neutron-db-manage", "upgrade", "head"),
        ("keystone", "keystone-manage", "db_sync"),
        ("keystone", "keystone-manage", "bootstrap", *password),
    ):
        conf = directory / f"{service}.conf"
        own = settings.keystone(directory, database.url(service)) if service == "keystone" else {}
        conf.write_text(
            settings.text(settings.merged({"database": {"connection": database.url(service)}}, own))
        )
        program, *arguments = command
        run([places.python().with_name(program), "--config-file", conf, *arguments], directory)


if __name__ == "__main__":
    main()
