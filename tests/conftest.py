"""Fixtures: private PostgreSQL servers, a database a module, an engine on every driver.

    def test_on_postgresql(database): ...      # .url("psycopg"), .name, .cluster
    def test_everywhere(sync_engine): ...      # runs on psycopg and on sqlite
    async def test_async(async_engine): ...    # runs on asyncpg, psycopg_async and aiosqlite

A test runs on the newest PostgreSQL, and with `@pytest.mark.every_postgres` on each that was
found (`TEST_POSTGRES=15,18` chooses, `TEST_POSTGRES=none` skips what needs one).
`@pytest.mark.drivers("psycopg")` narrows the drivers; a test that also asks for `database` or
`cluster` gets no SQLite. Servers are started when the first test needs them, one a version.

`async def` tests need no plugin: each runs under its own `asyncio.run`. Fixtures are never async;
a test opens what belongs to its loop itself (`async with open_async_engine(...)`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.engines import (
    ASYNC_DRIVERS,
    DIALECT_AND_DRIVER,
    ON_SQLITE,
    SYNC_DRIVERS,
    make_empty_tables,
    open_engine,
    poolless_async_engine,
)
from tests.postgres import Cluster, Server, available, given_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.postgres import Driver

ENGINE_DRIVERS: dict[str, tuple[str, ...]] = {
    "sync_engine": SYNC_DRIVERS,
    "async_engine": ASYNC_DRIVERS,
}

# A shared machine pauses for longer than hypothesis' 200 ms now and then.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@dataclass(frozen=True, slots=True)
class Database:
    """An empty database on a server; it lives as long as its test module."""

    name: str
    cluster: Server

    def url(self, driver: Driver) -> str:
        """SQLAlchemy URL for one driver."""
        return self.cluster.url(self.name, driver)


@dataclass(frozen=True, slots=True)
class Backend:
    """What an engine runs on: a driver, and a version where the `cluster` fixture names none."""

    driver: str
    postgres: int | None = None

    def __str__(self) -> str:
        return self.driver if self.postgres is None else f"{self.driver}-pg{self.postgres}"


class Clusters:
    """The servers of this run, one a version, started when first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        """Start nothing; `stack` stops what was started."""
        self._stack = stack
        self._running: dict[int, Server] = {}

    def get(self, version: int) -> Server:
        """The running server of a major version."""
        if version not in self._running:
            given = given_server()
            self._running[version] = given or self._stack.enter_context(Cluster(version))
        return self._running[version]


class Databases:
    """The databases of one module, one a version, made when first asked for."""

    def __init__(self, clusters: Clusters, stack: ExitStack) -> None:
        """Create nothing; `stack` drops what was created."""
        self._clusters = clusters
        self._stack = stack
        self._made: dict[int, Database] = {}

    def get(self, version: int) -> Database:
        """The module's database on a major version."""
        if version not in self._made:
            cluster = self._clusters.get(version)
            name = cluster.create_database()
            self._stack.callback(cluster.drop_database, name)
            self._made[version] = Database(name, cluster)
        return self._made[version]


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """Every server of the run, by version."""
    with ExitStack() as stack:
        yield Clusters(stack)


@pytest.fixture(scope="module")
def databases(clusters: Clusters) -> Iterator[Databases]:
    """Every database of the module, by version."""
    with ExitStack() as stack:
        yield Databases(clusters, stack)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, clusters: Clusters) -> Server:
    """The server under test, shared by the whole run: do not stop it (see `own_cluster`)."""
    return clusters.get(request.param)


@pytest.fixture(scope="module")
def database(cluster: Server, databases: Databases) -> Database:
    """The module's own PostgreSQL database, without any table of ours at first."""
    return databases.get(cluster.version)


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A server for this test alone, which it may stop, restart and crash."""
    with Cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet (`sqlite+aiosqlite` when async)."""
    return f"sqlite:///{tmp_path / 'jobs.sqlite'}"


@pytest.fixture
def sync_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with an empty jobs table, on each of SYNC_DRIVERS."""
    url = _url(request)
    make_empty_tables(url)
    with open_engine(url) as engine:
        yield engine


@pytest.fixture
def async_engine(request: pytest.FixtureRequest) -> AsyncEngine:
    """An async engine with an empty jobs table, on each of ASYNC_DRIVERS.

    It has no pool: a fixture lives outside the test's event loop, and a connection kept in a pool
    would have to be closed inside. A test about pools opens `async_engine.url` with
    `open_async_engine`.
    """
    url = _url(request)
    make_empty_tables(url)
    return poolless_async_engine(url)


def _url(request: pytest.FixtureRequest) -> str:
    backend: Backend = request.param
    dialect = DIALECT_AND_DRIVER[backend.driver]
    if backend.driver in ON_SQLITE:
        sqlite_url: str = request.getfixturevalue("sqlite_url")
        return sqlite_url.replace("sqlite", dialect, 1)
    if backend.postgres is None:
        database: Database = request.getfixturevalue("database")
    else:
        database = request.getfixturevalue("databases").get(backend.postgres)
    return database.url("asyncpg" if backend.driver == "asyncpg" else "psycopg")


def pytest_configure() -> None:
    """Keep a developer's own databases out of the tests."""
    for name in list(os.environ):
        if name.startswith("PG") or name in {"DATABASE_URL", "DATABASE_DIRECT_URL"}:
            del os.environ[name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread a test over the servers and the drivers that its fixtures name."""
    asked = [name for name in ENGINE_DRIVERS if name in metafunc.fixturenames]
    if len(asked) > 1:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: open the second engine from the first one's url"
        )
    on_a_cluster = "cluster" in metafunc.fixturenames
    for name in {"cluster", "own_cluster"}.intersection(metafunc.fixturenames):
        versions = _versions(metafunc)
        metafunc.parametrize(
            name, _or_skipped(versions), indirect=True, ids=[f"pg{version}" for version in versions]
        )
    for name in asked:
        backends = list(_backends(metafunc, ENGINE_DRIVERS[name], on_a_cluster=on_a_cluster))
        metafunc.parametrize(name, _or_skipped(backends), indirect=True, ids=str)


def _versions(metafunc: pytest.Metafunc) -> list[int]:
    found = available()
    marked = metafunc.definition.get_closest_marker("every_postgres") is not None
    return found if marked else found[:1]


def _backends(
    metafunc: pytest.Metafunc, drivers: tuple[str, ...], *, on_a_cluster: bool
) -> Iterator[Backend]:
    mark = metafunc.definition.get_closest_marker("drivers")
    wanted = drivers if mark is None else mark.args
    unknown = set(wanted).difference(SYNC_DRIVERS, ASYNC_DRIVERS)
    if unknown:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: no such drivers: {sorted(unknown)}")
    for driver in drivers:
        if driver not in wanted:
            continue
        if driver in ON_SQLITE:
            if not on_a_cluster:
                yield Backend(driver)
        elif on_a_cluster:
            yield Backend(driver)
        else:
            for version in _versions(metafunc):
                yield Backend(driver, version)


def _or_skipped(values: list[Any]) -> list[Any]:
    # pytest skips a test with an empty parameter set, with a reason nobody understands.
    mark = pytest.mark.skip(reason="TEST_POSTGRES=none")
    return values or [pytest.param(None, marks=mark)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where nothing may be skipped, as in CI, if anything was."""
    terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("TEST_NO_SKIPS") and terminal and terminal.stats.get("skipped"):
        terminal.write_line("tests were skipped, and TEST_NO_SKIPS is set", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
