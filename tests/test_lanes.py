"""The connections that a worker has of its own, and what becomes of work when one is given up."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from sqlalchemy_jobs import _lane, _lane_async
from sqlalchemy_jobs._connections import autocommit, own_engine
from tests.engines import open_async_engine
from tests.workers import wait_until

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine


class Door:
    """Lets connections be made only while it is open."""

    def __init__(self, engine: Engine) -> None:
        """Open it."""
        self.open = threading.Event()
        self.open.set()
        self.knocked = threading.Event()
        event.listen(engine, "do_connect", self._wait)

    def _wait(self, *_: Any) -> None:
        self.knocked.set()
        assert self.open.wait(30)

    def close(self) -> None:
        """Hold up the next connection."""
        self.knocked.clear()
        self.open.clear()


def breaks(_: Connection) -> None:
    """End the connection of a lane, so that it makes another for what follows."""
    raise ConnectionError


@pytest.mark.drivers("psycopg")
def test_work_that_is_given_up_is_not_begun(sync_engine: Engine) -> None:
    """Who stopped waiting while a lane connected gets nothing done: nobody would run its jobs."""
    door = Door(sync_engine)
    begun: list[str] = []
    answers: list[Any] = []
    lane = _lane.Lane(own_engine(sync_engine), autocommit, "a lane")
    lane.submit(breaks, answers.append)
    wait_until(lambda: answers)
    door.close()
    lane.submit(lambda _: begun.append("claim"), answers.append)
    assert door.knocked.wait(30)
    lane.abandon()
    door.open.set()
    lane._server.join(30)
    assert not lane._server.is_alive()
    assert begun == []
    assert len(answers) == 1


@pytest.mark.drivers("psycopg")
def test_what_waits_behind_work_that_hangs_is_handed_back(sync_engine: Engine) -> None:
    """A renewal that waits for a sweep's connection goes on with the next one."""
    hangs = threading.Event()
    answers: list[Any] = []

    def hang(connection: Connection) -> None:
        hangs.set()
        connection.execute(text("SELECT pg_sleep(60)"))

    lane = _lane.Lane(own_engine(sync_engine), autocommit, "a lane")
    lane.submit(hang, answers.append)
    lane.submit(lambda connection: connection.scalar(text("SELECT 7")), answers.append)
    assert hangs.wait(30)
    (waiting,) = lane.abandon()
    following = _lane.Lane(own_engine(sync_engine), autocommit, "another lane", early=True)
    following.submit(*waiting)
    wait_until(lambda: answers)
    following.close()
    assert answers == [7]


@pytest.mark.drivers("asyncpg", "psycopg_async")
async def test_an_async_lane_hands_back_what_waits_too(async_engine: AsyncEngine) -> None:
    """The same on an event loop."""
    hangs, answered = asyncio.Event(), asyncio.Event()
    answers: list[Any] = []

    def hang(connection: Connection) -> None:
        hangs.set()
        connection.execute(text("SELECT pg_sleep(60)"))

    def answer(found: Any) -> None:
        answers.append(found)
        answered.set()

    async with open_async_engine(async_engine.url) as engine:
        own = [AsyncEngine(own_engine(engine.sync_engine)) for _ in range(2)]
        lane = _lane_async.Lane(own[0], autocommit, "a lane")
        lane.submit(hang, answer)
        lane.submit(lambda connection: connection.scalar(text("SELECT 7")), answer)
        await asyncio.wait_for(hangs.wait(), 30)
        (waiting,) = lane.abandon()
        following = _lane_async.Lane(own[1], autocommit, "another lane", early=True)
        following.submit(*waiting)
        await asyncio.wait_for(answered.wait(), 30)
        await following.close()
        await lane.close()
    assert answers == [7]
