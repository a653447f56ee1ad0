"""Idempotency keys: one unfinished job a key, whoever enqueues, whenever they commit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError

from sqlalchemy_jobs import AsyncJobSession, InvalidArgumentError, Job, JobSession, NewJob
from tests.engines import make_empty_tables, open_engine
from tests.enqueue_tools import FINISHED_OR_NOT, change, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database

UNFINISHED = ["pending", "delayed", "waiting for a retry", "running"]
LONG_S = 60


@pytest.mark.parametrize("state", FINISHED_OR_NOT)
def test_a_key_is_taken_as_long_as_its_job_is_unfinished(sync_engine: Engine, state: str) -> None:
    """Pending, delayed, retrying and running jobs hold their key; ended ones have given it back."""
    with JobSession(sync_engine) as session:
        first = session.enqueue("t", idempotency_key="k")
        session.commit()
        change(sync_engine.url, FINISHED_OR_NOT[state])
        second = session.enqueue("t", idempotency_key="k")
        session.commit()
    expected = [first] if state in UNFINISHED else [first, second]
    assert (second is None) == (state in UNFINISHED)
    assert rows(sync_engine.url, Job.id) == expected


async def test_an_async_session_sees_the_same_states(async_engine: AsyncEngine) -> None:
    """The states that hold a key are the same on every driver."""
    async with AsyncJobSession(async_engine) as session:
        for state, statement in FINISHED_OR_NOT.items():
            first = await session.enqueue("t", idempotency_key="k")
            await session.commit()
            change(async_engine.url, statement)
            second = await session.enqueue("t", idempotency_key="k")
            await session.commit()
            assert (state, first is not None) == (state, True)
            assert (state, second is None) == (state, state in UNFINISHED)
            change(async_engine.url, "DELETE FROM {jobs}")


def test_a_refused_duplicate_leaves_the_transaction_usable(sync_engine: Engine) -> None:
    """None is an answer and no error: what came before and comes after is committed."""
    with JobSession(sync_engine) as session, session.begin():
        assert session.enqueue("a", idempotency_key="k") is not None
        assert session.enqueue("b", idempotency_key="k") is None
        assert session.enqueue("c") is not None
    assert rows(sync_engine.url, Job.task) == ["a", "c"]


def test_a_savepoint_gives_its_key_back(sync_engine: Engine) -> None:
    """A key taken within a savepoint that is rolled back is free again in the same transaction."""
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("before")
        savepoint = session.begin_nested()
        session.enqueue("a", idempotency_key="k")
        savepoint.rollback()
        assert session.enqueue("b", idempotency_key="k") is not None
        assert session.enqueue("c", idempotency_key="k") is None
    assert rows(sync_engine.url, Job.task) == ["before", "b"]


def test_keys_are_compared_exactly(sync_engine: Engine) -> None:
    """Case, spaces and Unicode forms make other keys; other tasks and payloads do not."""
    keys = ["key", "KEY", "key ", " key", "ké", "ke\u0301", "\U0001f600" * 255, "'\"%(x)s:y\\", " "]
    with JobSession(sync_engine) as session, session.begin():
        assert all(session.enqueue("t", idempotency_key=key) for key in keys)
        assert not any(session.enqueue("other", 1, idempotency_key=key) for key in keys)
        with pytest.raises(InvalidArgumentError, match="idempotency_key"):
            session.enqueue("t", idempotency_key="")
    assert rows(sync_engine.url, Job.idempotency_key) == keys


def test_jobs_without_a_key_never_collide(sync_engine: Engine) -> None:
    """Equal jobs without a key are all stored."""
    with JobSession(sync_engine) as session, session.begin():
        assert all(session.enqueue("t", 1, idempotency_key=None) for _ in range(3))


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


def test_fifty_threads_with_one_key_store_one_job(sync_engine: Engine) -> None:
    """One gets the id, 49 get None, nobody an error, and all can go on in their transactions."""
    patient = {"connect_args": {"timeout": LONG_S}} if _on_sqlite(sync_engine) else {}
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


def test_the_last_of_five_gets_the_key_that_four_roll_back(database: Database) -> None:
    """A duplicate waits for the other transaction's end, and takes the key if that rolls back."""
    with _fresh(database) as engine:
        holders = [JobSession(engine) for _ in range(5)]
        assert holders[0].enqueue("0", idempotency_key="k") is not None
        with ThreadPoolExecutor(4) as pool:
            waiting = {
                number: pool.submit(holders[number].enqueue, f"{number}", idempotency_key="k")
                for number in range(1, 5)
            }
            _wait_for(lambda: _blocked(database) == 4)
            holders[0].rollback()
            order: list[int] = []
            while waiting:  # of those who wait, one after the other gets it
                _wait_for(lambda: any(future.done() for future in waiting.values()))
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
    """The wait ends with the other's commit, and only then is None the truth."""
    with _fresh(database) as engine, JobSession(engine) as one, JobSession(engine) as other:
        one.enqueue("one", idempotency_key="k")
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(other.enqueue, "other", idempotency_key="k")
            _wait_for(lambda: _blocked(database) == 1)
            assert not second.done()
            one.commit()
            assert second.result(LONG_S) is None
        other.commit()


def test_the_wait_for_a_key_honours_lock_timeout(database: Database) -> None:
    """Whoever does not want to wait sets lock_timeout, and gets the driver's error."""
    with _fresh(database) as engine, JobSession(engine) as one, JobSession(engine) as other:
        one.enqueue("one", idempotency_key="k")
        other.execute(text("SET LOCAL lock_timeout = '50ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            other.enqueue("other", idempotency_key="k")


def test_bulks_with_opposite_orders_of_keys_do_not_deadlock(database: Database) -> None:
    """Keys are taken in one order, whatever order callers give them in."""
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
    """Two transactions that take two keys crosswise: one gets the driver's error, one goes on."""
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
    """Stricter levels raise the error that callers there must retry on, instead of None."""
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


def test_a_key_that_is_given_back_in_this_instant_is_never_held_twice(database: Database) -> None:
    """While jobs end, enqueueing finds the key taken or free, and never two unfinished jobs."""
    with _fresh(database, pool_size=3) as engine:
        ended = threading.Event()

        def end() -> int:
            while not ended.is_set():
                change(engine.url, "UPDATE {jobs} SET status = 'succeeded'")
            return 0

        def work(number: int) -> int:
            if number == 0:
                return end()
            got = 0
            try:
                for _ in range(100):
                    with JobSession(engine) as session, session.begin():
                        got += session.enqueue("t", idempotency_key="k") is not None
            finally:
                ended.set()
            return got

        _, *got = _at_once(3, work)
        assert sum(got) == len(rows(engine.url, Job.id))
        assert rows(engine.url, Job.status).count("pending") <= 1


# --- tools


def _on_sqlite(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite"


def _fresh(database: Database, **options: Any) -> Any:
    url = database.url("psycopg")
    make_empty_tables(url)
    return open_engine(url, **options)


def _blocked(database: Database) -> int:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return int(database.cluster.psql(f"{statement} AND datname = '{database.name}'")[0][0])


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
