"""What becomes of a job by what its handler does, on both workers and every driver."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest

from sqlalchemy_jobs import (
    JobContext,
    PermanentJobError,
    RetryAfter,
    Snooze,
    Tasks,
)
from tests.workers import EVERYWHERE, jobs_on, on_drivers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers import Jobs


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


# --- success and failure ------------------------------------------------------------------------


def test_returning_is_success_whatever_is_returned(jobs: Jobs) -> None:
    """A handler that returns has succeeded, false or not; it knows its job and where it runs."""
    tasks = Tasks()
    told: dict[int, tuple[Any, ...]] = {}

    def handler(job: JobContext) -> bool:
        told[job.id] = (job.task, job.payload, job.attempt, job.max_attempts, job.meta)
        return False

    register_both(tasks, "returns", handler, max_attempts=7)
    ids = {name: jobs.enqueue(name, {"n": 1}, meta=["trace"]) for name in both("returns")}
    summary = jobs.drain(tasks).summary
    assert summary is not None
    assert (summary.succeeded, summary.attempts) == (2, 2)
    for name, job_id in ids.items():
        job = jobs.job(job_id)
        assert (job.status, job.attempts, job.last_error, job.locked_by) == (
            "succeeded",
            1,
            None,
            None,
        )
        assert told[job_id] == (name, {"n": 1}, 1, 7, ["trace"])


def test_a_failing_job_is_retried_until_its_attempts_are_spent(jobs: Jobs) -> None:
    """Each failure is recorded with its attempt, time and worker; the last one is the end."""
    tasks = Tasks()
    attempts: dict[int, list[tuple[int, int]]] = {}

    def handler(job: JobContext) -> None:
        attempts.setdefault(job.id, []).append((job.attempt, job.max_attempts))
        raise ValueError(f"attempt {job.attempt}")

    register_both(tasks, "fails", handler, backoff=lambda _: 0.05)
    ids = [jobs.enqueue(name, max_attempts=2) for name in both("fails")]
    with jobs.worker(tasks) as running:
        for job_id in ids:
            job = jobs.finished(job_id)
            assert (job.status, job.attempts, job.max_attempts) == ("failed", 2, 2)
            assert [error["attempt"] for error in job.errors] == [1, 2]
            assert {error["worker"] for error in job.errors} == {running.worker.name}
            assert job.errors[0]["error"].endswith("ValueError: attempt 1")
            assert str(job.last_error).endswith("ValueError: attempt 2")
            assert attempts[job_id] == [(1, 2), (2, 2)]


def test_the_wait_after_a_failure_is_the_tasks_then_the_workers(jobs: Jobs) -> None:
    """The delay is the task's back-off, else the worker's, and a useless one is replaced."""
    tasks = Tasks()
    fail = raiser(ValueError)
    register_both(tasks, "own", fail, backoff=lambda attempt: timedelta(seconds=100 * attempt))
    register_both(tasks, "workers", fail)
    register_both(tasks, "useless", fail, backoff=raiser(SystemExit))
    ids = {
        name: jobs.enqueue(name) for kind in ("own", "workers", "useless") for name in both(kind)
    }
    jobs.drain(tasks, backoff=lambda attempt: 500 * attempt)
    expected = {"own": 100, "workers": 500, "useless": 1}
    for name, job_id in ids.items():
        job = jobs.job(job_id)
        assert job.status == "pending"
        wait = (job.run_at - job.updated_at).total_seconds()
        assert wait == pytest.approx(expected[name.removeprefix("async ")], abs=0.05), name


class Custom(BaseException):
    """Not even an Exception."""


def test_every_exception_is_an_outcome(jobs: Jobs) -> None:
    """No exception, however base, ends the worker or leaves its job running."""

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


def test_the_verdicts(jobs: Jobs) -> None:
    """A handler may fail its job for good, choose the delay, or have its attempt back."""
    tasks = Tasks()

    def snoozes_twice(job: JobContext) -> None:
        if job.attempt < 3:
            raise Snooze(0)

    register_both(tasks, "permanent", raiser(PermanentJobError, "no use"))
    register_both(tasks, "later", raiser(RetryAfter, timedelta(minutes=5), "busy"))
    register_both(tasks, "snoozed", raiser(Snooze, 300))
    register_both(tasks, "woken", snoozes_twice, max_attempts=1)
    ids = {
        kind: [jobs.enqueue(name) for name in both(kind)]
        for kind in ("permanent", "later", "snoozed", "woken")
    }
    jobs.drain(tasks)
    for job in map(jobs.job, ids["permanent"]):
        assert (job.status, job.attempts, job.max_attempts) == ("failed", 1, 3)
        assert str(job.last_error).endswith("no use")
    for job in map(jobs.job, ids["later"]):
        assert (job.status, job.attempts, job.max_attempts) == ("pending", 1, 3)
        assert (job.run_at - job.updated_at).total_seconds() == pytest.approx(300, abs=0.05)
        assert str(job.last_error).endswith("busy")
    for job in map(jobs.job, ids["snoozed"]):
        assert (job.status, job.attempts, job.max_attempts) == ("pending", 1, 4)
        assert (job.run_at - job.updated_at).total_seconds() == pytest.approx(300, abs=0.05)
        assert (job.last_error, job.errors) == (None, [])
    for job in map(jobs.job, ids["woken"]):
        assert (job.status, job.attempts, job.max_attempts) == ("succeeded", 3, 3)


def test_a_handler_whose_coroutine_nobody_awaits_has_not_succeeded(jobs: Jobs) -> None:
    """A `def` handler that returns a coroutine did nothing yet, so its job fails and says why."""
    ran: list[int] = []

    async def handler(job: JobContext) -> None:
        ran.append(job.id)

    def undressed(job: JobContext) -> Any:  # a decorator that forgot functools.wraps
        return handler(job)

    @functools.wraps(handler)
    def dressed(job: JobContext) -> Any:
        return handler(job)

    tasks = Tasks()
    tasks.register(undressed, "undressed")
    tasks.register(dressed, "dressed")
    tasks.register(functools.partial(handler), "partial")
    lost = jobs.enqueue("undressed")
    fine = [jobs.enqueue("dressed"), jobs.enqueue("partial")]
    jobs.drain(tasks)
    job = jobs.job(lost)
    assert (job.status, job.attempts) == ("failed", 1)
    assert "async def" in str(job.last_error)
    assert sorted(ran) == fine
    assert {jobs.job(job_id).status for job_id in fine} == {"succeeded"}


class Broken(Exception):  # noqa: N818 - a test's own
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


def recurse(job: JobContext) -> None:
    """Never come back."""
    recurse(job)


def test_every_error_can_be_stored(jobs: Jobs) -> None:
    """Case 13: NULs, surrogates, 50 MB, a broken `__str__`, groups and recursion can be stored."""

    def group(_: JobContext) -> None:
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])

    tasks = Tasks()
    handlers: dict[str, Callable[[JobContext], None]] = {
        "ValueError": raiser(ValueError, "a\x00b \ud800"),
        "MemoryError": raiser(MemoryError, "x" * 50_000_000),
        "Broken": raiser(Broken),
        "RecursionError": recurse,
        "ExceptionGroup": group,
    }
    for name, handler in handlers.items():
        register_both(tasks, name, handler)
    ids = {name: jobs.enqueue(name, max_attempts=1) for kind in handlers for name in both(kind)}
    jobs.drain(tasks)
    for name, job_id in ids.items():
        job = jobs.job(job_id)
        assert (name, job.status) == (name, "failed")
        assert name.removeprefix("async ") in str(job.last_error)
        assert len(str(job.last_error)) <= 4000
        assert job.errors[0]["error"] == job.last_error


# --- payloads -----------------------------------------------------------------------------------


@dataclass
class Welcome:
    """A payload as a dataclass."""

    user: int


class Order(pydantic.BaseModel):
    """A payload as a pydantic model."""

    user: int


class Ping(msgspec.Struct):
    """A payload as a msgspec struct."""

    user: int


def test_payloads_are_built_into_the_annotated_type(jobs: Jobs) -> None:
    """A handler gets the type that it names; a payload that does not fit fails for good."""
    seen: dict[int, object] = {}
    tasks = Tasks()

    @tasks.task("dataclass")
    async def dataclass_(job: JobContext[Welcome]) -> None:
        seen[job.id] = job.payload

    @tasks.task("pydantic")
    def pydantic_(job: JobContext[Order]) -> None:
        seen[job.id] = job.payload

    @tasks.task("msgspec")
    def msgspec_(job: JobContext[Ping]) -> None:
        seen[job.id] = job.payload

    sent = {"dataclass": Welcome(1), "pydantic": Order(user=2), "msgspec": Ping(3)}
    ids = {name: jobs.enqueue(name, payload) for name, payload in sent.items()}
    misfits = [jobs.enqueue(name, {"user": "hunter2"}) for name in sent]
    jobs.drain(tasks)
    for name, job_id in ids.items():
        assert jobs.job(job_id).status == "succeeded", jobs.job(job_id).last_error
        assert seen[job_id] == sent[name]
    for job in map(jobs.job, misfits):
        assert (job.status, job.attempts) == ("failed", 1)
        assert "payload.user" in str(job.last_error)
        assert "hunter2" not in str(job.last_error)
        assert job.id not in seen


# --- what surrounds a handler -------------------------------------------------------------------


def test_only_known_tasks_are_taken(jobs: Jobs) -> None:
    """A job of an unknown task waits, spends no attempt, and holds nobody up."""
    tasks = Tasks()
    register_both(tasks, "known", lambda _: None)
    foreign = [jobs.enqueue("unknown", priority=2) for _ in range(20)]
    known = [jobs.enqueue(name, priority=-2) for name in both("known")]
    summary = jobs.drain(tasks, concurrency=1).summary
    assert summary is not None
    assert summary.attempts == 2
    assert {jobs.job(job_id).status for job_id in known} == {"succeeded"}
    for job in map(jobs.job, foreign):
        assert (job.status, job.attempts, job.locked_by) == ("pending", 0, None)


@on_drivers("psycopg", "asyncpg")
def test_each_attempt_starts_with_clean_context_variables(jobs: Jobs) -> None:
    """What one handler leaves in a context variable is not there for the next."""
    variable = contextvars.ContextVar("variable", default="clean")
    found: list[str] = []

    def handler(_: JobContext) -> None:
        found.append(variable.get())
        variable.set("dirty")

    tasks = Tasks()
    register_both(tasks, "context", handler)
    for _ in range(3):
        for name in both("context"):
            jobs.enqueue(name)
    jobs.drain(tasks, concurrency=1)
    assert found == ["clean"] * 6


@on_drivers("asyncpg", "psycopg_async")
def test_def_handlers_of_the_async_worker_run_off_the_loop(jobs: Jobs) -> None:
    """A `def` handler blocks a thread of its own, a coroutine meanwhile goes on."""
    tasks = Tasks()
    passed = threading.Event()
    threads: dict[str, str] = {}

    @tasks.task("blocks")
    def blocks(_: JobContext) -> None:
        threads["blocks"] = threading.current_thread().name
        assert passed.wait(20)

    @tasks.task("passes")
    async def passes(_: JobContext) -> None:
        await asyncio.sleep(0.01)
        threads["passes"] = threading.current_thread().name
        passed.set()

    ids = [jobs.enqueue("blocks"), jobs.enqueue("passes", priority=-1)]
    jobs.drain(tasks)
    assert {jobs.job(job_id).status for job_id in ids} == {"succeeded"}
    assert threads == {"blocks": "jobs-handler", "passes": "worker-under-test"}


@on_drivers("psycopg")
def test_coroutines_of_the_sync_worker_run_in_their_threads(jobs: Jobs) -> None:
    """Each `async def` handler has a loop in a thread of its own, so they run beside each other."""
    tasks = Tasks()
    together = threading.Barrier(3)

    @tasks.task("coroutine")
    async def coroutine(_: JobContext) -> None:
        await asyncio.sleep(0.01)
        together.wait(20)

    ids = [jobs.enqueue("coroutine") for _ in range(3)]
    jobs.drain(tasks)
    assert {jobs.job(job_id).status for job_id in ids} == {"succeeded"}


@on_drivers("psycopg", "asyncpg")
def test_each_worker_has_a_name_of_its_own(jobs: Jobs) -> None:
    """A worker holds its jobs under a name that no other has, not even its successor."""
    tasks = Tasks()
    held: list[str | None] = []
    register_both(tasks, "held", lambda job: held.append(jobs.job(job.id).locked_by))
    names: list[str] = []
    for name in both("held"):
        jobs.enqueue(name)
        names.append(jobs.drain(tasks).worker.name)
    assert held == names
    assert len(set(names)) == 2
    assert all(f":{os.getpid()}:" in name for name in names)
