"""What an application's ``env.py`` takes from us."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import SchemaItem, Table

from sqlalchemy_jobs.models import SCHEMA, Job, metadata
from sqlalchemy_jobs.sqltypes import UTC

from ._support import TABLE, VERSION_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from alembic.autogenerate.api import AutogenContext
    from sqlalchemy import Connection

    IncludeObject = Callable[[SchemaItem, str | None, Any, bool, SchemaItem | None], bool]
    RenderItem = Callable[[str, Any, AutogenContext], str | Literal[False]]

_PAYLOAD: Final = Job.__table__.columns["payload"].type
_LOCK: Final = "sqlalchemy-jobs migrations"
_LOOK_AGAIN_S: Final = 0.1

log = logging.getLogger(__name__)


def include_object(
    also: IncludeObject | None = None, *, schema: str | None = SCHEMA, table: str = TABLE
) -> IncludeObject:
    """Return a hook for ``context.configure(include_object=…)`` that leaves our table alone.

    ``--autogenerate`` and ``alembic check`` then neither drop it nor make it again, with our
    metadata in ``target_metadata`` or not and with ``include_schemas`` or not. *also* is your own
    hook: it is asked about everything else. For several installations, nest the calls.
    """
    names = {table, VERSION_TABLE}

    def hook(
        item: SchemaItem,
        name: str | None,
        kind: Any,
        reflected: bool,  # noqa: FBT001 - Alembic's signature
        other: SchemaItem | None,
    ) -> bool:
        if _is_ours(item, names, schema):
            return False
        return also is None or also(item, name, kind, reflected, other)

    return hook


def _is_ours(item: SchemaItem, names: set[str], schema: str | None) -> bool:
    if not isinstance(item, Table):
        return False
    return item.metadata is metadata or (item.name in names and _same_schema(item.schema, schema))


def _same_schema(one: str | None, other: str | None) -> bool:
    from alembic import context  # noqa: PLC0415 - workers import this module too

    if one == other:
        return True
    try:
        dialect = context.get_context().dialect
    except NameError:  # autogenerate without an env.py
        return False
    # Alembic calls the schema that comes first in the search path None; SQLite has no other.
    default = dialect.default_schema_name
    return dialect.name == "sqlite" or (one or default) == (other or default)


def render_item(also: RenderItem | None = None) -> RenderItem:
    """Return a hook for ``context.configure(render_item=…)`` that writes our types as SQLAlchemy's.

    For those who subclass ``JobMixin`` and let ``--autogenerate`` make the table: the revision
    then needs no import and stays what it is. *also* is your own hook, asked about the rest.
    """

    def hook(kind: str, item: Any, context: AutogenContext) -> str | Literal[False]:
        prefix = context.opts.get("sqlalchemy_module_prefix") or ""
        if kind == "type" and isinstance(item, UTC):
            return f"{prefix}DateTime(timezone=True)"
        if kind == "type" and item is _PAYLOAD:
            # On SQLite, Alembic writes a name in it that the revision does not import.
            context.imports.add("from sqlalchemy.dialects import postgresql")
            return f"{prefix}JSON().with_variant(postgresql.JSONB(), 'postgresql')"
        return also(kind, item, context) if also else False

    return hook


@contextmanager
def lock(connection: Connection) -> Generator[None]:
    """Let one process at a time migrate; the others wait and then find nothing to do.

    Wrap ``context.configure`` and the migrations in it, on PostgreSQL with a connection to the
    server itself: through PgBouncer in transaction mode a lock belongs to nobody.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    key = func.hashtextextended(_LOCK, 0)
    if connection.in_transaction():
        # Somebody else's transaction: what is migrated is visible when it ends, not before.
        connection.execute(select(func.pg_advisory_xact_lock(key)))
        yield
        return
    # Asked again and again: whoever waits inside a statement holds a snapshot, and
    # CREATE INDEX CONCURRENTLY would wait for that in turn.
    asked = 0
    while not connection.scalar(select(func.pg_try_advisory_lock(key))):
        connection.rollback()
        if asked == 0:
            log.info("another process migrates this database; waiting for it")
        asked += 1
        time.sleep(_LOOK_AGAIN_S)
    connection.commit()
    try:
        yield
    finally:
        # A connection that is lost has lost the lock too.
        with suppress(DBAPIError):
            connection.rollback()
            connection.execute(select(func.pg_advisory_unlock(key)))
            connection.commit()
