"""What a worker says: at its start, of every job, and never anything of a payload."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url

from sqlalchemy_jobs import (
    JobContext,
    PermanentJobError,
    RetryAfter,
    Snooze,
    Tasks,
    __version__,
    migrations,
)
from tests.workers import EVERYWHERE, ON_POSTGRES, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers import Running

SECRET = "sw0rdfish"  # noqa: S105 - it guards nothing

KEYS = {
    "event",
    "job_id",
    "task",
    "attempt",
    "max_attempts",
    "worker",
    "wait_ms",
    "duration_ms",
}
"""The `extra` keys of every record about a job."""


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """Return the keys that `extra=` added."""
    ordinary = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
    return {key: value for key, value in record.__dict__.items() if key not in ordinary}


def ready_line(running: Running) -> str:
    """Return what the worker said at its start, which is one line."""
    message = running.log.wait_for("ready").getMessage()
    assert "\n" not in message
    return message


# --- the start ----------------------------------------------------------------------------------


def test_the_start_is_one_line(jobs: Jobs) -> None:
    """It names version, database, revision, tasks, slots, LISTEN and bounds, and no password."""
    tasks = Tasks()
    tasks.register(lambda _: None, "one")
    tasks.register(lambda _: None, "two")
    url = make_url(jobs.url).set(password=SECRET)
    there = Jobs(jobs.driver, url.render_as_string(hide_password=False), jobs.engine)
    with there.worker(tasks, concurrency=7, timeout=33, visibility_timeout=44) as running:
        said = ready_line(running)
    assert f"sqlalchemy-jobs {__version__}" in said
    assert f"/{url.database}" in said
    assert migrations.HEAD in said
    assert "2 tasks, 7 slots, LISTEN on" in said
    assert "attempt timeout 33 s, visibility timeout 44 s, shutdown timeout 15 s" in said
    assert "default" not in said
    assert len(running.log.of("ready")) == 1
    assert SECRET not in running.log.text


@pytest.mark.parametrize("jobs", EVERYWHERE, indirect=True)
def test_the_start_says_why_there_is_no_listen(jobs: Jobs) -> None:
    """Without LISTEN the line says why, and that the timeout was left to its default."""
    with jobs.worker(Tasks(), listen=False) as running:
        said = ready_line(running)
        running.log.wait_for("no_tasks")
    assert "LISTEN off (switched off)" in said
    assert "attempt timeout 900 s (the default: none was given)" in said
    if not jobs.on_postgres:
        with jobs.worker(Tasks()) as running:
            assert "LISTEN off (sqlite has no notifications; it polls)" in ready_line(running)


# --- jobs ---------------------------------------------------------------------------------------


def test_every_event_of_a_job_is_one_record_with_the_same_keys(jobs: Jobs) -> None:
    """A start and an end are logged for each attempt, at a level that fits, with stable keys."""
    tasks = Tasks()

    def fails_first(job: JobContext) -> None:
        time.sleep(0.05)
        if job.attempt == 1:
            raise ValueError("once")

    def buried(_: JobContext) -> None:
        raise PermanentJobError("no use")

    def snoozed(_: JobContext) -> None:
        raise Snooze(100)

    async def overdue(_: JobContext) -> None:
        await asyncio.sleep(60)

    handlers = {"fails": fails_first, "buried": buried, "snoozed": snoozed, "overdue": overdue}
    for name, handler in handlers.items():
        tasks.register(handler, name, backoff=lambda _: 0.1)
    with jobs.worker(tasks) as running:
        ids = {name: jobs.enqueue(name) for name in handlers if name != "overdue"}
        ids["overdue"] = jobs.enqueue("overdue", timeout=0.2, max_attempts=1)
        for name in ("fails", "buried", "overdue"):
            jobs.finished(ids[name])
        running.log.wait_for("snoozed")
        running.log.wait_for("succeeded")
    expected = {
        "fails": ["started", "retried", "started", "succeeded"],
        "buried": ["started", "failed"],
        "snoozed": ["started", "snoozed"],
        "overdue": ["started", "timeout", "failed"],
    }
    levels = {"retried": "WARNING", "timeout": "WARNING", "failed": "ERROR"}
    for name, job_id in ids.items():
        records = [r for r in running.log.records if getattr(r, "job_id", None) == job_id]
        assert [r.event for r in records] == expected[name]  # type: ignore[attr-defined]
        for record in records:
            extra = extras(record)
            assert set(extra) == KEYS
            assert record.levelname == levels.get(extra["event"], "INFO")
            assert extra["task"] == name
            assert extra["worker"] == running.worker.name
            assert extra["wait_ms"] >= 0
            assert f"job {job_id} ({name}), attempt {extra['attempt']} of" in record.getMessage()
    attempts = running.log.of("started", job_id=ids["fails"])
    assert [extras(record)["attempt"] for record in attempts] == [1, 2]
    took = extras(running.log.of("succeeded", job_id=ids["fails"])[0])["duration_ms"]
    assert 50 <= took < 10_000


def test_a_traceback_begins_at_the_users_own_frame(jobs: Jobs) -> None:
    """In the log and in the row, no frame of the library comes before the handler's."""
    tasks = Tasks()

    def fails(_: JobContext) -> None:
        raise ValueError("plain")

    async def fails_async(_: JobContext) -> None:
        await asyncio.sleep(0)
        raise ValueError("coroutine")

    tasks.register(fails, "fails")
    tasks.register(fails_async, "async fails")
    ids = [jobs.enqueue(name, max_attempts=1) for name in ("fails", "async fails")]
    running = jobs.drain(tasks)
    for job in map(jobs.job, ids):
        error = str(job.last_error)
        lines = error.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1].startswith(f'  File "{__file__}"')
        assert lines[1].split()[-1] in ("fails", "fails_async")
        assert "sqlalchemy_jobs/" not in error
        record = running.log.of("failed", job_id=job.id)[0]
        assert error in record.getMessage()


