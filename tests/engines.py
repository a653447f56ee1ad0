"""Engines on every supported driver, with the jobs table made and empty.

Tests usually take the fixtures `sync_engine` and `async_engine` (see `conftest.py`); what is here
serves tests and benchmarks that need an engine of their own.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

SyncDriver = Literal["psycopg", "sqlite"]
AsyncDriver = Literal["asyncpg", "psycopg_async", "aiosqlite"]

SYNC_DRIVERS: tuple[SyncDriver, ...] = get_args(SyncDriver)
ASYNC_DRIVERS: tuple[AsyncDriver, ...] = get_args(AsyncDriver)
ON_SQLITE = frozenset({"sqlite", "aiosqlite"})

DIALECT_AND_DRIVER: dict[str, str] = {
    "psycopg": "postgresql+psycopg",
    "sqlite": "sqlite",
    "asyncpg": "postgresql+asyncpg",
    "psycopg_async": "postgresql+psycopg",
    "aiosqlite": "sqlite+aiosqlite",
}


@contextmanager
def open_engine(url: str | URL, **options: Any) -> Generator[Engine]:
    """Open an engine and dispose of it at the end."""
    engine = create_engine(url, **_defaults(url), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def open_async_engine(url: str | URL, **options: Any) -> AsyncGenerator[AsyncEngine]:
    """Open an async engine with its usual pool, and dispose of it in the loop it was used in.

    async with open_async_engine(async_engine.url, pool_size=1) as engine:
        ...
    """
    engine = create_async_engine(url, **_defaults(url), **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def poolless_async_engine(url: str | URL, **options: Any) -> AsyncEngine:
    """Make an async engine that keeps no connection, and so belongs to no event loop."""
    return create_async_engine(url, poolclass=NullPool, **_defaults(url), **options)


def make_empty_tables(url: str | URL) -> None:
    """Create the jobs table where it is missing, and remove every row where it is not."""
    from sqlalchemy_jobs.models import metadata  # noqa: PLC0415 - tests of this file do without

    url = make_url(url)
    with open_engine(_sync(url), poolclass=NullPool) as engine:
        metadata.create_all(engine)
        if engine.dialect.name != "postgresql":
            return  # every test has a file of its own
        names = ", ".join(str(table) for table in metadata.sorted_tables)
        with engine.begin() as connection:
            # A transaction that an earlier test left open would block for ever, and silently.
            connection.execute(text("SET LOCAL lock_timeout = '5s'"))
            connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))


def _sync(url: URL) -> URL:
    on_sqlite = url.get_backend_name() == "sqlite"
    return url.set(drivername="sqlite" if on_sqlite else "postgresql+psycopg")


def _defaults(url: str | URL) -> dict[str, Any]:
    if make_url(url).get_backend_name() != "sqlite":
        return {}
    # `select(Job)` means the table in schema "jobs", and SQLite has no schemas.
    return {"execution_options": {"schema_translate_map": {"jobs": None}}}
