"""What a job may be given: bad input is refused before any SQL, good input means what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.orm import Session

from sqlalchemy_jobs import (
    AsyncJobSession,
    InvalidArgumentError,
    Job,
    JobSession,
    PayloadError,
    enqueue,
)
from tests.engines import open_engine
from tests.enqueue_tools import counted, rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine


NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - what is refused


BAD: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("meta", PayloadError, "meta.trace: ", {"meta": {"trace": b"x"}}),
    ("no task", InvalidArgumentError, "task ", {"task": ""}),
    ("task of 10 kB", InvalidArgumentError, "task ", {"task": "x" * 10_000}),
    ("task with NUL", InvalidArgumentError, "task ", {"task": "a\0b"}),
    ("task with a surrogate", InvalidArgumentError, "task ", {"task": "\udfff"}),
    ("task None", InvalidArgumentError, "task ", {"task": None}),
    ("task function", InvalidArgumentError, "task ", {"task": len}),
    ("no key", InvalidArgumentError, "idempotency_key ", {"idempotency_key": ""}),
    ("long key", InvalidArgumentError, "idempotency_key ", {"idempotency_key": "k" * 256}),
    ("key with NUL", InvalidArgumentError, "idempotency_key ", {"idempotency_key": "\0"}),
    ("key 7", InvalidArgumentError, "idempotency_key ", {"idempotency_key": 7}),
    ("negative delay", InvalidArgumentError, "delay ", {"delay": -0.001}),
    ("negative timedelta", InvalidArgumentError, "delay ", {"delay": timedelta(seconds=-1)}),
    ("delay NaN", InvalidArgumentError, "delay ", {"delay": math.nan}),
    ("delay infinity", InvalidArgumentError, "delay ", {"delay": math.inf}),
    ("delay of 11 years", InvalidArgumentError, "delay ", {"delay": timedelta(days=11 * 366)}),
    ("delay as text", InvalidArgumentError, "delay ", {"delay": "5"}),
    ("delay True", InvalidArgumentError, "delay ", {"delay": True}),
    ("delay and run_at", InvalidArgumentError, "not both", {"delay": 0, "run_at": NAIVE}),
    ("naive run_at", InvalidArgumentError, "run_at .*naive", {"run_at": NAIVE}),
    ("run_at as text", InvalidArgumentError, "run_at ", {"run_at": "2030-01-01T00:00:00Z"}),
    ("run_at as date", InvalidArgumentError, "run_at ", {"run_at": NAIVE.date()}),
    ("run_at as number", InvalidArgumentError, "run_at ", {"run_at": 1.9e9}),
    ("run_at as time", InvalidArgumentError, "run_at ", {"run_at": time(tzinfo=UTC)}),
    (
        "run_at before year 1",
        InvalidArgumentError,
        "run_at ",
        {"run_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))},
    ),
    ("priority 3", InvalidArgumentError, "priority ", {"priority": 3}),
    ("priority -3", InvalidArgumentError, "priority ", {"priority": -3}),
    ("priority True", InvalidArgumentError, "priority ", {"priority": True}),
    ("priority 0.0", InvalidArgumentError, "priority ", {"priority": 0.0}),
    ("priority None", InvalidArgumentError, "priority ", {"priority": None}),
    ("no attempt", InvalidArgumentError, "max_attempts ", {"max_attempts": 0}),
    (
        "a million and one attempts",
        InvalidArgumentError,
        "max_attempts ",
        {"max_attempts": 1_000_001},
    ),
    ("attempts 1.0", InvalidArgumentError, "max_attempts ", {"max_attempts": 1.0}),
    ("negative timeout", InvalidArgumentError, "timeout ", {"timeout": -1}),
    ("timeout NaN", InvalidArgumentError, "timeout ", {"timeout": math.nan}),
    ("notify", InvalidArgumentError, "notify ", {"notify": True}),
]


def test_bad_input_is_refused_before_any_sql(sync_engine: Engine) -> None:
    """The error names the place, nothing is sent, and the transaction commits what else it did."""
    with JobSession(sync_engine) as session, counted(sync_engine) as sent:
        for name, error, told, options in BAD:
            with pytest.raises(error, match=_literal(told)):
                session.enqueue(**_full(options))
            assert (name, sent) == (name, [])
        session.enqueue("good")
        session.commit()
    assert rows(sync_engine.url, Job.task) == ["good"]


async def test_bad_input_is_refused_on_every_async_driver(async_engine: AsyncEngine) -> None:
    """The same errors on asyncpg, psycopg and aiosqlite, and the transaction goes on."""
    async with AsyncJobSession(async_engine) as session, session.begin():
        await session.enqueue("before")
        with counted(async_engine) as sent:
            for name, error, told, options in BAD:
                with pytest.raises(error, match=_literal(told)):
                    await session.enqueue(**_full(options))
                assert (name, sent) == (name, [])
        await session.enqueue("after")
    assert rows(async_engine.url, Job.task) == ["before", "after"]


def _full(options: dict[str, Any]) -> dict[str, Any]:
    return {"task": "t", **options}


def _literal(told: str) -> str:
    return told.replace("[", r"\[").replace("payload.", r"payload\.")


def test_things_that_are_no_session_are_refused_by_name(sync_engine: Engine) -> None:
    """An engine, a sessionmaker or an async session in the wrong function gets a clear error."""
    for given in (sync_engine, None, JobSession):
        with pytest.raises(InvalidArgumentError, match="a Session or a Connection is needed"):
            enqueue(given, "t")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="await enqueue_async"):
        enqueue(AsyncJobSession(), "t")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="JobMixin"), Session(sync_engine) as session:
        enqueue(session, "t", job_class=dict)


# --- callable payloads


def test_a_callable_payload_sees_generated_keys(sync_engine: Engine) -> None:
    """It is called once, after a flush, even in a session that does not flush by itself."""
    calls: list[int] = []
    with JobSession(sync_engine, autoflush=False) as session, session.begin():
        other = Job(task="other", payload=None)
        session.add(other)

        def payload() -> dict[str, int]:
            calls.append(other.id)
            return {"id": other.id}

        job_id = session.enqueue("t", payload)
        assert calls == [other.id]
        assert other.id is not None
    assert dict(rows(sync_engine.url, Job.id, Job.payload))[job_id] == {"id": calls[0]}


def test_a_plain_payload_does_not_flush(sync_engine: Engine) -> None:
    """Objects added before stay pending, so that enqueueing surprises nobody with their SQL."""
    with JobSession(sync_engine) as session:
        pending = Job(task="other", payload=None)
        session.add(pending)
        session.enqueue("t", {"id": 7})
        assert pending in session.new


def test_a_callable_that_raises_leaves_the_transaction_usable(sync_engine: Engine) -> None:
    """Its own error comes out, no job is stored, and the transaction goes on."""
    with JobSession(sync_engine) as session, session.begin():
        with pytest.raises(ZeroDivisionError):
            session.enqueue("t", lambda: 1 // 0)
        session.enqueue("good")
    assert rows(sync_engine.url, Job.task) == ["good"]


async def test_a_callable_payload_of_an_async_session(async_engine: AsyncEngine) -> None:
    """It sees generated keys there too."""
    async with AsyncJobSession(async_engine) as session, session.begin():
        other = Job(task="other", payload=None)
        session.add(other)
        await session.enqueue("t", lambda: {"id": other.id})
    assert rows(async_engine.url, Job.payload)[1] == {"id": rows(async_engine.url, Job.id)[0]}


# --- what is stored


@dataclass
class Welcome:
    """A payload with a type."""

    user_id: int
    tags: tuple[str, ...] = ("new",)


class Order(BaseModel):
    """The same of pydantic."""

    at: datetime


def test_typed_payloads_are_dumped(sync_engine: Engine) -> None:
    """Dataclasses and models are stored as their JSON, by themselves or within other data."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("t", Welcome(7))
        session.enqueue("t", {"all": [Welcome(8), Order(at=moment)]})
        session.enqueue("t", lambda: Welcome(9))
    assert rows(sync_engine.url, Job.payload) == [
        {"user_id": 7, "tags": ["new"]},
        {"all": [{"user_id": 8, "tags": ["new"]}, {"at": "2030-01-01T00:00:00Z"}]},
        {"user_id": 9, "tags": ["new"]},
    ]


