"""Handlers that hang, that raise what nobody expects, and whose outcome cannot be written."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import JobContext, Summary, Tasks
from tests.processes import WorkerProcess
from tests.workers import EVERYWHERE, ON_POSTGRES, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Database


@pytest.fixture(params=EVERYWHERE)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver."""
    yield from jobs_on(request)


def register_both(tasks: Tasks, name: str, does: Callable[[JobContext], Any], **more: Any) -> None:
    """Register *does* as a `def` handler called *name*, and as an `async def` one."""

    async def in_a_coroutine(job: JobContext) -> Any:
        await asyncio.sleep(0)
        return does(job)

    tasks.register(does, name, **more)
    tasks.register(in_a_coroutine, f"async {name}", **more)


def both(name: str) -> list[str]:
    """Return the names of the two tasks."""
    return [name, f"async {name}"]


def raiser(error: type[BaseException], *arguments: Any) -> Callable[[JobContext], None]:
    """Return a handler that raises."""

    def handler(_: JobContext) -> None:
        raise error(*arguments)

    return handler


def columns(jobs: Jobs, *job_ids: int) -> list[dict[str, Any]]:
    """Return every column of some rows."""
    return [
        {name: value for name, value in vars(jobs.job(job_id)).items() if name[0] != "_"}
        for job_id in job_ids
    ]


# --- handlers that hang -------------------------------------------------------------------------


