"""The examples as their users run them: real processes, real databases, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import pytest
from sqlalchemy import select, text

from sqlalchemy_jobs import Job, Status
from tests.engines import open_engine
from tests.postgres import available

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Clusters

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
PYTHON = (sys.executable, "-W", "error")
PATIENCE = 60.0
"""Seconds: what a busy machine may take for what takes a moment."""

SLOW_MAIL = """
import asyncio
import logging
import fastapi_app
from fastapi_app import app
from sqlalchemy_jobs import AsyncWorker

logging.basicConfig(level=logging.INFO)  # a failing test shows it

async def send_mail(address, message_id):
    print("sending", flush=True)
    await asyncio.sleep({seconds})

fastapi_app.send_mail = send_mail
fastapi_app.worker = AsyncWorker(fastapi_app.engine, fastapi_app.tasks, shutdown_timeout={bound})
"""

FAILING_COMMIT = """
from fastapi_app import User, app
from sqlalchemy import event
from sqlalchemy.orm import object_session
from sqlalchemy_jobs import JobSession

@event.listens_for(User, "after_insert")
def note(mapper, connection, user):
    object_session(user).info["stores a user"] = True

@event.listens_for(JobSession, "before_commit")
def refuse(session):
    if session.info.get("stores a user"):
        raise RuntimeError("the commit fails")
