"""Worker processes of every driver at once on one table, so that a test waits once for all of them.

    @pytest.fixture
    def crew(database): yield from crew_on(database)

    def test_it(crew):
        workers = crew.start("work")              # one of each driver, each with a task of its own
        ids = crew.enqueue_each({"first": 2})     # a job for each
        started(workers, ids)
        crew.finish_each(ids, succeeded_at_once)

The task of a driver's worker is named like the driver; `start_other` takes the jobs of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tests.processes import WorkerProcess
from tests.workers import Jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy_jobs import Job
    from tests.conftest import Database

SUFFIX = {"psycopg": "", "asyncpg": "_async", "psycopg_async": "_async"}
"""What is added to a handler's name for the worker of a driver."""


class Crew:
    """The jobs table, and worker processes that end with the test."""

    def __init__(self, database: Database, jobs: Jobs, stack: ExitStack) -> None:
        """Start nothing."""
        self.database = database
        self.jobs = jobs
        self.stack = stack

    def start(self, handler: str, **options: Any) -> dict[str, WorkerProcess]:
        """Start a worker of each driver, ready for the task that is named like it."""
        workers = {
            driver: self.start_one({driver: handler + suffix}, driver, **options)
            for driver, suffix in SUFFIX.items()
        }
        for worker in workers.values():
            worker.ready()
        return workers

    def start_one(
        self,
        tasks: Mapping[str, str],
        driver: str = "psycopg",
        *,
        through: Callable[[str], str] | None = None,
        **options: Any,
    ) -> WorkerProcess:
        """Start one worker; *through* changes the URL of its database."""
        url = self.database.url("asyncpg" if driver == "asyncpg" else "psycopg")
        if through is not None:
            url = through(url)
        worker = WorkerProcess(url, tasks, driver=driver, **options)
        return self.stack.enter_context(worker)

    def start_other(self, handler: str = "work", **options: Any) -> WorkerProcess:
        """Start one that takes the jobs of all the others, and looks often for lost leases."""
        options = {"concurrency": 20, "recovery_interval": 0.3, **options}
        return self.start_one(dict.fromkeys(SUFFIX, handler), **options).ready()

    def enqueue_each(self, payload: Any = None, **options: Any) -> dict[str, int]:
        """Enqueue a job for each driver's worker."""
        return {driver: self.jobs.enqueue(driver, payload, **options) for driver in SUFFIX}

    def finish_each(self, ids: Mapping[str, int], check: Callable[[str, Job], None]) -> None:
        """Wait for the end of each job, and check its row."""
        for driver, job_id in ids.items():
            check(driver, self.jobs.finished(job_id))


def crew_on(database: Database) -> Iterator[Crew]:
    """Make the `crew` fixture: an empty jobs table, and workers on it."""
    with Jobs.opened("psycopg", database.url("psycopg")) as jobs, ExitStack() as stack:
        yield Crew(database, jobs, stack)


def started(
    workers: Mapping[str, WorkerProcess], ids: Mapping[str, int], **more: Any
) -> dict[str, float]:
    """Wait until each worker has started its job, and return when."""
    return {
        driver: workers[driver].wait_for("start", job=job_id, **more)["at"]
        for driver, job_id in ids.items()
    }


def dropped(worker: WorkerProcess, job_id: int) -> list[Any]:
    """Return what a worker said when it dropped a job's outcome: aborted before it, or refused."""
    return [
        said
        for of in ("lease_lost", "refused")
        for said in worker.said("log", of=of, job_id=job_id)
    ]


def succeeded_at_once(driver: str, job: Job) -> None:
    """Check that one attempt sufficed."""
    assert (driver, job.status, job.attempts, job.errors) == (driver, "succeeded", 1, [])
