"""Attempts that are no longer wanted: timeouts, lost leases, a stop; and that no slot is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import (
    JobCancelled,
    JobContext,
    NewJob,
    PermanentJobError,
    RetryAfter,
    Snooze,
    Tasks,
)
from tests.workers import EVERYWHERE, ON_POSTGRES, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers import Jobs, Running


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


class Handlers:
    """Handlers that end only when the test says so, and what happened to them."""

    def __init__(self) -> None:
        """Nothing happened yet."""
        self.tasks = Tasks()
        self.let_go = threading.Event()
        self.seen: list[tuple[str, int, Any]] = []
        self.tasks.register(self.deaf, "deaf")
        self.tasks.register(self.deaf_async, "async deaf")
        self.tasks.register(self.obeying, "obeying")
        self.tasks.register(self.obeying_async, "async obeying")
        self.tasks.register(self.swallowing_async, "async swallowing")
        self.tasks.register(lambda _: None, "quick")

    def see(self, what: str, job: JobContext, more: Any = None) -> None:
        """Keep what happened."""
        self.seen.append((what, job.id, more))

    def what_of(self, job_id: int) -> list[str]:
        """Return what happened to a job, in order."""
        return [what for what, seen_id, _ in list(self.seen) if seen_id == job_id]

    def wait(self, what: str, *job_ids: int) -> None:
        """Wait until it has happened to each of these jobs."""
        wait_until(lambda: all(what in self.what_of(job_id) for job_id in job_ids))

    def deaf(self, job: JobContext) -> None:
        """Look at nothing but the test's word."""
        self.see("start", job)
        self.let_go.wait(60)
        self.see("end", job, job.cancelled.reason)

    async def deaf_async(self, job: JobContext) -> None:
        """Swallow every cancellation until the test's word."""
        self.see("start", job)
        while not self.let_go.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                self.see("swallowed", job)
        self.see("end", job, job.cancelled.reason)

    async def swallowing_async(self, job: JobContext) -> None:
        """Return normally when cancelled."""
        self.see("start", job)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.see("swallowed", job, job.cancelled.reason)

    def obeying(self, job: JobContext) -> None:
        """End when asked to."""
        self.see("start", job, job.remaining)
        assert not job.cancelled
        job.raise_if_cancelled()
        job.cancelled.wait(60)
        assert job.cancelled
        self.see("told", job, job.cancelled.reason)
        try:
            job.raise_if_cancelled()
        except JobCancelled as error:
            self.see("raised", job, str(error))
            raise

    async def obeying_async(self, job: JobContext) -> None:
        """End when cancelled."""
        self.see("start", job, job.remaining)
        try:
            await asyncio.sleep(60)
        finally:
            self.see("told", job, job.cancelled.reason)


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    """Make handlers, and let them go at the end."""
    handlers = Handlers()
    yield handlers
    handlers.let_go.set()


# --- timeouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", EVERYWHERE, indirect=True)
def test_a_timeout_frees_the_slot_of_a_handler_that_ignores_it(
    jobs: Jobs, handlers: Handlers
) -> None:
    """At its deadline an attempt has failed and the next job runs, whatever the handler does."""
    with jobs.worker(handlers.tasks, concurrency=2, timeout=0.3) as running:
        deaf = [jobs.enqueue(name, max_attempts=1) for name in ("deaf", "async deaf")]
        handlers.wait("start", *deaf)
        quick = [jobs.enqueue("quick") for _ in range(3)]
        for job_id in quick:
            assert jobs.finished(job_id).status == "succeeded"
        for job in map(jobs.finished, deaf):
            assert (job.status, job.attempts) == ("failed", 1)
            assert "TimeoutError" in str(job.last_error)
            assert "0.3 s" in str(job.last_error)
            assert "end" not in handlers.what_of(job.id)
        assert running.worker.zombies == 2
        handlers.let_go.set()
        wait_until(lambda: running.worker.zombies == 0)
        assert all("end" in handlers.what_of(job_id) for job_id in deaf)
        following = jobs.enqueue("quick")  # the late results were dropped
        assert jobs.finished(following).status == "succeeded"
        assert {job.status for job in map(jobs.job, deaf)} == {"failed"}


def test_a_timed_out_attempt_is_told_and_retried(jobs: Jobs, handlers: Handlers) -> None:
    """At the deadline `job.cancelled` is set and a coroutine is cancelled; then comes a retry."""
    with jobs.worker(handlers.tasks, timeout=60, backoff=lambda _: 0.1):
        ids = {
            name: jobs.enqueue(name, timeout=0.3, max_attempts=2)
            for name in ("obeying", "async obeying", "async swallowing")
        }
        for name, job_id in ids.items():
            job = jobs.finished(job_id)
            assert (name, job.status, job.attempts) == (name, "failed", 2)
            assert all("TimeoutError" in error["error"] for error in job.errors)
        told = [more for what, _, more in handlers.seen if what in ("told", "swallowed")]
        assert told == ["timeout"] * 6
        assert [more for what, _, more in handlers.seen if what == "raised"] == ["timeout"] * 2
        remaining = [m for what, _, m in handlers.seen if what == "start" and m is not None]
        assert len(remaining) == 4
        assert all(0 < seconds <= 0.31 for seconds in remaining)


