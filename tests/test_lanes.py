"""The connections that a worker has of its own, and what becomes of work when one is given up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from sqlalchemy_jobs import _lane
from sqlalchemy_jobs._connections import autocommit, own_engine
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
