"""Create the data directory that databases of OpenStack's services start from: `python -m
tests.openstack.template`.

In: the services' own migrations. Out: the directory that `places.template` names, either complete
or absent. When its inputs change, another directory is created, and the old one stays for the tree
that uses it."""

import tempfile
from pathlib import Path

from tests.openstack import places, settings
from tests.openstack.database import Database
from tests.openstack.keystone import make_keys
from tests.openstack.processes import Processes, run

from fairlead.errors import Refused


def main() -> None:
    try:
        places.template()
    except Refused:
        print(
            f"setup: making the databases of OpenStack's services in {places.template_of_now()}",
            flush=True,
        )
        make()


def make() -> None:
    places.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.CACHE, prefix=".data") as name:
        directory = Path(name)
        database, processes = Database(directory), Processes(directory)
        database.bootstrap()
        try:
            database.start(processes)
            migrate(database)
            database.shut_down()
        finally:
            processes.end()
        database.data.rename(places.template_of_now())


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
