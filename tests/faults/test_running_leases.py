"""A job that runs stays its worker's, and comes back when the worker is gone: cases 1-3, 7, 17, 18.

Workers are processes, one of each driver at once, so that they wait together.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from sqlalchemy_jobs import NewJob
from tests.crew import SUFFIX, Crew, crew_on, dropped, started, succeeded_at_once
from tests.faults.proxy import Proxy
from tests.workers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from datetime import datetime
    from pathlib import Path

    from sqlalchemy_jobs import Job
    from tests.conftest import Database
    from tests.processes import WorkerProcess
    from tests.workers import Jobs


@pytest.fixture
def crew(database: Database) -> Iterator[Crew]:
    """Make an empty jobs table, and workers on it."""
    yield from crew_on(database)


# --- live workers -------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.15], ids=["near", "300 ms away"])
def test_a_live_worker_keeps_its_jobs(crew: Crew, delay: float) -> None:
    """Case 01: A handler of many visibility timeouts runs once; its lease is renewed thrice in one.

    The database may be far away: a question and its answer take 300 ms.
    """
    visibility, many = 2.0, 3
    options = {"visibility_timeout": visibility, "recovery_interval": 0.3, "concurrency": 20}
    # The first claim on a connection takes four round trips, two of them to prepare.
    options["statement_timeout"] = 2.0
    with Proxy(crew.database.url("psycopg")) as proxy:
        workers = {
            driver: [
                crew.start_one({driver: f"work{suffix}"}, driver, through=proxy.url, **options)
                for _ in range(2)
            ]
            for driver, suffix in SUFFIX.items()
        }
        for pair in workers.values():
            for worker in pair:
                worker.ready()
        proxy.delay = delay
        wishes = {"first": many * visibility}
        ids = crew.jobs.enqueue_many(*[NewJob(d, wishes) for d in SUFFIX for _ in range(20)])
        leases: dict[int, set[datetime]] = {job_id: set() for job_id in ids}
        while unfinished := crew.jobs.unfinished():
            for job in unfinished:
                if job.lease_expires_at is not None:
                    leases[job.id].add(job.lease_expires_at)
            time.sleep(0.05)  # a lease is watched, not waited for
        for job in crew.jobs.all():
            succeeded_at_once(job.task, job)
            starts = [said for w in workers[job.task] for said in w.said("start", job=job.id)]
            assert len(starts) == 1
        fewest = min(len(seen) for seen in leases.values())
        assert fewest >= 3 * many


def test_a_blocked_loop_keeps_every_lease(crew: Crew) -> None:
    """Case 02: Code that blocks the loop loses no job of its worker, and is named in one warning.

    A `def` handler of the same worker blocks nobody, and nobody blocks it.
    """
    handlers = {"block": "blocking_async", "neighbour": "work_async", "thread": "blocking"}
    workers = {
        driver: crew.start_one(
            {f"{driver}-{name}": handler for name, handler in handlers.items()},
            driver,
            visibility_timeout=1.5,
        )
        for driver in ("asyncpg", "psycopg_async")
    }
    ids: dict[str, dict[str, int]] = {}

    def enqueue(driver: str, name: str, seconds: float) -> int:
        task = name.removeprefix("short ")
        ids[driver][name] = crew.jobs.enqueue(f"{driver}-{task}", {"first": seconds})
        return ids[driver][name]

    for driver, worker in workers.items():
        worker.ready()
        ids[driver] = {}
        worker.wait_for("start", job=enqueue(driver, "thread", 2.5))
        worker.wait_for("end", job=enqueue(driver, "short neighbour", 0.1))
        worker.wait_for("start", job=enqueue(driver, "neighbour", 0.7))
        worker.wait_for("start", job=enqueue(driver, "block", 5))
    idle = crew.start_other()  # it sweeps for expired leases
    for driver, worker in workers.items():
        for job_id in ids[driver].values():
            succeeded_at_once(driver, crew.jobs.finished(job_id))
        ends = {name: worker.wait_for("end", job=job)["at"] for name, job in ids[driver].items()}
        assert ends["short neighbour"] < ends["thread"], "the coroutine waited for the thread"
        assert ends["thread"] < ends["block"] - 1, "the thread's handler waited for the loop"
        warnings = worker.said("log", of="loop_blocked")
        assert len(warnings) == 1
        assert f"job {ids[driver]['block']} ({driver}-block)" in warnings[0]["said"]
    assert idle.said("log", of="recovered") == []


# --- dead workers -------------------------------------------------------------------------------


def test_the_jobs_of_a_killed_worker_come_back(crew: Crew) -> None:
    """Case 03: After SIGKILL all jobs run elsewhere soon after their leases, and say why."""
    visibility, recovery = 1.5, 0.5
    workers = crew.start("work", visibility_timeout=visibility)
    ids = [crew.enqueue_each({"first": 300}) for _ in range(3)]
    for each in ids:
        started(workers, each)
    for worker in workers.values():
        worker.kill()
    killed = time.monotonic()
    other = crew.start_other(recovery_interval=recovery)
    expected = max(killed + visibility, other.wait_for_log("ready")["at"]) + 1.1 * recovery
    for each in ids:
        for at in started(dict.fromkeys(SUFFIX, other), each, attempt=2).values():
            assert at < expected + 3

        def ran_again(driver: str, job: Job) -> None:
            assert (job.status, job.attempts, len(job.errors)) == ("succeeded", 2, 1)
            assert job.errors[0]["worker"] == workers[driver].name
            assert f"worker {workers[driver].name} was lost" in job.errors[0]["error"]

        crew.finish_each(each, ran_again)


def test_a_restart_under_the_same_name_holds_nothing(crew: Crew, tmp_path: Path) -> None:
    """Case 17: A pod that comes back with its host name and process id has no claim of the old one.

    It cannot renew that, and recovers the job like any other when the lease has run out.
    """
    go = tmp_path / "go"

    def start() -> dict[str, WorkerProcess]:
        return crew.start(
            "hold",
            visibility_timeout=1.5,
            recovery_interval=0.3,
            program={"pose_as": ("pod-0", 1)},
        )

    first = start()
    ids = crew.enqueue_each({"until": str(go)})
    started(first, ids)
    for worker in first.values():
        worker.kill()
    ends = {driver: crew.jobs.job(job_id).lease_expires_at for driver, job_id in ids.items()}
    second = start()
    for driver, job_id in ids.items():
        assert second[driver].name != first[driver].name
        assert {w[driver].name.rpartition(":")[0] for w in (first, second)} == {"pod-0:1"}
        again = crew.jobs.wait(job_id, lambda job: job.attempts == 2)
        lease_end = ends[driver]
        assert lease_end is not None
        assert again.started_at is not None
        assert again.started_at >= lease_end
        until = str(lease_end.replace(tzinfo=None)).rstrip("0")  # as PostgreSQL writes it
        assert until in str(again.last_error), "it was renewed"
        assert again.errors[0]["worker"] == first[driver].name
        assert again.locked_by == second[driver].name
    go.touch()
    crew.finish_each(ids, succeeded_in(2))


def test_recovery_knows_leases_and_no_timeouts(crew: Crew, tmp_path: Path) -> None:
    """Case 18: A job without a timeout stays a live worker's, and comes back soon from a dead one.

    A neighbour's timeout of 1 s holds for the neighbour alone.
    """
    go = tmp_path / "go"
    visibility = 1.5
    endless = {driver: f"{driver}-endless" for driver in SUFFIX}
    bounded = {driver: f"{driver}-bounded" for driver in SUFFIX}
    timeouts = dict.fromkeys(endless.values(), 0) | dict.fromkeys(bounded.values(), 1)
    workers = {
        driver: crew.start_one(
            {endless[driver]: f"hold{suffix}", bounded[driver]: f"work{suffix}"},
            driver,
            visibility_timeout=visibility,
            program={"timeouts": timeouts},
        )
        for driver, suffix in SUFFIX.items()
    }
    for worker in workers.values():
        worker.ready()
    ids = {driver: crew.jobs.enqueue(task, {"until": str(go)}) for driver, task in endless.items()}
    short = {d: crew.jobs.enqueue(t, {"first": 300}, max_attempts=1) for d, t in bounded.items()}
    started(workers, ids)
    started(workers, short)
    other = crew.start_one(
        dict.fromkeys(endless.values(), "hold"), recovery_interval=0.3, program={"timeouts": {}}
    ).ready()

    def ran_out_of_time(driver: str, job: Job) -> None:
        assert (driver, job.status, job.attempts) == (driver, "failed", 1)
        assert "TimeoutError" in str(job.last_error)
        assert job.started_at is not None
        assert 0.9 < (job.updated_at - job.started_at).total_seconds() < 3

    crew.finish_each(short, ran_out_of_time)
    age = "SELECT min(clock_timestamp() - started_at) > make_interval(secs => :s) FROM jobs.jobs"
    living = f"{age} WHERE status = 'running'"
    wait_until(lambda: crew.jobs.execute(living, s=3 * visibility)[0][0])
    for driver, job_id in ids.items():
        job = crew.jobs.job(job_id)
        assert (job.status, job.attempts) == ("running", 1)
        assert job.locked_by == workers[driver].name
    assert other.said("log", of="recovered") == []
    for worker in workers.values():
        worker.kill()
    killed = time.monotonic()
    ends = {driver: crew.jobs.job(job_id).lease_expires_at for driver, job_id in ids.items()}
    for driver, job_id in ids.items():
        again = other.wait_for("start", job=job_id, attempt=2)
        assert again["at"] < killed + visibility + 0.3 + 3
        lease_end, row = ends[driver], crew.jobs.job(job_id)
        assert lease_end is not None
        assert row.started_at is not None
        assert row.started_at >= lease_end
    go.touch()
    crew.finish_each(ids, succeeded_in(2))


# --- two that believe they hold a job -----------------------------------------------------------


def test_a_paused_worker_cannot_overwrite(crew: Crew, tmp_path: Path) -> None:
    """Case 07: An outcome that was about to be written when the lease ran out is not written.

    Each worker is stopped between its handler's return and its outcome, while another handler of
    its runs. When it goes on, one job is running elsewhere and one has succeeded there.
    """
    go = tmp_path / "go"
    workers = crew.start(
        "work", visibility_timeout=1.5, concurrency=2, program={"freeze_before": "Settle"}
    )
    halfway = crew.enqueue_each({"first": 300})
    started(workers, halfway)
    ended = crew.enqueue_each({"until": str(go)})
    for driver, worker in workers.items():
        worker.wait_for("end", job=ended[driver])
        worker.wait_for("freezes")
    other = crew.start_other("hold")
    elsewhere = dict.fromkeys(SUFFIX, other)
    started(elsewhere, ended, attempt=2)
    crew.finish_each(halfway, succeeded_in(2))
    for worker in workers.values():
        worker.resume()
    for driver, worker in workers.items():
        wait_until(partial(dropped, worker, ended[driver]))
        refused = worker.wait_for_log("refused", job_id=ended[driver])
        assert "succeed" in refused["said"]
        lost = worker.wait_for("cancelled", job=halfway[driver])
        assert lost["reason"] == "lease lost"
        row = crew.jobs.job(ended[driver])
        assert (row.status, row.attempts, row.locked_by) == ("running", 2, other.name)
        assert crew.jobs.job(halfway[driver]).status == "succeeded"
    go.touch()
    crew.finish_each(ended, succeeded_in(2))
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
    following = crew.enqueue_each()  # and the workers are well
    started(workers, following)
    crew.finish_each(following, succeeded_at_once)
    for job_id in (*ended.values(), *halfway.values()):
        assert crew.jobs.job(job_id).status == "succeeded"


def test_an_outcome_that_meets_a_recovery_changes_nothing(crew: Crew, tmp_path: Path) -> None:
    """Case 07: A job that ends while its recovery is being written is recovered, and runs again."""
    go = tmp_path / "go"
    workers, other, ids = held_elsewhere(crew, go)
    with stalled(crew.jobs, "pending") as stalls:
        expire(crew.jobs, ids)
        other.resume()
        wait_until(lambda: stalls() == 1)  # a sweep is one statement, and all rows are locked
        go.touch()
        wait_until(partial(waiting_for_rows, crew.jobs, len(ids)))
    for driver, job_id in ids.items():
        workers[driver].wait_for_log("refused", job_id=job_id)
        job = crew.jobs.finished(job_id)
        assert (job.status, job.attempts, len(job.errors)) == ("succeeded", 2, 1)


def test_a_recovery_that_meets_an_outcome_changes_nothing(crew: Crew, tmp_path: Path) -> None:
    """Case 07: A job whose outcome is being written when it would be recovered has succeeded."""
    go = tmp_path / "go"
    workers, other, ids = held_elsewhere(crew, go)
    with stalled(crew.jobs, "succeeded") as stalls:
        expire(crew.jobs, ids)
        go.touch()
        wait_until(lambda: stalls() == len(ids))
        crew.jobs.execute(
            "INSERT INTO jobs.jobs (task, status, attempts, max_attempts, locked_by, started_at, "
            "lease_expires_at) VALUES ('unknown', 'running', 1, 1, 'gone', now(), now())"
        )
        other.resume()
        other.wait_for_log("buried", task="unknown")  # so a sweep has gone by
    crew.finish_each(ids, succeeded_at_once)
    for driver, job_id in ids.items():
        assert dropped(workers[driver], job_id) == []
        assert other.said("log", of="recovered", job_id=job_id) == []


def held_elsewhere(
    crew: Crew, go: Path
) -> tuple[dict[str, WorkerProcess], WorkerProcess, dict[str, int]]:
    """Start a job that waits for *go* on a worker of each driver; and one more worker, paused."""
    workers = crew.start("hold", visibility_timeout=60)
    ids = crew.enqueue_each({"until": str(go)})
    started(workers, ids)
    other = crew.start_other("hold")
    other.pause()
    return workers, other, ids


def expire(jobs: Jobs, ids: dict[str, int]) -> None:
    """Let leases run out, as if they had not been renewed."""
    jobs.execute(
        "UPDATE jobs.jobs SET lease_expires_at = now() - interval '1 s' WHERE id = ANY(:ids)",
        ids=list(ids.values()),
    )


@contextmanager
def stalled(jobs: Jobs, status: str) -> Generator[Callable[[], int]]:
    """Until the end, hold up each statement that ends a run with *status*, where it has the row.

    Yields what counts the statements that are held up.
    """
    jobs.execute(
        "CREATE OR REPLACE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"PERFORM pg_advisory_xact_lock_shared({STALL}); RETURN NEW; END $$"
    )
    jobs.execute(
        "CREATE TRIGGER stall BEFORE UPDATE ON jobs.jobs FOR EACH ROW "
        f"WHEN (OLD.status = 'running' AND NEW.status = '{status}') EXECUTE FUNCTION stall()"
    )
    try:
        with jobs.engine.connect() as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({STALL})"))
            yield lambda: len(
                jobs.execute(
                    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
                    f"AND objid = {STALL}"
                )
            )
    finally:
        jobs.execute("DROP TRIGGER stall ON jobs.jobs")


STALL = 4711
"""The key of the advisory lock."""


def waiting_for_rows(jobs: Jobs, count: int) -> bool:
    """Tell whether so many statements wait for rows that others have locked."""
    waiting = jobs.execute(
        "SELECT 1 FROM pg_locks WHERE locktype IN ('transactionid', 'tuple') AND NOT granted"
    )
    return len(waiting) == count


def succeeded_in(attempts: int) -> Callable[[str, Job], None]:
    """Check that so many attempts were needed."""

    def check(driver: str, job: Job) -> None:
        assert (driver, job.status, job.attempts) == (driver, "succeeded", attempts)

    return check
