"""A private MariaDB for OpenStack's services: with a socket in its directory, no port, no
durability.

In: a directory for its data. Out: the process, and for each service a URL for SQLAlchemy."""

import shutil
import time
from pathlib import Path

from tests.openstack import places
from tests.openstack.processes import POLL_S, Processes, run

SYSTEM_TABLES = Path("/usr/share/mysql")
DATABASES = ("octavia", "neutron", "keystone")

SETTINGS = """\
[mysqld]
datadir={data}
socket={socket}
pid-file={data}/mariadbd.pid
skip-networking
user=root
skip-log-bin
skip-grant-tables
innodb_flush_log_at_trx_commit=0
innodb_buffer_pool_size=64M
innodb_log_file_size=8M
innodb_doublewrite=0
innodb_use_native_aio=0
performance_schema=OFF
max_connections=300
character-set-server=utf8mb4
"""


class Database:
    """`directory` holds its settings, its socket and, in `data`, its data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self._socket = directory / "mariadb.sock"
        self._settings = directory / "mariadb.cnf"

    def url(self, database: str) -> str:
        return (
            f"mysql+pymysql://root@localhost/{database}?unix_socket={self._socket}&charset=utf8mb4"
        )

    def copy(self, template: Path) -> None:
        """Copy the data of the template."""
        shutil.copytree(template, self.data, ignore=shutil.ignore_patterns("ibtmp*"))

    def start(self, processes: Processes) -> None:
        """Start the server, and return when it answers."""
        self._settings.write_text(SETTINGS.format(data=self.data, socket=self._socket))
        started = processes.start(
            "mariadb", [places.program("mariadbd"), f"--defaults-file={self._settings}"]
        )
        started.await_(self._socket.exists)

    def remove(self) -> None:
        """Remove the data. The server must have ended."""
        shutil.rmtree(self.data, ignore_errors=True)

    def shut_down(self) -> None:
        """Stop the server cleanly, so that its data need no recovery."""
        say = (
            "import pymysql, sys; pymysql.connect(unix_socket=sys.argv[1], "
            "user='root').query('shutdown')"
        )
        run([places.python(), "-c", say, self._socket], self.directory)
        while self._socket.exists():
            time.sleep(POLL_S)

    def bootstrap(self) -> None:
        """Create MariaDB's own tables and empty databases."""
        self.data.mkdir()
        self._settings.write_text(SETTINGS.format(data=self.data, socket=self._socket))
        tables = [
            (SYSTEM_TABLES / f"{name}.sql").read_text()
            for name in (
                "mysql_system_tables",
                "mysql_performance_tables",
                "mysql_system_tables_data",
            )
        ]
        statements = [
            "create database mysql;",
            "use mysql;",
            *tables,
            *(f"create database {name};" for name in DATABASES),
        ]
        run(
            [places.program("mariadbd"), f"--defaults-file={self._settings}", "--bootstrap"],
            self.directory,
            input_text="\n".join(statements) + "\n",
        )
