"""The session or connection in whose transaction jobs are written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from sqlalchemy import Connection, Engine, Table, TwoPhaseTransaction, event, insert, inspect
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ._channel import channel_of
from ._store import statements_for
from ._wake import wake_workers
from .errors import AutocommitError, InvalidArgumentError, SchemaError

if TYPE_CHECKING:
    from sqlalchemy.orm import SessionTransaction

    from .statements import Statements

Notify: TypeAlias = Literal["commit", "after_commit", False]
"""When workers are told. ``"commit"``: with the commit, never without it. ``"after_commit"``: by
a statement of its own after it, which spares busy writers that NOTIFY makes commits queue up, and
is lost if the process dies in between. ``False``: not at all; workers find the job by polling."""

AnySession: TypeAlias = "Session | scoped_session[Any] | Connection"
_AFTER: Final = "sqlalchemy_jobs.after"
_log = logging.getLogger("sqlalchemy_jobs")


class Target:
    """The session or connection in whose transaction rows are written."""

    def __init__(
        self, session: AnySession, job_class: Any, *, notify: Notify, allow_autocommit: bool
    ) -> None:
        if notify not in ("commit", "after_commit", False):
            message = f"notify must be 'commit', 'after_commit' or False, got {notify!r}"
            raise InvalidArgumentError(message)
        given = session() if isinstance(session, scoped_session) else session
        if isinstance(given, AsyncSession | AsyncConnection | async_scoped_session):
            message = "this is an async session: await enqueue_async(…), or its own enqueue()"
            raise InvalidArgumentError(message)
        if not isinstance(given, Session | Connection):
            message = f"a Session or a Connection is needed, got {type(given).__name__}"
            raise InvalidArgumentError(message)
        self._given: Session | Connection = given
        self._job_class = job_class
        self._table: Table = table_of(job_class)
        self._notify: Notify = notify
        self._allow_autocommit = allow_autocommit
        self._engine: Engine | None = None
        self._channel = ""

    def resolve(self, payload: Any) -> Any:
        """Call a callable payload, after a flush; a class is data that was meant otherwise."""
        if not callable(payload) or isinstance(payload, type):
            return payload
        if isinstance(self._given, Session):
            self._given.flush()
        return payload()

    def connect(self) -> tuple[Connection, Statements, str | None]:
        """Return the transaction's connection, its statements and the channel to notify on."""
        given = self._given
        if isinstance(given, Session):
            # Session.connection() never flushes, in no version of SQLAlchemy.
            connection = given.connection(
                bind_arguments={"mapper": inspect(self._job_class), "clause": _routed(self._table)}
            )
        else:
            connection = given
        statements = statements_for(self._table, connection.dialect)
        if not self._allow_autocommit and autocommits(connection):
            message = (
                "this session commits every statement by itself (AUTOCOMMIT), so the job would "
                "survive a rollback; use another isolation level, or pass allow_autocommit=True"
            )
            raise AutocommitError(message)
        self._engine, self._channel = connection.engine, channel_of(connection, self._table)
        if self._notify == "after_commit" and _commits_elsewhere(given):
            self._notify = "commit"
        # NOTIFY cannot be prepared.
        silent = isinstance(connection.get_transaction(), TwoPhaseTransaction)
        now = self._notify == "commit" and not silent
        return connection, statements, self._channel if now else None

    def tell_after_commit(self, tasks: Sequence[str]) -> None:
        """Wake this process's workers once the transaction is committed."""
        if not isinstance(self._given, Session):
            return  # nothing can be run after a bare connection's commit
        _watch_sessions()
        innermost = self._given.get_nested_transaction() or self._given.get_transaction()
        after: _After = self._given.info.setdefault(_AFTER, {}).setdefault(innermost, _After())
        after.channels.add(self._channel)
        if self._notify == "after_commit" and self._engine is not None:
            after.notices.update((self._engine, self._table, self._channel, t) for t in tasks)


@dataclass(slots=True)
class _After:
    """What to do once a session's transaction has ended well; a savepoint's goes to its parent."""

    channels: set[str] = field(default_factory=set[str])
    notices: set[tuple[Engine, Table, str, str]] = field(
        default_factory=set[tuple[Engine, "Table", str, str]]
    )
    committed: bool = False


