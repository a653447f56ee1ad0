"""The names of the channels on which workers are notified."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from .models import renamed

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table

LONGEST: Final = 63
"""Bytes of an identifier; a longer channel is an error in PostgreSQL."""


def channel_of(bind: Connection | Engine, table: Table) -> str:
    """Return the channel of a jobs table, as ``jobs.jobs``: schema and table.

    Two installations in one database never wake each other. The schema is the translated one. A
    name too long for a channel ends in a digest instead.
    """
    schema = renamed(bind, table.schema)
    name = f"{schema}.{table.name}" if schema else table.name
    if len(name.encode()) <= LONGEST:
        return name
    return f"jobs.{sha256(name.encode()).hexdigest()[:50]}"
