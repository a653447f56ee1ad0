"""`alembic` in this repository, with pyproject.toml alone."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from sqlalchemy_jobs import migrations
from sqlalchemy_jobs.models import Job, metadata
from tests.alembic_project import (
    REPOSITORY,
    alembic_here,
    engine,
    jobs_dump,
    pg_dump,
    run_here,
    run_in,
    together,
)
from tests.conftest import Database

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import Server


@pytest.fixture
def fresh(cluster: Server) -> Iterator[Database]:
    """An empty database for this test alone."""
    name = cluster.create_database()
    yield Database(name, cluster)
    cluster.drop_database(name)


def refusal(*arguments: str, url: str | None = None) -> str:
    """What a command that must fail says, without the traceback it must not have."""
    done = subprocess.run(
        alembic_here(*arguments, url=url),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.every_postgres
def test_the_ordinary_commands_work_without_an_ini_file(fresh: Database) -> None:
    """Up, a check that finds nothing, down and up again, each from an empty environment."""
    url = fresh.url("psycopg")
    assert not (REPOSITORY / "alembic.ini").exists()
    assert run_here("current", url=url) == ""
    assert "SCHEMA" not in pg_dump(fresh), "looking must not create anything"
    run_here("upgrade", "head", url=url)
    dump = pg_dump(fresh)
    assert f"{migrations.HEAD} (head)" in run_here("current", url=url)
    assert "No new upgrade operations" in run_here("check", url=url)
    run_here("downgrade", "base", url=url)
    with engine(url).connect() as connection:
        assert sa.inspect(connection).get_table_names("jobs") == [migrations.VERSION_TABLE]
    run_here("upgrade", "head", url=url)
    assert pg_dump(fresh) == dump


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "asyncpg"])
def test_every_way_to_write_the_url_works(fresh: Database, scheme: str) -> None:
    """URLs without a driver get one that is installed, and asynchronous drivers work."""
    scheme = {"asyncpg": "postgresql+asyncpg"}.get(scheme, scheme)
    url = fresh.url("psycopg").replace("postgresql+psycopg", scheme, 1)
    run_here("upgrade", "head", DATABASE_URL=url)
    with engine(fresh.url("psycopg")).connect() as connection:
        assert migrations.check_schema(connection, Job.__table__) == migrations.HEAD  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", ["sqlite", "sqlite+aiosqlite"])
def test_sqlite_is_migrated_too(tmp_path: Path, dialect: str) -> None:
    """On a SQLite file, by either driver, everything goes without a schema."""
    url = f"{dialect}:///{tmp_path / 'jobs.sqlite'}"
    run_here("upgrade", "head", url=url)
    assert "No new upgrade operations" in run_here("check", url=url)
    with engine(url).connect() as connection:
        names = sa.inspect(connection).get_table_names()
        assert names == ["jobs", migrations.VERSION_TABLE]
    run_here("downgrade", "base", url=url)
    with engine(url).connect() as connection:
        assert sa.inspect(connection).get_table_names() == [migrations.VERSION_TABLE]


def test_without_a_url_one_sentence_says_what_to_do() -> None:
    """No URL, and no form of a URL: one sentence, which never repeats a password."""
    assert "no database is given: set DATABASE_URL" in refusal("upgrade", "head")
    said = refusal("upgrade", "head", url="//app:secret@host")
    assert "not of the form postgresql://" in said
    assert "secret" not in said


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_sql_it_prints_makes_the_same_catalog(
    fresh: Database, cluster: Server, driver: str
) -> None:
    """What `--sql` prints, run by hand, equals what the command does; downgrade likewise."""
    other = Database(cluster.create_database(), cluster)
    try:
        run_here("upgrade", "head", url=fresh.url("psycopg"))
        url = other.url(driver)  # type: ignore[arg-type]
        with cluster.connect(other.name) as connection:
            connection.execute(run_here("upgrade", "head", "--sql", url=url).encode())
            assert pg_dump(other) == pg_dump(fresh)
            sql = run_here("downgrade", f"{migrations.HEAD}:base", "--sql", url=url)
            assert "SCHEMA" not in sql
            connection.execute(sql.encode())
        run_here("downgrade", "base", url=fresh.url("psycopg"))
        # Older versions of Alembic print that their own table is dropped as well.
        assert jobs_dump(other) == jobs_dump(fresh)
    finally:
        cluster.drop_database(other.name)


def test_the_sql_for_sqlite_knows_no_schema(tmp_path: Path) -> None:
    """What `--sql` prints for SQLite runs in SQLite."""
    sql = run_here("upgrade", "head", "--sql", url="sqlite://")
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(sql)
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert {"jobs", "jobs_due", migrations.VERSION_TABLE} <= names


def test_eight_processes_may_upgrade_at_once(fresh: Database) -> None:
    """Eight deployments that upgrade an empty database at the same time all succeed."""
    url = fresh.url("psycopg")
    assert together(8, alembic_here("upgrade", "head"), REPOSITORY, DATABASE_URL=url) == []
    assert f"{migrations.HEAD} (head)" in run_here("current", url=url)
    assert "No new upgrade operations" in run_here("check", url=url)


def test_two_installations_live_in_one_database(fresh: Database) -> None:
    """Each schema has its table and its own revision, also one whose name needs quotes."""
    url = fresh.url("psycopg")

    def run(schema: str, *arguments: str) -> str:
        return run_here("-x", f"jobs_schema={schema}", *arguments, url=url)

    for schema in ("My-Jobs", "tenant_b", "", "public"):
        if schema == "public":
            run("", "downgrade", "base")
        run(schema, "upgrade", "head")
        assert "No new upgrade operations" in run(schema, "check")
    run("tenant_b", "downgrade", "base")
    with engine(url).connect() as connection:
        inspector = sa.inspect(connection)
        both = ["jobs", migrations.VERSION_TABLE]
        assert sorted(inspector.get_table_names("My-Jobs")) == both
        assert inspector.get_table_names("tenant_b") == [migrations.VERSION_TABLE]
        assert sorted(inspector.get_table_names("public")) == both
        assert not inspector.has_schema("jobs")


def test_foreign_tables_are_none_of_our_business(fresh: Database) -> None:
    """An application's tables, in any schema, and its own alembic_version do not disturb us."""
    for statement in (
        "CREATE TABLE alembic_version (version_num text)",
        "INSERT INTO alembic_version VALUES ('of_the_application')",
        "CREATE SCHEMA jobs CREATE TABLE archive (id int)",
    ):
        fresh.cluster.psql(statement, fresh.name)
    run_here("upgrade", "head", url=fresh.url("psycopg"))
    assert "No new upgrade operations" in run_here("check", url=fresh.url("psycopg"))


