from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table, create_engine, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from sqlalchemy_jobs import migrations
from sqlalchemy_jobs.errors import InvalidArgumentError, SchemaError, UnsupportedDatabaseError
from sqlalchemy_jobs.migrations import versions
from sqlalchemy_jobs.migrations._support import step
from sqlalchemy_jobs.models import Job, metadata
from tests.alembic_project import REPOSITORY, VERSIONS, engine, jobs_dump, pg_dump
from tests.conftest import Database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from tests.postgres import Server

JOBS: Table = Job.__table__  # type: ignore[assignment]
SCHEMAS = pytest.mark.parametrize("schema", ["jobs", "My-Jobs", None])


@pytest.fixture
def fresh(cluster: Server) -> Iterator[Database]:
    """An empty database for this test alone."""
    name = cluster.create_database()
    yield Database(name, cluster)
    cluster.drop_database(name)


@pytest.fixture
def other(cluster: Server) -> Iterator[Database]:
    """A second one, to compare with."""
    name = cluster.create_database()
    yield Database(name, cluster)
    cluster.drop_database(name)


@pytest.fixture
def second_revision(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A later release: one with a further revision."""
    later = ModuleType("jobs_0002")

    @step
    def upgrade(op: Any, schema: str | None, table: str) -> None:
        op.add_column(table, sa.Column("queue", sa.Text()), schema=schema)

    @step
    def downgrade(op: Any, schema: str | None, table: str) -> None:
        op.drop_column(table, "queue", schema=schema)

    vars(later).update(
        revision="jobs_0002",
        down_revision="jobs_0001",
        COLUMNS=frozenset({"queue"}),
        upgrade=upgrade,
        downgrade=downgrade,
    )
    monkeypatch.setattr(versions, "CHAIN", (*versions.CHAIN, later))
    return later


def operations(connection: Connection) -> Operations:
    """What `alembic.op` stands for in a revision."""
    return Operations(MigrationContext.configure(connection))


def upgrade(where: Database | str, to: str = "jobs_0001", **options: Any) -> None:
    """Do what the line in a user's revision does."""
    with engine(where if isinstance(where, str) else where.url("psycopg")).begin() as connection:
        migrations.upgrade(operations(connection), to, **options)


def downgrade(where: Database | str, **options: Any) -> None:
    """Do what the line in a user's downgrade does."""
    with engine(where if isinstance(where, str) else where.url("psycopg")).begin() as connection:
        migrations.downgrade(operations(connection), **options)


def jobs_table(schema: str | None, name: str = "jobs") -> Table:
    """The shipped table as it is mapped in another schema or under another name."""
    return JOBS.to_metadata(MetaData(), schema=schema, name=name)  # type: ignore[arg-type]


def with_column(name: str) -> Table:
    """The shipped table with a column more."""
    table = jobs_table("jobs")
    table.append_column(sa.Column(name, sa.Text()))
    return table


# The list of revisions


def test_a_worker_that_checks_the_table_does_not_load_alembic() -> None:
    """Importing the package and checking a table leaves Alembic out of the process."""
    program = (
        "import sys, sqlalchemy_jobs.migrations;"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('alembic', 'mako')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_the_list_is_what_alembic_finds_in_the_folder() -> None:
    """Alembic and the helper run the same revisions in the same order, up to one head."""
    script = ScriptDirectory(REPOSITORY / "alembic", version_locations=[str(VERSIONS)])
    found = [revision.revision for revision in script.walk_revisions()]
    assert found[::-1] == migrations.revisions()
    assert script.get_heads() == [migrations.HEAD]
    assert script.get_revision("sqlalchemy_jobs@head").revision == migrations.HEAD
    assert versions.CHAIN[0].branch_labels == ("sqlalchemy_jobs",)


def test_every_revision_fits_the_version_table() -> None:
    """The name of a revision fits Alembic's column, and is the name of its file."""
    assert {path.stem for path in VERSIONS.glob("jobs_*.py")} == set(migrations.revisions())
    assert all(len(name) <= 32 for name in migrations.revisions())


@pytest.mark.parametrize(
    ("since", "to", "complaint"),
    [
        (None, "jobs_9999", "to must be one of jobs_0001, jobs_0002, got 'jobs_9999'"),
        (None, "head", "to must be one of jobs_0001, jobs_0002, got 'head'"),
        ("base", "jobs_0001", "since must be one of jobs_0001, jobs_0002, got 'base'"),
        ("jobs_0001", "jobs_0001", "since must come before to"),
        ("jobs_0002", "jobs_0001", "since must come before to"),
    ],
)
def test_an_impossible_way_up_is_refused(
    second_revision: ModuleType, since: str | None, to: str, complaint: str
) -> None:
    """A way that does not exist is refused before anything is done, and the names are listed."""
    with pytest.raises(InvalidArgumentError, match=complaint):
        migrations.upgrade(ModuleType("op"), to, since=since)


def test_an_impossible_way_down_is_refused(second_revision: ModuleType) -> None:
    """Going down is checked as going up is."""
    with pytest.raises(InvalidArgumentError, match="to must come before since"):
        migrations.downgrade(ModuleType("op"), "jobs_0002", since="jobs_0001")
    with pytest.raises(InvalidArgumentError, match="since must be one of"):
        migrations.downgrade(ModuleType("op"), since="jobs_0003")


def test_another_database_is_refused() -> None:
    """On a dialect that cannot keep the promises nothing is created."""
    context = MigrationContext.configure(dialect_name="mysql", opts={"as_sql": True})
    with pytest.raises(UnsupportedDatabaseError, match="this is mysql"):
        migrations.upgrade(Operations(context), "jobs_0001")


# The catalog


@SCHEMAS
@pytest.mark.every_postgres
def test_the_revisions_make_what_the_models_say(
    fresh: Database, other: Database, schema: str | None
) -> None:
    """The catalog after all revisions and after create_all is the same to the last character."""
    upgrade(fresh, migrations.HEAD, schema=schema)
    with engine(other.url("psycopg")).begin() as connection:
        if schema == "jobs":
            metadata.create_all(connection)
        else:
            if schema:
                connection.execute(sa.schema.CreateSchema(schema))
            jobs_table(schema).create(connection)
    dump = jobs_dump(fresh)
    assert "jobs_idempotency_key" in dump
    assert dump == jobs_dump(other)


@SCHEMAS
@pytest.mark.every_postgres
def test_down_and_up_again_gives_the_same_catalog(fresh: Database, schema: str | None) -> None:
    """A downgrade leaves the schema and nothing else, and an upgrade after it gives the same."""
    upgrade(fresh, migrations.HEAD, schema=schema)
    before = pg_dump(fresh)
    downgrade(fresh, since=migrations.HEAD, schema=schema)
    empty = pg_dump(fresh)
    assert "TABLE" not in empty
    assert ("CREATE SCHEMA" in empty) == (schema is not None)
    upgrade(fresh, migrations.HEAD, schema=schema)
    assert pg_dump(fresh) == before


def test_sqlite_gets_what_the_models_say(tmp_path: Any) -> None:
    """On SQLite too the revisions and create_all make the same table and the same indexes."""

    def catalog(url: str) -> set[tuple[str, str, str]]:
        with engine(url).connect() as connection:
            rows = connection.execute(text("SELECT type, name, sql FROM sqlite_master"))
            return {(kind, name, re.sub(r"\s+", " ", sql or "")) for kind, name, sql in rows}

    revisions, models = f"sqlite:///{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b'}"
    upgrade(revisions, migrations.HEAD)
    metadata.create_all(engine(models))
    assert len(catalog(models)) > 5
    assert catalog(revisions) == catalog(models)
    downgrade(revisions, since=migrations.HEAD)
    assert {name for _, name, _ in catalog(revisions)} <= {"sqlite_sequence"}


def test_a_schema_that_is_there_needs_no_right_to_make_one(fresh: Database) -> None:
    """A role that may not create schemas can migrate into one that was made for it."""
    role = f"plain_{fresh.name}"
    for statement in (
        f"CREATE ROLE {role} LOGIN",
        f"CREATE SCHEMA jobs AUTHORIZATION {role}",
    ):
        fresh.cluster.psql(statement, fresh.name)
    try:
        with engine(fresh.url("psycopg")).begin() as connection:
            connection.execute(text(f"SET LOCAL ROLE {role}"))
            refused = pytest.raises(ProgrammingError, match="permission denied")
            with refused, connection.begin_nested():
                connection.execute(text("CREATE SCHEMA IF NOT EXISTS jobs"))
            migrations.upgrade(operations(connection), "jobs_0001")
            assert migrations.check_schema(connection, JOBS) == "jobs_0001"
    finally:
        fresh.cluster.psql(f"DROP OWNED BY {role}", fresh.name)
        fresh.cluster.psql(f"DROP ROLE {role}", fresh.name)


def test_another_table_name_renames_what_belongs_to_it(fresh: Database) -> None:
    """Two tables stand in one schema, since constraints and indexes carry the table's name."""
    upgrade(fresh)
    upgrade(fresh, table="mails")
    with engine(fresh.url("psycopg")).connect() as connection:
        inspector = sa.inspect(connection)
        assert {index["name"] for index in inspector.get_indexes("mails", "jobs")} == {
            "mails_due",
            "mails_finished",
            "mails_idempotency_key",
            "mails_running",
        }
        assert migrations.check_schema(connection, jobs_table("jobs", "mails")) == "jobs_0001"
    downgrade(fresh, since="jobs_0001", table="mails")
    with engine(fresh.url("psycopg")).connect() as connection:
        assert sa.inspect(connection).get_table_names("jobs") == ["jobs"]


def test_the_schema_translate_map_moves_the_table(fresh: Database) -> None:
    """With a map on the connection, the table and its schema are made where the map points."""
    options = {"schema_translate_map": {"jobs": "tenant"}}
    with engine(fresh.url("psycopg")).execution_options(**options).begin() as connection:
        migrations.upgrade(operations(connection), "jobs_0001")
        assert sa.inspect(connection).get_table_names("tenant") == ["jobs"]
        assert not sa.inspect(connection).has_schema("jobs")
        assert migrations.check_schema(connection, JOBS) == "jobs_0001"


# A later release


def test_a_later_release_goes_on_from_the_earlier_one(
    fresh: Database, other: Database, second_revision: ModuleType
) -> None:
    """The line of the first release followed by the second's makes what one line would make."""
    upgrade(fresh, "jobs_0001")
    first = pg_dump(fresh)
    upgrade(fresh, "jobs_0002", since="jobs_0001")
    upgrade(other, "jobs_0002")
    assert pg_dump(fresh) == pg_dump(other) != first
    downgrade(fresh, to="jobs_0001", since="jobs_0002")
    assert pg_dump(fresh) == first
    downgrade(other, since="jobs_0002")
    assert "TABLE" not in pg_dump(other)


# What a worker checks at its start


def test_a_missing_table_is_reported_with_the_way_to_make_it(fresh: Database) -> None:
    """The error names the table, the database, the command and the line to write."""
    with engine(fresh.url("psycopg")).connect() as connection:
        with pytest.raises(SchemaError) as caught:
            migrations.check_schema(connection, JOBS)
        assert str(caught.value) == (
            f'the table jobs.jobs is not in the database "{fresh.name}": run "alembic upgrade '
            'head"; if no revision makes the table yet, write one: '
            'sqlalchemy_jobs.migrations.upgrade(op, to="jobs_0001")'
        )
        for table, arguments in (
            (jobs_table("My-Jobs"), "schema='My-Jobs'"),
            (jobs_table(None, "tasks"), "schema=None, table='tasks'"),
        ):
            with pytest.raises(SchemaError, match=re.escape(f'to="jobs_0001", {arguments})')):
                migrations.check_schema(connection, table)


def test_an_older_table_is_reported_with_the_line_that_goes_on(
    fresh: Database, second_revision: ModuleType
) -> None:
    """A table of an earlier release is recognised, and the line starts where it stands."""
    upgrade(fresh, "jobs_0001")
    later = with_column("queue")
    with engine(fresh.url("psycopg")).connect() as connection:
        line = 'migrations.upgrade(op, since="jobs_0001", to="jobs_0002")'
        with pytest.raises(SchemaError, match="lacks queue: it stands at jobs_0001") as caught:
            migrations.check_schema(connection, later)
        assert line in str(caught.value)
        assert migrations.check_schema(connection, JOBS) == "jobs_0001"
    upgrade(fresh, "jobs_0002", since="jobs_0001")
    with engine(fresh.url("psycopg")).connect() as connection:
        assert migrations.check_schema(connection, later) == "jobs_0002"


def test_the_workers_of_an_earlier_release_run_on_a_newer_table(
    fresh: Database, second_revision: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that the release does not know do not stop it: deployments roll."""
    upgrade(fresh, "jobs_0002")
    monkeypatch.setattr(versions, "CHAIN", versions.CHAIN[:1])
    with engine(fresh.url("psycopg")).connect() as connection:
        assert migrations.check_schema(connection, JOBS) == "jobs_0001"


def test_a_column_of_the_users_own_is_checked_too(fresh: Database) -> None:
    """A class with a column more than the table is refused, and nobody is sent to our revisions."""
    upgrade(fresh)
    with (
        engine(fresh.url("psycopg")).connect() as connection,
        pytest.raises(SchemaError, match=r"lacks tenant: run .* adds what your class has more"),
    ):
        migrations.check_schema(connection, with_column("tenant"))


def test_another_table_of_that_name_is_not_taken_for_ours(fresh: Database) -> None:
    """An application's own table called jobs is reported with what it lacks."""
    fresh.cluster.psql("CREATE TABLE jobs (id bigint, title text)", fresh.name)
    with (
        engine(fresh.url("psycopg")).connect() as connection,
        pytest.raises(SchemaError, match=r"lacks task, payload, .* it is another table"),
    ):
        migrations.check_schema(connection, jobs_table(None))


def test_on_sqlite_the_table_is_looked_for_without_a_schema(sqlite_url: str) -> None:
    """SQLite has no schemas: with a map on the connection or without one, the table is found."""
    made = engine(sqlite_url)
    missing = pytest.raises(SchemaError, match=r"the table jobs is not in .*to=\"jobs_0001\"\)$")
    with made.connect() as connection, missing:
        migrations.check_schema(connection, JOBS)
    upgrade(sqlite_url)
    for options in ({}, {"schema_translate_map": {"jobs": None}}):
        with made.execution_options(**options).connect() as connection:
            assert migrations.check_schema(connection, JOBS) == "jobs_0001"
    in_memory = pytest.raises(SchemaError, match=":memory:")
    with create_engine("sqlite://").connect() as connection, in_memory:
        migrations.check_schema(connection, JOBS)


# Many at once


def test_the_lock_lets_one_in_and_the_others_wait(
    fresh: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits says so once, holds no snapshot meanwhile, and goes on when the first ends."""
    caplog.set_level(logging.INFO, "sqlalchemy_jobs.migrations")
    entered = threading.Event()

    def second() -> None:
        with engine(fresh.url("psycopg")).connect() as connection, migrations.lock(connection):
            entered.set()

    waiting = threading.Thread(target=second)
    with engine(fresh.url("psycopg")).connect() as connection:
        with migrations.lock(connection):
            assert not connection.in_transaction()
            waiting.start()
            deadline = time.monotonic() + 10
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not entered.is_set()
            # Would wait for ever for a snapshot that waits for it.
            upgrade(fresh)
            autocommit = engine(fresh.url("psycopg")).execution_options(
                isolation_level="AUTOCOMMIT"
            )
            with autocommit.connect() as builder:
                builder.execute(text("CREATE INDEX CONCURRENTLY x ON jobs.jobs (task)"))
        assert entered.wait(10)
    waiting.join(10)
    assert [record.message for record in caplog.records] == [
        "another process migrates this database; waiting for it"
    ]


def test_the_lock_is_let_go_when_a_migration_fails(fresh: Database) -> None:
    """An error inside comes out as it is, and the connection can go back to a pool."""
    with engine(fresh.url("psycopg")).connect() as connection:
        with pytest.raises(ProgrammingError, match="nowhere"), migrations.lock(connection):
            connection.execute(text("SELECT * FROM nowhere"))
        assert held(fresh) == 0


def test_the_lock_survives_the_loss_of_its_connection(fresh: Database) -> None:
    """When the server drops the connection, the error that is seen is the migration's own."""
    with engine(fresh.url("psycopg")).connect() as connection:
        lost = pytest.raises(OperationalError, match="pg_terminate_backend")
        with lost, migrations.lock(connection):
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        assert held(fresh) == 0


def test_in_somebody_elses_transaction_the_lock_ends_with_it(fresh: Database) -> None:
    """A connection that is shared inside a transaction keeps the lock until that ends."""
    with engine(fresh.url("psycopg")).connect() as connection:
        with connection.begin():
            with migrations.lock(connection):
                pass
            assert held(fresh) == 1
        assert held(fresh) == 0


def held(database: Database) -> int:
    """How many advisory locks anybody holds in the database."""
    query = (
        "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database"
        f" WHERE locktype = 'advisory' AND datname = '{database.name}'"
    )
    ((count,),) = database.cluster.psql(query)
    return int(count)


def test_the_manual_shows_the_newest_revision() -> None:
    """The line that people copy makes the table of this release."""
    line = f'migrations.upgrade(op, to="{migrations.HEAD}")'
    assert line in (REPOSITORY / "docs" / "migrations.md").read_text()
    assert line in (migrations.__doc__ or "")
