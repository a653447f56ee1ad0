"""The worker's own connections, and the channel on which it is notified."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, text

from sqlalchemy_jobs._channel import LONGEST, channel_of
from sqlalchemy_jobs._connections import autocommit, own_engine
from sqlalchemy_jobs._messages import Claim, Outcome, Settle
from sqlalchemy_jobs.errors import UnsupportedDatabaseError
from tests.engines import make_empty_tables, open_async_engine, open_engine
from tests.rows import JOBS, Hand, open_queue

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database

POSTGRES = pytest.mark.drivers("psycopg")


def shown(connection: Connection, name: str) -> str:
    """A setting as the server sees it."""
    value: str = connection.execute(text(f"SHOW {name}")).scalar_one()
    return value


@pytest.fixture
def strict(database: Database) -> Generator[Database]:
    """A database in which every transaction is serializable unless asked otherwise."""
    make_empty_tables(database.url("psycopg"))
    setting = "default_transaction_isolation"
    database.cluster.psql(f'ALTER DATABASE "{database.name}" SET {setting} = serializable')
    yield database
    database.cluster.psql(f'ALTER DATABASE "{database.name}" RESET {setting}')


# --- isolation and plans -----------------------------------------------------------------------


@pytest.mark.every_postgres
@pytest.mark.parametrize("level", [None, "SERIALIZABLE", "REPEATABLE READ"])
def test_the_workers_connections_are_read_committed(strict: Database, level: str | None) -> None:
    """Whatever the database's and the engine's default, the worker's statements are their own."""
    options = {} if level is None else {"isolation_level": level}
    with open_engine(strict.url("psycopg"), **options) as engine:
        own = own_engine(engine)
        with own.connect() as opened:
            connection = autocommit(opened)
            assert shown(connection, "transaction_isolation") == "read committed"
            assert shown(connection, "plan_cache_mode") == "force_generic_plan"
            began = connection.execute(text("SELECT now()")).scalar_one()
            assert connection.execute(text("SELECT now()")).scalar_one() > began
        own.dispose()


@pytest.mark.drivers("asyncpg", "psycopg_async")
async def test_an_async_connection_is_set_up_alike(async_engine: AsyncEngine) -> None:
    """The set-up that an async worker lends its connection to does the same on each driver."""
    async with (
        open_async_engine(async_engine.url, isolation_level="SERIALIZABLE") as engine,
        engine.connect() as connection,
    ):
        found = await connection.run_sync(
            lambda sync: [
                shown(autocommit(sync), name)
                for name in ("transaction_isolation", "plan_cache_mode")
            ]
        )
    assert found == ["read committed", "force_generic_plan"]


def test_the_set_up_may_be_repeated(sync_engine: Engine) -> None:
    """Setting a connection up twice is the same as once."""
    with sync_engine.connect() as connection:
        autocommit(autocommit(connection))
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
        assert connection.get_execution_options()["isolation_level"] == "AUTOCOMMIT"


@pytest.mark.every_postgres
def test_serializable_defaults_surface_no_serialization_failure(strict: Database) -> None:
    """Four workers drain a queue in a database whose default is SERIALIZABLE: all done, once."""
    with open_engine(strict.url("psycopg"), isolation_level="SERIALIZABLE") as engine:
        with open_queue(engine) as queue:
            queue.clear()
            queue.run("INSERT INTO {jobs} (task) SELECT 'a' FROM generate_series(1, 400)")
        failures: list[BaseException] = []

        def work(name: str) -> None:
            try:
                with open_queue(engine) as own:
                    hand = Hand(own, worker=name)
                    while True:
                        answer = hand(Claim(10))
                        ended = tuple(Outcome.succeeded(lease) for lease in answer.leases)
                        if ended:
                            assert hand(Settle(ended)).recorded == ended
                        elif not answer.more:
                            return
            except BaseException as error:  # noqa: BLE001 - shown below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(f"w{n}",), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        with open_queue(engine) as queue:
            rows = queue.rows().values()
            assert len(rows) == 400
            assert {(row["status"], row["attempts"]) for row in rows} == {("succeeded", 1)}


# --- an engine of its own ----------------------------------------------------------------------


@POSTGRES
def test_the_users_pool_is_not_touched(sync_engine: Engine) -> None:
    """The worker connects while the user's handlers hold every connection of the pool."""
    with open_engine(sync_engine.url, pool_size=1, max_overflow=0, pool_timeout=1) as engine:
        own = own_engine(engine)
        with engine.connect(), own.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar_one() == 1
            assert own.pool is not engine.pool
        own.dispose()


