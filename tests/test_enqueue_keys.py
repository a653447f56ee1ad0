"""Idempotency keys within one transaction; `tests/faults/test_keys.py` has those of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy_jobs import Job, JobSession
from tests.enqueue_tools import rows

if TYPE_CHECKING:
    from sqlalchemy import Engine


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


def test_jobs_without_a_key_never_collide(sync_engine: Engine) -> None:
    """Equal jobs without a key are all stored."""
    with JobSession(sync_engine) as session, session.begin():
        assert all(session.enqueue("t", 1, idempotency_key=None) for _ in range(3))
