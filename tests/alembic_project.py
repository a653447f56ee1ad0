"""Throw-away applications with an Alembic environment of their own, and pictures of catalogs."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import migrations
from sqlalchemy_jobs.models import Job
from tests.postgres import installations

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine, Table

    from tests.conftest import Database

JOBS: Table = Job.__table__  # type: ignore[assignment]
REPOSITORY = Path(__file__).resolve().parent.parent
VERSIONS = REPOSITORY / "sqlalchemy_jobs" / "migrations" / "versions"

INI = """\
[alembic]
script_location = %(here)s/migrations
version_locations = {locations}
path_separator = newline
sqlalchemy.url = {url}
{settings}
"""

ENV = """\
import asyncio
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy_jobs import migrations, models

metadata = MetaData({metadata})
Table("users", metadata, Column("id", Integer, primary_key=True))
{models}

url = make_url(context.config.get_main_option("sqlalchemy.url"))
options = dict(target_metadata={target}, {options})

def run(connection):
    {before}
    with {around}:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()

async def run_async():
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        await connection.run_sync(run)

if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
elif url.get_dialect().is_async:
    asyncio.run(run_async())
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        run(connection)
"""

MAKO = '''\
"""${message}"""
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
'''

REVISION = '''\
"""{name}"""
from alembic import op
import sqlalchemy as sa
from sqlalchemy_jobs import migrations

revision = {name!r}
down_revision = {after!r}

def upgrade():
    {upgrade}

def downgrade():
    {downgrade}
'''

BOTH = "[metadata, models.metadata]"
BRANCH = f"%(here)s/migrations/versions\n    {VERSIONS}"
HIDE = "include_object=migrations.include_object(), "


class Project:
    """An application that has a table `users`, and a revision `app_1` that makes it."""

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        target: str = "metadata",
        options: str = HIDE,
        metadata: str = "",
        models: str = "",
        before: str = "pass",
        around: str = "migrations.lock(connection)",
        locations: str = "%(here)s/migrations/versions",
        settings: str = "",
    ) -> None:
        """Write the files; every argument goes into `env.py` or `alembic.ini` as it is."""
        self.root = root
        self.url = url
        self.versions = root / "migrations" / "versions"
        self.versions.mkdir(parents=True)
        (root / "migrations" / "script.py.mako").write_text(MAKO)
        ini = INI.format(url=url.replace("%", "%%"), locations=locations, settings=settings)
        (root / "alembic.ini").write_text(ini)
        env = ENV.format(
            target=target,
            options=options,
            metadata=metadata,
            models=models,
            before=before,
            around=around,
        )
        (root / "migrations" / "env.py").write_text(env)
        self.revision(
            "app_1",
            upgrade="op.create_table('users', sa.Column('id', sa.Integer, primary_key=True))",
            downgrade="op.drop_table('users')",
        )

    def revision(
        self, name: str, *, after: str | None = None, upgrade: str = "pass", downgrade: str = "pass"
    ) -> None:
        """Write a revision by hand."""
        text = REVISION.format(name=name, after=after, upgrade=upgrade, downgrade=downgrade)
        (self.versions / f"{name}.py").write_text(text)

    def jobs(self, after: str = "app_1", name: str = "app_2", arguments: str = "") -> None:
        """Write the revision with our line in it."""
        self.revision(
            name,
            after=after,
            upgrade=f"migrations.upgrade(op, to='jobs_0001'{arguments})",
            downgrade=f"migrations.downgrade(op, since='jobs_0001'{arguments})",
        )

    def alembic(self, name: str, *arguments: str, **options: Any) -> str:
        """Run a command of Alembic's in this process, and return what it printed."""
        out = io.StringIO()
        config = Config(self.root / "alembic.ini", stdout=out, output_buffer=out)
        function: Callable[..., object] = getattr(command, name)
        function(config, *arguments, **options)
        return out.getvalue()

    def generated(self) -> str:
        """Let `--autogenerate` write a revision, and return its text."""
        before = set(self.versions.iterdir())
        self.alembic("revision", message="generated", autogenerate=True)
        (new,) = (path for path in self.versions.glob("*.py") if path not in before)
        return new.read_text()

    def engine(self) -> Engine:
        """Make an engine without a pool for the application's database."""
        return engine(self.url)


def engine(url: str) -> Engine:
    """Make a synchronous engine that keeps no connections."""
    made = make_url(url)
    if made.get_backend_name() == "postgresql":
        made = made.set(drivername="postgresql+psycopg")
    else:
        made = made.set(drivername="sqlite")
    return create_engine(made, poolclass=NullPool)


def alembic_here(*arguments: str, url: str | None = None) -> list[str]:
    """Return the command line of `alembic` in this repository; see `run_here`."""
    given = ["-x", f"url={url}"] if url else []
    return [sys.executable, "-m", "alembic", *given, *arguments]


def run_here(*arguments: str, url: str | None = None, **environment: str) -> str:
    """Run `alembic` in this repository as its own process and return what it printed."""
    return run_in(REPOSITORY, alembic_here(*arguments, url=url), **environment)


def run_in(directory: Path, arguments: list[str], **environment: str) -> str:
    """Run a program that must succeed, and return what it printed."""
    done = subprocess.run(
        arguments,
        cwd=directory,
        env=_environment(environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def together(count: int, arguments: list[str], cwd: Path, **environment: str) -> list[str]:
    """Run the same program several times at once; return what each wrote that failed."""
    running = [
        subprocess.Popen(
            arguments,
            cwd=cwd,
            env=_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(count)
    ]
    ended = [(process.communicate(timeout=90)[0], process.returncode) for process in running]
    return [output for output, code in ended if code]


def _environment(more: dict[str, str]) -> dict[str, str]:
    # The package need not be installed where its tests run.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)]))
    return {**os.environ, "PYTHONPATH": path, **more}


def pg_dump(database: Database, *options: str) -> str:
    """Return the catalog of a database as `pg_dump` writes it."""
    home = installations().get(database.cluster.version)
    program = home / "pg_dump" if home else shutil.which("pg_dump")
    assert program is not None, "pg_dump is missing"
    url = make_url(database.url("psycopg")).set(drivername="postgresql")
    done = subprocess.run(
        [program, "--schema-only", *options, url.render_as_string(hide_password=False)],
        capture_output=True,
        text=True,
        check=True,
    )
    # A password against injections, new in each dump.
    return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)


def jobs_dump(database: Database) -> str:
    """Return the catalog without the tables in which revisions are written down."""
    return pg_dump(database, "--exclude-table=*.*alembic_version")


def project_with_branch(root: Path, url: str, settings: str = "") -> Project:
    """An application with three revisions that takes ours through `version_locations`."""
    project = Project(root, url, locations=BRANCH, settings=settings)
    project.revision("app_2", after="app_1", upgrade="op.execute('SELECT 2')")
    project.revision("app_3", after="app_2", upgrade="op.execute('SELECT 3')")
    return project


def revision_of(url: str, table: Table = JOBS) -> str:
    """Ask what a worker asks at its start."""
    with engine(url).connect() as connection:
        return migrations.check_schema(connection, table)
