"""Whatever is given to a job, and whatever its handler raises: it is refused, or runs and ends."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import select

from sqlalchemy_jobs import (
    InvalidArgumentError,
    Job,
    JobContext,
    JobSession,
    NewJob,
    PayloadError,
    Tasks,
)
from tests.enqueue_tools import change, counted, in_session
from tests.faults.raised import HUGE, Error, errors, texts
from tests.faults.search import SETTINGS
from tests.workers import EVERYWHERE, jobs_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers import Jobs


@pytest.fixture(params=EVERYWHERE)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver."""
    yield from jobs_on(request)


@dataclass(frozen=True)
class Wish:
    """A job to enqueue, and how its handler is to end."""

    task: str
    payload: Any
    key: str | None
    meta: Any
    attempts: int
    error: Error | None
    many: bool = False

    def faults(self) -> set[str]:
        """Return the arguments that cannot be stored."""
        found = {
            "task": 1 <= len(self.task) <= 200 and storable(self.task),
            "idempotency_key": self.key is None
            or (1 <= len(self.key) <= 255 and storable(self.key)),
            "payload": is_json(self.payload),
            "meta": is_json(self.meta),
        }
        return {name for name, good in found.items() if not good}

    def enqueue(self, session: JobSession) -> int | None:
        """Enqueue it, alone or by the call for many."""
        job = NewJob(
            self.task,
            self.payload,
            idempotency_key=self.key,
            meta=self.meta,
            max_attempts=self.attempts,
        )
        if self.many:
            return session.enqueue_many([job])[0]
        return session.enqueue(
            job.task,
            job.payload,
            idempotency_key=job.idempotency_key,
            meta=job.meta,
            max_attempts=job.max_attempts,
        )


def storable(text: str) -> bool:
    """Whether a database can keep the text."""
    return not re.search("[\0\ud800-\udfff]", text)


def kept(text: str) -> str:
    """Return what a database keeps of a text that it must take."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


def is_json(value: Any, room: int = 100) -> bool:
    """Whether the value is JSON that a database can keep."""
    match value:
        case None | bool():
            return True
        case str():
            return storable(value)
        case int():
            return abs(value) < 10**4300
        case float():
            return math.isfinite(value)
        case list() | tuple():
            return room > 0 and all(is_json(item, room - 1) for item in value)
        case dict():
            names = all(type(name) is str and storable(name) for name in value)
            return names and room > 0 and all(is_json(item, room - 1) for item in value.values())
        case _:
            return False


def same(read: Any, given_value: Any) -> bool:
    """Whether a JSON value is what was given, after its way through a database."""
    match given_value:
        case float():
            # PostgreSQL writes 1e22 without an exponent, so it comes back as an int.
            return isinstance(read, int | float) and float(read) == given_value
        case list() | tuple():
            return len(read) == len(given_value) and all(map(same, read, given_value))
        case dict():
            return read.keys() == given_value.keys() and all(
                same(read[name], item) for name, item in given_value.items()
            )
        case _:
            return type(read) is type(given_value) and read == given_value


def nested(depth: int) -> Any:
    """Return so many lists within each other."""
    value: Any = "innermost"
    for _ in range(depth):
        value = [value]
    return value


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.sampled_from([2**63, -(2**63) - 1, 10**4299, 5e-324, 1e308, b"x", object(), {1}])
)
values = st.recursive(
    scalars | st.sampled_from([nested(99), nested(100), nested(101)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(texts | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)
wishes = st.builds(
    Wish,
    task=texts | st.integers(199, 201).map(lambda n: "\U0001f600" * n),
    payload=values,
    key=st.none() | texts | st.integers(254, 256).map(lambda n: "\U0001f600" * n),
    meta=st.none() | values,
    attempts=st.integers(1, 2),
    error=st.none() | errors,
    many=st.booleans(),
)


def test_what_is_accepted_runs_and_reads_back_and_the_rest_is_refused(jobs: Jobs) -> None:
    """What cannot be stored is refused by its name before any SQL; all else ends as meant."""

    @SETTINGS
    @given(st.lists(wishes, min_size=10, max_size=40))
    @example([Wish("huge", {"a": 1}, None, None, 1, HUGE), Wish("good", 1, None, None, 1, None)])
    def search(batch: list[Wish]) -> None:
        change(jobs.url, "DELETE FROM {jobs}")
        accepted = in_session(jobs, lambda session: offered(session, batch))
        seen = run(jobs, accepted)
        stored = in_session(jobs, everything)
        assert sorted(stored) == sorted(accepted)
        for job_id, wish in accepted.items():
            check(wish, stored[job_id], seen[job_id])

    search()


def offered(session: JobSession, batch: list[Wish]) -> dict[int, Wish]:
    """Enqueue all, in one transaction, and return those that were accepted."""
    accepted: dict[int, Wish] = {}
    taken: set[str] = set()
    with counted(session.connection().engine) as sent:
        for wish in batch:
            sent.clear()
            faults = wish.faults()
            if faults:
                with pytest.raises((PayloadError, InvalidArgumentError)) as caught:
                    wish.enqueue(session)
                assert str(caught.value).startswith(tuple(faults)), wish
                assert sent == []
                continue
            job_id = wish.enqueue(session)
            assert (job_id is None) == (wish.key in taken), wish
            if job_id is not None:
                accepted[job_id] = wish
            if wish.key is not None:
                taken.add(wish.key)
    return accepted


def run(jobs: Jobs, accepted: dict[int, Wish]) -> dict[int, list[tuple[Any, ...]]]:
    """Let one worker run all, and return what each attempt was told."""
    seen: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)

    def handler(job: JobContext) -> None:
        seen[job.id].append((job.payload, job.meta, job.task, job.attempt, job.max_attempts))
        error = accepted[job.id].error
        if error is not None:
            raise error.make()

    async def in_a_coroutine(job: JobContext) -> None:
        await asyncio.sleep(0)
        handler(job)

    tasks = Tasks()
    for number, name in enumerate(dict.fromkeys(wish.task for wish in accepted.values())):
        tasks.register((handler, in_a_coroutine)[number % 2], name, backoff=lambda _: 0)
    running = jobs.drain(tasks, timeout=20)
    assert running.log.of("broke") == []
    return seen


def everything(session: JobSession) -> dict[int, Job]:
    """Read every row."""
    found = {job.id: job for job in session.scalars(select(Job))}
    session.expunge_all()
    return found


def check(wish: Wish, job: Job, seen: list[tuple[Any, ...]]) -> None:
    """Check that the job was what was wished for, and that it ended so."""
    assert (job.task, job.idempotency_key) == (wish.task, wish.key)
    error = wish.error
    expected = 1 if error is None or error.final else wish.attempts
    attempts = range(1, expected + 1)
    assert [told[2:] for told in seen] == [(wish.task, n, wish.attempts) for n in attempts]
    for payload, meta in [(job.payload, job.meta), *(told[:2] for told in seen)]:
        assert same(payload, wish.payload), wish
        assert same(meta, wish.meta), wish
    assert (job.attempts, job.locked_by) == (expected, None)
    if error is None:
        assert (job.status, job.last_error, job.errors) == ("succeeded", None, [])
        return
    assert job.status == "failed"
    assert [entry["attempt"] for entry in job.errors] == list(attempts)
    for text in (str(job.last_error), *(entry["error"] for entry in job.errors)):
        assert len(text) <= 4000
        assert error.name in text
        # The text of a group is indented, line by line.
        for line in kept(error.said).splitlines():
            assert line.strip() in text, wish
