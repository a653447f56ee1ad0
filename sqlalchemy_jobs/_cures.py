"""Which errors pass.

A database goes away and comes back, with whatever error its driver chose for that, and privileges
and tables are mended by people: all of it is tried again for ever. What is neither the database's
nor the network's doing is a defect, of this library, of a driver or of a hook of the user's. It
may be the passing state of a connection that died, so it is tried again on a new one; but a worker
that meets nothing else must end with it, where somebody will see it, instead of standing by.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from .errors import SchemaError

_DRIVERS: Final = frozenset({"asyncpg", "psycopg", "sqlite3", "aiosqlite"})
_OUTSIDE: Final = (OSError, EOFError, DBAPIError, DisconnectionError, PoolTimeout, SchemaError)


class Defect(Exception):  # noqa: N818 - what it holds is the error
    """Holds an error that a new connection may not cure."""

    def __init__(self, orig: BaseException) -> None:
        super().__init__(str(orig))
        self.orig = orig


def judged(error: BaseException) -> BaseException:
    """Return *error*, which came from work with an open connection, as a Defect if it is one."""
    if isinstance(error, (*_OUTSIDE, Defect)) or not isinstance(error, Exception):
        return error
    if any(kind.__module__.partition(".")[0] in _DRIVERS for kind in type(error).__mro__):
        return error  # not every call goes through SQLAlchemy, which would have wrapped it
    return Defect(error)


def told(error: BaseException) -> BaseException:
    """Return the error itself, out of its Defect."""
    return error.orig if isinstance(error, Defect) else error


def is_hopeless(error: BaseException | None) -> bool:
    """True if neither time nor a new connection is expected to cure the error."""
    return isinstance(error, Defect | SchemaError)


def doubts_schema(error: BaseException | None) -> bool:
    """True if the table may not be what it was when the worker started.

    By class of SQLSTATE, syntax errors and access rule violations, or by SQLite's words.
    """
    original = getattr(error, "orig", None)
    state = getattr(original, "sqlstate", None)
    if state is None:
        return str(original).startswith(("no such table", "no such column"))
    return str(state)[:2] in ("42", "3F")
