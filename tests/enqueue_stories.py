"""What a caller may do around `enqueue`, and what must come of it, on every kind of session.

    run_stories(jobs, TRANSACTIONS)

Each story runs on each kind of session and connection of the driver, natively, and on async
drivers within `run_sync` too. Afterwards the rows, the notifications and the wake-ups must be
those of the jobs whose transaction was committed, on the one connection that there is.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlalchemy_jobs import AsyncJobSession, Job, JobSession, enqueue, enqueue_async
from tests.engines import open_async_engine, open_engine
from tests.enqueue_tools import begin_by_hand, connections_opened, listening, rows

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.enqueue_tools import Heard
    from tests.workers import Jobs

    Put = Callable[[str], int | None]
    PutAsync = Callable[[str], Awaitable[int | None]]

Story: TypeAlias = "Callable[[Any, Put], list[str]]"
AsyncStory: TypeAlias = "Callable[[Any, PutAsync], Awaitable[list[str]]]"

ONE_CONNECTION: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}

SYNC: dict[str, Callable[[Engine], Any]] = {
    "JobSession": JobSession,
    "Session": Session,
    "scoped_session": lambda engine: scoped_session(sessionmaker(engine)),
    "Connection": lambda engine: engine.connect(),
}
ASYNC: dict[str, Callable[[AsyncEngine], Any]] = {
    "AsyncJobSession": AsyncJobSession,
    "AsyncSession": AsyncSession,
    "async_scoped_session": lambda engine: async_scoped_session(
        async_sessionmaker(engine), asyncio.current_task
    ),
    "AsyncConnection": lambda engine: engine.connect(),
}


class Mishap(Exception):  # noqa: N818 - it is the test's own
    """What goes wrong in the caller's own code."""


# --- what a caller may do; each returns the tasks whose jobs must be there afterwards


def _commit(caller: Any, put: Put) -> list[str]:
    with caller.begin():
        put("a")
        put("b")
    return ["a", "b"]


def _first_statement(caller: Any, put: Put) -> list[str]:
    put("a")
    caller.commit()
    return ["a"]


def _after_another_statement(caller: Any, put: Put) -> list[str]:
    caller.execute(select(1))
    put("a")
    caller.commit()
    return ["a"]


def _rollback(caller: Any, put: Put) -> list[str]:
    put("a")
    caller.rollback()
    return []


def _close(caller: Any, put: Put) -> list[str]:
    put("a")
    caller.close()
    return []


def _raise(caller: Any, put: Put) -> list[str]:
    with suppress(Mishap), caller.begin():
        put("a")
        raise Mishap
    return []


def _rollback_then_commit(caller: Any, put: Put) -> list[str]:
    put("a")
    caller.rollback()
    put("b")
    caller.commit()
    return ["b"]


def _savepoint_rolled_back(caller: Any, put: Put) -> list[str]:
    with caller.begin():
        savepoint = caller.begin_nested()
        put("a")
        savepoint.rollback()
    return []


def _savepoint_raises(caller: Any, put: Put) -> list[str]:
    with caller.begin():
        put("a")
        with suppress(Mishap), caller.begin_nested():
            put("b")
            raise Mishap
        put("c")
    return ["a", "c"]


def _savepoint_released(caller: Any, put: Put) -> list[str]:
    with caller.begin(), caller.begin_nested():
        put("a")
    return ["a"]


def _savepoint_released_then_rollback(caller: Any, put: Put) -> list[str]:
    with caller.begin_nested():
        put("a")
    caller.rollback()
    return []


def _inner_released_outer_savepoint_rolled_back(caller: Any, put: Put) -> list[str]:
    with caller.begin():
        outer = caller.begin_nested()
        with caller.begin_nested():
            put("a")
        outer.rollback()
        with caller.begin_nested():
            put("b")
    return ["b"]


def _savepoint_refused_by_the_database(caller: Any, put: Put) -> list[str]:
    with caller.begin():
        put("a")
        with suppress(IntegrityError), caller.begin_nested():
            put("b")
            caller.execute(insert(Job).values(task=""))
        put("c")
    return ["a", "c"]


async def _a_commit(caller: Any, put: PutAsync) -> list[str]:
    async with caller.begin():
        await put("a")
        await put("b")
    return ["a", "b"]


async def _a_first_statement(caller: Any, put: PutAsync) -> list[str]:
    await put("a")
    await caller.commit()
    return ["a"]


async def _a_rollback(caller: Any, put: PutAsync) -> list[str]:
    await put("a")
    await caller.rollback()
    return []


async def _a_close(caller: Any, put: PutAsync) -> list[str]:
    await put("a")
    await caller.close()
    return []


async def _a_raise(caller: Any, put: PutAsync) -> list[str]:
    with suppress(Mishap):
        async with caller.begin():
            await put("a")
            raise Mishap
    return []


