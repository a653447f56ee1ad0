"""${message}."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
${imports if imports else ""}
from sqlalchemy_jobs.migrations._support import step

revision: Final = ${repr(up_revision)}
down_revision: Final = ${repr(down_revision)}
branch_labels: Final = ${repr(branch_labels)}
depends_on: Final = ${repr(depends_on)}

# Add the module to CHAIN in __init__.py, and keep the old release's workers running on the new
# table: columns come with a default, and what they read stays.
COLUMNS: Final = frozenset[str]()
"""What this revision adds; by it a database is recognised."""


@step
def upgrade(op: Any, schema: str | None, table: str) -> None:
    """TODO: say what it does; write schema and table where autogenerate wrote names."""
    ${upgrades if upgrades else "pass"}


@step
def downgrade(op: Any, schema: str | None, table: str) -> None:
    """Undo it."""
    ${downgrades if downgrades else "pass"}
