"""What the revisions have in common: how they are called, and where the table is."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import inspect
from sqlalchemy.schema import CreateSchema

from sqlalchemy_jobs.errors import UnsupportedDatabaseError
from sqlalchemy_jobs.models import SCHEMA, renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from alembic.runtime.migration import MigrationContext

TABLE: Final = "jobs"
VERSION_TABLE: Final = "jobs_alembic_version"
"""Where our own Alembic environment writes its revision, in the schema of the table. Not
``alembic_version``: the application has its own, perhaps in the same schema."""


def step(function: Callable[[Any, str | None, str], None]) -> Callable[..., None]:
    """Make ``function(op, schema, table)`` callable as Alembic calls a revision: with nothing."""

    @wraps(function)
    def call(*arguments: Any) -> None:
        if not arguments:
            from alembic import op as current  # noqa: PLC0415 - workers import this module too

            arguments = (current, configured_schema(), TABLE)
        op, schema, table = arguments
        dialect = op.get_context().dialect.name
        if dialect not in ("postgresql", "sqlite"):
            message = f"jobs need PostgreSQL (or SQLite for development), this is {dialect}"
            raise UnsupportedDatabaseError(message)
        function(op, None if dialect == "sqlite" else schema, table)

    return call


def configured_schema() -> str | None:
    """Return the schema that Alembic was told: ``-x jobs_schema=``, else its configuration.

    Empty means no schema.
    """
    from alembic import context  # noqa: PLC0415 - workers import this module too

    arguments = context.get_x_argument(as_dictionary=True)
    default = context.config.get_alembic_option("jobs_schema", SCHEMA)
    return arguments.get("jobs_schema", default) or None


def create_schema(context: MigrationContext, schema: str | None) -> None:
    """Make the schema if the database has schemas and lacks this one."""
    if not context.as_sql and context.connection is not None:
        schema = renamed(context.connection, schema)
    if schema is None or context.dialect.name != "postgresql":
        return
    # Looked up first: IF NOT EXISTS needs the right to create schemas even if there is one.
    if context.as_sql or not inspect(context.connection).has_schema(schema):
        context.impl.execute(CreateSchema(schema, if_not_exists=True))
