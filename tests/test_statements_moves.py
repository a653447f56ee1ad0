"""SQL agrees with the table of the job's life: every status, event and guard, on real rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs._messages import Chore, Claim, Lease, Outcome, Renew, Settle, Sweep
from sqlalchemy_jobs.lifecycle import (
    FINISHED,
    MOVES,
    OUTCOMES,
    Event,
    Guard,
    IllegalMoveError,
    Status,
    advance,
)
from tests.rows import WORKER, Hand, Queue, foretold, open_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.every_postgres

ERROR = "ValueError: no"
DELAY = 90.0
RETENTION = 3600.0


@dataclass(frozen=True)
class Circumstances:
    """All that a guard may ask about, beyond the status."""

    come: bool = True  # run_at has come
    spent: bool = False  # no attempt is left
    expired: bool = False  # the lease ran out
    worker: str = WORKER  # who holds it
    attempt: int = 2  # which attempt the caller believes to hold
    old: bool = True  # finished longer ago than the retention

    def holds(self, guard: Guard) -> bool:
        """Whether the guard lets an event of WORKER's attempt 2 pass."""
        match guard:
            case Guard.NONE:
                return True
            case Guard.DUE:
                return self.come and not self.spent
            case Guard.SPENT:
                return self.come and self.spent
            case Guard.HOLDER:
                return self.worker == WORKER and self.attempt == 2
            case Guard.EXPIRED:
                return self.expired and not self.spent
            case Guard.EXPIRED_SPENT:
                return self.expired and self.spent
            case Guard.AGED:
                return self.old


def circumstances(status: Status) -> Iterator[Circumstances]:
    """Every combination that a row of *status* can be in."""
    yes_no = (False, True)
    match status:
        case Status.PENDING:
            for come, spent, attempt in itertools.product(yes_no, yes_no, (2, 3)):
                yield Circumstances(come=come, spent=spent, attempt=attempt)
        case Status.RUNNING:
            holders = [(WORKER, 2), ("host-2-xyz", 2), (WORKER, 1), (WORKER, 3)]
            for spent, expired, (worker, attempt) in itertools.product(yes_no, yes_no, holders):
                yield Circumstances(spent=spent, expired=expired, worker=worker, attempt=attempt)
        case _:
            for spent, old in itertools.product(yes_no, yes_no):
                yield Circumstances(spent=spent, old=old)


def put(queue: Queue, status: Status, given: Circumstances) -> Lease:
    """Write a row in these circumstances; returns what WORKER believes to hold."""
    columns: dict[str, Any] = {
        "status": str(status),
        "attempts": 2,
        "max_attempts": 2 if given.spent else 4,
        "run_at": -10 if given.come else 1000,
        "started_at": -20,
        "created_at": -9000,
        "updated_at": -2 * RETENTION if given.old and status in FINISHED else -RETENTION / 2,
        "payload": {"n": 1},
        "meta": {"tag": "x"},
        "priority": 1,
        "timeout_s": 5.0,
        "idempotency_key": "key",
        "last_error": "before",
        "errors": [{"attempt": 1, "at": "2020-01-01T00:00:00+00:00", "worker": "w", "error": "e"}],
    }
    if status is Status.RUNNING:
        columns["locked_by"] = given.worker
        columns["lease_expires_at"] = -5 if given.expired else 5
    return Lease(queue.add(**columns), given.attempt, task="a")


def settle(event: Event) -> Callable[[Hand, Lease], object]:
    """Return the command that reports *event*."""
    return lambda hand, lease: hand(
        Settle((Outcome(lease, event, delay=DELAY, error=ERROR),)),
    )


def cancel(hand: Hand, lease: Lease) -> object:
    """Cancel as `cancel()` does."""
    call = hand.queue.statements.cancel([lease.job_id])
    return hand.queue.connection.execute(*call).all()


def requeue(hand: Hand, lease: Lease) -> object:
    """Requeue as `requeue()` does."""
    call = hand.queue.statements.requeue([lease.job_id])
    return hand.queue.connection.execute(*call).all()


def enqueue(hand: Hand, lease: Lease) -> object:
    """Enqueue another job with the same key, and take it away again."""
    call = hand.queue.statements.enqueue(
        {"task": "a", "payload": "1", "idempotency_key": "key"}, None
    )
    for row in hand.queue.connection.execute(*call).all():
        hand.queue.run("DELETE FROM {jobs} WHERE id = :id", id=row[0])
    return None


# What is sent to the database, and the events of which it may make the one that is legal.
COMMANDS: dict[str, tuple[set[Event], Callable[[Hand, Lease], object]]] = {
    "enqueue": ({Event.ENQUEUE}, enqueue),
    "claim": ({Event.CLAIM, Event.EXHAUST}, lambda hand, _: hand(Claim(1))),
    "renew": ({Event.RENEW}, lambda hand, lease: hand(Renew((lease,)))),
    **{str(event): ({event}, settle(event)) for event in OUTCOMES},
    "cancel": ({Event.CANCEL}, cancel),
    "recover": ({Event.RECOVER, Event.BURY}, lambda hand, _: hand(Sweep(Chore.RECOVER))),
    "requeue": ({Event.REQUEUE}, requeue),
    "prune": ({Event.PRUNE}, lambda hand, _: hand(Sweep(Chore.PRUNE))),
}


def legal(status: Status, event: Event, given: Circumstances) -> bool:
    """Whether the table allows *event* here."""
    try:
        advance(status, event)
    except IllegalMoveError:
        return False
    return given.holds(MOVES[event].guard)


def test_every_event_is_walked() -> None:
    """The walk below knows a command for each event, and each legal move comes up in it."""
    assert set().union(*(events for events, _ in COMMANDS.values())) == set(Event)
    walked = {
        (status, event)
        for status, event in itertools.product(Status, Event)
        for given in circumstances(status)
        if legal(status, event, given)
    }
    assert walked == {(status, event) for event in Event for status in MOVES[event].source}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_sql_agrees_with_the_table(sync_engine: Engine, command: str) -> None:
    """A command changes a row exactly as the table says, and in an illegal cell nothing at all."""
    events, perform = COMMANDS[command]
    with open_queue(sync_engine) as queue:
        hand = Hand(
            queue,
            retain_succeeded=RETENTION,
            retain_failed=RETENTION,
            retain_cancelled=RETENTION,
        )
        for status, given in ((s, given) for s in Status for given in circumstances(s)):
            queue.clear()
            lease = put(queue, status, given)
            before = queue.row(lease.job_id)
            with queue.clocked() as now:
                perform(hand, lease)
            after = queue.rows().get(lease.job_id)
            happened = [event for event in events if legal(status, event, given)]
            assert len(happened) < 2, "the guards of one command exclude each other"
            if not happened:
                assert after == before, (status, given, "nothing may change")
                continue
            error = ERROR if happened[0] in OUTCOMES else None
            expected = foretold(before, happened[0], now[0], delay=DELAY, error=error)
            assert after == expected, (status, given, happened[0])
