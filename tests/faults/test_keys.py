"""Idempotency keys between transactions: one unfinished job a key, whoever is first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

from sqlalchemy_jobs import (
    InvalidArgumentError,
    Job,
    JobContext,
    JobSession,
    NewJob,
    PermanentJobError,
    RetryAfter,
    Tasks,
)
from tests.engines import make_empty_tables, open_engine
from tests.enqueue_tools import in_session, rows
from tests.workers import EVERYWHERE, ON_POSTGRES, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    from tests.conftest import Database
    from tests.workers import Jobs

LONG_S = 60


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on the drivers that a test names."""
    yield from jobs_on(request)


def _at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run *work* in *count* threads that start together; their results, or what they raised."""
    start = threading.Barrier(count)

    def one(number: int) -> Any:
        start.wait(LONG_S)
        try:
            return work(number)
        except DBAPIError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count), timeout=LONG_S))


def test_the_last_of_five_gets_the_key_that_four_roll_back(database: Database) -> None:
    """Case 32: a duplicate waits for the other's end, and takes the key if that rolls back."""
    with _fresh(database) as engine:
        holders = [JobSession(engine) for _ in range(5)]
        assert holders[0].enqueue("0", idempotency_key="k") is not None
        with ThreadPoolExecutor(4) as pool:
            waiting = {
                number: pool.submit(holders[number].enqueue, f"{number}", idempotency_key="k")
                for number in range(1, 5)
            }
            wait_until(lambda: _blocked(database) == 4)
            holders[0].rollback()
            order: list[int] = []
            while waiting:  # of those who wait, one after the other gets it
                wait_until(lambda: any(future.done() for future in waiting.values()))
                (number,) = [n for n, future in waiting.items() if future.done()]
                assert waiting.pop(number).result() is not None
                order.append(number)
                if waiting:
                    holders[number].rollback()
        holders[order[-1]].commit()
        for session in holders:
            session.close()
        assert rows(engine.url, Job.task) == [str(order[-1])]


def test_a_duplicate_waits_and_gets_none_if_the_other_commits(database: Database) -> None:
    """Case 32: the wait ends with the other's commit, and only then is None the truth."""
    with _fresh(database) as engine, JobSession(engine) as one, JobSession(engine) as other:
        one.enqueue("one", idempotency_key="k")
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(other.enqueue, "other", idempotency_key="k")
            wait_until(lambda: _blocked(database) == 1)
            assert not second.done()
            one.commit()
            assert second.result(LONG_S) is None
        other.commit()


def test_fifty_threads_with_one_key_store_one_job(sync_engine: Engine) -> None:
    """Case 33: one gets the id, 49 get None, nobody an error; all can go on and commit."""
    on_sqlite = sync_engine.dialect.name == "sqlite"
    patient = {"connect_args": {"timeout": LONG_S}} if on_sqlite else {}
    with open_engine(sync_engine.url, pool_size=50, **patient) as engine:

        def work(number: int) -> int | None:
            with JobSession(engine) as session, session.begin():
                job_id = session.enqueue("t", idempotency_key="k")
                session.enqueue(f"after-{number}")
                return job_id

        ids = _at_once(50, work)
    assert sorted(type(job_id).__name__ for job_id in ids) == ["NoneType"] * 49 + ["int"]
    tasks = rows(sync_engine.url, Job.task)
    assert len(tasks) == 51
    assert tasks.count("t") == 1