@on_drivers("psycopg", "asyncpg")
def test_the_nearest_timeout_counts(jobs: Jobs) -> None:
    """The job's own bound goes before the task's, the task's before the worker's; 0 is none."""
    seen: dict[str, float | None] = {}
    tasks = Tasks()

    def handler(job: JobContext) -> None:
        seen[job.payload] = job.remaining

    tasks.register(handler, "plain")
    tasks.register(handler, "bound", timeout=timedelta(seconds=50))
    tasks.register(handler, "unbound", timeout=0)
    jobs.enqueue("plain", "worker")
    jobs.enqueue("bound", "task")
    jobs.enqueue("unbound", "task without")
    jobs.enqueue("bound", "job", timeout=20)
    jobs.enqueue("bound", "job without", timeout=0)
    jobs.drain(tasks, timeout=90)
    bounds = {name: None if left is None else round(left, -1) for name, left in seen.items()}
    assert bounds == {
        "worker": 90,
        "task": 50,
        "task without": None,
        "job": 20,
        "job without": None,
    }
    jobs.enqueue("plain", "default")
    jobs.enqueue("plain", "none", timeout=0)
    jobs.drain(tasks)
    assert 890 < (seen["default"] or 0) <= 900
    assert seen["none"] is None


# --- lost leases --------------------------------------------------------------------------------


def test_cancelling_a_running_job_aborts_its_handler(jobs: Jobs, handlers: Handlers) -> None:
    """The worker learns of it with the next renewal; the row stays cancelled, the slot is free."""
    with jobs.worker(handlers.tasks, concurrency=2, visibility_timeout=1) as running:
        ids = [jobs.enqueue(name) for name in ("obeying", "async obeying")]
        handlers.wait("start", *ids)
        for job_id in ids:
            jobs.cancel(job_id)
        handlers.wait("told", *ids)
        for job_id in ids:
            running.log.wait_for("lease_lost", job_id=job_id)
        quick = jobs.enqueue("quick")
        assert jobs.finished(quick).status == "succeeded"
        for job in map(jobs.job, ids):
            assert (job.status, job.last_error) == ("cancelled", None)
        assert {more for what, _, more in handlers.seen if what == "told"} == {"lease lost"}
    assert running.summary is not None
    assert running.summary.lost == 2


def test_an_outcome_that_comes_too_late_is_dropped(jobs: Jobs) -> None:
    """A row that somebody else took meanwhile is not touched, and the log says what was dropped."""
    tasks = Tasks()
    tasks.register(lambda _: None, "quick")
    held = jobs.enqueue("quick", delay=3600)
    tasks.register(lambda _: taken.wait(20) or None, "slow")
    taken = threading.Event()
    with jobs.worker(tasks, visibility_timeout=60) as running:
        job_id = jobs.enqueue("slow")
        jobs.wait(job_id, lambda job: job.status == "running")
        # What a recovery and a claim by another worker do to the row.
        jobs.execute(
            "UPDATE jobs.jobs SET locked_by = 'another', attempts = 2 WHERE id = :id", id=job_id
        )
        taken.set()
        record = running.log.wait_for("refused", job_id=job_id)
        assert "succeed" in record.getMessage()
        job = jobs.job(job_id)
        assert (job.status, job.locked_by, job.attempts) == ("running", "another", 2)
    assert running.summary is not None
    assert (running.summary.lost, running.summary.succeeded) == (1, 0)
    assert jobs.job(held).status == "pending"


# --- stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", EVERYWHERE, indirect=True)
def test_what_obeys_a_stop_gives_its_attempt_back(jobs: Jobs, handlers: Handlers) -> None:
    """After two thirds of the shutdown timeout handlers are told; what ends so runs elsewhere."""
    with jobs.worker(handlers.tasks, shutdown_timeout=0.9) as running:
        ids = [jobs.enqueue(name) for name in ("obeying", "async obeying")]
        swallowing = jobs.enqueue("async swallowing")
        handlers.wait("start", *ids, swallowing)
        summary = running.stop()
    assert (summary.released, summary.succeeded) == (2, 1)
    for job in map(jobs.job, ids):
        assert (job.status, job.attempts, job.max_attempts) == ("pending", 1, 4)
        assert (job.locked_by, job.errors) == (None, [])
    # It returned, so it has done its work.
    assert jobs.job(swallowing).status == "succeeded"
    told = [more for what, _, more in handlers.seen if what in ("told", "swallowed")]
    assert told == ["shutdown"] * 3


