"""Whatever a hand has written into a row: it ends, says why if it fails, and harms no other job."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError

from sqlalchemy_jobs import JobContext, Status, Tasks, requeue
from sqlalchemy_jobs.models import in_status
from tests.enqueue_tools import change
from tests.faults.edits import (
    LEASES_ON_POSTGRES,
    LEASES_ON_SQLITE,
    ON_POSTGRES,
    ON_SQLITE,
    edited_rows,
)
from tests.faults.search import SETTINGS
from tests.rows import Queue, open_queue
from tests.workers import EVERYWHERE, PATIENCE, jobs_on, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tests.faults.edits import Row
    from tests.workers import Jobs

ENDED = "status IN ('failed', 'succeeded', 'cancelled')"
NOW_ON_SQLITE = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
WAITING = {
    True: "(status = 'pending' AND (run_at > now() OR task = 'nobody knows'))"
    " OR (status = 'running' AND lease_expires_at > now() + interval '1 hour')"
    " OR status = 'weird'",
    # SQLite compares what is no time by its kind: numbers, then texts, then bytes.
    False: f"(status = 'pending' AND (run_at > {NOW_ON_SQLITE}"
    " OR task IN ('nobody knows', '17') OR typeof(task) = 'blob'))"
    " OR (status = 'running' AND lease_expires_at > '9') OR status = 'weird'",
}
"""On PostgreSQL or not: what is not due, of a task or a status of nobody's, or leased for ever."""


@pytest.fixture(params=EVERYWHERE)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver."""
    yield from jobs_on(request)


def typed(job: JobContext[dict[str, int]]) -> None:
    """Take only what it is made for."""
    del job


def test_a_corrupt_row_fails_with_a_reason_and_blocks_no_other(jobs: Jobs) -> None:
    """Case 70: odd rows end failed and say why, what is never due waits, and others run."""
    lost = {"status": "'running'", "locked_by": "'w'", "lease_expires_at": "'2001-01-01 00:00:00'"}
    misfit, spent = "payload does not fit dict", "attempts are spent"
    reasons: list[tuple[Row, str]] = [
        ({"payload": "'\"str\"'"}, misfit),
        ({"payload": "'null'"}, misfit),
        ({"payload": "'[]'"}, misfit),
        ({"max_attempts": "0"}, spent),
        ({"max_attempts": "-1"}, spent),
        ({"attempts": "4", "max_attempts": "3"}, spent),
        ({"attempts": "4"}, spent),  # and the task's own bound is 3
        ({"attempts": "4", "errors": "'{}'"}, spent),
        ({**lost, "attempts": "4"}, "worker w was lost"),
        ({"attempts": "2147483647"}, spent),
    ]
    tasks = Tasks()
    tasks.register(lambda _: None, "good")
    tasks.register(typed, "typed")
    with open_queue(jobs.engine) as queue:
        for refused in ({"run_at": "NULL"}, {"status": "'weird'"}, {"attempts": "-1"}):
            assert write(queue, refused) is None
        never, always = (write(queue, {"run_at": at}) for at in ("'infinity'", "'-infinity'"))
        bad = {write(queue, {"priority": "2", **edit}): reason for edit, reason in reasons}
        good = [queue.add("good") for _ in range(10)]
        with without_checks(queue):
            weird = write(queue, {"status": "'weird'"})
            with jobs.worker(tasks, concurrency=1, recovery_interval=0.2) as running:
                wait_until(lambda: not going_on(queue))
        assert running.log.of("broke") == []
        told = {
            row[0]: row[1:]
            for row in raw(queue, f"SELECT id, status, last_error FROM {queue.name}")
        }
    assert [told[job_id] for job_id in good] == [("succeeded", None)] * 10
    assert [told[never], told[always]] == [("pending", None), ("succeeded", None)]
    assert told[weird] == ("weird", None)
    for job_id, reason in bad.items():
        status, error = told[job_id]
        assert status == "failed"
        assert reason in error
    *others, _ = bad  # the last has no number left for another attempt
    with jobs.session.begin() as session:
        assert sorted(requeue(session, [job_id or 0 for job_id in bad])) == others


@contextmanager
def without_checks(queue: Queue) -> Generator[None]:
    """Lift what keeps an unknown status out, as in a table of somebody else's."""
    on_postgres = queue.connection.dialect.name == "postgresql"
    check = "jobs_status_check"
    if on_postgres:
        queue.run(f"ALTER TABLE {{jobs}} DROP CONSTRAINT {check}")
    else:
        queue.run("PRAGMA ignore_check_constraints = ON")
    try:
        yield
    finally:
        if on_postgres:
            again = f"ADD CONSTRAINT {check} CHECK ({in_status(Status)}) NOT VALID"
            queue.run(f"ALTER TABLE {{jobs}} {again}")
        else:
            queue.run("PRAGMA ignore_check_constraints = OFF")


