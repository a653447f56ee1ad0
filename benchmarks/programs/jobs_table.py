"""What our own programs and the raw ceiling have in common: the table."""

from __future__ import annotations

from sqlalchemy import make_url

FINISHED = (
    "SELECT NOT EXISTS (SELECT FROM jobs.jobs WHERE status = 'pending')"
    " AND NOT EXISTS (SELECT FROM jobs.jobs WHERE status = 'running')"
)
SUCCEEDED = "SELECT count(*) FROM jobs.jobs WHERE status = 'succeeded'"


def url(dsn: str, driver: str) -> str:
    """Return the SQLAlchemy URL of *dsn* for a driver."""
    return (
        make_url(dsn).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    )