def test_a_stop_is_bounded(jobs: Jobs, handlers: Handlers) -> None:
    """Case 20: handlers that ignore it cost the shutdown timeout; their rows stay leased."""
    with jobs.worker(handlers.tasks, shutdown_timeout=0.6) as running:
        ids = [jobs.enqueue(name) for name in ("deaf", "async deaf")]
        handlers.wait("start", *ids)
        stoppers = [threading.Thread(target=running.worker.stop) for _ in range(5)]
        began = time.monotonic()
        for stopper in stoppers:
            stopper.start()
        running.stop()
        assert 0.5 < time.monotonic() - began < 10
        running.worker.stop()  # and once more, when there is nothing to stop
    running.log.wait_for("abandoned")
    for job in map(jobs.job, ids):
        assert (job.status, job.locked_by) == ("running", running.worker.name)


@on_drivers("psycopg")
def test_a_zombie_of_an_earlier_run_harms_no_later_one(jobs: Jobs, handlers: Handlers) -> None:
    """A handler that outlived its worker's run may end whenever it likes."""
    ended = threading.Event()

    def deaf(job: JobContext) -> None:
        handlers.deaf(job)
        ended.set()

    handlers.tasks.register(deaf, "zombie")
    with jobs.worker(handlers.tasks, shutdown_timeout=0.1) as first:
        job_id = jobs.enqueue("zombie")
        handlers.wait("start", job_id)
        first.stop()
    worker: Any = first.worker
    before = threading.excepthook
    raised: list[object] = []
    threading.excepthook = raised.append
    try:
        with worker:
            handlers.let_go.set()
            assert ended.wait(20)
            quick = jobs.enqueue("quick")
            assert jobs.finished(quick).status == "succeeded"
    finally:
        threading.excepthook = before
    assert raised == []


class Slow(Exception):  # noqa: N818 - a test's own
    """Takes its time to be printed."""

    def __str__(self) -> str:
        time.sleep(0.6)
        return "at last"


def test_an_abort_between_the_handlers_end_and_its_outcome_is_harmless(jobs: Jobs) -> None:
    """A deadline that passes while an error is being described does not end the worker."""
    tasks = Tasks()

    def slow(_: JobContext) -> None:
        raise Slow

    async def slow_async(_: JobContext) -> None:
        raise Slow

    tasks.register(slow, "slow")
    tasks.register(slow_async, "async slow")
    with jobs.worker(tasks, timeout=0.3) as running:
        ids = [jobs.enqueue(name, max_attempts=1) for name in ("slow", "async slow")]
        for job_id in ids:
            assert jobs.finished(job_id).status == "failed"
        wait_until(lambda: running.worker.zombies == 0)


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["psycopg", "asyncpg", "sqlite"], indirect=True)
def test_no_slot_is_lost(jobs: Jobs) -> None:
    """Case 16: after 200 jobs that end in every way as many still run together as before."""
    tasks = Tasks()
    together = threading.Barrier(4)
    met: list[int] = []

    def ends(job: JobContext) -> None:
        match job.payload:
            case "raise":
                raise ValueError
            case "exit":
                raise SystemExit
            case "permanent":
                raise PermanentJobError
            case "later":
                raise RetryAfter(3600)
            case "snooze":
                raise Snooze(3600)
            case "timeout":
                job.cancelled.wait(20)
            case _:
                pass

    async def ends_async(job: JobContext) -> None:
        if job.payload == "timeout":
            await asyncio.sleep(20)
        if job.payload == "cancel":
            raise asyncio.CancelledError
        ends(job)

    def meets(_: JobContext) -> None:
        met.append(together.wait(20))

    tasks.register(ends, "ends")
    tasks.register(ends_async, "async ends")
    tasks.register(meets, "meets")
    ways = ["return", "raise", "exit", "permanent", "later", "snooze", "cancel", "return"]
    mixed = [
        NewJob(task, ways[n % len(ways)], timeout=30, max_attempts=1)
        for n in range(96)
        for task in ("ends", "async ends")
    ]
    mixed += [
        NewJob(task, "timeout", timeout=0.1, max_attempts=1) for task in ("ends", "async ends")
    ] * 4
    assert len(mixed) == 200
    jobs.enqueue_many(*mixed)
    with jobs.worker(tasks, concurrency=4, timeout=30) as running:
        wait_until(lambda: not [job for job in jobs.unfinished() if job.run_at <= job.created_at])
        four = jobs.enqueue_many(*[NewJob("meets")] * 4)
        for job_id in four:
            assert jobs.finished(job_id).status == "succeeded"
        assert sorted(met) == [0, 1, 2, 3]
        assert running.worker.zombies == 0


@on_drivers("psycopg", "asyncpg")
def test_never_more_than_the_slots_are_taken(jobs: Jobs, handlers: Handlers) -> None:
    """Case 15: a worker holds no job that it cannot run at once, so that others may."""

    def start(running: Running) -> int:
        return len([job for job in jobs.all() if job.locked_by == running.worker.name])

    ids = jobs.enqueue_many(*[NewJob("deaf")] * 20)
    with jobs.worker(handlers.tasks, concurrency=2) as one:
        wait_until(lambda: start(one) == 2)
        with jobs.worker(handlers.tasks, concurrency=3) as two:
            wait_until(lambda: start(two) == 3)
            assert start(one) == 2
            assert len(handlers.seen) == 5
            handlers.let_go.set()
            for job_id in ids:
                assert jobs.finished(job_id).attempts == 1
