"""The test servers and fixtures do what they promise."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import func, insert, select, text

from sqlalchemy_jobs.models import Job
from tests.engines import open_async_engine, open_engine
from tests.postgres import Cluster, available, installations

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database
    from tests.postgres import Driver, Server

ROOT = Path(__file__).resolve().parent.parent


def count_and_add_a_row(connection: Connection) -> int:
    """How many jobs there are, before one more is added."""
    rows = connection.scalar(select(func.count()).select_from(Job))
    connection.execute(insert(Job).values(task="a", payload=None))
    return rows or 0


@pytest.mark.every_postgres
def test_a_cluster_is_of_the_version_it_says(cluster: Server) -> None:
    """The server answers with the major version that was asked for."""
    ((number,),) = cluster.psql("SHOW server_version_num")
    assert int(number) // 10000 == cluster.version


def test_every_postgres_is_tested_unless_the_environment_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TEST_POSTGRES chooses among the versions found, and may not name another."""
    monkeypatch.delenv("TEST_DATABASE_URL", raising=False)
    monkeypatch.delenv("TEST_POSTGRES", raising=False)
    found = available()
    assert found == sorted(found, reverse=True)
    monkeypatch.setenv("TEST_POSTGRES", str(found[-1]))
    assert available() == found[-1:]
    monkeypatch.setenv("TEST_POSTGRES", "none")
    assert available() == []
    monkeypatch.setenv("TEST_POSTGRES", "9")
    with pytest.raises(LookupError, match="9"):
        available()


def test_a_module_has_one_database(database: Database) -> None:
    """A table made here is seen by the next test."""
    database.cluster.psql("CREATE TABLE seen_by_the_next_test (x int)", database.name)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_database_is_reached_by_both_drivers(database: Database, driver: Driver) -> None:
    """The same URL helper serves both drivers, and the module's database is the same one."""
    async with open_async_engine(database.url(driver)) as engine, engine.connect() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM seen_by_the_next_test")) == 0


def test_a_dropped_database_is_gone_with_its_connections(cluster: Server) -> None:
    """An open connection does not keep a database alive."""
    name = cluster.create_database()
    with cluster.connect(name) as connection:
        cluster.drop_database(name)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert cluster.psql("SELECT 1 FROM pg_database WHERE datname = %s", parameters=[name]) == []


@pytest.mark.parametrize("round_", [1, 2])
@pytest.mark.every_postgres
def test_a_sync_engine_finds_the_table_empty(sync_engine: Engine, round_: int) -> None:
    """What an earlier test left is gone on every driver."""
    with sync_engine.begin() as connection:
        assert count_and_add_a_row(connection) == 0


@pytest.mark.parametrize("round_", [1, 2])
@pytest.mark.every_postgres
async def test_an_async_engine_finds_the_table_empty(
    async_engine: AsyncEngine, round_: int
) -> None:
    """The same on every async driver, in the event loop of the test."""
    async with async_engine.begin() as connection:
        assert await connection.run_sync(count_and_add_a_row) == 0


async def test_an_async_engine_with_a_pool_is_opened_by_its_url(async_engine: AsyncEngine) -> None:
    """A pooled engine on the same database keeps its connection and is disposed of in the loop."""
    async with open_async_engine(async_engine.url) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(count_and_add_a_row)
        async with engine.connect() as connection:
            assert await connection.scalar(select(func.count()).select_from(Job)) == 1


@pytest.mark.drivers("sqlite")
def test_the_drivers_marker_narrows(sync_engine: Engine) -> None:
    """Only the named drivers are left."""
    assert sync_engine.dialect.name == "sqlite"


def test_an_engine_beside_a_database_is_on_it(sync_engine: Engine, database: Database) -> None:
    """A test that asks for both gets the engine on that very database, and no SQLite."""
    assert sync_engine.url.database == database.name


async def test_async_tests_run_in_a_loop() -> None:
    """`async def` tests are awaited."""
    await asyncio.sleep(0)
    assert asyncio.get_running_loop().is_running()


def test_a_cluster_keeps_its_port_and_data_over_a_restart(own_cluster: Cluster) -> None:
    """A stopped server has no process and refuses; after the start everything is where it was."""
    name = own_cluster.create_database()
    own_cluster.stop()
    assert own_cluster.pid is None
    with pytest.raises(psycopg.OperationalError, match="refused"):
        own_cluster.connect(name)
    own_cluster.start()
    assert own_cluster.psql("SELECT 1", name) == [(1,)]


def test_a_crash_is_in_the_log(own_cluster: Cluster) -> None:
    """An immediate stop is a crash, and the log tells of the recovery."""
    own_cluster.restart("immediate")
    with open_engine(own_cluster.url("postgres", "psycopg")) as engine, engine.connect() as session:
        assert session.scalar(text("SELECT 1")) == 1
    assert "was not properly shut down" in own_cluster.log_text()


def test_a_failing_statement_is_in_the_log(own_cluster: Cluster) -> None:
    """The log names the statement that failed."""
    with pytest.raises(psycopg.errors.DivisionByZero):
        own_cluster.psql("SELECT 1/0 AS our_fault")
    assert "STATEMENT:  SELECT 1/0 AS our_fault" in own_cluster.log_text()


def test_a_durable_cluster_forgets_nothing() -> None:
    """Only a benchmark's server waits for the disk."""
    query = "SELECT current_setting('fsync'), current_setting('synchronous_commit')"
    with ExitStack() as stack:
        durable = stack.enter_context(Cluster(durable=True, settings={"max_connections": "10"}))
        assert durable.psql(query) == [("on", "on")]
        assert durable.psql("SHOW max_connections") == [("10",)]


def test_an_unknown_version_is_refused() -> None:
    """The message names the versions that are there."""
    with pytest.raises(LookupError, match=str(max(installations()))):
        Cluster(9)


def test_a_killed_test_run_leaves_no_server_behind() -> None:
    """The server and its files go with the process that started them, however that one ends."""
    program = (
        "from tests.postgres import Cluster\n"
        "cluster = Cluster()\n"
        "cluster.start()\n"
        "print(cluster.port, cluster.home, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        port, home = run.stdout.readline().split()
        socket.create_connection(("127.0.0.1", int(port))).close()
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(home).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(home).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
