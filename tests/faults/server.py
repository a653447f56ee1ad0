"""What tests do to a server of their own: settings, roles, lost sessions, crashes; and its log.

def test_it(own_cluster):
    knobs = Knobs(own_cluster)
    with knobs.read_only():
        ...
    role = knobs.role(statement_timeout="500ms")
    url = knobs.url_of(role, own_cluster.url(name, "psycopg"))
    knobs.terminate(LISTENERS)
    knobs.crash()
    assert knobs.complaints() == []
"""

from __future__ import annotations

import re
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from psycopg import sql
from sqlalchemy import make_url

from tests.workers import wait_until

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.postgres import Cluster

LISTENERS: Final = "query LIKE 'LISTEN%'"
"""The sessions that are subscribed to something and have been asked for nothing since."""

WORKERS: Final = "backend_type = 'client backend'"

_OURS: Final = (
    r"deadlock detected|could not serialize|syntax error|permission denied|must be owner"
    r"|does not exist|violates|invalid input|out of range|current transaction is aborted"
    r"|too many clients|connection slots"
)
"""Messages that no fault of a server or a network explains."""

_LEVELS: Final = re.compile(r" (ERROR|FATAL|PANIC):  ")


class Knobs:
    """The knobs of one server, which may be stopped and started in between."""

    def __init__(self, server: Cluster) -> None:
        """Read the log from here on."""
        self.server = server
        self._read_from = len(server.log_text())

    # --- settings ------------------------------------------------------------------------------

    def set(self, **settings: str) -> None:
        """Change settings of the whole server, for sessions that are open too."""
        with self.server.connect() as connection:
            for name, value in settings.items():
                connection.execute(
                    sql.SQL("ALTER SYSTEM SET {} = {}").format(
                        sql.Identifier(name), sql.Literal(value)
                    )
                )
        self._reload()

    def reset(self, *names: str) -> None:
        """Give settings the values they had before ``set``."""
        with self.server.connect() as connection:
            for name in names:
                connection.execute(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier(name)))
        self._reload()

    @contextmanager
    def altered(self, **settings: str) -> Generator[None]:
        """Change settings for the time of a block."""
        self.set(**settings)
        try:
            yield
        finally:
            self.reset(*settings)

    @contextmanager
    def read_only(self) -> Generator[None]:
        """Refuse every write for the time of a block, as a server does that is only a replica."""
        with self.altered(default_transaction_read_only="on"):
            yield

    def _reload(self) -> None:
        with self.server.connect() as connection:
            ((before,),) = connection.execute("SELECT pg_conf_load_time()").fetchall()
            connection.execute("SELECT pg_reload_conf()")
        # The server's first process reads the files, and every session after it when it is idle.
        wait_until(lambda: self.server.psql("SELECT pg_conf_load_time()") != [(before,)])

    def role(self, *, member_of: str | None = "postgres", **settings: str) -> str:
        """Make a role that may log in and do what *member_of* may, and return its name.

        Each of its new sessions starts with the settings.
        """
        name = f"role_{secrets.token_hex(4)}"
        with self.server.connect() as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
            if member_of is not None:
                connection.execute(
                    sql.SQL("GRANT {} TO {}").format(
                        sql.Identifier(member_of), sql.Identifier(name)
                    )
                )
        self.set_for(name, **settings)
        return name

    def set_for(self, role: str, **settings: str) -> None:
        """Change what new sessions of a role start with."""
        with self.server.connect() as connection:
            for name, value in settings.items():
                connection.execute(
                    sql.SQL("ALTER ROLE {} SET {} = {}").format(
                        sql.Identifier(role), sql.Identifier(name), sql.Literal(value)
                    )
                )

    @staticmethod
    def url_of(role: str, url: str) -> str:
        """Return *url* with another role's name."""
        return make_url(url).set(username=role).render_as_string(hide_password=False)

    # --- sessions ------------------------------------------------------------------------------

    def sessions(self, where: str = WORKERS, *, database: str | None = None) -> list[int]:
        """Return the process ids of the sessions that fit, this one never among them."""
        return [pid for (pid,) in self._of_sessions("pid", where, database)]

    def terminate(self, where: str = WORKERS, *, database: str | None = None) -> int:
        """End the sessions that fit, as an administrator does, and return how many there were."""
        return len(self._of_sessions("pg_terminate_backend(pid)", where, database))

    def _of_sessions(self, what: str, where: str, database: str | None) -> list[tuple[int]]:
        where = where.replace("%", "%%")
        return self.server.psql(
            f"SELECT {what} FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            f"AND datname = coalesce(%s, datname) AND ({where})",
            parameters=(database,),
        )

    # --- crashes -------------------------------------------------------------------------------

    def crash(self) -> None:
        """End the server in the middle of everything; only what was committed is kept."""
        self.keep_commits()
        self.server.stop("immediate")

    def keep_commits(self) -> None:
        """Have a crash from now on forget no commit, which the server of tests otherwise does."""
        # The system goes on, so what was written needs no flush to the disk.
        self.set(synchronous_commit="on")
        # And what was committed before, without waiting for anything, is written now.
        self.server.psql("CHECKPOINT")

    # --- the log -------------------------------------------------------------------------------

    def errors(self) -> list[str]:
        """Return the lines of the log that report an error, since the knobs were made."""
        return [line for line in self._log().splitlines() if _LEVELS.search(line)]

    def complaints(self, about: str = _OURS) -> list[str]:
        """Return the errors that no fault explains: deadlocks, wrong statements, missing rights.

        *about* is a regular expression that says what else to look for.
        """
        wanted = re.compile(about)
        return [line for line in self.errors() if wanted.search(line)]

    def _log(self) -> str:
        return self.server.log_text()[self._read_from :]