def test_tables_of_create_all_can_be_stamped(fresh: Database) -> None:
    """A table that create_all made is taken over by `stamp`, and is what the revisions make."""
    url = fresh.url("psycopg")
    metadata.create_all(engine(url))
    before = jobs_dump(fresh)
    run_here("stamp", "head", url=url)
    run_here("upgrade", "head", url=url)
    assert "No new upgrade operations" in run_here("check", url=url)
    assert jobs_dump(fresh) == before


def test_a_missing_index_is_noticed(fresh: Database) -> None:
    """The check compares our table indeed: without one of its indexes it complains."""
    run_here("upgrade", "head", url=fresh.url("psycopg"))
    fresh.cluster.psql("DROP INDEX jobs.jobs_due", fresh.name)
    assert "jobs_due" in refusal("check", url=fresh.url("psycopg"))


def test_a_new_revision_has_the_shape_of_the_others(tmp_path: Path) -> None:
    """What `alembic revision` writes here can be called by Alembic and by the helper."""
    copy = tmp_path / "copy"
    shutil.copytree(REPOSITORY / "alembic", copy / "alembic")
    shutil.copytree(REPOSITORY / "sqlalchemy_jobs", copy / "sqlalchemy_jobs")
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    url = f"sqlite:///{tmp_path / 'x.sqlite'}"
    for arguments in (
        ["revision", "--rev-id", "jobs_9999", "-m", "Add a thing"],
        ["upgrade", "head"],
        ["downgrade", "base"],
    ):
        run_in(copy, alembic_here(*arguments, url=url), PYTHONPATH=str(copy))
    written = copy / "sqlalchemy_jobs" / "migrations" / "versions" / "jobs_9999.py"
    assert "def upgrade(op: Any, schema: str | None, table: str)" in written.read_text()
