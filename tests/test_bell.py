"""Whether a wake-up can be lost between enqueuers that are silent and workers that go to rest."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from sqlalchemy_jobs import Job, Tasks, Worker, enqueue
from sqlalchemy_jobs._bell import LONGEST_RETRY, MANY, NEVER, WARM_FOR, Bell
from sqlalchemy_jobs._channel import channel_of
from sqlalchemy_jobs._messages import (
    Claim,
    Claimed,
    Lease,
    ListenerChanged,
    Notified,
    Rest,
    Rested,
    Rouse,
    Tick,
)
from sqlalchemy_jobs._target import table_of
from tests.enqueue_tools import TAKE_ALL_MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from tests.conftest import Database

NOTHING = Claimed(())
FULL = Claimed((Lease(1, 1),), more=True)


def resting(now: float = 0.0) -> Bell:
    """A bell whose worker has gone to rest, all quiet."""
    bell = Bell()
    bell.handle([ListenerChanged(up=True)], now)
    bell.claiming(Claim(5))
    assert bell.handle([NOTHING], now)[1] == [Rest()]
    bell.handle([Rested(quiet=True)], now)
    return bell


# --- decisions ------------------------------------------------------------------------------------


def test_a_worker_rests_when_a_full_look_found_nothing_and_looks_again_under_the_mark() -> None:
    """The look after the mark is what sees the jobs of those who were silent before it."""
    bell = Bell()
    bell.handle([ListenerChanged(up=True)], 0.0)
    bell.claiming(Claim(5, full=False))
    assert bell.handle([NOTHING], 0.0) == ([NOTHING], [])
    bell.claiming(Claim(5, full=True))
    assert bell.handle([NOTHING], 0.0) == ([NOTHING], [Rest()])
    assert bell.handle([NOTHING], 0.1) == ([NOTHING], []), "it is asked once"
    assert bell.handle([Rested(quiet=True)], 0.2) == ([Notified()], [])
    assert bell.at == NEVER


def test_without_a_listener_nobody_rests() -> None:
    """A worker that polls asks for no notifications."""
    bell = Bell()
    bell.claiming(Claim(5))
    assert bell.handle([NOTHING], 0.0) == ([NOTHING], [])


def test_silent_enqueuers_are_waited_for_with_growing_pauses() -> None:
    """While a transaction that saw no mark is open, the worker looks again and again."""
    bell = Bell()
    bell.handle([ListenerChanged(up=True)], 0.0)
    bell.claiming(Claim(5))
    bell.handle([NOTHING], 0.0)
    now, pauses = 0.0, []
    for _ in range(12):
        assert bell.handle([Rested(quiet=False)], now) == ([Notified()], [])
        pauses.append(bell.at - now)
        now = bell.at
        assert bell.handle([Tick()], now) == ([Tick()], [Rest()])
    assert [round(pause, 6) for pause in pauses] == sorted(round(pause, 6) for pause in pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] == pytest.approx(LONGEST_RETRY)


def test_a_claim_that_leaves_jobs_behind_ends_the_rest() -> None:
    """A worker that is full would not come for being told."""
    bell = resting()
    assert bell.handle([FULL], 1.0)[1] == [Rouse()]
    assert bell.handle([FULL], 1.0)[1] == []


def test_a_few_notifications_do_not_end_the_rest() -> None:
    """Jobs that trickle in cost their notification and nothing more."""
    bell = resting()
    for now in range(100):
        assert bell.handle([Notified(), Claimed((Lease(now, 1),))], now / 10)[1] == []


def test_many_notifications_end_the_rest_and_begin_a_time_of_looking() -> None:
    """When jobs pour in, looking by itself costs the writers less; then the worker rests again."""
    bell = resting()
    _, requests = bell.handle([Notified()] * (MANY + 1), 0.0)
    assert requests == [Rouse()]
    now, looks = 0.0, 0
    while now < 2 * WARM_FOR:
        now = bell.at
        passed, _ = bell.handle([Tick()], now)
        assert passed == [Tick(), Notified()]
        looks += 1
        bell.claiming(Claim(5))
        if bell.handle([NOTHING], now)[1] == [Rest()]:
            break
    assert WARM_FOR <= now < 1.2 * WARM_FOR
    assert 20 < looks < 60


def test_a_mark_that_comes_after_it_was_given_up_is_ignored() -> None:
    """An answer to a Rest that was followed by a Rouse says nothing about now."""
    bell = Bell()
    bell.handle([ListenerChanged(up=True)], 0.0)
    bell.claiming(Claim(5))
    bell.handle([NOTHING], 0.0)
    assert bell.handle([FULL], 0.0)[1] == [Rouse()]
    assert bell.handle([Rested(quiet=True)], 0.1) == ([], [])


def test_a_lost_listener_has_lost_the_mark_too() -> None:
    """When the listener is back, the worker looks, and asks for the mark again."""
    bell = resting()
    bell.handle([ListenerChanged(up=False)], 1.0)
    bell.claiming(Claim(5))
    assert bell.handle([NOTHING], 1.0)[1] == []
    bell.handle([ListenerChanged(up=True)], 2.0)
    assert bell.handle([NOTHING], 2.0)[1] == [Rest()]


# --- the protocol, every interleaving -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class World:
    """Two enqueuers and two workers, each at a step of its program, and the locks between them."""

    enqueuers: tuple[str, ...] = ("begin", "begin")
    tells: tuple[bool, ...] = (False, False)
    workers: tuple[str, ...] = ("look", "look")
    marked: tuple[bool, ...] = (False, False)
    quiet: tuple[bool, ...] = (False, False)
    told: tuple[bool, ...] = (False, False)
    done: tuple[bool, ...] = (False, False)  # the job of each enqueuer was seen by a worker


def changed(world: World, **changes: tuple[str, int, object]) -> World:
    """The world with one place of some of its tuples changed."""
    values: dict[str, Any] = {}
    for name, (_, place, value) in changes.items():
        values[name] = tuple(
            value if i == place else old for i, old in enumerate(getattr(world, name))
        )
    return replace(world, **values)


def steps(world: World, *, careless: str | None) -> Iterator[World]:
    """Every step that somebody can take next. *careless* leaves a rule out."""
    for i, step in enumerate(world.enqueuers):
        # Looking for the mark, taking the shared lock and committing are each one instant.
        if step == "begin":
            tells = any(world.marked)
            after = "commit" if tells else "lock"
            if careless == "no silent lock" and not tells:
                after = "commit without a lock"
            yield changed(world, enqueuers=("", i, after), tells=("", i, tells))
        elif step == "lock":
            after = "commit silently" if careless == "looks once" else "look again"
            yield changed(world, enqueuers=("", i, after))
        elif step == "look again":
            tells = any(world.marked)
            yield changed(world, enqueuers=("", i, "commit silently"), tells=("", i, tells))
        elif step.startswith("commit"):
            told = tuple(t or world.tells[i] for t in world.told)
            yield replace(changed(world, enqueuers=("", i, "done")), told=told)
    for i, step in enumerate(world.workers):
        if step == "look":
            committed = [e == "done" for e in world.enqueuers]
            seen = tuple(d or c for d, c in zip(world.done, committed, strict=True))
            after = "sleep" if world.marked[i] and world.quiet[i] else "mark"
            yield replace(changed(world, workers=("", i, after), told=("", i, False)), done=seen)
        elif step == "mark":
            silent = any(e in {"look again", "commit silently"} for e in world.enqueuers)
            if careless == "does not wait":
                silent = False
            after = "sleep" if careless == "does not look again" and not silent else "look"
            yield changed(
                world, workers=("", i, after), marked=("", i, True), quiet=("", i, not silent)
            )
        elif world.told[i]:  # it sleeps, and is woken
            yield changed(world, workers=("", i, "look"))


def lost(*, careless: str | None = None) -> bool:
    """Whether a world can be reached in which a job waits and everybody sleeps."""
    todo, seen = [World()], {World()}
    while todo:
        world = todo.pop()
        further = list(steps(world, careless=careless))
        if not further and not all(world.done):
            return True
        for other in further:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return False


def test_no_interleaving_loses_a_wake_up() -> None:
    """Whatever the order of their steps, no job waits while every worker sleeps untold."""
    assert not lost()


@pytest.mark.parametrize(
    "careless", ["no silent lock", "looks once", "does not wait", "does not look again"]
)
def test_every_rule_of_the_protocol_is_needed(careless: str) -> None:
    """Each rule left out loses a wake-up, so the search above would have found it."""
    assert lost(careless=careless)


# --- on a real database -------------------------------------------------------------------------


@pytest.mark.drivers("psycopg")
@pytest.mark.every_postgres
def test_no_job_is_left_whenever_its_transaction_commits(
    database: Database, sync_engine: Engine
) -> None:
    """Jobs of transactions of any length start soon, though the next look would be hours away."""
    assert database.name
    tasks = Tasks()
    ran: list[int] = []
    tasks.register(lambda job: ran.append(job.payload), "note")
    count = 60

    def enqueue_some(number: int) -> None:
        dice = random.Random(number)  # noqa: S311 - dice, not keys
        for place in range(count):
            # A connection of its own: what is enqueued through one wakes nobody in the process.
            with sync_engine.begin() as connection:
                enqueue(connection, "note", number * count + place)
                time.sleep(dice.choice((0.0, 0.0, 0.01, 0.1)))
            time.sleep(dice.choice((0.0, 0.0, 0.02, 0.3)))

    with ExitStack() as stack:
        for concurrency in (1, 5):
            worker = Worker(
                sync_engine, tasks, concurrency=concurrency, safety_interval=timedelta(hours=1)
            )
            stack.enter_context(worker)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(enqueue_some, range(4)))
        until = time.monotonic() + 30
        while len(ran) < 4 * count and time.monotonic() < until:
            time.sleep(0.05)
    assert sorted(ran) == list(range(4 * count))


@pytest.mark.drivers("psycopg")
def test_an_enqueuer_notifies_only_while_somebody_rests(
    database: Database, sync_engine: Engine
) -> None:
    """Without a resting worker a commit sends nothing; with one it does."""
    channel = channel_of(sync_engine, table_of(Job))
    with database.cluster.connect(database.name) as listener:
        listener.execute(f'LISTEN "{channel}"'.encode())
        with sync_engine.begin() as connection:
            enqueue(connection, "quiet")
        listener.execute(TAKE_ALL_MARKS, [channel])
        with sync_engine.begin() as connection:
            enqueue(connection, "loud")
        heard = [notice.payload for notice in listener.notifies(timeout=30, stop_after=1)]
    assert heard == ["loud"]


@pytest.mark.drivers("psycopg")
def test_an_enqueuer_keeps_no_lock_beyond_its_transaction(sync_engine: Engine) -> None:
    """A pooled connection goes back without the locks of looking for a mark."""
    with sync_engine.connect() as connection:
        with connection.begin():
            enqueue(connection, "note")
            held = connection.scalar(text(ADVISORY))
        assert held == 1, "the silent one, until the commit"
        assert connection.scalar(text(ADVISORY)) == 0


ADVISORY = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