"""


class Program:
    """A process whose output goes to a file, and which does not outlive the test."""

    def __init__(self, log: Path, *arguments: str, cwd: Path, **environment: str) -> None:
        """Start it."""
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*PYTHON, *arguments],
                cwd=cwd,
                env=environment_of(cwd, environment),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, pattern: str) -> str:
        """Wait until it has printed *pattern*, and return the first group, or all of it."""
        until = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.log.read_text()):
                return match[match.re.groups]
            assert not ended, self.log.read_text()
            assert time.monotonic() < until, f"no {pattern!r} in:\n{self.log.read_text()}"
            time.sleep(0.02)

    def terminate(self, within: float) -> None:
        """Send SIGTERM and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it runs {within:g} s after SIGTERM:\n{self.log.read_text()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def environment_of(cwd: Path, more: dict[str, str]) -> dict[str, str]:
    """The environment of a program: the package and the examples can be imported."""
    path = os.pathsep.join([str(cwd), str(REPOSITORY), str(EXAMPLES)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run a program that must succeed and must not warn, and return what it printed."""
    done = subprocess.run(
        [*PYTHON, *arguments],
        cwd=cwd,
        env=environment_of(cwd, environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def serve(tmp_path: Path, app: str, url: str) -> Program:
    """Start uvicorn on a free port."""
    arguments = ("-m", "uvicorn", app, "--port", "0")
    return Program(tmp_path / "uvicorn.log", *arguments, cwd=tmp_path, DATABASE_URL=url)


def client_of(server: Program) -> httpx.Client:
    """Wait for the server and return a client for it."""
    address = server.wait_for(r"Uvicorn running on (http://\S+)")
    # A connection for each request: after an error uvicorn closes it, which may cross the next one.
    alone = {"connection": "close"}
    return httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False, headers=alone)


def jobs_in(url: str) -> list[Job]:
    """Read every job, over a connection that has nothing to do with the example."""
    with open_engine(sync(url)) as engine, engine.connect() as connection:
        rows = connection.execute(select(Job.__table__).order_by(Job.id)).mappings().all()
    return [Job(**row) for row in rows]


def count_users(url: str) -> int:
    """Count what the FastAPI example stored."""
    with open_engine(sync(url)) as engine, engine.connect() as connection:
        number: int = connection.execute(text("SELECT count(*) FROM fastapi_users")).scalar_one()
    return number


def sync(url: str) -> str:
    """The same database with a synchronous driver."""
    return re.sub(r"^(postgres(ql)?)(\+\w+)?:", "postgresql+psycopg:", url).replace(
        "+aiosqlite", ""
    )


def eventually(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def postgres_url(clusters: Clusters) -> Iterator[str]:
    """URL, as hosting services write it, of an empty database for this test alone."""
    versions = available()
    if not versions:
        pytest.skip("TEST_POSTGRES=none")
    cluster = clusters.get(versions[0])
    name = cluster.create_database()
    yield re.sub(r"^postgresql\+psycopg", "postgresql", cluster.url(name, "psycopg"))
    cluster.drop_database(name)


@pytest.fixture
def async_sqlite_url(sqlite_url: str) -> str:
    """URL of a SQLite file for the async driver."""
    return sqlite_url.replace("sqlite:", "sqlite+aiosqlite:", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """A database for a synchronous example."""
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    value: str = request.getfixturevalue(name)
    return value


# --- quickstart.py -----------------------------------------------------------------------------


def code_lines(path: Path) -> list[str]:
    """The lines of a program that are not empty and not its docstring."""
    _, _, code = path.read_text().partition('"""\n')
    return [line for line in code.splitlines() if line.strip()]


def test_the_quickstart_has_at_most_twenty_lines() -> None:
    """Somebody new reads the first example in one go."""
    assert len(code_lines(EXAMPLES / "quickstart.py")) <= 20


def test_the_quickstart_needs_no_server(tmp_path: Path) -> None:
    """Without DATABASE_URL it runs its job on a SQLite file, and again when run again."""
    for number in (1, 2):
        printed = run(str(EXAMPLES / "quickstart.py"), cwd=tmp_path)
        assert printed.splitlines() == [
            f"job {number}: welcome, user {number} <ada@example.org>",
            "Summary(succeeded=1, retried=0, failed=0, snoozed=0, released=0, lost=0)",
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.sqlite"]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_quickstart_runs_on_postgresql(tmp_path: Path, postgres_url: str, scheme: str) -> None:
    """With DATABASE_URL, in each usual form, it does the same there."""
    given = postgres_url.replace("postgresql", scheme, 1)
    for number in (1, 2):
        printed = run(str(EXAMPLES / "quickstart.py"), cwd=tmp_path, DATABASE_URL=given)
        assert f"job {number}: welcome, user {number} <ada@example.org>" in printed
    assert [job.status for job in jobs_in(postgres_url)] == [Status.SUCCEEDED] * 2
    assert list(tmp_path.iterdir()) == []


# --- script.py ---------------------------------------------------------------------------------


def test_a_script_stops_on_sigterm(tmp_path: Path, url: str) -> None:
    """It finishes what runs, leaves what waits untouched and ends with exit code 0."""
    script = str(EXAMPLES / "script.py")
    assert run(script, "enqueue", "6", cwd=tmp_path, DATABASE_URL=url) == "enqueued 6 jobs\n"
    with Program(tmp_path / "script.log", script, cwd=tmp_path, DATABASE_URL=url) as program:
        program.wait_for(r"job \d: 2 of 5")
        program.terminate(within=30)
        assert program.process.returncode == 0, program.log.read_text()
        succeeded = int(program.wait_for(r"stopped after \d attempts, (\d) of them succeeded"))
    states = [(job.status, job.attempts) for job in jobs_in(url)]
    assert succeeded >= 4
    assert (
        sorted(states)
        == [(Status.PENDING, 0)] * (6 - succeeded) + [(Status.SUCCEEDED, 1)] * succeeded
    )


# --- fastapi_app.py ----------------------------------------------------------------------------


@pytest.fixture(params=["aiosqlite", "asyncpg"])
def app_url(request: pytest.FixtureRequest) -> str:
    """A database for the FastAPI example."""
    name = "async_sqlite_url" if request.param == "aiosqlite" else "postgres_url"
    value: str = request.getfixturevalue(name)
    return value


def test_a_request_stores_object_and_job_and_the_job_runs(tmp_path: Path, app_url: str) -> None:
    """When the response is there both are committed, and the worker then runs the job."""
    with serve(tmp_path, "fastapi_app:app", app_url) as server, client_of(server) as client:
        answer = client.post("/users", json={"email": "ada@example.org"})
        assert (answer.status_code, answer.json()) == (201, {"user_id": 1, "job_id": 1})
        (job,) = jobs_in(app_url)
        assert (job.task, job.payload) == ("send-welcome", {"user_id": 1})
        assert count_users(app_url) == 1
        eventually(lambda: client.get("/users/1").json()["welcomed"])
        assert "mail job-1 to ada@example.org" in server.log.read_text()
        eventually(lambda: jobs_in(app_url)[0].status == Status.SUCCEEDED)


def test_a_failing_request_stores_neither(tmp_path: Path, app_url: str) -> None:
    """A second user with the same address is refused, and no job is left behind."""
    with serve(tmp_path, "fastapi_app:app", app_url) as server, client_of(server) as client:
        assert client.post("/users", json={"email": "ada@example.org"}).status_code == 201
        assert client.post("/users", json={"email": "ada@example.org"}).status_code == 500
        assert client.get("/users/2").status_code == 404
        assert (count_users(app_url), len(jobs_in(app_url))) == (1, 1)


def test_a_failing_commit_is_no_success(tmp_path: Path, app_url: str) -> None:
    """The response waits for the commit, so a client is never told of what was not stored."""
    (tmp_path / "served.py").write_text(FAILING_COMMIT)
    with serve(tmp_path, "served:app", app_url) as server, client_of(server) as client:
        assert client.post("/users", json={"email": "ada@example.org"}).status_code == 500
        assert (count_users(app_url), jobs_in(app_url)) == (0, [])


def test_sigterm_waits_for_a_running_job(tmp_path: Path, app_url: str) -> None:
    """A job that ends in time ends as always, and then the process does."""
    (tmp_path / "served.py").write_text(SLOW_MAIL.format(seconds=1, bound=45))
    with serve(tmp_path, "served:app", app_url) as server, client_of(server) as client:
        client.post("/users", json={"email": "ada@example.org"})
        server.wait_for("sending")
        server.terminate(within=45)
        assert server.process.returncode in {0, -signal.SIGTERM}
    (job,) = jobs_in(app_url)
    assert (job.status, job.attempts, job.locked_by) == (Status.SUCCEEDED, 1, None)


def test_sigterm_gives_a_long_job_back(tmp_path: Path, app_url: str) -> None:
    """A job that does not end in time is pending again, its attempt given back; nothing is lost."""
    (tmp_path / "served.py").write_text(SLOW_MAIL.format(seconds=600, bound=3))
    with serve(tmp_path, "served:app", app_url) as server, client_of(server) as client:
        client.post("/users", json={"email": "ada@example.org"})
        server.wait_for("sending")
        server.terminate(within=30)
        assert server.process.returncode in {0, -signal.SIGTERM}
    (job,) = jobs_in(app_url)
    assert (job.status, job.locked_by) == (Status.PENDING, None)
    assert job.max_attempts is not None
    assert job.max_attempts - job.attempts == 3

    (tmp_path / "served.py").write_text(SLOW_MAIL.format(seconds=0, bound=15))
    with serve(tmp_path, "served:app", app_url) as server, client_of(server) as client:
        eventually(lambda: client.get("/users/1").json()["welcomed"])
