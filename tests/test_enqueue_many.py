"""`enqueue_many`: few statements, and the right id for each job, or None, in the caller's order."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, func, select
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlalchemy_jobs import (
    AsyncJobSession,
    InvalidArgumentError,
    Job,
    JobSession,
    NewJob,
    PayloadError,
    enqueue,
    enqueue_many,
    enqueue_many_async,
)
from tests.enqueue_tools import counted, listening, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

NEVER = datetime(2999, 1, 1, tzinfo=UTC)


def _mixed(count: int) -> list[NewJob]:
    """Jobs with and without keys, some keys twice, in an order that is not the keys' own."""
    return [
        NewJob(
            f"task-{i % 3}",
            {"i": i},
            idempotency_key=None if i % 3 == 0 else f"key-{(i * 7919) % count // 2}",
            priority=i % 5 - 2,
        )
        for i in range(count)
    ]


def _expect(jobs: list[NewJob], ids: list[int | None], url: Any) -> None:
    """Check that each id belongs to its own payload, and that each None had its reason."""
    assert len(ids) == len(jobs)
    stored = {row.id: row for row in rows(url)}
    given_ids = [job_id for job_id in ids if job_id is not None]
    assert sorted(given_ids) == sorted(stored)
    keys: set[str] = set()
    for job, job_id in zip(jobs, ids, strict=True):
        key = job.idempotency_key
        assert (job_id is None) == (key in keys), job
        if key is not None:
            keys.add(key)
        if job_id is not None:
            row = stored[job_id]
            told = (row.task, row.payload, row.idempotency_key, row.priority)
            assert told == (job.task, job.payload, key, job.priority)


def test_ten_thousand_jobs_take_a_statement_per_five_thousand(sync_engine: Engine) -> None:
    """Each id belongs to its payload, keyed or not, and the second of a key gets None."""
    jobs = _mixed(10_000)
    with JobSession(sync_engine) as session, counted(sync_engine) as sent:
        ids = session.enqueue_many(jobs)
        session.commit()
    assert len([text for text in sent if "INSERT" in text]) == 2
    assert None in ids
    _expect(jobs, ids, sync_engine.url)


async def test_ten_thousand_jobs_through_an_async_session(async_engine: AsyncEngine) -> None:
    """The async session's method does the same on every driver."""
    jobs = _mixed(10_000)
    async with AsyncJobSession(async_engine) as session:
        with counted(async_engine) as sent:
            ids = await session.enqueue_many(jobs)
            await session.commit()
    assert len([text for text in sent if "INSERT" in text]) == 2
    _expect(jobs, ids, async_engine.url)


async def test_the_function_takes_async_connections(async_engine: AsyncEngine) -> None:
    """`enqueue_many_async` enqueues in the transaction of an AsyncConnection."""
    jobs = _mixed(10)
    async with async_engine.begin() as connection:
        ids = await enqueue_many_async(connection, iter(jobs))
    _expect(jobs, ids, async_engine.url)


def test_every_kind_of_session_may_be_given(sync_engine: Engine) -> None:
    """Sessions, scoped sessions and connections all enqueue in their own transactions."""
    with Session(sync_engine) as session, session.begin():
        first = enqueue_many(session, [NewJob("a")])
    scoped = scoped_session(sessionmaker(sync_engine))
    second = enqueue_many(scoped, [NewJob("b")])
    scoped.commit()
    scoped.remove()
    with sync_engine.begin() as connection:
        third = enqueue_many(connection, [NewJob("c")])
    with Session(sync_engine) as session:
        enqueue_many(session, [NewJob("d")])
    assert list(rows(sync_engine.url, Job.id, Job.task)) == [
        (first[0], "a"),
        (second[0], "b"),
        (third[0], "c"),
    ]