@cache
def _watch_sessions() -> None:
    event.listen(Session, "after_commit", _on_commit)
    event.listen(Session, "after_transaction_end", _on_end)


def _on_commit(session: Session) -> None:
    pending: dict[SessionTransaction | None, _After] = session.info.get(_AFTER, {})
    after = pending.get(session.get_nested_transaction() or session.get_transaction())
    if after is not None:
        after.committed = True


def _on_end(session: Session, transaction: SessionTransaction) -> None:
    # Not already on commit: the session's connection must be back in the pool by now, for the
    # notice may need it.
    pending: dict[SessionTransaction, _After] = session.info.get(_AFTER, {})
    after = pending.pop(transaction, None)
    if after is None or not after.committed:
        return
    outer = transaction.parent
    if outer is None:
        _tell(after)
        return
    while outer.parent is not None and not outer.nested:
        outer = outer.parent
    around = pending.setdefault(outer, _After())
    around.channels |= after.channels
    around.notices |= after.notices


def _tell(after: _After) -> None:
    for channel in after.channels:
        wake_workers(channel)
    for engine, table, channel, task in sorted(after.notices, key=lambda notice: notice[2:]):
        call = statements_for(table, engine.dialect).tell(channel, task)
        if call is None:
            continue
        try:
            with engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").execute(*call).all()
        except Exception:  # noqa: BLE001 - the job is committed; only its notice is late
            _log.exception("a notification could not be sent; workers find the job by polling")


@cache
def _routed(table: Table) -> Any:
    """The kind of statement that will run, for sessions that route by it."""
    return insert(table)


def table_of(job_class: Any) -> Table:
    """Return the table of a mapped class of jobs."""
    table: Any = getattr(job_class, "__table__", None)
    columns: Any = getattr(table, "c", ())
    if not isinstance(table, Table) or "lease_expires_at" not in columns:
        message = f"job_class must be a mapped class with JobMixin, got {job_class!r}"
        raise InvalidArgumentError(message)
    return cast("Table", table)


def _commits_elsewhere(given: Session | Connection) -> bool:
    """Whether the transaction may end where a session's events do not tell."""
    return isinstance(given, Connection) or isinstance(given.bind, Connection)


def autocommits(connection: Connection) -> bool:
    # What counts is the driver's connection: every way to ask for AUTOCOMMIT ends there.
    pooled = connection.connection
    if connection.dialect.name != "sqlite":
        raw: Any = pooled.dbapi_connection
        return connection.dialect.detect_autocommit_setting(raw)
    # Without a level of its own, but begun by hand, is the documented way to BEGIN IMMEDIATE.
    driver: Any = pooled.driver_connection
    if driver.isolation_level is not None and getattr(driver, "autocommit", None) is not True:
        return False
    begun = None if connection.in_transaction() else connection.begin()
    if driver.in_transaction:
        return False
    if begun is not None:
        begun.rollback()
    return True


class explained:  # noqa: N801 - used as a statement
    """Around SQL of the caller's: never show a payload, and name the way out of a missing table."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, StatementError):
            return
        error.hide_parameters = True
        if not isinstance(error, DBAPIError):
            return
        state = str(getattr(error.orig, "sqlstate", None) or "")
        words = str(error.orig)
        missing = state in ("42P01", "42703", "3F000") or (
            any(
                told in words for told in ("no such table", "no such column", "has no column named")
            )
        )
        if missing:
            message = (
                "the jobs table is missing or older than this release: run 'alembic upgrade head', "
                "or add migrations.upgrade(op, ...) to a revision of your own"
            )
            raise SchemaError(message) from error
        if state in _SHOWING_ROWS:
            _cut(error)


_SHOWING_ROWS: Final = frozenset({"23502", "23514"})
"""Not-null and check violations: the server adds the row, with the payload, as a detail."""


def _cut(error: BaseException) -> None:
    """Leave the first line of an error's message, and of its causes' messages."""
    shown: Any = error
    while shown is not None:
        shown.args = (str(shown.args[0]).partition("\n")[0], *shown.args[1:])
        if getattr(shown, "detail", None):  # asyncpg puts its messages together when asked
            shown.detail = None
        shown = shown.__cause__