@POSTGRES
def test_the_own_engine_keeps_the_translated_schema(sync_engine: Engine) -> None:
    """Execution options of the user's engine hold for the worker too, but not its isolation."""
    engine = sync_engine.execution_options(
        schema_translate_map={"jobs": "work"}, isolation_level="SERIALIZABLE"
    )
    own = own_engine(engine)
    assert own.get_execution_options() == {"schema_translate_map": {"jobs": "work"}}
    assert own.url == engine.url
    assert own.hide_parameters


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_an_in_memory_database_is_refused(url: str) -> None:
    """A worker cannot share a database that exists for one connection only, and says what to do."""
    engine = create_engine(url)
    with pytest.raises(UnsupportedDatabaseError, match="use a file"):
        own_engine(engine)
    engine.dispose()


# --- the channel -------------------------------------------------------------------------------


def table(schema: str | None, name: str = "jobs") -> Table:
    """A table of that name."""
    return Table(name, MetaData(), Column("id", Integer), schema=schema)


@pytest.fixture(scope="module")
def postgres(database: Database) -> Generator[Engine]:
    """An engine on PostgreSQL."""
    with open_engine(database.url("psycopg")) as engine:
        yield engine


def test_the_channel_names_schema_and_table(postgres: Engine) -> None:
    """Short names are legible, so that a person can listen."""
    assert channel_of(postgres, JOBS) == "jobs.jobs"
    assert channel_of(postgres, table("work", "tasks")) == "work.tasks"
    assert channel_of(postgres, table(None)) == "jobs"


def test_two_installations_in_one_database_differ(postgres: Engine) -> None:
    """Another schema or another table is another channel, long names included."""
    names = [
        table(s, t) for s in (None, "a", "b", "x" * 63, "x" * 62) for t in ("t", "u", "y" * 63)
    ]
    assert len({channel_of(postgres, each) for each in names}) == len(names)


@pytest.mark.parametrize("schema", ["Weird Schema", 'with"quote', "ünïcode", "x" * 63, "ü" * 31])
@pytest.mark.parametrize("name", ["jobs", "j" * 63, "Mixed Case"])
def test_any_name_is_a_channel_that_can_be_heard(
    database: Database, postgres: Engine, schema: str, name: str
) -> None:
    """Quoted, long and non-ASCII names fit into 63 bytes, and what is sent there is heard there."""
    channel = channel_of(postgres, table(schema, name))
    assert len(channel.encode()) <= LONGEST
    with database.cluster.connect(database.name) as listener, open_queue(postgres) as queue:
        listener.execute(
            'LISTEN "{}"'.format(channel.replace('"', '""')).encode()  # as _listen quotes it
        )
        call = queue.statements.notify(channel, "a")
        assert call is not None
        queue.connection.execute(*call).all()
        (notice,) = listener.notifies(timeout=30, stop_after=1)
        assert (notice.channel, notice.payload) == (channel, "a")


def test_the_longest_legible_name_has_63_bytes(postgres: Engine) -> None:
    """One byte more and a digest takes the name's place."""
    fits = table("s" * 31, "t" * 31)
    assert channel_of(postgres, fits) == "s" * 31 + "." + "t" * 31
    assert channel_of(postgres, table("s" * 31, "t" * 32)).startswith("jobs.")


def test_the_channel_follows_the_translated_schema(postgres: Engine) -> None:
    """A schema_translate_map on the engine or the connection moves the channel with the table."""
    moved = postgres.execution_options(schema_translate_map={"jobs": "tenant_1"})
    assert channel_of(moved, JOBS) == "tenant_1.jobs"
    bare = postgres.execution_options(schema_translate_map={"jobs": None})
    assert channel_of(bare, JOBS) == "jobs"
    with postgres.connect() as connection:
        connection.execution_options(schema_translate_map={"jobs": "tenant_2"})
        assert channel_of(connection, JOBS) == "tenant_2.jobs"
    other = postgres.execution_options(schema_translate_map={"else": "tenant_3"})
    assert channel_of(other, JOBS) == "jobs.jobs"


@pytest.mark.drivers("psycopg")
def test_a_connection_beside_the_first_knows_its_server_too(sync_engine: Engine) -> None:
    """Several connect at once when a database comes late: none waits for who was first."""
    with open_engine(sync_engine.url) as engine:
        own = own_engine(engine)
        with own.connect() as opened:
            known = opened.dialect.server_version_info
            opened.dialect.server_version_info = None
            assert autocommit(opened).dialect.server_version_info == known
        own.dispose()