# --- payloads -----------------------------------------------------------------------------------


def test_no_payload_is_logged(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens to a job, nothing of its payload is in any log at DEBUG, or in its row."""
    caplog.set_level(logging.DEBUG)
    tasks = Tasks()
    hold = threading.Event()

    def typed(job: JobContext[dict[str, int]]) -> None:
        raise AssertionError(job)

    def fails(_: JobContext) -> None:
        raise ValueError("of no interest")

    def later(_: JobContext) -> None:
        raise RetryAfter(100)

    def held(_: JobContext) -> None:
        hold.wait(20)

    tasks.register(typed, "typed")
    tasks.register(fails, "fails", backoff=lambda _: 0.05)
    tasks.register(later, "later")
    tasks.register(held, "held")
    tasks.register(held, "overdue", timeout=0.2, max_attempts=1)
    tasks.register(lambda _: None, "succeeds")
    names = ["typed", "fails", "later", "overdue", "succeeds"]
    with jobs.worker(tasks, visibility_timeout=1, shutdown_timeout=0.3) as running:
        ids = {name: jobs.enqueue(name, {"key": SECRET}, meta={"m": SECRET}) for name in names}
        lost = jobs.enqueue("held", {"key": SECRET})
        running.log.wait_for("started", job_id=lost)
        jobs.cancel(lost)
        running.log.wait_for("lease_lost", job_id=lost)
        abandoned = jobs.enqueue("held", {"key": SECRET})
        running.log.wait_for("started", job_id=abandoned)
        for name in ("typed", "fails", "overdue", "succeeds"):
            jobs.finished(ids[name])
        running.log.wait_for("retried", job_id=ids["later"])
        running.stop()
        hold.set()
    assert SECRET not in running.log.text
    assert SECRET not in caplog.text
    assert SECRET not in str([(job.last_error, job.errors) for job in jobs.all()])


def test_a_row_that_the_database_refuses_is_logged_without_its_payload(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """A server's error quotes the whole row that it refuses; the log must not."""
    caplog.set_level(logging.DEBUG)
    tasks = Tasks()
    tasks.register(lambda _: None, "refused")
    jobs.execute(
        "ALTER TABLE jobs.jobs ADD CONSTRAINT refuses CHECK (status <> 'succeeded') NOT VALID"
    )
    try:
        with jobs.worker(tasks, shutdown_timeout=0.3) as running:
            refused = jobs.enqueue("refused", {"key": SECRET})
            wait_until(lambda: running.log.of("postponed", job_id=refused))
        assert "refuses" in running.log.text  # the constraint's name is what one must know
        assert SECRET not in running.log.text
        assert SECRET not in caplog.text
        # Recovery, too, is refused: a failed row would be, this time.
        jobs.execute("ALTER TABLE jobs.jobs DROP CONSTRAINT refuses")
        jobs.execute(
            "ALTER TABLE jobs.jobs ADD CONSTRAINT refuses CHECK (status <> 'pending') NOT VALID"
        )
        jobs.execute("UPDATE jobs.jobs SET lease_expires_at = now() - interval '1 s'")
        with jobs.worker(tasks, recovery_interval=0.2, shutdown_timeout=0.3) as running:
            wait_until(lambda: running.log.of("unrecoverable"))
            running.log.wait_for("broke")
        assert SECRET not in running.log.text
        assert SECRET not in caplog.text
    finally:
        jobs.execute("ALTER TABLE jobs.jobs DROP CONSTRAINT refuses")


@on_drivers("psycopg", "asyncpg")
def test_a_lost_worker_is_logged_by_who_finds_its_job(jobs: Jobs) -> None:
    """A recovered job is one record that names the job; a buried one is an error."""
    tasks = Tasks()
    tasks.register(lambda _: None, "found")
    again, last = jobs.enqueue("found"), jobs.enqueue("found", max_attempts=1)
    jobs.execute(
        "UPDATE jobs.jobs SET status = 'running', attempts = 1, locked_by = 'host:1:gone', "
        "max_attempts = coalesce(max_attempts, 3), "
        "lease_expires_at = now() - interval '1 s', started_at = now()"
    )
    with jobs.worker(tasks) as running:
        assert jobs.finished(again).status == "succeeded"
        assert jobs.finished(last).status == "failed"
        recovered = running.log.wait_for("recovered", job_id=again)
        buried = running.log.wait_for("buried", job_id=last)
    assert (recovered.levelname, buried.levelname) == ("WARNING", "ERROR")
    assert "host:1:gone" in recovered.getMessage()