async def _a_savepoint_raises(caller: Any, put: PutAsync) -> list[str]:
    async with caller.begin():
        await put("a")
        with suppress(Mishap):
            async with caller.begin_nested():
                await put("b")
                raise Mishap
        await put("c")
    return ["a", "c"]


async def _a_savepoint_rolled_back(caller: Any, put: PutAsync) -> list[str]:
    async with caller.begin():
        savepoint = await caller.begin_nested()
        await put("a")
        await savepoint.rollback()
    return []


async def _a_savepoint_released_then_rollback(caller: Any, put: PutAsync) -> list[str]:
    async with caller.begin_nested():
        await put("a")
    await caller.rollback()
    return []


async def _a_savepoint_refused_by_the_database(caller: Any, put: PutAsync) -> list[str]:
    async with caller.begin():
        await put("a")
        with suppress(IntegrityError):
            async with caller.begin_nested():
                await put("b")
                await caller.execute(insert(Job).values(task=""))
        await put("c")
    return ["a", "c"]


@dataclass(frozen=True)
class Stories:
    """What callers do, in sync code and in code that awaits."""

    sync: Sequence[Story]
    native: Sequence[AsyncStory]


TRANSACTIONS = Stories(
    [
        _commit,
        _first_statement,
        _after_another_statement,
        _rollback,
        _close,
        _raise,
        _rollback_then_commit,
    ],
    [_a_commit, _a_first_statement, _a_rollback, _a_close, _a_raise],
)
SAVEPOINTS = Stories(
    [
        _savepoint_rolled_back,
        _savepoint_raises,
        _savepoint_refused_by_the_database,
        _savepoint_released,
        _savepoint_released_then_rollback,
        _inner_released_outer_savepoint_rolled_back,
    ],
    [
        _a_savepoint_rolled_back,
        _a_savepoint_raises,
        _a_savepoint_refused_by_the_database,
        _a_savepoint_released_then_rollback,
    ],
)


# --- and what must come of it


class Told:
    """Runs one story after the other on one connection, and checks what came of each."""

    def __init__(self, engine: Engine | AsyncEngine, heard: Heard, *, wakes: bool) -> None:
        """Expect in-process wake-ups if *wakes*."""
        self._engine, self._heard, self._wakes = engine, heard, wakes
        self._opened = connections_opened(engine)
        self._stored: list[str] = rows(engine.url, Job.task)

    def check(self, story: Any, tasks: list[str]) -> None:
        """Check that the jobs of *tasks* were added, that their workers were told, and no more."""
        self._stored += tasks
        assert (story, rows(self._engine.url, Job.task)) == (story, self._stored)
        assert (story, self._heard.notified()) in ((story, tasks), (story, None))
        # Nothing can be run after a bare connection's commit: NOTIFY alone tells of its jobs.
        wakes, self._heard.wakes = self._heard.wakes, 0
        assert (story, wakes) == (story, 1 if tasks and self._wakes else 0)
        assert (story, self._opened()) == (story, 1)


def run_stories(jobs: Jobs, stories: Stories) -> None:
    """Let every kind of caller live through every story."""
    if jobs.is_async:
        asyncio.run(_run_async(jobs.url, stories))
    else:
        _run_sync(jobs.url, stories)


def _run_sync(url: str, stories: Stories) -> None:
    for kind, made in SYNC.items():
        with open_engine(url, **ONE_CONNECTION) as engine, listening(engine) as heard:
            begin_by_hand(engine)
            told = Told(engine, heard, wakes=kind != "Connection")
            for story in stories.sync:
                with closing(made(engine)) as caller:
                    expected = story(caller, _put(caller))
                told.check((kind, story), expected)


async def _run_async(url: str, stories: Stories) -> None:
    for kind in ASYNC:
        async with open_async_engine(url, **ONE_CONNECTION) as engine:
            begin_by_hand(engine)
            with listening(engine) as heard:
                told = Told(engine, heard, wakes=kind != "AsyncConnection")
                for native in stories.native:
                    async with _opened(kind, engine) as caller:
                        put: PutAsync
                        put = getattr(caller, "enqueue", None) or partial(enqueue_async, caller)
                        expected = await native(caller, put)
                    told.check((kind, native), expected)
                if kind == "async_scoped_session":
                    continue  # it has no run_sync
                for story in stories.sync:
                    async with _opened(kind, engine) as caller:
                        expected = await caller.run_sync(_live, story)
                    told.check((kind, "run_sync", story), expected)


def _live(lent: Session | Connection, story: Story) -> list[str]:
    return story(lent, _put(lent))


def _put(caller: Any) -> Put:
    put: Put = getattr(caller, "enqueue", None) or partial(enqueue, caller)
    return put


@asynccontextmanager
async def _opened(kind: str, engine: AsyncEngine) -> AsyncGenerator[Any]:
    caller = ASYNC[kind](engine)
    if isinstance(caller, AsyncConnection):
        await caller.start()
    try:
        yield caller
    finally:
        await caller.close()
