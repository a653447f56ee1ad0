"""Whether the table in the database is the one that this release was written for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect
from sqlalchemy.exc import NoSuchTableError

from sqlalchemy_jobs.errors import SchemaError
from sqlalchemy_jobs.models import SCHEMA, renamed

from . import versions
from ._support import TABLE

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection, Table


def check_schema(connection: Connection, table: Table) -> str:
    """Return the revision at which *table* stands: the newest whose columns are all there.

    Raises :class:`~sqlalchemy_jobs.errors.SchemaError`, which names the command to run, if the
    database lacks the table or a column of it. Looks where ``schema_translate_map`` points.
    """
    schema = renamed(connection, table.schema)
    name = f"{schema}.{table.name}" if schema else table.name
    database = connection.engine.url.database or ":memory:"
    try:
        columns = inspect(connection).get_columns(table.name, schema)
    except NoSuchTableError:
        advice = 'run "alembic upgrade head"; if no revision makes the table yet, write one: '
        advice += _line(connection, schema, table)
        message = f'the table {name} is not in the database "{database}": {advice}'
        raise SchemaError(message) from None

    found = {column["name"] for column in columns}
    missing = [column.name for column in table.columns if column.name not in found]
    revision = _revision(found)
    if not missing:
        return revision or versions.CHAIN[0].revision
    if revision is None:
        advice = "it is another table, or was made by hand; the line that makes it is "
        advice += _line(connection, schema, table)
    elif revision == versions.CHAIN[-1].revision:
        advice = 'run "alembic upgrade head" with a revision that adds what your class has more'
    else:
        advice = f'it stands at {revision}; run "alembic upgrade head"; if no revision goes on '
        advice += f"from there yet, write one: {_line(connection, schema, table, revision)}"
    message = f'the table {name} in the database "{database}" lacks {", ".join(missing)}: {advice}'
    raise SchemaError(message)


def _revision(columns: Collection[str]) -> str | None:
    reached: str | None = None
    for revision in versions.CHAIN:
        if not set(columns) >= revision.COLUMNS:
            break
        reached = revision.revision
    return reached


def _line(
    connection: Connection, schema: str | None, table: Table, since: str | None = None
) -> str:
    """Return the call for a revision, with those arguments that are not the defaults."""
    arguments = ["op"]
    if since is not None:
        arguments.append(f'since="{since}"')
    arguments.append(f'to="{versions.CHAIN[-1].revision}"')
    if schema != SCHEMA and connection.dialect.name != "sqlite":
        arguments.append(f"schema={schema!r}")
    if table.name != TABLE:
        arguments.append(f"table={table.name!r}")
    return f"sqlalchemy_jobs.migrations.upgrade({', '.join(arguments)})"
