"""Enqueueing within the caller's transaction: what commits is run, and what does not never was."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import sqlmodel
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError, UnboundExecutionError

from sqlalchemy_jobs import (
    AsyncJobSession,
    Job,
    JobContext,
    JobSession,
    NewJob,
    PayloadError,
    Tasks,
    enqueue,
    requeue,
)
from sqlalchemy_jobs._messages import Claim
from tests.engines import open_async_engine, open_engine
from tests.enqueue_stories import SAVEPOINTS, TRANSACTIONS, run_stories
from tests.enqueue_tools import change, counted, in_session, listening, plain_engine, rows
from tests.rows import Hand, Queue
from tests.workers import EVERYWHERE, ON_POSTGRES, jobs_on, on_drivers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.workers import Jobs


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on the drivers that a test names."""
    yield from jobs_on(request)


@on_drivers(*EVERYWHERE)
def test_a_job_is_there_exactly_if_its_transaction_commits(jobs: Jobs) -> None:
    """Case 29: on every kind of session and connection, row and wake-up come with the commit."""
    run_stories(jobs, TRANSACTIONS)


@on_drivers(*EVERYWHERE)
def test_a_savepoint_decides_about_the_jobs_within_it(jobs: Jobs) -> None:
    """Case 31: released, a savepoint waits for the commit; rolled back, its jobs never were."""
    run_stories(jobs, SAVEPOINTS)


@on_drivers(*ON_POSTGRES)
def test_a_job_starts_after_the_commit_and_finds_the_data_it_needs(jobs: Jobs) -> None:
    """Case 30: no look finds a job before the commit; after it, it starts at once."""
    jobs.execute("CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY)")
    jobs.execute("DELETE FROM orders")
    started: dict[int, tuple[float, int]] = {}
    tasks = Tasks()
    tasks.register(lambda _: None, "probe")

    @tasks.task("ship")
    def ship(job: JobContext[int]) -> None:
        at = time.monotonic()
        found = jobs.execute("SELECT count(*) FROM orders WHERE id = :id", id=job.payload)
        started[job.payload] = at, found[0][0]

    def order(session: JobSession, number: int) -> tuple[int, float]:
        session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": number})
        # Of a bare connection's commit a worker learns by the notification alone.
        target = session.connection() if number % 2 else session
        job_id = enqueue(target, "ship", number)
        assert job_id is not None
        # The worker looks at everything meanwhile, and would take the older job first.
        jobs.finished(jobs.enqueue("probe"))
        assert number not in started
        return job_id, time.monotonic()

    far: dict[str, Any] = {"poll_interval": 60, "max_poll_interval": 60, "safety_interval": 60}
    with jobs.worker(tasks, **far) as running:
        running.ready()
        for number in range(4):
            job_id, committed = in_session(jobs, partial(order, number=number))
            assert jobs.finished(job_id).status == "succeeded"
            at, found = started[number]
            assert found == 1
            assert at - committed < 10  # and not at the next look, a minute later


def test_binds_choose_the_database_of_jobs(sync_engine: Engine, tmp_path: Path) -> None:
    """Case 30: of several engines the one bound to jobs is used, and without one it is refused."""
    with open_engine(f"sqlite:///{tmp_path}/other.sqlite") as other:
        either: list[Any] = [{Job: sync_engine}, {Job.__table__: sync_engine}]
        for binds in either:
            with JobSession(other, binds=binds) as session, session.begin():
                session.enqueue("t")
        with (
            JobSession(binds={sqlmodel.SQLModel: other}) as session,
            pytest.raises(UnboundExecutionError),
        ):
            session.enqueue("t")
    assert rows(sync_engine.url, Job.task) == ["t", "t"]


async def test_one_async_session_in_several_tasks_at_once(async_engine: AsyncEngine) -> None:
    """Case 39: SQLAlchemy refuses it; what the failed transaction did is gone as a whole."""
    async with open_async_engine(async_engine.url) as engine:
        async with AsyncJobSession(engine) as session:
            answers = await asyncio.gather(
                *(session.enqueue(f"{i}") for i in range(5)), return_exceptions=True
            )
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            assert errors
            assert all(isinstance(error, SQLAlchemyError) for error in errors), errors
            assert rows(engine.url) == []
            await session.rollback()
            await session.enqueue("afterwards")
            await session.commit()
        assert rows(engine.url, Job.task) == ["afterwards"]


