"""The jobs table: a mixin with every column, and the class and metadata that most people use.

A job is a row in your own database. Query it as any mapped class::

    session.scalars(select(Job).where(Job.status == "failed"))

To keep jobs in your own metadata, in another schema or with further columns, subclass the mixin
and pass the class to workers and to ``enqueue``::

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        tenant: Mapped[str | None]
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Engine,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Text,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, REAL
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column
from sqlalchemy.schema import CreateSchema, SchemaItem
from sqlalchemy.sql.elements import conv

from .lifecycle import FINISHED, UNFINISHED, Status
from .sqltypes import UTC, created_now

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from sqlalchemy import Connection, Table

SCHEMA = "jobs"
"""The schema of the shipped table; ``schema_translate_map`` moves it. SQLite has none."""

_JSON = JSON().with_variant(JSONB(), "postgresql")
_ID = BigInteger().with_variant(Integer(), "sqlite")
_REAL: REAL[float] = REAL()


def in_status(statuses: Iterable[Status]) -> str:
    """Return the predicate as literal SQL: as parameters, a generic plan could not use the
    partial indexes, and the index's own predicate would not match.
    """
    names = sorted(statuses, key=list(Status).index)
    if len(names) == 1:
        return f"status = '{names[0]}'"
    return f"status IN ({', '.join(repr(str(name)) for name in names)})"


KEY_TAKEN = f"idempotency_key IS NOT NULL AND {in_status(UNFINISHED)}"
"""Where a key is unique; rows without one stay out of the index and cost nothing."""


def table_args(table: str) -> tuple[SchemaItem, ...]:
    """Return the constraints and indexes of a jobs table called *table*, each named.

    For classes that need a ``__table_args__`` of their own:
    ``__table_args__ = (*table_args("jobs"), Index(...), {"schema": "work"})``.
    """
    # conv(): the name is final, whatever naming convention the metadata has.
    checks = {
        "status": in_status(Status),
        "task": "length(task) BETWEEN 1 AND 200",
        "priority": "priority BETWEEN -2 AND 2",
        "attempts": "attempts >= 0",
        "idempotency_key": "length(idempotency_key) BETWEEN 1 AND 255",
        "lease": "(status = 'running') = (locked_by IS NOT NULL)"
        " AND (locked_by IS NULL) = (lease_expires_at IS NULL)",
    }
    pending, running = in_status({Status.PENDING}), in_status({Status.RUNNING})
    finished = in_status(FINISHED)

    def index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
        return Index(
            conv(f"{table}_{name}"),
            *columns,
            unique=unique,
            postgresql_where=text(where),
            sqlite_where=text(where),
        )

    return (
        PrimaryKeyConstraint("id", name=conv(f"{table}_pkey")),
        *(CheckConstraint(sql, name=conv(f"{table}_{name}_check")) for name, sql in checks.items()),
        index("due", "task", "priority", "run_at", "id", where=pending),
        # Not on lease_expires_at: each renewal would then have to write the index too.
        index("running", "id", where=running),
        index("finished", "updated_at", where=finished),
        index("idempotency_key", "idempotency_key", where=KEY_TAKEN, unique=True),
    )


class JobMixin:
    """The columns of a job. See the table in the documentation for what each means."""

    __tablename__: Any = "jobs"

    @declared_attr.directive
    def __table_args__(cls) -> Any:  # noqa: N805 - declared_attr passes the class
        return (*table_args(cls.__tablename__), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_ID, Identity(), primary_key=True, sort_order=-100)
    task: Mapped[str] = mapped_column(Text, sort_order=-99)
    payload: Mapped[Any] = mapped_column(_JSON, server_default=text("'null'"), sort_order=-98)
    status: Mapped[str] = mapped_column(Text, server_default=text("'pending'"), sort_order=-97)
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"), sort_order=-96)
    run_at: Mapped[datetime] = mapped_column(UTC, server_default=created_now(), sort_order=-95)
    attempts: Mapped[int] = mapped_column(Integer, server_default=text("0"), sort_order=-94)
    max_attempts: Mapped[int | None] = mapped_column(Integer, sort_order=-93)
    timeout_s: Mapped[float | None] = mapped_column(_REAL, sort_order=-92)
    idempotency_key: Mapped[str | None] = mapped_column(Text, sort_order=-91)
    locked_by: Mapped[str | None] = mapped_column(Text, sort_order=-90)
    lease_expires_at: Mapped[datetime | None] = mapped_column(UTC, sort_order=-89)
    started_at: Mapped[datetime | None] = mapped_column(UTC, sort_order=-88)
    last_error: Mapped[str | None] = mapped_column(Text, sort_order=-87)
    errors: Mapped[list[dict[str, Any]]] = mapped_column(
        _JSON, server_default=text("'[]'"), sort_order=-86
    )
    meta: Mapped[Any] = mapped_column(_JSON, nullable=True, sort_order=-85)
    created_at: Mapped[datetime] = mapped_column(UTC, server_default=created_now(), sort_order=-84)
    updated_at: Mapped[datetime] = mapped_column(UTC, server_default=created_now(), sort_order=-83)

    def __repr__(self) -> str:
        # Never the payload: reprs end up in logs.
        return f"<{type(self).__name__} {self.id} {self.task} {self.status}>"


class JobsMetaData(MetaData):
    """Metadata whose ``create_all`` also makes the schema, and may run in many processes at once.

    On SQLite, which has no schemas, the tables are made without one.
    """

    def create_all(
        self,
        bind: Any,
        tables: Sequence[Table] | None = None,
        checkfirst: Any = True,  # noqa: FBT002 - the base class's signature
    ) -> None:
        """Create the schema and the tables that are missing."""
        with _schemaless_on_sqlite(bind) as connection:
            if connection.dialect.name == "postgresql":
                # Taken before anything is looked up: two processes would both find no table.
                lock = func.hashtextextended("sqlalchemy-jobs create_all", 0)
                connection.execute(select(func.pg_advisory_xact_lock(lock)))
                schema = renamed(connection, SCHEMA)
                # Looked up: IF NOT EXISTS needs the right to create schemas even if it exists.
                if schema is not None and not inspect(connection).has_schema(schema):
                    connection.execute(CreateSchema(schema, if_not_exists=True))
            super().create_all(connection, tables, checkfirst)

    def drop_all(
        self,
        bind: Any,
        tables: Sequence[Table] | None = None,
        checkfirst: Any = True,  # noqa: FBT002 - the base class's signature
    ) -> None:
        """Drop the tables; the schema stays, for others may use it."""
        with _schemaless_on_sqlite(bind) as connection:
            super().drop_all(connection, tables, checkfirst)


def renamed(bind: Engine | Connection, schema: str | None) -> str | None:
    """Return what *schema* is called on *bind*: none on SQLite, else by its translate map."""
    if bind.dialect.name == "sqlite":
        return None
    translated: dict[str | None, str | None] | None
    translated = bind.get_execution_options().get("schema_translate_map")
    return translated.get(schema, schema) if translated else schema


@contextmanager
def _schemaless_on_sqlite(bind: Engine | Connection) -> Generator[Connection, None, None]:
    if isinstance(bind, Engine):
        with bind.begin() as connection, _schemaless_on_sqlite(connection):
            yield connection
    elif bind.dialect.name == "sqlite":
        before = bind.get_execution_options().get("schema_translate_map")
        bind.execution_options(schema_translate_map={**(before or {}), SCHEMA: None})
        try:
            yield bind
        finally:
            bind.execution_options(schema_translate_map=before)
    else:
        yield bind


metadata = JobsMetaData(schema=SCHEMA)
"""The metadata of the shipped table, for ``create_all`` and for Alembic's ``target_metadata``."""


class _Base(DeclarativeBase):
    metadata = metadata


class Job(JobMixin, _Base):
    """A job in the shipped table ``jobs.jobs`` (``jobs`` on SQLite)."""
