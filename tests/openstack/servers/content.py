"""What the databases of OpenStack's services lack.

In: SQLAlchemy's URL of their server. Out: one line for each thing that is missing. Runs in
OpenStack's environment: `python -m tests.openstack.servers.content URL`."""

import sys
from importlib.util import find_spec
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

MIGRATIONS = {
    "octavia": "db/migration/alembic_migrations",
    "neutron": "db/migration/alembic_migrations",
    "keystone": "common/sql/migrations",
}
"""The folder of each service's migrations within its package."""
_ROLES = """
    select 1 from {table} held
    join role on role.id = held.role_id
    join local_user who on who.user_id = held.actor_id
    {project}
    where role.name = 'admin' and who.name = 'admin'"""
ADMINISTRATOR = {
    "the user admin": "select 1 from local_user where name = 'admin'",
    "the project admin": "select 1 from project where name = 'admin'",
    "the role of admin in the project admin": _ROLES.format(
        table="assignment",
        project="join project on project.id = held.target_id and project.name = 'admin'",
    ),
    "the role of admin in the system": _ROLES.format(table="system_assignment", project=""),
}
"""What `keystone-manage bootstrap` writes, and the query that returns a row if it is there."""


def main() -> None:
    engine = create_engine(sys.argv[1])

    def query(database: str, statement: str) -> set[str]:
        with engine.connect() as connection:
            connection.execute(text(f"use {database}"))
            return {str(row[0]) for row in connection.execute(text(statement))}

    for service, folder in MIGRATIONS.items():
        wanted = heads(service, folder)
        try:
            found = query(service, "select version_num from alembic_version")
        except SQLAlchemyError as error:
            print(f"{service}'s schema: {error.__cause__}")
            continue
        if found != wanted:
            print(f"{service}'s schema: its versions are {sorted(found)}, not {sorted(wanted)}")
        if service == "keystone":
            for name, statement in ADMINISTRATOR.items():
                if not query(service, statement):
                    print(f"Keystone's bootstrap: {name}")


def heads(package: str, folder: str) -> set[str]:
    """Return the newest versions of the package's schema, one for each branch of its migrations."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    scripts = Path(spec.submodule_search_locations[0], folder)
    folders = sorted({str(each.parent) for each in (scripts / "versions").rglob("*.py")})
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(folders))
    return set(ScriptDirectory.from_config(config).get_heads())


if __name__ == "__main__":
    main()
