"""Workers as real processes on PostgreSQL: one of each driver at once, so that they wait together.

Each has a task of its own, named after its driver, and a second worker takes any of them.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import enqueue
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
        self._database = database
        self._stack = stack
        self.jobs = jobs

    def start(self, handler: str, **options: Any) -> dict[str, WorkerProcess]:
        """Start a worker of each driver, ready for the task that is named like it."""
        workers = {
            driver: self.start_one({driver: handler + suffix}, driver=driver, **options)
            for driver, suffix in SUFFIX.items()
        }
        for worker in workers.values():
            worker.ready()
        return workers

    def start_one(self, tasks: dict[str, str], driver: str = "psycopg", **options: Any) -> Any:
        """Start one worker."""
        url = self._database.url("asyncpg" if driver == "asyncpg" else "psycopg")
        worker = WorkerProcess(url, tasks, driver=driver, **options)
        return self._stack.enter_context(worker)

    def start_other(self, handler: str = "work", **options: Any) -> WorkerProcess:
        """Start one that takes the jobs of all the others."""
        options = {"concurrency": 20, "recovery_interval": 0.3, **options}
        other: WorkerProcess = self.start_one(dict.fromkeys(SUFFIX, handler), **options)
        return other.ready()

    def enqueue_each(self, payload: Any = None, **options: Any) -> dict[str, int]:
        """Enqueue a job for each driver's worker."""
        return {driver: self.jobs.enqueue(driver, payload, **options) for driver in SUFFIX}

    def finish_each(self, ids: dict[str, int], check: Callable[[str, Job], None]) -> None:
        """Wait for the end of each job, and check its row."""
        for driver, job_id in ids.items():
            check(driver, self.jobs.finished(job_id))


@pytest.fixture
def crew(database: Database) -> Iterator[Crew]:
    """Make an empty jobs table, and workers on it."""
    with Jobs.opened("psycopg", database.url("psycopg")) as jobs, ExitStack() as stack:
        yield Crew(database, jobs, stack)


def started(
    workers: dict[str, WorkerProcess], ids: dict[str, int], **more: Any
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


# --- noticing work ------------------------------------------------------------------------------


def test_a_commit_of_another_process_starts_the_job_at_once(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job starts within milliseconds of the commit, although the workers poll every 30 s."""
    workers = crew.start("work", poll_interval=30, concurrency=10)
    committed: dict[str, dict[int, float]] = {driver: {} for driver in workers}
    with crew.jobs.engine.connect() as connection:
        for _ in range(20):
            for driver in workers:
                with connection.begin():
                    job_id = enqueue(connection, driver)
                assert job_id is not None
                committed[driver][job_id] = time.monotonic()
                time.sleep(0.02)
    for driver, worker in workers.items():
        waits = [
            worker.wait_for("start", job=job_id)["at"] - at
            for job_id, at in committed[driver].items()
        ]
        with capsys.disabled():
            print(  # noqa: T201 - how fast it is, is worth seeing
                f" [{driver}: {1000 * statistics.median(waits):.1f} ms]", end=""
            )
        assert statistics.median(waits) < 0.25


def test_delayed_jobs_start_on_time(crew: Crew) -> None:
    """A delayed job, one that comes due before it, and a retry all start when they are due."""
    workers = crew.start("work", poll_interval=30)
    began = time.monotonic()
    far = crew.enqueue_each(delay=3.0)
    near = crew.enqueue_each(delay=1.0)
    enqueued = time.monotonic()
    failing = crew.enqueue_each({"fail": [1]})
    first = started(workers, failing, attempt=1)
    second = started(workers, failing, attempt=2)
    for delay, ids in ((1.0, near), (3.0, far)):
        for at in started(workers, ids).values():
            assert began + delay - 0.1 < at < enqueued + delay + 1.0
    for driver in workers:  # the program's back-off is 0.2 s
        assert 0.15 < second[driver] - first[driver] < 1.2


# --- leases -------------------------------------------------------------------------------------


def test_a_job_that_kills_its_worker_is_bounded(crew: Crew) -> None:
    """Case 10: a job that kills every worker runs max_attempts times, then fails; others go on."""
    options: dict[str, Any] = {"visibility_timeout": 1, "recovery_interval": 0.2}
    poison = crew.jobs.enqueue("psycopg", {"kill": [1, 2, 3, 4]}, max_attempts=2)
    for attempt in (1, 2):
        victim = crew.start_one({"psycopg": "work"}, **options)
        victim.wait_for("start", job=poison, attempt=attempt)
        assert victim.wait() == -signal.SIGKILL
    survivor = crew.start_other(**options)
    other = crew.jobs.enqueue("psycopg")
    job = crew.jobs.finished(poison)
    assert (job.status, job.attempts, len(job.errors)) == ("failed", 2, 2)
    assert crew.jobs.finished(other).status == "succeeded"
    assert survivor.said("start", job=poison) == []


# --- stopping -----------------------------------------------------------------------------------


def test_a_signal_stops_an_idle_worker_at_once(crew: Crew) -> None:
    """At SIGINT or SIGTERM `run()` returns soon, and puts the program's own handlers back."""
    workers = crew.start("work", poll_interval=30, blocked_after=100)
    for (driver, worker), number in zip(
        workers.items(), (signal.SIGTERM, signal.SIGTERM, signal.SIGINT), strict=True
    ):
        asked = time.monotonic()
        worker.signal(number)
        assert (driver, worker.wait()) == (driver, 0)
        returned = worker.wait_for("returned")
        assert returned["at"] - asked < 5
        assert returned["restored"]
        assert worker.said("the program's own handler") == []


def test_a_stopping_worker_waits_claims_nothing_and_gives_back(crew: Crew) -> None:
    """Case 4: what ends in two thirds of the shutdown timeout succeeds, the rest runs elsewhere."""
    workers = crew.start("work", concurrency=3, shutdown_timeout=4.5)
    short = crew.enqueue_each({"first": 1.5})
    long = crew.enqueue_each({"first": 300})
    started(workers, short)
    started(workers, long)
    asked = time.monotonic()
    for worker in workers.values():
        worker.signal(signal.SIGTERM)
    other = crew.start_other(poll_interval=30)
    late = crew.enqueue_each()
    for driver, worker in workers.items():
        cancelled = worker.wait_for("cancelled", job=long[driver])
        assert cancelled["reason"] == "shutdown"
        assert 2.9 < cancelled["at"] - asked < 4.5
        again = other.wait_for("start", job=long[driver])
        assert again["attempt"] == 2
        assert again["at"] - cancelled["at"] < 2
        assert worker.wait() == 0
        assert worker.said("start", job=late[driver]) == []
        summary = worker.wait_for("returned")["summary"]
        assert (summary["succeeded"], summary["released"]) == (1, 1)
        given_back = crew.jobs.finished(long[driver])
        assert (given_back.attempts, given_back.max_attempts, given_back.errors) == (2, 4, [])
    crew.finish_each(short, succeeded_at_once)
    crew.finish_each(late, succeeded_at_once)


def test_a_second_signal_ends_the_process_at_once(crew: Crew) -> None:
    """Case 20: whoever cannot wait for the running jobs sends the signal again."""
    workers = crew.start("work", shutdown_timeout=300)
    started(workers, crew.enqueue_each({"first": 300}))
    for worker in workers.values():
        worker.signal(signal.SIGINT)
    time.sleep(0.5)
    for driver, worker in workers.items():
        assert worker.process.poll() is None
        worker.signal(signal.SIGINT)
        assert (driver, worker.wait()) == (driver, -signal.SIGINT)


# --- a blocked event loop -----------------------------------------------------------------------