def test_options_may_differ_from_row_to_row(sync_engine: Engine) -> None:
    """A row that leaves an option out gets its default, whatever the other rows give."""
    moment = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    jobs = [
        NewJob("plain"),
        NewJob("delay", delay=3600),
        NewJob("run_at", run_at=moment.astimezone(timezone(timedelta(hours=5.5)))),
        NewJob("bounds", max_attempts=7, timeout=timedelta(seconds=1.5)),
        NewJob("key", idempotency_key="k", meta={"trace": "x"}),
        NewJob("no limit", timeout=0, priority=2),
    ]
    with JobSession(sync_engine) as session, session.begin():
        ids = session.enqueue_many(jobs)
        now = _now(session.connection())
    stored = {row.task: row for row in rows(sync_engine.url)}
    assert [stored[job.task].id for job in jobs] == ids

    def soon(at: datetime) -> bool:
        return abs(at - now) < timedelta(seconds=60)

    assert soon(stored["plain"].run_at)
    assert soon(stored["delay"].run_at - timedelta(hours=1))
    assert stored["run_at"].run_at == moment
    for name in ("bounds", "key", "no limit"):
        assert soon(stored[name].run_at)
    named = [stored[job.task] for job in jobs]
    assert [(row.max_attempts, row.timeout_s, row.priority, row.meta) for row in named] == [
        (None, None, 0, None),
        (None, None, 0, None),
        (None, None, 0, None),
        (7, 1.5, 0, None),
        (None, None, 0, {"trace": "x"}),
        (None, 0.0, 2, None),
    ]
    assert stored["plain"].idempotency_key is None


def test_one_job_by_one_or_many_at_once_make_equal_rows(sync_engine: Engine) -> None:
    """`enqueue` and `enqueue_many` store the same row for the same options."""
    options: list[dict[str, Any]] = [
        {},
        {"payload": {"é": ["\U0001f600", 2**70, -0.0, 1e300, None, True, ""]}},
        {"payload": [], "meta": [1, {"a": None}]},
        {"run_at": NEVER, "max_attempts": 1, "timeout": 0.25, "priority": -2},
        {"run_at": datetime(1, 1, 1, tzinfo=UTC)},
        {"payload": '{"looks": "like JSON"}'},
        {"payload": 0.1},
        {"payload": None, "priority": 2},
        {"payload": "text", "idempotency_key": " k\u00e9 "},  # keys are stored last
    ]
    unfit = {"id", "created_at", "updated_at", "run_at", "idempotency_key"}
    columns = [column for column in Job.__table__.c if column.name not in unfit]
    with JobSession(sync_engine) as session, session.begin():
        for given_options in options:
            session.enqueue("t", **given_options)
    one_by_one = rows(sync_engine.url, *columns)
    keyed = rows(sync_engine.url, Job.idempotency_key)
    timed = [at for at in rows(sync_engine.url, Job.run_at) if at == NEVER or at.year == 1]
    with JobSession(sync_engine) as session, session.begin():
        session.execute(delete(Job))
        session.enqueue_many([NewJob("t", **given_options) for given_options in options])
    assert rows(sync_engine.url, *columns) == one_by_one
    assert rows(sync_engine.url, Job.idempotency_key) == keyed
    assert len(timed) == 2
    assert [at for at in rows(sync_engine.url, Job.run_at) if at == NEVER or at.year == 1] == timed


def test_ids_grow_in_the_callers_order_without_keys(sync_engine: Engine) -> None:
    """Jobs without keys get ascending ids, so that equal jobs run in the order given."""
    with JobSession(sync_engine) as session, session.begin():
        ids = session.enqueue_many([NewJob("t", {"i": i}) for i in range(5001)])
    assert ids == sorted(ids, key=lambda job_id: job_id or 0)
    assert rows(sync_engine.url, Job.payload) == [{"i": i} for i in range(5001)]


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    keys=st.lists(st.none() | st.sampled_from(["a", "A", "a ", "b", "ä", "\U0001f600", "Z"])),
    held=st.sets(st.sampled_from(["a", "A", "b"])),
)
def test_ids_and_nones_are_those_of_single_enqueues(
    sync_engine: Engine, keys: list[str | None], held: set[str]
) -> None:
    """Whatever keys are given and held, a None is where `enqueue` would have returned one."""
    with JobSession(sync_engine) as session:
        for holder in held:
            session.enqueue("held", idempotency_key=holder)
        ids = session.enqueue_many(
            [NewJob("t", {"place": i}, idempotency_key=key) for i, key in enumerate(keys)]
        )
        found = session.execute(select(Job.id, Job.payload).where(Job.task == "t")).all()
        session.rollback()
    taken = set(held)
    expected: list[int] = []
    for i, key in enumerate(keys):
        if key is None or key not in taken:
            expected.append(i)
        if key is not None:
            taken.add(key)
    assert [i for i, job_id in enumerate(ids) if job_id is not None] == expected
    assert {row.id: row.payload["place"] for row in found} == {ids[i]: i for i in expected}