def test_the_wait_for_a_key_honours_lock_timeout(database: Database) -> None:
    """Case 34: whoever does not want to wait sets lock_timeout, and gets the driver's error."""
    with _fresh(database) as engine, JobSession(engine) as one, JobSession(engine) as other:
        one.enqueue("one", idempotency_key="k")
        other.execute(text("SET LOCAL lock_timeout = '50ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            other.enqueue("other", idempotency_key="k")


def test_bulks_with_opposite_orders_of_keys_do_not_deadlock(database: Database) -> None:
    """Case 34: keys are taken in one order, whatever order callers give them in."""
    keys = [f"k{i}" for i in range(60)]
    with _fresh(database, pool_size=4) as engine:

        def work(number: int) -> int:
            mine = keys if number % 2 else keys[::-1]
            stored = 0
            for turn in range(25):
                with JobSession(engine) as session:
                    ids = session.enqueue_many([NewJob("t", idempotency_key=key) for key in mine])
                    stored += len([job_id for job_id in ids if job_id is not None])
                    if turn % 2:
                        session.rollback()
                    else:
                        session.execute(
                            text(
                                "UPDATE jobs.jobs SET status = 'succeeded' WHERE status = 'pending'"
                            )
                        )
                        session.commit()
            return stored

        results = _at_once(4, work)
    assert all(isinstance(stored, int) for stored in results), results
    assert sum(results) >= 60


def test_single_enqueues_in_opposite_orders_surface_the_deadlock(database: Database) -> None:
    """Case 34: of two that take two keys crosswise, one gets the driver's error, one goes on."""
    with _fresh(database, pool_size=2) as engine:
        both_hold_one = threading.Barrier(2)

        def work(number: int) -> int | None:
            first, second = ("x", "y") if number else ("y", "x")
            with JobSession(engine) as session, session.begin():
                session.enqueue("t", idempotency_key=first)
                both_hold_one.wait(LONG_S)
                return session.enqueue("t", idempotency_key=second)

        results = _at_once(2, work)
        (error,) = [result for result in results if isinstance(result, DBAPIError)]
        assert getattr(error.orig, "sqlstate", None) == "40P01"
        assert sorted(rows(engine.url, Job.idempotency_key)) == ["x", "y"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_taken_after_the_snapshot_is_a_serialization_failure(
    database: Database, level: str
) -> None:
    """Case 35: stricter levels raise what callers there must retry on, instead of None."""
    with _fresh(database, isolation_level=level) as engine:
        with JobSession(engine) as early, JobSession(engine) as late:
            early.execute(text("SELECT count(*) FROM jobs.jobs"))
            late.enqueue("late", idempotency_key="k")
            late.commit()
            assert early.enqueue("without a key") is not None
            with pytest.raises(OperationalError) as caught:
                early.enqueue("early", idempotency_key="k")
            assert getattr(caught.value.orig, "sqlstate", None) == "40001"
            early.rollback()
            assert early.enqueue("again", idempotency_key="k") is None
            assert early.enqueue("again") is not None
            early.commit()
        assert rows(engine.url, Job.task) == ["late", "again"]


@on_drivers(*ON_POSTGRES)
def test_workers_of_a_serializable_engine_do_each_job_once(jobs: Jobs) -> None:
    """Case 35: workers use READ COMMITTED themselves, so none of them meets a 40001."""
    started: Counter[int] = Counter()
    tasks = Tasks()
    tasks.register(lambda job: started.update([job.id]), "count")
    ids = jobs.enqueue_many(*[NewJob("count")] * 400)
    name = make_url(jobs.url).database
    jobs.execute(f"ALTER DATABASE {name} SET default_transaction_isolation TO serializable")
    strict = {"isolation_level": "SERIALIZABLE"}
    try:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(jobs.worker(tasks, engine=strict, concurrency=4))
                for _ in range(4)
            ]
            wait_until(lambda: not jobs.unfinished())
    finally:
        jobs.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
    assert started == dict.fromkeys(ids, 1)
    assert {job.status for job in jobs.all()} == {"succeeded"}
    for running in workers:
        assert running.log.of("broke") == []
        assert running.log.of("refused") == []


# --- what an unfinished job is


@on_drivers(*EVERYWHERE)
def test_a_key_is_taken_as_long_as_its_job_is_unfinished(jobs: Jobs) -> None:
    """Case 36: pending, delayed, retrying and running jobs hold their key; ended ones do not."""
    release = threading.Event()
    tasks = Tasks()

    def again(_: JobContext) -> None:
        raise RetryAfter(3600)

    def never(_: JobContext) -> None:
        raise PermanentJobError("as wished")

    tasks.register(again, "retrying")
    tasks.register(lambda _: release.wait(LONG_S) and None, "running")
    tasks.register(never, "failed")
    tasks.register(lambda _: None, "succeeded")
    states = ("pending", "delayed", "cancelled", *tasks)

    def enqueue(session: JobSession, task: str) -> int | None:
        delay = 3600 if task in ("delayed", "cancelled") else None
        return session.enqueue(task, idempotency_key=task, delay=delay)

    def enqueue_all(session: JobSession) -> dict[str, int | None]:
        return {task: enqueue(session, task) for task in states}

    first = {task: job_id or 0 for task, job_id in in_session(jobs, enqueue_all).items()}
    assert all(first.values())
    jobs.cancel(first["cancelled"])
    with jobs.worker(tasks):
        jobs.attempted(first["retrying"])
        jobs.wait(first["running"], lambda job: job.status == "running")
        for ends in ("failed", "succeeded"):
            assert jobs.finished(first[ends]).status == ends
        second = in_session(jobs, enqueue_all)
        release.set()
    stored = {task for task, job_id in second.items() if job_id is not None}
    assert stored == {"failed", "succeeded", "cancelled"}
    assert len(jobs.all()) == len(states) + 3


@on_drivers(*ON_POSTGRES)
def test_a_key_that_is_given_back_in_this_instant_is_never_held_twice(jobs: Jobs) -> None:
    """Case 36: while jobs end, the key is found taken or free, and never do two of them run."""
    rounds = 100
    at_work: list[int] = []
    ran: list[int] = []
    tasks = Tasks()

    @tasks.task("t")
    def handler(job: JobContext) -> None:
        at_work.append(job.id)
        assert at_work == [job.id]
        ran.append(job.id)
        at_work.remove(job.id)

    deadline = time.monotonic() + LONG_S

    def work(_: int) -> list[int]:
        got: list[int] = []
        while len(ran) < rounds and time.monotonic() < deadline:
            with JobSession(engine) as session, session.begin():
                job_id = session.enqueue("t", idempotency_key="k", max_attempts=1)
            if job_id is not None:
                got.append(job_id)
        return got

    with open_engine(jobs.engine.url, pool_size=2) as engine, jobs.worker(tasks):
        one, other = _at_once(2, work)
        wait_until(lambda: not jobs.unfinished())
    assert len(ran) >= rounds
    assert sorted(one + other) == sorted(ran) == [job.id for job in jobs.all()]
    assert {job.status for job in jobs.all()} == {"succeeded"}


@on_drivers(*EVERYWHERE)
def test_keys_are_compared_exactly(jobs: Jobs) -> None:
    """Case 40: case, spaces and Unicode forms make other keys; tasks and payloads do not."""
    keys = ["key", "KEY", "key ", " key", "ké", "ke\u0301", "\U0001f600" * 255, "'\"%(x)s:y\\", " "]

    def work(session: JobSession) -> None:
        assert all(session.enqueue("t", idempotency_key=key) for key in keys)
        assert not any(session.enqueue("other", 1, idempotency_key=key) for key in keys)
        many = session.enqueue_many([NewJob("many", idempotency_key=key) for key in [*keys, "Key"]])
        assert [job_id is None for job_id in many] == [True] * len(keys) + [False]
        with pytest.raises(InvalidArgumentError, match="idempotency_key"):
            session.enqueue("t", idempotency_key="")

    in_session(jobs, work)
    assert rows(jobs.url, Job.idempotency_key) == [*keys, "Key"]


# --- tools


def _fresh(database: Database, **options: Any) -> Any:
    url = database.url("psycopg")
    make_empty_tables(url)
    return open_engine(url, **options)


def _blocked(database: Database) -> int:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return int(database.cluster.psql(f"{statement} AND datname = '{database.name}'")[0][0])