def test_rows_edited_by_hand_end_and_hold_up_no_other(jobs: Jobs) -> None:
    """Whatever is in a row that is due, it ends, with a reason if it fails, and others go on."""
    on_postgres = jobs.on_postgres
    columns = (ON_POSTGRES, LEASES_ON_POSTGRES) if on_postgres else (ON_SQLITE, LEASES_ON_SQLITE)
    tasks = Tasks()
    tasks.register(lambda _: None, "good")
    # A bound of two billion attempts is a bound too, but not one that the test waits for.
    tasks.register(typed, "typed", backoff=lambda failures: 0 if failures < 5 else 3600)

    @SETTINGS
    @given(st.lists(edited_rows(*columns), min_size=5, max_size=30))
    def search(batch: list[Row]) -> None:
        change(jobs.url, "DELETE FROM {jobs}")
        with open_queue(jobs.engine) as queue:
            written: dict[int, Row] = {}
            for edit in batch:
                job_id = write(queue, edit)
                if job_id is not None:
                    written[job_id] = edit
                    queue.add("good")
            limits: dict[str, Any] = {"visibility_timeout": 2, "recovery_interval": 0.1}
            with jobs.worker(tasks, prune_interval=0.1, **limits) as running:
                until = time.monotonic() + PATIENCE
                while left := going_on(queue):
                    assert time.monotonic() < until, [(row, written.get(row[0])) for row in left]
                    time.sleep(0.02)
            for event in ("broke", "postponed", "unrecoverable"):
                assert [told.getMessage() for told in running.log.of(event)] == [], written
            assert queue.run(
                "SELECT count(*) FROM {jobs} WHERE task = 'good' AND status = 'succeeded'"
            ) == [(len(written),)]
            for job_id, status, error in queue.run(
                "SELECT id, status, last_error FROM {jobs} WHERE task <> 'good'"
            ):
                if status == "failed" and "status" not in written[job_id]:
                    assert error, written[job_id]
            last = queue.add("good", status="failed")
            with jobs.session.begin() as session:
                assert last in requeue(session, [*written, last])

    search()


def write(queue: Queue, edit: Row) -> int | None:
    """Insert a row, and return its id; None if a constraint does not let it in."""
    row = {"task": "'typed'", "payload": "'{\"a\": 1}'", **edit}
    statement = f"INSERT INTO {queue.name} ({', '.join(row)}) VALUES ({', '.join(row.values())})"
    try:
        return int(raw(queue, f"{statement} RETURNING id")[0][0])
    except DBAPIError:
        return None


def going_on(queue: Queue) -> list[Any]:
    """Return what is to end and has not."""
    waiting = WAITING[queue.connection.dialect.name == "postgresql"]
    forgiven = f"task <> 'good' AND ({waiting})"
    shown = "id, task, status, attempts, max_attempts, last_error"
    return raw(queue, f"SELECT {shown} FROM {queue.name} WHERE NOT ({ENDED} OR {forgiven})")


def raw(queue: Queue, statement: str) -> list[Any]:
    """Run SQL in which a colon or a percent sign is just that."""
    if queue.connection.dialect.name == "postgresql":
        statement = statement.replace("%", "%%")
    return list(queue.connection.exec_driver_sql(statement).all())