class Stuck:
    """Handlers that wait for bytes, in C, which nothing but :meth:`let_go` ends."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self.peer, self._silent = socket.socketpair()
        self._gone = threading.Event()
        self.stuck: list[int] = []
        self.ended: list[int] = []

    def handler(self, job: JobContext) -> None:
        """Read; then return, or raise as the payload wishes."""
        if job.attempt > 1:
            return
        self.stuck.append(job.id)
        self._silent.recv(1)
        self.ended.append(job.id)
        if job.payload == "raise":
            raise ValueError("much too late")

    async def handler_async(self, job: JobContext) -> None:
        """Wait likewise, deaf to every cancellation."""
        self.stuck.append(job.id)
        while not self._gone.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        self.ended.append(job.id)
        if job.payload == "raise":
            raise ValueError("much too late")

    def let_go(self) -> None:
        """End all of them."""
        self._gone.set()
        self.peer.close()

    def close(self) -> None:
        """Wait for them to end, and let go of what they read."""
        self.let_go()
        wait_until(lambda: len(self.ended) == len(self.stuck))
        self._silent.close()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """Make such handlers, and let them go at the end."""
    stuck = Stuck()
    yield stuck
    stuck.close()


def test_handlers_that_cannot_be_ended_keep_no_slot(jobs: Jobs, stuck: Stuck) -> None:
    """Case 11: at its deadline an attempt fails and its slot is free, whatever the handler does;
    what it returns or raises later changes nothing, and such handlers are counted.
    """
    tasks = Tasks()
    tasks.register(stuck.handler, "stuck")
    tasks.register(stuck.handler_async, "async stuck")
    tasks.register(lambda _: None, "good")
    with jobs.worker(tasks, concurrency=2, timeout=0.5, backoff=lambda _: 0.0) as running:
        began = time.monotonic()
        bad = [
            jobs.enqueue(name, payload, max_attempts=1)
            for name in ("stuck", "async stuck")
            for payload in ("return", "raise")
        ]
        again = jobs.enqueue("stuck", "raise", max_attempts=2)
        good = [jobs.enqueue("good", priority=-1) for _ in range(5)]
        for job in map(jobs.finished, bad):
            assert (job.status, job.attempts) == ("failed", 1)
            assert re.search(r"TimeoutError: .* 0\.5 s", str(job.last_error))
            assert job.started_at is not None
            assert 0.45 < (job.updated_at - job.started_at).total_seconds() < 5
        retried = jobs.finished(again)
        assert (retried.status, retried.attempts, len(retried.errors)) == ("succeeded", 2, 1)
        assert {job.status for job in map(jobs.finished, good)} == {"succeeded"}
        assert time.monotonic() - began < 20
        assert sorted(stuck.stuck) == [*bad, again]
        assert (stuck.ended, running.worker.zombies) == ([], 5)
        before = columns(jobs, *bad, again)
        stuck.let_go()
        wait_until(lambda: running.worker.zombies == 0)
        assert sorted(stuck.ended) == [*bad, again]
        assert jobs.finished(jobs.enqueue("good")).status == "succeeded"
        assert columns(jobs, *bad, again) == before
    assert running.summary == Summary(succeeded=7, retried=1, failed=4)


def test_handlers_that_cannot_be_ended_do_not_keep_the_process(database: Database) -> None:
    """Case 11: a process whose only handlers are past their deadlines stops at once."""
    with Jobs.opened("psycopg", database.url("psycopg")) as jobs, ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        ids: dict[str, list[int]] = {}
        for driver in ON_POSTGRES:
            worker = WorkerProcess(
                database.url("asyncpg" if driver == "asyncpg" else "psycopg"),
                {f"{driver} thread": "stubborn", f"{driver} coroutine": "stubborn_async"},
                driver=driver,
                timeout=0.5,
                shutdown_timeout=60,
            )
            workers[driver] = stack.enter_context(worker)
            ids[driver] = [jobs.enqueue(f"{driver} {kind}", max_attempts=1) for kind in KINDS]
        for driver, worker in workers.items():
            assert {job.status for job in map(jobs.finished, ids[driver])} == {"failed"}
            worker.signal(signal.SIGTERM)
        for driver, worker in workers.items():
            assert (driver, worker.wait(20)) == (driver, 0)
            assert worker.said("log", of="abandoned") == []


KINDS = ("thread", "coroutine")


# --- what a handler sees of its deadline ----------------------------------------------------------


def test_a_deadline_is_told_and_its_attempt_retried_as_a_timeout(jobs: Jobs) -> None:  # noqa: PLR0915 - five handlers
    """Case 19: the handler is told, cleans up, and may not turn the end of its time into success;
    the attempt fails with a timeout, not a cancellation, and is retried by the usual back-off.
    """
    tasks = Tasks()
    seen: dict[str, list[Any]] = {}

    def see(job: JobContext, what: Any) -> None:
        seen.setdefault(job.task, []).append(what)

    def obeys(job: JobContext) -> None:
        assert not job.cancelled
        assert job.remaining is not None
        assert 0 < job.remaining <= 0.31
        job.raise_if_cancelled()
        try:
            job.cancelled.wait(60)
            job.raise_if_cancelled()
        finally:
            see(job, job.cancelled.reason)

    def swallows(job: JobContext) -> None:
        assert job.cancelled.wait(60)
        see(job, job.cancelled.reason)

    async def obeys_async(job: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)  # cleaning up may take its time
            see(job, job.cancelled.reason)

    async def swallows_async(job: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            see(job, job.cancelled.reason)

    async def raises_async(job: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            see(job, job.cancelled.reason)
            raise ConnectionError("cancelled by user") from error

    def told_thrice(name: str) -> bool:
        return seen.get(name) == ["timeout"] * 3

    names = ["obeys", "swallows", "obeys_async", "swallows_async", "raises_async"]
    for name, handler in zip(
        names, (obeys, swallows, obeys_async, swallows_async, raises_async), strict=True
    ):
        tasks.register(handler, name)
    with jobs.worker(tasks, timeout=60, backoff=lambda failures: 0.25 * failures) as running:
        ids = {name: jobs.enqueue(name, timeout=0.3, max_attempts=3) for name in names}
        for name, job_id in ids.items():
            job = jobs.finished(job_id)
            assert (name, job.status, job.attempts) == (name, "failed", 3)
            for error in job.errors:
                assert "TimeoutError" in error["error"]
                assert "0.3 s" in error["error"]
                assert "ancel" not in error["error"]
            wait_until(partial(told_thrice, name))
            retried = running.log.of("retried", job_id=job_id)
            assert ["0.25 s" in retried[0].getMessage(), "0.5 s" in retried[1].getMessage()] == [
                True,
                True,
            ]
        assert len(running.log.of("timeout")) == 15


# --- what a handler may raise ---------------------------------------------------------------------


class Custom(BaseException):
    """Not even an Exception."""


def test_every_exception_is_an_outcome(jobs: Jobs) -> None:
    """Case 12: no exception, however base, ends the worker or leaves its job running."""

    async def awaits_a_cancelled_task(_: JobContext) -> None:
        inner = asyncio.create_task(asyncio.sleep(60))
        inner.cancel()
        await inner

    async def cancels_itself(_: JobContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    tasks = Tasks()
    errors = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Custom)
    names: dict[str, str] = {}
    for error in errors:
        register_both(tasks, error.__name__, raiser(error, 1))
        names |= dict.fromkeys(both(error.__name__), error.__name__)
    for handler in (awaits_a_cancelled_task, cancels_itself):
        tasks.register(handler, handler.__name__)
        names[handler.__name__] = "CancelledError"
    register_both(tasks, "fine", lambda _: None)
    ids = {name: jobs.enqueue(name, max_attempts=1) for name in names}
    fine = [jobs.enqueue(name, priority=-1) for name in both("fine")]
    summary = jobs.drain(tasks, concurrency=2).summary
    assert summary is not None
    assert (summary.failed, summary.succeeded) == (len(names), 2)
    for name, job_id in ids.items():
        job = jobs.job(job_id)
        assert (name, job.status) == (name, "failed")
        assert names[name] in str(job.last_error)
    assert {jobs.job(job_id).status for job_id in fine} == {"succeeded"}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@on_drivers("psycopg")
def test_a_task_within_a_handler_that_exits(jobs: Jobs, error: type[BaseException]) -> None:
    """Case 12: what a coroutine handler started may exit: on the sync worker that is its error.

    In a program's own event loop asyncio ends the program, whoever asked for the task.
    """
    tasks = Tasks()

    async def exits() -> None:
        raise error(3)

    @tasks.task("exits", max_attempts=1)
    async def exits_within(_: JobContext) -> None:
        await asyncio.create_task(exits())

    with jobs.worker(tasks):
        job = jobs.finished(jobs.enqueue("exits"))
        assert (job.status, str(job.last_error)[-2:]) == ("failed", " 3")
        assert jobs.finished(jobs.enqueue("exits")).status == "failed"
