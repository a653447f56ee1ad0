"""A real PgBouncer in transaction mode between a test and its server.

    with PgBouncer(database.cluster) as pooler:
        engine = create_engine(pooler.url(database.url("psycopg")), connect_args=...)

The program is the Debian package `pgbouncer`, or whatever is on the PATH. Like PostgreSQL it
refuses to run as root, and like the tests' own server it ends with the process that started it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import make_url

from tests.postgres import _free_port, _Owner
from tests.workers import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.postgres import Server

SERVERS: Final = 2
"""How many connections to the server all clients of one database share."""

WITHOUT_PREPARED: Final[Mapping[str, Mapping[str, Any]]] = {
    "psycopg": {"prepare_threshold": None},
    "psycopg_async": {"prepare_threshold": None},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": str,
    },
}
"""What `connect_args` must be behind such a pooler, by driver."""

_STARTUP_ATTEMPTS = 5

# The standard input is a pipe; `read` returns when this process is gone, however it ended.
_UNTIL_WE_END = '"$@" & read -r _; kill -9 $!; wait'

_CONFIGURATION = """
[databases]
* = {server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
admin_users = admin
logfile = {home}/log
log_connections = 0
log_disconnections = 0
pool_mode = transaction
default_pool_size = {servers}
max_client_conn = 200
{more}
"""


class PgBouncer:
    """A pooler in front of one server, for every database on it."""

    def __init__(self, server: Server) -> None:
        """Skip the test where the program is missing."""
        found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None:
            pytest.skip("there is no pgbouncer; it is a Debian package of that name")
        self._program = found
        self._server = make_url(server.url("postgres", "psycopg"))
        self._owner = _Owner.choose()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it on a free port."""
        directory = Path(tempfile.gettempdir())
        if not self._owner.can_reach(directory):
            directory = Path("/tmp")  # noqa: S108 - mkdtemp makes the name unguessable
        self.home = Path(tempfile.mkdtemp(prefix="sqlalchemy-jobs-", dir=directory))
        try:
            for _ in range(_STARTUP_ATTEMPTS):
                if self._start():
                    return self
        except BaseException:
            self._close()
            raise
        said = self.log_text()
        self._close()
        pytest.fail(f"pgbouncer does not start: {said}")

    def __exit__(self, *_: object) -> None:
        """Stop it and remove its files."""
        self._close()

    def url(self, url: str) -> str:
        """Return *url* with the pooler's address instead of the server's."""
        parsed = make_url(url).set(host="127.0.0.1", port=self.port)
        return parsed.render_as_string(hide_password=False)

    def log_text(self) -> str:
        """Everything it has logged so far."""
        log = self.home / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def show(self, what: str) -> list[dict[str, Any]]:
        """Return what its console says: "servers", "clients", "pools"."""
        with self._console() as console:
            cursor = psycopg.ClientCursor(console, row_factory=dict_row)
            return cursor.execute(f"SHOW {what}".encode()).fetchall()

    def _console(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="admin",
            dbname="pgbouncer",
            autocommit=True,
            connect_timeout=5,
        )

    def _start(self) -> bool:
        self.port = _free_port()
        configuration = self.home / "pgbouncer.ini"
        configuration.write_text(
            _CONFIGURATION.format(
                server=self._address(),
                port=self.port,
                home=self.home,
                servers=SERVERS,
                # Newer ones follow prepared statements from server to server unless told not to.
                more="max_prepared_statements = 0" if self._version() >= (1, 21) else "",
            )
        )
        self._owner.take(self.home)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_WE_END, "sh", self._program, configuration],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            **self._owner.process_options(),
        )
        return bool(wait_until(self._started_or_failed) == "started")

    def _started_or_failed(self) -> str | None:
        try:
            self._console().close()
        except psycopg.OperationalError:
            return "failed" if "FATAL" in self.log_text() else None
        return "started"

    def _version(self) -> tuple[int, ...]:
        output = subprocess.run(
            [self._program, "--version"], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(r"(\d+)\.(\d+)", output)
        assert found is not None, output
        return int(found[1]), int(found[2])

    def _address(self) -> str:
        server = self._server
        address = {
            "host": server.host or "127.0.0.1",
            "port": server.port or 5432,
            "user": server.username,
            "password": server.password,
        }
        return " ".join(f"{name}={value}" for name, value in address.items() if value is not None)

    def _close(self) -> None:
        if self._process is not None:
            # The line and not only the end of file: a forked child may still hold the pipe.
            self._process.communicate(b"done\n", timeout=30)
            self._process = None
        shutil.rmtree(self.home, ignore_errors=True)
