"""Migrations of the jobs table for Alembic.

The recommended way is one line in a revision of your own. Your history stays one line, and
``alembic upgrade head``, ``--sql`` and ``downgrade`` work as ever::

    from alembic import op
    from sqlalchemy_jobs import migrations

    def upgrade():
        migrations.upgrade(op, to="jobs_0001")

    def downgrade():
        migrations.downgrade(op, since="jobs_0001")

Write the names out (:data:`HEAD` is the newest, :func:`revisions` lists all): a revision says
what it did, and must say the same after the next release. When a release brings a new revision,
its notes say so, and so does a worker that meets the older table. Then add::

    def upgrade():
        migrations.upgrade(op, since="jobs_0001", to="jobs_0002")

    def downgrade():
        migrations.downgrade(op, since="jobs_0002", to="jobs_0001")

In ``env.py``, keep ``--autogenerate`` and ``alembic check`` from touching the table::

    context.configure(..., include_object=migrations.include_object())

All of these take ``schema=`` and ``table=``. ``schema=None`` puts the table into the first schema
of the search path; on SQLite there is never a schema.

Further tools for ``env.py``: :func:`render_item` for those who subclass ``JobMixin`` and let
``--autogenerate`` make the table, and :func:`lock` for several processes that migrate at once.
Workers ask :func:`check_schema` at their start. The other ways in, a branch of our own through
``version_locations`` and the environment in this project's repository, are described in
``docs/migrations.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy_jobs.errors import InvalidArgumentError
from sqlalchemy_jobs.models import SCHEMA

from . import versions
from ._check import check_schema
from ._env import include_object, lock, render_item
from ._support import TABLE, VERSION_TABLE, configured_schema, create_schema

if TYPE_CHECKING:
    from types import ModuleType

    from alembic.operations import Operations

__all__ = [
    "HEAD",
    "VERSION_TABLE",
    "check_schema",
    "configured_schema",
    "create_schema",
    "downgrade",
    "include_object",
    "lock",
    "render_item",
    "revisions",
    "upgrade",
]

HEAD: Final[str] = versions.CHAIN[-1].revision
"""The newest revision of this release. Do not write ``to=HEAD`` into a revision of yours: after
the next release that line would do more than it did."""


def revisions() -> list[str]:
    """Return the names of all revisions, oldest first."""
    return [module.revision for module in versions.CHAIN]


def upgrade(
    op: Operations | ModuleType,
    to: str,
    *,
    since: str | None = None,
    schema: str | None = SCHEMA,
    table: str = TABLE,
) -> None:
    """Take the table from *since* (``None``: from nothing) up to the revision *to*.

    *op* is ``alembic.op``. The schema is made too if it is missing.
    """
    for revision in _between(since, to, low="since", high="to"):
        revision.upgrade(op, schema, table)


def downgrade(
    op: Operations | ModuleType,
    to: str | None = None,
    *,
    since: str,
    schema: str | None = SCHEMA,
    table: str = TABLE,
) -> None:
    """Take the table from *since* down to *to* (``None``: to nothing but the schema)."""
    for revision in reversed(_between(to, since, low="to", high="since")):
        revision.downgrade(op, schema, table)


def _between(start: str | None, end: str, *, low: str, high: str) -> tuple[ModuleType, ...]:
    """Return the revisions after *start* up to and with *end*."""
    known = revisions()
    for name, value in ((low, start), (high, end)):
        if value not in known and not (value is None and name == low):
            message = f"{name} must be one of {', '.join(known)}, got {value!r}"
            raise InvalidArgumentError(message)
    first = known.index(start) + 1 if start is not None else 0
    last = known.index(end) + 1
    if first >= last:
        message = f"{low} must come before {high}, got {low}={start!r} and {high}={end!r}"
        raise InvalidArgumentError(message)
    return versions.CHAIN[first:last]