# --- payloads

CANNOT_BE_STORED: dict[str, tuple[Any, str]] = {
    "NaN": ({"user": {"score": math.nan}}, "payload.user.score: "),
    "infinity": ([0, math.inf], "payload[1]: "),
    "NUL": ({"name": "a\0b"}, "payload.name: "),
    "NUL in a key": ({"a\0b": 1}, 'payload["a\\x00b"]: '),
    "surrogate": ({"user": {"name": "\ud800"}}, "payload.user.name: "),
    "int key": ({"by_id": {7: "x"}}, "payload.by_id: "),
    "UUID": ([{"id": UUID(int=7)}], "payload[0].id: "),
    "datetime": ({"at": datetime(2030, 1, 1, tzinfo=UTC)}, "payload.at: "),
    "Decimal": ({"price": Decimal(1)}, "payload.price: "),
    "bytes": (b"x", "payload: "),
    "set": ({1}, "payload: "),
    "class": (dict, "payload: "),
    "answer of a callable": (lambda: {"x": {1}}, "payload.x: "),
    "awaitable": (lambda: Awaitable(), "payload: "),  # noqa: PLW0108 - a class is not called
}


class Awaitable:
    """What somebody has forgotten to await."""

    def __await__(self) -> Any:
        """Yield nothing."""
        yield


@dataclass
class Order:
    """A payload whose annotations bring its values back."""

    id: UUID
    at: datetime
    price: Decimal
    tags: frozenset[str]
    by_day: dict[date, int]


ORDER = Order(
    UUID(int=7),
    datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    Decimal("1.10"),
    frozenset({"new", "b2b"}),
    {date(2030, 1, 1): 2**70},
)


@on_drivers(*EVERYWHERE)
def test_payloads_arrive_or_are_refused_before_any_sql(jobs: Jobs) -> None:
    """Case 37: what is no JSON is refused by its path and harms nobody; the rest comes back."""
    numbers = [2**70, -(10**400), 5e-324, 1e22, 0.1 + 0.2, 1.0]
    kept = [*numbers, "\\u0000", {"a": ("\u00e9\U0001f600", 1), "": None}]
    came = [*numbers, "\\u0000", {"a": ["\u00e9\U0001f600", 1], "": None}]
    arrived: list[Any] = []
    tasks = Tasks()

    @tasks.task("typed")
    def typed(job: JobContext[Order]) -> None:
        arrived.append(job.payload)

    tasks.register(lambda job: arrived.append(job.payload), "plain")

    def work(session: JobSession) -> None:
        session.enqueue("typed", ORDER)
        with counted(session.connection().engine) as sent:
            for name, (payload, told) in CANNOT_BE_STORED.items():
                with pytest.raises(PayloadError) as caught:
                    session.enqueue("refused", payload)
                assert (name, str(caught.value)[: len(told)]) == (name, told)
                with pytest.raises(PayloadError):
                    session.enqueue_many([NewJob("refused"), NewJob("refused", payload)])
            assert sent == []
        session.enqueue_many([NewJob("plain", value) for value in kept])

    in_session(jobs, work)
    jobs.drain(tasks, concurrency=1)
    assert arrived == [ORDER, *came]
    assert rows(jobs.url, Job.payload)[1:] == came
    assert set(rows(jobs.url, Job.status)) == {"succeeded"}


@on_drivers(*EVERYWHERE)
def test_an_orm_instance_is_refused_with_the_way_out(jobs: Jobs) -> None:
    """Case 38: in whatever state it is, nothing of it is loaded, and the transaction goes on."""

    def work(session: JobSession) -> None:
        pending, expired, detached = (Job(task="orm", payload=n) for n in range(3))
        session.add_all([expired, detached])
        session.flush()
        session.expunge(detached)
        session.expire(expired)
        session.add(pending)
        with counted(session.connection().engine) as sent:
            for user in (Job(task="transient"), pending, expired, detached):
                for payload in (user, {"user": user}, [{"of": (user,)}]):
                    with pytest.raises(PayloadError, match="pass the id, not the object"):
                        session.enqueue("refused", payload)
            assert sent == []
        with pytest.raises(PayloadError, match=r"payload\.user: .*pass the id"):
            session.enqueue("refused", lambda: {"user": pending})
        session.enqueue("goes on", lambda: {"user_id": expired.id})

    in_session(jobs, work)
    assert sorted(rows(jobs.url, Job.task)) == ["goes on", "orm", "orm", "orm"]
    assert rows(jobs.url, Job.payload)[-1] == {"user_id": rows(jobs.url, Job.id)[0]}


