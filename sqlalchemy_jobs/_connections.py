"""The worker's own connections: made as the user's engine makes them, but not from its pool.

A worker must renew leases while the user's pool is exhausted by the very handlers that hold it,
so each of its connections has a pool of its own. They run in AUTOCOMMIT and are never in a
transaction while a handler runs.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, Integer, bindparam, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from ._store import check_dialect
from .errors import UnsupportedDatabaseError

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import URL, Connection

# Planning takes a third of a claim's time, and the plan is always the same but for one trap: made
# while the table was empty it would scan the table for ever. A claim at a higher isolation than
# READ COMMITTED fails where it should skip. What waits for the next job is in use. A statement that
# was given up here must not hold locks there for as long as it waits for one more.
# Behind a pooler the process that answers is not the one that the driver was told of, and the
# session goes on to others, who must not find these settings.
# The arrays are the types of parameters to come: asyncpg asks about each that it meets, in eight
# round trips, which are part of connecting here, and would else be part of a statement whose time
# is bounded.
_SETUP: Final = text(
    "SELECT set_config(name, value, false), CAST(NULL AS text[]), CAST(NULL AS smallint[]),"
    " CAST(NULL AS integer[]), CAST(NULL AS bigint[]), CAST(NULL AS float8[]) FROM (VALUES"
    " ('plan_cache_mode', 'force_generic_plan'),"
    " ('enable_seqscan', 'off'),"
    " ('default_transaction_isolation', 'read committed'),"
    " ('idle_session_timeout', '0'),"
    " ('lock_timeout', '1s')"
    ") AS wanted(name, value)"
    " WHERE current_setting(name, true) <> value AND pg_backend_pid() = :connected_to"
    " AND (name <> 'lock_timeout' OR current_setting(name) = '0')"
).bindparams(bindparam("connected_to", type_=Integer))

_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # milliseconds
}
"""A peer that vanished without a word is noticed within 25 s, idle or not."""


def own_engine(engine: Engine) -> Engine:
    """Return an engine with a pool of its own that connects just as *engine* does.

    Raises :class:`UnsupportedDatabaseError` for a dialect, or an in-memory SQLite, that a worker
    cannot share with its application.
    """
    check_dialect(engine.dialect)
    if engine.dialect.name == "sqlite" and _is_in_memory(engine):
        message = (
            "a worker needs connections of its own, and an in-memory SQLite database exists for "
            "one only: use a file, as sqlite:///jobs.db"
        )
        raise UnsupportedDatabaseError(message)
    options = {k: v for k, v in engine.get_execution_options().items() if k != "isolation_level"}
    return Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=options,
        hide_parameters=True,
    )


def autocommit(connection: Connection) -> Connection:
    """Set *connection* up for the worker's statements. Idempotent.

    Whoever turned prepared statements off has a pooler in between. That may send each transaction
    to another server, so what a session should be like cannot be set, and would be left to others;
    and asyncpg prepares a statement all the same, which only a transaction keeps beside its
    execution. :func:`end_statement` ends it.
    """
    pooled = _is_pooled(connection)
    level = "READ COMMITTED" if pooled else "AUTOCOMMIT"
    if connection.get_execution_options().get("isolation_level") != level:
        connection = connection.execution_options(isolation_level=level)
    if getattr(connection.dialect, "server_version_info", None) is None:
        # Another connection is the first, and still telling the dialect about its server.
        connection.dialect.initialize(connection)
    if connection.dialect.name == "postgresql" and not pooled:
        connected_to = _backend(connection.connection.driver_connection)
        connection.execute(_SETUP, {"connected_to": connected_to}).all()
    keep_alive(connection.connection.driver_connection)
    end_statement(connection)
    return connection


def end_statement(connection: Connection) -> None:
    """Commit what was done with a connection of :func:`autocommit`, if it did not by itself."""
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.commit()


def _is_pooled(connection: Connection) -> bool:
    asyncpg = connection.connection.dbapi_connection
    psycopg = connection.connection.driver_connection
    return (
        getattr(asyncpg, "_prepared_statement_cache", connection) is None
        or getattr(psycopg, "prepare_threshold", connection) is None
    )


def _backend(driver_connection: Any) -> int:
    """The server process that the driver was told of when it connected."""
    if hasattr(driver_connection, "get_server_pid"):  # asyncpg
        return int(driver_connection.get_server_pid())
    return int(driver_connection.info.backend_pid)


def _is_in_memory(engine: Engine) -> bool:
    database = engine.url.database or ""
    return (
        isinstance(engine.pool, StaticPool | SingletonThreadPool)
        or ":memory:" in database
        or engine.url.query.get("mode") == "memory"
        or "mode=memory" in database
    )


def direct_url(engine: Engine, given: str | None) -> URL | None:
    """Return the URL for LISTEN, with the engine's driver; None for the engine's own.

    *given*, else ``DATABASE_DIRECT_URL``. Its driver does not matter, so that the plain
    ``postgres://`` form which hosting services hand out will do.
    """
    chosen = given or os.environ.get("DATABASE_DIRECT_URL")
    if not chosen or engine.dialect.name != "postgresql":
        return None
    scheme, separator, rest = chosen.partition("://")
    if separator and scheme.partition("+")[0] in ("postgres", "postgresql"):
        chosen = f"{engine.url.drivername}://{rest}"
    return make_url(chosen).set(drivername=engine.url.drivername)


def _socket(driver_connection: Any) -> socket.socket | None:
    """A second handle on the connection's socket, whatever the driver."""
    transport = getattr(driver_connection, "_transport", None)  # asyncpg has no public way
    if transport is not None:
        known = transport.get_extra_info("socket")
        number = known.fileno() if known is not None else -1
    elif hasattr(driver_connection, "pgconn"):
        number = driver_connection.pgconn.socket
    else:
        return None
    return socket.socket(fileno=os.dup(number)) if number >= 0 else None


def keep_alive(driver_connection: Any) -> None:
    """Have the kernel notice a dead peer. Without effect where there is no TCP socket."""
    with suppress(OSError, AttributeError):
        handle = _socket(driver_connection)
        if handle is None or handle.family not in (socket.AF_INET, socket.AF_INET6):
            return
        with handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cut(driver_connection: Any) -> None:
    """End a connection at once, from any thread: whoever waits on it gets an error.

    A polite close would send a message and wait, for ever if the peer is gone.
    """
    with suppress(Exception):
        handle = _socket(driver_connection)
        if handle is not None:
            with handle:
                handle.shutdown(socket.SHUT_RDWR)
        elif hasattr(driver_connection, "interrupt"):  # sqlite3
            driver_connection.interrupt()


@contextmanager
def cut_after(seconds: float, driver_connection: Any) -> Generator[None]:
    """End a connection of a sync driver's if the block takes longer.

    A driver waits for an answer for ever, and the kernel finds nothing wrong with a peer that
    takes what it is sent and is silent.
    """
    timer = threading.Timer(seconds, cut, (driver_connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
