"""Both workers behind one face, on every driver, so that a test of behaviour is written once.

    @pytest.fixture(params=ON_POSTGRES)
    def jobs(request): yield from jobs_on(request)

    def test_it(jobs):
        with jobs.worker(tasks, concurrency=2) as running:
            job_id = jobs.enqueue("greet", {"name": "you"})
            assert jobs.finished(job_id).status == "succeeded"

The worker runs in a thread of this process, an AsyncWorker on a loop of its own there. What it
logs is kept in `running.log`. Tests with real processes take `tests/processes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from sqlalchemy import make_url, select, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import (
    AsyncWorker,
    Job,
    JobSession,
    NewJob,
    Status,
    Summary,
    Tasks,
    Worker,
    cancel,
)
from tests.engines import (
    DIALECT_AND_DRIVER,
    ON_SQLITE,
    make_empty_tables,
    open_async_engine,
    open_engine,
)
from tests.postgres import available

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from sqlalchemy import Engine

ON_POSTGRES = ("psycopg", "asyncpg", "psycopg_async")
EVERYWHERE = (*ON_POSTGRES, "sqlite", "aiosqlite")
SYNC = frozenset({"psycopg", "sqlite"})

PATIENCE = 30.0
"""Seconds until a test gives up. Only a failing test, or a very busy machine, needs them."""

FINISHED = frozenset({"succeeded", "failed", "cancelled"})

Found = TypeVar("Found")


def wait_until(
    what: Callable[[], Found], *, within: float = PATIENCE, every: float = 0.02
) -> Found:
    """Return the first truthy answer of *what*; fail the test if none comes in time."""
    until = time.monotonic() + within
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() >= until:
            pytest.fail(f"waited {within:g} s in vain")
        time.sleep(every)


def on_drivers(*drivers: str) -> pytest.MarkDecorator:
    """Narrow the `jobs` fixture to some drivers."""
    return pytest.mark.parametrize("jobs", drivers, indirect=True)


def jobs_on(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Make the `jobs` fixture for the driver that `request.param` names."""
    driver: str = request.param
    if driver in ON_SQLITE:
        url = request.getfixturevalue("sqlite_url").replace("sqlite", DIALECT_AND_DRIVER[driver], 1)
    elif not available():
        pytest.skip("TEST_POSTGRES=none")
    else:
        database = request.getfixturevalue("databases").get(available()[0])
        url = database.url("asyncpg" if driver == "asyncpg" else "psycopg")
    with Jobs.opened(driver, url) as jobs:
        yield jobs


class Log(logging.Handler):
    """The library's log, without what other workers of the process say of themselves."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        super().__init__(logging.DEBUG)
        self.worker: str | None = None
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record."""
        self.records.append(record)

    def of(self, event: str, **extra: Any) -> list[logging.LogRecord]:
        """Return the records of an event, in order."""
        wanted = {"event": event, **extra}
        return [
            record
            for record in list(self.records)
            if self.worker in (None, getattr(record, "worker", self.worker))
            and all(getattr(record, name, None) == value for name, value in wanted.items())
        ]

    def wait_for(self, event: str, **extra: Any) -> logging.LogRecord:
        """Return the first record of an event, when it is there."""
        return wait_until(lambda: self.of(event, **extra))[0]

    @property
    def text(self) -> str:
        """All messages, tracebacks included."""
        formatter = logging.Formatter("%(levelname)s %(message)s")
        return "\n".join(formatter.format(record) for record in list(self.records))


