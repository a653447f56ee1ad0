"""Alembic's environment of this repository; pyproject.toml is all the configuration it needs.

    DATABASE_URL=postgresql://localhost/app alembic upgrade head
    alembic -x url=sqlite+aiosqlite:///dev.db upgrade head
    alembic -x url=postgresql+asyncpg://localhost/app -x jobs_schema=acme upgrade head --sql

The URL is `-x url=`, else the variable DATABASE_URL, else `sqlalchemy.url` in [tool.alembic]; the
schema is `-x jobs_schema=`, else `jobs_schema` there, else "jobs". Applications have an
environment of their own: see docs/migrations.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, MetaData, create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import migrations
from sqlalchemy_jobs.models import Job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Table


def database_url() -> URL:
    """Return the URL of the database, with a driver that is installed."""
    text = (
        context.get_x_argument(as_dictionary=True).get("url")
        or os.environ.get("DATABASE_URL")
        or context.config.get_alembic_option("sqlalchemy.url")
    )
    if not text:
        message = (
            "no database is given: set DATABASE_URL, or run alembic -x url=postgresql://… upgrade"
        )
        raise CommandError(message)
    try:
        url = make_url(text)
    except ArgumentError:
        # Not the text itself: there may be a password in it.
        message = "the database URL is not of the form postgresql://user:password@host/database"
        raise CommandError(message) from None
    if url.drivername not in {"postgres", "postgresql"}:
        return url
    for driver in ("psycopg", "asyncpg"):
        if importlib.util.find_spec(driver):
            return url.set(drivername=f"postgresql+{driver}")
    message = "no driver for PostgreSQL is installed: pip install 'sqlalchemy-jobs[psycopg]'"
    raise CommandError(message)


def configure(dialect: str, schema: str | None, **how: Any) -> None:
    """Configure the context for the jobs table alone, whatever else is in the database."""
    connection: Connection | None = how.get("connection")
    # Alembic calls the schema that comes first in the search path None.
    default = connection.dialect.default_schema_name if connection else None
    seen = None if schema == default else schema

    def include_name(name: str | None, kind: str, parents: Mapping[Any, str | None]) -> bool:
        if kind == "schema":
            return name == seen
        return kind != "table" or (name == table.name and parents["schema_name"] == seen)

    table: Table = Job.__table__  # type: ignore[assignment]
    metadata = MetaData()
    table.to_metadata(metadata, schema=seen)  # type: ignore[arg-type] # None is allowed, for none
    context.configure(
        target_metadata=metadata,
        include_schemas=True,
        include_name=include_name,
        # On SQLite it would miss the identity of the key, which there is none of.
        compare_server_default=dialect != "sqlite",
        version_table=migrations.VERSION_TABLE,
        version_table_schema=schema,
        **how,
    )


def run(schema: str | None) -> None:
    """Run the migrations in the context that is configured."""
    current = context.get_context()
    with context.begin_transaction():
        # Before the first revision, since the table of versions is in that schema too.
        if not current.opts.get("dont_mutate") and not current.get_current_heads():
            migrations.create_schema(current, schema)
        context.run_migrations()


def migrate(connection: Connection) -> None:
    """Migrate the database, one process at a time."""
    dialect = connection.dialect.name
    schema = None if dialect == "sqlite" else migrations.configured_schema()
    with migrations.lock(connection):
        configure(dialect, schema, connection=connection)
        run(schema)


def migrate_at(url: URL) -> None:
    """Migrate over a connection of our own, with a synchronous driver."""
    with create_engine(url, poolclass=NullPool).connect() as connection:
        migrate(connection)


async def migrate_async_at(url: URL) -> None:
    """Migrate over a connection of our own, with an asynchronous driver."""
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        await connection.run_sync(migrate)


def main() -> None:
    """Do what the command asks for."""
    given: Connection | None = context.config.attributes.get("connection")
    if given is not None:
        migrate(given)
        return
    url = database_url()
    if context.is_offline_mode():
        dialect = url.get_backend_name()
        schema = None if dialect == "sqlite" else migrations.configured_schema()
        configure(dialect, schema, url=url, literal_binds=True)
        run(schema)
    elif url.get_dialect().is_async:
        asyncio.run(migrate_async_at(url))
    else:
        migrate_at(url)


main()
