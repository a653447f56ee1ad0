"""The life of a job, as one table.

Two rules. Everything that decides which change of status is legal stands in :data:`MOVES`; and
this module knows neither SQL nor workers. The statements are generated from the table, the
diagram in the documentation too, and a test walks every status, event and guard on a real
database and compares the outcome with :func:`advance`.

=========  =======================================================================================
pending    Waiting for its time and for a free slot. Also between two attempts.
running    An attempt holds it by a lease. Ends by an outcome or when the lease runs out.
succeeded  The handler returned. Kept for the retention of succeeded jobs.
failed     Attempts are spent, or the handler said that trying again is pointless. The dead
           letter: it stays for people to look at and may be requeued.
cancelled  Somebody called it off. Kept for the retention of cancelled jobs.
=========  =======================================================================================

``attempts`` never goes down: (worker, attempt) is the fence that keeps a worker which lost its
lease from writing, and a number used twice would let an old answer end a new attempt. Giving an
attempt back therefore raises ``max_attempts`` by one instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class Status(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What can happen to a job."""

    ENQUEUE = "enqueue"
    CLAIM = "claim"
    EXHAUST = "exhaust"
    RENEW = "renew"
    SUCCEED = "succeed"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    FAIL = "fail"
    CANCEL = "cancel"
    RECOVER = "recover"
    BURY = "bury"
    REQUEUE = "requeue"
    PRUNE = "prune"


class Guard(StrEnum):
    """What must hold, beyond the status, for an event to happen."""

    NONE = "none"
    DUE = "due"  # run_at has come and attempts are left
    SPENT = "spent"  # run_at has come and no attempt is left
    HOLDER = "holder"  # the caller is the worker and the attempt that hold the lease
    EXPIRED = "expired"  # the lease ran out and attempts are left
    EXPIRED_SPENT = "expired_spent"  # the lease ran out and no attempt is left
    AGED = "aged"  # finished longer ago than the retention of its status


class Hold(StrEnum):
    """What an event does to the lease."""

    KEEP = "keep"
    TAKE = "take"
    EXTEND = "extend"
    DROP = "drop"


class RunAt(StrEnum):
    """What an event does to the time before which the job must not run."""

    KEEP = "keep"
    NOW = "now"
    GIVEN = "given"  # now plus the delay that comes with the event


class Errors(StrEnum):
    """What an event does to the record of errors."""

    KEEP = "keep"
    APPEND = "append"


class Allowance(StrEnum):
    """What an event does to ``max_attempts``."""

    KEEP = "keep"
    SETTLE = "settle"  # a null becomes the task's own bound
    GIVE_BACK = "give_back"  # one more, so that this attempt costs nothing
    AT_LEAST_ONE_MORE = "at_least_one_more"  # an operator's second chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One row of the table: from where, to where, under which guard, and what changes."""

    source: frozenset[Status]
    target: Status | None  # None: the row is deleted
    guard: Guard = Guard.NONE
    counts: bool = False  # attempts + 1
    allowance: Allowance = Allowance.KEEP
    lease: Hold = Hold.KEEP
    run_at: RunAt = RunAt.KEEP
    errors: Errors = Errors.KEEP
    wakes: bool = False  # workers are notified, for the job may be due at once


def _move(source: str, target: Status | None, **changes: object) -> Move:
    return Move(
        source=frozenset(Status(name) for name in source.split()),
        target=target,
        **changes,  # type: ignore[arg-type]
    )


MOVES: Final[Mapping[Event, Move]] = MappingProxyType(
    {
        Event.ENQUEUE: _move("", Status.PENDING, run_at=RunAt.GIVEN, wakes=True),
        Event.CLAIM: _move(
            "pending",
            Status.RUNNING,
            guard=Guard.DUE,
            counts=True,
            allowance=Allowance.SETTLE,
            lease=Hold.TAKE,
        ),
        # A row that people edited, or whose bound was lowered: it would eat slots for ever.
        Event.EXHAUST: _move("pending", Status.FAILED, guard=Guard.SPENT, errors=Errors.APPEND),
        Event.RENEW: _move("running", Status.RUNNING, guard=Guard.HOLDER, lease=Hold.EXTEND),
        Event.SUCCEED: _move("running", Status.SUCCEEDED, guard=Guard.HOLDER, lease=Hold.DROP),
        Event.RETRY: _move(
            "running",
            Status.PENDING,
            guard=Guard.HOLDER,
            lease=Hold.DROP,
            run_at=RunAt.GIVEN,
            errors=Errors.APPEND,
            wakes=True,
        ),
        Event.SNOOZE: _move(
            "running",
            Status.PENDING,
            guard=Guard.HOLDER,
            allowance=Allowance.GIVE_BACK,
            lease=Hold.DROP,
            run_at=RunAt.GIVEN,
            wakes=True,
        ),
        Event.RELEASE: _move(
            "running",
            Status.PENDING,
            guard=Guard.HOLDER,
            allowance=Allowance.GIVE_BACK,
            lease=Hold.DROP,
            run_at=RunAt.NOW,
            wakes=True,
        ),
        Event.FAIL: _move(
            "running",
            Status.FAILED,
            guard=Guard.HOLDER,
            lease=Hold.DROP,
            errors=Errors.APPEND,
        ),
        # Ending a running job takes the lease away; its worker learns it at the next renewal.
        Event.CANCEL: _move("pending running", Status.CANCELLED, lease=Hold.DROP),
        # No further back-off: the lease that had to run out first was the wait.
        Event.RECOVER: _move(
            "running",
            Status.PENDING,
            guard=Guard.EXPIRED,
            lease=Hold.DROP,
            run_at=RunAt.NOW,
            errors=Errors.APPEND,
            wakes=True,
        ),
        Event.BURY: _move(
            "running",
            Status.FAILED,
            guard=Guard.EXPIRED_SPENT,
            lease=Hold.DROP,
            errors=Errors.APPEND,
        ),
        Event.REQUEUE: _move(
            "failed cancelled",
            Status.PENDING,
            allowance=Allowance.AT_LEAST_ONE_MORE,
            run_at=RunAt.NOW,
            wakes=True,
        ),
        Event.PRUNE: _move("succeeded failed cancelled", None, guard=Guard.AGED),
    }
)

UNFINISHED: Final = frozenset({Status.PENDING, Status.RUNNING})
FINISHED: Final = frozenset(Status) - UNFINISHED
OUTCOMES: Final = frozenset(
    event
    for event, move in MOVES.items()
    if move.guard is Guard.HOLDER and move.target is not Status.RUNNING
)
"""The events that end an attempt and that only its holder may report."""

DEFAULT_MAX_ATTEMPTS: Final = 3
KEPT_ERRORS: Final = 20


class IllegalMoveError(ValueError):
    """The table has no such move."""


def advance(status: Status, event: Event) -> Status | None:
    """Return the status after *event*; ``None`` if the row is gone.

    Raises :class:`IllegalMoveError` if the event cannot happen in *status*.
    """
    move = MOVES[event]
    if status not in move.source:
        message = f"a {status} job cannot {event}"
        raise IllegalMoveError(message)
    return move.target