class Running:
    """A worker that runs in a thread."""

    def __init__(self) -> None:
        """Start nothing."""
        self.log = Log()
        self.worker: Any = None
        self.summary: Summary | None = None
        self.failure: BaseException | None = None
        self.thread = threading.current_thread()
        self._made = threading.Event()

    def ready(self) -> Running:
        """Wait until the worker has said so."""
        wait_until(lambda: self.log.of("ready") or not self.thread.is_alive())
        return self

    def stop(self, within: float = PATIENCE) -> Summary:
        """Stop it, and raise what ended it if that was an error."""
        if self.worker is not None:
            self.worker.stop()
        self.thread.join(within)
        assert not self.thread.is_alive(), "the worker did not stop"
        if self.failure is not None:
            raise self.failure
        assert self.summary is not None
        return self.summary

    def failed(self) -> BaseException:
        """Wait for its end by an error, and return that."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the worker goes on"
        failure, self.failure, self.summary = self.failure, None, Summary()
        assert failure is not None
        return failure

    def start(self, run: Callable[[Running], None]) -> None:
        """Run *run* in a thread, until it has made the worker or failed."""

        def target() -> None:
            try:
                run(self)
            except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                self.failure = error
            finally:
                self._made.set()

        self.thread = threading.Thread(target=target, name="worker-under-test", daemon=True)
        self.thread.start()
        assert self._made.wait(PATIENCE)

    def made(self, worker: Any) -> None:
        """Take the worker that *run* has made."""
        self.worker = worker
        self.log.worker = worker.name
        self._made.set()


class Jobs:
    """The jobs table of a test, at first empty, and workers of one kind on it."""

    def __init__(self, driver: str, url: str, engine: Engine) -> None:
        """Look at the table with *engine*, run workers at *url*."""
        self.driver = driver
        self.url = url
        self.engine = engine
        self.is_async = driver not in SYNC
        self.on_postgres = driver not in ON_SQLITE
        self.session = sessionmaker(engine, class_=JobSession)

    @classmethod
    @contextmanager
    def opened(cls, driver: str, url: str) -> Generator[Jobs]:
        """Make the empty table at *url*."""
        make_empty_tables(url)
        kind = "sqlite" if driver in ON_SQLITE else "postgresql+psycopg"
        # No pool: each statement looks at the database as it is now, whatever happened to it.
        with open_engine(make_url(url).set(drivername=kind), poolclass=NullPool) as engine:
            yield cls(driver, url, engine)

    # --- jobs ----------------------------------------------------------------------------------

    def enqueue(self, task: str, payload: Any = None, **options: Any) -> int:
        """Enqueue one job, and commit."""
        with self.session.begin() as session:
            job_id = session.enqueue(task, payload, **options)
        assert job_id is not None
        return job_id

    def enqueue_many(self, *jobs: NewJob) -> list[int]:
        """Enqueue several in one transaction."""
        with self.session.begin() as session:
            return [job_id for job_id in session.enqueue_many(jobs) if job_id is not None]

    def cancel(self, job_id: int) -> None:
        """Call a job off."""
        with self.session.begin() as session:
            assert cancel(session, job_id) == [job_id]

    def job(self, job_id: int) -> Job:
        """Return a job's row as it is now."""
        with self.session() as session:
            return session.get_one(Job, job_id)

    def all(self, *criteria: Any) -> list[Job]:
        """Return the rows that fit, oldest first."""
        with self.session() as session:
            return list(session.scalars(select(Job).where(*criteria).order_by(Job.id)))

    def unfinished(self) -> list[Job]:
        """Return the rows that still wait or run."""
        return self.all(Job.status.in_([Status.PENDING, Status.RUNNING]))

    def wait(self, job_id: int, fits: Callable[[Job], bool], within: float = PATIENCE) -> Job:
        """Wait until a job's row fits, and return it."""

        def fitting() -> list[Job]:
            job = self.job(job_id)
            return [job] if fits(job) else []

        return wait_until(fitting, within=within)[0]

    def finished(self, job_id: int) -> Job:
        """Wait until a job has finished, and return its row."""
        return self.wait(job_id, lambda job: job.status in FINISHED)

    def attempted(self, job_id: int, times: int = 1) -> Job:
        """Wait until so many attempts have ended with an error, and return the row."""
        return self.wait(job_id, lambda job: len(job.errors) >= times)

    def execute(self, statement: str, **parameters: Any) -> list[Any]:
        """Run one statement of plain SQL, and commit."""
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return list(result.all()) if result.returns_rows else []

    # --- workers -------------------------------------------------------------------------------

    @contextmanager
    def worker(
        self, tasks: Tasks, *, engine: dict[str, Any] | None = None, **options: Any
    ) -> Generator[Running]:
        """Run a worker beside the test; *engine* are options of its engine."""
        options = {"poll_interval": 0.2, "max_poll_interval": 1.0, **options}
        with self._running(tasks, engine or {}, options, until_idle=False) as running:
            yield running

    def drain(self, tasks: Tasks, **options: Any) -> Running:
        """Run a worker until nothing is due; `summary` says what it did."""
        with self._running(tasks, {}, options, until_idle=True) as running:
            running.thread.join(PATIENCE)
            assert not running.thread.is_alive(), "the worker finds no end"
        return running

    @contextmanager
    def _running(
        self, tasks: Tasks, engine: dict[str, Any], options: dict[str, Any], *, until_idle: bool
    ) -> Generator[Running]:
        running = Running()
        logger = logging.getLogger("sqlalchemy_jobs")
        before = logger.level
        logger.addHandler(running.log)
        logger.setLevel(logging.DEBUG)

        def in_threads(running: Running) -> None:
            with open_engine(self.url, **engine) as its_engine:
                worker = Worker(its_engine, tasks, **options)
                running.made(worker)
                running.summary = worker.run(until_idle=until_idle)

        async def on_a_loop(running: Running) -> None:
            async with open_async_engine(self.url, **engine) as its_engine:
                worker = AsyncWorker(its_engine, tasks, **options)
                running.made(worker)
                running.summary = await worker.run(until_idle=until_idle)

        try:
            if self.is_async:
                running.start(lambda running: asyncio.run(on_a_loop(running)))
            else:
                running.start(in_threads)
            yield running
            running.stop()
        finally:
            with contextlib.suppress(BaseException):
                running.stop()
            logger.removeHandler(running.log)
            logger.setLevel(before)
