"""Databases of OpenStack's services start from complete data only."""

import re
import time
from pathlib import Path

import pytest
from tests.openstack import places, template
from tests.openstack.database import PID_FILE, Database
from tests.openstack.processes import Processes

from fairlead.errors import Unavailable

pytestmark = pytest.mark.usefixtures("openstack_programs")


def test_the_data_are_complete_when_the_server_has_been_shut_down(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.copy(places.template())
    template.write(database, lambda database: None)
    assert not (database.data / PID_FILE).exists()
    template.check(database.data)


def test_data_that_lack_a_version_or_a_role_are_refused(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.copy(places.template())
    template.write(
        database,
        lambda database: database.execute(
            "update octavia.alembic_version set version_num = 'old'",
            "delete from keystone.assignment",
        ),
    )
    with pytest.raises(Unavailable) as caught:
        template.check(database.data)
    assert re.fullmatch(
        r"the databases lack octavia's schema: its versions are \['old'\], not \['\w+'\], "
        "Keystone's bootstrap: the role of admin in the project admin",
        caught.value.message,
    )


def test_data_of_a_server_that_was_killed_are_refused(tmp_path: Path) -> None:
    database, processes = Database(tmp_path), Processes(tmp_path)
    database.copy(places.template())
    database.start(processes)
    # The server creates this file after its socket, on a busy machine long after it.
    while not (database.data / PID_FILE).exists():
        time.sleep(0.01)
    processes.end()
    with pytest.raises(Unavailable, match="not shut down cleanly"):
        template.check(database.data)


def test_incomplete_data_are_made_again_and_then_reported(tmp_path: Path) -> None:
    place = tmp_path / "template"
    made: list[Database] = []
    with pytest.raises(Unavailable, match="octavia's schema") as caught:
        template.make(place, made.append)
    assert len(made) == template.ATTEMPTS
    assert list(tmp_path.iterdir()) == []
    assert "make setup" in caught.value.fix
