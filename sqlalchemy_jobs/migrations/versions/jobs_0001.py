"""Create the jobs table."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlalchemy_jobs.migrations._support import create_schema, step

revision: Final = "jobs_0001"
down_revision: Final = None
branch_labels: Final = ("sqlalchemy_jobs",)
depends_on: Final = None

# Written out, not taken from the models: a revision stays what it is when the models move on.
_BIGINT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_TIME = sa.DateTime(timezone=True)

CHECKS: Final = {
    "status": "status IN ('pending', 'running', 'succeeded', 'failed', 'cancelled')",
    "task": "length(task) BETWEEN 1 AND 200",
    "priority": "priority BETWEEN -2 AND 2",
    "attempts": "attempts >= 0",
    "idempotency_key": "length(idempotency_key) BETWEEN 1 AND 255",
    "lease": "(status = 'running') = (locked_by IS NOT NULL)"
    " AND (locked_by IS NULL) = (lease_expires_at IS NULL)",
}


def _columns(dialect: str) -> list[sa.Column[Any]]:
    clock = "(strftime('%Y-%m-%d %H:%M:%f000','now'))" if dialect == "sqlite" else "now()"

    def default(sql: str) -> dict[str, Any]:
        return {"nullable": False, "server_default": sa.text(sql)}

    now = default(clock)
    return [
        sa.Column("id", _BIGINT, sa.Identity(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("payload", _JSON, **default("'null'")),
        sa.Column("status", sa.Text(), **default("'pending'")),
        sa.Column("priority", sa.SmallInteger(), **default("0")),
        sa.Column("run_at", _TIME, **now),
        sa.Column("attempts", sa.Integer(), **default("0")),
        sa.Column("max_attempts", sa.Integer()),
        sa.Column("timeout_s", sa.REAL()),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("locked_by", sa.Text()),
        sa.Column("lease_expires_at", _TIME),
        sa.Column("started_at", _TIME),
        sa.Column("last_error", sa.Text()),
        sa.Column("errors", _JSON, **default("'[]'")),
        sa.Column("meta", _JSON),
        sa.Column("created_at", _TIME, **now),
        sa.Column("updated_at", _TIME, **now),
    ]


COLUMNS: Final = frozenset(column.name for column in _columns("postgresql"))
"""What this revision adds; by it a database is recognised."""


@step
def upgrade(op: Any, schema: str | None, table: str) -> None:
    """Create the schema if it is missing, the table, and its indexes."""
    context = op.get_context()
    create_schema(context, schema)
    # f(): the name is final, whatever naming convention the user's metadata has.
    op.create_table(
        table,
        *_columns(context.dialect.name),
        sa.PrimaryKeyConstraint("id", name=op.f(f"{table}_pkey")),
        *(
            sa.CheckConstraint(sql, name=op.f(f"{table}_{name}_check"))
            for name, sql in CHECKS.items()
        ),
        schema=schema,
        sqlite_autoincrement=True,
    )

    def index(name: str, *columns: str, where: str, unique: bool = False) -> None:
        op.create_index(
            op.f(f"{table}_{name}"),
            table,
            list(columns),
            unique=unique,
            schema=schema,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )

    index("due", "task", "priority", "run_at", "id", where="status = 'pending'")
    index("running", "id", where="status = 'running'")
    index("finished", "updated_at", where="status IN ('succeeded', 'failed', 'cancelled')")
    index(
        "idempotency_key",
        "idempotency_key",
        where="idempotency_key IS NOT NULL AND status IN ('pending', 'running')",
        unique=True,
    )


@step
def downgrade(op: Any, schema: str | None, table: str) -> None:
    """Drop the table. The schema stays: other things may be in it."""
    op.drop_table(table, schema=schema)
