"""A private MariaDB for OpenStack's services: with a socket in its directory, no port, no
durability.

In: a directory for its data. Out: the process, and for each service a URL for SQLAlchemy."""

import shutil
from pathlib import Path

from tests.openstack import places
from tests.openstack.processes import Processes, RunningProcess, run

SYSTEM_TABLES = Path("/usr/share/mysql")
DATABASES = ("octavia", "neutron", "keystone")
PID_FILE = "mariadbd.pid"
"""A file in the data, which the server removes at the end of a clean shutdown."""

SETTINGS = """\
[mysqld]
datadir={data}
socket={socket}
pid-file={data}/{pid_file}
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
        self._server: RunningProcess | None = None

    def url(self, database: str) -> str:
        return (
            f"mysql+pymysql://root@localhost/{database}?unix_socket={self._socket}&charset=utf8mb4"
        )

    def copy(self, template: Path) -> None:
        """Copy the data of the template."""
        shutil.copytree(template, self.data, ignore=shutil.ignore_patterns("ibtmp*"))

    def start(self, processes: Processes) -> None:
        """Start the server, and return when it answers."""
        self._write_settings()
        self._server = processes.start(
            "mariadb", [places.program("mariadbd"), f"--defaults-file={self._settings}"]
        )
        self._server.await_(self._socket.exists)

    def remove(self) -> None:
        """Remove the data. The server must have ended."""
        shutil.rmtree(self.data, ignore_errors=True)

    def execute(self, *statements: str) -> None:
        """Execute SQL statements."""
        say = (
            "import pymysql, sys; connection = pymysql.connect(unix_socket=sys.argv[1], "
            "user='root', autocommit=True); [connection.query(each) for each in sys.argv[2:]]"
        )
        run([places.python(), "-c", say, self._socket, *statements], self.directory)

    def shut_down(self) -> None:
        """Stop the server cleanly, and return when its process has ended. The server removes its
        socket before it writes the last changes to its data."""
        assert self._server is not None
        self.execute("shutdown")
        self._server.await_end()

    def bootstrap(self) -> None:
        """Create MariaDB's own tables and empty databases."""
        self.data.mkdir()
        self._write_settings()
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

    def _write_settings(self) -> None:
        self._settings.write_text(
            SETTINGS.format(data=self.data, socket=self._socket, pid_file=PID_FILE)
        )