# --- two-phase transactions


@on_drivers(*ON_POSTGRES)
def test_a_two_phase_session_enqueues_without_a_notice(jobs: Jobs) -> None:
    """Case 68: NOTIFY cannot be prepared, so none is sent: preparing works, and the job runs."""
    if jobs.execute("SHOW max_prepared_transactions") == [("0",)]:
        pytest.skip("the server given does not allow two-phase transactions")
    with listening(jobs.engine) as heard:

        def prepare(session: JobSession, notify: Any) -> None:
            session.enqueue(f"{notify}", notify=notify)
            session.enqueue_many([NewJob(f"{notify}")], notify=notify)
            session.prepare()
            assert heard.wakes == 0

        for notify in ("commit", "after_commit", False):
            in_session(jobs, partial(prepare, notify=notify), twophase=True)
            assert heard.wakes == 1
            heard.wakes = 0
        assert heard.notified() == ["after_commit"]

        def bare(session: JobSession) -> None:
            enqueue(session.connection(), "bare")
            session.prepare()

        in_session(jobs, bare, twophase=True)
        assert heard.notified() == []

        def requeued(session: JobSession) -> None:
            assert len(requeue(session, rows(jobs.url, Job.id))) == 7
            session.prepare()
            session.rollback()

        change(jobs.url, "UPDATE {jobs} SET status = 'failed'")
        in_session(jobs, requeued, twophase=True)
        assert set(rows(jobs.url, Job.status)) == {"failed"}
        change(jobs.url, "UPDATE {jobs} SET status = 'pending'")
    tasks = Tasks()
    for name in ("commit", "after_commit", "False", "bare"):
        tasks.register(lambda _: None, name)
    summary = jobs.drain(tasks).summary
    assert summary is not None
    assert summary.succeeded == 7


# --- the clock of an old transaction


@on_drivers(*EVERYWHERE)
def test_in_an_old_transaction_time_counts_from_the_statement(jobs: Jobs) -> None:
    """Case 69: a delay counts from the call, a lease from the claim, not from the transaction."""
    on_postgres = jobs.on_postgres

    def work(session: JobSession) -> tuple[datetime, datetime, datetime]:
        begun = _clock(session)
        if on_postgres:
            session.execute(text("SELECT pg_sleep(0.4)"))
        before = _clock(session)
        session.enqueue("now")
        session.enqueue("number", delay=100)
        session.enqueue("timedelta", delay=timedelta(seconds=100))
        session.enqueue_many([NewJob("many", delay=100), NewJob("zero", delay=0)])
        return begun, before, _clock(session)

    begun, before, after = in_session(jobs, work)
    assert before - begun >= timedelta(seconds=0.4) or not on_postgres
    for task, run_at in rows(jobs.url, Job.task, Job.run_at):
        waits = timedelta(seconds=0 if task in ("now", "zero") else 100)
        assert before <= run_at - waits <= after, task
    if not on_postgres:
        return
    with plain_engine(jobs.url).begin() as connection:
        connection.execute(text("SELECT pg_sleep(0.4)"))
        queue = Queue(connection)
        before = queue.now()
        leases = Hand(queue, "now", visibility_timeout=60)(Claim(1)).leases
        until = queue.row(leases[0].job_id)["lease_expires_at"]
        assert before <= until - timedelta(seconds=60) <= queue.now()


def _clock(session: JobSession) -> datetime:
    if session.connection().dialect.name == "sqlite":
        now = datetime.now(UTC)  # the same clock; SQLite reads milliseconds of it
        return now.replace(microsecond=now.microsecond // 1000 * 1000)
    clock: datetime = session.scalars(select(func.clock_timestamp())).one()
    return clock