def test_left_out_options_stay_open(sync_engine: Engine) -> None:
    """max_attempts and timeout are null, for the task or the worker decides; payload is null."""
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("t")
    (row,) = rows(sync_engine.url)
    assert (row.max_attempts, row.timeout_s, row.idempotency_key, row.meta) == (None,) * 4
    assert (row.payload, row.status, row.priority, row.attempts) == (None, "pending", 0, 0)
    assert (row.locked_by, row.lease_expires_at, row.started_at) == (None, None, None)
    with JobSession(sync_engine) as session:
        absent = text("SELECT count(*) FROM " + _name(sync_engine) + " WHERE payload IS NULL")
        assert session.scalar(absent) == 0  # JSON null, not an absent value


def test_given_options_are_stored(sync_engine: Engine) -> None:
    """Bounds of the ranges are accepted; timedeltas and numbers mean seconds."""
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("x" * 200, priority=2, max_attempts=1, timeout=0, meta={"a": [1]})
        session.enqueue("t", priority=-2, max_attempts=1_000_000, timeout=timedelta(minutes=1.5))
        session.enqueue("t", idempotency_key="\U0001f600" * 255, timeout=0.5)
    found = rows(sync_engine.url, Job.priority, Job.max_attempts, Job.timeout_s, Job.meta)
    assert found == [(2, 1, 0.0, {"a": [1]}), (-2, 1_000_000, 90.0, None), (0, None, 0.5, None)]


@pytest.mark.drivers("psycopg")
def test_a_payload_of_a_megabyte_wakes_its_workers(sync_engine: Engine) -> None:
    """A notification carries the task only: size of payload and name do not matter to it."""
    with open_engine(sync_engine.url) as engine, JobSession(engine) as session, session.begin():
        session.enqueue("\U0001f600" * 200, {"text": "é" * 1_000_000})
    assert [len(payload["text"]) for payload in rows(sync_engine.url, Job.payload)] == [1_000_000]


def _name(engine: Engine) -> str:
    return "jobs" if engine.dialect.name == "sqlite" else "jobs.jobs"