def test_large_payloads_make_smaller_statements(sync_engine: Engine) -> None:
    """Payloads that would not fit into one message to the server are spread over several."""
    jobs = [NewJob("t", "x" * 7_000_000, meta=i) for i in range(5)]
    with JobSession(sync_engine) as session, counted(sync_engine) as sent, session.begin():
        ids = session.enqueue_many(jobs)
    assert len([text for text in sent if "INSERT" in text]) == 3
    assert rows(sync_engine.url, Job.id, Job.meta) == [(ids[i], i) for i in range(5)]


def test_nothing_is_sent_for_an_empty_list(sync_engine: Engine) -> None:
    """No job, no statement, and an empty list of ids."""
    with JobSession(sync_engine) as session, counted(sync_engine) as sent:
        assert session.enqueue_many([]) == []
        assert sent == []


@pytest.mark.drivers("psycopg")
def test_workers_are_told_once_a_task(sync_engine: Engine) -> None:
    """Thousands of jobs of one task make one notification, and jobs refused make none."""
    with JobSession(sync_engine) as session, listening(sync_engine) as heard:
        with session.begin():
            session.enqueue_many([NewJob(f"t{i % 2}", i) for i in range(3000)])
            session.enqueue_many([NewJob("keyed", idempotency_key="k")])
        assert heard.notified() == ["keyed", "t0", "t1"]
        assert heard.wakes == 1
        with session.begin():
            assert session.enqueue_many([NewJob("other", idempotency_key="k")]) == [None]
        assert heard.notified() == []
        assert heard.wakes == 1


def test_one_bad_job_stops_all_before_any_statement(sync_engine: Engine) -> None:
    """All are checked first: nothing is sent, nothing stored, and the transaction goes on."""
    with JobSession(sync_engine) as session, counted(sync_engine) as sent:
        with pytest.raises(PayloadError, match=r"payload\.user"):
            session.enqueue_many([NewJob("t"), NewJob("t", {"user": {1, 2}})])
        with pytest.raises(InvalidArgumentError, match="run_at"):
            session.enqueue_many([NewJob("t"), NewJob("t", run_at=datetime(2030, 1, 1))])  # noqa: DTZ001
        assert sent == []
        session.enqueue("good")
        session.commit()
    assert rows(sync_engine.url, Job.task) == ["good"]


def test_a_generator_that_fails_stores_nothing(sync_engine: Engine) -> None:
    """Jobs are taken from any iterable, and its own error comes before any statement."""

    def jobs() -> Iterator[NewJob]:
        yield NewJob("t")
        raise LookupError

    with JobSession(sync_engine) as session, counted(sync_engine) as sent:
        with pytest.raises(LookupError):
            session.enqueue_many(jobs())
        assert sent == []


def test_callable_payloads_are_called_after_a_flush(sync_engine: Engine) -> None:
    """Each callable sees the keys that the database made for objects added before."""
    with JobSession(sync_engine) as session, session.begin():
        pending = [Job(task=f"by hand {i}", payload=i) for i in range(3)]
        session.add_all(pending)
        ids = session.enqueue_many([NewJob("t", lambda job=job: {"id": job.id}) for job in pending])
        known = [job.id for job in pending]
    found = dict(rows(sync_engine.url, Job.id, Job.payload))
    assert [found[job_id or 0] for job_id in ids] == [{"id": i} for i in known]


def test_a_new_job_does_not_show_its_payload() -> None:
    """The repr of a NewJob, which ends up in logs, leaves out payload and meta."""
    shown = repr(NewJob("t", {"password": "s3cret"}, meta={"token": "s3cret"}))
    assert "s3cret" not in shown
    assert "'t'" in shown


def test_a_key_kept_by_another_row_is_left_alone(sync_engine: Engine) -> None:
    """Where a key is taken, the unfinished job that holds it is not changed."""
    with JobSession(sync_engine) as session, session.begin():
        enqueue(session, "first", {"n": 1}, idempotency_key="k")
    before = rows(sync_engine.url)
    with JobSession(sync_engine) as session, session.begin():
        assert session.enqueue_many([NewJob("second", {"n": 2}, idempotency_key="k")]) == [None]
    assert rows(sync_engine.url) == before
    assert json.dumps(before[0].payload) == '{"n": 1}'


def _now(connection: Connection) -> datetime:
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    now: datetime = connection.scalars(select(func.clock_timestamp())).one()
    return now
